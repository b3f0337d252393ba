"""The versions of one call's tokens, asked directly: what a run's resume, a gap and an end change.

`test_arithmetic` has the rules of the contract with whole steps; here is what no step shows.
"""

from __future__ import annotations

from typing import Any

import pytest

from rl_staleness.events import Call, RefitAborted, RefitCut, RefitDone
from rl_staleness.ranges import Segment
from rl_staleness.refits import Refits
from rl_staleness.spans import NEVER, restored_spans, spans_of


def call(tokens: int = 10, version: int = 3, **fields: Any) -> Call:
    """A call of the engine."""
    return Call(call="c", engine="e", version=version, tokens=tokens, **fields)


def cut(refit: int, version: int, exact: bool | None = None, **calls: int) -> RefitCut:
    """The cut of a refit."""
    return RefitCut(
        time=0.0, engine="e", refit=refit, version=version, calls=calls, exact=exact is not False
    )


def done(refit: int, version: int) -> RefitDone:
    """A refit that is done."""
    return RefitDone(time=0.0, engine="e", refit=refit, version=version)


def refits(*events: RefitCut | RefitDone | RefitAborted, **fields: Any) -> Refits:
    """An engine's refits so far."""
    made = Refits(**{"start": 0, **fields})
    for event in events:
        match event:
            case RefitCut():
                made.cut(event)
            case RefitDone():
                made.done(event)
            case RefitAborted():
                made.aborted(event)
    return made


def found(call: Call, refits: Refits, **fields: Any) -> tuple[list[Segment], list[str]]:
    """The segments, and the names of what contradicts something."""
    segments, findings = spans_of(call, refits, **{"now": 9, **fields})
    return segments, [name for name, _ in findings]


# A run that was resumed at version 4, its engine with version 3 after refit 5.


@pytest.mark.parametrize(
    ("after", "stamp", "undone", "versions", "names"),
    [
        (5, 3, False, (3, 3), []),  # began on what the engine came back with
        (5, 3, True, (3, 3), []),
        (5, 2, False, (2, 4), ["stamp"]),
        (5, 4, False, (3, 4), ["stamp"]),
        (5, 2, True, (2, 4), ["stamp"]),
        (5, 6, False, (NEVER, NEVER), ["stamp"]),  # the run that was resumed had no version 6
        (4, 3, False, (3, 4), []),  # refit 5 may have moved it on
        (4, 2, False, (2, 4), []),
        (4, 4, False, (3, 4), []),
        (4, 6, False, (NEVER, NEVER), ["stamp"]),
        (4, 3, True, (NEVER, NEVER), ["beyond_resume"]),  # refit 5 may have been undone
        (4, 6, True, (NEVER, NEVER), ["stamp", "beyond_resume"]),
    ],
)
def test_call_from_before_the_resume(
    after: int, stamp: int, undone: bool, versions: tuple[int, int], names: list[str]
) -> None:
    """What it may have begun on, by the refit that it began after and by its stamp."""
    engine = refits(start=3, base=5, limit=4, undone=undone)
    assert ([(0, 10, *versions)], names) == found(call(version=stamp, after=after), engine)


def test_call_from_before_without_a_resume_is_as_the_engine_started() -> None:
    """A run that is no continuation takes numbers up to its base for the start."""
    assert found(call(after=4), refits(start=3, base=5)) == ([(0, 10, 3, 3)], [])
    assert found(call(version=2, after=5), refits(start=3, base=5)) == ([(0, 10, 3, 3)], ["stamp"])


def test_call_from_before_that_the_first_cut_of_the_resumed_run_lists() -> None:
    """The numbers that the engine had before are no refits that may have happened in it."""
    engine = refits(cut(6, 5, c=4), done(6, 5), start=3, base=5, limit=4)
    assert found(call(after=4), engine) == ([(0, 4, 3, 4), (4, 10, 5, 5)], [])
    assert found(call(after=5), engine) == ([(0, 4, 3, 3), (4, 10, 5, 5)], [])


def test_spans_from_before_of_versions_that_the_run_never_had() -> None:
    """Newer than what the run went on from, and no refit of it led there."""
    engine = refits(done(6, 5), start=3, base=5, limit=4)
    of = {"after": 5, "spans": ((0, 2, 3), (2, 4, 4), (4, 6, 5), (6, 10, 7))}
    known = [(0, 2, 3, 3), (2, 4, 4, 4), (4, 6, 5, 5)]
    assert found(call(**of), engine) == ([*known, (6, 10, NEVER, NEVER)], ["beyond_resume"])
    alone = call(after=6, version=5, spans=((0, 10, 7),))
    assert found(alone, engine) == ([(0, 10, 7, 7)], [])  # begun in this run
    unsaid = call(version=5, spans=((0, 10, 7),))
    assert found(unsaid, engine) == ([(0, 10, 7, 7)], [])  # nobody says that it is from before


