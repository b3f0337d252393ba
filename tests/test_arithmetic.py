"""The numbers that pin the arithmetic, each as the lines of a trace and what they must give.

Every case is folded twice, by the library and by the token-by-token reference, and must give the
number that is written here.
"""

from __future__ import annotations

import json
from fractions import Fraction
from typing import Any

import pytest

from rl_staleness.events import decode
from rl_staleness.ledger import Ledger
from rl_staleness.staleness import quantile
from tests import reference

Event = dict[str, Any]


def line(event: str, **fields: Any) -> Event:
    """One line of a trace."""
    return {"event": event, "time": 1.0, **fields}


def started(version: int = 0, start: int | None = None, step: int = 0, **fields: Any) -> Event:
    """A run whose policy holds `version` updates; its engine "e" starts on `start`, if given."""
    if start is not None:
        fields["engines"] = {"e": start}
    return line(
        "run_started",
        **{"schema": 1, "run": "r", "incarnation": 0, "version": version, "step": step, **fields},
    )


def cut(
    refit: int, version: int, engine: str = "e", exact: bool | None = None, **calls: int
) -> Event:
    """The cut of a refit: tokens so far by call."""
    fields = {} if exact is None else {"exact": exact}
    return line("refit_cut", engine=engine, refit=refit, version=version, calls=calls, **fields)


def done(refit: int, version: int, engine: str = "e", **fields: Any) -> Event:
    """A refit that is done."""
    return line("refit_done", engine=engine, refit=refit, version=version, **fields)


def aborted(refit: int, version: int, engine: str = "e") -> Event:
    """A refit that failed."""
    return line("refit_aborted", engine=engine, refit=refit, version=version, reason="it failed")


def call(name: str, version: int, tokens: int, engine: str = "e", **fields: Any) -> Event:
    """A call as a published group lists it."""
    return {"call": name, "engine": engine, "version": version, "tokens": tokens, **fields}


def published(group: str, *calls: Event, **fields: Any) -> Event:
    """A published group; tokens by version go in as `tokens`."""
    return line("group_published", group=group, calls=list(calls), **fields)


def dropped(group: str, **fields: Any) -> Event:
    """A dropped group."""
    return line("group_dropped", group=group, reason="too old", **fields)


def trained(step: int, version: int, *groups: str, **fields: Any) -> Event:
    """A step that trains these groups, or the `batches` that are named."""
    if "batches" not in fields:
        fields["groups"] = list(groups)
    return line("step_trained", step=step, version=version, **fields)


def fold(*events: Event) -> list[Any]:
    """What the library answers to the steps among the events."""
    ledger = Ledger()
    answers = [ledger.apply(decode(json.dumps(event).encode())) for event in events]
    return [answer for answer in answers if answer is not None]


def check(*events: Event, violations: int = 0, **expected: Any) -> None:
    """Assert the numbers of the last step, by the library and by the reference."""
    step = fold(*events)[-1]
    second = reference.steps(list(events))[-1]
    wanted = {
        name: value
        if value is None or isinstance(value, int | dict)
        else pytest.approx(float(value))
        for name, value in {**expected, "violations": violations}.items()
    }
    assert wanted == {name: getattr(step, name) for name in wanted}
    assert wanted == {
        name: float(second[name]) if isinstance(second[name], Fraction) else second[name]
        for name in wanted
    }


# The measure.


def test_age_of_one_token() -> None:
    """Trained at version 7, sampled by 5: age 2."""
    check(
        started(7),
        published("g", tokens={"5": 1}),
        trained(0, 7, "g"),
        batch_age=2,
        age_lo=2,
        age_hi=2,
        age_max=2,
        age_p50=2,
        age_p95=2,
        coverage=1,
        tokens=1,
        tokens_by_version={5: 1},
        spanning_calls=0,
        version=7,
        step=0,
    )


def test_synchronous_training_is_always_zero() -> None:
    """A run that refits its engine to every version before it generates reads 0 at every step."""
    events = [started()]
    for step in range(5):
        if step:
            events += [cut(step, step), done(step, step)]
        events += [published("g", tokens={str(step): 10}), trained(step, step, "g")]
        check(
            *events,
            batch_age=0,
            age_max=0,
            age_hi=0,
            batch_age_refits=0,
            age_in_queue=0,
            coverage=1,
        )


def two_updates_a_refit(*groups: Event) -> list[Event]:
    """Published weights hold 0, 2, 4 and 6 updates; call A is cut at 100 and at 400, B runs on
    version 4.
    """
    return [
        started(6, start=0),
        cut(1, 2, A=100),
        done(1, 2),
        cut(2, 4, A=400),
        done(2, 4),
        cut(3, 6),
        done(3, 6),
        *groups,
    ]


A = call("A", 0, 450, after=0)
B = call("B", 4, 150, after=2)


def test_one_batch_in_one_unit() -> None:
    """100 tokens on version 0, 300 on 2, 50 on 4 and 150 on 4, trained at 6: batch age 3.667, 1.833
    in refits.
    """
    check(
        *two_updates_a_refit(published("a", A), published("b", B)),
        trained(0, 6, "a", "b"),
        batch_age=Fraction(2200, 600),
        batch_age_refits=Fraction(1100, 600),
        age_in_flight=Fraction(1000, 600),
        age_in_queue=2,
        age_max=6,
        age_p50=4,
        age_p95=6,
        coverage=1,
        age_lo=Fraction(2200, 600),
        age_hi=Fraction(2200, 600),
        tokens=600,
        tokens_by_version={0: 100, 2: 300, 4: 200},
        spanning_calls=1,
    )
    assert f"{2200 / 600:.3f}" == "3.667"
    assert f"{1100 / 600:.3f}" == "1.833"


def test_one_batch_as_one_group() -> None:
    """Published as one group the batch has the same age and the same parts."""
    check(
        *two_updates_a_refit(published("ab", A, B)),
        trained(0, 6, "ab"),
        batch_age=Fraction(2200, 600),
        age_in_flight=Fraction(1000, 600),
        age_in_queue=2,
        batch_age_refits=Fraction(1100, 600),
    )


def test_one_batch_with_sums_by_version() -> None:
    """A call that no refit touched may be published as a sum: the numbers stay."""
    check(
        *two_updates_a_refit(published("ab", A, tokens={"4": 150})),
        trained(0, 6, "ab"),
        batch_age=Fraction(2200, 600),
        coverage=1,
        tokens_by_version={0: 100, 2: 300, 4: 200},
    )


def test_one_batch_in_two_updates() -> None:
    """A in the first and B in the second update of the step: batch age 3.917, still 1.833 in
    refits.
    """
    check(
        *two_updates_a_refit(published("a", A), published("b", B)),
        trained(0, 6, batches=[["a"], ["b"]]),
        batch_age=Fraction(2350, 600),
        age_lo=Fraction(2350, 600),
        age_hi=Fraction(2350, 600),
        batch_age_refits=Fraction(1100, 600),
        age_in_flight=Fraction(1000, 600),
        age_in_queue=Fraction(1350, 600),
    )
    assert f"{2350 / 600:.3f}" == "3.917"


def test_one_batch_from_the_engines_own_spans() -> None:
    """Spans that the engine reports itself give the same numbers without one cut."""
    spans = [[0, 100, 0], [100, 400, 2], [400, 450, 4]]
    check(
        started(6, start=0),
        done(1, 2),
        done(2, 4),
        done(3, 6),
        published("a", call("A", 0, 450, after=0, spans=spans)),
        published("b", call("B", 4, 150, after=2, spans=[[0, 150, 4]])),
        trained(0, 6, "a", "b"),
        batch_age=Fraction(2200, 600),
        batch_age_refits=Fraction(1100, 600),
        coverage=1,
        spanning_calls=1,
    )


def test_two_updates_whose_split_is_not_known() -> None:
    """With `groups` and two updates the age is taken at the first one and age_hi grows by 1."""
    check(
        *two_updates_a_refit(published("a", A), published("b", B)),
        trained(0, 6, "a", "b", updates=2),
        batch_age=Fraction(2200, 600),
        age_lo=Fraction(2200, 600),
        age_hi=Fraction(2800, 600),
        coverage=1,
    )


