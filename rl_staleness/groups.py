"""The trained tokens of a step, group by group, by the versions that may have sampled them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping

import msgspec

from rl_staleness.events import Call, GroupDropped, GroupPublished, Mask
from rl_staleness.ranges import Segment, within
from rl_staleness.refits import Finding, Refits
from rl_staleness.spans import restored_spans, ruled_spans, spans_of

__all__ = ["Find", "StepTokens", "num_trained"]

Find = Callable[[str, str, str, str], None]
"""Takes a group, a call of it ("" if none), the name of a violation that they show, the detail."""

_Versions = tuple[int, int]
"""(oldest, newest) that may have sampled a token; it counts under the oldest."""

_Key = tuple[str, int, int | None, int | None, int | None]


class StepTokens:
    """Adds up the groups of one step, as the evidence stands at that moment.

    Most calls of a step began and ended alike: what is found for one of them, with the count of at
    most one cut, holds for all, so that the time of a step goes into its odd calls.

    Args:
        refits: those of an engine.
        lost: whether lines about an engine are missing.
        now: version of the step.
        find: is told of facts that cannot all be true.
    """

    def __init__(
        self,
        refits: Callable[[str], Refits],
        *,
        lost: Callable[[str], bool],
        now: int,
        find: Find,
    ) -> None:
        self.by_versions: defaultdict[int, dict[_Versions, int]] = defaultdict(dict)
        """Tokens by the version at which they were consumed, and by their versions."""
        self.unknown: Counter[int] = Counter()
        """Tokens without any version, by the version at which they were consumed."""
        self.spanning_calls = 0
        self.arrived = 0
        """Sum over the tokens of the newest version that counts in the token's group."""
        self._refits = refits
        self._lost = lost
        self._now = now
        self._find = find
        self._alike: dict[_Key, tuple[_Versions, _Versions] | None] = {}
        self._engines: dict[str, Refits] = {}

    def add(self, group: GroupPublished, masks: Mapping[str, Mask] | None, at: int) -> None:
        """Add a group's trained tokens.

        Args:
            masks: loss masks by call that became known at the step; other calls keep theirs.
            at: version of the update that consumes the group.
        """
        by, alike, engines = self.by_versions[at], self._alike, self._engines
        total, newest = 0, -1
        for version, count in group.tokens.items():
            if count:
                total += count
                newest = version if version > newest else newest
                versions = (version, version)
                by[versions] = by.get(versions, 0) + count
        plain = masks is None and not group.restored
        for call in group.calls:
            engine, tokens, after, until = call.engine, call.tokens, call.after, call.until
            refits = engines.get(engine) or self._engine(engine)
            counts = refits.listed.get(call.call)
            if counts is None and (after is None or after != until) and refits.aside:
                counts = refits.aside.get(call.call)
            refit, place, pairs = None, tokens, None
            if counts is not None:
                refit, place = next(iter(counts.items()))
            whole = plain and call.spans is None and call.trained is None
            if refit is not None and until is not None and refit > until:
                whole = False  # cannot be: named below
            if whole and (counts is None or len(counts) == 1):
                key = (engine, call.version, after, until, refit)
                pairs = alike[key] if key in alike else self._probe(key, call)
            if pairs is None or not place:
                for start, stop, oldest, last in self._odd(call, group, masks):
                    total += stop - start
                    newest = max(newest, oldest)
                    by[oldest, last] = by.get((oldest, last), 0) + stop - start
                continue
            versions, since = pairs
            total += tokens
            if place < tokens:
                by[since] = by.get(since, 0) + tokens - place
                newest = since[0] if since[0] > newest else newest
                self.spanning_calls += versions[0] != since[0]
                tokens = place
            by[versions] = by.get(versions, 0) + tokens
            newest = versions[0] if versions[0] > newest else newest
        self.arrived += newest * total
        if group.unknown:
            self.unknown[at] += group.unknown
        if newest > at:
            self._find_negative(group, masks, at)
        for name in masks or ():
            if all(call.call != name for call in group.calls):
                detail = "it was not published one by one"
                self._find(group.group, name, "mask_of_unknown_call", detail)

    def spans(self, call: Call, *, restored: bool | None) -> tuple[list[Segment], list[Finding]]:
        """The versions of all tokens of one call, and what was found about it."""
        if restored:
            return restored_spans(call, now=self._now)
        refits = self._engine(call.engine)
        return spans_of(call, refits, now=self._now, lost=self._lost(call.engine))

    def _probe(self, key: _Key, call: Call) -> tuple[_Versions, _Versions] | None:
        """The versions before and after its one count of any call like this; None: look at each."""
        pairs = None
        if not self._lost(call.engine):
            refit = key[-1]
            segments, found = ruled_spans(
                msgspec.structs.replace(call, tokens=2),
                {} if refit is None else {refit: 1},
                self._engine(call.engine),
                now=self._now,
            )
            if not found:
                pairs = (segments[0][2:], segments[-1][2:])
        self._alike[key] = pairs
        return pairs

    def _odd(
        self, call: Call, group: GroupPublished, masks: Mapping[str, Mask] | None
    ) -> list[Segment]:
        """The trained tokens of one call with everything that may be said of it."""
        segments, found = self.spans(call, restored=group.restored)
        for name, detail in found:
            self._find(group.group, call.call, name, detail)
        mask = call.trained if masks is None else masks.get(call.call, call.trained)
        if mask is not None:
            if any(stop > call.tokens for _, stop in mask):
                detail = f"only {call.tokens} tokens were made"
                self._find(group.group, call.call, "mask_beyond_call", detail)
            segments = within(segments, mask)
        self.spanning_calls += len({segment[2] for segment in segments}) > 1
        return segments

    def _find_negative(
        self, group: GroupPublished, masks: Mapping[str, Mask] | None, at: int
    ) -> None:
        """Name what is younger than the update that consumed it."""
        spanning = self.spanning_calls
        for version, count in group.tokens.items():
            if count and version > at:
                self._find(group.group, "", "negative_age", f"version {version}, trained at {at}")
        for call in group.calls:
            newest = max((s[2] for s in self._odd(call, group, masks)), default=0)
            if newest > at:
                detail = f"version {newest}, trained at {at}"
                self._find(group.group, call.call, "negative_age", detail)
        self.spanning_calls = spanning

    def _engine(self, name: str) -> Refits:
        refits = self._engines[name] = self._refits(name)
        return refits


def num_trained(group: GroupPublished | GroupDropped) -> int:
    """How many tokens of a group would reach the loss, whatever their versions."""
    number = sum(group.tokens.values())
    for call in group.calls:
        if call.trained is None:
            number += call.tokens
        else:
            whole = [(0, call.tokens, 0, 0)] if call.tokens else []
            number += sum(stop - start for start, stop, _, _ in within(whole, call.trained))
    return number + (group.unknown or 0 if isinstance(group, GroupPublished) else 0)
