"""A published group's trained tokens by the versions that may have sampled them. Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rl_staleness.events import Call, GroupDropped, GroupPublished, Mask
from rl_staleness.ranges import Segment, within
from rl_staleness.refits import Finding

__all__ = ["GroupTokens", "num_trained", "tokens_of"]


@dataclass(slots=True)
class GroupTokens:
    """Trained tokens of a group, as the evidence stands at one step."""

    by_versions: Counter[tuple[int, int]]
    """By (oldest, newest); a token counts under the oldest."""
    unknown: int
    """Tokens without any version."""
    spanning_calls: int
    newest_counted: int
    """The newest version that a token counts under: until there the group was in flight."""


def tokens_of(
    group: GroupPublished,
    *,
    masks: Mapping[str, Mask] | None,
    consumed_at: int,
    spans: Callable[[Call], tuple[list[Segment], list[Finding]]],
    find: Callable[[str, str, str], None],
) -> GroupTokens:
    """Add up a group's trained tokens.

    Args:
        masks: loss masks by call that became known at the step; other calls keep theirs.
        consumed_at: version of the update that consumes the group first.
        spans: the versions of a call's tokens, and what was found about it.
        find: takes the name of a violation, the call that it is about, if any, and the detail.
    """
    by_versions: Counter[tuple[int, int]] = Counter()
    for version, count in (group.tokens or {}).items():
        if count:
            by_versions[version, version] += count
            if version > consumed_at:
                find("negative_age", "", f"version {version}, trained at {consumed_at}")
    spanning = 0
    for call in group.calls or ():
        segments, found = spans(call)
        for name, detail in found:
            find(name, call.call, detail)
        mask = call.trained if masks is None else masks.get(call.call, call.trained)
        if mask is not None:
            if any(stop > call.tokens for _, stop in mask):
                find("mask_beyond_call", call.call, f"only {call.tokens} tokens were made")
            segments = within(segments, mask)
        newest = -1
        for start, stop, oldest, last in segments:
            by_versions[oldest, last] += stop - start
            newest = max(newest, oldest)
        spanning += len(segments) > 1 and any(s[2] != newest for s in segments)
        if newest > consumed_at:
            find("negative_age", call.call, f"version {newest}, trained at {consumed_at}")
    for name in masks or ():
        if all(call.call != name for call in group.calls or ()):
            find("mask_of_unknown_call", name, "it was not published one by one")
    newest_counted = max((oldest for oldest, _ in by_versions), default=0)
    return GroupTokens(by_versions, group.unknown or 0, spanning, newest_counted)


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
