"""Evidence that is lost, late, refused or never given: what the numbers say then, online and after.

Each of these made a number certain, a violation, or a call nobody's, that was not.
"""

from __future__ import annotations

import json
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rl_staleness import Call, StalenessCallback, pauses, steps
from rl_staleness.engines import Cut
from tests.fakes import FakeEngine


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a test's trace is written."""
    return tmp_path / "rollout_trace.jsonl"


def lines(path: Path) -> list[dict[str, Any]]:
    """The trace as plain JSON."""
    return [json.loads(line) for line in path.read_text().splitlines()]


@contextmanager
def full_disk(path: Path) -> Iterator[None]:
    """Nothing can be written to the trace any more."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (max(path.stat().st_size, 10), before[1]))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, old)


def test_a_first_line_that_is_lost_is_written_with_the_next(path: Path) -> None:
    """No event stands before run_started, whatever the disk did, and what was lost is said."""
    with StalenessCallback(trace=path) as staleness:
        with full_disk(path):
            assert staleness.on_step([]) is None
            assert staleness.missing()["lines of the trace could not be written"] == 2
        assert staleness.missing()["lines of the trace could not be written"] == 2
        assert staleness.on_step([]) is not None
        assert staleness.missing()["lines of the trace could not be written"] == 1
    said = [(line["event"], line.get("version"), line.get("lost")) for line in lines(path)]
    assert said[:3] == [("run_started", 0, None), ("gap", None, 1), ("step_trained", 1, None)]
    (step,) = steps(path)
    assert (step.step, step.violations) == (2, 0)


def test_refits_before_the_first_line_can_be_written(path: Path) -> None:
    """The engine has them, and its numbers go on; what it generates has bounds until the next."""
    engine = FakeEngine(counts={})
    with StalenessCallback(trace=path, engines=[engine]) as staleness:
        with full_disk(path):
            staleness.on_step([])
            staleness.on_refit_paused()
            staleness.on_refit_done()
            assert staleness.age("g").tokens == 0  # it raises nothing
        assert engine.heard[:3] == [("start", 0, 0), ("mark", 1, 1), ("done", 1, 1)]
        call = Call(call="c", engine="engine", version=1, tokens=3, after=1, until=1)
        staleness.on_publish("g", calls=[call])
        unsure = staleness.on_step(["g"])
        assert unsure is not None
        assert (unsure.coverage, unsure.age_lo, unsure.age_hi) == (0, 0, 1)
        staleness.on_refit_paused()
        staleness.on_refit_done()
        call = Call(call="d", engine="engine", version=2, tokens=3, after=2, until=2)
        staleness.on_publish("h", calls=[call])
        sure = staleness.on_step(["h"])
        assert sure is not None
        assert (sure.coverage, sure.batch_age, sure.violations) == (1, 0, 0)
    assert list(steps(path)) == [unsure, sure]


def test_a_resume_on_a_full_disk_keeps_the_groups_that_waited(path: Path) -> None:
    """They are published again as soon as there is room, before what comes after them."""
    with StalenessCallback(trace=path, run="R", sinks=[]) as staleness:
        for name in "gh":
            call = Call(call=name, engine="engine", version=0, tokens=5, after=0, until=0)
            staleness.on_publish(name, calls=[call])
        staleness.on_step([])
    with StalenessCallback(trace=path, run="R", sinks=[]) as staleness:
        with full_disk(path):
            assert staleness.on_step([]) is None
            assert staleness.age("g").batch_age == 2
        first = staleness.on_step(["g"])
        second = staleness.on_step(["h"])
        assert first is not None and second is not None
        assert [(s.batch_age, s.coverage, s.violations) for s in (first, second)] == [
            (2, 1, 0),
            (3, 1, 0),
        ]
        assert staleness.missing()["lines of the trace could not be written"] == 1
    said = [line["event"] for line in lines(path)]
    assert said[said.index("run_finished") + 1 :][:5] == [
        "run_started",
        "group_published",
        "group_published",
        "gap",
        "step_trained",
    ]
    assert list(steps(path))[1:] == [first, second]


def test_a_restored_call_whose_refits_are_in_lost_lines(path: Path) -> None:
    """What is not known may be as new as the trainer's policy is, whatever the trace has of it."""
    staleness = StalenessCallback(trace=path, run="R", sinks=[])
    staleness.start()
    with full_disk(path):
        staleness.on_step([])
        staleness.on_step([])
        staleness.on_refit_paused(cuts={"engine": {}})
        staleness.on_refit_done()
    call = Call(call="c", engine="engine", version=2, tokens=10, after=1, until=1)
    staleness.on_publish("g", calls=[call])
    now = staleness.age("g")
    assert (now.version, now.step, now.coverage, now.age_lo, now.age_hi) == (2, 3, 0, 0, 2)
    assert staleness.spans(call) == [(0, 10, 0, 2)]
    state = staleness.state_dict()
    staleness._recorder.close()
    with StalenessCallback(trace=path, run="R", sinks=[]) as staleness:
        staleness.load_state_dict(state)
        step = staleness.on_step(["g"])
        assert step is not None
        assert (step.coverage, step.age_lo, step.age_hi) == (0, 0, 2)