def test_a_group_in_two_entries_counts_twice() -> None:
    """A group of 10 tokens in both updates of a step: 20 tokens, at ages 1 and 2."""
    check(
        started(1),
        published("g", tokens={"0": 10}),
        trained(0, 1, batches=[["g"], ["g"]]),
        tokens=20,
        batch_age=Fraction(3, 2),
        age_p50=1,
        age_p95=2,
        age_max=2,
        tokens_by_version={0: 20},
    )


def test_updates_beside_batches_is_their_number() -> None:
    """`updates` may repeat the number of `batches`; the next step has the version that follows."""
    check(
        started(),
        published("g", tokens={"0": 10}),
        published("h", tokens={"0": 10}),
        trained(0, 0, batches=[["g"], []], updates=2),
        trained(1, 2, "h"),
        batch_age=2,
    )


def test_a_step_without_an_update() -> None:
    """`updates: 0` trains at the step's version and leaves the policy where it is."""
    check(
        started(3),
        published("g", tokens={"2": 10}),
        published("h", tokens={"2": 10}),
        trained(0, 3, "g", updates=0),
        trained(1, 3, "h"),
        batch_age=1,
        age_lo=1,
        age_hi=1,
    )


def test_percentiles_are_ages_that_occur() -> None:
    """The smallest age that at least 50, or 95, percent of the tokens have or stay below."""
    ages = {"9": 50, "8": 45, "1": 5}
    check(
        started(9),
        published("g", tokens=ages),
        trained(0, 9, "g"),
        age_p50=0,
        age_p95=1,
        age_max=8,
    )
    check(
        started(9),
        published("g", tokens={"9": 49, "8": 45, "1": 6}),
        trained(0, 9, "g"),
        age_p50=1,
        age_p95=8,
        age_max=8,
    )


def test_percentile_between_two_tokens() -> None:
    """189 of 200 tokens are less than 95 %, 190 are that share; 199 of 400 are less than half."""
    assert quantile({0: 189, 5: 11}, 200, 95) == 5
    assert quantile({0: 190, 5: 10}, 200, 95) == 0
    assert quantile({0: 199, 1: 201}, 400, 50) == 1
    assert quantile({}, 0, 50) is None


def test_bounds_of_a_step_without_an_update() -> None:
    """What is known exactly has its age for both bounds; no update later, no update earlier."""
    check(
        started(1),
        published("g", tokens={"0": 10}),
        trained(0, 1, "g", updates=0),
        batch_age=1,
        age_lo=1,
        age_hi=1,
    )


def test_a_step_without_a_trained_token() -> None:
    """An empty step has 0 tokens and nothing else to say about age."""
    nothing: dict[str, Any] = dict.fromkeys(
        (
            "batch_age",
            "age_max",
            "age_p50",
            "age_p95",
            "age_in_flight",
            "age_in_queue",
            "batch_age_refits",
            "coverage",
            "age_lo",
            "age_hi",
        )
    )
    empty: dict[str, Any] = {**nothing, "tokens": 0, "tokens_by_version": {}, "spanning_calls": 0}
    check(started(), trained(0, 0), **empty)
    check(started(), trained(0, 0, batches=[[], []]), **empty)
    masked = published("g", call("c", 0, 10, after=0, trained=[]))
    check(started(), masked, trained(0, 0, "g"), **empty)


def test_in_flight_is_counted_within_the_group() -> None:
    """The newest version of a group ends its flight: a fast group only waits, a mixed one was in
    flight.
    """
    check(
        started(4),
        published("mixed", tokens={"1": 10, "3": 10}),
        published("fast", tokens={"1": 20}),
        trained(0, 4, "mixed", "fast"),
        batch_age=Fraction(10 * 3 + 10 * 1 + 20 * 3, 40),
        age_in_flight=Fraction(10 * 2, 40),
        age_in_queue=Fraction(20 * 1 + 20 * 3, 40),
    )


def test_in_flight_ends_with_the_newest_trained_token() -> None:
    """A token outside the loss mask does not end its group's flight."""
    check(
        started(2, start=0),
        cut(1, 2, c=10),
        done(1, 2),
        published("g", call("c", 0, 20, after=0, trained=[[0, 10]])),
        trained(0, 2, "g"),
        batch_age=2,
        age_in_flight=0,
        age_in_queue=2,
        spanning_calls=0,
        tokens=10,
    )


def test_age_in_refits_counts_versions_of_any_engine_once() -> None:
    """Refits of two engines to one version are one; versions that no refit led to are none."""
    check(
        started(5, engines={"e": 0, "f": 0}),
        done(1, 2),
        done(1, 2, engine="f"),
        done(2, 5, engine="f"),
        published("g", tokens={"0": 10, "2": 10}),
        trained(0, 5, "g"),
        batch_age=4,
        batch_age_refits=Fraction(10 * 2 + 10 * 1, 20),
    )


# Which version sampled a token.


def test_call_split_by_a_cut() -> None:
    """90 tokens, cut at 30: `[0,30) v0`, `[30,90) v1`."""
    check(
        started(1, start=0),
        cut(1, 1, c=30),
        done(1, 1),
        published("g", call("c", 0, 90, after=0)),
        trained(0, 1, "g"),
        tokens_by_version={0: 30, 1: 60},
        batch_age=Fraction(30, 90),
        coverage=1,
        spanning_calls=1,
    )


def test_call_paused_before_its_first_token() -> None:
    """60 tokens cut at 0 beside 30 that ended before: {v1: 60, v0: 30}, where the start version
    gives {v0: 90}.
    """
    check(
        started(1, start=0),
        cut(1, 1, c=0),
        done(1, 1),
        published("g", call("c", 0, 60, after=0), tokens={"0": 30}),
        trained(0, 1, "g"),
        tokens_by_version={1: 60, 0: 30},
        batch_age=Fraction(30, 90),
        coverage=1,
        spanning_calls=0,
    )


def test_call_split_across_two_refits() -> None:
    """90 tokens cut at 30 and at 70: 30, 40 and 20 tokens on three versions."""
    check(
        started(2, start=0),
        cut(1, 1, c=30),
        done(1, 1),
        cut(2, 2, c=70),
        done(2, 2),
        published("g", call("c", 0, 90, after=0)),
        trained(0, 2, "g"),
        tokens_by_version={0: 30, 1: 40, 2: 20},
        batch_age=Fraction(30 * 2 + 40, 90),
        age_in_flight=Fraction(30 * 2 + 40, 90),
        age_in_queue=0,
        coverage=1,
        spanning_calls=1,
    )


def test_two_cuts_at_one_place() -> None:
    """Two refits between two tokens: the version between them sampled nothing."""
    check(
        started(2, start=0),
        cut(1, 1, c=30),
        done(1, 1),
        cut(2, 2, c=30),
        done(2, 2),
        published("g", call("c", 0, 90, after=0)),
        trained(0, 2, "g"),
        tokens_by_version={0: 30, 2: 60},
        coverage=1,
    )


def test_pipeline_of_twenty_turns() -> None:
    """A rollout of 20 calls with two refits on its way keeps its token counts to the token."""
    calls = []
    for turn in range(20):
        after = 0 if turn < 8 else 1 if turn < 15 else 2
        version = after
        calls.append(call(f"t{turn}", version, 10 + turn, after=after, until=after))
    calls[7].update(until=1)
    calls[14].update(until=2)
    total = sum(10 + turn for turn in range(20))
    on_0 = sum(10 + turn for turn in range(7)) + 5
    on_1 = (17 - 5) + sum(10 + turn for turn in range(8, 14)) + 11
    expected = {0: on_0, 1: on_1, 2: total - on_0 - on_1}
    check(
        started(2, start=0),
        cut(1, 1, t7=5),
        done(1, 1),
        cut(2, 2, t14=11),
        done(2, 2),
        published("g", *calls),
        trained(0, 2, "g"),
        tokens=total,
        tokens_by_version=expected,
        batch_age=Fraction(2 * on_0 + on_1, total),
        coverage=1,
        spanning_calls=2,
    )


UNCUT = [started(1, start=0), done(1, 1), published("g", call("c", 0, 50, after=0))]


def test_refit_without_a_cut() -> None:
    """A refit to 1 without a cut, a call of 50 that began before it, trained at 1: age 1, coverage
    0, bounds 0 and 1.
    """
    check(*UNCUT, trained(0, 1, "g"), batch_age=1, coverage=0, age_lo=0, age_hi=1)


