"""The refits of one engine asked directly: by number, between two, before one, packed or not."""

from __future__ import annotations

from typing import Any

import pytest

from rl_staleness.events import LARGEST, RefitAborted
from rl_staleness.refits import Refits
from tests.test_spans import cut, done, refits


def aborted(refit: int, version: int) -> RefitAborted:
    """A refit that failed."""
    return RefitAborted(time=0.0, engine="e", refit=refit, version=version, reason="it failed")


def said(made: Refits, begin: int, until: int) -> list[tuple[Any, ...]]:
    """The refits of a range: first and last number, what they lead to, and how they ended."""
    return [(r.number, r.last, r.version, r.newest, r.state) for r in made.between(begin, until)]


def one_by_one(made: Refits, last: int) -> list[Any]:
    """All that is known of each number up to `last` and of its neighbours."""
    known: list[Any] = []
    for number in range(last + 2):
        refit = made.find(number)
        led = refit is not None and refit.state != "aborted" and refit.version_at(number)
        known.append((led, refit and refit.state))
        known.append((made.exact(number), made.before(number, now=99), made.beside(number)[0]))
        for until in (number, number + 1, number + 2):
            known.append(made.sole_version(number, until))
    known += [made.leading_to(v, below=b) for v in range(-1, 60) for b in (0, 3, 9, LARGEST)]
    return known


def test_between_with_numbers_that_the_trace_skips() -> None:
    """What no line speaks of is open, in one piece; the ends are cut off."""
    made = refits(done(2, 2), done(5, 5))
    assert said(made, 0, 7) == [
        (1, 1, None, None, "open"),
        (2, 2, 2, 2, "done"),
        (3, 4, None, None, "open"),
        (5, 5, 5, 5, "done"),
        (6, 7, None, None, "open"),
    ]
    assert said(made, 2, 4) == [(3, 4, None, None, "open")]
    assert said(made, 1, 2) == [(2, 2, 2, 2, "done")]
    assert said(made, 5, LARGEST) == []
    assert said(made, 4, LARGEST) == [(5, 5, 5, 5, "done")]
    assert said(made, 3, 3) == []


def test_before_with_open_refits_and_skipped_numbers() -> None:
    """All that may have happened since the last done one; what is skipped may be of any version."""
    made = refits(done(1, 2), cut(2, 5), cut(3, 4), start=1)
    assert made.before(1, now=9) == (1, 1)
    assert made.before(2, now=9) == (2, 2)
    assert made.before(3, now=9) == (2, 5)
    assert made.before(4, now=9) == (2, 5)
    assert made.before(6, now=9) == (2, 9)  # 5 is not there; 4 is not either
    assert refits(start=1).before(1, now=9) == (1, 1)
    assert refits(start=1).before(2, now=9) == (1, 9)
    assert refits(start=1, base=1).before(2, now=9) == (1, 1)
    assert refits(done(1, 2), cut(3, 4), start=1).before(4, now=9) == (2, 9)
    assert refits(cut(1, 2), cut(3, 4), start=1).before(4, now=9) == (1, 9)
    failed = refits(done(1, 2), cut(2, 5), aborted(2, 5), start=1)
    assert failed.before(3, now=9) == (2, 2)


def test_which_refit_leads_to_a_version() -> None:
    """The last done one below a number; the start has the number of the base."""
    made = refits(done(5, 1), done(6, 3), cut(7, 4), done(8, 3), start=0, base=4)
    assert made.leading_to(3, below=LARGEST) == 8
    assert made.leading_to(3, below=9) == 8
    assert made.leading_to(3, below=8) == 6
    assert made.leading_to(3, below=6) is None
    assert made.leading_to(1, below=LARGEST) == 5
    assert made.leading_to(4, below=LARGEST) is None
    assert made.leading_to(0, below=LARGEST) == 4
    assert made.leading_to(2, below=LARGEST) is None


