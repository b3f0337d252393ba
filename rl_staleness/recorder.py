"""The trace and the ledger of a running process, kept equal: one lock around line and fold.

The ledger online sees each event exactly as a reader of the trace will see it. A line that could
not be written is not applied either: what is printed live is what can be recomputed.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter

from rl_staleness.events import Event, Gap, RunStarted, TraceError, decode, encode
from rl_staleness.ledger import Ledger
from rl_staleness.printable import printable
from rl_staleness.resume import counted_steps
from rl_staleness.staleness import StepStaleness
from rl_staleness.trace import TraceWriter, read

__all__ = ["Recorder"]

LOGGED_A_NAME = 3
"""Violations of one name that are logged; the others are counted."""

LONGEST_DETAIL = 300
"""Characters of it that are logged: names of calls come from servers."""

_log = logging.getLogger(__name__)


class Recorder:
    """Writes and applies events in one order, whichever threads they come from.

    Args:
        path: the trace; None keeps the ledger alone. A trace of the same run is gone on with.
        run: the run's identity.

    Raises:
        OSError: the trace cannot be opened for appending.
        TraceError: what stands at ``path`` is no trace.
    """

    def __init__(self, path: str | os.PathLike[str] | None, *, run: str) -> None:
        self.lock = threading.RLock()
        self.ledger = Ledger()
        self.refused = 0
        """Events with a value of a wrong type: neither written nor applied."""
        self.violations: Counter[str] = Counter()
        """By name, since this process opened the trace."""
        self.trained: Counter[int] = Counter()
        """Tokens of all steps so far by their age, those of earlier incarnations included; of a
        step that was made again after a resume the later ones."""
        self.lines = 0
        """Of the trace so far."""
        self.damage: str | None = None
        """What became of the trace while it was written; known when it is closed."""
        self._writer = None if path is None else TraceWriter(path, run=run)
        self._step: StepStaleness | None = None
        self._skipped = 0  # without a trace: what a gap before the next event says
        self._went_back = False  # `trained` has steps that are undone
        self._run = run
        if self._writer is not None and self._writer.continued:
            for event in read(self._writer.path):
                self._went_back = self._went_back or self._undoes(event)
                step = self.ledger.apply(event)
                self.lines += 1
                if step is not None:
                    self.trained.update(step.tokens_by_age)
            if self._went_back:
                self._count_again()

    @property
    def path(self) -> str | None:
        """Where the trace is written."""
        return None if self._writer is None else os.fspath(self._writer.path)

    @property
    def run(self) -> str:
        """The run's identity."""
        return self._run

    @property
    def lost(self) -> int:
        """Lines that could not be written."""
        return 0 if self._writer is None else self._writer.lost

    @property
    def torn(self) -> int | None:
        """Bytes of a torn last line that were cut off when the trace was opened; None if none."""
        return (self._writer.torn or None) if self._writer is not None else None

    @property
    def incarnation(self) -> int:
        """The number that the next ``run_started`` has to have."""
        run: RunStarted | None = self.ledger.run
        return 0 if run is None else run.incarnation + 1

    def record(self, event: Event, *, held: bool = False) -> StepStaleness | None:
        """Write and apply one event; a ``step_trained`` gives its numbers, unless it was lost.

        Args:
            held: as `TraceWriter.append`; it is applied at once.

        Raises:
            TraceError: a value is of a wrong type; counted, neither written nor applied.
        """
        with self.lock:
            self._step = None
            try:
                if self._writer is not None:
                    self._writer.append(event, held=held, applied=self._apply)
                    if self._went_back and not self._writer.held:
                        self._count_again()
                else:
                    seen = decode(encode(event))
                    if self._skipped:
                        self._apply(Gap(time=event.time, lost=self._skipped))
                        self._skipped = 0
                    self._apply(seen)
            except TraceError:
                self.refused += 1
                raise
            return self._step

    def skip_step(self) -> None:
        """A step cannot be written as it was told: its numbers are missing from here on."""
        with self.lock:
            if self._writer is not None:
                self._writer.skip()
            else:
                self._skipped += 1

    def close(self) -> None:
        """Close the trace; a second time does nothing."""
        with self.lock:
            if self._writer is not None:
                self.damage = self.damage or self._writer.damage()
                self._writer.close()

    def discard(self) -> None:
        """Close the trace, and leave no file where nothing was written."""
        with self.lock:
            if self._writer is not None:
                self._writer.discard()

    def _undoes(self, event: Event) -> bool:
        """Whether the run goes on from before steps that it has made."""
        return type(event) is RunStarted and event.step < self.ledger.step

    def _count_again(self) -> None:
        self._went_back = False
        if self._writer is not None:
            self.trained.clear()
            for _, step, undone in counted_steps(self._writer.path):
                self.trained.update({} if step is None else step.tokens_by_age)
                self.trained -= undone

    def _apply(self, event: Event) -> None:
        self._went_back = self._went_back or self._undoes(event)
        self.lines += 1
        self._step = self.ledger.apply(event)
        if self._step is not None:
            self.trained.update(self._step.tokens_by_age)
        for name, detail in self.ledger.found:
            self.violations[name] += 1
            if self.violations[name] <= LOGGED_A_NAME:
                shown = printable(detail, longest=LONGEST_DETAIL)
                _log.warning("rl_staleness: violation %s: %s", printable(name), shown)