def test_refit_without_a_cut_before_one_with_a_cut() -> None:
    """Then one to 2 with a cut at 50 of 60, trained at 2: 100/60, bounds 50/60 and 100/60, coverage
    10/60.
    """
    check(
        started(2, start=0),
        done(1, 1),
        cut(2, 2, c=50),
        done(2, 2),
        published("g", call("c", 0, 60, after=0)),
        trained(0, 2, "g"),
        batch_age=Fraction(100, 60),
        age_lo=Fraction(50, 60),
        age_hi=Fraction(100, 60),
        coverage=Fraction(10, 60),
        tokens_by_version={0: 50, 2: 10},
    )


def test_refit_without_a_cut_after_one_with_a_cut() -> None:
    """Cut at 20 of 60, then a refit without a cut: its place is anywhere in the 40 tokens after the
    first.
    """
    check(
        started(2, start=0),
        cut(1, 1, c=20),
        done(1, 1),
        done(2, 2),
        published("g", call("c", 0, 60, after=0)),
        trained(0, 2, "g"),
        batch_age=Fraction(20 * 2 + 40 * 1, 60),
        age_lo=Fraction(20 * 2, 60),
        age_hi=Fraction(20 * 2 + 40, 60),
        coverage=Fraction(20, 60),
    )


def test_refit_that_failed_and_was_repeated() -> None:
    """Failed at 10, repeated at 25 of 40, trained at 1: 25/40."""
    check(
        started(1, start=0),
        cut(1, 1, c=10),
        aborted(1, 1),
        cut(2, 1, c=25),
        done(2, 1),
        published("g", call("c", 0, 40, after=0)),
        trained(0, 1, "g"),
        batch_age=Fraction(25, 40),
        coverage=1,
        tokens_by_version={0: 25, 1: 15},
    )


def test_refit_that_failed_for_good() -> None:
    """A refit that only failed moves nothing: 40 tokens on version 0."""
    check(
        started(1, start=0),
        cut(1, 1, c=10),
        aborted(1, 1),
        published("g", call("c", 0, 40, after=0)),
        trained(0, 1, "g"),
        batch_age=1,
        coverage=1,
        tokens_by_version={0: 40},
    )


def test_inexact_cut() -> None:
    """An inexact cut at 10 of 40, trained at 1: batch age 1, bounds 10/40 and 1, coverage 10/40."""
    check(
        started(1, start=0),
        cut(1, 1, exact=False, c=10),
        done(1, 1),
        published("g", call("c", 0, 40, after=0)),
        trained(0, 1, "g"),
        batch_age=1,
        age_lo=Fraction(10, 40),
        age_hi=1,
        coverage=Fraction(10, 40),
    )


def test_inexact_cut_that_does_not_list_the_call() -> None:
    """An inexact cut without the call says nothing about it: bounds 0 and 1."""
    check(
        started(1, start=0),
        cut(1, 1, exact=False, other=10),
        done(1, 1),
        published("g", call("c", 0, 40, after=0)),
        trained(0, 1, "g"),
        batch_age=1,
        age_lo=0,
        age_hi=1,
        coverage=0,
    )


@pytest.mark.parametrize("stamp", [0, 1])
def test_call_begun_in_the_pause(stamp: int) -> None:
    """Begun in the pause of a refit to 1 (`after: 1`), stamped 0 or 1: all of it is v1."""
    check(
        started(1, start=0),
        cut(1, 1),
        done(1, 1),
        published("g", call("c", stamp, 40, after=1)),
        trained(0, 1, "g"),
        batch_age=0,
        coverage=1,
        tokens_by_version={1: 40},
    )


def test_unknown_tokens() -> None:
    """9 tokens of version 2 and one unknown, trained at 4: batch age 2, coverage 9/10, bounds 18/10
    and 22/10.
    """
    check(
        started(4),
        published("g", tokens={"2": 9}, unknown=1),
        trained(0, 4, "g"),
        batch_age=2,
        coverage=Fraction(9, 10),
        age_lo=Fraction(18, 10),
        age_hi=Fraction(22, 10),
        tokens=10,
        tokens_by_version={2: 9},
        age_max=2,
        age_in_queue=2,
    )


def test_unknown_tokens_in_a_second_update() -> None:
    """An unknown token that the second update consumes may be as old as that update's version."""
    check(
        started(4),
        published("g", tokens={"2": 9}, unknown=1),
        trained(0, 4, batches=[[], ["g"]]),
        batch_age=3,
        age_lo=Fraction(27, 10),
        age_hi=Fraction(32, 10),
    )


def test_unknown_tokens_that_are_younger_than_the_rest() -> None:
    """The bounds weigh them and the age does not: one token trained at 1 and again at 3 has age 2;
    with one that no version is known of, trained at 1, the mean of the three is at most 5/3.
    """
    check(
        started(1),
        published("known", tokens={"0": 1}),
        published("unknown", tokens={}, unknown=1),
        trained(0, 1, batches=[["known", "unknown"], [], ["known"]]),
        batch_age=2,
        age_lo=Fraction(4, 3),
        age_hi=Fraction(5, 3),
        coverage=Fraction(2, 3),
    )


# A call that begins and ends at other moments than its refits.


def test_call_that_ended_before_the_refit() -> None:
    """An exact cut that does not list a call with `after`: the call had ended."""
    check(
        started(1, start=0),
        cut(1, 1, other=5),
        done(1, 1),
        published("g", call("c", 0, 40, after=0)),
        trained(0, 1, "g"),
        batch_age=1,
        coverage=1,
        tokens_by_version={0: 40},
    )


def test_call_that_ended_between_two_refits() -> None:
    """Listed in one exact cut and not in the next: the second refit, and what follows it, does not
    touch the call.
    """
    check(
        started(3, start=0),
        cut(1, 1, c=10),
        done(1, 1),
        cut(2, 2, other=5),
        done(2, 2),
        done(3, 3),
        published("g", call("c", 0, 40)),
        trained(0, 3, "g"),
        tokens_by_version={0: 10, 1: 30},
        coverage=1,
    )


def test_refit_after_the_end_of_the_call() -> None:
    """`until: 0` says that the call ended before the pause of a refit without a cut."""
    check(
        started(1, start=0),
        done(1, 1),
        published("g", call("c", 0, 40, after=0, until=0)),
        trained(0, 1, "g"),
        batch_age=1,
        coverage=1,
    )


def test_refit_in_which_the_call_ended() -> None:
    """`until: 1` leaves the place of a first refit without a cut open and excludes the second."""
    check(
        started(2, start=0),
        done(1, 1),
        done(2, 2),
        published("g", call("c", 0, 40, after=0, until=1)),
        trained(0, 2, "g"),
        batch_age=2,
        age_lo=1,
        age_hi=2,
        coverage=0,
    )


def test_call_without_after_that_no_cut_lists() -> None:
    """Stamped 0, no `after`, an exact cut without it: it had ended or began in that pause, so
    anywhere.
    """
    check(
        started(1, start=0),
        cut(1, 1, other=5),
        done(1, 1),
        published("g", call("c", 0, 40)),
        trained(0, 1, "g"),
        batch_age=1,
        age_lo=0,
        age_hi=1,
        coverage=0,
    )


def test_stamp_finds_the_refit() -> None:
    """Without `after`, a call stamped 1 began after the refit that leads to 1."""
    check(
        started(2, start=0),
        cut(1, 1),
        done(1, 1),
        cut(2, 2, c=10),
        done(2, 2),
        published("g", call("c", 1, 40)),
        trained(0, 2, "g"),
        tokens_by_version={1: 10, 2: 30},
        coverage=1,
    )


def test_stamp_of_a_refit_that_has_not_reported() -> None:
    """Stamped 1 after a refit to 1 that never reports: a later refit may still move the call."""
    step = fold(
        started(2, start=0),
        cut(1, 1),
        done(2, 2),
        published("g", call("c", 1, 40)),
        trained(0, 2, "g"),
    )[-1]
    assert (step.age_lo, step.age_hi, step.violations) == (0, 1, 0)