def test_the_age_of_a_group_after_steps_that_were_refused(path: Path) -> None:
    """It is what the step says that trains the group."""
    with StalenessCallback(trace=path, sinks=[]) as staleness:
        staleness.on_publish("g", calls=[Call(call="c", engine="engine", version=0, tokens=10)])
        for _ in range(2):
            staleness.on_step([5])  # type: ignore[list-item]
        before = staleness.age("g")
        assert before.batch_age == 2
        after = staleness.on_step(["g"])
        assert after is not None
        assert (after.batch_age, after.step, after.version) == (2, before.step, before.version)


def test_a_pause_without_a_line_has_a_number_after_the_resume(path: Path) -> None:
    """A number is never used again, also where the process ended within the refit."""
    staleness = StalenessCallback(trace=path, run="R", sinks=[])
    staleness.on_step([])
    staleness.on_refit_paused()
    state = staleness.state_dict()
    assert state["refits"] == {"engine": 1}
    staleness._recorder.close()
    with StalenessCallback(trace=path, run="R", sinks=[]) as staleness:
        staleness.load_state_dict(state)
        assert staleness.last_refit() == 0  # the run has not started
        staleness.start()
        assert staleness.last_refit() == 1
        staleness.on_refit_paused(cuts={"engine": {}})
        assert staleness.last_refit() == 2
        staleness.on_refit_done()
    (cut,) = [line for line in lines(path) if line["event"] == "refit_cut"]
    assert cut["refit"] == 2


def test_a_call_that_is_counted_in_the_pause_that_it_began_in(path: Path) -> None:
    """It is published and nobody's orphan, and the cut that lists it goes on to say of others."""
    with StalenessCallback(trace=path, sinks=[], orphan_after=2) as staleness:
        waiting = Call(call="d", engine="engine", version=0, tokens=30, after=0)
        staleness.on_publish("w", calls=[waiting])
        staleness.on_step([])
        staleness.on_refit_paused(cuts={"engine": {"c": 0}})
        staleness.on_refit_done()
        call = Call(call="c", engine="engine", version=1, tokens=40, after=1, until=1)
        staleness.on_publish("g", calls=[call])
        trained = staleness.on_step(["g"])
        assert trained is not None
        assert (trained.tokens_by_version, trained.coverage) == ({1: 40}, 1)
        for _ in range(5):
            staleness.on_refit_paused(cuts={"engine": {}})
            staleness.on_refit_done()
            staleness.on_step([])
        step = staleness.on_step(["w"])  # absent from that cut: it had ended
        assert step is not None
        assert (step.tokens_by_version, step.coverage, step.violations) == ({0: 30}, 1, 0)
        assert staleness.missing() == {}


def test_an_engine_that_takes_notice_and_never_counts(path: Path) -> None:
    """Its refits have no cut, and that is said, once for each."""
    engine = FakeEngine()
    delivers: list[Callable[[Cut | None], None]] = []
    with StalenessCallback(trace=path, engines=[engine], sinks=[]) as staleness:
        for _ in range(100):
            staleness.on_step([])
            staleness.on_refit_paused()
            staleness.on_refit_done()
            delivers.append(engine.deliver)
        assert {len(owed) for owed in staleness._pauses._owed.values()} == {pauses.MOST_OWED}
        assert staleness.missing() == {"refits had no cut": 100}
        for number in (10, 98):  # late, and none the less
            delivers[number](Cut(calls={}))
        assert staleness.missing() == {"refits had no cut": 98}
        for deliver in delivers:  # what was counted already is not counted again
            deliver(None)
        assert staleness.missing() == {"refits had no cut": 98}
        staleness.on_refit_paused()
        staleness.on_refit_aborted(reason="no network")  # one that needs no cut
    assert staleness.missing() == {"refits had no cut": 98}