def test_spans_of_a_refit_of_the_resumed_run_that_is_not_known_to_be_done_yet() -> None:
    """It may have led there, so they are believed, until it is known to have failed."""
    of = {"after": 5, "spans": ((0, 2, 3), (2, 10, 5))}
    open_one = refits(cut(6, 5, c=2), start=3, base=5, limit=4)
    assert found(call(**of), open_one) == ([(0, 2, 3, 3), (2, 10, 5, 5)], [])
    newer = {"after": 5, "spans": ((0, 2, 3), (2, 10, 7))}
    segments, names = found(call(**newer), open_one)
    assert segments == [(0, 2, 3, 3), (2, 10, NEVER, NEVER)]
    assert names[-1] == "beyond_resume"
    failed = RefitAborted(time=0.0, engine="e", refit=6, version=5, reason="no network")
    open_one.aborted(failed)
    segments, names = found(call(**of), open_one)
    assert segments == [(0, 2, 3, 3), (2, 10, NEVER, NEVER)]
    assert names == ["beyond_resume"]


def test_engine_ahead_of_a_resumed_run() -> None:
    """What it started with is its version, also where the policy has it not; of a call from before
    the refit that led there it is none that the run had.
    """
    engine = refits(start=5, base=5, limit=4)
    assert found(call(version=5, after=5), engine) == ([(0, 10, 5, 5)], [])
    assert found(call(version=5, after=4), engine) == ([(0, 10, NEVER, NEVER)], [])


def test_restored_spans() -> None:
    """Up to the limit they are believed, beyond it they are of no version, without any bounded."""
    spans = ((0, 4, 2), (4, 6, 2, 6), (6, 8, 5))
    segments, findings = restored_spans(call(version=1, spans=spans), now=9, limit=4)
    assert segments == [(0, 4, 2, 2), (4, 6, 2, 6), (6, 8, NEVER, NEVER), (8, 10, 1, 9)]
    assert [name for name, _ in findings] == ["beyond_resume"]
    segments, findings = restored_spans(call(version=1, spans=spans), now=9, limit=5)
    assert segments == [(0, 4, 2, 2), (4, 6, 2, 6), (6, 8, 5, 5), (8, 10, 1, 9)]
    assert findings == []
    assert restored_spans(call(tokens=0), now=9, limit=4) == ([], [])


def test_spans_with_bounds_are_judged_by_their_oldest_version() -> None:
    """That is what the tokens count under."""
    bounds = call(version=1, spans=((0, 10, 5, 6),))
    assert restored_spans(bounds, now=9, limit=4)[0] == [(0, 10, NEVER, NEVER)]
    assert restored_spans(bounds, now=9, limit=5)[0] == [(0, 10, 5, 6)]
    engine = refits(done(6, 5), start=3, base=5, limit=4)
    assert found(call(after=5, spans=((0, 10, 5, 6),)), engine) == ([(0, 10, 5, 6)], [])


def test_restored_spans_that_overlap() -> None:
    """They are looked at up to the call's end, and named as the engine said them."""
    twice = call(spans=((0, 6, 2), (5, 10, 3)))
    findings = restored_spans(twice, now=9, limit=9)[1]
    assert findings == [("spans_overlap", "[0, 6, 2] and [5, 10, 3]")]
    beyond = call(spans=((0, 12, 2), (10, 14, 3)))
    assert restored_spans(beyond, now=9, limit=9) == ([(0, 10, 2, 2)], [])


# Lost lines.


def test_lost_lines_leave_bounds_from_the_oldest_version_of_the_call() -> None:
    """From what it may have begun on to the step's; what contradicts them, the gap may explain."""
    assert found(call(version=0), refits(cut(1, 1, c=4), done(1, 1)), lost=True) == (
        [(0, 10, 0, 9)],
        [],
    )
    uncovered = refits(done(1, 1), start=0)
    assert found(call(version=0, after=0), uncovered, lost=True) == ([(0, 10, 0, 9)], [])
    assert found(call(version=7, after=1), uncovered, lost=True) == ([(0, 10, 1, 9)], [])
    assert found(call(tokens=0, version=0), uncovered, lost=True) == ([], [])


# Where a call begins and ends.


