"""A published group's trained tokens by the versions that may have sampled them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec

from rl_staleness.events import Call, GroupDropped, GroupPublished, Mask
from rl_staleness.ranges import Segment, within
from rl_staleness.refits import Finding, Refits
from rl_staleness.spans import restored_spans, ruled_spans, spans_of

__all__ = ["Find", "GroupTokens", "Reader", "num_trained"]

Find = Callable[[str, str, str], None]
"""Takes the name of a violation, the call that it is about ("" if none), and the detail."""

_Pairs = tuple[tuple[int, int], tuple[int, int]]
"""(oldest, newest) of a call's tokens before and after the one count of it."""

_Key = tuple[str, int, int | None, int | None, int | None]


class GroupTokens(NamedTuple):
    """Trained tokens of a group, as the evidence stands at one step."""

    by_versions: dict[tuple[int, int], int]
    """By (oldest, newest); a token counts under the oldest."""
    unknown: int
    """Tokens without any version."""
    spanning_calls: int
    newest_counted: int
    """The newest version that a token counts under: until there the group was in flight."""


class Reader:
    """Reads groups as the evidence of one moment says, while no event comes in between.

    Most calls of a step began and ended alike: what is found for one of them, with the count of at
    most one cut, holds for all, so that the time for a step goes into its odd calls.

    Args:
        refits: those of an engine.
        lost: whether lines about an engine are missing.
        now: version of the step.
    """

    def __init__(
        self, refits: Callable[[str], Refits], *, lost: Callable[[str], bool], now: int
    ) -> None:
        self._refits = refits
        self._lost = lost
        self._now = now
        self._alike: dict[_Key, _Pairs | None] = {}
        self._engines: dict[str, Refits] = {}

    def tokens(
        self, group: GroupPublished, *, masks: Mapping[str, Mask] | None, at: int, find: Find
    ) -> GroupTokens:
        """Add up a group's trained tokens.

        Args:
            masks: loss masks by call that became known at the step; other calls keep theirs.
            at: version of the update that consumes the group first.
            find: is told of facts that cannot all be true.
        """
        by: dict[tuple[int, int], int] = {}
        spanning = 0
        for version, count in (group.tokens or {}).items():
            if count:
                by[version, version] = count
        plain = masks is None and not group.restored
        alike, engines = self._alike, self._engines
        for call in group.calls or ():
            refits = engines.get(call.engine) or self._engine(call.engine)
            counts = refits.listed.get(call.call)
            if counts is None and refits.aside:
                counts = refits.aside.get(call.call)
            refit, place = None, call.tokens
            if counts is not None:
                refit, place = next(iter(counts.items()))
            pairs = None
            whole = plain and call.spans is None and call.trained is None
            if whole and (counts is None or len(counts) == 1):
                key = (call.engine, call.version, call.after, call.until, refit)
                pairs = alike[key] if key in alike else self._probe(key, call)
            if pairs is None or not place:
                spanning += self._add_odd(call, group, masks, at, by, find)
                continue
            versions, since = pairs
            if place >= call.tokens:
                by[versions] = by.get(versions, 0) + call.tokens
            else:
                by[versions] = by.get(versions, 0) + place
                by[since] = by.get(since, 0) + call.tokens - place
                spanning += versions[0] != since[0]
        newest = max(by)[0] if by else 0
        if newest > at:
            self._find_negative(group, masks, at, find)
        if masks:
            names = {call.call for call in group.calls or ()}
            for name in masks.keys() - names:
                find("mask_of_unknown_call", name, "it was not published one by one")
        return GroupTokens(by, group.unknown or 0, spanning, newest)

    def spans(self, call: Call, *, restored: bool | None) -> tuple[list[Segment], list[Finding]]:
        """The versions of all tokens of one call, and what was found about it."""
        if restored:
            return restored_spans(call, now=self._now)
        refits = self._engine(call.engine)
        return spans_of(call, refits, now=self._now, lost=self._lost(call.engine))

    def _probe(self, key: _Key, call: Call) -> _Pairs | None:
        """Find the versions of calls like this one; None if each has to be looked at."""
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

    def _add_odd(
        self,
        call: Call,
        group: GroupPublished,
        masks: Mapping[str, Mask] | None,
        at: int,
        by: dict[tuple[int, int], int],
        find: Find,
    ) -> bool:
        """Add one call with everything that may be said of it; whether it spans versions."""
        segments, found = self.spans(call, restored=group.restored)
        for name, detail in found:
            find(name, call.call, detail)
        mask = call.trained if masks is None else masks.get(call.call, call.trained)
        if mask is not None:
            if any(stop > call.tokens for _, stop in mask):
                find("mask_beyond_call", call.call, f"only {call.tokens} tokens were made")
            segments = within(segments, mask)
        for start, stop, oldest, newest in segments:
            by[oldest, newest] = by.get((oldest, newest), 0) + stop - start
        return len({segment[2] for segment in segments}) > 1

    def _find_negative(
        self, group: GroupPublished, masks: Mapping[str, Mask] | None, at: int, find: Find
    ) -> None:
        """Name what is younger than the update that consumed it."""
        for version, count in (group.tokens or {}).items():
            if count and version > at:
                find("negative_age", "", f"version {version}, trained at {at}")
        for call in group.calls or ():
            by: dict[tuple[int, int], int] = {}
            self._add_odd(call, group, masks, at, by, lambda *_: None)
            newest = max(by)[0] if by else 0
            if newest > at:
                find("negative_age", call.call, f"version {newest}, trained at {at}")

    def _engine(self, name: str) -> Refits:
        refits = self._engines[name] = self._refits(name)
        return refits


def num_trained(group: GroupPublished | GroupDropped) -> int:
    """How many tokens of a group would reach the loss, whatever their versions."""
    number = sum((group.tokens or {}).values())
    for call in group.calls or ():
        if call.trained is None:
            number += call.tokens
        else:
            whole = [(0, call.tokens, 0, 0)] if call.tokens else []
            number += sum(stop - start for start, stop, _, _ in within(whole, call.trained))
    return number + (group.unknown or 0 if isinstance(group, GroupPublished) else 0)