def test_stamp_of_a_refit_that_is_not_in_the_trace() -> None:
    """`until: 1` shows that there was a refit 1, so that it may explain a stamp without `after`."""
    check(
        started(1, start=0),
        published("g", call("c", 1, 40, until=1)),
        trained(0, 1, "g"),
        batch_age=0,
    )


def test_call_begun_in_the_pause_stamped_with_what_was_before() -> None:
    """Stamped 0, not in the exact cut of 1, in that of 2 at 10: begun in the first pause, so 10
    tokens on v1.
    """
    check(
        started(2, start=0),
        cut(1, 1),
        done(1, 1),
        cut(2, 2, c=10),
        done(2, 2),
        published("g", call("c", 0, 40)),
        trained(0, 2, "g"),
        tokens_by_version={1: 10, 2: 30},
        coverage=1,
    )


@pytest.mark.parametrize("fields", [{"after": 0}, {}])
def test_call_begun_before_the_count_of_a_pause(fields: Event) -> None:
    """Listed with 0, whether or not it says after which refit it began: all of it is v1."""
    check(
        started(1, start=0),
        cut(1, 1, c=0),
        done(1, 1),
        published("g", call("c", 0, 40, **fields)),
        trained(0, 1, "g"),
        tokens_by_version={1: 40},
        coverage=1,
    )


@pytest.mark.parametrize("stamp", [0, 1])
def test_listed_with_0_in_the_cut_of_its_own_refit(stamp: int) -> None:
    """`after: 1` and a 0 in the cut of refit 1 is a harmless race and no violation."""
    check(
        started(1, start=0),
        cut(1, 1, c=0),
        done(1, 1),
        published("g", call("c", stamp, 40, after=1)),
        trained(0, 1, "g"),
        tokens_by_version={1: 40},
        coverage=1,
    )


def test_call_after_a_refit_that_failed() -> None:
    """Begun in the pause of a refit that failed: the version before it; the repetition's cut moves
    the rest.
    """
    check(
        started(1, start=0),
        cut(1, 1),
        aborted(1, 1),
        cut(2, 1, c=15),
        done(2, 1),
        published("g", call("c", 0, 40, after=1)),
        trained(0, 1, "g"),
        tokens_by_version={0: 15, 1: 25},
        coverage=1,
    )


@pytest.mark.parametrize("stamp", [0, 1])
def test_call_after_a_refit_that_is_pending(stamp: int) -> None:
    """A refit that is neither done nor aborted may have happened: both versions are possible."""
    check(
        started(1, start=0),
        cut(1, 1),
        published("g", call("c", stamp, 40, after=1)),
        trained(0, 1, "g"),
        batch_age=1,
        age_lo=0,
        age_hi=1,
        coverage=0,
    )


def test_refit_that_is_pending_during_a_call() -> None:
    """Cut at 10 of 40 and not settled when the step is applied: the 30 tokens after it may be
    either.
    """
    check(
        started(1, start=0),
        cut(1, 1, c=10),
        published("g", call("c", 0, 40, after=0)),
        trained(0, 1, "g"),
        batch_age=1,
        age_lo=Fraction(10, 40),
        age_hi=1,
        coverage=Fraction(10, 40),
    )


@pytest.mark.parametrize(("stamp", "newest"), [(0, 4), (2, 2)])
def test_call_after_a_refit_that_is_not_in_the_trace(stamp: int, newest: int) -> None:
    """It may have led to the stamp, or to the step's version where the stamp says nothing new."""
    check(
        started(4, start=0),
        published("g", call("c", stamp, 40, after=1)),
        trained(0, 4, "g"),
        batch_age=4,
        age_lo=4 - newest,
        age_hi=4,
        coverage=0,
    )


def test_call_that_ended_after_the_pause_of_a_refit_that_is_not_in_the_trace() -> None:
    """`until: 1` and no line of refit 1: it may have happened, up to the step's version."""
    check(
        started(4, start=0),
        published("g", call("c", 0, 40, after=0, until=1)),
        trained(0, 4, "g"),
        batch_age=4,
        age_lo=0,
        age_hi=4,
        coverage=0,
    )


def test_refit_number_that_the_trace_skips() -> None:
    """Refits 1 and 3 are there, 2 is not: it may have happened between their places."""
    check(
        started(9, start=0),
        cut(1, 2, c=5),
        done(1, 2),
        cut(3, 4, c=8),
        done(3, 4),
        published("g", call("c", 0, 10, after=0)),
        trained(0, 9, "g"),
        tokens_by_version={0: 5, 2: 3, 4: 2},
        coverage=0.7,
        age_hi=7.6,
        age_lo=Fraction(5 * 9 + 3 * 0 + 2 * 5, 10),
    )


def test_late_lines() -> None:
    """A cut after its refit_done, and both after the publish, count as if they had been in time."""
    check(
        started(1, start=0),
        published("g", call("c", 0, 90, after=0)),
        done(1, 1),
        cut(1, 1, c=30),
        trained(0, 1, "g"),
        tokens_by_version={0: 30, 1: 60},
        coverage=1,
    )


def test_evidence_that_comes_between_two_trainings_of_a_kept_group() -> None:
    """A kept group is aged with the evidence of the moment: uncovered first, exact once the cut is
    there.
    """
    before, after = fold(
        started(1, start=0),
        done(1, 1),
        published("g", call("c", 0, 90, after=0)),
        trained(0, 1, "g", kept=["g"]),
        cut(1, 1, c=30),
        trained(1, 2, "g"),
    )
    assert (before.coverage, before.batch_age) == (0, 1.0)
    assert (1, pytest.approx((30 * 2 + 60) / 90)) == (after.coverage, after.batch_age)
    assert (before.violations, after.violations) == (0, 0)


def test_call_of_two_groups() -> None:
    """A call that two waiting groups hold keeps its evidence when the first of them is trained."""
    check(
        started(1, start=0),
        cut(1, 1, c=10),
        done(1, 1),
        published("g", call("c", 0, 40, after=0)),
        published("h", call("c", 0, 40, after=0)),
        trained(0, 1, "g"),
        trained(1, 2, "h"),
        tokens_by_version={0: 10, 1: 30},
        batch_age=Fraction(10 * 2 + 30, 40),
    )


@pytest.mark.parametrize("orphan_after", [1, 2, 64])
def test_evidence_stays_for_a_group_that_waits_long(orphan_after: int) -> None:
    """Refits forget what nobody may ask for any more, never what a waiting group needs."""
    later = [line for n in range(2, 9) for line in (cut(n, n), done(n, n))]
    check(
        started(9, start=0, about={"orphan_after": orphan_after}),
        cut(1, 1, c=10),
        published("g", call("c", 0, 40, after=0, until=1)),
        done(1, 1),
        *later,
        trained(0, 9, "g"),
        tokens_by_version={0: 10, 1: 30},
        coverage=1,
    )


def test_evidence_stays_for_a_call_that_a_late_cut_lists() -> None:
    """The group waits already, and longer than `orphan_after`, when its cut comes."""
    check(
        started(9, start=0, about={"orphan_after": 1}),
        published("g", call("c", 0, 40, after=0, until=1)),
        *[done(n, n) for n in range(1, 5)],
        cut(1, 1, c=10),
        *[done(n, n) for n in range(5, 9)],
        trained(0, 9, "g"),
        tokens_by_version={0: 10, 1: 30},
        coverage=1,
    )


def test_a_published_call_is_no_orphan_whatever_comes_late() -> None:
    """Its group was trained before the cut that lists it came: the cut stays exact for others."""
    ledger = Ledger()
    for event in (
        started(9, start=0, about={"orphan_after": 1}),
        published("g", call("c", 0, 40, after=0, until=1)),
        done(1, 1),
        trained(0, 9, "g"),
        cut(1, 1, c=10),
        *[done(n, n) for n in range(2, 6)],
    ):
        ledger.apply(decode(json.dumps(event).encode()))
    assert ledger.orphans == 0


