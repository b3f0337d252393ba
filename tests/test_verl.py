"""verl: what its rows are made of, how its steps become updates, and its own classes at work.

What needs verl is skipped where it is not installed; ``make verl-tests`` makes an environment.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rl_staleness.callback import StalenessCallback
from rl_staleness.integrations import verl
from rl_staleness.integrations.verl import FIELD, measured
from rl_staleness.integrations.verl_measurement import STATE, Measurement, Row
from rl_staleness.integrations.verl_rows import Attempt, aligned, evidence, minibatches
from tests import verl_fakes as fakes

ROOT = Path(__file__).parents[1]


def events(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def measurement(tmp_path: Path, **options: Any) -> Measurement:
    """A run of one server that has the weights of label 0."""
    callback = StalenessCallback(
        trace=tmp_path / "trace.jsonl", sinks=[], late_masks=options.get("late_masks", False)
    )
    made = Measurement(callback, servers=["s"], **options)
    with made.refit(["s"], 0):
        pass
    return made


def row(made: Measurement, key: str, *attempts: tuple[int | None, int], **changes: Any) -> Row:
    """A row that is trained whole, from (label, number of tokens) of its attempts."""
    tokens = [Attempt("s", label, [label or 0] * number) for label, number in attempts]
    ids = [token for attempt in tokens for token in attempt.tokens]
    found = evidence(tokens, [(ids, [1] * len(ids))], process=made.process)[0]
    return Row(key, changes.pop("tag", {}), {**found, **changes})


# Rows.


def test_every_attempt_of_a_resumed_rollout_is_a_call_of_its_own() -> None:
    """Five tokens of label 3, none of 4, seven of 5 and four of 6: verl itself keeps 3 and 6."""
    attempts = [
        Attempt("a", 3, [1] * 5),
        Attempt("b", 4, []),
        Attempt("b", 5, [2] * 7),
        Attempt("a", 6, [3] * 4),
    ]
    ids = [1] * 5 + [2] * 7 + [3] * 4
    (found,) = evidence(attempts, [(ids, [1] * 16)], process="p")
    assert found["calls"] == [
        ["a", 3, 5, [[0, 5, 0]]],
        ["b", 4, 0, []],
        ["b", 5, 7, [[0, 7, 5]]],
        ["a", 6, 4, [[0, 4, 12]]],
    ]
    assert found["unknown"] == 0


@pytest.mark.parametrize(
    ("attempts", "ids", "mask", "pieces", "unknown"),
    [
        # A response that was cut to its length.
        ([[1, 2], [3, 4]], [1, 2, 3], [1, 1, 1], [[(0, 2, 0)], [(0, 1, 2)]], 0),
        # Tool tokens between two turns.
        ([[1, 2], [3]], [1, 2, 9, 9, 3], [1, 1, 0, 0, 1], [[(0, 2, 0)], [(0, 1, 4)]], 0),
        # An end token that the template appended, and that the loss sees.
        ([[1, 2], [3]], [1, 2, 7, 9, 3], [1, 1, 1, 0, 1], [[(0, 2, 0)], [(0, 1, 4)]], 1),
        # A turn that is not in the row.
        ([[1, 2], [5, 6], [3]], [1, 2, 9, 3], [1, 1, 0, 1], [[(0, 2, 0)], [], [(0, 1, 3)]], 0),
        # Tokens that were made anew from text.
        ([[1, 2, 3]], [4, 2, 3], [1, 1, 1], [[]], 3),
        ([], [], [], [], 0),
    ],
)
def test_trained_tokens_are_found_in_the_attempts_that_made_them(
    attempts: list[list[int]],
    ids: list[int],
    mask: list[int],
    pieces: list[list[tuple[int, int, int]]],
    unknown: int,
) -> None:
    """A token that no attempt made is unknown, never somebody's."""
    assert aligned(attempts, ids, mask) == (pieces, unknown)


def test_an_attempt_that_no_row_of_its_session_trains_is_a_call_of_the_first() -> None:
    """Two outputs, three attempts."""
    attempts = [Attempt("s", 0, [1]), Attempt("s", 0, [2]), Attempt("s", 0, [3])]
    first, second = evidence(attempts, [([1], [1]), ([3], [1])], process="p")
    assert [call[3] for call in first["calls"]] == [[[0, 1, 0]], []]
    assert [call[3] for call in second["calls"]] == [[[0, 1, 0]]]


