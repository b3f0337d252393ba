"""Ranges of tokens, held against lists of single tokens."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_staleness.ranges import Segment, covered_by, move, overlapping, widen, within
from rl_staleness.staleness import Versions

PLACE = st.integers(0, 12)
VERSION = st.integers(0, 5)


@st.composite
def segmented(draw: st.DrawFn) -> list[Segment]:
    """The segments of a call."""
    edges = sorted({0, *draw(st.sets(PLACE, min_size=1))})
    return [
        (a, b, *sorted((draw(VERSION), draw(VERSION))))  # type: ignore[misc]
        for a, b in pairwise(edges)
    ]


def tokens(segments: list[Segment]) -> list[tuple[int, int]]:
    """The versions of each token, one by one."""
    return [(o, n) for a, b, o, n in segments for _ in range(a, b)]


def assert_sound(segments: list[Segment]) -> None:
    """In order and not empty."""
    assert all(a < b for a, b, _, _ in segments), segments
    assert all(one[1] <= two[0] for one, two in pairwise(segments)), segments


@given(segmented(), PLACE, VERSION)
def test_move(segments: list[Segment], place: int, version: int) -> None:
    """Tokens before the place stay, those from it on have the new version."""
    expected = [
        pair if i < place else (version, version) for i, pair in enumerate(tokens(segments))
    ]
    moved = move(segments, place, version, version)
    assert tokens(moved) == expected
    assert_sound(moved)


@given(segmented(), PLACE, PLACE, VERSION)
def test_widen(segments: list[Segment], start: int, stop: int, version: int) -> None:
    """Tokens in the range may be of the version too."""
    expected = [
        (min(o, version), max(n, version)) if start <= i < stop else (o, n)
        for i, (o, n) in enumerate(tokens(segments))
    ]
    wide = widen(segments, start, stop, version, version)
    assert tokens(wide) == expected
    assert_sound(wide)


@given(segmented(), st.lists(st.tuples(PLACE, PLACE, VERSION)))
def test_covered_by(segments: list[Segment], said: list[tuple[int, int, int]]) -> None:
    """A token in spans has the versions of all of them, another one keeps its own."""
    spans = [(min(a, b), max(a, b), v) for a, b, v in said]
    expected = []
    for i, pair in enumerate(tokens(segments)):
        versions = [v for a, b, v in spans if a <= i < b]
        expected.append((min(versions), max(versions)) if versions else pair)
    covered = covered_by(spans, segments)
    assert tokens(covered) == expected
    assert_sound(covered)


def test_covered_by_joins_what_is_alike() -> None:
    """Two spans of one version are one segment, so that a call of many spans stays short."""
    assert covered_by([(0, 5, 1), (5, 10, 1)], [(0, 10, 0, 1)]) == [(0, 10, 1, 1)]
    assert covered_by([(5, 99, 30)], [(0, 10, 0, 1)]) == [(0, 5, 0, 1), (5, 10, 30, 30)]


def test_widen_by_no_token() -> None:
    """Nothing changes, nothing is split."""
    assert widen([(0, 10, 0, 0)], 5, 5, 1, 1) == [(0, 10, 0, 0)]


@given(st.lists(st.tuples(PLACE, PLACE, VERSION), max_size=4))
def test_overlapping(said: list[tuple[int, int, int]]) -> None:
    """Two spans are found exactly if some token is in two of them."""
    spans = [(min(a, b), max(a, b), v) for a, b, v in said]
    twice = any(sum(a <= i < b for a, b, _ in spans) > 1 for i in range(13))
    found = overlapping(spans)
    assert (found is not None) == twice
    if found is not None:
        assert max(found[0][0], found[1][0]) < min(found[0][1], found[1][1])


@given(segmented(), st.lists(st.tuples(PLACE, PLACE), max_size=4))
def test_within(segments: list[Segment], ranges: list[tuple[int, int]]) -> None:
    """Each token that the mask holds is kept once, whatever overlaps in the mask."""
    mask = [(min(a, b), max(a, b)) for a, b in ranges]
    expected = [p for i, p in enumerate(tokens(segments)) if any(a <= i < b for a, b in mask)]
    kept = within(segments, mask)
    assert tokens(kept) == expected
    assert_sound(kept)


@given(st.lists(st.integers(0, 60)), st.integers(-1, 70), st.integers(-1, 70))
def test_versions_count_distinct_ones(added: list[int], low: int, high: int) -> None:
    """Packed into even runs, they count as a set does, in whatever order they came."""
    versions = Versions()
    for version in added:
        versions.add(version)
    assert versions.between(low, high) == sum(low < v <= high for v in set(added))


EVEN = list(range(0, 44, 4))


@pytest.mark.parametrize(
    ("added", "size"),
    [
        (EVEN, 1),
        ([*EVEN, 8, 0, 40], 1),  # they are there already
        ([*EVEN, 14], 3),  # splits the run
        ([*EVEN, 14, 12, 14, 16, 40], 3),
        ([*EVEN, 41], 2),
        ([*EVEN, 41, 42, 43, 14], 4),
        ([*EVEN, 14, 15, 13, 12, 16], 5),
        ([*EVEN, 1, 39], 5),
        ([10, 5, 0], 3),
        ([7], 1),
        ([7, 7, 9], 1),
        ([7, 9, 11, 8, 10], 5),
        ([20, 22, 24, 3, 5, 21], 5),
        ([1, 3, 2, 4], 3),
    ],
)
def test_versions_that_come_in_any_order(added: list[int], size: int) -> None:
    """Counted between any two places and after a roll back, as a set would, in so many entries."""
    for limit in range(-1, 45):
        versions = Versions()
        for version in added:
            versions.add(version)
        assert versions.size == size
        assert_counted(versions, set(added))
        versions.forget_above(limit)
        left = {version for version in added if version <= limit}
        assert_counted(versions, left)
        assert (versions.size == 0) == (not left)
        versions.add(50)
        versions.add(51)
        assert_counted(versions, {*left, 50, 51})


def assert_counted(versions: Versions, distinct: set[int]) -> None:
    """It answers as the set does."""
    for low in (-1, 0, 1, 11, 12, 13, 14, 15, 16, 40, 41, 49, 50):
        for high in (-1, 0, 1, 11, 12, 13, 14, 15, 16, 40, 41, 50, 52):
            assert versions.between(low, high) == sum(low < v <= high for v in distinct)


def test_versions_of_a_long_run_take_no_room() -> None:
    """A refit every fourth update, a hundred thousand times."""
    versions = Versions()
    for version in range(0, 400_000, 4):
        versions.add(version)
    assert versions.size == 1
    assert versions.between(399_000, 399_996) == 249
