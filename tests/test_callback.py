"""The hooks: what they write, what they return, and that nothing they do harms training."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from rl_staleness import Call, StalenessCallback, steps
from rl_staleness.engines import Cut, LiveCall, capturing
from rl_staleness.events import LARGEST
from rl_staleness.staleness import StepStaleness
from tests.fakes import FakeEngine, RaisingSink, RecordingSink, noticed


def lines(path: Path) -> list[dict[str, Any]]:
    """The trace as plain JSON."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def call(name: str, tokens: int, after: int, until: int, **rest: Any) -> Call:
    """A call of the engine ``engine`` that was stamped with its ``after``."""
    return Call(
        call=name, engine="engine", version=after, tokens=tokens, after=after, until=until, **rest
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a test's trace is written."""
    return tmp_path / "rollout_trace.jsonl"


def test_a_run_is_a_trace_with_the_same_numbers(path: Path) -> None:
    """What on_step returns is what the offline reader computes, field by field."""
    online = []
    with StalenessCallback(trace=path, engines=[FakeEngine(counts={"b": 30})]) as staleness:
        staleness.on_publish("g1", calls=[call("a", 50, 0, 0)])
        online.append(staleness.on_step(["g1"]))
        with staleness.refit():
            pass
        staleness.on_publish("g2", calls=[call("b", 90, 0, 1)])
        online.append(staleness.on_step(["g2"]))
    assert [s.batch_age for s in online if s] == [0.0, 30 / 90]
    assert online == list(steps(path))


def test_untouched_calls_are_summed_and_cut_ones_listed(path: Path) -> None:
    """A call that no refit touched is a sum by version, one that a refit touched stands alone."""
    with StalenessCallback(trace=path, engines=[FakeEngine(counts={"b": 3})]) as staleness:
        with staleness.refit(version=0):
            pass
        staleness.on_publish(
            "g", calls=[call("a", 50, 0, 0), call("b", 9, 0, 1), call("c", 7, 0, 0)]
        )
    (published,) = [line for line in lines(path) if line["event"] == "group_published"]
    assert published["tokens"] == {"0": 57}
    assert [c["call"] for c in published["calls"]] == ["b"]


def test_late_masks_keep_every_call_apart(path: Path) -> None:
    """With late_masks a mask that comes with the step finds its call."""
    with StalenessCallback(trace=path, late_masks=True) as staleness:
        staleness.on_publish("g", calls=[call("a", 50, 0, 0)])
        numbers = staleness.on_step(["g"], trained={"g": {"a": [(0, 20)]}})
    assert numbers is not None
    assert (numbers.tokens, numbers.violations) == (20, 0)


def test_a_mask_for_a_summed_call_is_a_violation(path: Path) -> None:
    """Without late_masks a mask at the step has no call to find, and that is said."""
    with StalenessCallback(trace=path) as staleness:
        staleness.on_publish("g", calls=[call("a", 50, 0, 0)])
        numbers = staleness.on_step(["g"], trained={"g": {"a": [(0, 20)]}})
    assert numbers is not None
    assert (numbers.tokens, numbers.violations) == (50, 1)


def test_a_mask_at_the_publish_counts(path: Path) -> None:
    """A final mask that is passed to on_publish decides which tokens are trained."""
    with StalenessCallback(trace=path) as staleness:
        staleness.on_publish("g", calls=[call("a", 50, 0, 0)], trained={"a": [(10, 20), (30, 35)]})
        numbers = staleness.on_step(["g"])
    assert numbers is not None
    assert numbers.tokens == 15


def test_groups_capture_the_calls_of_their_task() -> None:
    """A request finds the group of the task that submits it, also from a task started in it."""

    async def submit(name: str) -> None:
        await asyncio.sleep(0)
        capture = capturing()
        assert capture is not None
        capture.calls.append(
            LiveCall(call=name, engine="e", version=0, after=0, until=0, ended=True)
        )

    async def rollout(staleness: StalenessCallback, name: str) -> list[str]:
        with staleness.group(name) as group:
            await asyncio.gather(submit(f"{name}1"), submit(f"{name}2"))
            await submit(f"{name}3")
        assert capturing() is None
        return [c.call for c in group.calls]

    async def main() -> list[list[str]]:
        with StalenessCallback(trace=None) as staleness:
            return await asyncio.gather(rollout(staleness, "a"), rollout(staleness, "b"))

    assert asyncio.run(main()) == [["a1", "a2", "a3"], ["b1", "b2", "b3"]]


def test_a_refit_that_raises_is_aborted_and_its_repetition_has_a_number_of_its_own(
    path: Path,
) -> None:
    """Failed at 10, repeated at 25 of 40, trained at 1: 25/40."""
    engine = FakeEngine(counts={"a": 10})
    with StalenessCallback(trace=path, engines=[engine]) as staleness:
        staleness.on_step([])
        with pytest.raises(OSError), staleness.refit():
            raise OSError("no route to the engine")
        engine.counts = {"a": 25}
        with staleness.refit():
            pass
        staleness.on_publish("g", calls=[call("a", 40, 0, 2)])
        numbers = staleness.on_step(["g"])
    assert numbers is not None
    assert (numbers.batch_age, numbers.coverage) == (25 / 40, 1.0)
    events = [(line["event"], line.get("refit")) for line in lines(path)]
    assert ("refit_aborted", 1) in events and ("refit_done", 2) in events
    assert [line["reason"] for line in lines(path) if "reason" in line] == ["OSError"]


@pytest.mark.parametrize("named", [None, ["x", "y"]])
@pytest.mark.parametrize("twins", [False, True])
def test_a_block_that_raises_aborts_where_it_was_not_told_otherwise(
    path: Path, twins: bool, named: list[str] | None
) -> None:
    """Weights that reached one of two engines: both are exact, and the rest of a block is done."""
    engines = [FakeEngine("x", counts={"a": 5}), FakeEngine("y", counts={"b": 7})]

    async def refit(staleness: StalenessCallback, there: list[str], *, fails: bool) -> None:
        def load() -> None:
            for name in there:
                staleness.on_refit_done(engines=[name])
            if fails:
                raise OSError("no route to the engine")

        with contextlib.suppress(OSError):
            if twins:
                async with staleness.refit(engines=named):
                    load()
            else:
                with staleness.refit(engines=named):
                    load()

    with StalenessCallback(trace=path, engines=engines, sinks=[]) as staleness:
        staleness.on_step([])
        asyncio.run(refit(staleness, ["x"], fails=True))
        a = Call(call="a", engine="x", version=0, tokens=10, after=0, until=1)
        b = Call(call="b", engine="y", version=0, tokens=10, after=0, until=1)
        staleness.on_publish("g", calls=[a, b])
        numbers = staleness.on_step(["g"])
        asyncio.run(refit(staleness, ["y"], fails=False))
        asyncio.run(refit(staleness, ["x", "y"], fails=True))
    assert numbers is not None
    assert (numbers.tokens_by_version, numbers.coverage) == ({0: 15, 1: 5}, 1.0)
    x, y = ([event for event, *_ in engine.heard] for engine in engines)
    assert x == ["start", "mark", "done", "mark", "done", "mark", "done", "detach"]
    assert y == ["start", "mark", "aborted", "mark", "done", "mark", "done", "detach"]
    assert [line for line in lines(path) if line["event"] == "violation"] == []


def test_a_block_whose_pause_could_not_be_taken_still_says_that_weights_moved(path: Path) -> None:
    """The calls of an engine that was refitted without a pause are not passed off as old ones."""
    with StalenessCallback(trace=path, engines=[FakeEngine(counts={})], sinks=[]) as staleness:
        staleness.on_step([])
        with staleness.refit(mode=None):  # type: ignore[arg-type]
            pass
        staleness.on_publish("g", calls=[call("a", 10, 0, 1)])
        numbers = staleness.on_step(["g"])
    assert numbers is not None
    assert (numbers.coverage, numbers.age_lo, numbers.age_hi) == (0, 0, 1)


def test_the_awaitable_twins_write_the_same(tmp_path: Path) -> None:
    """`async with refit()` writes what `with refit()` writes."""

    def run(path: Path, twins: bool) -> list[tuple[str, Any]]:
        async def body() -> None:
            with StalenessCallback(trace=path, engines=[FakeEngine(counts={"a": 1})]) as staleness:
                for fail in (False, True):
                    try:
                        if twins:
                            async with staleness.refit(version=0, mode="keep", kv="kept"):
                                if fail:
                                    raise OSError
                        else:
                            with staleness.refit(version=0, mode="keep", kv="kept"):
                                if fail:
                                    raise OSError
                    except OSError:
                        pass

        asyncio.run(body())
        unsteady = {"time", "pause_seconds", "run"}
        return [
            (line["event"], {k: v for k, v in line.items() if k not in unsteady})
            for line in lines(path)
        ]

    assert run(tmp_path / "a.jsonl", twins=True) == run(tmp_path / "b.jsonl", twins=False)


def test_a_late_cut_still_splits_the_call(path: Path) -> None:
    """Counts that come after the refit is done are written then, and count."""
    engine = FakeEngine()
    with StalenessCallback(trace=path, engines=[engine]) as staleness:
        staleness.on_step([])
        with staleness.refit():
            pass
        staleness.on_publish("g", calls=[call("a", 40, 0, 1)])
        before = staleness.age("g")
        engine.deliver(Cut(calls={"a": 10}))
        engine.deliver(Cut(calls={"a": 39}))
        after = staleness.on_step(["g"])
    assert (before.coverage, before.age_lo, before.age_hi) == (0.0, 0.0, 1.0)
    assert after is not None
    assert (after.coverage, after.batch_age) == (1.0, 10 / 40)


def test_an_engine_that_does_not_answer_costs_coverage_and_at_most_the_timeout(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Training goes on without the cut; the failure is logged once and counted."""
    engine = FakeEngine()
    engine.answer = Future  # never done
    with StalenessCallback(trace=path, engines=[engine], timeout=0.05) as staleness:
        staleness.on_step([])
        with staleness.refit():
            pass
        with staleness.refit():
            pass
        staleness.on_publish("g", calls=[call("a", 50, 0, 1)])
        numbers = staleness.on_step(["g"])
        missing = staleness.missing()
    assert numbers is not None
    assert (numbers.batch_age, numbers.coverage) == (1.0, 0.0)
    assert (numbers.age_lo, numbers.age_hi) == (0.0, 1.0)
    assert missing["times telling engine 'engine' of pause failed"] == 2
    logged = [r for r in caplog.records if "of pause failed; training" in r.getMessage()]
    assert len(logged) == 1


def test_an_engine_that_did_not_answer_is_hardly_waited_for_until_it_does(path: Path) -> None:
    """A hanging engine costs the limit in time once, not at every refit."""
    engine = FakeEngine(counts={})
    engine.answer = Future
    with StalenessCallback(trace=path, engines=[engine], timeout=3.0) as staleness:
        staleness.on_refit_paused()
        began = time.monotonic()
        staleness.on_refit_done()
        for _ in range(4):
            with staleness.refit():
                pass
        assert time.monotonic() - began < 3.0
        assert "engine" in staleness.silent_engines
        engine.answer = noticed
        with staleness.refit():
            pass
        assert not staleness.silent_engines


def test_one_dead_engine_does_not_hide_the_other(path: Path) -> None:
    """An engine that raises loses its own cut only."""
    dead, alive = FakeEngine("dead"), FakeEngine("alive", counts={"a": 10})
    dead.answer = lambda: noticed(ConnectionError("actor died"))
    with StalenessCallback(trace=path, engines=[dead, alive]) as staleness:
        staleness.on_step([])
        with staleness.refit():
            pass
        staleness.on_publish(
            "g",
            calls=[
                Call(call="a", engine="alive", version=0, tokens=30, after=0, until=1),
                Call(call="b", engine="dead", version=0, tokens=10, after=0, until=1),
            ],
        )
        numbers = staleness.on_step(["g"])
    assert numbers is not None
    assert numbers.coverage == 30 / 40


def test_engines_refitted_at_different_moments_have_versions_of_their_own(path: Path) -> None:
    """A refit of one engine leaves the calls of the other alone."""
    engines = [FakeEngine("x", counts={"a": 5}), FakeEngine("y", counts={"b": 7})]
    with StalenessCallback(trace=path, engines=engines) as staleness:
        staleness.on_step([])
        with staleness.refit(engines=["x"]):
            pass
        staleness.on_publish(
            "g",
            calls=[
                Call(call="a", engine="x", version=0, tokens=10, after=0, until=1),
                Call(call="b", engine="y", version=0, tokens=10, after=0, until=0),
            ],
        )
        numbers = staleness.on_step(["g"])
    assert numbers is not None
    assert numbers.tokens_by_version == {0: 15, 1: 5}
    assert [event for event, *_ in engines[1].heard] == ["start", "detach"]


@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_modes_that_leave_nothing_running_write_an_empty_cut(path: Path, mode: str) -> None:
    """In abort and wait mode every call had ended: untouched, also where no engine can say."""
    with StalenessCallback(trace=path) as staleness:
        staleness.on_step([])
        with staleness.refit(mode=mode):
            pass
        staleness.on_publish("g", calls=[call("a", 40, 0, 1)])
        numbers = staleness.on_step(["g"])
    assert numbers is not None
    assert (numbers.batch_age, numbers.coverage) == (1.0, 1.0)


def test_sinks_are_told_in_order_and_a_raising_one_hides_nothing(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A sink that raises is logged once with its traceback; the others are told, on both sides."""
    first, last = RecordingSink(), RecordingSink()
    with StalenessCallback(trace=path, sinks=[first, RaisingSink(), last]) as staleness:
        for _ in range(3):
            staleness.on_step([])
        assert staleness.missing() == {"times sink RaisingSink failed": 3}
    assert [s.step for s in first.steps] == [s.step for s in last.steps] == [1, 2, 3]
    raised = [r for r in caplog.records if "RaisingSink failed" in r.getMessage() and r.exc_info]
    assert len(raised) == 1


def test_a_sink_that_has_to_send_is_closed_with_the_trace_and_a_limit_in_time(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At the end every sink gets the whole trace, once; what it could not deliver is said."""
    closed: list[tuple[str, float, str]] = []

    class Place:
        def log(self, step: StepStaleness) -> None:
            pass

        def close(self, *, trace: str | None, timeout: float) -> str | None:
            assert trace is not None
            closed.append((trace, timeout, lines(Path(trace))[-1]["event"]))
            return "7 of 9 steps were not delivered"

    with StalenessCallback(trace=path, sinks=[Place()], close_timeout=3.0) as staleness:
        staleness.on_step([])
    staleness.close()
    assert closed == [(str(path), 3.0, "run_finished")]
    assert any("7 of 9 steps were not delivered" in r.getMessage() for r in caplog.records)


def test_strict_raises_what_is_otherwise_logged(path: Path) -> None:
    """strict=True lets a sink's error out."""
    with (
        pytest.raises(ConnectionError),
        StalenessCallback(trace=path, sinks=[RaisingSink()], strict=True) as staleness,
    ):
        staleness.on_step([])


def test_a_wrong_type_is_refused_logged_and_counted(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A group that is no name never reaches the trace, and the trace stays readable."""
    with StalenessCallback(trace=path) as staleness:
        staleness.on_publish(7, calls=[call("a", 1, 0, 0)])  # type: ignore[arg-type]
        staleness.on_publish("g", calls=[call("a", -5, 0, 0)])
        staleness.on_step([], version=-1)
        assert staleness.missing()["events had a value of a wrong type and were refused"] == 3
        staleness.on_step([])
    assert [s.step for s in steps(path)] == [2]  # the trainer did make the first one
    assert [line["event"] for line in lines(path)] == [
        "run_started",
        "gap",
        "step_trained",
        "run_finished",
    ]


def test_a_step_that_cannot_be_written_still_counts(path: Path) -> None:
    """The policy was updated, whatever came of the line: what is trained next is that old."""
    with StalenessCallback(trace=path) as staleness:
        staleness.on_publish("a", calls=[call("a", 10, 0, 0)])
        assert staleness.on_step([], updates="1") is None  # type: ignore[arg-type]
        numbers = staleness.on_step(["a"])
    assert numbers is not None
    assert (numbers.batch_age, numbers.violations) == (1.0, 0)


def test_engines_may_be_named_by_an_iterator(path: Path) -> None:
    """Names are read once, and count for the pause and for the end of the refit."""
    engines = [FakeEngine("a", counts={}), FakeEngine("b", counts={})]
    with (
        StalenessCallback(trace=path, engines=engines) as staleness,
        staleness.refit(version=0, engines=iter(["a", "b"])),
    ):
        pass
    done = [line["engine"] for line in lines(path) if line["event"] == "refit_done"]
    assert done == ["a", "b"]


def test_an_engine_that_answers_nothing_hides_no_other(path: Path) -> None:
    """A method that returns no future fails for its own engine only, at any limit in time."""
    odd, sound = FakeEngine("odd"), FakeEngine("sound", counts={})
    odd.answer = lambda: None  # type: ignore[assignment, return-value]
    with (
        StalenessCallback(trace=path, engines=[odd, sound], timeout=1e12) as staleness,
        staleness.refit(version=0),
    ):
        pass
    done = [line["engine"] for line in lines(path) if line["event"] == "refit_done"]
    assert done == ["odd", "sound"]


def test_a_refit_that_is_cancelled_at_its_end_is_done(path: Path) -> None:
    """The weights are in, whether or not anybody waits for the engine to hear of it."""

    async def body(staleness: StalenessCallback, engine: FakeEngine) -> None:
        async with staleness.refit(version=0):
            engine.answer = Future

    async def main() -> None:
        engine = FakeEngine(counts={})
        with StalenessCallback(trace=path, engines=[engine]) as staleness:
            task = asyncio.create_task(body(staleness, engine))
            await asyncio.sleep(0.05)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())
    assert [line["event"] for line in lines(path)][1:] == [
        "refit_cut",
        "refit_done",
        "run_finished",
    ]


def test_a_call_that_stands_twice_in_a_group(path: Path) -> None:
    """The same record twice is one call; two of one name are a violation, never a larger sum."""
    record = call("a", 10, 0, 0)
    with StalenessCallback(trace=path) as staleness:
        staleness.on_publish("g", calls=[record, record])
        staleness.on_publish("h", calls=[call("b", 10, 0, 0), call("b", 10, 0, 0)])
        once, twice = staleness.on_step(["g"]), staleness.on_step(["h"])
    assert once is not None and twice is not None
    assert (once.tokens, once.violations) == (10, 1)  # found when h was published
    assert twice.violations == 0


def test_a_refit_whose_pause_nobody_announced_is_anywhere(path: Path) -> None:
    """An attached engine that did not hear of a refit has calls of unknown version after it."""
    with StalenessCallback(trace=path, engines=[FakeEngine()]) as staleness:
        staleness.on_step([])
        staleness.on_refit_done()
        staleness.on_publish("g", calls=[call("a", 10, 0, 0)])
        numbers = staleness.on_step(["g"])
    assert numbers is not None
    assert (numbers.coverage, numbers.age_lo, numbers.age_hi) == (0.0, 0.0, 1.0)


def test_a_forked_child_neither_writes_nor_keeps_the_trace_busy(path: Path) -> None:
    """A data loader that outlives its trainer does not keep the run from going on."""
    staleness = StalenessCallback(trace=path, run="r")
    staleness.on_step([])
    reads, writes = os.pipe()
    heard, says = os.pipe()
    child = os.fork()
    if not child:
        staleness.on_step([])
        os.write(says, b"x")
        os.read(reads, 1)
        os._exit(0)
    try:
        os.read(heard, 1)
        staleness.close()
        with StalenessCallback(trace=path, run="r") as again:
            assert again.step == 2
    finally:
        os.write(writes, b"x")
        os.waitpid(child, 0)
    assert [s.step for s in steps(path)] == [1]


def test_hooks_in_a_wrong_order_are_violations(path: Path) -> None:
    """A done without a pause, a second pause, an unknown group: counted, written, no exception."""
    with StalenessCallback(trace=path) as staleness:
        staleness.on_refit_done()
        staleness.on_refit_aborted(reason="nothing")
        staleness.on_refit_paused()
        staleness.on_refit_paused()
        numbers = staleness.on_step(["nobody"])
    assert numbers is not None
    assert numbers.violations == 4
    assert numbers.coverage is None
    names = [line["name"] for line in lines(path) if line["event"] == "violation"]
    assert names == [
        "refit_done_without_pause",
        "refit_aborted_without_pause",
        "refit_left_open",
    ]


def test_a_count_that_is_passed_and_differs_is_a_violation(path: Path) -> None:
    """A trainer's own step and version beat the callback's, are counted, and go on from there."""
    with StalenessCallback(trace=path) as staleness:
        first = staleness.on_step([], step=1, version=0)
        second = staleness.on_step([], step=7, version=5)
        third = staleness.on_step([])
    assert first and second and third
    assert [s.violations for s in (first, second, third)] == [0, 2, 0]
    assert (third.step, third.version) == (8, 6)


def test_several_updates_a_step(path: Path) -> None:
    """batches are consumed at version, version + 1, ...; groups with updates widen age_hi."""
    with StalenessCallback(trace=path) as staleness:
        for name in "ab":
            staleness.on_publish(name, calls=[call(name, 10, 0, 0)])
        split = staleness.on_step(batches=[["a"], ["b"]])
        staleness.on_publish("c", calls=[call("c", 10, 0, 0)])
        lumped = staleness.on_step(["c"], updates=3)
        skipped = staleness.on_step([], updates=0)
    assert split and lumped and skipped
    assert split.batch_age == 0.5
    assert (lumped.version, lumped.batch_age, lumped.age_lo, lumped.age_hi) == (2, 2.0, 2.0, 4.0)
    assert skipped.version == 5
    assert staleness.version == 5


def test_a_dropped_group_is_counted_whether_it_was_published_or_not(path: Path) -> None:
    """Tokens of both kinds of drop are in dropped_tokens of the next step."""
    with StalenessCallback(trace=path) as staleness:
        staleness.on_publish("a", calls=[call("a", 10, 0, 0)])
        staleness.on_drop("a", reason="too old")
        staleness.on_drop("b", reason="aborted", calls=[call("b", 5, 0, 0)])
        numbers = staleness.on_step(["a"])
    assert numbers is not None
    assert (numbers.dropped_tokens, numbers.violations, numbers.coverage) == (15, 1, None)


def test_an_engine_that_cannot_say_gets_bounds_up_to_the_policy(path: Path) -> None:
    """Spans without a newest version are clipped at the policy's version when published."""
    unknown = (0, 10, 0, 2**63 - 1)
    with StalenessCallback(trace=path) as staleness:
        for _ in range(3):
            staleness.on_step([])
        staleness.on_publish("g", calls=[call("a", 10, 0, 0, spans=(unknown,))])
        numbers = staleness.on_step(["g"])
    assert numbers is not None
    assert (numbers.coverage, numbers.age_lo, numbers.age_hi) == (0.0, 0.0, 3.0)


def test_a_running_call_that_is_published_is_a_violation(path: Path) -> None:
    """A group must not be published before its calls have ended."""
    with StalenessCallback(trace=path) as staleness:
        with staleness.group() as group:
            group.capture.calls.append(
                LiveCall(call="a", engine="engine", version=0, after=0, tokens=4)
            )
        staleness.on_publish(group)
        numbers = staleness.on_step([group])
    assert numbers is not None
    assert (numbers.tokens, numbers.violations) == (4, 1)


def test_the_same_run_goes_on_and_another_gets_a_file_of_its_own(path: Path) -> None:
    """A trace of the same run is continued with the next incarnation, another run's left alone."""
    with StalenessCallback(trace=path, run="mine") as staleness:
        staleness.on_step([])
        with staleness.refit():
            pass
    with StalenessCallback(trace=path, run="mine", engines=[FakeEngine()]) as staleness:
        assert (staleness.step, staleness.version) == (2, 1)
        staleness.on_step([])
    with StalenessCallback(trace=path, run="yours") as staleness:
        staleness.on_step([])
    starts = [line for line in lines(path) if line["event"] == "run_started"]
    assert [(s["incarnation"], s["version"], s["step"]) for s in starts] == [(0, 0, 1), (1, 1, 2)]
    assert [s.violations for s in steps(path)] == [0, 0]
    assert staleness.trace is not None
    assert Path(staleness.trace).name == "rollout_trace-2.jsonl"


def test_refit_numbers_go_on_after_a_resume(path: Path) -> None:
    """A refit number of before is never used again, and the engine is told the last one."""
    for engine in (FakeEngine(), second := FakeEngine()):
        with StalenessCallback(trace=path, run="r", version=0, engines=[engine]) as staleness:
            staleness.on_refit_paused()
            staleness.on_refit_done()
    assert [(event, refit) for event, refit, _ in second.heard][:2] == [("start", 1), ("mark", 2)]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"version": -1}, "version"),
        ({"step": 1.5}, "step"),
        ({"orphan_after": -1}, "orphan_after"),
        ({"timeout": -1}, "timeout"),
        ({"about": {"dtype": object()}}, "run, about"),
        ({"run": 7}, "run, about"),
        ({"engines": [FakeEngine("a"), FakeEngine("a")]}, "engines"),
    ],
)
def test_a_wrong_argument_raises_at_construction(
    path: Path, arguments: dict[str, Any], named: str
) -> None:
    """The message names the argument."""
    with pytest.raises(ValueError, match=f"^{named}:"):
        StalenessCallback(trace=path, **arguments)


