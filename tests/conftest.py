"""Fixtures that several tests share, and the seed of what they draw.

Every run draws a new seed and says it, before the tests and after failed ones; what is drawn at
random comes from it, so that RL_STALENESS_SEED set to the same number draws the same again, as
`.ci/run` does.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.watermark import Served

# Set here, before any test module reads it, and for the processes that tests start.
SEED = int(os.environ.setdefault("RL_STALENESS_SEED", str(secrets.randbelow(2**32))))


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Hypothesis draws from the seed too, also in tests that do not name it.

    Where an environment variable says continuous integration it would draw the same at every run.
    """
    if find_spec("hypothesis") is None:  # verl's environment
        return
    from hypothesis import settings

    if settings.get_current_profile_name() == "ci":
        settings.register_profile("drawn anew", settings.get_profile("ci"), derandomize=False)
        settings.load_profile("drawn anew")
    if config.getoption("hypothesis_seed", None) is None:
        config.option.hypothesis_seed = str(SEED)


def pytest_report_header() -> str:
    """Say the seed before the tests."""
    return f"seed: RL_STALENESS_SEED={SEED}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say it again where something failed: quiet runs have no header."""
    if terminalreporter.stats.keys() & {"failed", "error"}:
        terminalreporter.write_line(f"to draw the same again: RL_STALENESS_SEED={SEED}")


@pytest.fixture(scope="module", autouse=True)
def wandb_anew() -> Iterator[None]:
    """W&B reads its settings once in a process: the next module has other ones."""
    yield
    if "wandb" in sys.modules:
        sys.modules["wandb"].teardown()


@pytest.fixture(scope="session")
def watermark_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the watermark model."""
    pytest.importorskip("vllm")
    from tests.watermark import write_model

    return write_model(tmp_path_factory.mktemp("watermark"))


@pytest.fixture(scope="session")
def served(watermark_model: Path) -> Iterator[Served]:
    """One engine for the whole session: a start takes half a minute."""
    from tests.watermark import Served

    served = Served(watermark_model)
    yield served
    served.stop()
