"""Runs that go on: what a checkpoint and the trace make of them, exact where they can be."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rl_staleness import Call, StalenessCallback, read, steps
from rl_staleness.engines import Cut, LiveCall
from rl_staleness.events import GroupDropped, GroupPublished, RunStarted, ViolationFound
from rl_staleness.resume import counted_steps
from rl_staleness.staleness import StepStaleness
from tests.fakes import FakeEngine


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a test's trace is written."""
    return tmp_path / "rollout_trace.jsonl"


def call(name: str, tokens: int, after: int, until: int, **rest: Any) -> Call:
    """A call of the engine ``engine`` that was stamped with its ``after``."""
    stamp = rest.pop("version", after)
    return Call(
        call=name, engine="engine", version=stamp, tokens=tokens, after=after, until=until, **rest
    )


def callback(path: Path, **rest: Any) -> StalenessCallback:
    """One that tells nobody."""
    return StalenessCallback(trace=path, sinks=[], **rest)


def refit(staleness: StalenessCallback, **counts: int) -> None:
    """Move the engine to the policy's version; tokens so far of the calls that run."""
    staleness.on_refit_paused(cuts={"engine": counts})
    staleness.on_refit_done()


def dropped(path: Path) -> dict[str, str]:
    """Reasons of what a trace says was dropped, by group."""
    return {e.group: e.reason for e in read(path) if isinstance(e, GroupDropped)}


def violations(path: Path) -> list[str]:
    """Names of the violations that were found online."""
    return [event.name for event in read(path) if isinstance(event, ViolationFound)]


def halfway(path: Path) -> dict[str, Any]:
    """A run that is killed: two steps and the state after them, then a third one and more.

    At the checkpoint two groups wait: ``cut`` was cut by the refit to 1, ``whole`` was not.
    """
    staleness = callback(path, run="r")
    staleness.on_publish("first", calls=[call("a", 10, 0, 0)])
    staleness.on_step(["first"])
    refit(staleness, b=30)
    staleness.on_publish("cut", calls=[call("b", 90, 0, 1)])
    staleness.on_publish("whole", calls=[call("c", 10, 1, 1)])
    staleness.on_step([])
    state = json.loads(json.dumps(staleness.state_dict()))
    refit(staleness)
    staleness.on_publish("later", calls=[call("d", 10, 2, 2)])
    staleness.on_publish("later still", calls=[call("e", 10, 2, 2)])
    staleness.on_step(["whole", "later"])
    refit(staleness)
    staleness._recorder.close()  # as a kill does: no line says that it ended
    return dict(state)


def test_groups_that_waited_at_the_checkpoint_keep_their_tallies(path: Path) -> None:
    """Trained after the resume they are as old, and as covered, as if nothing had happened."""
    state = halfway(path)
    staleness = callback(path)
    staleness.load_state_dict(state)
    assert (staleness.version, staleness.step, staleness.trace) == (2, 3, str(path))
    numbers = staleness.on_step(["cut", "whole"])
    staleness.close()
    assert numbers is not None
    assert numbers.tokens_by_version == {0: 30, 1: 70}
    assert (numbers.coverage, numbers.violations) == (1.0, 0)
    assert numbers.batch_age == (30 * 2 + 70 * 1) / 100
    assert list(steps(path))[-1] == numbers


def test_what_was_published_after_the_checkpoint_is_dropped_and_named(path: Path) -> None:
    """The trace says it before the run goes on; a group of the undone part that is trained all
    the same has no version."""
    state = halfway(path)
    with callback(path) as staleness:
        staleness.load_state_dict(state)
        numbers = staleness.on_step(["cut", "later still"])
    assert dropped(path) == {"later still": "rolled back"}
    assert numbers is not None
    assert (numbers.coverage, numbers.violations, numbers.dropped_tokens) == (None, 1, 10)
    (start,) = [e for e in read(path) if isinstance(e, RunStarted) and e.incarnation == 1]
    assert start.about is not None
    assert start.about["resumed"] == {"line": state["line"], "version": 2, "step": 3}


def test_the_trace_alone_goes_on_where_it_ends(path: Path) -> None:
    """Without a checkpoint of ours all that waits may be trained."""
    halfway(path)
    with callback(path, run="r") as staleness:
        assert (staleness.version, staleness.step) == (3, 4)
        numbers = staleness.on_step(["cut", "later still"])
    assert numbers is not None
    assert numbers.tokens_by_version == {0: 30, 1: 60, 2: 10}
    assert (numbers.coverage, numbers.violations) == (1.0, 0)


