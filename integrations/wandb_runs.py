"""What the commands do with a W&B run: bring files and steps to it, fetch them from it.

A run on the server is named ENTITY/PROJECT/RUN. One on this disk is named by its folder, and what
is added to it stands in another folder beside it, for ``wandb sync`` to bring both.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from rl_staleness.artifacts import PACKED, pack
from rl_staleness.attachments import Job
from rl_staleness.destinations import DestinationError, Fetched, Logged, in_scratch
from rl_staleness.integrations.wandb_files import TYPE, attach
from rl_staleness.integrations.wandb_offline import OfflineRun
from rl_staleness.integrations.wandb_rows import AXIS, HISTOGRAM, declare, row_of
from rl_staleness.integrations.wandb_targets import NOTED, Target, existing, made_for, parts_of
from rl_staleness.printable import printable
from rl_staleness.replay import Origin, origin_of, timed_steps

__all__ = ["fetch", "fetch_trace", "replay", "upload"]

DRAWING_SECONDS = 3600.0

PARTS = "values", "bins"
"""Of a histogram."""


def upload(trace: str, *, run: str) -> str:
    """Log a trace, its report and its picture as an artifact of a run; once is enough.

    Returns:
        What was done, in one line.

    Raises:
        DestinationError: it cannot be done; the message says why in one line.
        TraceError, OSError: the trace cannot be read.
    """
    origin_of(trace)
    with _told(run) as wandb:
        return _brought(wandb, trace, existing(wandb, run), with_steps=False)


def replay(trace: str, *, run: str | None) -> str:
    """Bring every step that the run has not, with its time, then the files; once and only once.

    Args:
        run: default one that is made for this trace, or was by an earlier replay; it goes where
            ``wandb.init()`` puts runs, to the disk with ``WANDB_MODE=offline``.

    Returns:
        What was done, in one line.

    Raises:
        DestinationError: it cannot be done; another replay goes on where this one stopped.
        TraceError, OSError: the trace cannot be read.
    """
    origin = origin_of(trace)
    with _told(run or "of this trace") as wandb:
        if run is not None:
            return _brought(wandb, trace, existing(wandb, run), with_steps=True)
        return _brought(wandb, trace, made_for(wandb, origin), with_steps=True, origin=origin)


def fetch(run: str, folder: str) -> Fetched:
    """Fetch a run's trace into the folder, or where it has none, what it logged of its steps.

    Raises:
        DestinationError: it cannot be done, or the run has neither.
    """
    with _told(run) as wandb:
        if os.path.isdir(run):
            parts = parts_of(run)
            trace = _trace_in(parts)
            rows = [row for part in parts for row in part.rows] if trace is None else []
        else:
            there = wandb.Api().run(run)
            trace = _trace_of(there, folder)
            rows = list(there.scan_history()) if trace is None else []
    if trace is not None:
        return trace
    logged = {row[AXIS]: _logged(row) for row in rows if AXIS in row}
    if not logged:
        raise DestinationError(f"W&B run {run}: it has no trace and no staleness rows")
    return [logged[step] for step in sorted(logged)]


def fetch_trace(run: str, folder: str) -> str | None:
    """Fetch a run's trace into the folder; None: it has none. Errors are those of `upload`."""
    with _told(run) as wandb:
        if os.path.isdir(run):
            return _trace_in(parts_of(run))
        return _trace_of(wandb.Api().run(run), folder)


def _trace_in(parts: list[OfflineRun]) -> str | None:
    """The newest trace of a run on this disk."""
    for artifact in reversed([artifact for part in parts for artifact in part.artifacts]):
        if os.path.isfile(artifact.get(PACKED, "")):
            return artifact[PACKED]
    return None


def _trace_of(run: Any, folder: str) -> str | None:
    """The newest trace of a run on the server, fetched into the folder."""
    found = [artifact for artifact in run.logged_artifacts() if artifact.type == TYPE]
    if not found:
        return None
    newest = max(found, key=lambda artifact: str(artifact.created_at))
    return str(newest.get_entry(PACKED).download(folder))


