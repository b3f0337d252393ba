"""Which cuts list which call, and when a call is forgotten."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from rl_staleness.listings import AT_A_TIME, Listings


def test_cuts_that_list_a_call() -> None:
    """In the order of the refits, whatever order the cuts came in; a repeated one replaces."""
    listings = Listings(frozenset)
    listings.take(2, {"c": 20, "d": 5})
    listings.take(4, {"c": 40})
    listings.take(3, {"c": 30})
    assert listings.counts("c") == {2: 20, 3: 30, 4: 40}
    assert listings.listed["c"].refits == (2, 3, 4)
    assert listings.listed["c"].places == (20, 30, 40)
    listings.take(3, {"c": 31})
    assert listings.counts("c") == {2: 20, 3: 31, 4: 40}
    assert listings.counts("x") == {}
    assert listings.size == 2
    assert listings.oldest(9) == 2
    assert listings.oldest(1) == 1
    assert Listings(frozenset).oldest(9) == 9


def test_counts_that_rise() -> None:
    """What is summed up without a look at each call has a token at its first cut, then more."""
    listings = Listings(frozenset)
    listings.take(1, {"c": 10, "d": 0})
    assert (listings.listed["c"].rising, listings.listed["d"].rising) == (True, False)
    listings.take(3, {"c": 30})
    assert listings.listed["c"].rising
    listings.take(2, {"c": 30})  # it comes late, and one of the two is wrong
    assert not listings.listed["c"].rising
    listings.take(2, {"c": 29})
    assert listings.listed["c"].rising
    listings.take(4, {"c": 30})
    assert not listings.listed["c"].rising
    listings.void(4)
    assert listings.listed["c"].rising
    listings.take(1, {"c": 0})
    assert not listings.listed["c"].rising


def test_void_cuts() -> None:
    """A call that no other cut lists goes, unless a group had it: then a late cut may list it."""
    listings = Listings(frozenset)
    listings.take(1, {"c": 1, "d": 2, "f": 3})
    listings.take(2, {"d": 4})
    listings.left("f", 2)
    listings.void(1)
    assert listings.counts("c") == {}
    assert listings.counts("d") == {2: 4}
    assert listings.counts("f") == {}
    assert listings.size == 2
    listings.take(3, {"f": 9})
    assert listings.counts("f") == {3: 9}
    assert listings.size == 2
    assert listings.forget(3, 4) == [(2,)]  # and f is no orphan


def test_void_cut_makes_no_call_older() -> None:
    """It was heard of at that refit all the same, and goes when that is long ago."""
    listings = Listings(frozenset)
    listings.take(1, {"c": 1})
    listings.take(4, {"c": 4})
    listings.void(4)
    assert listings.forget(3, 5) == []
    assert listings.counts("c") == {1: 1}
    assert listings.forget(4, 5) == [(1,)]
    assert listings.size == 0


def test_what_is_touched_last_is_forgotten_last() -> None:
    """Calls go in the order in which cuts spoke of them last; those without a group are said."""
    listings = Listings(frozenset)
    listings.take(1, {"c": 1, "d": 2})
    listings.take(2, {"d": 3})
    assert listings.forget(0, 2) == []
    assert listings.forget(1, 2) == [(1,)]
    assert listings.forget(1, 2) == []
    assert listings.forget(2, 2) == [(1, 2)]
    assert listings.size == 0


def test_a_late_cut_does_not_make_a_call_older() -> None:
    """What was listed at 5 stays for as long as that says, whatever comes of 3."""
    listings = Listings(frozenset)
    listings.take(5, {"c": 1})
    listings.take(3, {"c": 0})
    assert listings.forget(3, 5) == []
    assert listings.forget(4, 5) == []
    assert listings.forget(5, 5) == [(3, 5)]


def test_calls_stay_while_a_group_waits_with_them() -> None:
    """And for as long after that as after a cut; then they are no orphans."""
    waiting = {"c"}
    listings = Listings(lambda: waiting)
    listings.take(1, {"c": 1, "d": 1})
    assert listings.forget(1, 5) == [(1,)]
    assert list(listings.listed) == ["c"]
    listings.left("c", 6)  # another group with it waits
    listings.left("e", 6)  # which a cut that comes late may list
    assert listings.size == 2
    assert listings.forget(6, 6 + AT_A_TIME) == []
    assert list(listings.listed) == ["c"]
    assert listings.size == 1
    waiting.clear()
    assert listings.forget(5 + AT_A_TIME, 6 + AT_A_TIME) == []
    assert listings.size == 1
    assert listings.forget(6 + AT_A_TIME, 6 + 2 * AT_A_TIME) == []
    assert listings.size == 0


def test_published_calls_go_a_few_refits_at_a_time() -> None:
    """What waits is asked for once in a while, and not at each refit; what was heard of since
    stays.
    """
    asked: list[int] = []

    def waiting() -> set[str]:
        asked.append(1)
        return set()

    listings = Listings(waiting)
    for refit in range(1, 2 * AT_A_TIME + 1):
        listings.take(refit, {f"c{refit}": 1})
        listings.left(f"c{refit}", refit)
        assert listings.forget(refit - 1, refit) == []
    assert (len(asked), list(listings.listed)) == (2, ["c16"])
    listings.take(17, {"d": 1})
    listings.left("d", 17)
    assert listings.forget(17, 17) == []
    listings.take(18, {"d": 2})
    assert listings.forget(17, 30) == []
    assert (len(asked), listings.counts("d")) == (3, {17: 1, 18: 2})
    assert listings.size == 1


def test_what_left_lately_stays_though_it_was_listed_long_ago() -> None:
    """It counts when anything was heard of a call last."""
    listings = Listings(frozenset)
    listings.take(1, {"c": 1})
    listings.left("c", 20)
    assert (listings.forget(19, 40), listings.size) == ([], 1)
    assert (listings.forget(20, 50), listings.size) == ([], 0)
    listings.take(51, {"d": 1})
    listings.left("d", 51)
    listings.left("d", 70)  # as with a group that is kept
    assert (listings.forget(69, 90), listings.size) == ([], 1)
    listings.take(72, {"d": 2})
    listings.take(75, {"d": 3})
    listings.void(75)
    assert (listings.forget(71, 98), listings.size) == ([], 1)
    assert (listings.forget(74, 110), listings.size) == ([], 1)
    assert (listings.forget(75, 120), listings.size) == ([], 0)


def test_orphan_of_a_repeated_cut_is_one() -> None:
    """The cut named it twice."""
    listings = Listings(frozenset)
    listings.take(1, {"c": 1})
    listings.take(1, {"c": 2})
    assert listings.forget(1, 2) == [(1,)]


def test_repeated_listing_at_the_last_refit() -> None:
    """The second count replaces the first, and the refit is there once."""
    listings = Listings(frozenset)
    listings.take(2, {"c": 20})
    listings.take(4, {"c": 40})
    listings.take(4, {"c": 41})
    assert listings.listed["c"].refits == (2, 4)
    assert listings.counts("c") == {2: 20, 4: 41}
    assert listings.oldest(9) == 2


def test_void_cut_leaves_what_others_list() -> None:
    """A call that it did not list stays as it is."""
    listings = Listings(frozenset)
    listings.take(1, {"c": 1})
    listings.take(2, {"d": 2})
    listings.void(1)
    assert (listings.counts("c"), listings.counts("d")) == ({}, {2: 2})


def test_unlisted_call() -> None:
    """A call that is touched at once may be forgotten at once."""
    for last in (0, 1):
        listings = Listings(frozenset)
        listings.left("d", last)
        assert listings.size == 1
        assert (listings.forget(last, last + AT_A_TIME), listings.size) == ([], 0)


def test_what_was_touched_again_hides_nothing_behind_it() -> None:
    """The first of a refit's calls was listed later too; the second was not."""
    listings = Listings(frozenset)
    listings.take(1, {"c": 1, "d": 2})
    listings.take(2, {"c": 3})
    assert listings.forget(1, 2) == [(1,)]