def test_which_open_refit_may_lead_to_a_version() -> None:
    """One whose version is that, or one whose lines are lost and whose neighbours allow it."""
    made = refits(done(1, 1), done(3, 3), cut(4, 5), start=0)
    assert made.may_lead_to(2, until=9) == 2
    assert made.may_lead_to(1, until=9) == 2
    assert made.may_lead_to(3, until=9) == 2
    assert made.may_lead_to(5, until=9) == 4
    assert made.may_lead_to(4, until=9) == 5  # nothing is known of 5 to 9
    assert made.may_lead_to(4, until=4) is None
    assert made.may_lead_to(0, until=9) is None
    assert made.may_lead_to(5, until=3) is None
    failed = refits(cut(1, 1), aborted(1, 1), cut(2, 1), start=0)
    assert failed.may_lead_to(1, until=2) == 2
    assert failed.may_lead_to(1, until=1) is None


@pytest.mark.parametrize(
    "way", ["up", "twos", "failed", "mixed", "back", "same", "cuts", "gaps", "jump"]
)
def test_packed_refits_answer_as_before(way: str) -> None:
    """A long history, whose old refits are joined into runs, against one that keeps each."""
    packed, kept = Refits(start=0, orphan_after=1), Refits(start=0, orphan_after=10**6)
    kept._pack_above = 10**9
    version, number = 0, 0
    for nth in range(1, 140):
        number += 1
        failed = way == "failed" or (way == "mixed" and nth % 5 in (0, 1))
        step = {"twos": 2, "same": 0, "back": -1 if nth % 7 == 3 else 1}.get(way, 1)
        if way == "mixed":
            step = 1 if nth < 70 else 3
        if way == "jump":
            step = 1 if nth % 11 else 3
        if way == "gaps" and nth % 9 == 0:
            number += 1
        for made in (packed, kept):
            if way in ("cuts", "mixed") and nth % 4:
                made.cut(cut(number, version + step))
            if failed:
                made.aborted(aborted(number, version + step))
            else:
                made.done(done(number, version + step))
        version += 0 if failed else step
    assert one_by_one(packed, number) == one_by_one(kept, number)
    most = {"up": 12, "twos": 12, "failed": 12, "same": 12}.get(way)
    if most is not None:
        assert packed.size < 50  # it was done on the way
    packed._pack()
    assert one_by_one(packed, number) == one_by_one(kept, number)
    if most is not None:
        assert packed.size <= most
    for at in (1, 2, 57, number - 40):  # a late line takes one out of its run
        for made in (packed, kept):
            made.aborted(aborted(at, 3))
            made.cut(cut(at + 1, 5))
            made.done(done(at + 2, 6))
        assert one_by_one(packed, number) == one_by_one(kept, number)


def test_late_line_of_a_packed_refit() -> None:
    """It is taken out of the middle of its run, whose parts go on to say what they did."""
    made = refits(*(done(n, n) for n in range(1, 11)))
    made.orphan_after = 0
    made._pack()
    assert said(made, 0, 10) == [(1, 9, 1, 9, "done"), (10, 10, 10, 10, "done")]
    assert said(made, 4, 7) == [(5, 7, 5, 7, "done")]
    assert said(made, 0, 1) == [(1, 1, 1, 1, "done")]
    assert [made.leading_to(v, below=LARGEST) for v in (0, 1, 9, 10, 11)] == [0, 1, 9, 10, None]
    assert made.aborted(aborted(4, 4)) == [
        ("refit_done_and_aborted", "refit 4 was done before"),
    ]
    assert said(made, 0, 10) == [
        (1, 3, 1, 3, "done"),
        (4, 4, 4, 4, "aborted"),
        (5, 9, 5, 9, "done"),
        (10, 10, 10, 10, "done"),
    ]