def test_call_that_begins_and_ends_after_one_refit() -> None:
    """`after` and `until` may be equal: no refit touched it."""
    engine = refits(cut(1, 1), done(1, 1), cut(2, 2), done(2, 2))
    assert found(call(version=1, after=1, until=1), engine) == ([(0, 10, 1, 1)], [])


def test_call_without_tokens_has_no_segments() -> None:
    """Not one of no length."""
    assert found(call(tokens=0, version=0), refits()) == ([], [])


def test_call_that_is_listed_with_tokens_in_the_cut_that_it_says_it_began_after() -> None:
    """It had begun before that pause, on what the engine had then: an older version than 1."""
    engine = refits(cut(1, 1), done(1, 1), cut(2, 2, c=4), done(2, 2), cut(3, 3, c=6), done(3, 3))
    moved = [(0, 4, 1, 1), (4, 6, 2, 2), (6, 10, 3, 3)]
    assert found(call(version=2, after=2), engine) == (moved, ["after_contradicts_cut"])
    assert found(call(version=3, after=3), engine) == (moved, ["after_contradicts_cut"])
    zero = refits(cut(1, 1, c=0), done(1, 1), cut(2, 2, c=4), done(2, 2))
    late = found(call(version=2, after=2), zero)
    assert late == ([(0, 4, 1, 1), (4, 10, 2, 2)], ["after_contradicts_cut"])


@pytest.mark.parametrize(
    ("stamp", "count", "versions", "names"),
    [
        (2, 0, (0, 2), []),  # begun in the pause and stamped with what the refit leads to
        (2, 4, (0, 2), ["stamp"]),
        (1, 0, (0, 1), ["stamp"]),
        (1, 4, (0, 1), ["stamp"]),
    ],
)
def test_stamp_of_a_listed_call_that_nothing_explains(
    stamp: int, count: int, versions: tuple[int, int], names: list[str]
) -> None:
    """Its stamp is possible too, before the cut; with 0 there, the refit's own version is right."""
    engine = refits(cut(1, 2, c=count), done(1, 2))
    before = [(0, count, *versions)] if count else []
    expected = [*before, (count, 10, 2, 2)]
    assert found(call(version=stamp), engine) == (expected, names)


def test_stamp_of_a_listed_call_that_an_open_refit_explains() -> None:
    """Refit 1 may have led to 3; the call is in the cut of refit 2, stamped between the two."""
    engine = refits(cut(1, 3, z=0), cut(2, 4, c=4), done(2, 4))
    for stamp, names in ((0, []), (1, []), (3, []), (4, ["stamp"])):
        segments, said = found(call(version=stamp), engine)
        assert segments[-1] == (4, 10, 4, 4)
        assert said == names, stamp


def test_stamp_of_an_open_refit_to_an_older_version() -> None:
    """Refit 2 may have gone back to 3: the stamp says so, and does not contradict it."""
    engine = refits(done(1, 5), cut(2, 3), cut(3, 6, c=4), done(3, 6))
    assert found(call(version=3), engine) == ([(0, 4, 3, 5), (4, 10, 6, 6)], [])


def test_call_after_a_lost_refit_by_its_stamp() -> None:
    """A stamp newer than what was before is what the refit led to; another one says nothing."""
    assert found(call(version=4, after=1), refits(start=2)) == ([(0, 10, 2, 4)], [])
    assert found(call(version=2, after=1), refits(start=2)) == ([(0, 10, 2, 9)], [])
    assert found(call(version=1, after=1), refits(start=2)) == ([(0, 10, 2, 9)], ["stamp"])


def test_call_after_an_open_refit_by_its_stamp() -> None:
    """Its cut says where it leads: no other stamp is right."""
    engine = refits(cut(1, 5), start=2)
    assert found(call(version=5, after=1), engine) == ([(0, 10, 2, 5)], [])
    assert found(call(version=2, after=1), engine) == ([(0, 10, 2, 5)], [])
    assert found(call(version=4, after=1), engine) == ([(0, 10, 2, 5)], ["stamp"])
    assert found(call(version=6, after=1), engine) == ([(0, 10, 2, 5)], ["stamp"])


def test_lost_refit_in_a_call_that_is_younger_than_the_step() -> None:
    """It may have led to what the call had, not back to the step's version."""
    one = call(tokens=30, version=12, after=0, until=1)
    assert found(one, refits(start=12)) == ([(0, 30, 12, 12)], [])
    two = call(tokens=30, version=12, after=1, until=2)
    assert found(two, refits(start=10)) == ([(0, 30, 10, 12)], [])


# Places.