def test_rows_of_an_update_are_cut_as_the_ranks_cut_them() -> None:
    """Each rank gets a contiguous share and cuts that; every epoch does the same."""
    keys = list("abcdefgh")
    assert minibatches(keys, rows=4, ranks=2, epochs=1) == [list("abef"), list("cdgh")]
    assert minibatches(keys, rows=8, ranks=2, epochs=2) == [keys, keys]
    assert minibatches(keys, rows=3, ranks=1, epochs=1) is None
    assert minibatches(keys, rows=2, ranks=4, epochs=1) is None


# Steps.


def test_each_attempt_has_its_own_version_and_coverage_is_whole(tmp_path: Path) -> None:
    """Labels count steps of two updates: label 1 is version 2."""
    made = measurement(tmp_path)
    for step in (1, 2):
        made.publish([row(made, f"u{step}_0_0", (0, 2))])
        made.count(2)
        made.update([f"u{step}_0_0"], is_padding=[False], cut=[[f"u{step}_0_0"]] * 2)
        made.step(step)
        with made.refit(["s"], step):
            pass
    made.publish([row(made, "u3_0_0", (0, 5), (1, 0), (2, 3))])
    made.count(1)
    made.update(["u3_0_0"], is_padding=[False], cut=[["u3_0_0"]])
    made.step(3)
    numbers = made.callback.metrics(3)
    assert numbers["staleness/batch_age"] == (5 * 4 + 3 * 0) / 8
    assert numbers["staleness/coverage"] == 1
    assert numbers["staleness/violations"] == 0
    assert numbers["staleness/batch_age_refits"] == 5 * 2 / 8
    published = [e for e in events(tmp_path / "trace.jsonl") if e["event"] == "group_published"]
    assert published[-1]["tokens"] == {"0": 5, "4": 3}  # settled: nothing else to be known


