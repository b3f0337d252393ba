"""TRL's own trainer, with rollouts that are made up here, or with a vLLM server and all the rest.

The first need no server: TRL takes a worker and a transfer of the user's. The others are marked:
there every trained token is held against the weights that sampled it, see `trl_runs`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import queue
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("trl")
pytest.importorskip("vllm")

import numpy as np
import psutil

from rl_staleness import read, steps
from rl_staleness.events import Call, GroupDropped, RunStarted, StepTrained
from rl_staleness.integrations import trl as integration
from rl_staleness.integrations.trl import StalenessCallback
from rl_staleness.integrations.trl_policy import ENGINE, Policy
from rl_staleness.integrations.trl_rollouts import Origin, Rewards, Turn, mark, origin_of
from rl_staleness.integrations.trl_window import merged
from rl_staleness.staleness import StepStaleness

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
PROMPT, COMPLETION = 2, 3


class Worker:
    """Rollouts that are there when they are asked for; each knows which sync made it, or not.

    Args:
        lag: a row is of the policy of so many syncs ago.
        says: rows say where their tokens are from, as those of TRL's own worker do.
    """

    def __init__(self, *, lag: int = 0, says: bool = True, tokens: int = COMPLETION) -> None:
        self.rollout_buffer = self
        self.metrics_queue: queue.Queue[Any] = queue.Queue()
        self.lag, self.says, self.tokens = lag, says, tokens
        self.model_version = self.num = 0
        self.policy: Callable[[], Policy] | None = None
        self.made: list[tuple[int, int]] = []
        self.stopped = 0

    def start(self) -> None:
        pass

    def stop(self) -> None:
        self.stopped += 1

    def check_health(self, stale_after_s: float) -> None:
        pass

    def update_model_version(self, model_version: int) -> None:
        self.model_version = model_version

    def qsize(self) -> int:
        return 1

    def get(self, timeout: float | None = None) -> Any:
        """The next row."""
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

        sync = max(1, self.model_version - self.lag)
        self.num += 1
        tokens = self.tokens
        metrics: dict[str, float] = {"reward": 1.0}
        if self.says and self.policy is not None:
            entry = next(s for s in self.policy()._syncs if s.model_version == sync)
            call = Call(
                call=f"r{self.num}",
                engine="server",
                version=entry.version,
                tokens=tokens,
                after=entry.refit,
                until=entry.refit,
            )
            turn = Turn(f"r{self.num}", "m", tokens, 0.0, 1.0)
            metrics = Rewards(metrics)
            metrics.origin = Origin(((turn, ((0, tokens),), call),), 0)
        return RolloutSample(
            prompt=[],
            completion=[],
            input_ids=np.arange(3, 3 + PROMPT + tokens) + self.num % 7,
            completion_mask=np.array([0] * PROMPT + [1] * tokens),
            old_log_probs=np.full(PROMPT + tokens, -4.0, dtype=np.float32),
            advantage=1.0,
            model_version=sync,
            group_id=self.num // 4,
            metrics=metrics,
            enqueued_at=None,
        )


class Transfer:
    """Weights go nowhere."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def init_weight_transfer(self) -> None:
        pass

    def pause(self) -> None:
        self.said.append("pause")

    def send_weights(self, iterator: Iterator[Any]) -> None:
        self.said.append("send")

    def resume(self) -> None:
        self.said.append("resume")

    def destroy(self) -> None:
        pass


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The example's tiny model; TRL's modules are made to run on a CPU, and put back."""
    before = dict(os.environ)
    sys.path.insert(0, str(EXAMPLES))
    from trl.experimental.async_grpo import async_grpo_trainer, packing, weight_transfer

    kept = [
        (module, dict(vars(module))) for module in (async_grpo_trainer, packing, weight_transfer)
    ]
    import trl_on_cpu

    trl_on_cpu.use_cpu()
    yield trl_on_cpu.write_model(tmp_path_factory.mktemp("trl") / "model")
    for module, names in kept:
        vars(module).update(names)
    sys.path.remove(str(EXAMPLES))
    os.environ.clear()
    os.environ.update(before)


Make = Callable[..., Any]


@pytest.fixture
def make(model: Path, tmp_path: Path) -> Make:
    """Makes a trainer, with a callback or with none."""
    from datasets import Dataset
    from trl.experimental.async_grpo.async_grpo_config import AsyncGRPOConfig
    from trl.experimental.async_grpo.async_grpo_trainer import AsyncGRPOTrainer
    from trl_on_cpu import CONFIG

    def trainer(*callbacks: Any, worker: Worker | None = None, **options: Any) -> Any:
        arguments: dict[str, Any] = {
            "output_dir": str(tmp_path / "out"),
            "max_steps": 4,
            "per_device_train_batch_size": 4,
            "token_budget": 0,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            **CONFIG,
            **options,
        }
        made = AsyncGRPOTrainer(
            model=str(model),
            args=AsyncGRPOConfig(**arguments),
            train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": "1"}]] * 8}),
            callbacks=list(callbacks),
            rollout_worker=worker or Worker(),
            weight_transfer=Transfer(),
        )
        for callback in callbacks:
            if isinstance(callback, StalenessCallback):
                made.rollout_worker.policy = lambda callback=callback: callback._policy
        return made

    return trainer


@pytest.fixture(autouse=True)
def no_server(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Where there is none, none is asked; the rows of `Worker` say what one would have seen."""
    monkeypatch.setattr(integration, "_server_of", lambda trainer: None)


