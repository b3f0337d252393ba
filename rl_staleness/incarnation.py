"""One incarnation of a run: how it starts, what it takes over, and how the trainer counts in it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

import msgspec

from rl_staleness.events import (
    SCHEMA,
    Call,
    GroupDropped,
    RunStarted,
    TraceError,
    ViolationFound,
    decode,
    encode,
)
from rl_staleness.recorder import Recorder
from rl_staleness.resume import Saved, resumption

__all__ = ["Incarnation", "is_count"]

_log = logging.getLogger(__name__)


def is_count(number: object) -> TypeGuard[int]:
    """Whether a version or a step may be this."""
    return type(number) is int and number >= 0


class Incarnation:
    """A run from one ``run_started`` to the next, in one process.

    Args:
        recorder: of the run; nothing is written before `begin`.
        version, step: what the trainer says of itself, where it does.
        about: what the start says beside them.
        clock: Unix seconds.
        saved: what the trainer's checkpoint says.
        kept: names of the groups that the trainer still has; None: all that waited.

    Raises:
        ValueError: the run's name, or ``about``, cannot stand in a trace.
        TraceError, OSError: the trace cannot be read again.
    """

    def __init__(
        self,
        recorder: Recorder,
        *,
        version: int | None,
        step: int | None,
        about: Mapping[str, Any],
        clock: Callable[[], float],
        saved: Saved | None = None,
        kept: frozenset[str] | None = None,
    ) -> None:
        self._recorder = recorder
        self._clock = clock
        self._kept = kept
        self._offset: int | None = None
        self._calls_before: dict[tuple[str, str], Call] | None = None
        self._from = resumption(
            recorder.ledger,
            recorder.path,
            lines=recorder.lines,
            version=version,
            step=step,
            saved=saved,
        )
        number, about = recorder.incarnation, dict(about)
        if saved is not None and saved.run == recorder.run:
            number = max(number, saved.incarnation + 1)
        if number:
            about["resumed"] = self._from.point._asdict()
        unwritten = {
            engine: refit
            for engine, refit in (saved.refits if saved is not None else {}).items()
            if refit > recorder.ledger.last_refit(engine)
        }
        if unwritten:
            about["refits_before"] = unwritten
        self.start = RunStarted(
            time=clock(),
            schema=SCHEMA,
            run=recorder.run,
            incarnation=number,
            version=self._from.point.version,
            step=self._from.point.step,
            about=about,
            torn=recorder.torn,
        )
        """As it is written; engines are known only then."""
        try:
            decode(encode(self.start))
        except TraceError as error:
            recorder.close()
            raise ValueError(f"run, about: cannot stand in a trace: {error}") from error

    def begin(self, engines: Mapping[str, int], *, version: int, step: int) -> None:
        """Write the start, after what is undone and before what waited.

        Args:
            engines: the version that each of them holds.
            version, step: what the policy has.
        """
        recorder = self._recorder
        self._undo()
        start = msgspec.structs.replace(
            self.start, engines=dict(engines), version=version, step=step
        )
        recorder.record(start, held=True)
        self.start = start
        for group in self._from.waiting:
            if self._kept is None or group.group in self._kept:
                again = msgspec.structs.replace(group, time=self._clock())
                recorder.record(again, held=True)
        self._from = self._from._replace(waiting=(), undone=())

    def _undo(self) -> None:
        """Drop what waited before and will not be trained."""
        ledger, point = self._recorder.ledger, self._from.point
        if ledger.run is not None and (ledger.version, ledger.step) > point[1:]:
            _log.warning(
                "rl_staleness: the run goes back from version %d to %d: steps from %d on are"
                " undone, %d groups that were published since are dropped",
                *(ledger.version, *point[1:], len(self._from.undone)),
            )
        lost = dict.fromkeys(self._from.undone, "rolled back")
        if self._kept is not None:
            names = (group.group for group in self._from.waiting)
            lost |= {name: "not restored" for name in names if name not in self._kept}
        for name, reason in lost.items():
            if ledger.is_waiting(name):
                dropped = GroupDropped(time=self._clock(), group=name, reason=reason)
                self._recorder.record(dropped)

    def call_before(self, call: Call) -> Call | None:
        """A call that was made before, as its group was published again; None: it was not."""
        if not self.start.incarnation:
            return None
        if self._calls_before is None:
            groups = [g for g in self._recorder.ledger.waiting() if g.restored]
            self._calls_before = {(c.engine, c.call): c for g in groups for c in g.calls}
        found = self._calls_before.get((call.engine, call.call))
        if found is None or (found.version, found.tokens) != (call.version, call.tokens):
            return None  # of another call of that name
        return found

    def translated(self, version: int, *, expected: int, refit: bool = False) -> int:
        """A version that the trainer passes, in this run's count.

        A trainer whose own count starts again after a resume is known by the first that it passes:
        one from before the resume.

        Args:
            expected: the policy's.
            refit: it is one that engines are moved to: no older than any of theirs.
        """
        if not is_count(version):
            return version
        if self._offset is None:
            self._offset = 0
            oldest = [self.start.version, *(self.start.engines.values() if refit else ())]
            if self.start.incarnation and version < min(oldest):
                self._offset = expected - version
                detail = f"the trainer's version {version} is {expected} here, and so on"
                self._recorder.record(
                    ViolationFound(time=self._clock(), name="counter_restarted", detail=detail)
                )
        return version + self._offset
