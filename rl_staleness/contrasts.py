"""What common ways to measure would have read on this trace, where they differ from the truth.

Each is a number over the whole run next to the exact one, both over the same tokens. Only what a
trace shows is here. It cannot show a version that was read late by a client, a shifted mask, a
baseline that moves with the engines, labels made up by a gateway or a cache, padding rows, a turn
that is encoded twice, or a chart whose rows are shifted or lost.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from rl_staleness.events import (
    Event,
    GroupDropped,
    GroupPublished,
    RefitCut,
    RunStarted,
    StepTrained,
)
from rl_staleness.ledger import Ledger
from rl_staleness.staleness import StepStaleness
from rl_staleness.trained import GroupTokens, Trained, counts_by_name, tokens_of

__all__ = ["Contrast", "Contrasts"]


class Contrast(msgspec.Struct, frozen=True, kw_only=True):
    """One way to measure that is off on this trace."""

    name: str
    reads: float
    """Its number, in policy updates unless `what` says otherwise."""
    true: float
    """The exact number over the same tokens."""
    times: int
    """Calls, groups, tokens or steps that make the difference, as `what` says."""
    what: str


WHAT = {
    "begin_stamp": "a call's version at its begin for all of its tokens; {} calls span versions",
    "end_stamp": "a call's version at its end for all of its tokens; {} calls span versions",
    "group_stamp": "the oldest stamp of a group for all of its tokens; {} groups mix stamps",
    "mean_of_groups": "a mean over groups, whatever their size; {} groups",
    "no_queue": "the age as the group is complete, not as it is trained; {} groups waited",
    "one_baseline": "one age for all updates of a step; {} steps had several batches",
    "in_refits": "counted in refits instead of policy updates; {} steps differ",
    "with_dropped": "dropped tokens counted as if trained; {} tokens were dropped",
    "missing_as_zero": "a missing version taken as 0 (true: left out); {} tokens have none",
    "prompts_counted": "prompt tokens counted, with the version at the begin; {} calls",
    "empty_attempts": "the oldest version of a group, calls without a token too (true: without"
    " them), a mean over these groups; {} groups",
    "first_pass": "a group that is trained again keeps the age of the first time; {} times again",
}
"""What each measures; the braces are for how often it made a difference."""

SAME = 1e-9
"""Two means that lie closer are one number, added up in another order."""

KV_KEPT = "kv_kept"
WHAT[KV_KEPT] = (
    "the KV cache of {} running calls was kept over a refit: the policy's age (both numbers) is"
    " exact, the keys and values of these calls are older"
)


class _Sums(msgspec.Struct):
    """Sums of two measures over the same tokens (or groups)."""

    reads: int | float = 0
    true: int | float = 0
    over: int = 0
    """Tokens, or groups, that `true` is over."""
    reads_over: int = 0
    times: int = 0


class Contrasts:
    """Adds up every measure; takes each event just before the ledger does."""

    def __init__(self) -> None:
        self._sums = {name: _Sums() for name in WHAT}
        self._first: dict[str, tuple[int, int]] = {}
        """Version and step that trained a group first, of those that were kept. One that was
        used up and is restored starts anew."""

    def take(self, event: Event, ledger: Ledger, groups: Trained) -> None:
        """Add one event that the ledger has not applied; ``groups`` are those of a step."""
        if isinstance(event, StepTrained):
            self._step(event, groups)
        elif isinstance(event, GroupDropped):
            waiting = ledger.published(event.group)
            dropped = tokens_of(event if waiting is None else waiting, ledger).trained
            sums = self._sums["with_dropped"]
            for version, count in dropped.items():
                sums.reads += (ledger.version - version) * count
                sums.reads_over += count
                sums.times += count
            self._first.pop(event.group, None)
        elif isinstance(event, GroupPublished):
            if not event.restored:
                self._first.pop(event.group, None)
        elif isinstance(event, RunStarted):
            # Steps that are undone leave no age behind: the trainer's state is older than they are.
            self._first = {n: first for n, first in self._first.items() if first[1] < event.step}
        elif isinstance(event, RefitCut) and event.kv == "kept":
            self._sums[KV_KEPT].times += sum(count > 0 for count in event.calls.values())

    def look(self, numbers: StepStaleness) -> None:
        """Add what the ledger made of a step."""
        aged = sum(numbers.tokens_by_age.values())
        if aged:
            kept = self._sums[KV_KEPT]
            total = round((numbers.batch_age or 0.0) * aged)
            kept.reads, kept.true = kept.reads + total, kept.true + total
            kept.over, kept.reads_over = kept.over + aged, kept.reads_over + aged
            age, refits = numbers.batch_age or 0.0, numbers.batch_age_refits or 0.0
            self._add("in_refits", round(refits * aged), round(age * aged), aged, refits != age)

    def found(self) -> Iterator[Contrast]:
        """Those that made a difference."""
        for name, sums in self._sums.items():
            if sums.times and sums.over and sums.reads_over:
                reads, true = sums.reads / sums.reads_over, sums.true / sums.over
                if abs(reads - true) > SAME or name == KV_KEPT:
                    what = WHAT[name].format(f"{sums.times:,}")
                    yield Contrast(name=name, reads=reads, true=true, times=sums.times, what=what)

    def _add(self, name: str, reads: float, true: float, over: int, times: int) -> None:
        sums = self._sums[name]
        sums.reads += reads
        sums.true += true
        sums.over += over
        sums.reads_over += over
        sums.times += times

    def _step(self, event: StepTrained, groups: Trained) -> None:
        kept = set(event.kept or ())
        several = event.batches is not None and len(event.batches) > 1
        names: set[str] = set()
        at_once = age_of_all = tokens_of_all = 0
        for at, group in groups:
            trained = group.trained
            tokens = sum(trained.values())
            age = sum((at - version) * count for version, count in trained.items())
            name = group.group.group
            names.add(name)
            self._stamps(group, at, age, tokens)
            self._others(group, at, age, tokens)
            first, _ = self._first.setdefault(name, (at, event.step))
            self._add("first_pass", age - (at - first) * tokens, age, tokens, first != at)
            at_once += age - (at - event.version) * tokens
            age_of_all, tokens_of_all = age_of_all + age, tokens_of_all + tokens
        self._add("one_baseline", at_once, age_of_all, tokens_of_all, several)
        for name in names - kept:
            self._first.pop(name, None)

    def _stamps(self, group: GroupTokens, at: int, age: int, tokens: int) -> None:
        begin = end = sum((at - version) * count for version, count in group.sums.items())
        spanning = 0
        stamps = {*group.sums, *(call.call.version for call in group.calls)}
        for call in group.calls:
            number = sum(stop - start for start, stop, _, _ in call.trained)
            begin += (at - call.begin) * number
            end += (at - call.newest) * number
            spanning += len({segment[2] for segment in call.trained}) > 1
        self._add("begin_stamp", begin, age, tokens, spanning)
        self._add("end_stamp", end, age, tokens, spanning)
        oldest = min(stamps, default=at)
        self._add("group_stamp", (at - oldest) * tokens, age, tokens, len(stamps) > 1)

    def _others(self, group: GroupTokens, at: int, age: int, tokens: int) -> None:
        trained = group.trained
        if tokens:
            newest = max(trained)
            sums = self._sums["mean_of_groups"]
            sums.reads += age / tokens
            sums.reads_over += 1
            sums.true, sums.over = sums.true + age, sums.over + tokens
            sums.times += 1
            queued = (at - newest) * tokens
            self._add("no_queue", age - queued, age, tokens, queued != 0)
        sums = self._sums["missing_as_zero"]
        sums.reads += age + at * group.unknown
        sums.reads_over += tokens + group.unknown
        sums.true, sums.over = sums.true + age, sums.over + tokens
        sums.times += group.unknown
        dropped = self._sums["with_dropped"]
        dropped.reads, dropped.reads_over = dropped.reads + age, dropped.reads_over + tokens
        dropped.true, dropped.over = dropped.true + age, dropped.over + tokens
        self._prompts(group, at)
        empty = [call for call in group.calls if not call.call.tokens]
        if empty and trained:
            oldest = min([*trained, *(call.call.version for call in empty)])
            self._add("empty_attempts", at - oldest, at - min(trained), 1, 1)

    def _prompts(self, group: GroupTokens, at: int) -> None:
        said = group.about.get("prompt_tokens")
        by_call = counts_by_name(said)
        for call in group.calls:
            prompt = by_call.get(call.call.call) if by_call is not None else said
            if type(prompt) is not int or prompt < 0 or not call.trained:
                continue
            tokens = sum(stop - start for start, stop, _, _ in call.trained)
            age = sum((at - oldest) * (stop - start) for start, stop, oldest, _ in call.trained)
            sums = self._sums["prompts_counted"]
            sums.reads += age + (at - call.begin) * prompt
            sums.reads_over += tokens + prompt
            sums.true, sums.over = sums.true + age, sums.over + tokens
            sums.times += 1