def test_neighbours_of_a_refit() -> None:
    """The done ones before and after; a version between the two is no step back."""
    made = refits(done(1, 1), done(3, 3), cut(4, 9))
    assert made.beside(2) == (1, 3)
    assert made.beside(1) == (0, 3)
    assert made.beside(4) == (3, None)
    assert refits(done(1, 1), cut(2, 9), done(3, 3)).beside(1) == (0, 3)
    assert made.done(done(2, 1)) == []
    assert made.done(done(2, 3)) == [("refit_version", "refit 2 leads to 3, and to 1")]
    assert [name for name, _ in made.done(done(5, 2))] == ["engine_version_back"]
    assert [name for name, _ in made.done(done(6, 2))] == []
    early = refits(done(3, 3))
    assert early.done(done(2, 4)) == [
        ("engine_version_back", "refit 2 leads to 4, its neighbour to 3")
    ]


def test_cut_of_an_aborted_refit_is_void() -> None:
    """Whichever comes first; after it was done anew the cut of before stays void."""
    made = refits(aborted(1, 1), cut(1, 1, c=4))
    assert made.calls.counts("c") == {}
    assert made.exact(1) is False
    made = refits(cut(1, 1, c=4))
    assert made.calls.counts("c") == {1: 4}
    assert made.exact(1) is True
    made.aborted(aborted(1, 1))
    assert made.calls.counts("c") == {}
    assert made.exact(1) is False
    assert made.exact(2) is False


def test_cut_that_lost_an_entry_is_not_complete() -> None:
    """Its counts stay exact, but who is not in it may have been running."""
    made = refits(cut(1, 1, c=4), done(1, 1), orphan_after=2)
    made.done(done(2, 2))
    first = made.find(1)
    assert first is not None
    assert (first.complete, first.counts_exact, made.orphans) == (True, True, 0)
    made.done(done(3, 3))
    assert (first.complete, first.counts_exact, made.orphans) == (False, True, 1)


def test_repeated_cut() -> None:
    """It lists only what it says now, and may say another version until the refit is done."""
    made = refits(cut(1, 1, c=4))
    assert made.cut(cut(1, 2, d=3)) == []
    assert (made.calls.counts("c"), made.calls.counts("d")) == ({}, {1: 3})
    made.done(done(1, 2))
    assert made.cut(cut(1, 3)) == [("refit_version", "refit 1 leads to 3, and to 2")]


def test_versions_that_go_back_are_named_with_the_neighbour_that_says_so() -> None:
    """The one before where that is newer, else the one after."""
    made = refits(done(1, 4), done(3, 3))
    assert made.done(done(2, 4)) == [
        ("engine_version_back", "refit 2 leads to 4, its neighbour to 3")
    ]
    assert made.done(done(4, 2)) == [
        ("engine_version_back", "refit 4 leads to 2, its neighbour to 3")
    ]


def test_calls_are_forgotten_at_each_line() -> None:
    """Cuts and failures alone do it, where no refit is ever done."""
    assert refits(cut(1, 1, c=4), cut(2, 1), cut(3, 1), orphan_after=1).orphans == 1
    failed = [aborted(n, 1) for n in (2, 3, 4)]
    assert refits(cut(1, 1, c=4), *failed, orphan_after=1).orphans == 1


def test_the_sole_version_of_a_call_from_before_the_resume() -> None:
    """The start's, where it began after the last refit of before; else others may have come."""
    resumed = Refits(start=3, base=5, limit=4)
    assert [resumed.sole_version(after, after) for after in (4, 5, 6)] == [None, 3, None]
    fresh = Refits(start=3, base=5)
    assert [fresh.sole_version(after, after) for after in (4, 5, 6)] == [3, 3, None]


def test_one_aborted_refit_of_two_leaves_no_sole_version() -> None:
    """The other one may have touched the call."""
    failed = RefitAborted(time=0.0, engine="e", refit=1, version=1, reason="no network")
    engine = refits(failed, done(2, 1))
    assert engine.sole_version(0, 1) == 0
    assert engine.sole_version(0, 2) is None