def _brought(
    wandb: Any, trace: str, target: Target, *, with_steps: bool, origin: Origin | None = None
) -> str:
    """Bring what the target has not; what was done."""
    with in_scratch() as folder:
        digest = pack(trace, folder).sha256
    has_files = digest in target.attached
    missing = sum((_steps_of(trace) - target.steps).values()) if with_steps else 0
    if has_files and not missing:
        what = "all steps and files" if with_steps else "its files"
        return f"W&B run {target.name}: {what} were there; nothing is changed"
    said: list[str] = []
    with _opened(wandb, target) as run:
        noted: dict[str, object] = {"attached": sorted({*target.attached, digest})}
        if origin is not None:
            noted |= {"replay_of": printable(origin.run, longest=1000), "started": origin.started}
        if missing:
            declare(run)
            _log_missing(wandb, run, trace, target)
            said.append(f"{missing} steps brought")
        elif with_steps:
            said.append("all steps were there")
        lacking: Mapping[str, str] = {}
        if not has_files:
            deadline = time.monotonic() + DRAWING_SECONDS
            lacking = attach(wandb, Job(run, trace, True, deadline))
            said += [f"{name} is not attached ({why})" for name, why in lacking.items()] or [
                "trace, report and picture attached"
            ]
        if lacking:
            del noted["attached"]
        run.config.update({NOTED: noted}, allow_val_change=True)
        where = Path(run.sync_dir)
    if target.next_row is not None:
        said.append(f"it is in {where}, for `wandb sync`")
    if target.warning is not None:
        said.append(target.warning)
    return f"W&B run {target.name}: {'; '.join(said)}"


def _log_missing(wandb: Any, run: Any, trace: str, target: Target) -> None:
    """Log rows as the sink would have, each with the time of its step and committed at once."""
    there = target.steps.copy()
    place = target.next_row
    newest = last = None
    for seconds, step in timed_steps(trace):
        if newest is None or step.step >= newest.step:
            newest = step
        if there[step.step] > 0:
            there[step.step] -= 1
            continue
        row, _ = row_of(step, wandb.Histogram)
        run.log({**row, "_timestamp": seconds}, step=place, commit=True)
        place = None if place is None else place + 1
        last = step
    if newest is not None and newest is not last:  # the summary shows the last row
        run.summary.update(row_of(newest, wandb.Histogram)[0])


def _steps_of(trace: str) -> Counter[int]:
    return Counter(step.step for _, step in timed_steps(trace))


def _logged(row: Mapping[str, Any]) -> Logged:
    """A row as it was read; the ages are exact where every bin holds one."""
    nested: Mapping[str, Any] = row.get(HISTOGRAM) or {}
    parts = {part: nested.get(part) or row.get(f"{HISTOGRAM}.{part}") for part in PARTS}
    counts: list[int] = parts["values"] or []
    edges: list[float] = parts["bins"] or []
    ages: dict[int, int] = {}
    if len(edges) > 1 and edges[1] - edges[0] == 1:
        ages = {int(age): count for age, count in zip(edges, counts, strict=False) if count}
    metrics = {k: v for k, v in row.items() if k.startswith("staleness/")}
    numbers = {k: float(v) for k, v in metrics.items() if isinstance(v, int | float)}
    return Logged(int(row[AXIS]), numbers, ages)


@contextmanager
def _opened(wandb: Any, target: Target) -> Generator[Any]:
    """The run, gone on with, and finished as it was."""
    settings = wandb.Settings(
        silent=True, console="off", x_disable_stats=True, x_disable_machine_info=True
    )
    run = wandb.init(settings=settings, **target.init)
    try:
        yield run
    except BaseException:
        run.finish(exit_code=1)
        raise
    run.finish(exit_code=target.exit_code)


@contextmanager
def _told(run: str) -> Generator[Any]:
    """Whatever W&B raises becomes one line."""
    try:
        wandb: Any = import_module("wandb")
        wandb.Histogram  # noqa: B018  # a folder wandb/ of old runs imports as well
    except (ImportError, AttributeError) as error:
        raise DestinationError(
            "wandb is not installed: pip install 'rl-staleness[wandb]'"
        ) from error
    try:
        yield wandb
    except wandb.errors.Error as error:
        raise DestinationError(f"W&B run {run}: {type(error).__name__}: {error}") from error