def test_a_label_that_no_refit_gave_costs_coverage(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Three tokens of a server that says no label beside nine of one that does."""
    made = measurement(tmp_path)
    made.publish([row(made, "u_0_0", (0, 9), (None, 3))])
    made.publish([row(made, "w_0_0", (7, 3))])
    made.count(1)
    made.update(["u_0_0", "w_0_0"], is_padding=[False] * 2, cut=[["u_0_0", "w_0_0"]])
    made.step(1)
    assert made.callback.metrics(1)["staleness/coverage"] == 1  # nothing but version 0 existed
    with made.refit(["s"], 1):
        pass
    made.publish([row(made, "v_0_0", (1, 9), (None, 3))])
    made.count(1)
    made.update(["v_0_0"], is_padding=[False], cut=[["v_0_0"]])
    made.step(2)
    numbers = made.callback.metrics(2)
    assert numbers["staleness/coverage"] == 9 / 12
    assert (numbers["staleness/age_lo"], numbers["staleness/age_hi"]) == (0, 3 / 12)
    made.close("finished")
    assert len([r for r in caplog.records if "training goes on" in r.message]) == 1


def test_a_row_without_attempts_has_the_bounds_of_its_tags(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Both labels the same is exact: its attempts lie between the first and the last."""
    made = measurement(tmp_path)
    made.count(1)
    made.step(1)
    with made.refit(["s"], 1):
        pass
    for key, first in (("u_0_0", 1), ("v_0_0", 0)):
        tag = {"min_global_steps": first, "max_global_steps": 1, "response_len": 9, "trained": 6}
        made.publish([Row(key, tag, None)])
    made.count(1)
    made.update(["u_0_0", "v_0_0"], is_padding=[False] * 2, cut=[["u_0_0", "v_0_0"]])
    made.step(2)
    numbers = made.callback.metrics(2)
    assert numbers["staleness/tokens"] == 12
    assert numbers["staleness/coverage"] == 0.5
    assert (numbers["staleness/age_lo"], numbers["staleness/age_hi"]) == (0, 0.5)
    assert len([r for r in caplog.records if "training goes on" in r.message]) == 1


def test_padding_rows_never_count(tmp_path: Path) -> None:
    """verl copies the attempts of a real row into them."""
    made = measurement(tmp_path)
    real = row(made, "u_0_0", (0, 4))
    padding = Row("pad_0_0", {"is_padding": True}, real.found)
    made.publish([real, padding])
    made.count(1)
    made.update(["u_0_0", "pad_0_0"], is_padding=[False, True], cut=[["u_0_0", "pad_0_0"]])
    made.step(1)
    assert made.callback.metrics(1)["staleness/tokens"] == 4
    lines = events(tmp_path / "trace.jsonl")
    assert lines[-1]["batches"] == [["u"]]
    assert [e["group"] for e in lines if e["event"] == "group_published"] == ["u"]


def test_rows_are_the_groups_where_a_sample_is_split(tmp_path: Path) -> None:
    """The second mini-batch is a version further, and the group is the row."""
    made = measurement(tmp_path, by_row=True)
    made.publish([row(made, "u_0_0", (0, 4)), row(made, "u_1_0", (0, 2))])
    made.count(2)
    made.update(["u_0_0", "u_1_0"], is_padding=[False] * 2, cut=[["u_0_0"], ["u_1_0"]])
    made.step(1)
    assert made.callback.metrics(1)["staleness/batch_age"] == 2 / 6
    assert events(tmp_path / "trace.jsonl")[-1]["batches"] == [["u_0_0"], ["u_1_0"]]


def test_an_unknown_split_is_groups_and_updates(tmp_path: Path) -> None:
    """A shuffled sample, and a prompt whose rows are in several updates: only `age_hi` grows."""
    made = measurement(tmp_path)
    made.publish([row(made, "u_0_0", (0, 4)), row(made, "u_1_0", (0, 2))])
    made.count(2)
    made.update(["u_0_0", "u_1_0"], is_padding=[False] * 2, cut=None)
    made.step(1)
    with made.refit(["s"], 1):
        pass
    made.publish([row(made, "v_0_0", (1, 4)), row(made, "w_0_0", (1, 2))])
    made.count(2)
    made.update(["v_0_0", "w_0_0"], is_padding=[False] * 2, cut=[["v_0_0"], ["w_0_0"]])
    made.step(2)
    for step in (1, 2):
        line = [e for e in events(tmp_path / "trace.jsonl") if e["event"] == "step_trained"][
            step - 1
        ]
        assert (line["updates"], "batches" in line) == (2, False)
    numbers = made.callback.metrics(2)
    assert (numbers["staleness/batch_age"], numbers["staleness/age_hi"]) == (0, 1)


def test_a_sample_of_the_critics_warm_up_is_dropped(tmp_path: Path) -> None:
    """No policy update: the version stays, nothing was trained."""
    made = measurement(tmp_path)
    made.publish([row(made, "u_0_0", (0, 4))])
    made.step(1)
    numbers = made.callback.metrics(1)
    assert (numbers["staleness/tokens"], numbers["staleness/dropped_tokens"]) == (0, 4)
    assert (made.callback.version, made.callback.step) == (0, 2)


def test_masks_that_change_after_the_rollout_are_those_that_count(tmp_path: Path) -> None:
    """Rejection sampling leaves tokens 1, 2 and 6 of an attempt of 5 and one of 3 tokens."""
    made = measurement(tmp_path, late_masks=True)
    made.publish([row(made, "u_0_0", (0, 5), (0, 3))])
    made.count(1)
    made.update(["u_0_0"], is_padding=[False], cut=[["u_0_0"]])
    made.step(1, masks={"u_0_0": [0, 1, 1, 0, 0, 0, 1, 0]})
    assert made.callback.metrics(1)["staleness/tokens"] == 3
    line = events(tmp_path / "trace.jsonl")[-1]
    assert line["trained"] == {"u": {"u_0_0.0": [[1, 3]], "u_0_0.1": [[1, 2]]}}


def test_a_refit_that_fails_is_aborted_and_gives_no_label(tmp_path: Path) -> None:
    """The error goes on to verl."""
    made = measurement(tmp_path)
    with pytest.raises(RuntimeError), made.refit(["s"], 1):
        raise RuntimeError("no route")
    assert events(tmp_path / "trace.jsonl")[-1]["event"] == "refit_aborted"
    assert made.labels == {0: 0}


def test_rows_of_before_a_restart_have_the_versions_of_the_checkpoint(tmp_path: Path) -> None:
    """Two updates a step; a row of label 0 waits through the restart after step 1."""
    made = measurement(tmp_path, run="r")
    waiting = row(made, "u_0_0", (0, 4))
    made.publish([row(made, "t_0_0", (0, 4))])
    made.count(2)
    made.update(["t_0_0"], is_padding=[False], cut=[["t_0_0"]] * 2)
    made.step(1)
    with made.refit(["s"], 1):
        pass
    late = row(made, "v_0_0", (1, 4))
    made.save(tmp_path / "global_step_1")
    state = json.loads((tmp_path / "global_step_1" / STATE).read_text())
    assert state == {"version": 2, "labels": {"0": 0, "1": 2}, "run": "r"}
    made.close("finished")

    trace = tmp_path / "again.jsonl"
    callback = StalenessCallback(trace=trace, sinks=[], version=2, step=2)
    again = Measurement(callback, servers=["s"], labels={0: 0, 1: 2})
    with again.refit(["s"], 1):
        pass
    again.publish([waiting, late, row(again, "w_0_0", (1, 4))])
    keys = ["u_0_0", "v_0_0", "w_0_0"]
    again.count(1)
    again.update(keys, is_padding=[False] * 3, cut=[keys])
    again.step(2)
    numbers = again.callback.metrics(2)
    assert (numbers["staleness/batch_age"], numbers["staleness/coverage"]) == (8 / 12, 1)
    assert numbers["staleness/violations"] == 0
    restored, newer, fresh = [e for e in events(trace) if e["event"] == "group_published"]
    assert (restored["restored"], restored["calls"][0]["spans"]) == (True, [[0, 4, 0]])
    assert (newer["restored"], newer["calls"][0]["spans"]) == (True, [[0, 4, 2]])
    assert "restored" not in fresh


def test_the_split_of_a_sample_is_known_unless_it_is_shuffled(tmp_path: Path) -> None:
    """One mini-batch is all of the sample in any order; two epochs are two updates on it."""
    trainer = SimpleNamespace(
        config=fakes.config(tmp_path),
        actor_rollout_wg=SimpleNamespace(_dispatch_info={"actor": [0, 0, 1, 1]}),
    )
    actor = trainer.config.actor_rollout_ref.actor
    two, four = fakes.Batch(list("ab"), []), fakes.Batch(list("abcd"), [])
    assert verl._cut(trainer, four) == [["a", "c"], ["b", "d"]]
    actor.shuffle, actor.ppo_epochs = True, 2
    assert verl._cut(trainer, four) is None
    assert verl._cut(trainer, two) == [["a", "b"], ["a", "b"]]
    assert (verl._num_updates(trainer, four), verl._num_updates(trainer, two)) == (4, 2)


# verl's hooks, by stand-ins.


def generated(trainer: Any, queue: fakes.Queue, uid: str, *answers: Any) -> None:
    """Run two sessions of a prompt: the answers given, and one of two tokens of the last label."""
    plain = fakes.ActorClass(fakes.AgentLoopWorkerTQ)
    worker_class = verl._recording_worker(plain).__ray_actor_class__
    label = answers[-1].extra_fields["global_steps"]
    for session, given in enumerate((list(answers), [fakes.answer([8, 9], label)])):
        client = trainer.get_llm_client()
        client.answers = given
        worker = worker_class(client, queue)
        run = worker._run_agent_loop(
            {}, {"validate": False}, agent_name="a", uid=uid, session_id=session
        )
        asyncio.run(run)
        trainer.replay_buffer.partitions["train"][f"{uid}_{session}_0"] = {}


def trained_run(
    folder: Path, queue: fakes.Queue, loops: list[Any], **options: Any
) -> tuple[Any, list[dict[str, Any]]]:
    trainer = measured(fakes.PPOTrainer)(config=fakes.config(folder, **options))
    trainer.saves = True
    trainer.init()
    trainer.fit(loops)
    return trainer, events(folder / "rollout_trace.jsonl")


def test_a_run_of_the_trainer_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two updates a step; the third prompt was aborted under label 0 and resumed under 1."""
    queue = fakes.install(monkeypatch)

    def first(trainer: Any) -> None:
        for uid in ("a", "b"):
            generated(trainer, queue, uid, fakes.answer([1, 2, 3], 0))

    def second(trainer: Any) -> None:
        cut = fakes.answer([1, 2, 3], 0, "aborted"), fakes.answer([], 1, "aborted")
        generated(trainer, queue, "c", *cut, fakes.answer([4, 5, 6, 7], 1))
        generated(trainer, queue, "d", fakes.answer([5], 1))

    trainer, lines = trained_run(tmp_path, queue, [first, second])
    one, two = trainer.logged
    assert one["staleness/batch_age"] == 5 / 10  # the second sample is an update further
    assert two["staleness/batch_age"] == (3 * 2 + 3 * 1) / 12
    assert two["staleness/coverage"] == two["training/off_policy/trajectory_staleness/mean"] * 2
    assert two["staleness/violations"] == 0
    assert [e["batches"] for e in lines if e["event"] == "step_trained"] == [
        [["a"], ["b"]],
        [["c"], ["d"]],
    ]
    assert [e["version"] for e in lines if e["event"] == "refit_done"] == [0, 2, 4]
    assert lines[-1] == {**lines[-1], "event": "run_finished", "status": "finished"}
    state = json.loads((tmp_path / "global_step_2" / STATE).read_text())
    assert (state["version"], state["labels"]) == (4, {"0": 0, "1": 2})
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_detaching_restores_every_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What verl made is what the trainer holds again, with all that happened to it meanwhile."""
    queue = fakes.install(monkeypatch)
    trainer, _ = trained_run(tmp_path, queue, [])
    assert type(trainer.checkpoint_manager) is fakes.CheckpointEngineManager
    assert type(trainer.replay_buffer) is fakes.ReplayBuffer
    assert trainer.checkpoint_manager.sent == [0]
    assert type(trainer.get_llm_client()) is fakes.FullyAsyncLLMServerClient
    trainer.global_steps = 1
    trainer.step({}, {})  # and goes on without us


def test_evicted_groups_are_dropped_with_their_tokens_and_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stale, filtered and failed as verl says it; what is cleared beside that is surplus."""
    queue = fakes.install(monkeypatch)

    def loop(trainer: Any) -> None:
        for uid in ("s", "f", "x", "o", "a", "b"):
            generated(trainer, queue, uid, fakes.answer([1, 2, 3], 0))
        buffer = trainer.replay_buffer
        buffer._evict_terminal_groups(1, "train", ({"s"}, {"f"}, {"x"}, {}))
        buffer._clear_groups("train", {"o"})
        assert list(buffer.partitions["train"]) == ["a_0_0", "a_1_0", "b_0_0", "b_1_0"]

    trainer, lines = trained_run(tmp_path, queue, [loop])
    dropped = {e["group"]: e["reason"] for e in lines if e["event"] == "group_dropped"}
    assert dropped == {"s": "stale", "f": "filtered", "x": "failed", "o": "surplus"}
    assert trainer.logged[0]["staleness/dropped_tokens"] == 20


def test_validation_rows_carry_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are in no group."""
    queue = fakes.install(monkeypatch)
    plain = fakes.ActorClass(fakes.AgentLoopWorkerTQ)
    client = fakes.LLMServerClient(None)
    client.answers = [fakes.answer([1], 0)]
    worker = verl._recording_worker(plain).__ray_actor_class__(client, queue)
    trajectory = {"validate": True}
    asyncio.run(worker._run_agent_loop({}, trajectory, agent_name="a", uid="v", session_id=0))
    assert FIELD not in queue.rows["v_0_0"]["extra_fields"]


def test_a_failing_weight_sync_raises_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is in the trace as aborted."""
    fakes.install(monkeypatch)
    trainer = measured(fakes.PPOTrainer)(config=fakes.config(tmp_path))
    trainer._setup()
    trainer.checkpoint_manager.error = OSError("gone")
    with pytest.raises(OSError, match="gone"):
        trainer.checkpoint_manager.update_weights(0)
    assert events(tmp_path / "rollout_trace.jsonl")[-1]["event"] == "refit_aborted"
    trainer.checkpoint_manager.error = None

    async def inside() -> Any:
        return await trainer.checkpoint_manager.update_weights(0)

    assert asyncio.run(inside()) == {"sync": 1}
    trainer.detach_staleness()


def test_lost_footing_costs_coverage_and_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The field is gone from the queue in the middle of the run; training goes on."""
    queue = fakes.install(monkeypatch)

    def loop(trainer: Any) -> None:
        label = trainer.global_steps - 1
        for uid in (f"a{label}", f"b{label}"):
            generated(trainer, queue, uid, fakes.answer([1, 2, 3], label))
            if label:
                for session in (0, 1):
                    key = f"{uid}_{session}_0"
                    del queue.rows[key]["extra_fields"]
                    trainer.replay_buffer.partitions["train"][key] = {
                        "min_global_steps": 0,
                        "max_global_steps": label,
                        "response_len": 3,
                    }

    trainer, _ = trained_run(tmp_path, queue, [loop, loop, loop])
    assert [m["staleness/coverage"] for m in trainer.logged] == [1, 0, 0]
    assert [m["staleness/tokens"] for m in trainer.logged] == [10, 10, 10]
    errors = [r for r in caplog.records if "failed; training goes on" in r.message]
    assert len(errors) == 1


def test_strict_lets_what_goes_wrong_raise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user who asks for it wants to know at once."""
    queue = fakes.install(monkeypatch)

    def loop(trainer: Any) -> None:
        for uid in ("a", "b"):
            generated(trainer, queue, uid, fakes.answer([1, 2, 3], 0))
            del queue.rows[f"{uid}_0_0"]["extra_fields"]

    with pytest.raises(KeyError, match="extra_fields"):
        trained_run(tmp_path, queue, [loop], staleness={"strict": True})


@pytest.mark.parametrize(
    ("staleness", "message"),
    [
        ({"tarce": "x"}, r"trainer\.staleness\.tarce: there is no such option"),
        ({"timeout": "soon"}, "timeout"),
    ],
)
def test_a_wrong_option_raises_at_construction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staleness: dict[str, Any], message: str
) -> None:
    """One line that names it."""
    fakes.install(monkeypatch)
    with pytest.raises(ValueError, match=message):
        measured(fakes.PPOTrainer)(config=fakes.config(tmp_path, staleness=staleness)).init()


def test_options_reach_the_callback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The trace stands where it is asked for, and warnings are given."""
    queue = fakes.install(monkeypatch)
    options = {"trace": str(tmp_path / "t.jsonl"), "run": "mine", "warn_age_above": 0.1}

    def loop(trainer: Any) -> None:
        for uid in ("a", "b"):
            generated(trainer, queue, uid, fakes.answer([1, 2, 3], 0))

    trainer = measured(fakes.PPOTrainer)(config=fakes.config(tmp_path, staleness=options))
    assert trainer.config.trainer.v1.trainer_mode == "separate_async"
    loops = trainer.config.actor_rollout_ref.rollout.agent.agent_loop_manager_class
    assert loops == "rl_staleness.integrations.verl.AgentLoopManager"
    trainer.init()
    trainer.fit([loop])
    assert events(tmp_path / "t.jsonl")[0]["run"] == "mine"
    assert any("batch age" in r.message for r in caplog.records)


def test_a_checkpoint_of_a_run_that_was_not_measured_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The count is taken from the configuration: two samples a step, an update each."""
    fakes.install(monkeypatch)

    class Resumed(fakes.PPOTrainer):
        def _setup(self) -> None:
            super()._setup()
            self.global_steps = 7

    trainer = measured(Resumed)(config=fakes.config(tmp_path))
    trainer.init()
    assert (trainer._staleness.callback.version, trainer._staleness.callback.step) == (14, 8)
    assert "14 policy updates are assumed" in caplog.text
    trainer.detach_staleness()


# Other versions.


def test_an_untested_version_is_named_and_a_different_one_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What is missing is named; verl goes on without the mode."""
    trainers: dict[str, Any] = {}

    def register_trainer(name: str) -> Any:
        return lambda cls: trainers.setdefault(name, cls)

    places = {
        "verl.trainer.ppo.v1.trainer_base": SimpleNamespace(PPOTrainer=fakes.PPOTrainer),
        "verl.trainer.ppo.v1.replay_buffer": SimpleNamespace(ReplayBuffer=fakes.ReplayBuffer),
        "verl.trainer.ppo.v1.agent_loop_tq": SimpleNamespace(
            AgentLoopWorkerTQ=fakes.ActorClass(fakes.AgentLoopWorkerTQ)
        ),
        "verl.workers.rollout.llm_server": SimpleNamespace(LLMServerClient=fakes.LLMServerClient),
        "verl.checkpoint_engine": SimpleNamespace(
            CheckpointEngineManager=fakes.CheckpointEngineManager
        ),
        "verl.trainer.ppo.v1": SimpleNamespace(
            register_trainer=register_trainer, get_trainer_cls=lambda name: fakes.PPOTrainer
        ),
    }
    for name, module in places.items():
        monkeypatch.setitem(sys.modules, name, module)  # type: ignore[arg-type]
    monkeypatch.setattr(verl, "_installed", lambda: "0.10.0")
    verl.register()
    assert sorted(trainers) == [
        "staleness_colocate_async",
        "staleness_separate_async",
        "staleness_sync",
    ]
    assert "verl 0.10.0 was not tested (tested: 0.9.1)" in caplog.text
    trainers.clear()

    class Renamed:
        def _acquire_server(self, request_id: str) -> None: ...
        def generate(self, request_id: str, *, tokens: list[int]) -> None: ...

    places["verl.workers.rollout.llm_server"].LLMServerClient = Renamed
    places["verl.checkpoint_engine"].CheckpointEngineManager = object
    with pytest.raises(RuntimeError) as error:
        verl.register()
    for part in (
        "verl 0.10.0 cannot be measured (tested: 0.9.1)",
        "LLMServerClient.generate has no 'prompt_ids'",
        "CheckpointEngineManager.update_weights is not there",
    ):
        assert part in str(error.value)
    verl._register_where_verl_loads_us()
    assert not trainers


# verl's own classes.


def needs_verl() -> None:
    pytest.importorskip("ray", reason="verl needs ray")
    pytest.importorskip("transfer_queue", reason="verl is not installed: make verl-tests")
    pytest.importorskip("verl", reason="verl is not installed: make verl-tests")


@pytest.mark.parametrize("name", fakes.REAL)
def test_stand_ins_have_the_signatures_of_verl(name: str) -> None:
    """Every method that a stand-in has and verl has takes the same parameters."""
    needs_verl()
    import importlib

    real = getattr(importlib.import_module(fakes.REAL[name]), name)
    real = getattr(real, "__ray_actor_class__", real)
    fake = getattr(fakes, name)
    methods = [m for m in vars(fake) if callable(getattr(fake, m)) and m != "__init__"]
    compared = 0
    for method in methods:
        if method == "_update":
            continue
        ours = list(inspect.signature(getattr(fake, method)).parameters)
        theirs = list(inspect.signature(getattr(real, method)).parameters)
        theirs = [each for each in theirs if each != "_ray_trace_ctx"]  # Ray adds that
        assert ours == theirs, f"{name}.{method}"
        compared += 1
    assert compared


def test_the_installed_verl_has_what_is_overridden() -> None:
    """And is a version that was tested."""
    needs_verl()
    assert verl.mismatches() == []
    assert verl._installed() in verl.TESTED


def test_the_example_is_a_command_line_that_verl_takes() -> None:
    """Each of its settings is one of verl's, or is added by `+`."""
    needs_verl()
    from hydra import compose, initialize_config_dir

    script = (ROOT / "examples" / "verl_grpo.sh").read_text()
    assert f"VERL_USE_EXTERNAL_MODULES={verl.__name__}" in script
    settings = shlex.split(script.split("main_ppo")[1].replace("\\\n", " "))
    overrides = [re.sub(r"\$(\w+|\{.*\})", "1", each) for each in settings if each != "$@"]
    configs = str(Path(sys.modules["verl"].__file__ or "").parent / "trainer" / "config")
    with initialize_config_dir(configs, version_base=None):
        config = compose("ppo_trainer", overrides=overrides)
    assert config.trainer.v1.trainer_mode.removeprefix(verl.PREFIX) in verl.MODES
    assert set(config.trainer.staleness) <= set(verl.OPTIONS)


def run_verl(folder: Path, *overrides: str, **options: Any) -> dict[str, Any]:
    """One run of verl's trainer in a process of its own; what its actor trained."""
    folder.mkdir(exist_ok=True)
    asked = json.dumps({"overrides": overrides, **options})
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "verl_run.py"), str(folder), asked],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    found: dict[str, Any] = json.loads((folder / "truth.json").read_text())
    return found