@pytest.mark.parametrize("known", [{"version": 2, "step": 3}, {"version": 2}, {"step": 3}])
def test_the_trace_alone_goes_back_to_where_the_trainer_is(
    path: Path, known: dict[str, int]
) -> None:
    """A trainer that knows only its own count finds what waited then, and what its version was."""
    halfway(path)
    with callback(path, run="r", **known) as staleness:
        assert (staleness.version, staleness.step) == (2, 3)
        numbers = staleness.on_step(["cut", "whole"])
    assert numbers is not None
    assert numbers.tokens_by_version == {0: 30, 1: 70}
    assert (numbers.coverage, numbers.violations) == (1.0, 0)


def test_groups_that_the_trainer_has_not_kept_are_dropped(path: Path) -> None:
    """A buffer that is lost leaves nothing that waits for ever."""
    state = halfway(path)
    with callback(path) as staleness:
        staleness.load_state_dict(state, waiting=["cut"])
        numbers = staleness.on_step(["cut"])
        assert [g.group for g in staleness._recorder.ledger.waiting()] == []
    assert numbers is not None
    assert numbers.violations == 0
    assert [e.group for e in read(path) if isinstance(e, GroupPublished) and e.restored] == ["cut"]
    assert dropped(path) == {"later still": "rolled back"}


def test_a_group_that_waited_is_not_waiting_any_more_where_it_is_not_kept(path: Path) -> None:
    """At the end of the trace it still waits: it is dropped, and says why."""
    halfway(path)
    with callback(path, run="r") as staleness:
        staleness.load_state_dict({}, waiting=["cut"])
        staleness.on_step(["cut"])
    assert dropped(path) == {"later still": "not restored"}


def test_a_resume_of_a_resume(path: Path) -> None:
    """What a second crash leaves goes on as well: nothing is lost on the way, numbers neither."""
    state = halfway(path)
    staleness = callback(path)
    staleness.load_state_dict(state)
    staleness.on_step(["whole"])
    refit(staleness, f=5)
    staleness.on_publish("new", calls=[call("f", 20, 3, 4, version=2)])
    state = staleness.state_dict()
    staleness.on_step(["cut"])
    staleness._recorder.close()
    with callback(path) as staleness:
        staleness.load_state_dict(state)
        assert staleness.last_refit() == 4
        numbers = staleness.on_step(["cut", "new"])
    assert numbers is not None
    assert numbers.tokens_by_version == {0: 30, 1: 60, 2: 5, 3: 15}
    assert (numbers.coverage, numbers.violations) == (1.0, 0)
    incarnations = [e.incarnation for e in read(path) if isinstance(e, RunStarted)]
    assert incarnations == [0, 1, 2]


def test_a_cut_that_came_after_the_checkpoint_still_counts(path: Path) -> None:
    """The refit had begun by then: its late line is evidence of what waited."""
    engine = FakeEngine()
    staleness = callback(path, run="r", engines=[engine])
    staleness.on_step([])
    staleness.on_refit_paused()
    staleness.on_refit_done()
    staleness.on_publish("g", calls=[call("b", 90, 0, 1)])
    state = staleness.state_dict()
    engine.deliver(Cut(calls={"b": 30}))
    staleness._recorder.close()
    with callback(path) as staleness:
        staleness.load_state_dict(state)
        numbers = staleness.on_step(["g"])
    assert numbers is not None
    assert (numbers.coverage, numbers.tokens_by_version) == (1.0, {0: 30, 1: 60})


def test_a_checkpoint_whose_trace_is_lost(tmp_path: Path) -> None:
    """Versions, steps and refit numbers go on; what waited has no history, and is named."""
    state = halfway(tmp_path / "rollout_trace.jsonl")
    other = tmp_path / "elsewhere.jsonl"
    with callback(other) as staleness:
        staleness.load_state_dict(state)
        assert (staleness.version, staleness.step) == (2, 3)
        staleness.start()
        assert staleness.last_refit() == state["refits"]["engine"] == 1
        # Begun before the trainer died, without a word of it: not taken for the new weights.
        staleness.on_publish("survivor", calls=[call("s", 10, 0, 1)])
        numbers = staleness.on_step(["survivor"])
        lost = staleness.on_step(["cut"])
    assert numbers is not None
    assert lost is not None
    assert (numbers.coverage, numbers.age_lo, numbers.age_hi) == (0.0, 0.0, 2.0)
    assert lost.coverage is None
    (start,) = [event for event in read(other) if isinstance(event, RunStarted)]
    assert (start.run, start.incarnation) == ("r", 1)


