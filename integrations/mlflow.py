"""Steps as metrics of an MLflow run, the trace among its artifacts. Works with MLflow 3.17.

    StalenessCallback(sinks=[MlflowSink()])            # the active run, found when there is one
    StalenessCallback(sinks=[MlflowSink(run_id, tracking_uri="http://127.0.0.1:5000")])

The run is the user's: it is never created, ended or configured here, and no function of MLflow is
called that would do so. One daemon thread a process does all that may wait. What it sends stays in
the queue until the server has taken it; sending it again does no harm, since MLflow keeps one point
of the same time, step and value. Steps that a process killed within a second of them had logged are
in the trace alone. Which run is active is a matter of the thread in MLflow: a sink without
``run_id`` is made, or told of steps, in the thread that started the run.
"""

from __future__ import annotations

import functools
import gzip
import importlib
import logging
import math
import os
import re
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, groupby, islice
from operator import attrgetter
from typing import Any, NamedTuple
from urllib.parse import unquote
from weakref import WeakSet

from rl_staleness.staleness import StepStaleness

__all__ = ["MlflowSink", "active_run_sink"]

_log = logging.getLogger(__name__)

CAPACITY = 200_000
"""Points that wait for one run at most, a few ten MiB; beyond it the oldest go, and are counted."""

INTERVAL_SECONDS = 1.0
"""Between two batches, so that steps that come fast share a request."""

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 30.0
"""After a failure, doubled with each further one."""

CLOSING_PAUSE_SECONDS = 1.0
"""The longest of these pauses once the sink is being closed."""

REQUEST_SECONDS = 20.0
"""How long a server may take to answer one batch."""

DEFINITIONS = {
    "staleness.unit": "policy updates",
    "staleness.token_age": "version of the policy just before the update that consumed the token,"
    " minus the version that sampled it",
    "staleness.batch_age": "mean token age over a step's trained tokens, every token weighing one",
    "staleness.run_mean": "mean token age over all trained tokens of the run so far",
}
"""Tags of the run: what the numbers mean. Not parameters, which a resumed run could not repeat."""

BATCH = 1000 - len(DEFINITIONS)
"""Points in a request: MLflow takes 1000 things at once, tags among them."""


class _Run(NamedTuple):
    """Where points go."""

    uri: str
    id: str


class _Point(NamedTuple):
    """One value of one metric."""

    key: str
    value: float
    timestamp: int
    """Unix milliseconds."""
    step: int


class _File(NamedTuple):
    """An artifact to be made from the trace at the end."""

    name: str
    folder: str | None
    """In the run's artifacts; None: their root, all that MLflow's compare page shows."""
    make: Callable[[str, str], None]
    """Writes it, from the path of the trace to the path of the file."""


