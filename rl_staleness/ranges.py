"""Ranges of a call's tokens and the versions that may have sampled them. Pure functions.

A segment ``(start, stop, oldest, newest)`` says that each of the tokens ``[start, stop)`` was
sampled from one of the versions from ``oldest`` to ``newest``. The segments of a call are in order,
without holes and not empty; nothing here ever walks over single tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

__all__ = ["Segment", "Span", "covered_by", "move", "overlapping", "split", "widen", "within"]

Segment = tuple[int, int, int, int]
"""``(start, stop, oldest, newest)``: half open, versions inclusive, equal where it is known."""

Span = tuple[int, ...]
"""``(start, stop, version)`` or ``(start, stop, oldest, newest)``, as an engine says it."""


def move(segments: list[Segment], place: int, oldest: int, newest: int) -> list[Segment]:
    """Give the tokens from ``place`` on to other versions: the engine was refitted there.

    The list that is passed may be changed.

    >>> move([(0, 90, 0, 0)], 30, 1, 1)
    [(0, 30, 0, 0), (30, 90, 1, 1)]
    """
    if not segments or place >= segments[-1][1]:
        return segments
    start, stop, old, new = segments[-1]
    if start < place:  # where nearly every refit finds a call
        segments[-1:] = (start, place, old, new), (place, stop, oldest, newest)
        return segments
    before = [(a, min(b, place), o, n) for a, b, o, n in segments if a < place]
    return [*before, (place, segments[-1][1], oldest, newest)]


def split(segments: Iterable[Segment], place: int) -> list[Segment]:
    """Part the segment that has tokens on both sides of a place.

    >>> split([(0, 90, 0, 0)], 30)
    [(0, 30, 0, 0), (30, 90, 0, 0)]
    """
    parts: list[Segment] = []
    for start, stop, oldest, newest in segments:
        if start < place < stop:
            parts.append((start, place, oldest, newest))
            start = place
        parts.append((start, stop, oldest, newest))
    return parts


def widen(
    segments: list[Segment], start: int, stop: int, oldest: int, newest: int
) -> list[Segment]:
    """Let the tokens ``[start, stop)`` be of these versions too: nobody knows.

    >>> widen([(0, 40, 0, 0)], 10, 40, 1, 1)
    [(0, 10, 0, 0), (10, 40, 0, 1)]
    """
    if start >= stop:
        return segments
    wide: list[Segment] = []
    for a, b, o, n in segments:
        if b <= start or a >= stop:
            wide.append((a, b, o, n))
            continue
        if a < start:
            wide.append((a, start, o, n))
        wide.append((max(a, start), min(b, stop), min(o, oldest), max(n, newest)))
        if b > stop:
            wide.append((stop, b, o, n))
    return wide


def covered_by(spans: Iterable[Span], segments: list[Segment]) -> list[Segment]:
    """Let what the engine itself said win; tokens that no span holds stay as they are.

    A token in two spans has the versions of both. Spans are clipped at the call's end.

        >>> covered_by([(5, 99, 3)], [(0, 10, 0, 1)])
        [(0, 5, 0, 1), (5, 10, 3, 3)]
    """
    if not segments:
        return segments
    end = segments[-1][1]
    clipped = [(s[0], min(s[1], end), s[2], s[-1]) for s in spans if s[0] < min(s[1], end)]
    edges = sorted({e for s in (*segments, *clipped) for e in s[:2]})
    merged: list[Segment] = []
    for start, stop in pairwise(edges):
        said = [(o, n) for a, b, o, n in clipped if a <= start and stop <= b]
        known = said or [(o, n) for a, b, o, n in segments if a <= start and stop <= b]
        oldest, newest = min(o for o, _ in known), max(n for _, n in known)
        if merged and merged[-1][2:] == (oldest, newest):
            merged[-1] = (merged[-1][0], stop, oldest, newest)
        else:
            merged.append((start, stop, oldest, newest))
    return merged


def overlapping(spans: Iterable[Span]) -> tuple[Span, Span] | None:
    """Find two spans that both hold some token, if there are any."""
    last: Span | None = None
    for span in sorted(s for s in spans if s[0] < s[1]):
        if last is not None and span[0] < last[1]:
            return last, span
        last = span
    return None


def within(segments: list[Segment], mask: Sequence[tuple[int, int]]) -> list[Segment]:
    """Keep the tokens that the mask's ranges hold, each of them once.

    >>> within([(0, 10, 1, 1), (10, 20, 2, 2)], [(5, 12), (11, 13)])
    [(5, 10, 1, 1), (10, 12, 2, 2), (12, 13, 2, 2)]
    """
    kept: list[Segment] = []
    reached = 0
    for start, stop in sorted(mask):
        start = max(start, reached)
        kept += [
            (max(a, start), min(b, stop), o, n)
            for a, b, o, n in segments
            if max(a, start) < min(b, stop)
        ]
        reached = max(reached, stop)
    return kept