def test_void_cut_keeps_the_evidence_of_a_call_for_as_long() -> None:
    """It was heard of at that refit, which another group with the call may come after."""
    check(
        started(0, start=0, about={"orphan_after": 4}),
        trained(0, 0),
        cut(1, 1, c=10),
        done(1, 1),
        published("g", call("c", 0, 12, after=0)),
        trained(1, 1, "g"),
        cut(5, 2, c=30),
        aborted(5, 2),
        cut(8, 2),
        published("h", call("c", 0, 40, after=0)),
        trained(2, 2, "h"),
        batch_age=Fraction(10 * 2 + 30 * 1, 40),
        coverage=Fraction(10, 40),
        age_lo=Fraction(10 * 2, 40),
        age_hi=Fraction(10 * 2 + 30 * 1, 40),
    )


def test_repeated_cut_replaces_the_first() -> None:
    """Of two cuts of one refit the second counts."""
    check(
        started(1, start=0),
        cut(1, 1, c=10),
        cut(1, 1, c=30),
        done(1, 1),
        published("g", call("c", 0, 90, after=0)),
        trained(0, 1, "g"),
        tokens_by_version={0: 30, 1: 60},
    )


def test_repeated_cut_may_lead_to_another_version() -> None:
    """It replaces the first in its version too: nothing is contradicted."""
    check(
        started(2, start=0),
        cut(1, 1, c=10),
        cut(1, 2, c=30),
        done(1, 2),
        published("g", call("c", 0, 90, after=0)),
        trained(0, 2, "g"),
        tokens_by_version={0: 30, 2: 60},
    )


def test_native_spans_beside_the_rules() -> None:
    """Tokens that no span holds follow the cuts, and a span that runs past the end is clipped."""
    check(
        started(1, start=0),
        cut(1, 1, c=30),
        done(1, 1),
        published("g", call("c", 0, 90, after=0, spans=[[60, 100, 1]])),
        trained(0, 1, "g"),
        tokens_by_version={0: 30, 1: 60},
        coverage=1,
    )


def test_spans_are_taken_as_they_are() -> None:
    """A refit without a cut leaves a call with spans exact."""
    check(
        started(1, start=0),
        done(1, 1),
        published("g", call("c", 0, 90, after=0, spans=[[0, 30, 0], [30, 90, 1]])),
        trained(0, 1, "g"),
        tokens_by_version={0: 30, 1: 60},
        coverage=1,
    )


def test_restored_spans_with_two_versions() -> None:
    """A restored group that is not covered keeps its bounds: `[start, stop, oldest, newest]`."""
    check(
        started(3),
        started(3, incarnation=1),
        published(
            "g",
            call("c", 0, 40, spans=[[0, 10, 0], [10, 40, 1, 3]]),
            restored=True,
            tokens={"2": 10},
        ),
        trained(0, 3, "g"),
        batch_age=Fraction(10 * 3 + 30 * 2 + 10 * 1, 50),
        age_lo=Fraction(10 * 3 + 30 * 0 + 10 * 1, 50),
        age_hi=Fraction(10 * 3 + 30 * 2 + 10 * 1, 50),
        coverage=Fraction(20, 50),
    )


def test_loss_mask() -> None:
    """Only tokens inside the mask count: 20 of the 30 before the cut and 10 of the 60 after it."""
    check(
        started(1, start=0),
        cut(1, 1, c=30),
        done(1, 1),
        published("g", call("c", 0, 90, after=0, trained=[[0, 20], [80, 90]])),
        trained(0, 1, "g"),
        tokens=30,
        tokens_by_version={0: 20, 1: 10},
        batch_age=Fraction(20, 30),
    )


def test_loss_mask_of_the_step() -> None:
    """A mask in the step beats that of the call; calls that it does not name keep theirs."""
    check(
        started(1, start=0),
        cut(1, 1, c=30, d=5),
        done(1, 1),
        published(
            "g",
            call("c", 0, 90, after=0, trained=[[0, 20]]),
            call("d", 0, 10, after=0, trained=[[0, 3]]),
        ),
        trained(0, 1, "g", trained={"g": {"c": [[25, 40]]}}),
        tokens=18,
        tokens_by_version={0: 5 + 3, 1: 10},
    )


def test_empty_loss_mask() -> None:
    """An empty mask, of the call or of the step, trains no token of the call."""
    check(
        started(1),
        published("g", call("c", 1, 90, after=0, trained=[]), call("d", 1, 10, after=0)),
        trained(0, 1, "g", trained={"g": {"d": []}}),
        tokens=0,
        batch_age=None,
    )


# A restart.


def test_restart_discards_what_was() -> None:
    """After a resume the engines, cuts and waiting groups of before are gone, refit numbers of
    before are the start.
    """
    check(
        started(1, start=0),
        cut(1, 1, c=10),
        done(1, 1),
        started(2, incarnation=1, step=5),
        published("g", call("c", 2, 40, after=1)),
        trained(5, 2, "g"),
        batch_age=0,
        coverage=1,
        tokens_by_version={2: 40},
    )


def test_refit_numbers_go_on_after_a_restart() -> None:
    """The first refit after the resume has the next number and cuts its incarnation's calls."""
    check(
        started(1, start=0),
        cut(1, 1, c=10),
        done(1, 1),
        started(3, start=2, incarnation=1, step=5),
        cut(2, 3, c=15),
        done(2, 3),
        published("g", call("c", 2, 40, after=1)),
        trained(5, 3, "g"),
        tokens_by_version={2: 15, 3: 25},
        coverage=1,
    )


def test_engine_that_the_start_does_not_name() -> None:
    """An engine that `run_started` does not name starts with the policy's version."""
    check(
        started(4, start=2),
        published("g", call("c", 2, 10, after=0), call("d", 4, 10, engine="f", after=0)),
        trained(0, 4, "g"),
        tokens_by_version={2: 10, 4: 10},
        coverage=1,
    )


def test_each_engine_has_its_own_version() -> None:
    """A refit of one engine leaves the calls of another alone, also those of the same name."""
    check(
        started(1, engines={"e": 0, "f": 0}),
        cut(1, 1, c=30),
        done(1, 1),
        published("g", call("c", 0, 90, after=0)),
        published("h", call("c", 0, 90, engine="f", after=0)),
        trained(0, 1, "g", "h"),
        tokens_by_version={0: 120, 1: 60},
        coverage=1,
    )


# Wrong metrics as sequences of events: what they should have read.


def test_version_read_late() -> None:
    """R(1), 400 tokens, R(2) while the call returns, T(2): 1, where the version at the return says
    0.
    """
    check(
        started(2, start=1),
        cut(1, 2),
        done(1, 2),
        published("g", call("c", 1, 400, after=0)),
        trained(0, 2, "g"),
        batch_age=1,
        coverage=1,
    )


def test_version_pinned_early() -> None:
    """100 tokens on version 1, a refit that keeps the call, 300 on 2, T(2): 0.25, where the pinned
    version says 1.
    """
    check(
        started(2, start=1),
        cut(1, 2, c=100),
        done(1, 2),
        published("g", call("c", 1, 400, after=0)),
        trained(0, 2, "g"),
        batch_age=0.25,
    )


def test_attempt_that_was_resumed() -> None:
    """100 tokens on version 1, aborted, 300 on 2 in a new call, T(2): 0.25, where the version at
    the end says 0.
    """
    check(
        started(2, start=1),
        cut(1, 2),
        done(1, 2),
        published("g", call("c", 1, 100, after=0, until=1), call("d", 2, 300, after=1, until=1)),
        trained(0, 2, "g"),
        batch_age=0.25,
        spanning_calls=0,
    )


def test_attempt_without_tokens() -> None:
    """Admitted at 4, aborted with 0 tokens, R(5), 200 tokens, T(5): 0, where the oldest admission
    says 1.
    """
    check(
        started(5, start=4),
        cut(1, 5),
        done(1, 5),
        published("g", call("c", 4, 0, after=0, until=1), call("d", 5, 200, after=1, until=1)),
        trained(0, 5, "g"),
        batch_age=0,
        coverage=1,
    )


def test_mask_is_not_shifted() -> None:
    """Versions 5, 5, 6, 6 and one prompt token before them, T(7): 1.5."""
    check(
        started(7),
        published("g", tokens={"5": 2, "6": 2}),
        trained(0, 7, "g"),
        batch_age=1.5,
    )


def test_mean_is_over_tokens() -> None:
    """10 tokens at age 4 and 990 at age 0: 0.04, where the mean of two means says 2."""
    check(
        started(4),
        published("g", tokens={"0": 10}),
        published("h", tokens={"4": 990}),
        trained(0, 4, "g", "h"),
        batch_age=0.04,
        age_p95=0,
        age_max=4,
    )