def test_place_lies_below_the_lowest_of_the_later_counts() -> None:
    """A refit without a cut lies before the next exact count, and the lowest that follows."""
    engine = refits(done(1, 1), cut(2, 2, c=6), done(2, 2), cut(3, 3, c=8), done(3, 3))
    assert found(call(version=0, after=0), engine) == (
        [(0, 6, 0, 1), (6, 8, 2, 2), (8, 10, 3, 3)],
        [],
    )


def test_place_lies_below_the_count_of_an_open_refit() -> None:
    """Refit 3 without a cut happened before the count of refit 4, which may not have happened: the
    tokens from there on are of 3 or 4, not of 2.
    """
    engine = refits(cut(2, 2, c=6), done(2, 2), done(3, 3), cut(4, 4, c=8), base=1)
    assert found(call(version=0, after=1), engine) == (
        [(0, 6, 0, 0), (6, 8, 2, 3), (8, 10, 3, 4)],
        [],
    )
    engine = refits(done(1, 1), cut(2, 2, c=6))
    assert found(call(version=0, after=0), engine) == ([(0, 6, 0, 1), (6, 10, 1, 2)], [])


def test_counts_that_fall_bound_what_was_before_them_by_the_lowest() -> None:
    """Nothing before the exact count 6 lies beyond it, also where the count before it says 8."""
    events = done(1, 1), cut(2, 2, c=8), done(2, 2), cut(3, 3, c=6)
    expected = [(0, 6, 0, 1), (6, 10, 2, 3)], ["cut_counts_fall"]
    assert found(call(version=0, after=0), refits(*events)) == expected
    expected = [(0, 6, 0, 1), (6, 10, 1, 3)], ["cut_counts_fall"]
    neither = done(1, 1), cut(2, 2, c=8), cut(3, 3, c=6)  # may have happened
    assert found(call(version=0, after=0), refits(*neither)) == expected


def test_refit_that_failed_ends_nothing() -> None:
    """A refit that nobody cut, after one that failed, may have moved the call."""
    failed = RefitAborted(time=0.0, engine="e", refit=1, version=1, reason="it failed")
    engine = refits(cut(1, 1), failed, done(2, 1))
    assert found(call(version=0, after=0), engine) == ([(0, 10, 0, 1)], [])


def test_inexact_count_bounds_no_other_refit() -> None:
    """The refit before an inexact cut may lie beyond its count."""
    engine = refits(done(1, 1), cut(2, 2, exact=False, c=4), done(2, 2))
    segments, names = found(call(version=0, after=0), engine)
    assert segments == [(0, 4, 0, 1), (4, 10, 0, 2)]
    assert names == []


def test_equal_counts_do_not_fall() -> None:
    """Two refits in one pause of the call."""
    engine = refits(cut(1, 1, c=4), done(1, 1), cut(2, 2, c=4), done(2, 2))
    assert found(call(version=0, after=0), engine) == ([(0, 4, 0, 0), (4, 10, 2, 2)], [])


def test_call_that_had_ended_before_an_exact_cut_is_not_touched_later() -> None:
    """It is not in the cut of refit 2; refit 3, of which nothing is known, cannot have moved it."""
    engine = refits(cut(1, 1, c=4), done(1, 1), cut(2, 2), done(2, 2), done(3, 3))
    assert found(call(version=0, after=0), engine) == ([(0, 4, 0, 0), (4, 10, 1, 1)], [])
    zero = refits(cut(1, 1), done(1, 1), done(2, 2))
    assert found(call(version=0, after=0), zero) == ([(0, 10, 0, 0)], [])


def test_call_absent_from_an_exact_cut_and_in_a_later_one() -> None:
    """A contradiction, and the later cut counts."""
    engine = refits(cut(1, 1, c=4), done(1, 1), cut(2, 2), done(2, 2), cut(3, 3, c=8), done(3, 3))
    expected = [(0, 4, 0, 0), (4, 8, 1, 1), (8, 10, 3, 3)]
    assert found(call(version=0, after=0), engine) == (expected, ["absent_from_cut"])
    assert found(call(version=0), engine) == (expected, ["absent_from_cut"])


# Spans beside cuts.