def test_an_unwritable_trace_raises_at_construction(tmp_path: Path) -> None:
    """A folder that is not there, and a path that is a folder."""
    with pytest.raises(OSError, match="nowhere"):
        StalenessCallback(trace=tmp_path / "nowhere" / "trace.jsonl")
    with pytest.raises(OSError):
        StalenessCallback(trace=tmp_path)


def test_an_engine_that_joins_the_run(path: Path) -> None:
    """Its weights count as those of a refit: what it begins has the version that was said."""
    first, second = FakeEngine("x", counts={}), FakeEngine("y", counts={"b": 4})
    with StalenessCallback(trace=path, engines=[first], sinks=[]) as staleness:
        for _ in range(3):
            staleness.on_step([])
        staleness.attach(second, version=2)
        early = Call(call="a", engine="y", version=2, tokens=10, after=1, until=1)
        across = Call(call="b", engine="y", version=2, tokens=10, after=1, until=2)
        with staleness.refit():
            pass
        staleness.on_publish("g", calls=[early, across])
        numbers = staleness.on_step(["g"])
    assert numbers is not None
    assert (numbers.tokens_by_version, numbers.coverage) == ({2: 14, 3: 6}, 1.0)
    assert numbers.violations == 0
    assert lines(path)[0]["engines"] == {"x": 0}
    assert second.heard[:2] == [("start", 1, 2), ("mark", 2, 3)]
    cut = next(line for line in lines(path) if line["event"] == "refit_cut")
    del cut["time"]
    assert cut == {
        "event": "refit_cut",
        "engine": "y",
        "refit": 1,
        "version": 2,
        "exact": False,
        "mode": "joined",
    }


