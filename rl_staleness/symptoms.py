"""What the fold does not call a violation and a reader should know, found as a trace goes by.

Memory does not grow with the trace: of every name the first lines are kept and the rest counted,
and of refits what still can matter.
"""

from __future__ import annotations

import msgspec

from rl_staleness.events import (
    JOINED,
    Call,
    Event,
    Gap,
    GroupDropped,
    GroupPublished,
    RefitAborted,
    RefitCut,
    RefitDone,
    RunFinished,
    RunStarted,
    StepTrained,
)
from rl_staleness.invariants import BROKEN, NOTED
from rl_staleness.ledger import Ledger
from rl_staleness.limits import FEWEST_STEPS, PATIENCE
from rl_staleness.staleness import StepStaleness
from rl_staleness.trained import Trained

__all__ = ["FIRST_LINES", "Remark", "Remarks", "Symptoms"]

FIRST_LINES = 5
"""Line numbers that are kept of each name."""

MOST_NAMES = 256
"""Names that are told apart; violations that a trainer names are input from outside."""

OTHER = "(other names)"

REFITS_KEPT = 256
"""Refits of an engine whose lack of a cut is remembered, to say why a token is not covered."""


class Remark(msgspec.Struct):
    """One name that was found in a trace."""

    name: str
    times: int = 0
    lines: list[int] = []
    """The first of the lines that show it."""
    detail: str = ""
    """Of the first of them."""


class Remarks:
    """What was found so far, by name."""

    def __init__(self) -> None:
        self.by_name: dict[str, Remark] = {}

    def add(self, name: str, line: int, detail: str, *, times: int = 1) -> None:
        """Note a line that shows it."""
        ours = name in BROKEN or name in NOTED
        if not ours and name not in self.by_name and len(self.by_name) >= MOST_NAMES:
            name = OTHER
        remark = self.by_name.setdefault(name, Remark(name))
        remark.times += times
        if not remark.lines or line < remark.lines[0]:
            remark.detail = detail
        remark.lines = sorted({*remark.lines, line})[:FIRST_LINES]


class _Lack(msgspec.Struct):
    """A refit that leaves tokens uncovered, so far."""

    line: int
    why: str = "a refit without a cut"
    done: bool = False
    joined: bool = False
    """It is how its engine joined the run."""


class _Seen(msgspec.Struct):
    """What the trace said of one engine since the run's last start."""

    line: int
    lacking: dict[int, _Lack] = {}
    """By number, those that may still get a better line."""
    aborted: int = 0
    """Line of the last abort that no later refit made good; 0: none."""
    refitted: bool = False
    informed: bool = True
    """A refit of it was done since lines were lost."""


