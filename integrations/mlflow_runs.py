"""What the commands do with an MLflow run: bring files and steps to it, fetch them from it."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any

from rl_staleness.artifacts import PACKED, pack
from rl_staleness.attachments import Job
from rl_staleness.destinations import DestinationError, Fetched, Logged, in_scratch
from rl_staleness.integrations.mlflow_files import FOLDER, attach, is_attached
from rl_staleness.integrations.mlflow_points import (
    BATCH,
    DEFINITIONS,
    KEYS,
    Point,
    Run,
    Summary,
    client_of,
    milliseconds,
    one_line,
    points_of,
    refused_of,
)
from rl_staleness.printable import printable
from rl_staleness.replay import Origin, origin_of
from rl_staleness.resume import counted_steps

__all__ = ["fetch", "fetch_trace", "replay", "upload"]

ORIGIN = "staleness.replay_of"
"""The tag of a run that `replay` made: what identifies the trace's run."""

DRAWING_SECONDS = 3600.0

SWITCHES = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}
"""Of the environment: MLflow has no others."""

_STATUS = {"finished": "FINISHED", None: "KILLED"}
"""Of a run that `replay` made, by how its trace ends; otherwise FAILED."""


def upload(trace: str, *, run: str, tracking_uri: str | None) -> str:
    """Attach a trace, its report and its picture to a run; a second time changes nothing.

    Returns:
        What was done, in one line.

    Raises:
        DestinationError: it cannot be done; the message says why in one line.
        TraceError, OSError: the trace cannot be read.
    """
    origin_of(trace)
    with _told(run):
        where = _existing(run, tracking_uri)
        done = _attached(where, trace)
        return f"MLflow run {run}: {done or 'its files were there; nothing is changed'}"


def replay(trace: str, *, run: str | None, tracking_uri: str | None) -> str:
    """Bring every step that the run has not, with its time, then the files; once and only once.

    Args:
        run: default one that is made for this trace, or was by an earlier replay.

    Returns:
        What was done, in one line.

    Raises:
        DestinationError: it cannot be done; another replay goes on where this one stopped.
        TraceError, OSError: the trace cannot be read.
    """
    origin = origin_of(trace)
    with _told(run or "of this trace"):
        where = _made_for(origin, tracking_uri) if run is None else _existing(run, tracking_uri)
        there = _points_there(where)
        is_new = not there
        brought = _send_missing(where, trace, there)
        files = _attached(where, trace)
        if run is None and (brought or is_new):
            client_of(where.uri).set_terminated(
                where.id, _STATUS.get(origin.status, "FAILED"), milliseconds(origin.ended)
            )
    if not brought and files is None:
        return f"MLflow run {where.id}: all steps and files were there; nothing is changed"
    steps = f"{brought} steps brought" if brought else "all steps were there"
    return f"MLflow run {where.id}: {steps}; {files or 'its files were there'}"


def fetch(run: str, folder: str, *, tracking_uri: str | None) -> Fetched:
    """Fetch a run's trace into the folder, or where it has none, what it logged of its steps.

    Raises:
        DestinationError: it cannot be done, or the run has neither.
    """
    with _told(run):
        where = _existing(run, tracking_uri)
        trace = _trace_in(where, folder)
        if trace is not None:
            return trace
        client = client_of(where.uri)
        points = [point for key in KEYS for point in client.get_metric_history(run, key)]
    if not points:
        raise DestinationError(f"MLflow run {run}: it has no trace and no staleness metrics")
    return _logged(points)


def fetch_trace(run: str, folder: str, *, tracking_uri: str | None) -> str | None:
    """Fetch a run's trace into the folder; None: it has none. Errors are those of `upload`."""
    with _told(run):
        return _trace_in(_existing(run, tracking_uri), folder)


def _trace_in(where: Run, folder: str) -> str | None:
    client = client_of(where.uri)
    files = {file.path for file in client.list_artifacts(where.id, FOLDER)}
    if f"{FOLDER}/{PACKED}" not in files:
        return None
    return str(client.download_artifacts(where.id, f"{FOLDER}/{PACKED}", folder))