class MlflowSink:
    """Logs each step's numbers to an MLflow run.

    Args:
        run_id: the run; default the active one of the thread that makes or calls this, looked for
            at every step, so that it may start late or change.
        tracking_uri: where the run is; default MLflow's own at the moment the run is found.
        clock: Unix seconds.

    Raises:
        ModuleNotFoundError: MLflow is not installed.
        ValueError: an argument cannot be used.
    """

    def __init__(
        self,
        run_id: str | None = None,
        *,
        tracking_uri: str | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        given: dict[str, object] = {"run_id": run_id, "tracking_uri": tracking_uri}
        for name, value in given.items():
            if value is not None and (not isinstance(value, str) or not value):
                raise ValueError(f"{name}: {value!r} is none; pass a string that is not empty")
        try:
            import mlflow
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"MlflowSink needs MLflow ({error}): pip install 'rl-staleness[mlflow]'"
            ) from error
        self._mlflow: Any = mlflow
        self._tracking_uri = tracking_uri
        self._clock = clock
        self._fixed = run_id is not None
        self._run: _Run | None = None
        if run_id is not None:
            self._run = _Run(tracking_uri or mlflow.get_tracking_uri(), run_id)
        self._ages: dict[_Run | None, Counter[int]] = {}
        self._num_unusable = self._num_late = 0
        self._closed = False
        self.start_over()
        self._find_run()
        _after_fork.add(self)

    def log(self, step: StepStaleness) -> None:
        """Queue a step's numbers; returns at once."""
        now = int(self._clock() * 1000)
        with self._lock:
            if self._closed:
                self._num_late += 1
                if self._num_late == 1:
                    _log.warning("rl_staleness: step %d after close() of MlflowSink", step.step)
                return
            self._find_run()
            values = {**step.metrics(), **self._summary(step.tokens_by_age)}
            points = [
                _Point(key, number, now, step.step)
                for key, value in values.items()
                if (number := _finite(value)) is not None
            ]
            self._num_unusable += len(values) - len(points)
            if self._run is None:
                self._homeless.extend(points)
            else:
                self._writer.put(self._run, points)

    def close(self, *, trace: str | None, timeout: float) -> str | None:
        """Send what is left, attach the trace; the run goes on. A second time does nothing.

        Args:
            trace: path of the trace, for the run of the last step; None attaches nothing.
            timeout: seconds, whatever the server does.

        Returns:
            What was not delivered, in one line; None if all was.
        """
        deadline = time.monotonic() + timeout
        with self._lock:
            if self._closed:
                return None
            self._closed = True
            self._find_run()
            lost: list[str] = []
            if self._num_unusable:
                lost.append(f"{self._num_unusable} values were not finite")
        if self._run is None:
            if not self._homeless:
                return None
            what = _describe(self._homeless)
            return f"{what} not sent: no run was active in this thread; MlflowSink takes a run_id"
        files = [] if trace is None else _files(trace)
        lost += self._writer.finish(self._run, files, trace=trace or "", deadline=deadline)
        return "; ".join(lost) or None

    def __reduce__(self) -> tuple[Callable[..., MlflowSink], tuple[str | None]]:
        """Another process goes on with the run of this one."""
        with self._lock:
            self._find_run()
        uri, run_id = self._run or (self._tracking_uri, None)
        return functools.partial(MlflowSink, tracking_uri=uri), (run_id,)

    def _find_run(self) -> None:
        """Take the active run; one that ended stays ours until another one is active."""
        if self._fixed or (active := self._mlflow.active_run()) is None:
            return
        if self._run is not None and self._run.id == active.info.run_id:
            return
        first = self._run is None
        self._run = _Run(self._tracking_uri or self._mlflow.get_tracking_uri(), active.info.run_id)
        if first and self._homeless:
            self._ages[self._run] = self._ages.pop(None)
            self._writer.put(self._run, self._homeless)
            self._homeless.clear()

    def _summary(self, tokens_by_age: Mapping[int, int]) -> dict[str, float]:
        """The run so far in three numbers, from sums: the compare page shows last values only."""
        ages = self._ages.setdefault(self._run, Counter())
        ages.update(tokens_by_age)
        tokens = ages.total()
        if not tokens:
            return {}
        ordered = sorted(ages)
        reached = accumulate(ages[age] for age in ordered)
        p95 = next(a for a, n in zip(ordered, reached, strict=True) if n * 100 >= tokens * 95)
        return {
            "staleness/run_mean": sum(age * count for age, count in ages.items()) / tokens,
            "staleness/run_p95": p95,
            "staleness/run_max": ordered[-1],
        }

    def start_over(self) -> None:
        """Have a lock and a writer of this process; what waited is its parent's to send."""
        self._lock = threading.Lock()
        self._writer = _Writer()
        self._homeless: deque[_Point] = deque(maxlen=CAPACITY)


def active_run_sink() -> MlflowSink | None:
    """A sink if MLflow is loaded and a run is active in this thread; loads and creates nothing."""
    active_run = getattr(sys.modules.get("mlflow"), "active_run", None)
    return None if active_run is None or active_run() is None else MlflowSink()


_after_fork: WeakSet[MlflowSink] = WeakSet()


def _start_over() -> None:
    _client.cache_clear()
    for sink in _after_fork:
        sink.start_over()


os.register_at_fork(after_in_child=_start_over)


@dataclass(slots=True)
class _Outbox:
    """What waits for one run."""

    run: _Run
    points: deque[_Point] = field(default_factory=deque[_Point])
    removed: int = 0
    """Points taken off the front so far, delivered or not."""
    defined: bool = False
    """The tags are there."""
    refused: Counter[str] = field(default_factory=Counter[str])
    """Values of keys that the server does not take."""
    num_dropped: int = 0
    error: str | None = None
    """Of the last attempt."""
    hopeless: bool = False
    """It was no accident: the run is gone, say, or the token expired."""
    pause: float = 0.0
    due: float = 0.0
    """Monotonic time of the next attempt."""

    def remove_until(self, removed: int) -> None:
        while self.removed < removed:
            self.points.popleft()
            self.removed += 1