def test_an_engine_that_goes_and_another_of_its_name(path: Path) -> None:
    """A dead engine is waited for no longer; refit numbers go on under its name."""
    dead, sound = FakeEngine("x"), FakeEngine("x", counts={})
    with StalenessCallback(trace=path, engines=[dead], sinks=[], timeout=0) as staleness:
        staleness.on_step([])
        with staleness.refit():
            dead.deliver(Cut(calls={}))
        dead.answer = Future
        staleness.on_refit_paused()
        assert staleness.silent_engines == {"x"}
        staleness.detach("x")
        assert staleness.silent_engines == frozenset()
        dead.deliver(Cut(calls={"b": 1}))  # as if it had come late
        assert staleness.missing()["refits had no cut"] == 1
        staleness.attach(sound, version=1)
        before = Call(call="a", engine="x", version=1, tokens=10, after=1, until=1)
        new = Call(call="c", engine="x", version=1, tokens=10, after=3, until=3)
        staleness.on_publish("g", calls=[before, new])
        numbers = staleness.on_step(["g"])
        sound.answer = Future  # a refit that the new one misses says nothing of the old one
        with staleness.refit():
            pass
        assert staleness.spans(before) == [(0, 10, 1, 1)]
    assert numbers is not None
    assert [event for event, *_ in dead.heard] == ["start", "mark", "done", "mark", "detach"]
    assert sound.heard[0] == ("start", 3, 1)
    assert (numbers.tokens_by_version, numbers.coverage) == ({1: 20}, 1.0)