class Symptoms:
    """Looks at every event before and after the ledger applies it."""

    def __init__(self, remarks: Remarks) -> None:
        self._remarks = remarks
        self._engines: dict[str, _Seen] = {}
        self._left: dict[str, int] = {}
        """Groups that waited at a resume, with its line."""
        self._time = float("-inf")
        self._ended = False
        self._orphans = 0
        self._last_line = 0
        self._since_refit = self._longest = self._refits = 0
        self._version = 0

    def before(self, line: int, event: Event, ledger: Ledger, groups: Trained) -> None:
        """Look at an event that the ledger has not applied; ``groups`` are those of a step."""
        add = self._remarks.add
        if event.time < self._time - 1.0:
            add("clock_back", line, f"{self._time - event.time:.1f} seconds")
        self._time, self._last_line = event.time, line
        if isinstance(event, RunStarted):
            self._start(line, event, ledger)
        elif self._ended and not isinstance(event, GroupDropped):  # that a resume gives up
            add("line_after_end", line, f"a {type(event).__struct_config__.tag}")
        self._ended = isinstance(event, RunFinished)
        if isinstance(event, Gap):
            add("lines_lost", line, f"{event.lost} lines", times=event.lost)
            for seen in self._engines.values():
                seen.informed = False
        elif isinstance(event, RefitCut | RefitDone | RefitAborted):
            self._refit(line, event, ledger)
        elif isinstance(event, GroupPublished | GroupDropped):
            if isinstance(event, GroupPublished):
                self._left.pop(event.group, None)
            for call in event.calls:
                self._engine(call.engine, line)
        elif isinstance(event, StepTrained):
            self._step(line, event, groups)

    def after(self, line: int, numbers: StepStaleness | None, ledger: Ledger) -> None:
        """Look at what the ledger made of the event."""
        if ledger.orphans > self._orphans:
            number = ledger.orphans - self._orphans
            self._remarks.add("orphans", line, f"{number} forgotten here", times=number)
            self._orphans = ledger.orphans
        if numbers is None:
            return
        if not numbers.tokens:
            self._remarks.add("step_without_tokens", line, f"step {numbers.step}")
        self._since_refit += 1
        patience = max(FEWEST_STEPS, PATIENCE * self._longest)
        if self._refits and self._since_refit == patience + 1:
            detail = f"none in {self._since_refit} steps, step {numbers.step}"
            self._remarks.add("refits_stopped", line, detail)

    def finish(self, ledger: Ledger) -> None:
        """The trace ends here."""
        line, add = self._last_line, self._remarks.add
        if not self._ended:
            add("unfinished", line, "no run_finished")
        self._engines_end(ledger)
        for where in self._left.values():
            add("groups_discarded", where, "waited at this start")
        waiting = len(ledger.waiting())
        if waiting and self._ended:
            add("groups_never_trained", line, f"{waiting} groups", times=waiting)

    def _start(self, line: int, event: RunStarted, ledger: Ledger) -> None:
        add = self._remarks.add
        if event.torn:
            add("line_cut_off", line, f"{event.torn} bytes")
        if ledger.run is not None and event.step < ledger.step:
            detail = f"steps {event.step} to {ledger.step - 1}"
            add("steps_made_again", line, detail, times=ledger.step - event.step)
        self._engines_end(ledger)
        for group in ledger.waiting():
            self._left.setdefault(group.group, line)
        self._engines = {}
        for name in event.engines:
            self._engine(name, line)
        self._version = event.version

    def _engines_end(self, ledger: Ledger) -> None:
        """Say of each engine what no later line of this start can change."""
        others = any(seen.refitted for seen in self._engines.values())
        moved = ledger.version - self._version >= FEWEST_STEPS
        for name, seen in self._engines.items():
            if seen.aborted:
                self._remarks.add("refit_not_repeated", seen.aborted, f"engine {name!r}")
            for number, lack in seen.lacking.items():
                self._settle(f"refit {number} of {name!r}", lack)
            if not seen.refitted and not seen.aborted and not seen.lacking and (others or moved):
                self._remarks.add("engine_never_refitted", seen.line, f"engine {name!r}")

    def _settle(self, refit: str, lack: _Lack) -> None:
        """No better line comes for a refit."""
        if not lack.done:
            self._remarks.add("refit_unsettled", lack.line, refit)
        elif lack.why == "an inexact cut":
            self._remarks.add("inexact_cut", lack.line, refit)
        else:
            self._remarks.add("refit_without_cut", lack.line, refit)

    def _engine(self, name: str, line: int) -> _Seen:
        seen = self._engines.get(name)
        if seen is None:
            seen = self._engines[name] = _Seen(line)
        return seen

    def _refit(self, line: int, event: RefitCut | RefitDone | RefitAborted, ledger: Ledger) -> None:
        number, last = event.refit, ledger.last_refit(event.engine)
        seen = self._engine(event.engine, line)
        for skipped in range(max(last + 1, number - REFITS_KEPT), number):
            seen.lacking[skipped] = _Lack(line, "a refit that is in no line")
        if number > last:
            seen.lacking[number] = _Lack(line)
        lack = seen.lacking.get(number, _Lack(line))
        if isinstance(event, RefitCut):
            lack.joined = event.mode == JOINED
            lack.why = "an inexact cut" if event.exact is False and not lack.joined else ""
        elif isinstance(event, RefitAborted):
            seen.aborted = line
            seen.lacking.pop(number, None)
        else:
            lack.done, lack.line = True, line
            seen.aborted, seen.refitted, seen.informed = 0, True, True
            if self._refits and not lack.joined:  # steps before the first one are no rhythm
                self._longest = max(self._longest, self._since_refit)
            if not lack.joined:
                self._refits, self._since_refit = self._refits + 1, 0
        if lack.done and not lack.why:
            seen.lacking.pop(number, None)
        while len(seen.lacking) > REFITS_KEPT:
            first = min(seen.lacking)
            self._settle(f"refit {first} of {event.engine!r}", seen.lacking.pop(first))

    def _step(self, line: int, event: StepTrained, groups: Trained) -> None:
        for _, group in groups:
            if group.appended:
                detail = f"group {group.group.group!r}"
                self._remarks.add("unknown_tokens", line, detail, times=group.appended)
            for call in group.calls:
                unsure = sum(stop - start for start, stop, o, n in call.trained if o < n)
                if unsure:
                    restored = isinstance(group.group, GroupPublished) and group.group.restored
                    why = "restored without spans" if restored else self._why(call.call)
                    detail = f"step {event.step}, call {call.call.call!r}: {why}"
                    self._remarks.add("uncovered_tokens", line, detail, times=unsure)

    def _why(self, call: Call) -> str:
        """Why the versions of a call's tokens are not certain, the likeliest reason first."""
        seen = self._engines.get(call.engine)
        if seen is not None and not seen.informed:
            return "lines are lost"
        first, last = call.after or 0, call.until
        for number, lack in () if seen is None else seen.lacking.items():
            if number >= first and (last is None or number <= last):
                return lack.why or "a refit that may have happened"
        return "nobody saw it begin" if call.after is None else "a refit that is in no line"
