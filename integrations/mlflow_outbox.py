"""The queue between a training and an MLflow server: nothing leaves it before the server has it."""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter

from rl_staleness.integrations.mlflow_points import (
    BATCH,
    DEFINITIONS,
    Point,
    Run,
    describe,
    http_status,
    one_line,
    refused_of,
    without_passwords,
)

__all__ = ["CAPACITY", "Outbox", "Writer"]

_log = logging.getLogger(__name__)

CAPACITY = 200_000
"""Points that wait for one run at most, a few ten MiB; beyond it the oldest go, and are counted."""

INTERVAL_SECONDS = 1.0
"""Between two batches, so that steps that come fast share a request."""

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 30.0
"""After a failure, doubled with each further one."""

CLOSING_PAUSE_SECONDS = 1.0
"""The longest of these pauses once the sink is being closed."""


@dataclass(slots=True)
class Outbox:
    """What waits for one run."""

    run: Run
    points: deque[Point] = field(default_factory=deque[Point])
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


class Writer:
    """The queue of a process, and the thread that empties it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._outboxes: dict[Run, Outbox] = {}
        self._thread: threading.Thread | None = None
        self._closing = self._given_up = False
        self._done = threading.Event()

    def put(self, run: Run, points: Iterable[Point]) -> None:
        """Queue points."""
        with self._changed:
            outbox = self._outboxes.setdefault(run, Outbox(run))
            outbox.points.extend(points)
            excess = len(outbox.points) - CAPACITY
            if excess > 0:
                outbox.remove_until(outbox.removed + excess)
                outbox.num_dropped += excess
            self._start()
            self._changed.notify()

    def finish(self, *, deadline: float) -> list[str]:
        """Send what waits; wait until the deadline.

        Returns:
            What was not delivered, run by run.
        """
        with self._changed:
            self._closing = True
            for outbox in self._outboxes.values():
                outbox.due = outbox.pause = 0.0
                outbox.hopeless = False
            if not any(outbox.points for outbox in self._outboxes.values()):
                return self._undelivered()
            self._start()
            self._changed.notify()
        self._done.wait(max(0.0, deadline - time.monotonic()))
        with self._changed:
            self._given_up = True
            self._changed.notify()
            return self._undelivered()

    def is_waiting(self, run: Run) -> bool:
        """Whether points of the run are still here."""
        with self._changed:
            outbox = self._outboxes.get(run)
            return outbox is not None and bool(outbox.points)

    def _undelivered(self) -> list[str]:
        lines: list[str] = []
        for outbox in self._outboxes.values():
            what = [f"{n} values of {key} refused" for key, n in outbox.refused.items()]
            if outbox.num_dropped:
                what.append(f"{outbox.num_dropped} older values dropped")
            if outbox.points:
                why = outbox.error or "out of time"
                what.append(f"{describe(outbox.points)} not delivered ({why})")
            if what:
                lines.append(f"run {outbox.run.id}: {', '.join(what)}")
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
        self._done.set()

    def _next(self) -> Outbox | None:
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

    def _deliver(self, outbox: Outbox) -> None:
        """Send the oldest points; they leave the queue once they are taken or refused."""
        with self._changed:
            points = list(islice(outbox.points, BATCH))
            end = outbox.removed + len(points)
        wanted = [point for point in points if point.key not in outbox.refused]
        try:
            tags = {} if outbox.defined else DEFINITIONS
            refused = refused_of(outbox.run, wanted, tags=tags)
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

    def _postpone(self, outbox: Outbox, error: Exception) -> None:
        if outbox.error is None:
            _log.warning(
                "rl_staleness: MLflow run %s takes no points, they are kept; logged once\n%s",
                outbox.run.id,
                without_passwords("".join(traceback.format_exception(error))),
            )
        with self._changed:
            longest = CLOSING_PAUSE_SECONDS if self._closing else LONGEST_PAUSE_SECONDS
            outbox.error = one_line(error)
            outbox.hopeless = http_status(error) in (400, 401, 403, 404)
            outbox.pause = min(2 * outbox.pause or FIRST_PAUSE_SECONDS, longest)
            outbox.due = time.monotonic() + outbox.pause