def test_wait_in_the_queue_counts() -> None:
    """A rollout that ends at once and waits for 4 refits is 4 old, all of it in queue."""
    refits = [event for n in range(1, 5) for event in (cut(n, n), done(n, n))]
    check(
        started(4, start=0),
        published("g", tokens={"0": 10}),
        *refits,
        trained(0, 4, "g"),
        batch_age=4,
        age_in_queue=4,
        age_in_flight=0,
        batch_age_refits=4,
    )


def test_dropped_groups_are_not_trained() -> None:
    """Ages 1, 1 and 9, the last one dropped: 1, where the mean over all says 3.67; the drop is
    counted apart.
    """
    check(
        started(9),
        published("a", tokens={"8": 10}),
        published("b", tokens={"8": 10}),
        published("c", tokens={"0": 10}),
        dropped("c"),
        trained(0, 9, "a", "b"),
        batch_age=1,
        tokens=20,
        dropped_tokens=10,
    )


def test_drop_of_a_group_that_was_never_published() -> None:
    """Its tokens come with the drop and count for the next step only."""
    events = [
        started(1),
        dropped("c", tokens={"0": 10}, calls=[call("x", 1, 5, after=0)]),
        trained(0, 1),
        trained(1, 2),
    ]
    assert [step.dropped_tokens for step in fold(*events)] == [15, 0]
    assert [step.violations for step in fold(*events)] == [0, 0]


def test_missing_version_is_neither_zero_nor_left_out() -> None:
    """10 fresh tokens and 10 unknown ones, T(4): age 0, coverage one half, and bounds that say what
    may be.
    """
    check(
        started(4),
        published("g", tokens={"4": 10}, unknown=10),
        trained(0, 4, "g"),
        batch_age=0,
        coverage=0.5,
        age_lo=0,
        age_hi=2,
    )


def test_fourth_update_of_a_step() -> None:
    """Four updates on one refit, trained in the fourth: 3."""
    check(
        started(),
        published("g", tokens={"0": 10}),
        trained(0, 0, batches=[[], [], [], ["g"]]),
        batch_age=3,
    )


def test_turns_count_what_they_generated() -> None:
    """50 tokens made at 5, 30 made at 7, T(8): 2.25, where turns that count again say 1.857."""
    check(
        started(8),
        published("g", tokens={"5": 50, "7": 30}),
        trained(0, 8, "g"),
        batch_age=2.25,
    )


def test_members_of_a_group_have_their_own_stamps() -> None:
    """Members dispatched at 3, 3 and 5, T(6): mean of 3, 3 and 1, where the first stamp says 3."""
    check(
        started(6, start=5),
        published("g", call("z", 5, 10, after=0), tokens={"3": 20}),
        trained(0, 6, "g"),
        batch_age=Fraction(7, 3),
    )


def test_batch_that_is_used_three_times() -> None:
    """One batch in three passes is aged in each: 0, 1 and 2, where the first pass alone says 0."""
    check(
        started(),
        published("g", tokens={"0": 10}),
        trained(0, 0, batches=[["g"], ["g"], ["g"]]),
        batch_age=1,
        tokens=30,
    )


def test_kept_group_is_trained_again() -> None:
    """A kept group waits for the next step, where it is older by one update."""
    first, second = fold(
        started(),
        published("g", tokens={"0": 10}),
        trained(0, 0, "g", kept=["g"]),
        trained(1, 1, "g"),
    )
    assert (first.batch_age, second.batch_age) == (0, 1)
    assert (first.violations, second.violations) == (0, 0)


# Violations: facts that cannot all be true. Each is counted once and never repaired.


def test_negative_age() -> None:
    """A token of version 3 trained at 2 stays -1 in the mean."""
    check(
        started(2),
        published("g", tokens={"3": 10, "2": 10}),
        trained(0, 2, "g"),
        violations=1,
        batch_age=-0.5,
        age_lo=-0.5,
    )


def test_negative_age_in_refits_is_none() -> None:
    """No version lies above that of a token of version 2 and not above 1, whatever refits led to:
    the two refits beyond the policy and the age are violations, and no refit is counted off.
    """
    check(
        started(1, start=0),
        done(1, 1),
        done(2, 2),
        done(3, 3),
        published("g", tokens={"2": 1}),
        trained(0, 1, "g"),
        batch_age=-1,
        batch_age_refits=0,
        violations=3,
    )


def test_stamp_that_is_not_the_engines() -> None:
    """A call after refit 1, from version 1 to 2, that is stamped 0: the engine says 2."""
    check(
        started(2, start=1),
        cut(1, 2),
        done(1, 2),
        published("g", call("c", 0, 10, after=1)),
        trained(0, 2, "g"),
        violations=1,
        tokens_by_version={2: 10},
    )


def test_stamp_that_no_refit_explains() -> None:
    """Without `after`, a stamp that no refit leads to is taken as it is where no cut lists the
    call.
    """
    check(
        started(5, start=0),
        cut(1, 2),
        done(1, 2),
        published("g", call("c", 1, 10)),
        trained(0, 5, "g"),
        violations=1,
        tokens_by_version={1: 10},
        batch_age=4,
    )


def test_stamp_that_no_refit_explains_of_a_call_in_a_cut() -> None:
    """Where a cut lists the call it began right before that cut, and its stamp is possible too."""
    check(
        started(5, start=0),
        cut(1, 2, c=10),
        done(1, 2),
        published("g", call("c", 1, 30)),
        trained(0, 5, "g"),
        violations=1,
        tokens_by_version={0: 10, 2: 20},
        age_lo=Fraction(10 * 4 + 20 * 3, 30),
        age_hi=Fraction(10 * 5 + 20 * 3, 30),
        coverage=Fraction(20, 30),
    )


def test_cut_that_contradicts_after() -> None:
    """`after: 1` and 5 tokens in the cut of refit 1: it had begun before that pause."""
    check(
        started(1, start=0),
        cut(1, 1, c=5),
        done(1, 1),
        published("g", call("c", 0, 20, after=1)),
        trained(0, 1, "g"),
        violations=1,
        tokens_by_version={0: 5, 1: 15},
    )


def test_counts_that_fall() -> None:
    """A call has 20 tokens at one exact cut and 10 at the next."""
    check(
        started(2, start=0),
        cut(1, 1, c=20),
        done(1, 1),
        cut(2, 2, c=10),
        done(2, 2),
        published("g", call("c", 0, 40, after=0)),
        trained(0, 2, "g"),
        violations=1,
        tokens=40,
    )


def test_overlapping_spans() -> None:
    """Tokens in two spans have both versions: 5 of them count under the older one, uncovered."""
    check(
        started(2),
        published("g", call("c", 2, 20, after=0, spans=[[0, 10, 1], [5, 20, 2]])),
        trained(0, 2, "g"),
        violations=1,
        tokens_by_version={1: 10, 2: 10},
        coverage=Fraction(15, 20),
        age_lo=Fraction(5, 20),
        age_hi=Fraction(10, 20),
    )


def test_span_that_an_exact_count_excludes() -> None:
    """The engine reports version 1 up to 12, its exact cut moved the call at 10: the spans stay as
    they are.
    """
    check(
        started(2, start=1),
        cut(1, 2, c=10),
        done(1, 2),
        published("g", call("c", 1, 20, after=0, spans=[[0, 12, 1], [12, 20, 2]])),
        trained(0, 2, "g"),
        violations=1,
        tokens_by_version={1: 12, 2: 8},
    )


def test_engine_version_that_goes_back() -> None:
    """A refit to an older version than the engine has."""
    check(started(5), done(1, 4), trained(0, 5), violations=1)
    check(started(5, start=0), done(1, 4), done(2, 3), trained(0, 5), violations=1)


def test_engine_version_beyond_the_policy() -> None:
    """A refit to a version that no step has made yet."""
    check(started(5), done(1, 6), trained(0, 5), violations=1)


def test_refit_done_and_then_aborted() -> None:
    """The later line wins: the refit did not happen."""
    check(
        started(1, start=0),
        cut(1, 1, c=10),
        done(1, 1),
        aborted(1, 1),
        published("g", call("c", 0, 20, after=0)),
        trained(0, 1, "g"),
        violations=1,
        tokens_by_version={0: 20},
    )


