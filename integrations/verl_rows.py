"""What a row of verl's queue is made of: the attempts that generated its tokens. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

__all__ = ["Attempt", "Piece", "aligned", "evidence", "inside", "minibatches"]

Piece = tuple[int, int, int]
"""Tokens ``[start, stop)`` of a call, and the place of the first one in the row's response."""


class Attempt(NamedTuple):
    """One request to a server, from its sending to its answer."""

    server: str
    label: int | None
    """The server's ``global_steps`` when it answered."""
    tokens: Sequence[int]


def aligned(
    attempts: Sequence[Sequence[int]], ids: Sequence[int], mask: Sequence[int]
) -> tuple[list[list[Piece]], int]:
    """Find the trained tokens of a row in the tokens that its attempts generated.

    Returns:
        The trained pieces of each attempt, and the number of trained tokens that none made.

    Attempts of 2 and 3 tokens, a tool's answer, an attempt of 2 that was cut off at 1:

    >>> aligned([[5, 6], [7, 8, 9], [4, 3]], [5, 6, 7, 8, 9, 0, 4], [1, 1, 1, 1, 1, 0, 1])
    ([[(0, 2, 0)], [(0, 3, 2)], [(0, 1, 6)]], 0)
    """
    pieces: list[list[Piece]] = [[] for _ in attempts]
    unknown = following = 0
    for begin, end in _runs(mask):
        place = begin
        while place < end:
            number = _next_attempt(attempts, following, ids, place, end)
            if number is None:
                break
            length = min(len(attempts[number]), end - place)
            pieces[number].append((0, length, place))
            place, following = place + length, number + 1
        unknown += end - place
    return pieces, unknown


def _next_attempt(
    attempts: Sequence[Sequence[int]], first: int, ids: Sequence[int], place: int, end: int
) -> int | None:
    for number in range(first, len(attempts)):
        tokens = attempts[number]
        length = min(len(tokens), end - place)
        if length and list(tokens[:length]) == list(ids[place : place + length]):
            return number
    return None


def _runs(mask: Sequence[int]) -> Iterator[tuple[int, int]]:
    """``[start, stop)`` of the stretches that are not 0."""
    begin = None
    for place, value in enumerate((*mask, 0)):
        if value and begin is None:
            begin = place
        elif not value and begin is not None:
            yield begin, place
            begin = None


def evidence(
    attempts: Sequence[Attempt],
    rows: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    process: str,
) -> list[dict[str, Any]]:
    """What travels with each row of a session: numbers and names of servers, no token.

    Args:
        rows: (response ids, response mask) of each output.
        process: the trainer's process; labels of another one are read by its checkpoint.
    """
    found = [aligned([a.tokens for a in attempts], ids, mask) for ids, mask in rows]
    used = [any(pieces[n] for pieces, _ in found) for n in range(len(attempts))]
    return [
        {
            "process": process,
            "unknown": unknown,
            # What no row trains is a call of the first one.
            "calls": [
                [a.server, a.label, len(a.tokens), [list(piece) for piece in pieces[n]]]
                for n, a in enumerate(attempts)
                if pieces[n] or (row == 0 and not used[n])
            ],
        }
        for row, (pieces, unknown) in enumerate(found)
    ]


def minibatches(
    keys: Sequence[str], *, rows: int, ranks: int, epochs: int
) -> list[list[str]] | None:
    """The rows of each update in order, as the ranks cut them; None where that does not add up.

    >>> minibatches(["a", "b", "c", "d"], rows=2, ranks=2, epochs=1)
    [['a', 'c'], ['b', 'd']]
    """
    if not rows or len(keys) % rows or rows % ranks:
        return None
    share, small = len(keys) // ranks, rows // ranks
    cut = [
        [keys[rank * share + at + i] for rank in range(ranks) for i in range(small)]
        for at in range(0, share, small)
    ]
    return cut * epochs


def inside(pieces: Iterable[Piece], mask: Sequence[int]) -> list[tuple[int, int]]:
    """What a mask over the response leaves of a call's pieces."""
    return [
        (start + begin, start + end)
        for start, stop, place in pieces
        for begin, end in _runs(mask[place : place + stop - start])
    ]
