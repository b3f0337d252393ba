"""What the fold answers between the steps: what waits, what engines have, how old groups are."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rl_staleness.events import Call, TraceError, decode
from rl_staleness.ledger import Ledger
from tests.test_arithmetic import (
    aborted,
    call,
    cut,
    done,
    dropped,
    line,
    published,
    started,
    trained,
)

Event = dict[str, Any]


def ledger(*events: Event) -> Ledger:
    """A ledger after these events."""
    made = Ledger()
    take(made, *events)
    return made


def take(to: Ledger, *events: Event) -> list[str]:
    """The names of what the last of these events showed."""
    for event in events:
        to.apply(decode(json.dumps(event).encode()))
    return [name for name, _ in to.found]


def test_what_waits() -> None:
    """A group waits from its publish to the step that trains it without keeping it, or its drop."""
    made = ledger(started(1), *(published(g, tokens={"1": 1}) for g in "ghi"))
    assert [group.group for group in made.waiting()] == ["g", "h", "i"]
    assert made.is_waiting("g") is True
    assert made.is_waiting("x") is False
    assert made.published("x") is None
    group = made.published("g")
    assert group is not None
    assert group.tokens == {1: 1}
    take(made, trained(0, 1, "g", "h", kept=["h"]))
    assert [group.group for group in made.waiting()] == ["h", "i"]
    take(made, dropped("i"))
    assert [group.group for group in made.waiting()] == ["h"]


def test_counts_before_the_first_event() -> None:
    """No run, no step, no version and nothing found."""
    made = Ledger()
    assert (made.run, made.version, made.step, made.found, made.orphans) == (None, 0, 0, [], 0)
    assert made.last_refits() == {}
    assert made.age([]).tokens == 0


def test_an_event_before_the_start_is_refused() -> None:
    """And changes nothing: the start that comes then is the first event."""
    made = Ledger()
    with pytest.raises(TraceError, match="no run_started before it"):
        take(made, trained(0, 0))
    assert take(made, started(3)) == []
    assert made.version == 3


def test_what_is_found_is_that_of_the_last_event() -> None:
    """An event that contradicts nothing has found nothing."""
    made = Ledger()
    assert take(made, started(1), done(1, 3)) == ["engine_version_beyond_policy"]
    assert take(made, line("violation", name="online", detail="it was seen")) == ["online"]
    assert made.found == [("online", "it was seen")]
    assert take(made, cut(2, 3)) == []


def test_versions_and_refits_of_engines() -> None:
    """After its newest done refit; numbers go on after a resume, those of lost traces too."""
    made = ledger(
        started(5, engines={"e": 3}), done(1, 4), cut(2, 5), cut(3, 5), aborted(3, 5), done(4, 5)
    )
    assert made.engine_version("e") == 5
    assert made.engine_version("f") == 5
    assert (made.last_refit("e"), made.last_refit("f"), made.last_refit("g")) == (4, 0, 0)
    take(made, started(5, incarnation=1, engines={"e": 2}))
    assert made.engine_version("e") == 2
    assert made.last_refits() == {"e": 4}
    take(made, done(1, 5, engine="f"))
    assert made.last_refits() == {"e": 4, "f": 1}
    about = {"refits_before": {"e": 9, "f": 0, "h": 1, "i": 0, "j": -5, "x": "y"}}
    take(made, started(5, incarnation=2, about=about))
    assert made.last_refits() == {"e": 9, "f": 1, "h": 1}


def test_sole_version() -> None:
    """The version of a call that no refit touched, where that is certain."""
    made = ledger(started(9, start=3), done(1, 4), cut(2, 5), cut(3, 6), aborted(3, 6), done(4, 7))
    answers = {
        (0, 0): 3,  # before any refit
        (1, 1): 4,
        (2, 2): None,  # it may have happened
        (3, 3): None,  # before it, 2 may have
        (4, 4): 7,
        (0, 1): None,  # moved by a refit
        (2, 3): None,
        (3, 4): None,
        (5, 5): None,  # nothing is known of it
    }
    assert {key: made.sole_version("e", *key) for key in answers} == answers
    take(made, line("gap", lost=1))
    assert made.sole_version("e", 4, 4) is None
    take(made, done(5, 8))
    assert made.sole_version("e", 5, 5) == 8
    assert made.sole_version("f", 0, 0) is None  # nothing was heard of it since
    failed = ledger(started(9, start=3), done(1, 4), cut(2, 5), aborted(2, 5))
    assert failed.sole_version("e", 2, 2) == 4
    assert failed.sole_version("e", 1, 2) == 4


def test_age_of_groups_that_wait() -> None:
    """What a step would say now; nothing is counted and nobody is forgotten."""
    made = ledger(started(3), published("g", tokens={"1": 1, "5": 1}), published("h"))
    age = made.age(["g"])
    assert (age.step, age.version, age.batch_age, age.tokens) == (0, 3, 0.0, 2)
    assert made.age(["x"]).coverage is None
    assert made.age(["g"]).violations == 0
    assert made.found == []
    assert take(made, trained(0, 3, "g")) == ["negative_age"]


def test_metrics_leave_out_what_a_step_has_not() -> None:
    """A step without a trained token has counts, and no age that somebody might take for 0."""
    assert ledger(started(3)).age([]).metrics() == {
        "staleness/tokens": 0,
        "staleness/spanning_calls": 0,
        "staleness/dropped_tokens": 0,
        "staleness/violations": 0,
        "staleness/refit_seconds": 0.0,
    }


def test_spans_of_a_call() -> None:
    """As the evidence stands; of a restored one only its own spans speak."""
    made = ledger(started(1, start=0), cut(1, 1, c=4), done(1, 1))
    one = Call(call="c", engine="e", version=0, tokens=10, after=0)
    assert made.spans(one) == [(0, 4, 0, 0), (4, 10, 1, 1)]
    assert made.spans(one, restored=True) == [(0, 10, 0, 1)]


def test_orphans_are_counted_over_resumes() -> None:
    """Calls that were listed and that no group published, in all incarnations and engines."""
    few = {"orphan_after": 1}
    made = ledger(started(9, start=0, about=few), cut(1, 1, c=4), *(done(n, n) for n in (1, 2, 3)))
    assert made.orphans == 1
    more = (cut(4, 4, d=1, x=1), *(done(n, n) for n in (4, 5, 6)))
    take(made, started(9, start=0, incarnation=1, about=few), *more)
    assert made.orphans == 3


def test_size_counts_what_is_held() -> None:
    """Refits, their calls, waiting groups and the versions that refits led to."""
    made = ledger(started(1, start=0))
    assert made.size == 0
    take(made, cut(1, 1, c=4))
    assert made.size == 2  # the refit and the call
    take(made, done(1, 1))
    assert made.size == 3  # the version
    take(made, published("g", call("d", 0, 10, after=0)))
    assert made.size == 4  # the group
    take(made, trained(0, 1, "g"))
    assert made.size == 4  # its call


@pytest.mark.parametrize(
    ("fields", "held"),
    [
        ({"after": 1, "until": 1}, 0),  # no cut can list it
        ({"after": 0, "until": 1}, 1),
        ({"after": 0}, 1),
        ({"until": 1}, 1),
        ({}, 1),
    ],
)
def test_calls_that_a_late_cut_may_list_are_held(fields: Event, held: int) -> None:
    """Others take no room, nor do those of a group of before."""
    for leaves in (trained(0, 1, "g"), dropped("g")):
        made = ledger(started(1), published("g", call("c", 1, 10, **fields)), leaves)
        assert made.size == held
        before = published("g", call("c", 1, 10, **fields), restored=True)
        assert ledger(started(1), before, leaves).size == 0


def test_calls_of_a_group_that_was_dropped_unpublished_are_no_orphans() -> None:
    """They were heard of; a drop of a group that waits says nothing more of calls."""
    start = (started(9, start=0, about={"orphan_after": 1}), cut(1, 1, c=4))
    later = [done(n, n) for n in range(1, 5)]
    assert ledger(*start, dropped("g", calls=[call("c", 0, 9)]), *later).orphans == 0
    waiting = published("g", call("d", 0, 9))
    assert ledger(*start, waiting, dropped("g", calls=[call("c", 0, 9)]), *later).orphans == 1


def test_trained_calls_are_no_orphans() -> None:
    """Nor those that a cut lists at two refits, of two updates; and cuts still say of others who
    had ended.
    """
    made = ledger(
        started(9, start=0, about={"orphan_after": 2}),
        published("waits", call("x", 0, 30, after=0)),
        cut(1, 1, c=4, d=4),
        done(1, 1),
        cut(2, 2, d=8),
        done(2, 2),
        published("g", call("c", 0, 9, after=0, until=1)),
        published("h", call("d", 0, 9, after=0, until=2)),
        trained(0, 9, batches=[["g"], ["h"]]),
        *(line for n in range(3, 30) for line in (cut(n, n), done(n, n))),
    )
    assert made.orphans == 0
    assert made.spans(Call(call="x", engine="e", version=0, tokens=30, after=0)) == [(0, 30, 0, 0)]


@pytest.mark.parametrize(
    "waits",
    [
        published("g", call("x", 0, 5, engine="b")),
        published("g", call("x", 0, 5, after=0), restored=True),
    ],
)
def test_orphan_with_the_name_of_a_waiting_call(waits: Event) -> None:
    """That is another call: of another engine, or of before the run was resumed."""
    few = {"orphan_after": 2}
    refits = [line for n in (2, 3) for line in (cut(n, n), done(n, n))]
    made = ledger(started(3, start=0, about=few), waits, cut(1, 1, x=3), done(1, 1), *refits)
    assert made.orphans == 1
    other = Call(call="y", engine="e", version=0, tokens=10, after=0)
    assert made.spans(other) == [(0, 10, 0, 1)]
    mine = published("g", call("x", 0, 5, after=0))
    made = ledger(started(3, start=0, about=few), mine, cut(1, 1, x=3), done(1, 1), *refits)
    assert made.orphans == 0
    assert made.spans(other) == [(0, 10, 0, 0)]


FEW = {"orphan_after": 1}
ORPHAN = [cut(1, 1, o=1), done(1, 1), cut(2, 2, x=1), done(2, 2)]
"""At its end o is forgotten, after a look at who waits."""
LATER = [line for n in range(3, 30) for line in (cut(n, n), done(n, n))]


def test_a_group_that_is_published_after_a_look_at_who_waits() -> None:
    """Its call is no orphan."""
    mine = published("g", call("x", 0, 5, after=0))
    assert ledger(started(30, start=0, about=FEW), *ORPHAN, mine, *LATER).orphans == 1


@pytest.mark.parametrize(
    "leaves",
    [trained(0, 30, "g"), dropped("g"), published("g")],
)
def test_a_group_that_leaves_after_a_look_at_who_waits(leaves: Event) -> None:
    """What cuts say of its calls is kept no more."""
    mine = published("g", call("x", 0, 5, after=0))
    start = started(30, start=0, about=FEW)
    made = ledger(start, mine, *ORPHAN, leaves, *LATER)
    assert made.orphans == 1
    assert made._engines["e"].calls.size == 0


def test_calls_that_waited_before_a_resume_are_no_more() -> None:
    """One that is named alike is another call."""
    mine = published("g", call("x", 0, 5, after=0))
    again = started(30, incarnation=1, about=FEW)
    more = [cut(3, 3, x=1), done(3, 3), cut(5, 5), done(5, 5)]
    made = ledger(started(30, start=0, about=FEW), mine, *ORPHAN, again, *more)
    assert made.orphans == 2


def test_kept_groups_take_no_more_room_at_each_step() -> None:
    """A call that a group leaves with again and again is noted once."""
    calls = [call(f"c{n}", 0, 9, after=0) for n in range(5)]
    made = ledger(started(0), cut(1, 0, c0=1), done(1, 0), published("k", *calls))
    for step in range(50):
        take(made, trained(step, step, batches=[["k"], ["k"]], kept=["k"]))
        take(made, cut(step + 2, step), done(step + 2, step))
    left = made._engines["e"].calls._left_at
    assert sum(map(len, left.values())) == len(calls)


def test_a_version_without_tokens_is_not_the_newest() -> None:
    """What a group gained in flight ends at the newest version that a token of it has."""
    made = ledger(started(9), published("g", tokens={"1": 10, "2": 0}))
    step = made.apply(decode(json.dumps(trained(0, 3, "g")).encode()))
    assert step is not None
    assert (step.batch_age, step.age_in_flight, step.age_in_queue) == (2, 0, 2)


# The start of an incarnation.


@pytest.mark.parametrize(
    ("event", "names"),
    [
        (started(2, incarnation=1), []),
        (started(2, incarnation=2), ["incarnation"]),
        (started(2, incarnation=0), ["incarnation"]),
        (started(2, incarnation=1, run="other"), ["run_changed"]),
        (started(2, incarnation=1, engines={"e": 2}), []),
        (started(2, incarnation=1, engines={"e": 3}), ["engine_version_beyond_policy"]),
    ],
)
def test_start_that_does_not_go_on_with_the_run(event: Event, names: list[str]) -> None:
    """Another run, a number that is left out or comes again, an engine ahead of the policy."""
    assert take(ledger(started(2)), event) == names


def test_rolled_back_run_has_no_version_of_what_was_undone() -> None:
    """Refits to 1, 2, 3; resumed at 1: the age in refits of a token of 0, trained at 4, is 2."""
    events = (started(3, start=0), done(1, 1), done(2, 2), done(3, 3))
    again = (started(1, start=1, incarnation=1), trained(0, 1), trained(1, 2), trained(2, 3))
    made = ledger(*events, *again, done(4, 4), published("g", tokens={"0": 10}))
    assert made.age(["g"]).batch_age_refits == 2
    made = ledger(*events, started(3, incarnation=1), published("g", tokens={"0": 10}))
    assert made.age(["g"]).batch_age_refits == 3


@pytest.mark.parametrize(("version", "spans"), [(3, [(0, 10, 3, 3)]), (2, [(0, 10, -1, -1)])])
def test_roll_back_is_remembered(version: int, spans: list[Any]) -> None:
    """Of a part that was undone a call from before has no version, after the next resume too."""
    made = ledger(started(3, start=3), done(1, 3), done(2, 3), started(version, incarnation=1))
    of = Call(call="c", engine="e", version=version, tokens=10, after=1)
    assert made.spans(of) == spans
    take(made, started(version, incarnation=2))
    assert made.spans(of) == spans


# Gaps.


def test_gap_explains_until_the_next_refit_or_step() -> None:
    """What contradicts something before them is no violation, what comes after is one."""
    beyond, group = done(2, 9), published("g", tokens={"1": 1})
    made = ledger(started(1), line("gap", lost=1))
    assert take(made, group, group) == []
    assert take(made, done(1, 1)) == []
    assert take(made, beyond) == ["engine_version_beyond_policy"]
    assert take(ledger(started(1), line("gap", lost=1), trained(7, 4), beyond)) == [
        "engine_version_beyond_policy"
    ]
    resumed = ledger(started(1), line("gap", lost=1), started(1, incarnation=1))
    assert take(resumed, beyond) == ["engine_version_beyond_policy"]


# Groups.


def test_violations_of_a_kept_group_are_counted_once_until_it_is_published_again() -> None:
    """The same contradiction of one call, at each of its trainings; of another call, another."""
    contradiction = [call("c", 7, 10, after=0), call("d", 7, 10, after=0)]
    made = ledger(started(1), published("g", *contradiction))
    assert take(made, trained(0, 1, "g", kept=["g"])) == [
        "stamp",
        "stamp",
    ]
    assert take(made, trained(1, 2, "g", kept=["g"])) == []
    assert take(made, trained(2, 3, "g")) == []
    assert take(made, published("g", *contradiction)) == []
    assert take(made, trained(3, 4, "g", kept=["g"])) == ["stamp", "stamp"]
    assert take(made, published("g", *contradiction)) == ["published_again"]
    assert take(made, trained(4, 5, "g")) == ["stamp", "stamp"]


def test_each_name_that_a_group_has_twice_is_found() -> None:
    """Two of the three names, one of them three times."""
    names = ["c", "c", "d", "e", "d", "d"]
    made = ledger(started(1))
    assert take(made, published("g", *(call(n, 1, 1) for n in names))) == ["call_named_twice"] * 2
    assert [detail for _, detail in made.found] == ["'c' of 'g'", "'d' of 'g'"]
    assert take(made, published("h", *(call(n, 1, 1) for n in "cde"))) == []


def test_masks_of_what_the_step_does_not_train() -> None:
    """A group that is not in the step, a call that the group has not, a token too many."""
    made = ledger(started(1), published("g", call("c", 1, 4)), published("h", call("c", 1, 4)))
    masks = {"h": {"c": [[0, 1]]}}
    assert take(made, trained(0, 1, "g", kept=["g"], trained=masks)) == ["mask_of_unknown_group"]
    masks = {"g": {"d": [[0, 1]]}}
    assert take(made, trained(1, 2, "g", kept=["g"], trained=masks)) == ["mask_of_unknown_call"]
    masks = {"g": {"c": [[0, 5]]}}
    assert take(made, trained(2, 3, "g", kept=["g"], trained=masks)) == ["mask_beyond_call"]
    masks = {"g": {"c": [[0, 4]]}}
    assert take(made, trained(3, 4, "g", trained=masks)) == []


def test_restored_group_of_tokens_that_the_run_never_had() -> None:
    """Sums of a version that was rolled back are of no version, those at the limit stay."""
    made = ledger(started(4), started(3, incarnation=1))
    sums = {"2": 5, "3": 6, "4": 7}
    take(made, published("g", restored=True, tokens=sums))
    age = made.age(["g"])
    assert (age.tokens, age.tokens_by_version) == (18, {2: 5, 3: 6})
    assert take(made, trained(0, 3, "g")) == ["beyond_resume"]
    take(made, published("h", restored=True, tokens={"3": 6, "4": 0}))
    assert take(made, trained(1, 4, "h")) == []


def test_spans_whose_newest_version_is_older_than_their_oldest() -> None:
    """They are no spans; equal ones are."""
    for versions, right in (([2, 2], True), ([1, 2], True), ([2, 1], False)):
        event = published("g", call("c", 2, 4, spans=[[0, 4, *versions]]))
        if right:
            assert take(ledger(started(2)), event) == []
        else:
            with pytest.raises(TraceError, match="older than its oldest"):
                take(ledger(started(2)), event)


def test_a_part_is_undone_that_only_refits_show() -> None:
    """Steps whose lines are lost led to what the engine was moved to."""
    lost = line("gap", lost=3)
    made = ledger(started(1, start=1), lost, done(1, 4))
    assert (made.version, made.newest) == (1, 4)
    take(made, started(1, start=1, incarnation=1, about={"resumed": {}}))
    assert made.newest == 1
    before = Call(call="c", engine="e", version=1, tokens=9, after=0)
    assert made.spans(before) == [(0, 9, -1, -1)]  # of which part it is, nobody can say


def test_a_start_that_leaves_out_a_number() -> None:
    """A violation, unless it says that the run goes on: the other may not have been written."""
    for about, found in (({}, ["incarnation"]), ({"resumed": {}}, [])):
        again = started(1, start=1, incarnation=2, about=about)
        assert take(ledger(started(1, start=1)), again) == found
    earlier = started(1, start=1, incarnation=1, about={"resumed": {}})
    assert take(ledger(started(1, start=1, incarnation=1)), earlier) == ["incarnation"]


def test_the_newest_version_of_a_run_without_a_step() -> None:
    """That of its start, also after a resume."""
    made = ledger(started(0))
    assert made.newest == 0
    take(made, started(0, incarnation=1))
    assert made.newest == 0


def test_spans_as_of_a_policy_that_is_further_than_the_lines() -> None:
    """What is not known may be as new as that; by default as the last line."""
    made = ledger(started(0, start=0), line("gap", lost=1))
    unsure = Call(call="c", engine="e", version=0, tokens=9, after=0)
    assert made.spans(unsure, now=3) == [(0, 9, 0, 3)]
    assert made.spans(unsure) == [(0, 9, 0, 0)]
