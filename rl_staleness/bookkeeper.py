"""Follows the tokens of a run from the events of its trace, for `rl_staleness.balance`.

Engines count what they generate; groups say what became of it. Both meet at the last cut of each
engine: tokens are placed before or after it, or left undecided where the trace does not say.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from rl_staleness.balance import Account, Balance
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
    RunStarted,
    StepTrained,
)
from rl_staleness.ledger import Ledger
from rl_staleness.trained import GroupTokens, Trained, tokens_of

__all__ = ["Bookkeeper"]

MOST_REASONS = 64
"""Reasons of drops that are told apart; the others are summed under one name."""

OTHER = "(other reasons)"

ANEW = "an engine's counter fell: it was attached anew"


class _Cut(msgspec.Struct):
    """The last cut of an engine, and what was made after it."""

    refit: int = 0
    calls: dict[str, int] = {}
    """Those that no group was published with so far."""
    exact: bool = True
    generated: int | None = None
    before: int = -1
    """The version that the engine had before its last refit, -1 if it had none."""
    since: int = 0
    """The version that the engine has had from this cut on, or from its refit's end."""
    seen: int = 0
    """The highest refit that any line names."""
    after: int = 0
    undecided: int = 0
    ahead: dict[str, Call] = {}
    """Published calls that ended behind a pause whose cut has not come so far."""