def _logged(points: Iterable[Any]) -> list[Logged]:
    """Steps of points; of a step that was made again after a resume the later one."""
    steps: dict[int, dict[int, dict[str, float]]] = {}
    for point in points:
        steps.setdefault(point.step, {}).setdefault(point.timestamp, {})[point.key] = point.value
    return [Logged(step, times[max(times)]) for step, times in sorted(steps.items())]


def _existing(run: str, tracking_uri: str | None) -> Run:
    """The run where it is.

    Raises:
        MlflowException: there is none of this id.
    """
    where = Run(_uri(tracking_uri), run)
    client_of(where.uri).get_run(run)
    return where


def _uri(tracking_uri: str | None) -> str:
    try:
        import mlflow
    except ModuleNotFoundError as error:
        raise DestinationError(
            f"MLflow is needed ({error}): pip install 'rl-staleness[mlflow]'"
        ) from error
    return tracking_uri or str(mlflow.get_tracking_uri())


def _made_for(origin: Origin, tracking_uri: str | None) -> Run:
    """The run that was made for this trace, now or by an earlier replay."""
    uri = _uri(tracking_uri)
    client = client_of(uri)
    experiment = _experiment(client)
    found = client.search_runs([experiment], f"tags.`{ORIGIN}` = '{origin.id}'")
    if found:
        return Run(uri, found[0].info.run_id)
    tags = {ORIGIN: origin.id, "staleness.run": printable(origin.run, longest=1000)}
    started = milliseconds(origin.started)
    made = client.create_run(experiment, start_time=started, tags=tags, run_name=origin.title)
    return Run(uri, made.info.run_id)


def _experiment(client: Any) -> str:
    """Id of the experiment that MLflow's own variables name, or of its default one."""
    if name := os.environ.get("MLFLOW_EXPERIMENT_NAME"):
        found = client.get_experiment_by_name(name)
        if found is None:
            raise DestinationError(f"MLFLOW_EXPERIMENT_NAME: there is no experiment {name!r}")
        return str(found.experiment_id)
    return os.environ.get("MLFLOW_EXPERIMENT_ID", "0")


def _points_there(where: Run) -> Counter[tuple[str, int, float]]:
    """How often the run has which value: its own sink logged it at another time than the step's."""
    client = client_of(where.uri)
    keys = KEYS if client.get_run(where.id).data.metrics else ()
    return Counter(
        (key, point.step, point.value)
        for key in keys
        for point in client.get_metric_history(where.id, key)
    )


def _send_missing(where: Run, trace: str, there: Counter[tuple[str, int, float]]) -> int:
    """Send what is not there, oldest first; the number of steps of which something was not."""
    summary = Summary()
    steps = 0
    waiting: list[Point] = []
    for seconds, step, undone in counted_steps(trace):
        summary.take_off(undone)
        if step is None:
            continue
        points, _ = points_of(step, summary, seconds=seconds)
        missing = [point for point in points if not _taken(there, point)]
        steps += bool(missing)
        if len(waiting) + len(missing) > BATCH:
            refused_of(where, waiting, tags=DEFINITIONS)
            waiting = []
        waiting += missing
    refused_of(where, waiting, tags=DEFINITIONS)
    return steps


def _taken(there: Counter[tuple[str, int, float]], point: Point) -> bool:
    """Whether the point is there, which is good for one."""
    value = point.key, point.step, point.value
    if not there[value]:
        return False
    there[value] -= 1
    return True


def _attached(where: Run, trace: str) -> str | None:
    """Attach the files; what was done, None if they were there."""
    with in_scratch() as folder:
        packed = pack(trace, folder)
        if is_attached(where, packed.sha256):
            return None
        deadline = time.monotonic() + DRAWING_SECONDS
        lacking = attach(Job(where, packed.path, True, deadline))
    left_out = [f"{name} is not attached ({why})" for name, why in lacking.items()]
    return "; ".join(left_out) or "trace, report and picture attached"


@contextmanager
def _told(run: str) -> Generator[None]:
    """Whatever MLflow raises becomes one line, and within seconds: its retries take minutes."""
    ours = {name: value for name, value in SWITCHES.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in ("mlflow", "requests", "sqlalchemy"):
            raise
        raise DestinationError(f"MLflow run {run}: {one_line(error)}") from error
    finally:
        for name in ours:
            os.environ.pop(name, None)