def test_another_run_may_start_from_a_checkpoint(path: Path) -> None:
    """With a name of its own it leaves the trace of the first alone, and starts where that was."""
    state = halfway(path)
    before = path.read_bytes()
    with callback(path, run="branch") as staleness:
        staleness.load_state_dict(state)
        assert (staleness.version, staleness.step) == (2, 3)
        numbers = staleness.on_step([])
    assert numbers is not None
    assert numbers.violations == 0
    assert path.read_bytes() == before


def test_no_empty_file_is_left_where_the_run_goes_on(path: Path) -> None:
    """The trace of a run whose name is known only from the checkpoint is the one that is there."""
    state = halfway(path)
    with callback(path) as staleness:
        staleness.load_state_dict(state)
        staleness.on_step([])
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    "state", [{"run": "r"}, {"run": 7, "version": 0}, {"run": "r", "version": -1}, {"epoch": 3}]
)
def test_what_is_no_state_is_refused(path: Path, state: dict[str, Any]) -> None:
    """A checkpoint of somebody else's is an error where the run is made, not a guess."""
    with callback(path) as staleness, pytest.raises(ValueError, match=r"^state: "):
        staleness.load_state_dict(state)


def test_a_state_is_loaded_before_the_first_hook(path: Path) -> None:
    """Afterwards it would contradict what is written."""
    with callback(path) as staleness:
        staleness.on_step([])
        with pytest.raises(ValueError, match=r"^state: the run has started"):
            staleness.load_state_dict(staleness.state_dict())


def test_a_state_is_small_and_plain(path: Path) -> None:
    """Ten thousand groups that wait do not make a checkpoint larger: the trace has them."""
    with callback(path) as staleness:
        for number in range(100):
            staleness.on_publish(f"g{number}", calls=[call(f"c{number}", 1, 0, 0)])
        state = staleness.state_dict()
    assert len(json.dumps(state)) < 300
    assert json.loads(json.dumps(state)) == state


# What is not known.


@pytest.mark.parametrize("spans", [None, ((0, 10, 3),)])
def test_tokens_of_weights_that_the_run_never_had_are_of_no_version(
    path: Path, spans: tuple[tuple[int, ...], ...] | None
) -> None:
    """A call of the undone part, from an engine that outlived the trainer: neither fresh nor
    negative, not even where the run is at that version again."""
    state = halfway(path)
    with callback(path) as staleness:
        staleness.load_state_dict(state)
        staleness.start()
        staleness.on_publish("stray", calls=[call("s", 10, 3, 3, version=3, spans=spans)])
        numbers = staleness.on_step(["stray"])
        staleness.on_publish("again", calls=[call("t", 10, 3, 3, version=3, spans=spans)])
        later = staleness.on_step(["again"])
    assert numbers is not None
    assert later is not None
    for step, at in ((numbers, 2), (later, 3)):
        assert (step.tokens, step.coverage, step.batch_age) == (10, 0.0, None)
        assert (step.age_lo, step.age_hi) == (0.0, at)
        assert step.violations == (1 if spans is None else 2)  # the stamp, and the spans


def test_restored_groups_of_weights_that_the_run_never_had(path: Path) -> None:
    """A framework that kept its buffer publishes what was undone: spans and sums of no version."""
    state = halfway(path)
    with callback(path) as staleness:
        staleness.load_state_dict(state)
        old = call("s", 10, 2, 3, version=2, spans=((0, 4, 2), (4, 10, 3)))
        staleness.on_publish("later still", calls=[old], restored=True)
        numbers = staleness.on_step(["later still"])
    assert numbers is not None
    assert numbers.tokens_by_version == {2: 4}
    assert (numbers.tokens, numbers.coverage, numbers.violations) == (10, 0.4, 1)
    assert (numbers.age_lo, numbers.age_hi) == (0.0, 6 * 2 / 10)