class _Writer:
    """The queue of a process, and the thread that empties it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._outboxes: dict[_Run, _Outbox] = {}
        self._thread: threading.Thread | None = None
        self._closing = self._given_up = False
        self._done = threading.Event()
        self._uploads: list[tuple[_Run, str, _File]] = []
        self._upload_error: str | None = None

    def put(self, run: _Run, points: Iterable[_Point]) -> None:
        """Queue points."""
        with self._changed:
            outbox = self._outboxes.setdefault(run, _Outbox(run))
            outbox.points.extend(points)
            excess = len(outbox.points) - CAPACITY
            if excess > 0:
                outbox.remove_until(outbox.removed + excess)
                outbox.num_dropped += excess
            self._start()
            self._changed.notify()

    def finish(self, run: _Run, files: list[_File], *, trace: str, deadline: float) -> list[str]:
        """Send what waits, then the files; wait until the deadline.

        Returns:
            What was not delivered, run by run.
        """
        with self._changed:
            self._closing = True
            self._uploads = [(run, trace, file) for file in files]
            for outbox in self._outboxes.values():
                outbox.due = outbox.pause = 0.0
                outbox.hopeless = False
            if not files and not any(outbox.points for outbox in self._outboxes.values()):
                return self._undelivered(run)
            self._start()
            self._changed.notify()
        self._done.wait(max(0.0, deadline - time.monotonic()))
        with self._changed:
            self._given_up = True
            self._changed.notify()
            return self._undelivered(run)

    def _undelivered(self, run: _Run) -> list[str]:
        lines: list[str] = []
        for outbox in self._outboxes.values():
            what = [f"{n} values of {key} refused" for key, n in outbox.refused.items()]
            if outbox.num_dropped:
                what.append(f"{outbox.num_dropped} older values dropped")
            if outbox.points:
                why = outbox.error or "out of time"
                what.append(f"{_describe(outbox.points)} not delivered ({why})")
            if what:
                lines.append(f"run {outbox.run.id}: {', '.join(what)}")
        if self._uploads:
            names = ", ".join(file.name for *_, file in self._uploads)
            why = self._upload_error or "out of time"
            lines.append(f"run {run.id}: {names} not attached ({why})")
        return lines

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._work, name="rl_staleness-mlflow", daemon=True
            )
            self._thread.start()

    def _work(self) -> None:
        while (outbox := self._next()) is not None:
            self._deliver(outbox)
        self._attach()
        self._done.set()

    def _next(self) -> _Outbox | None:
        """Wait for an outbox that is due; None when the sink is closed and nothing can be done."""
        with self._changed:
            while not self._given_up:
                waiting = [
                    outbox
                    for outbox in self._outboxes.values()
                    if outbox.points and not (self._closing and outbox.hopeless)
                ]
                first = min(waiting, key=attrgetter("due"), default=None)
                if first is None and self._closing:
                    return None
                seconds = None if first is None else first.due - time.monotonic()
                if seconds is not None and seconds <= 0:
                    return first
                self._changed.wait(seconds)
            return None

    def _deliver(self, outbox: _Outbox) -> None:
        """Send the oldest points; they leave the queue once they are taken or refused."""
        with self._changed:
            points = list(islice(outbox.points, BATCH))
            end = outbox.removed + len(points)
        wanted = [point for point in points if point.key not in outbox.refused]
        try:
            refused = _send(outbox, wanted)
        except Exception as error:  # noqa: BLE001  # of whatever store it is; it is said at the end
            self._postpone(outbox, error)
            return
        for key, reason in refused.items():
            _log.warning("rl_staleness: MLflow refuses %s: %s", key, reason)
        if outbox.error is not None:
            _log.warning("rl_staleness: MLflow run %s takes points again", outbox.run.id)
        with self._changed:
            outbox.refused.update(dict.fromkeys(refused, 0))
            outbox.refused.update(p.key for p in points if p.key in outbox.refused)
            outbox.remove_until(end)
            outbox.error, outbox.pause, outbox.defined = None, 0.0, True
            at_once = self._closing or len(points) == BATCH
            outbox.due = 0.0 if at_once else time.monotonic() + INTERVAL_SECONDS

    def _postpone(self, outbox: _Outbox, error: Exception) -> None:
        if outbox.error is None:
            _log.warning(
                "rl_staleness: MLflow run %s takes no points, they are kept; logged once\n%s",
                outbox.run.id,
                _without_passwords("".join(traceback.format_exception(error))),
            )
        with self._changed:
            longest = CLOSING_PAUSE_SECONDS if self._closing else LONGEST_PAUSE_SECONDS
            outbox.error = _one_line(error)
            outbox.hopeless = _status(error) in (400, 401, 403, 404)
            outbox.pause = min(2 * outbox.pause or FIRST_PAUSE_SECONDS, longest)
            outbox.due = time.monotonic() + outbox.pause

    def _attach(self) -> None:
        """Make and upload the files; each fails alone."""
        for upload in list(self._uploads):
            run, trace, file = upload
            outbox = self._outboxes.get(run)
            if outbox is not None and outbox.points:
                self._upload_error = outbox.error
                return
            if self._given_up:
                return
            try:
                with tempfile.TemporaryDirectory(prefix="rl_staleness-") as folder:
                    path = os.path.join(folder, file.name)
                    file.make(trace, path)
                    _client(run.uri).log_artifact(run.id, path, file.folder)
            except Exception as error:  # noqa: BLE001  # of whatever store it is; it is said at the end
                self._upload_error = _one_line(error)
            else:
                with self._changed:
                    self._uploads.remove(upload)


def _files(trace: str) -> list[_File]:
    """What is attached to the run beside its numbers."""
    return [_File("rollout_trace.jsonl.gz", "staleness", _compress)] if trace else []


def _compress(trace: str, path: str) -> None:
    with open(trace, "rb") as source, gzip.GzipFile(path, "wb", mtime=0) as target:
        shutil.copyfileobj(source, target, 1 << 20)


def _send(outbox: _Outbox, points: list[_Point]) -> dict[str, str]:
    """Send points, key by key if MLflow refuses them together.

    Returns:
        Keys that it refuses while it takes others, with its reasons.
    """
    if not points:
        return {}
    try:
        _log_batch(outbox.run, points, {} if outbox.defined else DEFINITIONS)
    except Exception as error:
        if _status(error) != 400:
            raise
        refused: dict[str, str] = {}
        keys = groupby(sorted(points, key=attrgetter("key")), attrgetter("key"))
        for key, of_key in keys:
            try:
                _log_batch(outbox.run, list(of_key), {})
            except Exception as reason:
                if _status(reason) != 400:
                    raise
                refused[key] = _one_line(reason)
        if len(refused) == len({point.key for point in points}):
            raise
        return refused
    return {}


def _log_batch(run: _Run, points: list[_Point], tags: Mapping[str, str]) -> None:
    """Send points and tags in one request.

    To a server they go without MLflow's own retries, which take four minutes and have no other
    switch than an environment variable that would change the user's clients too.
    """
    if not run.uri.startswith(("http://", "https://")):
        from mlflow.entities import Metric, RunTag

        metrics = [Metric(*point) for point in points]
        _client(run.uri).log_batch(run.id, metrics, tags=[RunTag(*tag) for tag in tags.items()])
        return
    rest: Any = importlib.import_module("mlflow.utils.rest_utils")
    credentials: Any = importlib.import_module("mlflow.utils.credentials")
    rest.http_request_safe(
        credentials.get_default_host_creds(run.uri),
        "/api/2.0/mlflow/runs/log-batch",
        "POST",
        max_retries=0,
        timeout=REQUEST_SECONDS,
        json={
            "run_id": run.id,
            "metrics": [point._asdict() for point in points],
            "tags": [{"key": key, "value": value} for key, value in tags.items()],
        },
    )


@functools.cache
def _client(uri: str) -> Any:
    """A client of this process; it makes no database where there is none."""
    from mlflow import MlflowClient

    path = unquote(uri.removeprefix("sqlite:///").partition("?")[0])
    if uri.startswith("sqlite:///") and not os.path.exists(path):
        raise FileNotFoundError(f"tracking_uri: there is no database {path!r}")
    return MlflowClient(uri)


def _status(error: Exception) -> int | None:
    """The HTTP status that an error of MLflow stands for, also one of a local store."""
    from mlflow.exceptions import MlflowException

    return error.get_http_status_code() if isinstance(error, MlflowException) else None


def _finite(value: object) -> float | None:
    """A number that a chart can show."""
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _describe(points: Iterable[_Point]) -> str:
    steps = [point.step for point in points]
    return f"{len(steps)} values of steps {min(steps)} to {max(steps)}"


def _one_line(error: Exception) -> str:
    """An error's text without line breaks, cut to a readable length."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return _without_passwords(text)[:300]


def _without_passwords(text: str) -> str:
    """An address of a server may hold one."""
    return re.sub(r"//[^/@\s]+@", "//", text)
