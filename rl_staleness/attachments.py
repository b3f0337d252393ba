"""A thread that makes the files of a run and hands them over, beside whatever else a sink does.

An upload may block for minutes while a server is away, and the drawing takes seconds: neither may
keep a step's numbers waiting, nor the training.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, NamedTuple, TypedDict, TypeVar

from rl_staleness.artifacts import reason

__all__ = ["Attach", "Attachments", "Job", "Limits"]

_log = logging.getLogger(__name__)

Where = TypeVar("Where")


class Limits(TypedDict):
    """Of making files."""

    seconds: float
    in_background: bool


class Job(NamedTuple, Generic[Where]):
    """One trace for one run."""

    run: Where
    trace: str
    final: bool
    """Nothing comes after it."""
    deadline: float
    """Monotonic time; what is not drawn by then is left out."""

    @property
    def limits(self) -> Limits:
        """For whatever makes its files, now."""
        return {"seconds": self.deadline - time.monotonic(), "in_background": not self.final}


Attach = Callable[[Job[Where]], dict[str, str]]
"""Makes the files of a trace and gives them to a run; by name, why one is not there."""


class Attachments(Generic[Where]):
    """What waits to be attached; of several traces for one run the newest.

    Args:
        attach: does it, in the thread; what it raises is logged once and told at the end.
        title: names the thread, and the destination in the log.
        limit: seconds that drawing may take while the run goes on.
    """

    def __init__(self, attach: Attach[Where], *, title: str, limit: float = 300.0) -> None:
        self._attach = attach
        self._title = title
        self._limit = limit
        self._failed = False
        self._start_over()

    def _start_over(self) -> None:
        """Have a lock and a thread of this process; what waited is its parent's."""
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._jobs: deque[Job[Where]] = deque()
        self._answer: dict[str, str] | None = None
        """Of the final job, once it is done: what it left out, and why."""
        self._is_working = False

    def add(self, run: Where, trace: str) -> None:
        """Have the trace attached as it stands when its turn comes; returns at once."""
        self._ensure_own()
        self._put(Job(run, trace, False, time.monotonic() + self._limit))

    def finish(self, run: Where, trace: str, *, deadline: float) -> dict[str, str] | None:
        """Have the whole trace attached, and wait for it until the deadline.

        Returns:
            By name, why a file is not there; None if there was no answer in time.
        """
        self._ensure_own()
        with self._changed:
            self._answer = None
            self._put(Job(run, trace, True, deadline))
            left = deadline - time.monotonic()
            self._changed.wait_for(lambda: self._answer is not None, max(0.0, left))
            return self._answer

    def _ensure_own(self) -> None:
        if self._process != os.getpid():  # forked: the thread is not here, its lock may be held
            self._start_over()

    def _put(self, job: Job[Where]) -> None:
        with self._changed:
            for other in [other for other in self._jobs if other.run == job.run]:
                self._jobs.remove(other)
            if job.final:
                self._jobs.appendleft(job)
            else:
                self._jobs.append(job)
            if not self._is_working:
                self._is_working = True
                threading.Thread(target=self._work, name=self._title, daemon=True).start()

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._jobs:
                    self._is_working = False
                    return
                job = self._jobs.popleft()
            lacking = self._done(job)
            if job.final:
                with self._changed:
                    self._answer = lacking
                    self._changed.notify_all()

    def _done(self, job: Job[Where]) -> dict[str, str]:
        try:
            return self._attach(job)
        except Exception as error:  # noqa: BLE001  # whatever the client raises, it is told at the end
            if not self._failed:
                self._failed = True
                _log.error(
                    "rl_staleness: %s: the trace is not attached; logged once",
                    self._title,
                    exc_info=error,
                )
            return {"": reason(error)}