def test_what_refits_led_to_in_an_undone_part_is_no_refit_of_the_run(path: Path) -> None:
    """The age in refits counts the versions that engines of this run had."""
    staleness = callback(path, run="r", version=0)
    for _ in range(4):
        staleness.on_step([])
        refit(staleness)
    staleness._recorder.close()
    with callback(path, run="r", version=1) as staleness:
        staleness.start()
        staleness.on_publish("g", calls=[call("a", 10, 4, 4, version=1)])
        for _ in range(3):
            staleness.on_step([])
        numbers = staleness.on_step(["g"])
    assert numbers is not None
    assert (numbers.batch_age, numbers.batch_age_refits) == (3.0, 0.0)


def test_a_restored_group_without_its_history(path: Path) -> None:
    """Published again by its framework with a stamp alone: bounds from there to now."""
    halfway(path)
    with callback(path, run="r") as staleness:
        staleness.on_publish("unheard of", calls=[call("u", 10, 1, 1)], restored=True)
        numbers = staleness.on_step(["unheard of"])
    assert numbers is not None
    assert (numbers.coverage, numbers.age_lo, numbers.age_hi) == (0.0, 0.0, 2.0)


def test_a_call_that_ran_across_the_resume_has_bounds(path: Path) -> None:
    """Its refit numbers are of before: it is not taken for one of the version resumed at, and the
    next cut makes the rest of it exact."""
    halfway(path)
    with callback(path, run="r") as staleness:
        refit(staleness, x=6)
        staleness.on_publish("g", calls=[call("x", 10, 2, 4)])
        numbers = staleness.on_step(["g"])
    assert numbers is not None
    assert numbers.tokens_by_version == {2: 6, 3: 4}
    assert (numbers.coverage, numbers.age_lo, numbers.age_hi) == (0.4, 0.0, 0.6)


@pytest.mark.parametrize("back", [False, True])
def test_a_call_that_ran_across_a_refit_that_was_undone(path: Path, back: bool) -> None:
    """Stamped with the very version that the run goes on from, it is still of other weights too,
    and none of it counts as fresh; where nothing was undone, nothing else is possible."""
    staleness = callback(path, run="r")
    staleness.on_step([])
    refit(staleness)
    if back:
        staleness.on_step([])
    refit(staleness, x=6)
    staleness._recorder.close()
    with callback(path, run="r", version=1) as staleness:
        staleness.on_publish("g", calls=[call("x", 10, 1, 2)])
        numbers = staleness.on_step(["g"])
    assert numbers is not None
    assert (numbers.coverage, numbers.violations) == ((0.0, 1) if back else (1.0, 0))
    assert (numbers.age_lo, numbers.age_hi) == ((0.0, 1.0) if back else (0.0, 0.0))


def test_an_engine_with_base_weights_says_nothing_of_calls_from_before(path: Path) -> None:
    """A call that ran on newer weights before may be as new as the policy was."""
    halfway(path)
    with callback(path, run="r") as staleness:
        staleness.start(engines={"engine": 0})
        staleness.on_publish("g", calls=[call("x", 10, 1, 3)])
        numbers = staleness.on_step(["g"])
    assert numbers is not None
    assert (numbers.coverage, numbers.age_lo, numbers.age_hi) == (0.0, 0.0, 3.0)


def test_what_the_trace_knows_is_better_than_what_a_framework_kept(path: Path) -> None:
    """Records of a group that waited, published again, do not undo its tallies."""
    state = halfway(path)
    with callback(path) as staleness:
        staleness.load_state_dict(state)
        staleness.on_publish("cut", calls=[call("b", 90, 0, 1)], restored=True)
        numbers = staleness.on_step(["cut"])
    assert numbers is not None
    assert (numbers.tokens_by_version, numbers.violations) == ({0: 30, 1: 60}, 0)


def test_a_prompt_that_is_sampled_again_takes_the_place_of_its_group(path: Path) -> None:
    """The old one is dropped, with a reason, and nothing is counted twice."""
    state = halfway(path)
    with callback(path) as staleness:
        staleness.load_state_dict(state)
        staleness.start()
        last = staleness.last_refit()
        staleness.on_publish("whole", calls=[call("n", 7, last, last, version=2)])
        numbers = staleness.on_step(["whole"])
    assert numbers is not None
    assert (numbers.tokens_by_version, numbers.violations) == ({2: 7}, 0)
    assert dropped(path)["whole"] == "published anew"