def test_refit_aborted_and_then_done() -> None:
    """The later line wins: the refit happened."""
    events = [
        started(1, start=0),
        cut(1, 1, c=10),
        aborted(1, 1),
        done(1, 1),
        published("g", call("c", 1, 20, after=1)),
        trained(0, 1, "g"),
    ]
    events[4]["calls"][0]["call"] = "d"
    check(*events, violations=1, tokens_by_version={1: 20}, coverage=1)


def test_refit_done_with_another_version_than_cut() -> None:
    """The later line wins: the call moves to version 2."""
    check(
        started(2, start=0),
        cut(1, 1, c=10),
        done(1, 2),
        published("g", call("c", 0, 20, after=0)),
        trained(0, 2, "g"),
        violations=1,
        tokens_by_version={0: 10, 2: 10},
    )


def test_cut_after_its_refit_done_with_another_version() -> None:
    """The later line wins here too: the call moves to version 1."""
    check(
        started(2, start=0),
        done(1, 2),
        cut(1, 1, c=10),
        published("g", call("c", 0, 20, after=0)),
        trained(0, 2, "g"),
        violations=1,
        tokens_by_version={0: 10, 1: 10},
    )


def test_unknown_group_in_a_step() -> None:
    """It has no tokens, and the step no coverage."""
    check(
        started(1),
        published("g", tokens={"0": 10}),
        trained(0, 1, "g", "nobody"),
        violations=1,
        tokens=10,
        batch_age=1,
        coverage=None,
    )


def test_dropped_group_in_a_step() -> None:
    """A group that was dropped has no tokens either."""
    check(
        started(1),
        published("g", tokens={"0": 10}),
        published("h", tokens={"0": 10}),
        dropped("h"),
        trained(0, 1, "g", "h"),
        violations=1,
        tokens=10,
        coverage=None,
        dropped_tokens=10,
    )


def test_group_that_was_trained_and_not_kept() -> None:
    """A step forgets its groups: trained again without `kept`, one is unknown."""
    check(
        started(),
        published("g", tokens={"0": 10}),
        trained(0, 0, "g"),
        trained(1, 1, "g"),
        violations=1,
        tokens=0,
        coverage=None,
        batch_age=None,
    )


def test_step_version_that_is_not_the_count() -> None:
    """A step at 5 where the count says 1; the count goes on from 5."""
    events = [
        started(1),
        published("g", tokens={"1": 10}),
        published("h", tokens={"1": 10}),
        trained(0, 5, "g"),
    ]
    check(*events, violations=1, batch_age=4, version=5)
    check(*events, trained(1, 6, "h"), violations=0, batch_age=5, version=6)


def test_step_number_that_is_not_the_count() -> None:
    """A step 7 where the count says 0; the count goes on from 7."""
    check(started(1), trained(7, 1), violations=1, step=7)
    check(started(1), trained(7, 1), trained(8, 2), violations=0, step=8)


def test_group_published_again_while_it_waits() -> None:
    """The second one replaces the first."""
    check(
        started(1),
        published("g", tokens={"0": 10}),
        published("g", tokens={"1": 10}),
        trained(0, 1, "g"),
        violations=1,
        tokens=10,
        batch_age=0,
    )


def test_group_published_again_keeps_its_evidence() -> None:
    """What the cuts say of a call holds for the group that replaces the first one too."""
    group = published("g", call("c", 0, 40, after=0))
    check(
        started(1, start=0),
        cut(1, 1, c=10),
        done(1, 1),
        group,
        group,
        trained(0, 1, "g"),
        violations=1,
        tokens_by_version={0: 10, 1: 30},
        coverage=1,
    )


@pytest.mark.parametrize("ended", [dropped("g"), trained(0, 1, "g")], ids=["dropped", "trained"])
def test_call_that_is_published_again_later_is_at_least_bounded(ended: Event) -> None:
    """A call of a dropped or trained group comes again in another one: the truth is bounded."""
    step = fold(
        started(1, start=0),
        cut(1, 1, c=10),
        done(1, 1),
        published("g", call("c", 0, 40, after=0)),
        ended,
        published("h", call("c", 0, 40, after=0)),
        trained(1, 2, "h"),
    )[-1]
    assert step.age_lo <= (10 * 2 + 30 * 1) / 40 <= step.age_hi


def test_call_named_twice_in_a_group() -> None:
    """Two calls of one name in one group."""
    twice = published("g", call("c", 1, 10, after=0), call("c", 1, 10, after=0))
    check(started(1), twice, trained(0, 1, "g"), violations=1)


def test_violation_found_online() -> None:
    """A `violation` line counts at the step that follows it."""
    found = line("violation", name="wrong type", detail="a version was a string")
    steps = fold(started(), found, trained(0, 0), trained(1, 1))
    assert [step.violations for step in steps] == [1, 0]


def test_each_violation_is_counted_where_it_is_found() -> None:
    """Three unknown groups in two steps: two and one."""
    steps = fold(started(), trained(0, 0, "a", "b"), trained(1, 1, "c"))
    assert [step.violations for step in steps] == [2, 1]


# Lost lines.


def test_gap_explains_an_unknown_group() -> None:
    """After a gap the next step may name a group whose line is lost; the one after that may not."""
    lost = line("gap", lost=1)
    steps = fold(started(), lost, trained(0, 0, "a"), trained(1, 1, "b"))
    assert [step.violations for step in steps] == [0, 1]
    assert [step.coverage for step in steps] == [None, None]


def test_gap_explains_a_step_number_and_version() -> None:
    """A step whose predecessors are lost goes on from its own numbers."""
    lost = line("gap", lost=2)
    steps = fold(started(), lost, trained(2, 2), trained(3, 3))
    assert [step.violations for step in steps] == [0, 0]


def test_gap_leaves_calls_without_spans_uncovered() -> None:
    """Until the engine's next refit_done the bounds are the oldest version of the call and the
    step's.
    """
    events = [
        started(3, start=0),
        line("gap", lost=1),
        published("g", call("c", 0, 10, after=0), call("d", 0, 10, after=0, spans=[[0, 10, 0]])),
    ]
    check(
        *events,
        trained(0, 3, "g"),
        batch_age=3,
        coverage=0.5,
        age_lo=1.5,
        age_hi=3,
    )


def test_gap_ends_with_the_next_refit_of_the_engine() -> None:
    """After the next refit_done of their engine calls are covered again."""
    check(
        started(3, start=0),
        line("gap", lost=1),
        cut(1, 3),
        done(1, 3),
        published("g", call("c", 3, 10, after=1)),
        trained(0, 3, "g"),
        batch_age=0,
        coverage=1,
    )


def test_gap_ends_with_a_restart() -> None:
    """A new incarnation knows its engines."""
    check(
        started(3, start=0),
        line("gap", lost=1),
        started(3, incarnation=1),
        published("g", call("c", 3, 10, after=0)),
        trained(0, 3, "g"),
        batch_age=0,
        coverage=1,
    )


# Odd, and legal.


def test_fewer_tokens_than_the_cut_said() -> None:
    """A trimmed stop string: cut at 30, 25 tokens left, all of them before the cut."""
    check(
        started(1, start=0),
        cut(1, 1, c=30),
        done(1, 1),
        published("g", call("c", 0, 25, after=0)),
        trained(0, 1, "g"),
        tokens_by_version={0: 25},
        coverage=1,
    )


def test_jump_of_several_versions() -> None:
    """A refit may skip versions."""
    check(
        started(9, start=0),
        cut(1, 7, c=10),
        done(1, 7),
        published("g", call("c", 0, 20, after=0)),
        trained(0, 9, "g"),
        tokens_by_version={0: 10, 7: 10},
        batch_age_refits=0.5,
    )


def test_aborted_refit_that_nobody_repeats() -> None:
    """A failed refit, a step without groups and a drop are part of a legal run."""
    check(
        started(1, start=0),
        cut(1, 1, c=5),
        aborted(1, 1),
        published("g", tokens={"0": 10}),
        dropped("g"),
        trained(0, 1),
        tokens=0,
        dropped_tokens=10,
    )