def records(trainer: Any) -> list[dict[str, Any]]:
    return [record for record in trainer.state.log_history if "staleness/tokens" in record]


def logged(trainer: Any, name: str) -> list[Any]:
    return [record[f"staleness/{name}"] for record in records(trainer)]


def ages(trace: Path) -> list[float | None]:
    return [step.batch_age for step in steps(trace)]


def test_one_word_more_in_the_callbacks(make: Make, tmp_path: Path) -> None:
    """The loader is ahead: from the second step on a row is one version older than TRL says."""
    trace = tmp_path / "t.jsonl"
    trainer = make(StalenessCallback(trace=trace, sinks=[], strict=True))
    trainer.train()
    assert logged(trainer, "batch_age") == ages(trace) == [0, 1, 1, 1]
    assert [r["sample/staleness_mean"] for r in records(trainer)] == [0, 0, 0, 0]
    assert logged(trainer, "tokens") == [4 * COMPLETION] * 4
    assert [r["batch/trained_tokens_per_step"] for r in records(trainer)] == [4 * COMPLETION] * 4
    assert logged(trainer, "coverage") == [1] * 4
    assert logged(trainer, "violations") == [0] * 4


def test_all_numbers_of_the_trace_are_in_the_log(make: Make, tmp_path: Path) -> None:
    """Recomputed from the trace they are the same, to the last digit."""
    trace = tmp_path / "t.jsonl"
    trainer = make(StalenessCallback(trace=trace, sinks=[], strict=True), worker=Worker(lag=1))
    trainer.train()
    recomputed = [step.metrics() for step in steps(trace)]
    ours = [{k: v for k, v in r.items() if k.startswith("staleness/")} for r in records(trainer)]
    assert ours == recomputed
    assert [step.version for step in steps(trace)] == [0, 1, 2, 3]


def test_added_to_its_trainer(make: Make, tmp_path: Path) -> None:
    """The other way to add it sees the first sync too, though TRL's callbacks come before it."""
    trace = tmp_path / "t.jsonl"
    trainer = make()
    callback = StalenessCallback(trainer, trace=trace, sinks=[], strict=True)
    trainer.rollout_worker.policy = lambda: callback._policy
    trainer.add_callback(callback)
    trainer.train()
    assert logged(trainer, "batch_age") == ages(trace) == [0, 1, 1, 1]
    assert logged(trainer, "coverage") == [1] * 4


def test_gradient_accumulation(make: Make, tmp_path: Path) -> None:
    """Two micro-batches a step, of which only the first was pulled before the sync."""
    trace = tmp_path / "t.jsonl"
    trainer = make(
        StalenessCallback(trace=trace, sinks=[], strict=True), gradient_accumulation_steps=2
    )
    trainer.train()
    assert logged(trainer, "batch_age") == ages(trace) == [0, 0.5, 0.5, 0.5]
    assert logged(trainer, "tokens") == [8 * COMPLETION] * 4