def test_cuts_of_many_engines_are_none_that_is_missing() -> None:
    """However many have their cuts on the way at once."""
    engines = [FakeEngine(f"e{number}") for number in range(100)]
    with StalenessCallback(trace=None, engines=engines, sinks=[]) as staleness:
        for _ in range(3):
            staleness.on_step([])
            staleness.on_refit_paused()
            for engine in engines:
                engine.deliver(Cut(calls={}))
            staleness.on_refit_done()
        assert staleness.missing() == {}


def test_a_start_with_many_groups_on_a_full_disk(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried once and said once; later each hook tries one line before its own."""
    with StalenessCallback(trace=path, run="R", sinks=[]) as staleness:
        for number in range(50):
            call = Call(call="c", engine="engine", version=0, tokens=1)
            staleness.on_publish(f"g{number}", calls=[call])
        staleness.on_step([])
    writes: list[bytes] = []
    write = os.write

    def written(file: int, data: bytes) -> int:
        writes.append(data)
        return write(file, data)

    monkeypatch.setattr(os, "write", written)
    with StalenessCallback(trace=path, run="R", sinks=[]) as staleness:
        with full_disk(path):
            staleness.start()
            assert (len(writes), caplog.text.count("could not be written")) == (1, 1)
            staleness.on_step([])
            staleness.on_step([])
            assert (len(writes), caplog.text.count("could not be written")) == (3, 1)
        step = staleness.on_step([f"g{number}" for number in range(50)])
        assert step is not None
        assert (step.tokens, step.violations) == (50, 0)
    assert list(steps(path))[-1] == step


def test_a_start_that_never_reached_the_disk(path: Path) -> None:
    """The one after it has the next number but one, as its checkpoint says: no violation."""
    with StalenessCallback(trace=path, run="R", sinks=[]) as staleness:
        staleness.on_step([])
        state = staleness.state_dict()
    staleness = StalenessCallback(trace=path, run="R", sinks=[])
    staleness.load_state_dict(state)
    with full_disk(path):
        staleness.on_step([])
        state = staleness.state_dict()
        staleness._recorder.close()
    with StalenessCallback(trace=path, run="R", sinks=[]) as staleness:
        staleness.load_state_dict(state)
        assert staleness.on_step([]) is not None
        assert staleness.missing() == {}
    starts = [line["incarnation"] for line in lines(path) if line["event"] == "run_started"]
    assert starts == [0, 2]


def test_the_sum_of_a_run_whose_way_back_is_held(path: Path) -> None:
    """Steps that are undone are taken off as soon as their undoing stands in the trace."""
    with StalenessCallback(trace=path, run="R", sinks=[]) as staleness:
        for name in "ab":
            call = Call(call=name, engine="engine", version=0, tokens=10, after=0, until=0)
            staleness.on_publish(name, calls=[call])
        state = staleness.state_dict()
        for name in "ab":
            staleness.on_step([name])
    with StalenessCallback(trace=path, run="R", sinks=[]) as staleness:
        staleness.load_state_dict(state)
        with full_disk(path):
            staleness.start()
        for name in "ab":
            staleness.on_step([name])
        assert staleness._recorder.trained == {0: 10, 1: 10}


def test_a_refused_step_without_a_trace(path: Path) -> None:
    """It is no violation, with a trace or without one."""
    for trace in (path, None):
        with StalenessCallback(trace=trace, sinks=[]) as staleness:
            staleness.on_publish("g", calls=[Call(call="c", engine="e", version=0, tokens=1)])
            assert staleness.on_step(["g"], updates=-1) is None
            step = staleness.on_step([])
            assert step is not None
            assert (step.step, step.violations) == (2, 0)
            said = staleness.missing()
            assert not [what for what in said if what.startswith("violations")], said


def test_a_step_after_the_end_changes_nothing(path: Path) -> None:
    """Nothing is heard then, with a trace or without one."""
    for trace in (path, None):
        with StalenessCallback(trace=trace, sinks=[]) as staleness:
            staleness.on_publish("g", calls=[Call(call="c", engine="e", version=0, tokens=1)])
        staleness.on_step([])
        assert staleness.age("g").coverage == 1
