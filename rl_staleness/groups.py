"""The trained tokens of a step, group by group, by the versions that may have sampled them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import sub

import msgspec

from rl_staleness.events import LARGEST, Call, GroupDropped, GroupPublished, Mask, Spans
from rl_staleness.listings import Listing
from rl_staleness.ranges import Segment, within
from rl_staleness.refits import Finding, Refits
from rl_staleness.spans import NEVER, restored_spans, ruled_spans, spans_of

__all__ = ["Find", "StepTokens", "num_trained"]

Find = Callable[[str, str, str, str], None]
"""Takes a group, a call of it ("" if none), the name of a violation that they show, the detail."""

_Versions = tuple[int, int]
"""(oldest, newest) that may have sampled a token; it counts under the oldest."""

_Key = tuple[str, int, int | None, int | None]
"""Engine, version, ``after``, ``until``: what calls that began and ended alike have in common."""


class _Path:
    """Calls of a kind that the same cuts list: their tokens up to the first count, the next, ..."""

    __slots__ = ("added", "is_span", "listings", "newest", "sole", "tokens", "versions")

    def __init__(self, versions: list[_Versions]) -> None:
        self.versions = versions
        """Of the tokens before the first count, between each two, and after the last."""
        self.sole = [oldest if oldest == newest else -1 for oldest, newest in versions]
        """The same where it is certain, else -1."""
        self.newest = max(oldest for oldest, _ in versions)
        self.is_span = len({oldest for oldest, _ in versions}) > 1
        self.tokens = 0
        """Of all its calls."""
        self.listings: list[Listing] = []
        """Of those calls that are listed."""
        self.added: list[Listing] = []
        """Of calls whose tokens are in the tally."""

    def says(self, places: tuple[int, ...], stop: int) -> Spans:
        """The spans of a call with these counts, where the engine says the same."""
        return tuple(zip((0, *places), (*places, stop), self.sole, strict=True))

    def drain(self) -> Iterator[tuple[_Versions, int]]:
        """Tokens by versions, of the calls since the last time."""
        counts = range(len(self.versions) - 1)
        sums = [sum([listing.places[n] for listing in self.listings]) for n in counts]
        reached = [0, *sums, self.tokens]
        yield from zip(self.versions, map(sub, reached[1:], reached), strict=True)
        self.tokens = 0
        self.added += self.listings
        self.listings.clear()


class _Kind:
    """Calls of the step that began and ended alike."""

    __slots__ = (
        "after",
        "crosses",
        "engine",
        "listed",
        "paths",
        "refits",
        "unlisted",
        "until",
        "version",
    )

    def __init__(self, key: _Key, refits: Refits, unlisted: _Path | None) -> None:
        self.engine, self.version, self.after, self.until = key
        self.refits = refits
        self.crosses = self.after is None or self.after != self.until
        """A cut may list them that has not come so far."""
        self.listed = refits.calls.listed
        self.unlisted = unlisted
        """Those that no cut lists; None: each is looked at by itself."""
        self.paths: dict[tuple[int, ...], _Path | None] = {}
        """Others by the refits whose cuts list them; None: each is looked at by itself."""


class StepTokens:
    """Adds up the groups of one step, as the evidence stands at that moment.

    Most calls of a step began and ended alike: what is found for one of them, with the count of at
    most one cut, holds for all, so that the time of a step goes into its odd calls.

    Args:
        refits: those of an engine.
        lost: whether lines about an engine are missing.
        now: version of the step.
        limit: version that the run started from, or was resumed at; nothing restored is newer.
        find: is told of facts that cannot all be true.
    """

    def __init__(
        self,
        refits: Callable[[str], Refits],
        *,
        lost: Callable[[str], bool],
        now: int,
        limit: int,
        find: Find,
    ) -> None:
        self.by_versions: defaultdict[int, dict[_Versions, int]] = defaultdict(dict)
        """Tokens by the version at which they were consumed, and by their versions."""
        self.unknown: Counter[int] = Counter()
        """Tokens without any version, by the version at which they were consumed."""
        self.spanning_calls = 0
        self.arrived = 0
        """Sum over the tokens of the newest version that counts in the token's group."""
        self.missing: dict[str, None] = {}
        """Groups of the step that are not there."""
        self._refits = refits
        self._lost = lost
        self._now = now
        self._limit = limit
        self._find = find
        self._kinds: dict[_Key, _Kind] = {}
        self._kind: _Kind | None = None
        """That of the last call."""
        self._alone: list[Call] = []
        """Calls that are in no path, or that no cut lists so far."""
        self._sums: dict[int, int] = {}
        self._at = -1

    def add(
        self, groups: Iterable[GroupPublished], masks: Mapping[str, Mapping[str, Mask]], at: int
    ) -> None:
        """Add the trained tokens of the groups of one update.

        Args:
            masks: loss masks by group and call that became known at the step; other calls keep
                theirs.
            at: version of that update.
        """
        self._at, sums, kind = at, self._sums, self._kind
        for group in groups:
            late = masks.get(group.group) if masks else None
            total, newest = 0, -1
            summed = self._summed_before(group) if group.restored else group.tokens
            for version, count in summed.items():
                total += count
                sums[version] = sums.get(version, 0) + count
                if count and version > newest:
                    newest = version
            plain = late is None and not group.restored
            for call in group.calls:
                stop, spans, path = call.tokens, call.spans, None
                if plain and call.trained is None:
                    if (
                        kind is None
                        or call.version != kind.version
                        or call.after != kind.after
                        or call.until != kind.until
                        or call.engine != kind.engine
                    ):
                        kind = self._kind_of(call)
                    listing, path = kind.listed.get(call.call), kind.unlisted
                    if path is None:
                        pass
                    elif listing is None:
                        if spans is not None and spans != path.says((), stop):
                            path = None
                        elif kind.crosses:
                            self._alone.append(call)
                    else:
                        refits, places = listing.refits, listing.places
                        path = kind.paths.get(refits) or self._path(kind, refits, call)
                        if (
                            path is None
                            or not listing.rising
                            or places[-1] >= stop
                            or (spans is not None and spans != path.says(places, stop))
                        ):
                            path = None
                        else:
                            path.listings.append(listing)
                if path is None:
                    stop, version = self._add_odd(call, group, late)
                else:
                    path.tokens += stop
                    version = path.newest if stop else -1
                total += stop
                if version > newest:
                    newest = version
            self.arrived += newest * total
            if group.unknown or late or newest > at:
                self._look_at(group, late, newest)
        self._settle()

    def _look_at(
        self, group: GroupPublished, masks: Mapping[str, Mask] | None, newest: int
    ) -> None:
        """What few groups have: unknown tokens, masks that came late, what is too young."""
        self.unknown[self._at] += group.unknown or 0
        if newest > self._at:
            self._find_negative(group, masks)
        for name in sorted((masks or {}).keys() - {call.call for call in group.calls}):
            detail = "it was not published one by one"
            self._find(group.group, name, "mask_of_unknown_call", detail)

    def _settle(self) -> None:
        """Bring what was summed up by kind into the tally."""
        tally: list[tuple[_Versions, int]] = [((v, v), n) for v, n in self._sums.items()]
        for kind in self._kinds.values():
            for path in filter(None, (kind.unlisted, *kind.paths.values())):
                self.spanning_calls += len(path.listings) if path.is_span else 0
                tally += path.drain()
        self._sums.clear()
        for versions, number in tally:
            if number:
                by = self.by_versions[self._at]
                by[versions] = by.get(versions, 0) + number

    def leave(self) -> None:
        """The groups were trained: what cuts say of their calls is kept for a while, not longer."""
        for kind in self._kinds.values():
            for path in filter(None, kind.paths.values()):
                kind.refits.calls.left_listed(path.added, kind.refits.last)
        for call in self._alone:
            self._refits(call.engine).left(call)

    def spans(self, call: Call, *, restored: bool | None) -> tuple[list[Segment], list[Finding]]:
        """The versions of all tokens of one call, and what was found about it."""
        if restored:
            return restored_spans(call, now=self._now, limit=self._limit)
        refits = self._refits(call.engine)
        return spans_of(call, refits, now=self._now, lost=self._lost(call.engine))

    def _summed_before(self, group: GroupPublished) -> dict[int, int]:
        """Tokens by version of a restored group's calls that no refit touched."""
        for version, count in group.tokens.items():
            if version > self._limit and count:
                detail = f"version {version}, but the run went on from {self._limit}"
                self._find(group.group, "", "beyond_resume", detail)
                self.unknown[self._at] += count
        return {version: n for version, n in group.tokens.items() if version <= self._limit}

    def _add_odd(
        self, call: Call, group: GroupPublished, masks: Mapping[str, Mask] | None
    ) -> tuple[int, int]:
        """Add a call that is like no other; its tokens, and the newest version of them."""
        if not group.restored:
            self._alone.append(call)
        by = self.by_versions[self._at]
        total, newest = 0, -1
        for start, stop, oldest, last in self._odd(call, group, masks):
            if oldest == NEVER:
                self.unknown[self._at] += stop - start
                continue
            total += stop - start
            newest = max(newest, oldest)
            by[oldest, last] = by.get((oldest, last), 0) + stop - start
        return total, newest

    def _kind_of(self, call: Call) -> _Kind:
        """The kind of a call, made when its first call comes."""
        key = (call.engine, call.version, call.after, call.until)
        kind = self._kind = self._kinds.get(key)
        if kind is None:
            engine, version, after, until = key
            like = Call(call="", engine=engine, version=version, tokens=1, after=after, until=until)
            refits = self._refits(engine)
            unlisted = self._probe(like, (), refits)
            kind = self._kind = self._kinds[key] = _Kind(key, refits, unlisted)
        return kind

    def _path(self, kind: _Kind, numbers: tuple[int, ...], call: Call) -> _Path | None:
        """What the cuts of these refits make of a kind."""
        if numbers not in kind.paths:
            kind.paths[numbers] = self._probe(call, numbers, self._refits(call.engine))
        return kind.paths[numbers]

    def _probe(self, call: Call, numbers: tuple[int, ...], refits: Refits) -> _Path | None:
        """The versions of a call that had a token more at each cut; None: look at each like it.

        What counts say of a call depends on their order alone, and it changes at counts only.
        """
        until = LARGEST if call.until is None else call.until
        if self._lost(call.engine) or max((*numbers, call.after or 0)) > until:
            return None
        call = msgspec.structs.replace(call, tokens=len(numbers) + 1)
        counts = {number: place for place, number in enumerate(numbers, start=1)}
        segments, found = ruled_spans(call, counts, refits, now=self._now)
        versions = [(o, n) for start, stop, o, n in segments for _ in range(start, stop)]
        return None if found else _Path(versions)

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
        self.spanning_calls += len({segment[2] for segment in segments} - {NEVER}) > 1
        return segments

    def _find_negative(self, group: GroupPublished, masks: Mapping[str, Mask] | None) -> None:
        """Name what is younger than the update that consumed it."""
        spanning, at = self.spanning_calls, self._at
        for version, count in group.tokens.items():
            if count and version > at and not (group.restored and version > self._limit):
                self._find(group.group, "", "negative_age", f"version {version}, trained at {at}")
        for call in group.calls:
            newest = max((s[2] for s in self._odd(call, group, masks)), default=0)
            if newest > at:
                detail = f"version {newest}, trained at {at}"
                self._find(group.group, call.call, "negative_age", detail)
        self.spanning_calls = spanning


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