def test_spans_of_a_call_from_before(path: Path) -> None:
    """Exact where its group waits; bounds otherwise. Another call of that name is another call."""
    state = halfway(path)
    with callback(path) as staleness:
        staleness.load_state_dict(state)
        assert staleness.spans(call("b", 90, 0, 1)) == [(0, 30, 0, 0), (30, 90, 1, 1)]
        assert staleness.spans(call("b", 40, 3, 3, version=2)) == [(0, 40, 2, 2)]
        # Its refit may be one of those that were undone.
        assert staleness.spans(call("unheard of", 9, 1, 1)) == [(0, 9, -1, -1)]


def test_spans_of_a_call_from_before_nothing_was_undone(path: Path) -> None:
    """The trace alone: any version from the stamp to what the run goes on from."""
    halfway(path)
    with callback(path, run="r") as staleness:
        assert staleness.spans(call("unheard of", 9, 1, 1)) == [(0, 9, 1, 3)]


def test_a_call_that_ended_before_its_engine_heard_of_the_resumed_run(path: Path) -> None:
    """It has bounds, and nothing that contradicts them: the engine knew no version to stamp."""
    halfway(path)
    with callback(path, run="r") as staleness:
        early = LiveCall(call="early", engine="engine", version=0, tokens=8, ended=True)
        early.spans = ((0, 8, 0, 2**63 - 1),)
        staleness.on_publish("g", calls=[early])
        numbers = staleness.on_step(["g"])
        assert staleness.spans(early) == [(0, 8, 0, 4)]
    assert numbers is not None
    assert (numbers.violations, numbers.coverage) == (0, 0.0)
    assert (numbers.age_lo, numbers.age_hi) == (0.0, 3.0)


@pytest.mark.parametrize("first", ["step", "refit"])
def test_a_trainer_whose_own_count_starts_again(path: Path, first: str) -> None:
    """Its versions are this run's, some updates earlier: named once, and no age is negative."""
    halfway(path)
    with callback(path, run="r") as staleness:
        staleness.start()
        staleness.on_publish("g", calls=[call("a", 10, 3, 3, version=3)])
        if first == "refit":
            staleness.on_refit_paused(version=0)
            staleness.on_refit_done(version=0)
        one = staleness.on_step([], version=0)
        two = staleness.on_step(["g"], version=1)
    assert one is not None
    assert two is not None
    assert (one.version, two.version, two.batch_age) == (3, 4, 1.0)
    assert (one.violations, two.violations) == (1, 0)
    assert violations(path) == ["counter_restarted"]


def test_an_engine_that_came_back_with_the_base_weights(path: Path) -> None:
    """It is told, and what it samples until its next refit is as old as that."""
    halfway(path)
    engine = FakeEngine(counts={})
    with callback(path, run="r", engines=[engine]) as staleness:
        staleness.start(engines={"engine": 0})
        staleness.on_publish("g", calls=[call("a", 10, 3, 3, version=0)])
        numbers = staleness.on_step(["g"])
        staleness.start(engines={"engine": 3})
        assert any("start" in what for what in staleness.missing())
    assert engine.heard[0] == ("start", 3, 0)
    assert numbers is not None
    assert (numbers.batch_age, numbers.coverage, numbers.violations) == (3.0, 1.0, 0)


# What is counted once.


class Summing:
    """A sink that sums the run up."""

    def __init__(self) -> None:
        self.past: dict[int, int] = {}

    def resume(self, tokens_by_age: dict[int, int]) -> None:
        self.past = dict(tokens_by_age)

    def log(self, step: StepStaleness) -> None:
        pass

    def close(self, *, trace: str | None, timeout: float) -> None:
        pass


def test_steps_that_are_made_again_are_summed_up_once(path: Path) -> None:
    """Of step 3, which the resume undoes, the later one counts; now and at the next resume."""
    state = halfway(path)
    sink = Summing()
    staleness = StalenessCallback(trace=path, sinks=[sink])
    staleness.load_state_dict(state)
    staleness.on_step(["cut", "whole"])
    assert sink.past == {0: 10}
    staleness.close()
    again = Summing()
    with StalenessCallback(trace=path, run="r", sinks=[again]) as staleness:
        staleness.on_step([])
    assert again.past == {0: 10, 1: 70, 2: 30}
    total = Counter[int]()
    for _, step, undone in counted_steps(path):
        total.update({} if step is None else step.tokens_by_age)
        total -= undone
    assert total == again.past
    assert [step.step for step in steps(path)] == [1, 2, 3, 3, 4]
