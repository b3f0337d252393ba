"""Every run of the tests draws anew, and a run that failed can be repeated by the seed it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("hypothesis")

ROOT = Path(__file__).parent.parent
DRAWS = """
from hypothesis import given, settings, strategies as st

drawn = []

@settings(database=None, max_examples=5)
@given(st.integers(0, 2**60))
def test_draw(number):
    drawn.append(number)

def test_fail():
    assert not drawn, f"drawn {drawn}"
"""


def said(folder: Path, **variables: str) -> tuple[str, str]:
    """The seed that a quiet failing run with these variables says, and what its test drew."""
    (folder / "test_draws.py").write_text(DRAWS)
    unset = {"RL_STALENESS_SEED", "CI"}
    environment = {k: v for k, v in os.environ.items() if k not in unset} | variables
    flags = ["-q", "-p", "tests.conftest", "-p", "no:cacheprovider", "-c", os.devnull]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *flags, f"--rootdir={folder}", str(folder)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    seeds = re.findall(r"RL_STALENESS_SEED=(\d+)", run.stdout)
    draws = re.findall(r"drawn (\[[0-9, ]+\])", run.stdout)
    assert seeds, run.stdout + run.stderr
    assert draws, run.stdout + run.stderr
    return seeds[0], draws[0]


@pytest.mark.parametrize("where", [{}, {"CI": "true"}], ids=["at a desk", "in CI"])
def test_each_run_draws_anew_and_its_seed_repeats_it(where: dict[str, str], tmp_path: Path) -> None:
    """Two runs draw different numbers; a third, with the seed of the first, draws its again."""
    first, second = said(tmp_path, **where), said(tmp_path, **where)
    assert first[0] != second[0]
    assert first[1] != second[1]
    assert first == said(tmp_path, RL_STALENESS_SEED=first[0], **where)
