"""What a step trains, call by call: the same evidence as the ledger's, before it is added up.

Calls that were summed when their group was published are whole calls of one version; how many they
were is lost, unless the group's ``about`` says so (``summed_calls: {version: calls}``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import msgspec

from rl_staleness.events import LARGEST, Call, GroupDropped, GroupPublished, Mask, StepTrained
from rl_staleness.ledger import Ledger
from rl_staleness.ranges import Segment, within
from rl_staleness.spans import restored_spans

__all__ = ["CallTokens", "GroupTokens", "counts_by_name", "groups_of", "tokens_of"]


class CallTokens(msgspec.Struct, frozen=True, gc=False):
    """The tokens of one call by the versions that may have sampled them."""

    call: Call
    segments: list[Segment]
    """All that were generated."""
    trained: list[Segment]
    """Those that reach the loss."""

    @property
    def begin(self) -> int:
        """The version that its first token counts under; without a token, its stamp."""
        return self.segments[0][2] if self.segments else self.call.version

    @property
    def oldest(self) -> int:
        """The oldest version that a token of it counts under; without a token, its stamp."""
        return min((s[2] for s in self.segments), default=self.call.version)

    @property
    def newest(self) -> int:
        """The newest version that a token of it counts under; without a token, its stamp."""
        return max((s[2] for s in self.segments), default=self.call.version)


class GroupTokens(msgspec.Struct, frozen=True, gc=False):
    """The tokens of one group, as the evidence stands at one moment."""

    group: GroupPublished | GroupDropped
    calls: tuple[CallTokens, ...]

    @property
    def sums(self) -> dict[int, int]:
        """Tokens by version of the calls that were summed."""
        return {version: count for version, count in self.group.tokens.items() if count}

    @property
    def about(self) -> Mapping[str, Any]:
        """What the trainer said of the group."""
        return (self.group.about or {}) if isinstance(self.group, GroupPublished) else {}

    @property
    def unknown(self) -> int:
        """Trained tokens that no call made."""
        return (self.group.unknown or 0) if isinstance(self.group, GroupPublished) else 0

    @property
    def trained(self) -> dict[int, int]:
        """Trained tokens by the version that they count under."""
        tokens = self.sums
        for call in self.calls:
            for start, stop, oldest, _ in call.trained:
                tokens[oldest] = tokens.get(oldest, 0) + stop - start
        return tokens

    @property
    def generated(self) -> int:
        """Generated tokens, those that the loss mask leaves out included."""
        return sum(self.sums.values()) + sum(call.call.tokens for call in self.calls)

    @property
    def summed_calls(self) -> dict[int, int] | None:
        """How many calls were summed, by version; None: the trace does not say."""
        if not self.sums:
            return {}
        counts = counts_by_name(self.about.get("summed_calls"))
        if counts is None or set(counts) != {str(version) for version in self.sums}:
            return None
        return {int(version): number for version, number in counts.items() if number}


def counts_by_name(said: object) -> dict[str, int] | None:
    """Counts that a trainer put into ``about``; None: they are of another shape."""
    if not isinstance(said, dict):
        return None
    counts = cast("dict[str, object]", said)
    whole = {name: n for name, n in counts.items() if type(n) is int and 0 <= n <= LARGEST}
    return whole if len(whole) == len(counts) else None


def groups_of(event: StepTrained, ledger: Ledger) -> Iterator[tuple[int, GroupTokens]]:
    """The groups of a step that is not applied yet, each with the version that consumes it.

    A group in two batches comes twice; one that is not waiting is left out.
    """
    masks = event.trained or {}
    batches = event.batches if event.batches is not None else (event.groups or (),)
    for at, batch in enumerate(batches, start=event.version):
        for name in batch:
            group = ledger.published(name)
            if group is not None:
                yield at, tokens_of(group, ledger, masks=masks.get(name))


def tokens_of(
    group: GroupPublished | GroupDropped,
    ledger: Ledger,
    *,
    masks: Mapping[str, Mask] | None = None,
) -> GroupTokens:
    """The tokens of a group as the evidence stands now.

    Args:
        masks: loss masks by call that became known at the step; other calls keep theirs.
    """
    restored = isinstance(group, GroupPublished) and group.restored
    calls: list[CallTokens] = []
    for call in group.calls:
        segments = restored_spans(call, now=ledger.version)[0] if restored else ledger.spans(call)
        mask = call.trained if masks is None else masks.get(call.call, call.trained)
        trained = segments if mask is None else within(segments, mask)
        calls.append(CallTokens(call, segments, trained))
    return GroupTokens(group, tuple(calls))
