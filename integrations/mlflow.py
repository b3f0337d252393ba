"""Steps as metrics of an MLflow run, the trace among its artifacts. Works with MLflow 3.17.

    StalenessCallback(sinks=[MlflowSink()])            # the active run, found when there is one
    StalenessCallback(sinks=[MlflowSink(run_id, tracking_uri="http://127.0.0.1:5000")])

The run is the user's: it is never created, ended or configured here, and no function of MLflow is
called that would do so. One daemon thread a process sends points, another one files. A point stays
in the queue until the server has taken it; sending it again does no harm, since MLflow keeps one
point of the same time, step and value. Steps that a process killed within a second of them had
logged are in the trace alone: ``rl-staleness replay`` brings them. Which run is active is a matter
of the thread in MLflow: a sink without ``run_id`` is made, or told of steps, in the thread that
started the run.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakSet

from rl_staleness.attachments import Attachments
from rl_staleness.integrations.mlflow_files import attach
from rl_staleness.integrations.mlflow_outbox import CAPACITY, Writer
from rl_staleness.integrations.mlflow_points import Point, Run, Summary, describe, points_of
from rl_staleness.integrations.mlflow_points import client_of as _client_of
from rl_staleness.staleness import StepStaleness

__all__ = ["MlflowSink", "active_run_sink"]

_log = logging.getLogger(__name__)


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
        self._run: Run | None = None
        if run_id is not None:
            self._run = Run(tracking_uri or mlflow.get_tracking_uri(), run_id)
        self._summaries: dict[Run | None, Summary] = {}
        self._num_unusable = self._num_late = 0
        self._closed = False
        self._files = Attachments(attach, title="MLflow")
        self.start_over()
        self._find_run()
        _after_fork.add(self)

    def resume(self, tokens_by_age: Mapping[int, int]) -> None:
        """Take in what was trained before a resume; before the first step.

        Args:
            tokens_by_age: trained tokens of all steps before, by their age in policy updates.
        """
        with self._lock:
            self._summaries[self._run] = Summary(tokens_by_age)

    def log(self, step: StepStaleness) -> None:
        """Queue a step's numbers; returns at once."""
        now = self._clock()
        with self._lock:
            if self._closed:
                self._num_late += 1
                if self._num_late == 1:
                    _log.warning("rl_staleness: step %d after close() of MlflowSink", step.step)
                return
            self._find_run()
            summary = self._summaries.setdefault(self._run, Summary())
            points, num_unusable = points_of(step, summary, seconds=now)
            self._num_unusable += num_unusable
            if self._run is None:
                self._homeless.extend(points)
            else:
                self._writer.put(self._run, points)

    def attach(self, trace: str) -> None:
        """Have the trace as it stands attached, with report and picture; returns at once.

        They take the place of those that were attached before.
        """
        with self._lock:
            self._find_run()
            run, closed = self._run, self._closed
        if run is not None and not closed:
            self._files.add(run, trace)

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
            what = describe(self._homeless)
            return f"{what} not sent: no run was active in this thread; MlflowSink takes a run_id"
        lost += self._writer.finish(deadline=deadline)
        if trace:
            lost += self._attach_last(self._run, trace, deadline)
        return "; ".join(lost) or None

    def _attach_last(self, run: Run, trace: str, deadline: float) -> list[str]:
        """Attach the whole trace; what is not attached, and why."""
        lacking: dict[str, str] | None
        if self._writer.is_waiting(run):
            lacking = {"": "its values go first"}
        else:
            lacking = self._files.finish(run, trace, deadline=deadline)
        if lacking is None:
            lacking = {"": "out of time"}
        return [
            f"run {run.id}: {name or 'the trace'} not attached ({why})"
            for name, why in lacking.items()
        ]

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
        self._run = Run(self._tracking_uri or self._mlflow.get_tracking_uri(), active.info.run_id)
        if first and None in self._summaries:
            self._summaries[self._run] = self._summaries.pop(None)
            self._writer.put(self._run, self._homeless)
            self._homeless.clear()

    def start_over(self) -> None:
        """Have a lock and a writer of this process; what waited is its parent's to send."""
        self._lock = threading.Lock()
        self._writer = Writer()
        self._homeless: deque[Point] = deque(maxlen=CAPACITY)


def active_run_sink() -> MlflowSink | None:
    """A sink if MLflow is loaded and a run is active in this thread; loads and creates nothing."""
    active_run = getattr(sys.modules.get("mlflow"), "active_run", None)
    return None if active_run is None or active_run() is None else MlflowSink()


_after_fork: WeakSet[MlflowSink] = WeakSet()


def _start_over() -> None:
    _client_of.cache_clear()
    for sink in _after_fork:
        sink.start_over()


os.register_at_fork(after_in_child=_start_over)