CALLS = "abc"

OPERATIONS = st.one_of(
    st.tuples(st.just("take"), st.integers(1, 3), st.sets(st.sampled_from(CALLS))),
    st.tuples(st.just("void"), st.integers(1, 3), st.just(frozenset[str]())),
    st.tuples(st.just("left"), st.just(0), st.sets(st.sampled_from(CALLS))),
    st.tuples(st.just("wait"), st.just(0), st.sets(st.sampled_from(CALLS))),
    st.tuples(st.just("refits"), st.integers(0, 5), st.just(frozenset[str]())),
)


@settings(max_examples=1500, deadline=None, database=None)
@given(st.lists(OPERATIONS, min_size=4, max_size=20), st.integers(0, 3))
def test_everything_is_forgotten_once(
    operations: list[tuple[str, int, frozenset[str]]], orphan_after: int
) -> None:
    """Whatever came late, was void, repeated or left twice: what a group waits with stays, nothing
    else does for long, and each listed call that no group had is an orphan once.
    """
    waiting: frozenset[str] = frozenset()
    listings, last = Listings(lambda: waiting), 3
    claimed: set[str] = set()
    for what, number, calls in operations:
        if what == "take":
            listings.void(last - number + 1)
            listings.take(last - number + 1, dict.fromkeys(sorted(calls), 1))
        elif what == "void":
            listings.void(last - number + 1)
        elif what == "left":
            claimed |= calls
            for call in sorted(calls):
                listings.left(call, last)
        elif what == "wait":
            waiting = calls
        last += number if what == "refits" else 0
        alone = {name: each.refits for name, each in listings.listed.items()}
        orphans = listings.forget(last - orphan_after, last)
        gone = alone.keys() - listings.listed.keys()
        assert not gone & waiting
        assert sorted(orphans) == sorted(alone[name] for name in gone - claimed)
        claimed &= listings.listed.keys() | listings._unlisted.keys()
        assert sum(map(len, listings._left_at.values())) == len(claimed)
    kept = {name for name in (*listings.listed, *listings._unlisted) if name in waiting}
    for _ in range(3):
        last += 100
        listings.forget(last - orphan_after, last)
    assert {*listings.listed, *listings._unlisted} == kept
    assert listings.size == len(kept)
    waiting = frozenset()
    for _ in range(3):
        last += 100
        listings.forget(last - orphan_after, last)
    assert (listings.size, len(listings._unclaimed)) == (0, 0)