def check(folder: Path, truth: dict[str, Any], *, updates: int) -> list[dict[str, Any]]:
    """Every trained token counts under the version of the weights that made it, nothing else."""
    trace = folder / "checkpoints" / "rollout_trace.jsonl"
    command = [sys.executable, "-m", "rl_staleness.cli", "steps", "--json", str(trace)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    steps = {line["step"]: line for line in map(json.loads, done.stdout.splitlines())}
    assert truth["steps"]
    for number, samples in truth["steps"].items():
        made: dict[str, int] = {}
        for label, tokens in (item for sample in samples for item in sample.items()):
            version = str(int(label) * updates)
            made[version] = made.get(version, 0) + tokens
        step = steps[int(number)]
        assert step["tokens_by_version"] == made
        assert (step["coverage"], step["violations"]) == (1, 0)
        assert step["version"] == (int(number) - 1) * updates
    return [*steps.values()]


@pytest.mark.slow
def test_verl_itself_colocated_with_a_restart(tmp_path: Path) -> None:
    """Every token's weights are in the token: two updates a step, restarted after step 4."""
    needs_verl()
    mode = (
        "trainer.v1.trainer_mode=staleness_colocate_async",
        "trainer.v1.colocate_async.num_warmup_batches=2",
        "trainer.save_freq=2",
    )
    split = "actor_rollout_ref.actor.ppo_mini_batch_size=2"
    options = {"seconds_a_token": 0.05}
    steps = "trainer.total_training_steps"
    truth = run_verl(tmp_path, *mode, split, f"{steps}=4", **options)
    check(tmp_path, truth, updates=2)
    assert truth["logged"]["staleness/coverage"] == 1
    assert "training/off_policy/trajectory_staleness/mean" in truth["logged"]
    own = ["verl.checkpoint_engine.base", "verl.trainer.ppo.v1.replay_buffer"]
    assert truth["types"] == own
    again = run_verl(tmp_path, *mode, split, f"{steps}=6", **options)
    assert sorted(again["steps"]) == ["5", "6"]
    every = check(tmp_path, again, updates=2)
    assert [step["step"] for step in every] == [1, 2, 3, 4, 5, 6]
    lines = events(tmp_path / "checkpoints" / "rollout_trace.jsonl")
    assert len({line["run"] for line in lines if line["event"] == "run_started"}) == 1
    assert any(line.get("restored") for line in lines)


@pytest.mark.slow
def test_verl_itself_separate_with_rollouts_that_are_resumed_and_groups_filtered(
    tmp_path: Path,
) -> None:
    """Two samples of one update a step; groups that are all alike are evicted and replaced."""
    needs_verl()
    truth = run_verl(
        tmp_path,
        "trainer.v1.trainer_mode=staleness_separate_async",
        "trainer.v1.separate_async.parameter_sync_step=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.hybrid_engine=false",
        "actor_rollout_ref.rollout.nnodes=1",
        "actor_rollout_ref.rollout.n_gpus_per_node=1",
        "actor_rollout_ref.rollout.checkpoint_engine.backend=nccl",
        "algorithm.filter_groups.enable=true",
        "algorithm.filter_groups.metric=reward",
        "trainer.total_training_steps=6",
        seconds_a_token=0.1,
    )
    check(tmp_path, truth, updates=2)
    lines = events(tmp_path / "checkpoints" / "rollout_trace.jsonl")
    assert {line["reason"] for line in lines if line["event"] == "group_dropped"} == {"filtered"}
    groups = [line["tokens"] for line in lines if line["event"].startswith("group")]
    assert any(len(tokens) > 1 for tokens in groups)  # attempts under several labels
    steps = [line for line in lines if line["event"] == "step_trained"]
    assert [[len(batch) for batch in step["batches"]] for step in steps] == [[2, 2]] * 6


@pytest.mark.slow
def test_verl_itself_in_step_with_rejected_tokens_and_sessions_that_fail(tmp_path: Path) -> None:
    """Rows that are missing are padded; what rejection leaves is what was trained."""
    needs_verl()
    truth = run_verl(
        tmp_path,
        "trainer.v1.trainer_mode=staleness_sync",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.ppo_epochs=2",
        "algorithm.rollout_correction.bypass_mode=false",
        "algorithm.rollout_correction.rollout_rs=token_k2",
        "algorithm.rollout_correction.rollout_rs_threshold=1.0",
        "trainer.total_training_steps=4",
        failing=5,
    )
    # An epoch is an update, and trains all of it again.
    twice = {
        step: [{label: 2 * n for label, n in sample.items()} for sample in samples]
        for step, samples in truth["steps"].items()
    }
    every = check(tmp_path, {**truth, "steps": twice}, updates=2)
    assert [step["batch_age"] for step in every] == [0.5] * 4
    lines = events(tmp_path / "checkpoints" / "rollout_trace.jsonl")
    rows = sum(len(e["calls"]) for e in lines if e["event"] == "group_published")
    assert rows < 4 * 8
    assert all("trained" in e for e in lines if e["event"] == "step_trained")
