"""The W&B sink on the real client: neither the trainer's rows nor ours are lost or moved."""

from __future__ import annotations

import gzip
import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

wandb = pytest.importorskip("wandb")

from rl_staleness import StalenessCallback  # noqa: E402
from rl_staleness.integrations import wandb as integration  # noqa: E402
from rl_staleness.integrations.wandb import AXIS, HISTOGRAM, WandbSink, active_sink  # noqa: E402
from rl_staleness.sinks import Sink  # noqa: E402
from rl_staleness.staleness import LOGGED, StepStaleness, Versions, measure  # noqa: E402
from tests.wandb_files import RunFile  # noqa: E402
from tests.wandb_stub import StubServer  # noqa: E402

STEPS = 12


def numbers(step: int, tokens_by_age: dict[int, int] | None = None) -> StepStaleness:
    """A step's numbers; the batch age is another one at every step."""
    at = 1000
    if tokens_by_age is None:
        tokens_by_age = {0: 100, 1: step}
    return measure(
        {at: {(at - age, at - age): count for age, count in tokens_by_age.items()}},
        {},
        arrived=sum(at * count for count in tokens_by_age.values()),
        refit_versions=Versions(),
        late_updates=0,
        complete=True,
        step=step,
        version=at,
        spanning_calls=0,
        violations=0,
        dropped_tokens=0,
        refit_seconds=0.5,
    )


@pytest.fixture(autouse=True)
def own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test touches the user's files or leaves a run open."""
    for name in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.chdir(tmp_path)
    yield
    if wandb.run is not None:
        wandb.run.finish()


def settings(**more: Any) -> Any:
    """For a quiet run; never shared between runs, `reinit` leaks through it."""
    return wandb.Settings(
        silent=True, console="off", x_disable_stats=True, x_disable_machine_info=True, **more
    )


def new_run(mode: str = "offline", *, reinit: str | None = None, **more: Any) -> Any:
    """A run in the current folder."""
    return wandb.init(project="p", mode=mode, dir=os.getcwd(), reinit=reinit, settings=settings(), **more)


def online(stub: StubServer, *, mode: str = "online", **more: Any) -> Any:
    """A run on the stub."""
    own = settings(base_url=stub.url, api_key="0" * 40)
    return wandb.init(project="p", entity="e", mode=mode, dir=os.getcwd(), settings=own, **more)


@pytest.fixture
def stub() -> Iterator[StubServer]:
    """A W&B server of the test's own."""
    server = StubServer()
    yield server
    if wandb.run is not None:  # while it answers
        wandb.run.finish()
    server.stop()


def settle(sink: WandbSink) -> None:
    """Let the sink's thread finish what it was given."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        known = sum(w.taken + len(w.backlog) for w in sink._writers) + len(sink._waiting)
        if known == sink._logged:
            return
        time.sleep(0.001)
    raise AssertionError("the sink's thread is stuck")


def close(sink: WandbSink, trace: str | None = None, timeout: float = 20.0) -> str | None:
    """Close the sink."""
    return sink.close(trace=trace, timeout=timeout)


def points(rows: list[dict[str, Any]]) -> list[tuple[int, float]]:
    """Our rows: where on our axis, and the batch age there."""
    return [(row[AXIS], row["staleness/batch_age"]) for row in rows if AXIS in row]


def expected(steps: range = range(1, STEPS + 1)) -> list[tuple[int, float]]:
    """The same, as it has to be."""
    return [(step, numbers(step).batch_age or 0.0) for step in steps]


# The matrix: how trainers log. Each notes the rows that it expects to find, with their place.

Log = Callable[[Any, int], list[dict[str, Any]]]


def hf(run: Any, k: int) -> list[dict[str, Any]]:
    run.log({"train/loss": k, "train/global_step": k})
    return [{"train/loss": k, "train/global_step": k}]


def hf5(run: Any, k: int) -> list[dict[str, Any]]:
    return hf(run, k) if k % 5 == 0 else []


def hf3(run: Any, k: int) -> list[dict[str, Any]]:
    rows = [{f"train/{part}": k, "train/global_step": k} for part in ("loss", "eval", "time")]
    for row in rows:
        run.log(row)
    return rows


def ex(run: Any, k: int) -> list[dict[str, Any]]:
    run.log({"loss": k}, step=k)
    return [{"loss": k, "_step": k}]


def ex5(run: Any, k: int) -> list[dict[str, Any]]:
    return ex(run, k) if k % 5 == 0 else []


def nemo(run: Any, k: int) -> list[dict[str, Any]]:
    run.log({"loss": k}, step=k, commit=False)
    run.log({"time": k}, step=k, commit=False)
    run.log({"last": k}, step=k, commit=True)
    return [{"loss": k, "time": k, "last": k, "_step": k}]


def areal(run: Any, k: int) -> list[dict[str, Any]]:
    rows = []
    for n in (2 * k, 2 * k + 1):
        run.log({"loss": n}, step=n)
        rows.append({"loss": n, "_step": n})
    return rows


def roll4(run: Any, k: int) -> list[dict[str, Any]]:
    if k % 4:
        return []
    run.log({"reward": k}, step=k // 4)
    return [{"reward": k, "_step": k // 4}]


def tok(run: Any, k: int) -> list[dict[str, Any]]:
    run.log({"loss": k}, step=4096 * k)
    return [{"loss": k, "_step": 4096 * k}]


PATTERNS = (hf, hf5, hf3, ex, ex5, nemo, areal, roll4, tok)
GLOBBED = (hf, hf5, hf3)


def define_glob(run: Any, axis: str) -> None:
    """What Hugging Face and Lightning do."""
    run.define_metric(axis)
    run.define_metric("*", step_metric=axis, step_sync=True)


def holds(row: dict[str, Any], part: dict[str, Any]) -> bool:
    return part.items() <= row.items()


@pytest.mark.parametrize("pace", ["settled", "hasty"])
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda p: p.__name__)
def test_no_row_is_lost_or_moved(pattern: Log, before: bool, pace: str) -> None:
    """However a trainer logs: its rows are where they would be without us, ours are all there."""
    run = new_run()
    if pattern in GLOBBED:
        define_glob(run, "train/global_step")
    sink = WandbSink()
    theirs = []
    for k in range(1, STEPS + 1):
        if before:
            sink.log(numbers(k))
        if pace == "settled":
            settle(sink)
        theirs += pattern(run, k)
        if not before:
            sink.log(numbers(k))
    assert close(sink) is None
    run.finish()
    file = RunFile(run.sync_dir)
    assert sorted(points(file.rows)) == expected()
    assert [row for row in theirs if sum(holds(r, row) for r in file.rows) != 1] == []
    assert file.summary["staleness/batch_age"] == expected()[-1][1]
    assert file.summary[AXIS] == STEPS