def test_a_sync_every_two_steps(make: Make, tmp_path: Path) -> None:
    """TRL counts syncs; ages are in updates."""
    trace = tmp_path / "t.jsonl"
    trainer = make(
        StalenessCallback(trace=trace, sinks=[], strict=True), weight_sync_steps=2, max_steps=6
    )
    trainer.train()
    assert logged(trainer, "batch_age") == ages(trace) == [0, 1, 2, 1, 2, 1]
    assert logged(trainer, "batch_age_refits") == [0, 0, 1, 0, 1, 0]


def test_an_update_that_was_skipped(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the gradients overflowed the step has rows and no update."""
    trainer = make(StalenessCallback(trace=tmp_path / "t.jsonl", sinks=[], strict=True))
    skips = property(lambda accelerator: trainer.state.global_step == 1)
    monkeypatch.setattr(type(trainer.accelerator), "optimizer_step_was_skipped", skips)
    trainer.train()
    assert [step.version for step in steps(tmp_path / "t.jsonl")] == [0, 1, 1, 2]
    assert logged(trainer, "batch_age") == [0, 1, 0, 1]
    assert logged(trainer, "violations") == [0] * 4


def test_rows_that_are_dropped(make: Make, tmp_path: Path) -> None:
    """A row that TRL finds too old, or too long, is dropped and never trained."""
    trace = tmp_path / "t.jsonl"
    worker = Worker()
    get = worker.get

    def some_are_old(timeout: float | None = None) -> Any:
        sample = get(timeout)
        if worker.num % 3 == 0:
            sample.model_version -= 9
        return sample

    worker.get = some_are_old  # type: ignore[method-assign]
    trainer = make(StalenessCallback(trace=trace, sinks=[], strict=True), worker=worker)
    trainer.train()
    dropped = [event for event in read(trace) if isinstance(event, GroupDropped)]
    totals = [r.get("sample/dropped_stale_total", 0) for r in records(trainer)]
    assert {event.reason for event in dropped} == {"stale"}
    assert sum(totals) <= len(dropped) <= sum(totals) + 3  # of the batch that was not trained
    assert sum(logged(trainer, "dropped_tokens")) > 0
    assert logged(trainer, "tokens") == [4 * COMPLETION] * 4
    assert logged(trainer, "violations") == [0] * 4


def test_rows_that_are_too_long(make: Make, tmp_path: Path) -> None:
    """The planner by tokens drops what fits nowhere, and is one row further ahead."""
    trace = tmp_path / "t.jsonl"
    worker = Worker()
    get = worker.get

    def some_are_long(timeout: float | None = None) -> Any:
        worker.tokens = 40 if worker.num % 4 == 2 else COMPLETION
        return get(timeout)

    worker.get = some_are_long  # type: ignore[method-assign]
    callback = StalenessCallback(trace=trace, sinks=[], strict=True)
    trainer = make(callback, worker=worker, token_budget=16)
    trainer.train()
    dropped = [event for event in read(trace) if isinstance(event, GroupDropped)]
    assert {event.reason for event in dropped} == {"oversize"}
    assert [r["batch/trained_tokens_per_step"] for r in records(trainer)] == logged(
        trainer, "tokens"
    )
    assert logged(trainer, "violations") == [0] * 4


def test_a_log_record_of_several_steps(make: Make, tmp_path: Path) -> None:
    """It has their mean by tokens, and their sums."""
    trace = tmp_path / "t.jsonl"
    trainer = make(StalenessCallback(trace=trace, sinks=[], strict=True), logging_steps=2)
    trainer.train()
    assert ages(trace) == [0, 1, 1, 1]
    assert logged(trainer, "batch_age") == [0.5, 1]
    assert logged(trainer, "age_max") == [1, 1]
    assert logged(trainer, "tokens") == [8 * COMPLETION] * 2


def test_several_steps_as_one() -> None:
    """Every token weighs one; what has no token says nothing of ages."""

    def step(age: int | None, tokens: int) -> StepStaleness:
        numbers = dict.fromkeys(
            ("batch_age", "age_max", "age_p50", "age_p95", "age_in_flight", "age_in_queue"), age
        )
        return StepStaleness(
            step=1,
            version=9,
            tokens=tokens,
            tokens_by_version={},
            tokens_by_age={} if age is None else {age: tokens},
            batch_age_refits=age,
            coverage=None if age is None else 1.0,
            age_lo=age,
            age_hi=age,
            spanning_calls=1,
            violations=2,
            dropped_tokens=3,
            refit_seconds=0.5,
            **numbers,  # type: ignore[arg-type]
        )

    assert merged([step(2, 30), step(4, 10), step(None, 0)], prefix="") == {
        "batch_age": 2.5,
        "age_p50": 2,
        "age_p95": 4,
        "age_max": 4,
        "age_in_flight": 2.5,
        "age_in_queue": 2.5,
        "batch_age_refits": 2.5,
        "age_lo": 2.5,
        "age_hi": 2.5,
        "coverage": 1.0,
        "tokens": 40,
        "spanning_calls": 3,
        "dropped_tokens": 9,
        "violations": 6,
        "refit_seconds": 1.5,
    }
    assert merged([step(None, 0)], prefix="") == step(None, 0).metrics("")


def test_resumed_from_a_checkpoint(make: Make, tmp_path: Path) -> None:
    """The run goes on in its trace, with its updates, and TRL's number of the sync."""
    trace = tmp_path / "t.jsonl"
    saving = {"save_strategy": "steps", "save_steps": 2}
    make(StalenessCallback(trace=trace, sinks=[], strict=True), max_steps=3, **saving).train()
    trainer = make(StalenessCallback(trace=trace, sinks=[], strict=True), max_steps=5, **saving)
    trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    starts = [event for event in read(trace) if isinstance(event, RunStarted)]
    assert [(s.incarnation, s.version, s.step) for s in starts] == [(0, 0, 1), (1, 2, 3)]
    assert starts[0].run == starts[1].run
    trained = [event for event in read(trace) if isinstance(event, StepTrained)]
    assert [(event.step, event.version) for event in trained] == [
        (1, 0),
        (2, 1),
        (3, 2),
        (3, 2),
        (4, 3),
        (5, 4),
    ]
    resumed = [event for event in read(trace) if getattr(event, "restored", None)]
    assert resumed == []  # what was queued was lost with its worker
    assert logged(trainer, "batch_age")[-3:] == [0, 1, 1]
    assert logged(trainer, "coverage")[-3:] == [1] * 3
    assert logged(trainer, "violations")[-3:] == [0] * 3


def test_rollouts_of_the_users_own(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of rows that say nothing only the tag is known: bounds that hold the truth, one warning."""
    trace = tmp_path / "t.jsonl"
    trainer = make(
        StalenessCallback(trace=trace, sinks=[], strict=True), worker=Worker(says=False, lag=1)
    )
    with caplog.at_level(logging.WARNING):
        trainer.train()
    truth = [0, 1, 2, 2]
    for record, age in zip(records(trainer), truth, strict=True):
        assert record["staleness/age_lo"] <= age <= record["staleness/age_hi"]
    assert logged(trainer, "age_hi") == truth
    assert logged(trainer, "coverage") == [1, 1, 0, 0]
    assert logged(trainer, "violations") == [0] * 4
    assert len([r for r in caplog.records if "do not say where" in r.message]) == 1


@pytest.mark.parametrize("fails", [False, True], ids=["ends", "fails"])
def test_everything_is_put_back(make: Make, tmp_path: Path, fails: bool) -> None:
    """After the training, however it ended, the trainer is what it was."""
    trace = tmp_path / "t.jsonl"
    callback = StalenessCallback(trace=trace, sinks=[], strict=True)
    trainer = make(callback)
    parts = (trainer, trainer.weight_transfer, trainer.rollout_worker)
    before = [set(vars(part)) for part in parts]
    if fails:

        def breaks(*_: Any) -> None:
            raise RuntimeError("no network")

        send = trainer.weight_transfer.send_weights
        trainer.weight_transfer.send_weights = lambda it: (
            breaks() if trainer.state.global_step == 2 else send(it)
        )
        before[1].add("send_weights")
        with pytest.raises(RuntimeError, match="no network"):
            trainer.train()
    else:
        trainer.train()
    gone = [set(vars(part)) - had for part, had in zip(parts, before, strict=True)]
    assert not any({"training_step", "pause", "resume", "stop"} & more for more in gone)
    assert trainer._rollout_dataset.queue is trainer.rollout_worker
    assert trainer.rollout_worker.stopped == 1
    last = list(read(trace))[-1]
    assert last.status == ("failed" if fails else "finished")  # type: ignore[union-attr]
    callback.detach()


def test_footing_is_lost_in_the_middle(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows that come by another way cost coverage and one warning; the training goes on."""
    trace = tmp_path / "t.jsonl"
    trainer = make(StalenessCallback(trace=trace, sinks=[]))

    class Other(integration.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            if state.global_step == 2:
                trainer._rollout_dataset.queue = trainer.rollout_worker

    trainer.add_callback(Other())
    trainer.train()
    assert logged(trainer, "coverage") == [1, 1, 1, 0]
    assert logged(trainer, "tokens") == [4 * COMPLETION] * 4
    warnings = [r for r in caplog.records if r.name.startswith("rl_staleness.integrations.trl")]
    assert len([r for r in warnings if "did not come from its queue" in r.message]) == 1


def test_something_fails_in_here(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of ours is logged once, with its traceback, and is no error of the training."""
    monkeypatch.setattr(Policy, "call", lambda *_: 1 / 0)
    trainer = make(StalenessCallback(trace=tmp_path / "t.jsonl", sinks=[]))
    trainer.train()
    assert trainer.state.global_step == 4
    assert logged(trainer, "coverage") == [0] * 4
    assert logged(trainer, "tokens") == [4 * COMPLETION] * 4
    raised = [r for r in caplog.records if r.exc_info and r.exc_info[0] is ZeroDivisionError]
    assert len(raised) == 1


def test_another_trainer_is_refused() -> None:
    """In one line, before it trains, with the way out."""
    callback = StalenessCallback(sinks=[], trace=None)
    state = SimpleNamespace(is_world_process_zero=True)
    with pytest.raises(ValueError, match=r"trainer\.add_callback\(StalenessCallback\(trainer\)\)"):
        callback.on_train_begin(None, state, None, train_dataloader=[])
    with pytest.raises(ValueError, match=r"no trainer\.training_step\(model, inputs\)"):
        StalenessCallback(SimpleNamespace(), sinks=[], trace=None)


def test_a_second_training_is_not_silently_unmeasured(caplog: pytest.LogCaptureFixture) -> None:
    """A callback follows one training; TRL's trainer would call it again in the next."""
    callback = StalenessCallback(trace=None, sinks=[])
    callback.detach()
    state = SimpleNamespace(is_world_process_zero=True)
    callback.on_train_begin(None, state, None, train_dataloader=[])
    assert "give another training a StalenessCallback of its own" in caplog.text


@pytest.mark.parametrize(
    ("part", "name", "listed"),
    [
        ("", "training_step", "trainer.training_step(model, inputs)"),
        ("weight_transfer", "pause", "trainer.weight_transfer.pause()"),
        ("rollout_worker", "stop", "trainer.rollout_worker.stop()"),
    ],
)
def test_another_trl_is_refused_by_name(
    make: Make, monkeypatch: pytest.MonkeyPatch, part: str, name: str, listed: str
) -> None:
    """What is not there is named, with the version that is installed and those that were tested."""
    trainer = make()
    setattr(getattr(trainer, part) if part else trainer, name, None)
    monkeypatch.setattr(integration, "_trl_version", lambda: "9.9.9")
    with pytest.raises(ValueError, match=r"TRL 9\.9\.9 has no") as refused:
        StalenessCallback(trainer, sinks=[], trace=None)
    assert listed in str(refused.value)
    assert "1.16.0" in str(refused.value)


def test_another_trl_that_is_the_same(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is measured, and said not to be tested."""
    monkeypatch.setattr(integration, "_trl_version", lambda: "9.9.9")
    trainer = make(StalenessCallback(trace=tmp_path / "t.jsonl", sinks=[], strict=True))
    trainer.train()
    assert logged(trainer, "coverage") == [1] * 4
    assert len([r for r in caplog.records if "9.9.9 was not tested, 1.16.0 was" in r.message]) == 1


def test_bad_arguments_are_named_at_once() -> None:
    """Not first when the training begins."""
    with pytest.raises(ValueError, match="timeout"):
        StalenessCallback(timeout=-1)
    with pytest.raises(ValueError, match="sinks"):
        StalenessCallback(sinks=[3])  # type: ignore[list-item]


RANK = """
import json, os, sys
sys.path.insert(0, os.environ["EXAMPLES"])
import trl_on_cpu
trl_on_cpu.use_cpu()
from datasets import Dataset
from trl.experimental.async_grpo.async_grpo_config import AsyncGRPOConfig
from trl.experimental.async_grpo.async_grpo_trainer import AsyncGRPOTrainer
from rl_staleness.integrations import trl
from tests.test_trl import Transfer, Worker, logged, records

trl._server_of = lambda trainer: None
callback = trl.StalenessCallback(trace="t.jsonl", sinks=[], strict=True)
worker = Worker()
worker.policy = lambda: callback._policy
trainer = AsyncGRPOTrainer(
    model=os.environ["MODEL"],
    args=AsyncGRPOConfig(
        output_dir="out", max_steps=3, per_device_train_batch_size=4, token_budget=0,
        save_strategy="steps", save_steps=2, report_to="none", disable_tqdm=True,
        **trl_on_cpu.CONFIG,
    ),
    train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": "1"}]] * 8}),
    callbacks=[callback],
    rollout_worker=worker,
    weight_transfer=Transfer(),
)
assert trainer.accelerator.num_processes == 2
trainer.train()
if trainer.accelerator.is_main_process:
    found = {name: logged(trainer, name) for name in ("batch_age", "tokens", "coverage")}
    found["theirs"] = [r["batch/trained_tokens_per_step"] for r in records(trainer)]
    print("FOUND" + json.dumps(found))
else:
    assert callback.staleness is None and not records(trainer)
"""


@pytest.mark.slow
def test_two_ranks(model: Path, tmp_path: Path) -> None:
    """The first one holds the queue and hands out the rows of both: it alone tells, of all."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", RANK],
            cwd=tmp_path,
            env={
                **os.environ,
                "PYTHONPATH": path,
                "EXAMPLES": str(EXAMPLES),
                "MODEL": str(model),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": "2",
                "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "GLOO_SOCKET_IFNAME": "lo",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=500) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], [err[-2000:] for _, err in said]
    (line,) = [row for row in said[0][0].splitlines() if row.startswith("FOUND")]
    assert json.loads(line.removeprefix("FOUND")) == {
        "batch_age": [0, 1, 1],
        "tokens": [8 * COMPLETION] * 3,
        "theirs": [8 * COMPLETION] * 3,
        "coverage": [1] * 3,
    }


def test_a_run_of_weights_and_biases(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL's record has the numbers in its run, ours are charts there, and the trace is attached."""
    wandb = pytest.importorskip("wandb")
    from tests.wandb_files import RunFile

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    trace = tmp_path / "t.jsonl"
    trainer = make(StalenessCallback(trace=trace, strict=True), report_to="wandb")
    trainer.train()
    folder = Path(wandb.run.sync_dir)  # where an earlier run of this process had its own, perhaps
    wandb.finish()
    file = RunFile(folder)
    theirs = [r["train/staleness/batch_age"] for r in file.rows if "train/staleness/batch_age" in r]
    ours = [r["staleness/batch_age"] for r in file.rows if "staleness/batch_age" in r]
    assert theirs == ours == ages(trace) == [0, 1, 1, 1]
    own = [r for r in file.rows if "train/sample/staleness_mean" in r]
    assert [r["train/sample/staleness_mean"] for r in own] == [0] * 4
    assert len(file.of("artifact")) >= 1


# Rows of several turns: TRL's own reconciliation, on marked log-probabilities.


def answer(request: str, tokens: list[int]) -> dict[str, Any]:
    """A response of the server, marked."""
    logprobs = {"token_logprobs": [-0.5 * (1 + i) for i in range(len(tokens))]}
    made = {"id": request, "model": "m", "choices": [{"token_ids": tokens, "logprobs": logprobs}]}
    mark(made, begun=0.0, ended=1.0)
    return made["choices"][0]  # type: ignore[index,return-value]


def rows_of(turns: list[tuple[list[int], str, list[int]]]) -> list[list[tuple[str, Any]]]:
    """Prompt, request and output of each turn: where the rows that TRL makes of them are from."""
    from trl.experimental.async_grpo.async_rollout_worker import TurnRecord, _chain_to_sequences

    taken = [
        TurnRecord(prompt, output, answer(request, output)["logprobs"]["token_logprobs"])
        for prompt, request, output in turns
    ]
    rows, _ = _chain_to_sequences(taken, "r", 4)
    found = [origin_of(row.old_log_probs, row.completion_mask) for row in rows]
    assert all(origin.unknown == 0 for origin in found)
    assert all(isinstance(p, float) for row in rows for p in row.old_log_probs)
    return [[(turn.request, mask) for turn, mask, _ in origin.parts] for origin in found]


def test_turns_that_follow_one_another() -> None:
    """The tool's tokens between them are nobody's."""
    turns = [([1, 2], "a", [3, 4, 5]), ([1, 2, 3, 4, 5, 9, 9], "b", [6, 7])]
    assert rows_of(turns) == [[("a", ((0, 3),)), ("b", ((0, 2),))]]


def test_a_turn_of_which_the_end_was_written_anew() -> None:
    """What the template changed is context, and not trained."""
    turns = [([1, 2], "a", [3, 4, 5]), ([1, 2, 3, 4, 8, 9], "b", [6, 7])]
    assert rows_of(turns) == [[("a", ((0, 2),)), ("b", ((0, 2),))]]


def test_a_conversation_that_forks() -> None:
    """Each call is trained in one row."""
    turns = [([1, 2], "a", [3, 4, 5]), ([7, 7, 7], "b", [6, 7])]
    assert rows_of(turns) == [[("a", ((0, 3),))], [("b", ((0, 2),))]]


def test_tokens_of_no_call() -> None:
    """Trained tokens that a loop of the user's own put there are unknown."""
    marked = answer("a", [3, 4])["logprobs"]["token_logprobs"]
    origin = origin_of([0.0, *marked, -1.0], [0, 1, 1, 1])
    assert (origin.parts[0][1], origin.unknown) == (((0, 2),), 1)


def test_origins_on_their_way_to_the_trainer() -> None:
    """They are pickled with a row's rewards, which stay a dict of numbers."""
    rewards = Rewards({"reward": 1.0})
    rewards.origin = origin_of(answer("a", [3])["logprobs"]["token_logprobs"], [1])
    back = pickle.loads(pickle.dumps(rewards))
    assert back == {"reward": 1.0}
    assert back.origin == rewards.origin


# What is known of a call, by the kind of evidence.


def policy(*, adapters: bool = False) -> Policy:
    """Three syncs: to version 0, to 2 and to 4, the last one not done yet."""
    made = Policy(None, adapters=adapters)
    made.start(version=0, refit=0)
    for number, (version, paused, done) in enumerate([(0, 10, 11), (2, 20, 21), (4, 30, None)], 1):
        made.pausing(model_version=number, at=paused)
        made.mark(number, version=version, mode="keep", deliver=lambda cut: None)
        if adapters:
            made.loaded(f"trl-policy-v{number}")
        if done is not None:
            made.synced(at=done)
    return made


@pytest.mark.parametrize(
    ("begun", "ended", "spans"),
    [
        (12, 19, ((0, 9, 0),)),
        (12, 20.5, ((0, 9, 0, 2),)),  # it may have been cut, or just waited
        (20.5, 25, ((0, 9, 0, 2),)),  # begun in the pause: queued, or sent before
        (22, 29, ((0, 9, 2),)),
        (12, 35, ((0, 9, 0, 4),)),
        (31, 35, ((0, 9, 2, 4),)),
    ],
)
def test_without_the_middleware_the_clock_says_what_is_possible(
    begun: float, ended: float, spans: Any
) -> None:
    """A call that no sync touched is known; of another there are bounds."""
    call = policy().call(Turn("a", "m", 9, begun, ended), ((0, 9),), None)
    assert (call.spans, call.engine, call.trained) == (spans, ENGINE, None)


def test_with_adapters_the_response_says_it() -> None:
    """Whatever syncs went by: the call keeps what it named."""
    call = policy(adapters=True).call(Turn("a", "trl-policy-v2", 9, 0.0, 99.0), ((0, 4),), None)
    assert (call.version, call.after, call.until) == (2, 2, 2)
    assert (call.tokens, call.trained, call.spans) == (9, ((0, 4),), None)
    other = policy(adapters=True).call(Turn("a", "m", 9, 0.0, 99.0), ((0, 9),), None)
    assert other.spans == ((0, 9, 0, 4),)


def test_what_the_server_saw_goes_before_the_clock() -> None:
    """Its numbers are taken as they are."""
    seen = Call(call="a-0/0", engine="e", version=2, tokens=9, after=2, until=3)
    call = policy().call(Turn("a", "m", 9, 0.0, 99.0), ((0, 9),), seen)
    assert (call.engine, call.version, call.after, call.until) == (ENGINE, 2, 2, 3)


def test_a_long_history_is_not_kept() -> None:
    """Calls from before it may be of any version since the start."""
    made = policy()
    for number in range(4, 1000):
        made.pausing(model_version=number, at=10.0 * number)
        made.mark(number, version=2 * number, mode="keep", deliver=lambda cut: None)
        made.synced(at=10.0 * number + 1)
    assert len(made._syncs) < 300
    call = made.call(Turn("a", "m", 9, 12.0, 9999.0), ((0, 9),), None)
    assert call.spans == ((0, 9, 0, 1998),)


# With a server, an example, and all the rest.


RUN_SECONDS = 600


def with_a_server(test: Any) -> Any:
    """Mark a test of minutes."""
    for mark_it in (pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(RUN_SECONDS + 120)):
        test = mark_it(test)
    return test


def result(folder: Path, **options: Any) -> dict[str, Any]:
    """What `trl_runs` found."""
    path = os.pathsep.join([str(ROOT), str(EXAMPLES), os.environ.get("PYTHONPATH", "")])
    running = subprocess.Popen(
        [sys.executable, "-m", "tests.trl_runs", str(folder), json.dumps(options)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        output, errors = running.communicate(timeout=RUN_SECONDS)
    finally:
        if running.poll() is None:
            family = psutil.Process(running.pid).children(recursive=True)
            running.terminate()  # it says where it hangs, and stops its server if it can
            with contextlib.suppress(subprocess.TimeoutExpired):
                print(running.communicate(timeout=30)[1][-8000:], file=sys.stderr)
            for process in (*family, running):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
    assert running.returncode == 0, errors[-4000:]
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    assert found["own"] == []
    for record, step in zip(found["log"], found["steps"], strict=True):
        ours = {k: v for k, v in record.items() if k.startswith("staleness/")}
        assert ours
        assert ours == {k: step[k.removeprefix("staleness/")] for k in ours}
        assert record["batch/trained_tokens_per_step"] == step["tokens"]
        assert step["violations"] == 0
    assert found["verdict"]["tokens"] == sum(step["tokens"] for step in found["steps"])
    assert found["verdict"]["wrong"] == 0
    assert found["verdict"]["told_apart"] > 0.5 * found["verdict"]["tokens"]
    return found


@with_a_server
def test_every_token_of_a_run_with_full_weights(tmp_path: Path) -> None:
    """Log-probabilities, the server's spans and its cuts all say the same of each token."""
    found = result(tmp_path, lora=False, max_steps=5, max_inflight_tasks=8)
    verdict = found["verdict"]
    assert verdict["covered"] == verdict["tokens"]
    assert (verdict["mixed_rows"] > 0, verdict["spans_differ"]) == (True, 0)
    assert verdict["spans"] >= verdict["mixed_rows"]
    assert found["missing"] == {} or list(found["missing"]) == [
        "calls that cuts listed were never published"
    ]


@with_a_server
def test_every_token_of_a_run_with_adapters(tmp_path: Path) -> None:
    """A call is of the adapter that it named, to its end."""
    verdict = result(tmp_path, lora=True, max_steps=5, max_inflight_tasks=8)["verdict"]
    assert verdict["covered"] == verdict["tokens"]
    assert verdict["mixed_rows"] == 0


@with_a_server
def test_a_server_without_the_middleware(tmp_path: Path) -> None:
    """Bounds hold the truth, and most tokens are covered all the same."""
    verdict = result(tmp_path, lora=False, middleware=False, max_steps=8, max_staleness=2)[
        "verdict"
    ]
    assert 0 < verdict["covered"] < verdict["tokens"]