def test_what_is_wrong_with_an_engine_that_joins(path: Path) -> None:
    """Nobody guesses which weights it holds: the message says what to pass."""
    with StalenessCallback(trace=path, sinks=[]) as staleness:
        with pytest.raises(ValueError, match=r"version: .*start\(engines="):
            staleness.attach(FakeEngine("x"), version=0)
        staleness.attach(FakeEngine("x"))
        staleness.on_step([])
        for version in (None, -1, True, 1.0):
            with pytest.raises(ValueError, match=r"version: .*the weights that the engines hold"):
                staleness.attach(FakeEngine("y"), version=version)  # type: ignore[arg-type]
        for names in (["z", "x"], ["z", "z"]):  # one is wrong: none is taken in
            with pytest.raises(ValueError, match="two are named"):
                staleness.attach(*map(FakeEngine, names), version=1)
        assert list(staleness._pauses.engines) == ["x"]
        staleness.detach("nobody")
    assert staleness.missing() == {"times detaching engine 'nobody' failed": 1}
    assert lines(path)[0]["engines"] == {"x": 0}
    assert [line["event"] for line in lines(path)] == [
        "run_started",
        "step_trained",
        "run_finished",
    ]


def test_an_engine_joins_with_weights_no_older_than_those_of_its_name(path: Path) -> None:
    """Or its version would go back; under a name of its own nothing stands against it."""
    with StalenessCallback(trace=path, engines=[FakeEngine("x", counts={})], sinks=[]) as staleness:
        staleness.on_step([])
        with staleness.refit():
            pass
        staleness.detach("x")
        with pytest.raises(ValueError, match=r"version: 0; .* was at 1: .*once they are no older"):
            staleness.attach(FakeEngine("x"), version=0)
        staleness.attach(FakeEngine("y"), version=0)
        staleness.attach(FakeEngine("x"), version=1)
    assert staleness.missing() == {}