def test_refit_that_never_reports() -> None:
    """A refit without an end before one that is done: what lies between the two cuts may be either
    version.
    """
    check(
        started(2, start=0),
        cut(1, 1, c=10),
        cut(2, 2, c=30),
        done(2, 2),
        published("g", call("c", 0, 40, after=0)),
        trained(0, 2, "g"),
        tokens_by_version={0: 30, 2: 10},
        age_lo=Fraction(10 * 2 + 20 * 1, 40),
        age_hi=Fraction(30 * 2, 40),
        coverage=Fraction(20, 40),
    )


def test_cut_that_comes_after_a_hundred_refits() -> None:
    """A very late cut of a refit that failed says what its other line says: no violation."""
    events = [started(101, start=0, about={"orphan_after": 0})]
    for n in range(1, 100, 3):
        events += [cut(n, n), aborted(n, n), aborted(n + 1, n + 1), done(n + 2, n + 2)]
    check(*events, cut(2, 2), trained(0, 101), tokens=0)


def test_empty_cut() -> None:
    """An empty cut, of abort or wait mode: what ended before is old, what begins after is new."""
    check(
        started(1, start=0),
        line("refit_cut", engine="e", refit=1, version=1, mode="abort", kv=None),
        done(1, 1),
        published("g", call("c", 0, 10, after=0), call("d", 1, 10, after=1)),
        trained(0, 1, "g"),
        tokens_by_version={0: 10, 1: 10},
        coverage=1,
    )


def test_call_without_a_token() -> None:
    """A call that generated nothing changes nothing."""
    check(
        started(1, start=0),
        cut(1, 1, c=0),
        done(1, 1),
        published("g", call("c", 0, 0, after=0), tokens={"1": 10}),
        trained(0, 1, "g"),
        tokens=10,
        batch_age=0,
        coverage=1,
    )


def test_seconds_of_the_refits_since_the_last_step() -> None:
    """`refit_seconds` sums the pauses that the refits reported since the previous step."""
    steps = fold(
        started(2, start=0),
        done(1, 1, pause_seconds=0.5),
        done(2, 2, pause_seconds=0.25),
        trained(0, 2),
        done(3, 3, pause_seconds=None),
        trained(1, 3),
    )
    assert [step.refit_seconds for step in steps] == [0.75, 0]


def test_call_that_no_group_publishes_for_long_is_forgotten() -> None:
    """Its cut entry goes; published after all, its tokens are bounded instead of split, and nothing
    is violated.
    """
    events = [started(40, start=0, about={"orphan_after": 4}), cut(1, 1, c=10), done(1, 1)]
    for n in range(2, 40):
        events += [cut(n, n), done(n, n)]
    events += [published("g", call("c", 0, 20, after=0)), trained(0, 40, "g")]
    (step,) = fold(*events)
    assert step.violations == 0
    assert step.age_lo <= 40 - 0.5 <= step.age_hi == 40
    assert step.coverage < 1


def test_call_within_orphan_after_keeps_its_cut() -> None:
    """Below `orphan_after` refits the entry stays: by default 64."""
    events = [started(40, start=0), cut(1, 1, c=10), done(1, 1)]
    for n in range(2, 40):
        events += [cut(n, n), done(n, n)]
    events += [published("g", call("c", 0, 20, after=0)), trained(0, 40, "g")]
    check(*events, tokens_by_version={0: 10, 1: 10}, coverage=1)


def test_calls_that_the_same_cuts_list() -> None:
    """Alike in everything but their counts: each is split at its own, also where two are equal."""
    check(
        started(3, start=0),
        cut(1, 1, a=10, b=1, c=5, d=0),
        done(1, 1),
        cut(2, 2, a=20, b=2, c=5, d=7),
        done(2, 2),
        cut(3, 3, a=30, b=90, c=40, d=7),
        done(3, 3),
        published(
            "g",
            call("a", 0, 100, after=0, until=3),
            call("b", 0, 91, after=0, until=3),
            call("c", 0, 40, after=0, until=3),
            call("d", 0, 9, after=0, until=3),
        ),
        trained(0, 3, "g"),
        tokens_by_version={
            0: 10 + 1 + 5,
            1: 10 + 1 + 7,
            2: 10 + 88 + 35,
            3: 70 + 1 + 2,
        },
        spanning_calls=4,
        coverage=1,
    )


@pytest.mark.parametrize(
    ("spans", "violations"),
    [
        ([[0, 10, 0], [10, 20, 1], [20, 50, 2]], 0),
        ([[0, 11, 0], [11, 20, 1], [20, 50, 2]], 1),
        ([[0, 10, 0], [10, 20, 1], [20, 50, 1]], 1),
        ([[0, 50, 0]], 1),
    ],
)
def test_spans_of_a_call_among_others_like_it(spans: list[list[int]], violations: int) -> None:
    """What an engine says is held against the counts, whatever calls like it have shown."""
    kind = {"after": 0, "until": 2}
    like = [[0, 10, 0], [10, 20, 1], [20, 50, 2]]
    tokens = dict.fromkeys((0, 1, 2), 0)
    for start, stop, version in (*like, *spans):
        tokens[version] += stop - start
    check(
        started(2, start=0),
        cut(1, 1, a=10, b=10),
        done(1, 1),
        cut(2, 2, a=20, b=20),
        done(2, 2),
        published("g", call("a", 0, 50, spans=like, **kind), call("b", 0, 50, spans=spans, **kind)),
        trained(0, 2, "g"),
        tokens_by_version={v: n for v, n in tokens.items() if n},
        violations=violations,
        coverage=1,
    )


@pytest.mark.parametrize("tokens", [40, 10])
def test_a_call_that_a_cut_lists_after_its_end(tokens: int) -> None:
    """`until: 1`, and listed at refit 2: one of the two is wrong."""
    (step,) = fold(
        started(2, start=0),
        cut(1, 1, c=10),
        done(1, 1),
        cut(2, 2, c=20),
        done(2, 2),
        published("g", call("c", 0, tokens, after=0, until=1)),
        trained(0, 2, "g"),
    )
    assert step.violations == 1


@pytest.mark.parametrize("listed", [{}, {"c": 10}])
def test_a_call_that_began_after_its_end(listed: dict[str, int]) -> None:
    """`after: 2` and `until: 1` cannot both be."""
    (step,) = fold(
        started(2, start=0),
        cut(1, 1),
        done(1, 1),
        cut(2, 2),
        done(2, 2),
        cut(3, 2, **listed),
        published("g", call("c", 2, 40, after=2, until=1)),
        trained(0, 2, "g"),
    )
    assert step.violations == 1 + bool(listed)


def test_a_refit_to_the_same_version_makes_no_span() -> None:
    """Cut at 10, and the weights are the same: all of the call is of one version."""
    check(
        started(2, start=0),
        cut(1, 0, c=10),
        done(1, 0),
        published("g", call("c", 0, 40, after=0, until=1)),
        trained(0, 2, "g"),
        tokens_by_version={0: 40},
        spanning_calls=0,
        coverage=1,
    )


def test_stamp_of_a_refit_that_is_open_still() -> None:
    """A call stamped 1 that a later cut lists: refit 1, which may be done or not, explains it."""
    check(
        started(0, start=0),
        trained(0, 0),
        cut(1, 1),
        trained(1, 1),
        done(2, 2),
        cut(3, 2, c=5),
        done(3, 2),
        published("g", call("c", 1, 8, until=3)),
        trained(2, 2, "g"),
        batch_age=Fraction(5, 8),
        coverage=Fraction(3, 8),
        age_lo=0,
        age_hi=Fraction(5, 8),
    )


def test_published_call_that_the_cut_of_its_own_pause_lists() -> None:
    """It is no orphan, so that the cut still says that a call which it does not list had ended."""
    later = [
        event
        for number in range(2, 6)
        for event in (cut(number, number), done(number, number), trained(number - 1, number))
    ]
    check(
        started(1, start=0, about={"orphan_after": 2}),
        published("waits", call("d", 0, 30, after=0)),
        cut(1, 1, c=0),
        done(1, 1),
        published("g", call("c", 1, 40, after=1, until=1)),
        trained(0, 1, "g"),
        *later,
        trained(5, 6, "waits"),
        batch_age=6,
        coverage=1,
        tokens_by_version={0: 30},
    )