@pytest.mark.parametrize(
    ("spans", "names"),
    [
        (((0, 4, 0), (4, 10, 1)), []),
        (((0, 3, 0), (3, 10, 1)), ["span_contradicts_cut"]),  # token 3 is before the count
        (((0, 5, 0), (5, 10, 1)), ["span_contradicts_cut"]),  # token 4 is after it
        (((0, 3, 0), (5, 10, 1)), []),  # nothing is said of the tokens beside the count
        (((0, 10, 0, 1),), []),  # bounds contradict nothing
        (((3, 4, 1), (4, 5, 0)), ["span_contradicts_cut", "span_contradicts_cut"]),
    ],
)
def test_spans_beside_an_exact_count(spans: tuple[tuple[int, ...], ...], names: list[str]) -> None:
    """The engine's spans are held against the cut at the tokens before and at its count."""
    engine = refits(cut(1, 1, c=4), done(1, 1))
    assert found(call(version=0, after=0, spans=spans), engine)[1] == names
    inexact = refits(cut(1, 1, exact=False, c=4), done(1, 1))
    assert found(call(version=0, after=0, spans=spans), inexact)[1] == []


def test_stamp_of_the_refit_that_cut_the_call() -> None:
    """It had tokens before that, so that it began on another version, whether or not it is done."""
    for engine in (refits(cut(1, 1, c=5)), refits(cut(1, 1, c=5), done(1, 1))):
        _, names = found(call(version=1), engine)
        assert names == ["stamp"]
    for engine in (refits(cut(1, 1, c=0)), refits(cut(1, 1, c=0), done(1, 1))):
        _, names = found(call(version=1), engine)
        assert names == []


def test_spans_of_a_rolled_back_part_that_a_refit_of_the_run_also_leads_to() -> None:
    """The same number is of other weights: only what comes after that refit can be its doing."""
    spans = ((0, 20, 6),)
    before = {"tokens": 20, "after": 5, "spans": spans}
    gone = [(0, 20, NEVER, NEVER)]
    for events in ((cut(6, 6, c=10),), (cut(6, 6, c=10), done(6, 6))):
        engine = refits(*events, start=3, base=5, limit=4)
        assert found(call(**before), engine)[0] == [(0, 10, NEVER, NEVER), (10, 20, 6, 6)]
        ended = found(call(**before, until=5), engine)[0]  # before any refit of this run
        assert ended == [(0, 10, NEVER, NEVER), (10, 20, NEVER, NEVER)]
    engine = refits(cut(6, 6), start=3, base=5, limit=4)
    assert found(call(**before), engine, now=6)[0] == [(0, 20, 6, 6)]
    assert found(call(**before), engine, now=5)[0] == gone  # the policy is not there yet
    skipped = refits(
        RefitAborted(time=0.0, engine="e", refit=7, version=5, reason="no network"),
        start=3,
        base=5,
        limit=4,
    )
    assert found(call(**before), skipped)[0] == gone  # refit 6 may have happened; to 6, nobody says


def test_call_that_is_newer_than_the_step_behind_lost_lines() -> None:
    """Its stamp is possible, too: the policy was further than the trace."""
    stamped = call(version=1, after=1, until=1)
    segments, names = spans_of(stamped, refits(), now=0, lost=True)
    assert (segments, names) == ([(0, 10, 0, 1)], [])
    announced = refits(cut(1, 5, c=2))
    segments, names = spans_of(call(version=0), announced, now=0, lost=True)
    assert (segments, names) == ([(0, 10, 0, 5)], [])


def test_spans_of_refits_that_the_call_from_before_has_met() -> None:
    """Each is believed from the last refit before the cut that counts the token."""
    engine = refits(done(6, 5), cut(7, 6, c=10), done(7, 6), start=3, base=5, limit=4)
    of = {"tokens": 20, "after": 5, "spans": ((0, 4, 3), (4, 10, 5), (10, 20, 6))}
    known = [(0, 4, 3, 3), (4, 10, 5, 5), (10, 20, 6, 6)]
    assert found(call(**of), engine)[0] == known
    inexact = refits(done(6, 5), cut(7, 6, exact=False, c=10), start=3, base=5, limit=4)
    assert found(call(**of), inexact)[0] == known
    of = {"tokens": 20, "after": 5, "spans": ((0, 20, 6),)}
    for made in (engine, inexact):  # ten tokens at least were there before refit 7
        segments, names = found(call(**of), made)
        assert segments == [(0, 10, NEVER, NEVER), (10, 20, 6, 6)]
        assert names[-1] == "beyond_resume"


def test_the_newest_version_beyond_a_resume_is_named() -> None:
    engine = refits(start=3, base=5, limit=4)
    of = call(after=5, spans=((0, 4, 6), (4, 8, 7, 9), (8, 10, 5)))
    segments, findings = spans_of(of, engine, now=9)
    assert segments == [(0, 4, NEVER, NEVER), (4, 8, NEVER, NEVER), (8, 10, NEVER, NEVER)]
    assert dict(findings)["beyond_resume"] == "version 7, but the run went on from 4"
