"""Follows the tokens of a run from the events of its trace, for `rl_staleness.balance`.

Engines count what they generate; groups say what became of it. Both meet at the last cut of each
engine: tokens are placed before or after it, or left undecided where the trace does not say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set

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
from rl_staleness.trained import Trained, tokens_of

__all__ = ["Bookkeeper"]

MOST_REASONS = 64
"""Reasons of drops that are told apart; the others are summed under one name."""

OTHER = "(other reasons)"

ANEW = "an engine's counter fell: it was attached anew"

TWICE = "a group was published twice"

NEVER_WAITED = "restored groups were not waiting in this trace"

NOT_FOLLOWED = "restored groups were not waiting at the resume, and the trace cannot be read again"


class _Away(msgspec.Struct, frozen=True):
    """A group that left untrained, as it was then."""

    tokens: dict[int, int]
    """By version."""
    at: int
    """The policy's version."""
    rolled_back: int
    """Tokens of a part that was rolled back."""
    reason: str | None = None
    """Of its drop; None: it waited at a resume."""


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
    """Follows the tokens of a run; takes every event just before the ledger does.

    A group that is restored has its tokens in the accounts already. Where depends on how it left,
    and of groups that left for good nothing is kept: those that a rollback brings back after they
    were trained or dropped are known by their names only, from an earlier look at the trace.

    Args:
        returning: `returned` of that look.
    """

    def __init__(self, returning: Set[str] = frozenset()) -> None:
        self.returned: set[str] = set()
        """Restored groups of which nobody knows how they left."""
        self._returning = returning
        self._trained, self._again, self._masked = Account(), Account(), Account()
        self._dropped: dict[str, Account] = {}
        self._appended = self._generated = self._after = self._undecided = self._running = 0
        self._discarded = Account()
        self._away: dict[str, _Away | None] = {}
        """Groups that waited at a resume, or are among the returning ones and left, until they are
        restored. None: their tokens are trained."""
        self._once: set[str] = set()
        """Waiting groups that were trained before."""
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
        waiting = Account()
        for group in ledger.waiting():
            if group.group not in self._once:
                tokens = tokens_of(group, ledger)
                waiting.add(tokens.generated, ledger.version, tokens.num_rolled_back)
        for name in list(self._away):
            self._gone(name)
        self._settle(ledger)
        found = Balance(
            generated=None if self._open else self._generated,
            trained=self._trained,
            trained_again=self._again,
            masked=self._masked,
            dropped=self._dropped,
            waiting=waiting,
            discarded=self._discarded,
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
        used = done - kept
        self._once = (self._once - used) | (done & kept)
        self._away.update(dict.fromkeys(used & self._returning))

    def _published(self, event: GroupPublished, ledger: Ledger) -> None:
        waiting = ledger.is_waiting(event.group)
        if waiting:
            self._open[TWICE] = None
        if not event.restored:
            self._once.discard(event.group)
            self._gone(event.group)  # this one is another group of its name
            self._place(event)
        elif not waiting:
            self._restored(event.group)

    def _restored(self, name: str) -> None:
        """Take a group back out of where its tokens went; what was trained stays trained."""
        if name not in self._away:
            self.returned.add(name)
            self._open[NEVER_WAITED if name in self._returning else NOT_FOLLOWED] = None
        elif self._away.pop(name) is None:
            self._once.add(name)

    def _drop(self, event: GroupDropped, ledger: Ledger) -> None:
        name, waiting = event.group, ledger.published(event.group)
        if waiting is None:
            self._place(event)
        away = None
        if name not in self._once:
            away = _left(event if waiting is None else waiting, ledger, event.reason)
        self._once.discard(name)
        if waiting is not None and name in self._returning:
            self._away[name] = away
        elif away is not None:
            self._add(away)

    def _gone(self, name: str) -> None:
        """Nobody restores this group any more."""
        away = self._away.pop(name, None)
        if away is not None:
            self._add(away)

    def _add(self, away: _Away) -> None:
        """Put the tokens of a group that left untrained where they went."""
        account, reason = self._discarded, away.reason
        if reason is not None:
            full = len(self._dropped) >= MOST_REASONS and reason not in self._dropped
            account = self._dropped.setdefault(OTHER if full else reason, Account())
        account.add(away.tokens, away.at, away.rolled_back)

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
                once = group.group in self._once
                self._away[group.group] = None if once else _left(group, ledger)
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


def _left(group: GroupPublished | GroupDropped, ledger: Ledger, reason: str | None = None) -> _Away:
    tokens = tokens_of(group, ledger)
    return _Away(tokens.generated, ledger.version, tokens.num_rolled_back, reason)


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