def test_a_version_that_joins_is_in_the_trainers_count(path: Path) -> None:
    """Of a trainer whose count starts again after a resume, like that of a refit."""
    with StalenessCallback(trace=path, run="r", sinks=[]) as staleness:
        for _ in range(10):
            staleness.on_step([])
    late = FakeEngine("late")
    with StalenessCallback(trace=path, run="r", sinks=[]) as staleness:
        staleness.on_step([], version=0)  # 10 here
        staleness.attach(late, version=1)
    assert late.heard[0] == ("start", 1, 11)


def test_without_engines_there_is_nothing_to_refit(path: Path) -> None:
    """When the only one has gone, hooks without names do not go on for it."""
    engine = FakeEngine(counts={})
    with StalenessCallback(trace=path, engines=[engine], sinks=[]) as staleness:
        staleness.on_step([])
        staleness.detach("engine")
        with staleness.refit():
            pass
        staleness.on_refit_aborted(reason="nothing")
        staleness.on_refit_done()
        assert staleness.last_refit() == 0
    assert staleness.missing() == {}
    assert engine.heard == [("start", 0, 0), ("detach", 0, None)]


@pytest.mark.parametrize("goes", [True, False])
def test_engines_that_come_and_go_while_a_refit_ends(path: Path, goes: bool) -> None:
    """It ends on the engines that it was told of as it did, whoever is there at the end."""
    engines = [FakeEngine("a", counts={}), FakeEngine("b", counts={})]

    async def main(staleness: StalenessCallback) -> None:
        staleness.on_step([])
        await staleness.aon_refit_paused()
        answers = [Future[None](), Future[None]()]
        for engine, answer in zip(engines, answers, strict=True):
            engine.answer = lambda answer=answer: answer  # type: ignore[misc]
        ending = asyncio.create_task(staleness.aon_refit_done())
        await asyncio.sleep(0)
        if goes:
            staleness.detach("b")
        else:
            staleness.attach(FakeEngine("c", counts={}), version=0)
        for answer in answers:
            answer.set_result(None)
        await ending

    with StalenessCallback(trace=path, engines=engines, sinks=[]) as staleness:
        asyncio.run(main(staleness))
    assert staleness.missing() == {}
    done = [(e["engine"], e["refit"]) for e in lines(path) if e["event"] == "refit_done"]
    assert sorted(done) == [("a", 1), ("b", 1)] + ([] if goes else [("c", 1)])


def test_an_engine_that_goes_while_the_others_are_told(path: Path) -> None:
    """Nobody is forgotten for that: the hook waits for those that are there."""
    a, b = FakeEngine("a", counts={}), FakeEngine("b")
    with StalenessCallback(trace=path, engines=[a, b], sinks=[], timeout=0.01) as staleness:
        staleness.on_step([])
        a.answer = Future

        def answer() -> Future[None]:
            staleness.detach("b")
            return noticed()

        b.answer = answer
        staleness.on_refit_paused()
        assert staleness.silent_engines == {"a"}
        assert staleness.missing() == {
            "refits had no cut": 1,
            "times telling engine 'a' of pause failed": 1,
        }


def test_an_engine_joins_without_blocking_the_loop(path: Path) -> None:
    """One that is still being built may need the loop for its answer."""
    slow = FakeEngine("slow")

    async def main(staleness: StalenessCallback) -> None:
        staleness.on_step([])
        answer: Future[None] = Future()
        slow.answer = lambda: answer
        asyncio.get_running_loop().call_later(0.05, answer.set_result, None)
        await staleness.aattach(slow, version=1)
        assert answer.done()

    with StalenessCallback(trace=path, sinks=[], timeout=20) as staleness:
        asyncio.run(main(staleness))
    assert staleness.missing() == {}