class Bookkeeper:
    """Follows the tokens of a run; takes every event just before the ledger does."""

    def __init__(self) -> None:
        self._trained, self._again, self._masked = Account(), Account(), Account()
        self._dropped: dict[str, Account] = {}
        self._appended = self._generated = self._after = self._undecided = self._running = 0
        self._left: dict[str, tuple[dict[int, int], int, int]] = {}
        """Groups that waited at a resume: their tokens by version, the policy's version, and
        tokens of a part that was rolled back."""
        self._once: set[str] = set()
        """Waiting groups that were trained and kept."""
        self._cuts: dict[str, _Cut] = {}
        self._sums: Counter[int] = Counter()
        """Summed tokens by version, of those that an engine may have made after its last cut."""
        self._open: dict[str, None] = {}

    def take(self, event: Event, ledger: Ledger, groups: Trained) -> None:
        """Follow one event that the ledger has not applied; ``groups`` are those of a step."""
        if isinstance(event, StepTrained):
            self._step(event, groups)
        elif isinstance(event, GroupPublished):
            self._published(event, ledger)
        elif isinstance(event, GroupDropped):
            self._drop(event, ledger)
        elif isinstance(event, RefitCut | RefitDone | RefitAborted):
            self._refit(event, ledger)
        elif isinstance(event, RunStarted):
            self._start(event, ledger)
        elif isinstance(event, Gap):
            self._open["lines are lost"] = None

    def close(self, ledger: Ledger) -> Balance:
        """The token ledger as the trace ends; nothing may follow."""
        waiting, discarded = Account(), Account()
        for group in ledger.waiting():
            if group.group not in self._once:
                tokens = tokens_of(group, ledger)
                waiting.add(tokens.generated, ledger.version, tokens.num_rolled_back)
        for left in self._left.values():
            discarded.add(*left)
        self._settle(ledger)
        found = Balance(
            generated=None if self._open else self._generated,
            trained=self._trained,
            trained_again=self._again,
            masked=self._masked,
            dropped=self._dropped,
            waiting=waiting,
            discarded=discarded,
            running=self._running,
            after=self._after,
            undecided=self._undecided,
            appended=self._appended,
            lost_lo=None,
            lost_hi=None,
            open=list(self._open),
        )
        if found.generated is not None:
            low = found.generated + found.after - found.accounted
            high = low + found.undecided
            found.lost_lo, found.lost_hi = (low if high < 0 else max(low, 0)), high
        return found

    # Groups.

    def _step(self, event: StepTrained, groups: Trained) -> None:
        kept = set(event.kept or ())
        done: set[str] = set()
        for at, group in groups:
            name = group.group.group
            self._appended += group.appended
            rolled_back = group.unknown - group.appended
            if name in self._once or name in done:
                self._again.add(group.trained, at, rolled_back)
            else:
                self._trained.add(group.trained, at, rolled_back)
                masked = Counter(group.generated)
                masked.subtract(group.trained)
                masked_too = group.num_rolled_back - rolled_back
                self._masked.add({v: n for v, n in masked.items() if n}, at, masked_too)
            done.add(name)
        self._once = (self._once - (done - kept)) | (done & kept)

    def _published(self, event: GroupPublished, ledger: Ledger) -> None:
        if ledger.is_waiting(event.group):
            self._open["a group was published twice"] = None
        self._once.discard(event.group)
        if not event.restored:
            self._place(event)
        elif self._left.pop(event.group, None) is None:
            self._open["restored groups were not waiting in this trace"] = None

    def _drop(self, event: GroupDropped, ledger: Ledger) -> None:
        waiting = ledger.published(event.group)
        if waiting is None:
            self._place(event)
        if event.group not in self._once:
            full = len(self._dropped) >= MOST_REASONS and event.reason not in self._dropped
            account = self._dropped.setdefault(OTHER if full else event.reason, Account())
            tokens: GroupTokens = tokens_of(event if waiting is None else waiting, ledger)
            account.add(tokens.generated, ledger.version, tokens.num_rolled_back)
        self._once.discard(event.group)

    def _place(self, group: GroupPublished | GroupDropped) -> None:
        """Say of a group's tokens on which side of the last cuts they were made."""
        for version, count in group.tokens.items():
            self._sums[version] += count
        for call in group.calls:
            cut = self._cuts.setdefault(call.engine, _Cut())
            if call.until is not None and call.until > cut.refit:
                cut.ahead[call.call] = call
            _place_call(call, cut)

    # Engines.

    def _start(self, event: RunStarted, ledger: Ledger) -> None:
        if ledger.run is not None:
            self._settle(ledger)
            for group in ledger.waiting():
                if group.group not in self._once:
                    tokens = tokens_of(group, ledger)
                    left = tokens.generated, ledger.version, tokens.num_rolled_back
                    self._left[group.group] = left
        self._once.clear()
        self._sums.clear()
        self._cuts = {name: _Cut() for name in event.engines}

    def _refit(self, event: RefitCut | RefitDone | RefitAborted, ledger: Ledger) -> None:
        if isinstance(event, RefitCut) and event.mode == JOINED and event.engine in self._cuts:
            self._open[ANEW] = None  # what its predecessor made since its last cut, nobody said
        cut = self._cuts.setdefault(event.engine, _Cut())
        if event.refit > cut.seen:
            cut.seen, cut.before = event.refit, ledger.engine_version(event.engine)
        if isinstance(event, RefitCut) and event.refit >= cut.refit:
            self._take_cut(event, cut)
            cut.since = ledger.engine_version(event.engine)
        elif isinstance(event, RefitDone) and event.refit == cut.refit:
            cut.since = event.version
        cut.ahead = {name: call for name, call in cut.ahead.items() if _until(call) >= event.refit}
        if len(self._sums) > 64:
            oldest = min(
                cut.since if cut.refit else ledger.engine_version(name)
                for name, cut in self._cuts.items()
            )
            self._sums = Counter({v: n for v, n in self._sums.items() if v >= oldest})

    def _take_cut(self, event: RefitCut, cut: _Cut) -> None:
        fell = event.generated is not None and event.generated < (cut.generated or 0)
        if fell and event.refit > cut.refit:  # a repeated cut replaces the first
            self._open[ANEW] = None
        cut.generated = event.generated
        cut.refit, cut.exact = event.refit, event.exact is not False
        cut.calls = dict(event.calls)
        cut.after = cut.undecided = 0
        for call in cut.ahead.values():
            _place_call(call, cut)

    def _settle(self, ledger: Ledger) -> None:
        """Close the books of one start of the run."""
        for name, cut in self._cuts.items():
            if cut.generated is None:
                self._open["not every engine's last cut carries its counter"] = None
            self._generated += cut.generated or 0
            self._running += sum(cut.calls.values())
            self._after += cut.after
            self._undecided += cut.undecided
            self._sums.setdefault(ledger.engine_version(name), 0)
        if not self._cuts:
            self._open["no engine is known"] = None
        had = [(cut.since, ledger.engine_version(name)) for name, cut in self._cuts.items()]
        for version, count in self._sums.items():
            if not any(since <= version <= now for since, now in had):
                continue  # no engine has had it since its last cut
            if any(cut.before >= version for cut in self._cuts.values()):
                self._undecided += count
            else:
                self._after += count


def _until(call: Call) -> int:
    return -1 if call.until is None else call.until


def _place_call(call: Call, cut: _Cut) -> None:
    """Say how many tokens of a call were made after the last cut of its engine."""
    count = cut.calls.pop(call.call, None)
    if count is not None:
        late = max(call.tokens - count, 0)
        if cut.exact:
            cut.after += late
        else:
            cut.undecided += late
    elif call.after is not None and call.after >= cut.refit:
        cut.after += call.tokens
    elif call.until is not None and call.until < cut.refit:
        return
    elif not (cut.exact and call.after is not None):  # such a cut would list it: it had ended
        cut.undecided += call.tokens
