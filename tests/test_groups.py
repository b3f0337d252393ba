"""The tokens of a step's groups: odd calls among others, negative ages, dropped tokens."""

from __future__ import annotations

from typing import Any

import pytest

from rl_staleness.events import Call, GroupDropped, GroupPublished
from rl_staleness.groups import num_trained
from tests.test_arithmetic import call, check, cut, done, dropped, published, started, trained
from tests.test_ledger import ledger, take

MASKED: dict[str, Any] = {"after": 0, "trained": [[0, 8]]}


def test_in_flight_of_a_masked_call() -> None:
    """8 tokens, 4 of version 0 and 4 of 1, trained at 3: until 1 in flight, the rest in queue."""
    check(
        started(3, start=0),
        cut(1, 1, c=4),
        done(1, 1),
        published("g", call("c", 0, 10, **MASKED)),
        trained(0, 3, "g"),
        batch_age=2.5,
        age_in_flight=0.5,
        age_in_queue=2,
        tokens=8,
        spanning_calls=1,
    )


@pytest.mark.parametrize("turned", [False, True])
def test_in_flight_ends_with_the_newest_version_of_any_call(turned: bool) -> None:
    """Of a call of a kind, of one that a cut lists, of a masked one and of sums, in both orders."""
    events = (started(5, start=0), cut(1, 1, d=4), done(1, 1), cut(2, 2, e=3), done(2, 2))
    kinds = [
        [call("a", 0, 10, after=0, until=0), call("d", 0, 10, after=0, until=1)],
        [call("b", 1, 10, after=1, until=1), call("a", 0, 10, after=0, until=0)],
        [call("e", 1, 10, **{**MASKED, "after": 1}), call("c", 0, 10, **{**MASKED, "until": 0})],
    ]
    newest = [1, 1, 2]
    sums = [[0] * 10 + [0] * 4 + [1] * 6, [1] * 10 + [0] * 10, [1] * 3 + [2] * 5 + [0] * 8]
    for calls, last, versions in zip(kinds, newest, sums, strict=True):
        check(
            *events,
            published("g", *(calls[::-1] if turned else calls)),
            trained(0, 5, "g"),
            batch_age=5 - sum(versions) / len(versions),
            age_in_flight=last - sum(versions) / len(versions),
            age_in_queue=5 - last,
            coverage=1,
        )
    check(
        *events,
        published("g", *kinds[0], tokens={"3": 4, "2": 4}),
        trained(0, 5, "g"),
        age_in_queue=2,
    )


def test_negative_ages_of_calls() -> None:
    """One of a call whose newest tokens are younger than the update, none of one that is as old."""
    made = ledger(started(3, start=0), done(1, 1), cut(2, 2, d=4), done(2, 2))
    group = published(
        "g", call("c", 1, 9, after=1, until=1), call("d", 1, 9, after=1), call("x", 2, 0, after=2)
    )
    take(made, group)
    assert take(made, trained(0, 1, "g", kept=["g"])) == ["step_version", "negative_age"]
    assert made.found[1][1] == "call 'd' of group 'g': version 2, trained at 1"
    assert made.age(["g"]).spanning_calls == 1
    sums = published("h", tokens={"4": 0, "2": 5, "1": 3, "3": 4})
    take(made, sums)
    assert take(made, trained(1, 2, "h")) == ["negative_age"]
    assert made.found == [("negative_age", "group 'h': version 3, trained at 2")]


def test_negative_ages_count_no_call_twice() -> None:
    """What is looked at again to name it spans versions once."""
    check(
        started(2, start=0),
        cut(1, 1, c=4),
        done(1, 1),
        published("g", call("c", 0, 10, after=0), call("x", 0, 0, after=0)),
        trained(0, 0, "g"),
        violations=2,
        spanning_calls=1,
        batch_age=-0.6,
        age_max=0,
    )


def test_call_that_may_be_younger_than_the_update_has_no_negative_age() -> None:
    """It counts under its oldest version; another call of the group is too young for certain."""
    made = ledger(started(5, start=1), done(1, 3))
    take(made, published("g", call("c", 3, 9, after=1), call("d", 1, 9, after=0)))
    assert take(made, trained(0, 2, "g")) == ["step_version", "negative_age"]
    assert made.found[1][1].startswith("call 'c'")


def test_call_of_bounds_spans_no_versions() -> None:
    """Masked, cut at 4 and not exactly: all of it counts under version 0."""
    check(
        started(1, start=0),
        cut(1, 1, exact=False, c=4),
        done(1, 1),
        published("g", call("c", 0, 10, **MASKED)),
        trained(0, 1, "g"),
        spanning_calls=0,
        coverage=0.5,
        tokens_by_version={0: 8},
    )


def test_restored_call_without_spans_is_bounded() -> None:
    """Refits of before may have moved it; that its stamp is the engine's start proves nothing."""
    check(
        started(3),
        started(3, incarnation=1),
        trained(0, 3),
        trained(1, 4),
        published("g", call("c", 3, 10), restored=True),
        trained(2, 5, "g"),
        batch_age=2,
        age_lo=0,
        coverage=0,
    )


def test_negative_age_of_a_restored_group() -> None:
    """Tokens that were rolled back have no age; others of the group may have a negative one."""
    made = ledger(started(5), started(3, incarnation=1))
    take(made, published("g", restored=True, tokens={"4": 2, "3": 2, "1": 1}))
    assert take(made, trained(0, 2, "g")) == ["step_version", "beyond_resume", "negative_age"]
    assert made.found[2][1] == "group 'g': version 3, trained at 2"


def test_loss_masks_of_restored_and_masked_calls() -> None:
    """A token of no version in the middle of a call takes none of the others with it."""
    made = ledger(started(5), started(3, incarnation=1))
    spans = [[0, 2, 1], [2, 4, 5], [4, 10, 2]]
    take(made, published("g", call("c", 1, 10, spans=spans), restored=True))
    age = made.age(["g"])
    assert age.tokens_by_version == {1: 2, 2: 6}
    assert (age.tokens, age.spanning_calls, age.age_in_queue) == (10, 1, 1.0)


def test_tokens_that_would_have_been_trained() -> None:
    """Sums, whole calls, the tokens in masks up to the call's end, and unknown ones."""
    calls = (
        Call(call="c", engine="e", version=0, tokens=10),
        Call(call="d", engine="e", version=0, tokens=10, trained=((1, 3), (8, 15))),
        Call(call="f", engine="e", version=0, tokens=0, trained=((0, 3),)),
        Call(call="h", engine="e", version=0, tokens=5, trained=()),
        Call(call="i", engine="e", version=0, tokens=1, trained=((0, 1),)),
    )
    tokens = {0: 3, 2: 4}
    group = GroupPublished(time=0.0, group="g", tokens=tokens, calls=calls, unknown=2)
    assert num_trained(group) == 7 + 10 + 4 + 1 + 2
    gone = GroupDropped(time=0.0, group="g", reason="old", tokens=tokens, calls=calls)
    assert num_trained(gone) == 7 + 10 + 4 + 1
    made = ledger(started(1), published("g", tokens={"1": 3}, unknown=2), dropped("g"))
    assert made.age([]).dropped_tokens == 5