@pytest.mark.parametrize("other_fails", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_blocks_of_two_tasks_end_their_own_refits(
    path: Path, fails: bool, other_fails: bool
) -> None:
    """One is done with an engine, which another has paused again before the first one ends."""

    async def block(
        staleness: StalenessCallback, engines: list[str], steps: list[asyncio.Event], fails: bool
    ) -> None:
        begun, told, go = steps
        with contextlib.suppress(OSError):
            async with staleness.refit(engines=engines):
                begun.set()
                await told.wait()
                if len(engines) == 2:
                    await staleness.aon_refit_done(engines=["x"])
                    told.clear()
                await go.wait()
                if fails:
                    raise OSError("no route to the engine")

    async def main(staleness: StalenessCallback) -> None:
        first, second = ([asyncio.Event() for _ in range(3)] for _ in range(2))
        tasks = [asyncio.create_task(block(staleness, ["x", "y"], first, fails))]
        await first[0].wait()
        first[1].set()
        while first[1].is_set():
            await asyncio.sleep(0)
        staleness.on_step([])
        tasks.append(asyncio.create_task(block(staleness, ["x"], second, other_fails)))
        await second[0].wait()
        second[1].set()
        for step, task in zip((first, second), tasks, strict=True):
            step[2].set()
            await task

    engines = [FakeEngine("x", counts={}), FakeEngine("y", counts={})]
    with StalenessCallback(trace=path, engines=engines, sinks=[]) as staleness:
        staleness.on_step([])
        asyncio.run(main(staleness))
    said = [(e["event"][6:], e["engine"], e["refit"]) for e in lines(path) if "refit" in e]
    ends = {False: "done", True: "aborted"}
    assert [line for line in said if line[0] != "cut"] == [
        ("done", "x", 1),
        (ends[fails], "y", 1),
        (ends[other_fails], "x", 2),
    ]
    assert staleness.missing() == {}


def test_a_block_whose_pause_is_refused_leaves_another_ones_alone(path: Path) -> None:
    """It says of the other engines that they were refitted, which nobody announced."""
    engines = [FakeEngine("x", counts={}), FakeEngine("y", counts={})]
    with StalenessCallback(trace=path, engines=engines, sinks=[]) as staleness:
        staleness.on_step([])
        with contextlib.suppress(OSError), staleness.refit(engines=["x"]):
            with staleness.refit(mode=None):  # type: ignore[arg-type]
                pass
            raise OSError("no route to the engine")
    said = [(e["event"], e["engine"]) for e in lines(path) if "refit" in e]
    assert said == [("refit_cut", "x"), ("refit_done", "y"), ("refit_aborted", "x")]
    assert staleness.missing()["violations refit_done_without_pause"] == 1


@pytest.mark.parametrize("tokens", [20, 0])
def test_a_call_that_began_before_its_engine_heard_contradicts_nothing(
    path: Path, tokens: int
) -> None:
    """A cut lists it, and another refit comes before it is published: bounds, and no violation."""
    engine = FakeEngine(counts={"u": 5} if tokens else {})
    with StalenessCallback(trace=path, engines=[engine], version=3, sinks=[]) as staleness:
        for _ in range(2):
            staleness.on_step([])
            with staleness.refit():
                pass
        untold = LiveCall(call="u", engine="engine", version=0, tokens=tokens, ended=True)
        untold.spans = ((0, tokens, 0, LARGEST),) if tokens else None
        staleness.on_publish("g", calls=[untold])
        numbers = staleness.on_step(["g"])
    assert numbers is not None
    assert (numbers.tokens, numbers.violations) == (tokens, 0)
    if tokens:
        assert (numbers.coverage, numbers.age_lo, numbers.age_hi) == (0, 0, 5)


def test_after_close_hooks_do_nothing_but_count(path: Path) -> None:
    """A hook after close() raises nothing and writes nothing; closing twice is fine."""
    engine = FakeEngine()
    staleness = StalenessCallback(trace=path, engines=[engine])
    staleness.on_step([])
    staleness.close()
    staleness.close()
    before = path.read_bytes()
    assert staleness.on_step([]) is None
    staleness.on_publish("g", calls=[call("a", 1, 0, 0)])
    assert path.read_bytes() == before
    assert [event for event, *_ in engine.heard].count("detach") == 1


def test_hooks_from_eight_threads_leave_one_sound_trace(path: Path) -> None:
    """Publishes, drops and refits from eight threads are all there, and the fold agrees."""
    with StalenessCallback(trace=path, engines=[FakeEngine(counts={})]) as staleness:

        def work(number: int) -> None:
            for index in range(50):
                name = f"{number}-{index}"
                staleness.on_publish(name, calls=[call(name, 10, 0, 0)])
                if index % 5 == 0:
                    staleness.on_drop(name, reason="odd")

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        kept = [f"{n}-{i}" for n in range(8) for i in range(50) if i % 5]
        numbers = staleness.on_step(kept)
    assert numbers is not None
    assert (numbers.tokens, numbers.dropped_tokens) == (3200, 800)
    assert (numbers.violations, numbers.coverage) == (0, 1.0)
    assert [numbers] == list(steps(path))


def test_violations_are_logged_with_their_names(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A user sees which fact contradicts which."""
    with caplog.at_level(logging.WARNING), StalenessCallback(trace=path) as staleness:
        staleness.on_step(["nobody"])
    assert any("unknown_group" in r.getMessage() for r in caplog.records)


def test_a_refit_that_an_engine_did_not_hear_of_leaves_its_calls_in_doubt(path: Path) -> None:
    """An engine whose mark came too late goes on with numbers from before: no evidence."""
    engine = FakeEngine()
    engine.answer = Future
    with StalenessCallback(trace=path, engines=[engine], timeout=0.01) as staleness:
        staleness.on_step([])
        with staleness.refit():
            pass
        stale = [
            call("ended after the resume", 40, 0, 0, spans=((0, 40, 0),)),
            call("began after the resume", 50, 0, 0),
        ]
        staleness.on_publish("g", calls=stale)
        numbers = staleness.on_step(["g"])
        engine.answer, engine.counts = noticed, {}
        with staleness.refit():
            pass
        staleness.on_publish("late", calls=[call("published after the next", 5, 0, 0)])
        late = staleness.on_step(["late"])
        staleness.on_publish("h", calls=[call("sure", 10, 2, 2)])
        sure = staleness.on_step(["h"])
    assert numbers and late and sure
    assert (numbers.coverage, numbers.age_lo, numbers.age_hi) == (0.0, 0.0, 1.0)
    assert late.coverage == 0.0
    assert (sure.coverage, sure.tokens_by_version, sure.violations) == (1.0, {2: 10}, 0)


def test_a_refit_whose_end_an_engine_did_not_hear_of_takes_its_spans(path: Path) -> None:
    """An engine that was not told of the new version labels with the old one: no spans."""
    engine = FakeEngine(counts={})
    with StalenessCallback(trace=path, engines=[engine], timeout=0.01) as staleness:
        staleness.on_step([])
        staleness.on_refit_paused()
        engine.answer = Future
        staleness.on_refit_done()
        staleness.on_publish("g", calls=[call("a", 40, 1, 1, spans=((0, 40, 0),))])
        numbers = staleness.on_step(["g"])
    assert numbers is not None
    assert (numbers.coverage, numbers.tokens_by_version) == (1.0, {1: 40})


def test_an_attached_engine_that_cannot_say_has_no_cut_in_any_mode(path: Path) -> None:
    """A cut is never made up for an engine that was asked and had no answer."""
    with StalenessCallback(trace=path, engines=[FakeEngine()]) as staleness:
        staleness.on_step([])
        staleness.on_refit_paused(mode="abort")
        staleness._pauses.engines["engine"].deliver(None)  # type: ignore[attr-defined]
        staleness.on_refit_done()
        staleness.on_publish("g", calls=[call("a", 40, 0, 1)])
        numbers = staleness.on_step(["g"])
    assert numbers is not None
    assert numbers.coverage == 0.0
    assert not any(line["event"] == "refit_cut" for line in lines(path))


def test_a_restored_group_without_spans_is_bounded(path: Path) -> None:
    """A call from before a resume is never taken for one of the version that the run resumed at."""
    with StalenessCallback(trace=path, version=5) as staleness:
        old = Call(call="a", engine="engine", version=2, tokens=10, after=0, until=0)
        staleness.on_publish("g", calls=[old], restored=True)
        numbers = staleness.on_step(["g"])
    assert numbers is not None
    assert (numbers.coverage, numbers.age_lo, numbers.age_hi) == (0.0, 0.0, 3.0)


def test_a_stamp_that_the_engine_contradicts_is_not_hidden_in_a_sum(path: Path) -> None:
    """A call is summed only under the version that it was stamped with."""
    with StalenessCallback(trace=path) as staleness:
        wrong = Call(call="a", engine="engine", version=7, tokens=10, after=0, until=0)
        staleness.on_publish("g", calls=[wrong])
        numbers = staleness.on_step(["g"])
    assert numbers is not None
    assert numbers.violations == 1


def test_a_final_mask_of_an_unknown_call_is_a_violation(path: Path) -> None:
    """A misspelt name trains the call whole, and that is said."""
    with StalenessCallback(trace=path) as staleness:
        staleness.on_publish("g", calls=[call("a", 10, 0, 0)], trained={"A": [(0, 2)]})
        numbers = staleness.on_step(["g"])
    assert numbers is not None
    assert (numbers.tokens, numbers.violations) == (10, 1)


def test_a_group_that_captured_nothing_is_said(path: Path) -> None:
    """Requests that another task submitted are not in the group: the likeliest mistake."""
    with StalenessCallback(trace=path) as staleness:
        with staleness.group() as group:
            pass
        staleness.on_publish(group)
        assert any("finding a call in its group" in what for what in staleness.missing())


def test_two_callbacks_at_one_path_write_two_traces(path: Path) -> None:
    """A file that somebody writes is never shared."""
    with StalenessCallback(trace=path) as one, StalenessCallback(trace=path) as two:
        assert one.trace != two.trace
        one.on_step([])
        two.on_step([])
    for staleness in (one, two):
        assert staleness.trace is not None
        assert [s.violations for s in steps(staleness.trace)] == [0]


def test_a_run_that_another_process_writes_cannot_be_gone_on_with(path: Path) -> None:
    """The same run twice at once is refused at construction."""
    with StalenessCallback(trace=path, run="r") as staleness:
        staleness.on_step([])
        with pytest.raises(OSError, match="trace"):
            StalenessCallback(trace=path, run="r")


def test_close_goes_through_whatever_fails_on_the_way(path: Path) -> None:
    """Engines are let go and sinks are closed, also where the last line cannot be written."""
    engine = FakeEngine()
    closed: list[str] = []

    class Place(RecordingSink):
        log = RecordingSink.__call__

        def close(self, *, trace: str | None, timeout: float) -> str | None:
            closed.append("sink")
            return None

    staleness = StalenessCallback(trace=path, engines=[engine], sinks=[Place()])
    staleness.on_step([])
    staleness.close(status=1)  # type: ignore[arg-type]
    assert closed == ["sink"]
    assert ("detach", 0, None) in engine.heard


def test_refit_hooks_after_close_tell_no_engine(path: Path) -> None:
    """What the user does with the engine later is not ours."""
    engine = FakeEngine(counts={})
    staleness = StalenessCallback(trace=path, engines=[engine])
    staleness.on_step([])
    staleness.close()
    heard = list(engine.heard)
    with staleness.refit():
        pass
    assert engine.heard == heard


def test_strict_raises_for_an_engine_that_does_not_answer(path: Path) -> None:
    """strict=True holds for engines too, after all of them were told."""
    engine = FakeEngine()
    with StalenessCallback(trace=path, engines=[engine], timeout=0.01, strict=True) as staleness:
        staleness.on_step([])
        engine.answer = Future
        with pytest.raises(TimeoutError, match="engine"):
            staleness.on_refit_paused()
        engine.answer = noticed
        staleness.on_refit_done()


def test_arguments_are_read_before_anything_is_locked(path: Path) -> None:
    """A generator that waits for another thread's hook does not hang."""
    with StalenessCallback(trace=path) as staleness:

        def groups() -> Iterator[str]:
            thread = threading.Thread(target=staleness.on_step, args=([],))
            thread.start()
            thread.join(timeout=5)
            assert not thread.is_alive()
            yield "nobody"

        assert staleness.on_step(groups()) is not None


def test_groups_and_batches_together_are_refused(path: Path) -> None:
    """A step has one or the other."""
    with StalenessCallback(trace=path) as staleness:
        assert staleness.on_step(["a"], batches=[["a"]]) is None
        assert staleness.missing()["times on_step failed"] == 1


def test_selftest_asks_the_engines_that_can(path: Path) -> None:
    """What each engine says of its evidence, by name."""

    class Testing(FakeEngine):
        async def selftest(self) -> str:
            return "cuts"

    engines = [Testing("a"), FakeEngine("b")]
    with StalenessCallback(trace=path, engines=engines) as staleness:
        assert asyncio.run(staleness.selftest()) == {"a": "cuts"}


def test_start_waits_for_the_engines(path: Path) -> None:
    """start() returns when every engine knows of the run; a hook alone waits for nobody."""
    engine, known = FakeEngine(), Future[None]()
    engine.answer = lambda: known
    told = threading.Event()

    def start() -> None:
        staleness.start()
        told.set()

    with StalenessCallback(trace=path, engines=[engine], timeout=30.0) as staleness:
        staleness.on_step([])
        thread = threading.Thread(target=start)
        thread.start()
        assert not told.wait(0.2)
        known.set_result(None)
        assert told.wait(30.0)
        thread.join()
        engine.answer = noticed
    assert [what for what, *_ in engine.heard] == ["start", "detach"]


def test_astart_leaves_the_loop_alone(path: Path) -> None:
    """The loop on which an engine answers goes on meanwhile."""
    engine, known = FakeEngine(), Future[None]()
    engine.answer = lambda: known

    async def work() -> None:
        asyncio.get_running_loop().call_later(0.05, known.set_result, None)
        await staleness.astart()
        assert known.done()

    with StalenessCallback(trace=path, engines=[engine], timeout=30.0) as staleness:
        asyncio.run(work())
        engine.answer = noticed
    assert staleness.missing() == {}


def test_a_cut_is_not_written_on_the_loop_that_counted_it(path: Path) -> None:
    """An engine generates on its loop; a step waits until what it delivered there is written."""
    engine = FakeEngine()
    threads: list[str] = []

    def clock() -> float:
        """It is asked for the time of every line, by the thread that writes it."""
        threads.append(threading.current_thread().name)
        if threads[-1].startswith("rl_staleness-cuts"):
            time.sleep(0.2)
        return 0.0

    async def work() -> StepStaleness | None:
        staleness.on_refit_paused()
        engine.deliver(Cut(calls={"a": 30}))
        staleness.on_refit_done()
        staleness.on_publish("g", calls=[call("a", 90, 0, 1)])
        return staleness.on_step(["g"])

    with StalenessCallback(trace=path, engines=[engine], clock=clock) as staleness:
        staleness.on_step([])
        numbers = asyncio.run(work())
    assert numbers is not None
    assert (numbers.coverage, numbers.batch_age) == (1.0, 30 / 90)
    assert any(name.startswith("rl_staleness-cuts") for name in threads)
    assert staleness.missing() == {}


def test_crossed_limits_are_logged_once(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A warning when a number crosses its limit, and another only after it was back."""
    with StalenessCallback(
        trace=path, sinks=[], warn_age_above=0.5, warn_coverage_below=0.9
    ) as staleness:
        staleness.on_step([])
        for number, behind in enumerate((1, 1, 0, 1)):
            group = f"g{number}"
            staleness.on_refit_paused(version=staleness.version - behind, cuts={"engine": {}})
            staleness.on_refit_done(version=staleness.version - behind)
            refit = 1 + number
            staleness.on_publish(
                group,
                calls=[
                    Call(
                        call=group,
                        engine="engine",
                        version=staleness.version - behind,
                        tokens=10,
                        after=refit,
                        until=refit,
                    )
                ],
            )
            staleness.on_step([group])
        staleness.on_publish("odd", calls=[call("odd", 10, 99, 99)])
        staleness.on_step(["odd"])
    warnings = [r.getMessage() for r in caplog.records if "above" in r.message]
    assert [warning.split(": ")[1] for warning in warnings] == ["step 2", "step 5"]
    (coverage,) = [r.getMessage() for r in caplog.records if "coverage is" in r.message]
    assert coverage.startswith("rl_staleness: step 6: coverage is 0, below 0.9")


def test_refits_that_stopped_coming_are_logged(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """After refits every 3 steps, 12 steps without one are odd; another refit ends it."""

    def refit() -> None:
        with staleness.refit():
            pass

    with StalenessCallback(trace=path, sinks=[], engines=[FakeEngine(counts={})]) as staleness:
        for step in range(9):
            staleness.on_step([])
            if step % 3 == 2:
                refit()
        for _ in range(20):
            staleness.on_step([])
        refit()
        for _ in range(12):
            staleness.on_step([])
    stopped = [r.getMessage() for r in caplog.records if "no refit was done" in r.message]
    assert [line.split(": ")[1] for line in stopped] == ["step 22"]


def test_a_run_that_never_refits_is_not_warned_of(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A trainer that does not tell of refits has none to stop."""
    with StalenessCallback(trace=path, sinks=[]) as staleness:
        for _ in range(50):
            staleness.on_step([])
    assert not [r for r in caplog.records if "no refit was done" in r.message]


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("warn_age_above", float("nan")),
        ("warn_age_above", "2"),
        ("warn_coverage_below", 1.5),
        ("warn_coverage_below", True),
        ("timeout", True),
        ("close_timeout", "3"),
        ("sinks", [None]),
        ("sinks", ["wandb"]),
    ],
)
def test_an_argument_that_cannot_be_used_is_named(path: Path, argument: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{argument}: "):
        StalenessCallback(trace=path, **{argument: value})
    assert not path.exists()


def test_a_checkpoint_attaches_the_trace_so_far(path: Path) -> None:
    """Sinks that can are handed the trace; one that raises does not keep it from the others."""

    class Place(RecordingSink):
        def __init__(self, error: Exception | None = None) -> None:
            super().__init__()
            self.attached: list[str] = []
            self.error = error

        def attach(self, trace: str) -> None:
            if self.error:
                raise self.error
            self.attached.append(trace)

    broken, place = Place(OSError("no room")), Place()
    with StalenessCallback(trace=path, sinks=[broken, RecordingSink(), place]) as staleness:
        staleness.on_checkpoint()
        assert place.attached == [str(path)]
    assert list(staleness.missing().values()) == [1]


@pytest.mark.parametrize("what", ["deleted", "replaced", "cut short"])
def test_a_trace_that_is_changed_underneath_is_told(
    path: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever deletes, replaces or truncates the file while the run goes on hears of it."""
    with StalenessCallback(trace=path, sinks=[]) as staleness:
        staleness.on_step([])
        if what == "cut short":
            os.truncate(path, 0)
        else:
            path.unlink()
        if what == "replaced":
            path.write_text("")
        staleness.on_step([])
    assert staleness.missing() == {f"the trace was {what} while it was written": 1}
    assert f"the trace was {what}" in caplog.text


@pytest.mark.parametrize("name", ["", 5, "\ud800", None])
def test_an_engine_needs_a_name(path: Path, name: Any) -> None:
    engine = FakeEngine(name)
    with pytest.raises(ValueError, match=r"^engines: "):
        StalenessCallback(trace=path, engines=[engine])


def test_metrics_are_those_of_the_last_step(path: Path) -> None:
    """For a trainer that logs by itself: scalars of the step, none where it has none."""
    with StalenessCallback(trace=path, sinks=[]) as staleness:
        assert staleness.metrics() == {}
        staleness.on_publish("g", calls=[call("a", 50, 0, 0)])
        numbers = staleness.on_step(["g"])
        assert numbers is not None
        assert staleness.metrics() == staleness.metrics(1) == numbers.metrics()
        assert staleness.metrics()["staleness/tokens"] == 50
        assert staleness.metrics(2) == {}
        staleness.on_step(["g"], step="two")  # type: ignore[arg-type]  # refused
        assert staleness.metrics() == {}


@pytest.mark.parametrize(
    ("engines", "cuts"),
    [
        (["engine"], {"engine_0": {"a": 5}}),
        (None, {"a": 5}),
        (None, {"other": {"a": 5}}),
    ],
)
def test_cuts_of_no_paused_engine_are_told_at_once(
    path: Path, engines: Any, cuts: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A name that is not in play, or another shape: the line says what is and what to pass."""
    with StalenessCallback(trace=path, sinks=[], engines=[FakeEngine(counts={})]) as staleness:
        staleness.on_refit_paused(engines=engines, cuts=cuts)
        assert "cuts: " in caplog.text
    assert staleness.missing()["times on_refit_paused failed"] == 1


def test_cuts_name_engines_that_are_not_attached(path: Path) -> None:
    """Without attached engines and without names, those of ``cuts`` are paused."""
    with StalenessCallback(trace=path, sinks=[]) as staleness:
        staleness.on_step([])
        staleness.on_refit_paused(cuts={"sim": {"a": 5}})
        assert staleness.last_refit("sim") == 1
        staleness.on_refit_done()
        record = Call(call="a", engine="sim", version=0, tokens=10, after=0, until=1)
        staleness.on_publish("g", calls=[record])
        numbers = staleness.on_step(["g"])
    assert numbers is not None
    assert (numbers.tokens_by_version, numbers.coverage) == ({0: 5, 1: 5}, 1.0)


def test_the_last_refit_is_known_also_after_a_resume(path: Path) -> None:
    """A trainer that stamps calls itself asks for the number, also in a run that goes on."""
    for expected in (0, 1, 2):
        with StalenessCallback(trace=path, sinks=[], run="r") as staleness:
            assert staleness.last_refit() == expected
            staleness.on_refit_paused(cuts={"engine": {}})
            staleness.on_refit_done()
            assert staleness.last_refit() == expected + 1


def test_a_run_that_never_told_of_a_refit_is_asked_for_it(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Ages that only grow, and no refit: the hooks are missing, and a line names them."""
    with StalenessCallback(trace=path, sinks=[]) as staleness:
        for step in range(20):
            staleness.on_publish(f"g{step}", calls=[call(f"c{step}", 9, 0, 0)])
            staleness.on_step([f"g{step}"])
    (line,) = [r.getMessage() for r in caplog.records if "no refit was told of" in r.message]
    assert line.startswith("rl_staleness: step 9: ")
    assert "on_refit_done" in line


@pytest.mark.parametrize(
    ("argument", "value"),
    [("engines", 3), ("engines", [object()]), ("engines", FakeEngine()), ("sinks", print)],
)
def test_a_wrong_collection_is_named_and_leaves_no_file(
    path: Path, argument: str, value: Any
) -> None:
    with pytest.raises(ValueError, match=f"^{argument}: "):
        StalenessCallback(trace=path, **{argument: value})
    assert not path.exists()


@pytest.mark.parametrize("argument", ["trace", "about", "clock"])
def test_an_argument_of_another_kind_is_named(path: Path, argument: str) -> None:
    with pytest.raises(ValueError, match=f"^{argument}: 5 .*; pass "):
        StalenessCallback(**{"trace": path, argument: 5})  # type: ignore[arg-type]
    assert not path.exists()


def test_a_trace_that_cannot_be_written_says_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"trace: .*pass trace="):
        StalenessCallback(trace=tmp_path / "nowhere" / "rollout_trace.jsonl")


def test_another_runs_trace_is_left_alone_with_a_word(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        with StalenessCallback(trace=path, sinks=[]) as staleness:
            staleness.on_step([])
    (line,) = [r.getMessage() for r in caplog.records if "another run's" in r.message]
    assert str(path) in line
    assert line.endswith("rollout_trace-2.jsonl")


def test_a_resume_is_told_of_no_other_run(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The trace that stands there is that of the checkpoint's run, which is not known before."""
    with StalenessCallback(trace=path, sinks=[]) as staleness:
        staleness.on_step([])
        state = staleness.state_dict()
    with StalenessCallback(trace=path, sinks=[]) as staleness:
        staleness.load_state_dict(state)
        staleness.on_step([])
        assert staleness.trace == str(path)
    assert "another run's" not in caplog.text


def test_a_strict_callback_raises_for_a_group_without_a_call(path: Path) -> None:
    """After its line is written: it is as empty as that says."""
    staleness = StalenessCallback(trace=path, sinks=[], strict=True)
    with pytest.raises(ValueError, match="'g' has no call"):
        staleness.on_publish("g", calls=[])
    staleness.close()
    assert [line["event"] for line in lines(path)][1] == "group_published"


@pytest.mark.parametrize("calls", [[("a", 10)], 7])
def test_what_is_no_call_is_named(path: Path, calls: Any, caplog: pytest.LogCaptureFixture) -> None:
    with StalenessCallback(trace=path, sinks=[]) as staleness:
        staleness.on_publish("g", calls=calls)
    assert staleness.missing()["times on_publish failed"] == 1
    if calls != 7:
        assert "calls: ('a', 10) is no call" in caplog.text
