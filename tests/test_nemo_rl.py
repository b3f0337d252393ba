"""NeMo RL's single controller, by stand-ins with its signatures, and its captures on a real vLLM.

Each row of what NeMo RL's own batch age does works here, with the numbers worked out by hand.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import logging
import os
import secrets
import subprocess
import sys
import tempfile
import textwrap
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from rl_staleness import StalenessCallback
from rl_staleness.events import (
    Event,
    GroupDropped,
    GroupPublished,
    RefitAborted,
    RefitCut,
    RefitDone,
    RunFinished,
    StepTrained,
)
from rl_staleness.integrations.nemo_rl import TESTED, Attachment, attach, attach_actor
from rl_staleness.integrations.nemo_rl_groups import links_of
from rl_staleness.staleness import StepStaleness
from rl_staleness.trace import read, steps
from tests.nemo_rl_fakes import (
    REAL,
    ActiveCall,
    AsyncLLM,
    CaptureAdmission,
    Completion,
    GenerationCut,
    LoopThread,
    OldController,
    PromptGroupRecord,
    RayController,
    RayWorker,
    RayWorkerGroup,
    ScriptedEngine,
    SingleControllerActor,
    VllmAsyncGenerationWorker,
    assembled,
    receipt,
    request,
)

if TYPE_CHECKING:
    from rl_staleness.engines import LiveCall
    from tests.watermark import Served


class Rig:
    """A controller with workers, attached, and rollouts of Gym whose calls a test lets grow."""

    def __init__(
        self, folder: Path, *, workers: int = 1, engine: Any = ScriptedEngine, **options: Any
    ) -> None:
        self.trace = folder / "rollout_trace.jsonl"
        self.told: list[StepStaleness] = []
        self.worker_loop = LoopThread()
        self.workers: list[Any] = [
            VllmAsyncGenerationWorker(AsyncLLM(), self.worker_loop.loop) for _ in range(workers)
        ]
        self.group = RayWorkerGroup(self.workers)
        old = options.pop("old", False)
        version = options.pop("version", 0)
        kind = OldController if old else SingleControllerActor
        self.controller: Any = kind(workers=self.group, version=version)
        self.staged: dict[str, dict[str, Any]] = {}
        for worker in self.workers:
            worker.token_capture.staged = self.staged
        assembled(self.controller, self.staged)
        self.active: dict[str, tuple[ActiveCall, LiveCall, int]] = {}
        kept = {k: options.pop(k) for k in ("masks", "timeout") if k in options}
        make = partial(StalenessCallback, trace=self.trace, sinks=[self.told.append], **options)
        self.attachment: Attachment = attach(self.controller, make, engine=engine, **kept)

    def close(self) -> None:
        self.attachment.close()
        self.group.stop()
        self.worker_loop.stop()

    @property
    def staleness(self) -> StalenessCallback:
        return self.attachment.staleness

    def engine(self, worker: int = 0) -> ScriptedEngine:
        engine = self.workers[worker].llm.engine
        assert engine is not None
        return engine

    def events(self, kind: type[Event]) -> list[Any]:
        return [event for event in read(self.trace) if isinstance(event, kind)]

    async def begin(
        self,
        call: str,
        tokens: int = 0,
        *,
        parent: str | None = None,
        worker: int = 0,
        cut: GenerationCut | None = None,
    ) -> None:
        """A call is admitted and submitted, in a task of its own as a server does it."""
        capture = self.workers[worker].token_capture

        async def serve() -> tuple[ActiveCall, LiveCall]:
            admission = CaptureAdmission("rollout", call, parent)
            active = capture.begin_call(admission, generation_cut=cut)
            return active, self.engine(worker).submit(f"request-{call}")

        active, live = await asyncio.create_task(serve())
        live.tokens = tokens
        self.active[call] = (active, live, worker)

    def grow(self, call: str, tokens: int) -> None:
        self.active[call][1].tokens = tokens

    def finish(self, call: str, tokens: int | None = None) -> dict[str, Any]:
        """It ends, and its tokens are staged; what comes back is its row in a receipt."""
        active, live, worker = self.active.pop(call)
        live.tokens = live.tokens if tokens is None else tokens
        if self.workers[worker].llm.engine is not None:
            self.engine(worker).end(live)
        record: dict[str, Any] = self.workers[worker].token_capture.complete_call(
            active,
            prompt_token_ids=[0, 0, 0],
            generated_token_ids=[1] * live.tokens,
            generated_logprobs=[],
        )
        return record

    async def publish(self, group: str, *manifests: list[dict[str, Any]]) -> None:
        """The rollouts of a group ended; its rows are assembled and committed."""
        self.controller._buffer.reserve(weight_version=0, group_id=group)
        receipts = [receipt(manifest) if manifest else None for manifest in manifests]
        await self.controller._finalize_with_actor(request(group, receipts))

    async def sync(self) -> None:
        """Weights move without a step: the first time, and where a refit is repeated."""
        await self.controller._sync_weights()
        self.rotate()

    async def train(self, groups: int, **options: Any) -> StepStaleness:
        """One step, its refit, and the label that the workers stamp from then on."""
        before = len(self.told)
        await self.controller.train_step(groups, **options)
        self.rotate()
        assert len(self.told) == before + 1, "one step, one line"
        return self.told[-1]

    def rotate(self) -> None:
        for worker in self.workers:
            worker.token_capture.weight_version = self.controller._trainer_version

    async def dummy(self) -> None:
        """A step of one token of the newest version, so that the next refit leads to another."""
        name = f"dummy{self.controller._train_steps}"
        await self.begin(name, 1)
        await self.publish(name, [self.finish(name)])
        await self.train(1)


@pytest.fixture
def rigs(tmp_path: Path) -> Iterator[Any]:
    """Makes rigs; each is closed."""
    made: list[Rig] = []

    def make(**options: Any) -> Rig:
        folder = tmp_path / str(len(made)) if options.pop("apart", False) else tmp_path
        folder.mkdir(exist_ok=True)
        made.append(Rig(folder, **options))
        return made[-1]

    yield make
    for rig in made:
        rig.close()


# Each row of where the idea comes from.


def test_every_token_weighs_one(rigs: Any) -> None:
    """10 tokens of version 0 and 90 of version 1, trained at 1: batch age 0.1, not 0.5."""
    rig = rigs()

    async def work() -> StepStaleness:
        await rig.sync()
        await rig.begin("old", 10)
        old = rig.finish("old")
        await rig.dummy()
        await rig.begin("new", 90)
        await rig.publish("a", [old])
        await rig.publish("b", [rig.finish("new")])
        return await rig.train(2)

    step = asyncio.run(work())
    assert step.batch_age == pytest.approx(0.1)
    assert (step.tokens_by_version, step.coverage) == ({0: 10, 1: 90}, 1.0)
    assert rig.staleness.missing() == {}


def test_a_call_split_across_two_refits(rigs: Any) -> None:
    """100 tokens of version 0, 300 of 1, 50 of 2 in one call, trained at 2."""
    rig = rigs()

    async def work() -> StepStaleness:
        await rig.sync()
        await rig.begin("long", 100)
        await rig.dummy()
        rig.grow("long", 400)
        await rig.dummy()
        await rig.publish("a", [rig.finish("long", 450)])
        return await rig.train(1)

    step = asyncio.run(work())
    assert step.tokens_by_version == {0: 100, 1: 300, 2: 50}
    assert step.batch_age == pytest.approx((100 * 2 + 300) / 450)
    assert (step.coverage, step.spanning_calls, step.violations) == (1.0, 1, 0)
    cuts = [event.calls for event in rig.events(RefitCut)]
    assert cuts == [{}, {"request-long": 100}, {"request-long": 400}, {}]


def test_an_interrupted_refit(rigs: Any) -> None:
    """Failed at 10 tokens, repeated at 25 of 40, trained at 1: 25/40. It raises as ever."""
    rig = rigs()

    async def work() -> StepStaleness:
        await rig.sync()
        await rig.begin("long", 10)
        synchronizer = rig.controller._weight_synchronizer._original

        def fail() -> None:
            synchronizer.during = retry
            raise ConnectionError("a rank is gone")

        def retry() -> None:
            assert rig.workers[0].llm.paused

        async def sync_weights() -> int:  # as the controller repeats it, once
            for _ in range(2):
                try:
                    await asyncio.to_thread(
                        rig.controller._weight_synchronizer.sync_weights, kv_scales=None
                    )
                    break
                except ConnectionError:
                    assert not rig.workers[0].llm.paused
                    rig.grow("long", 25)
            return 0

        synchronizer.during = fail
        rig.controller._sync_weights = sync_weights
        await rig.dummy()
        await rig.publish("a", [rig.finish("long", 40)])
        return await rig.train(1)

    step = asyncio.run(work())
    assert step.batch_age == pytest.approx(25 / 40)
    assert (step.coverage, step.violations) == (1.0, 0)
    assert [event.reason for event in rig.events(RefitAborted)] == ["ConnectionError"]
    assert [event.refit for event in rig.events(RefitDone)] == [1, 3, 4]


def test_refit_and_publish_events(rigs: Any) -> None:
    """Whole calls are summed by version, the others stand one by one; the refit says how far."""
    rig = rigs()

    async def work() -> None:
        await rig.sync()
        await rig.begin("whole", 30)
        whole = rig.finish("whole")
        await rig.begin("cut", 7)
        await rig.dummy()
        await rig.publish("a", [whole], [rig.finish("cut", 9)])

    asyncio.run(work())
    group = rig.events(GroupPublished)[-1]
    assert (group.group, group.tokens) == ("a", {0: 30})
    assert [(c.call, c.tokens, c.version, c.after) for c in group.calls] == [
        ("request-cut", 9, 0, 1)
    ]
    cut = rig.events(RefitCut)[-1]
    assert (cut.engine, cut.refit, cut.version, cut.calls) == ("vllm-0", 2, 1, {"request-cut": 7})
    step = rig.events(StepTrained)[-1]
    assert (step.step, step.version) == (1, 0)


def test_a_call_paused_before_its_first_token(rigs: Any) -> None:
    """Its 60 tokens are of the new weights, beside 30 of the old: {v1: 60, v0: 30}."""
    rig = rigs()

    async def work() -> StepStaleness:
        await rig.sync()
        await rig.begin("short", 30)
        short = rig.finish("short")
        await rig.begin("waiting", 0)
        await rig.dummy()
        await rig.publish("a", [rig.finish("waiting", 60)], [short])
        return await rig.train(1)

    step = asyncio.run(work())
    assert step.tokens_by_version == {1: 60, 0: 30}
    assert (step.batch_age, step.coverage) == (pytest.approx(30 / 90), 1.0)


def test_a_back_end_that_reports_nothing(rigs: Any) -> None:
    """Its calls count under the version that they began on; bounds say what that rests on."""
    rig = rigs(engine=None)
    rig.workers[0].llm.engine = ScriptedEngine(rig.workers[0].llm, name="nobody")

    async def work() -> StepStaleness:
        await rig.sync()
        await rig.begin("long", 10)
        await rig.begin("gone", 5)
        gone = rig.finish("gone")
        await rig.dummy()
        long = rig.finish("long", 60)
        await rig.begin("new", 30)
        await rig.publish("a", [long], [gone], [rig.finish("new")])
        return await rig.train(1)

    step = asyncio.run(work())
    assert step.tokens_by_version == {0: 65, 1: 30}
    assert step.batch_age == pytest.approx(65 / 95)
    assert (step.age_lo, step.age_hi, step.coverage) == (0, pytest.approx(65 / 95), 30 / 95)
    assert [event.engine for event in rig.events(RefitDone)] == ["generation"] * 3
    assert rig.workers[0].llm.heard == [], "and nothing is asked of it"


@pytest.mark.engine
def test_a_capture_of_twenty_turns_on_a_real_engine(served: Served, tmp_path: Path) -> None:
    """Each turn is a call of its own, linked where the capture began it; every token is right."""
    from rl_staleness.integrations.vllm import VllmEngine
    from tests.watermark import versions_of

    worker = VllmAsyncGenerationWorker(served.llm, served.loop)
    capture = worker.token_capture
    assert capture is not None
    group = RayWorkerGroup([worker])
    controller: Any = SingleControllerActor(workers=group, version=served.version)
    assembled(controller, capture.staged)
    told: list[StepStaleness] = []
    make = partial(StalenessCallback, trace=tmp_path / "trace.jsonl", sinks=[told.append])

    def weights() -> None:
        moving = served.move_to(controller._trainer_version)
        asyncio.run_coroutine_threadsafe(moving, served.loop).result(60)

    controller._weight_synchronizer.during = weights
    begin = served.version
    truth: dict[int, list[int]] = {}

    async def turn(number: int, parent: str | None) -> dict[str, Any]:
        active = capture.begin_call(CaptureAdmission("rollout", f"call{number}", parent))
        output = (await served.sample(f"turn{number}-{tmp_path.name}", 8 + number)).outputs[0]
        truth[number] = versions_of(list(output.token_ids), begin)
        return capture.complete_call(
            active,
            prompt_token_ids=[1, 2, 3],
            generated_token_ids=list(output.token_ids),
            generated_logprobs=[],
        )

    async def rollout() -> list[dict[str, Any]]:
        manifest: list[dict[str, Any]] = []
        for number in range(20):
            parent = manifest[-1]["model_call_id"] if manifest else None
            manifest.append(await asyncio.create_task(turn(number, parent)))
        return manifest

    async def publish(name: str, manifest: list[dict[str, Any]]) -> None:
        controller._buffer.reserve(weight_version=0, group_id=name)
        await controller._finalize_with_actor(request(name, [receipt(manifest)]))

    async def work() -> list[dict[str, Any]]:
        attachment = await asyncio.to_thread(
            partial(attach, controller, make, engine=VllmEngine, timeout=30.0)
        )
        await controller._sync_weights()
        running = asyncio.create_task(rollout())
        for number in range(3):  # steps, and with them refits, while the turns go on
            while len(capture.staged) < 5 * (number + 1) and not running.done():
                await asyncio.sleep(0.001)
            record = await asyncio.create_task(turn(100 + number, None))
            await publish(f"other{number}", [record])
            await controller.train_step(1)
            capture.weight_version = controller._trainer_version
        manifest = await running
        await publish("twenty", manifest)
        await controller.train_step(1)
        await asyncio.to_thread(attachment.close)
        return manifest

    try:
        manifest = served.run(work())
    finally:
        group.stop()
    last = told[-1]
    assert [record["model_call_id"] for record in manifest] == [f"call{n}" for n in range(20)]
    assert last.tokens == sum(8 + number for number in range(20)) == 350
    assert last.tokens_by_version == Counter(v for n in range(20) for v in truth[n])
    assert len(last.tokens_by_version) > 1, "refits came while it ran"
    assert (last.coverage, last.violations) == (1.0, 0)
    assert last.age_lo == last.batch_age == last.age_hi
    for number, step in enumerate(told[:-1]):
        assert step.tokens_by_version == Counter(truth[100 + number])
    assert not {"add_request", "generate"} & vars(served.llm).keys()
    assert "begin_call" not in vars(capture)


# The order of things, and what the trainer keeps.


def test_the_order_of_a_refit(rigs: Any) -> None:
    """Pause, cut, weights, done, resume; arguments and results of the synchronizer go through."""
    rig = rigs()
    synchronizer = rig.controller._weight_synchronizer
    heard = rig.workers[0].llm.heard
    synchronizer._original.during = lambda: heard.append("weights")

    assert synchronizer.sync_weights(kv_scales={"k": 1.0}) == {"sent": 1.0}
    synchronizer.shutdown()

    assert heard == ["pause keep False", "mark", "weights", "done", "resume"]
    assert not synchronizer.is_stale
    assert synchronizer._original.heard == [
        {"timer": None, "kv_scales": {"k": 1.0}},
        {"shutdown": True},
    ]


def test_a_pause_of_somebody_else_is_theirs(rigs: Any) -> None:
    """A trainer that pauses by itself is not resumed early."""
    rig = rigs()
    rig.workers[0].llm.paused = True

    asyncio.run(rig.sync())

    assert rig.workers[0].llm.heard == ["mark", "done"]
    assert rig.workers[0].llm.paused


def test_a_count_that_comes_after_its_refit(rigs: Any) -> None:
    """It comes back with the calls of a group, before the step that needs it."""
    rig = rigs()

    async def work() -> StepStaleness:
        await rig.sync()
        await rig.begin("long", 20)
        rig.engine().is_late = True
        await rig.dummy()
        assert len(rig.events(RefitCut)) == 1
        rig.engine().late.pop()()
        await rig.publish("a", [rig.finish("long", 50)])
        return await rig.train(1)

    step = asyncio.run(work())
    assert (step.tokens_by_version, step.coverage) == ({0: 20, 1: 30}, 1.0)


def test_a_streamed_step_is_one_step(rigs: Any) -> None:
    """Chunks are collected; what was selected and had nothing to train is dropped."""
    rig = rigs()

    async def work() -> None:
        await rig.sync()
        for name in ("a", "b", "c", "d", "e"):
            await rig.begin(name, 10)
            await rig.publish(name, [rig.finish(name)])
        rig.controller.without_tokens = {"a", "b"}
        await rig.train(5, chunk=2)

    asyncio.run(work())
    [step] = rig.events(StepTrained)
    assert (step.groups, step.step, step.version) == (("c", "d", "e"), 1, 0)
    dropped = {event.group: event.reason for event in rig.events(GroupDropped)}
    assert dropped == {"a": "no trained token", "b": "no trained token"}
    assert rig.told[0].tokens == 30


def test_drops(rigs: Any) -> None:
    """An evicted group and one that was removed are dropped; one never published is not told."""
    rig = rigs()

    async def work() -> StepStaleness:
        await rig.sync()
        for name in ("stale", "removed", "good"):
            await rig.begin(name, 10)
            await rig.publish(name, [rig.finish(name)])
        buffer = rig.controller._buffer
        buffer.reserve(weight_version=0, group_id="in flight")
        await buffer.remove_group("in flight")
        await buffer.remove_group("removed", remove_in_dp=True)
        rig.controller._sampler.stale = {"stale"}
        return await rig.train(1)

    step = asyncio.run(work())
    dropped = {event.group: event.reason for event in rig.events(GroupDropped)}
    assert dropped == {"stale": "evicted", "removed": "removed"}
    assert (step.tokens, step.dropped_tokens, step.violations) == (10, 20, 0)


def test_a_rejected_rollout_and_calls_off_the_chain(rigs: Any) -> None:
    """A placeholder row and a call that was not kept have no trained token."""
    rig = rigs()

    async def work() -> StepStaleness:
        await rig.sync()
        await rig.begin("root", 10)
        root = rig.finish("root")
        await rig.begin("aside", 1000, parent="root")
        aside = rig.finish("aside")
        await rig.begin("end", 20, parent="root")
        await rig.publish("a", [root, aside, rig.finish("end")], [])
        return await rig.train(1)

    step = asyncio.run(work())
    assert (step.tokens, step.coverage, step.violations) == (30, 1.0, 0)


def test_numbers_go_into_the_controllers_log(rigs: Any) -> None:
    """They are in its record of the step, on its axis, and nowhere else in it."""
    rig = rigs()

    async def work() -> None:
        await rig.sync()
        await rig.dummy()
        await rig.dummy()

    asyncio.run(work())
    logged = rig.controller._logger.logged
    records = [(step, metrics) for prefix, step, metrics in logged if prefix == "train"]
    assert [step for step, _ in records] == [1, 2]
    assert [metrics["staleness/tokens"] for _, metrics in records] == [1, 1]
    assert [metrics["staleness/batch_age"] for _, metrics in records] == [0, 0]
    assert all(metrics["loss"] == 0.5 for _, metrics in records)
    others = [metrics for prefix, _, metrics in logged if prefix != "train"]
    assert others == [{"total": 1.0}] * 2
    assert all(saved["metrics"] == {"loss": 0.5} for saved in rig.controller.checkpoints)


@pytest.mark.parametrize("attached", [False, True])
def test_what_gym_stores_and_a_checkpoint_saves(rigs: Any, attached: bool) -> None:
    """The same to the last field, with and without us."""
    rig = rigs()
    if not attached:
        rig.attachment.detach()

    async def work() -> None:
        await rig.controller._sync_weights()
        rig.rotate()
        for number in range(3):
            names = (f"left{number}", f"right{number}")
            for name in names:
                await rig.begin(name, 10 + number)
            await rig.publish(f"group{number}", *([rig.finish(name)] for name in names))
        for groups in (1, 1):
            await rig.controller.train_step(groups)
            rig.rotate()

    asyncio.run(work())
    saved = rig.controller.checkpoints
    rows = {
        f"group{n}_g{i}": {"token_mask": [0.0] * 3 + [1.0] * (10 + n), "sample_mask": 1.0}
        for n in range(3)
        for i in range(2)
    }
    left = [
        {
            "group_id": f"group{n}",
            "start": 0,
            "end": 0,
            "meta": {
                "partition_id": "rollout_data",
                "sample_ids": [f"group{n}_g0", f"group{n}_g1"],
                "sequence_lengths": [13 + n, 13 + n],
                "tags": [],
            },
        }
        for n in range(3)
    ]
    assert saved == [
        {"buffer": {"groups": left[1:], "rows": rows}, "metrics": {"loss": 0.5}},
        {"buffer": {"groups": left[2:], "rows": rows}, "metrics": {"loss": 0.5}},
    ]
    assert rig.staged == {
        f"{side}{n}": {
            "model_call_id": f"{side}{n}",
            "parent_call_id": None,
            "weight_version": 0,
            "delta_len": 13 + n,
            "mask": [0.0] * 3 + [1.0] * (10 + n),
        }
        for n in range(3)
        for side in ("left", "right")
    }
    assert len(rig.told) == (2 if attached else 0)


def test_masks_of_the_advantage_stage(rigs: Any) -> None:
    """A row that filters took out has no trained token; that is known only at the step."""
    rig = rigs(masks=True, late_masks=True)

    async def work() -> StepStaleness:
        await rig.sync()
        for name in ("kept", "out"):
            await rig.begin(name, 10)
        await rig.publish("a", [rig.finish("kept")], [rig.finish("out", 30)])
        rig.controller.masked = {"a_g1"}
        return await rig.train(1)

    step = asyncio.run(work())
    assert (step.tokens, step.violations) == (10, 0)


def test_several_updates_a_step(rigs: Any) -> None:
    """PPO's labels count steps: they are converted. Each epoch consumes its groups once."""
    rig = rigs()
    rig.attachment.close()
    rig.controller._is_ppo, rig.controller._ppo_epochs = True, 2
    make = partial(StalenessCallback, trace=rig.trace, sinks=[rig.told.append])
    rig.attachment = attach(rig.controller, make, engine=ScriptedEngine)

    async def work() -> tuple[StepStaleness, StepStaleness]:
        await rig.sync()
        await rig.begin("a", 10)
        await rig.publish("a", [rig.finish("a")])
        await rig.begin("b", 10)
        first = await rig.train(1)
        await rig.publish("b", [rig.finish("b", 40)])
        return first, await rig.train(1)

    first, second = asyncio.run(work())
    assert (first.batch_age, first.tokens, first.violations) == (0.5, 20, 0)
    assert second.tokens_by_version == {0: 20, 2: 60}
    assert second.batch_age == pytest.approx((10 * 2 + 10 * 3 + 30 * 1) / 80)
    assert (second.coverage, second.violations) == (1.0, 0)


def test_labels_are_converted(rigs: Any) -> None:
    """Two updates a step: what the trainer calls 1 had two, and an age is never below zero."""
    rig = rigs(engine=None)
    rig.workers[0].llm.engine = ScriptedEngine(rig.workers[0].llm, name="nobody")
    rig.attachment.close()
    rig.controller._is_ppo, rig.controller._ppo_epochs = True, 2
    make = partial(StalenessCallback, trace=rig.trace, sinks=[rig.told.append])
    rig.attachment = attach(rig.controller, make)
    worker = rig.workers[0]

    async def turn(name: str) -> None:
        active = worker.token_capture.begin_call(CaptureAdmission("rollout", name))
        staged = worker.token_capture.complete_call(
            active, prompt_token_ids=[0], generated_token_ids=[1] * 10, generated_logprobs=[]
        )
        await rig.publish(name, [staged])

    async def work() -> StepStaleness:
        await rig.sync()
        await turn("a")
        await rig.train(1)
        await turn("b")
        return await rig.train(1)

    step = asyncio.run(work())
    assert (step.version, step.tokens_by_version) == (2, {2: 20})
    assert (step.batch_age, step.violations) == (0.5, 0)


def test_a_version_without_capture(rigs: Any) -> None:
    """Turns count under the version that their group began on, between bounds."""
    rig = rigs(old=True)

    def record(*turns: int) -> PromptGroupRecord:
        prompt = [{"role": "user", "token_ids": [0, 0]}, {"role": "assistant", "token_ids": [9]}]
        log = [*prompt]
        for tokens in turns:
            log += [
                {"role": "assistant", "token_ids": [1] * tokens},
                {"role": "user", "token_ids": [0]},
            ]
        return PromptGroupRecord(prompt=prompt, completions=[Completion(log)])

    async def work() -> StepStaleness:
        await rig.sync()
        buffer = rig.controller._buffer
        first, second, third = (buffer.reserve(weight_version=0) for _ in range(3))
        await buffer.commit(first, record(10), 0, end_weight_version=0)
        await rig.train(1)
        await buffer.commit(second, record(20, 30), 0, 1)
        await buffer.commit(third, record(50), 1, 1)
        return await rig.train(2)

    step = asyncio.run(work())
    assert step.tokens_by_version == {0: 50, 1: 50}
    assert (step.batch_age, step.age_lo, step.age_hi, step.coverage) == (0.5, 0, 0.5, 0.5)
    assert (step.violations, rig.attachment.missing()) == (0, {})


def test_a_call_that_a_checkpoint_resumed(rigs: Any) -> None:
    """What an earlier request had made has bounds from its label to the version it went on with."""
    rig = rigs(version=2)

    async def work() -> StepStaleness:
        await rig.sync()
        cut = GenerationCut([0.0, 0.0, 1.0, 1.0, 1.0, 1.0], weight_version=1)
        await rig.begin("resumed", 6, cut=cut)
        await rig.publish("a", [rig.finish("resumed")])
        return await rig.train(1)

    step = asyncio.run(work())
    assert step.tokens_by_version == {1: 4, 2: 6}
    assert (step.age_lo, step.batch_age, step.coverage) == (0, 0.4, 0.6)


def test_a_run_goes_on_from_a_checkpoint(rigs: Any) -> None:
    """Groups that it brings back have the spans that the trace of before knows, to the token."""
    rig = rigs(run="run")

    async def before() -> dict[str, Any]:
        await rig.sync()
        await rig.begin("long", 20)
        await rig.begin("whole", 5)
        whole = rig.finish("whole")
        await rig.dummy()
        await rig.publish("a", [rig.finish("long", 50)], [whole])
        buffer = rig.controller._buffer
        saved = [
            {"group_id": g, "start": 0, "end": 1, "meta": m}
            for g, m in zip(buffer._group_ids, buffer.meta_list, strict=True)
        ]
        await rig.train(1)  # after the checkpoint, and lost with the process
        return {"groups": saved}

    state = asyncio.run(before())
    rows = rig.controller._buffer.rows
    rig.attachment.close("failed")
    again = rigs(run="run", version=1)
    again.controller._buffer.rows = rows
    lost = {**state["groups"][0], "group_id": "lost"}

    async def after() -> StepStaleness:
        await again.sync()
        groups = {"groups": [*state["groups"], lost]}
        options: dict[str, Any] = dict.fromkeys(
            ["max_groups", "expected_partition_id", "expected_group_size"], 2
        )
        await again.controller._buffer.load_state_dict(
            groups, **options, expected_manifest_digest=""
        )
        return await again.train(1)

    step = asyncio.run(after())
    assert step.tokens_by_version == {0: 25, 1: 30}
    assert (step.coverage, step.violations, step.step, step.version) == (1.0, 0, 2, 1)
    restored = {e.group: e for e in again.events(GroupPublished) if e.restored}
    assert sorted(restored) == ["a", "lost"]
    assert {call.spans for call in restored["lost"].calls} == {((0, 50, 0, 1),), ((0, 5, 0, 1),)}


# What goes wrong.


def test_a_dead_worker(rigs: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Its calls have bounds, by the tokens of their rows; the others are exact; it is told once."""
    rig = rigs(workers=2, timeout=0.2)

    async def work() -> StepStaleness:
        await rig.sync()
        await rig.begin("here", 10)
        await rig.begin("there", 20, worker=1)
        here, there = rig.finish("here"), rig.finish("there")
        rig.group.dead.add(1)
        await rig.publish("a", [here], [there])
        await rig.train(1)
        await rig.begin("here again", 10)
        await rig.publish("b", [rig.finish("here again")])
        return await rig.train(1)

    with caplog.at_level(logging.ERROR):
        second = asyncio.run(work())
    first = rig.told[0]
    assert (first.tokens, first.tokens_by_version) == (30, {0: 30})
    assert (second.tokens, second.coverage) == (10, 1.0)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == len(set(messages)), "each is told once"
    assert any("vllm-1" in message for message in messages)


def test_an_engine_that_does_not_pause(rigs: Any) -> None:
    """Its weights moved while it generated: no count is believed, and nothing waits longer."""
    rig = rigs()

    async def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("cannot pause")

    async def work() -> StepStaleness:
        await rig.sync()
        await rig.begin("long", 20)
        rig.workers[0].llm.pause_generation = refuse
        await rig.dummy()
        await rig.publish("a", [rig.finish("long", 50)])
        return await rig.train(1)

    step = asyncio.run(work())
    assert (step.tokens_by_version, step.coverage) == ({0: 50}, 0.0)
    assert (step.age_lo, step.age_hi) == (0, 1)
    assert rig.staleness.missing()["refits had no cut"] >= 1


def test_a_refit_that_was_given_up_on(rigs: Any) -> None:
    """The controller repeats it while the first is stuck; what the first says later is nothing."""
    rig = rigs()
    token = rig.attachment.refit_begins()
    again = rig.attachment.refit_begins()
    rig.attachment.refit_ends(again, reason=None)
    rig.attachment.refit_ends(token, reason="RefitAborted")

    assert [event.refit for event in rig.events(RefitDone)] == [2]
    assert [(e.refit, e.reason) for e in rig.events(RefitAborted)] == [(1, "given up")]
    assert rig.staleness.missing() == {}
    assert not rig.workers[0].llm.paused


def test_receipts_that_changed(rigs: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A field that is gone costs coverage and one warning; groups, steps and the run go on."""
    rig = rigs()

    async def work() -> StepStaleness:
        await rig.sync()
        for name in ("a", "b"):
            await rig.begin(name, 10)
        await rig.dummy()
        for name in ("a", "b"):
            record = rig.finish(name, 30)
            rig.controller._buffer.reserve(weight_version=0, group_id=name)
            changed = {**receipt([record]), "manifest": [{**record, "delta_len": 99}]}
            await rig.controller._finalize_with_actor(request(name, [changed]))
        return await rig.train(2)

    with caplog.at_level(logging.WARNING):
        step = asyncio.run(work())
    assert (step.tokens, step.tokens_by_version) == (60, {0: 60})
    assert (step.age_lo, step.coverage) == (0, 0.0)
    assert len([r for r in caplog.records if "reading the receipts" in r.getMessage()]) == 1
    assert rig.attachment.missing() == {"times reading the receipts of a group failed": 2}


def test_a_method_that_is_gone_in_the_middle(rigs: Any) -> None:
    """The attachment says so once, and the controller's own work is untouched."""
    rig = rigs()

    async def work() -> None:
        await rig.sync()
        await rig.begin("a", 10)
        record = rig.finish("a")
        del rig.controller._buffer._fill  # raises: it is no attribute of the object
        await rig.publish("a", [record])

    with pytest.raises(AttributeError):
        asyncio.run(work())
    rig.controller._trainer_version = None  # what is read at the begin of a refit and of a step

    asyncio.run(rig.controller._sync_weights())
    assert rig.controller._weight_synchronizer._original.heard


def test_detaching_restores_every_object(rigs: Any) -> None:
    """Each object has what it had, by identity; a second time does nothing."""
    rig = rigs()
    rig.attachment.close()
    rig.group.settle()
    controller, worker = rig.controller, rig.workers[0]
    owners = [
        controller,
        controller._buffer,
        controller._sampler,
        controller._trainer,
        controller._logger,
        controller._rollout_manager,
        rig.group,
        worker.token_capture,
        worker.llm,
    ]
    before = [dict(vars(owner)) for owner in owners]
    make = partial(StalenessCallback, trace=None, sinks=[])
    attachment = attach(controller, make, engine=ScriptedEngine, masks=True)
    engine = worker.llm.engine
    changed = [vars(o) != b for o, b in zip(owners, before, strict=True)]
    assert all(changed), "each is held"

    attachment.detach()
    attachment.detach()
    rig.group.stop()

    for owner, kept in zip(owners, before, strict=True):
        now = dict(vars(owner))
        now.pop("engine", None)
        kept.pop("engine", None)
        assert now.keys() == kept.keys()
        assert all(now[name] is kept[name] for name in kept)
    assert not engine.is_attached


def test_the_run_ends_with_the_logger(rigs: Any) -> None:
    """The controller finishes its logger last: the trace is closed, with what became of the run."""
    for number, failed in enumerate((False, True)):
        rig = rigs(apart=True)
        asyncio.run(rig.sync())
        try:
            if failed:
                raise RuntimeError("the run failed")
        except RuntimeError:
            rig.controller._logger.finish()
        else:
            rig.controller._logger.finish()
        [end] = rig.events(RunFinished)
        assert end.status == ("failed" if failed else "finished")
        assert rig.controller._logger.finished == 1
        assert "finish" not in vars(rig.controller._logger), number


def test_what_does_not_match_is_refused_by_name() -> None:
    """One line names what is missing, what has other parameters, and what was tested."""
    controller: Any = SingleControllerActor()
    controller._buffer.commit = lambda key, record: None
    controller._trainer = SimpleNamespace(begin_train_step=lambda: None)
    make = partial(StalenessCallback, trace=None, sinks=[])

    with pytest.raises(ValueError, match=r"^controller: ") as caught:
        attach(controller, make)
    told = str(caught.value)
    assert "\n" not in told
    for part in (
        "_buffer.commit has no parameter 'group_id'",
        "it has no _trainer.finish_train_step",
        *TESTED,
    ):
        assert part in told
    with pytest.raises(ValueError, match=r"it has no _gen\.worker_group"):
        attach(SingleControllerActor(), make, engine=ScriptedEngine)


def test_an_unknown_version_is_told(
    rigs: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It attaches where the signatures match, and says which versions were tested."""
    module = ModuleType("nemo_rl")
    for version, known in (("0.9.0+abcdef0", False), ("0.5.0+7ea279a", True)):
        caplog.clear()
        module.__dict__["__version__"] = version
        monkeypatch.setitem(sys.modules, "nemo_rl", module)
        with caplog.at_level(logging.WARNING):
            rigs(apart=True)
        told = [r.getMessage() for r in caplog.records if "tested are" in r.getMessage()]
        assert len(told) == (0 if known else 1)
        assert all(version in message for message in told)


def test_a_callback_that_counts_from_elsewhere_is_refused() -> None:
    """Two counts of versions are never subtracted from one another."""
    controller = SingleControllerActor(version=3)
    callback = StalenessCallback(trace=None, sinks=[])
    with pytest.raises(ValueError, match=r"^staleness: it counts from .*'version': 0"):
        attach(controller, callback)
    attachment = attach(controller, StalenessCallback(trace=None, sinks=[], version=3, step=4))
    attachment.close()


def test_a_worker_without_an_engine_is_refused() -> None:
    """The line names the worker and the ways out; the other workers are let go."""
    worker, other = VllmAsyncGenerationWorker(None), VllmAsyncGenerationWorker(AsyncLLM())
    group = RayWorkerGroup([other, worker])
    controller = SingleControllerActor(workers=group)
    make = partial(StalenessCallback, trace=None, sinks=[])
    with pytest.raises(ValueError, match=r"^engine: worker 'vllm-1' has none") as caught:
        attach(controller, make, engine=ScriptedEngine)
    assert "async_engine=true" in str(caught.value)
    group.stop()
    assert other.token_capture is not None
    assert "begin_call" not in vars(other.token_capture)


def test_a_receipt_that_does_not_explain_its_row() -> None:
    """A chain with a hole, a loop, or other lengths is no evidence."""
    record = {"model_call_id": "a", "parent_call_id": None, "weight_version": 0, "delta_len": 4}
    good = {"manifest": [record], "terminal_model_call_id": "a"}
    assert [link.call for link in links_of([good, None], [4, 1])] == ["a"]
    for wrong in (
        {**good, "terminal_model_call_id": "b"},
        {**good, "manifest": [{**record, "parent_call_id": "a"}]},
        {**good, "manifest": [{**record, "delta_len": 5}]},
    ):
        with pytest.raises(ValueError, match=r"^row 0: "):
            links_of([wrong], [4])


def test_the_stand_ins_have_the_signatures_of_the_package() -> None:
    """Where NeMo RL is installed: what the stand-ins take is what its classes take."""
    if importlib.util.find_spec("nemo_rl") is None:
        pytest.skip("NeMo RL is not installed here: it needs CUDA and Python 3.13")
    for fake, (module, name) in REAL.items():
        real = getattr(importlib.import_module(module), name)
        real = getattr(getattr(real, "__ray_metadata__", None), "modified_class", real)
        for method in vars(fake):
            ours, theirs = getattr(fake, method), getattr(real, method, None)
            if not inspect.isfunction(ours) or method.startswith("__") or theirs is None:
                continue
            wanted = set(inspect.signature(ours).parameters) - {"options", "kwargs"}
            assert wanted <= set(inspect.signature(theirs).parameters), f"{name}.{method}"


# In Ray's actors.


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A Ray of this test's own; the stand-ins travel to its actors by value."""
    ray = pytest.importorskip("ray")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # Ray keeps the first one
    module = sys.modules["tests.nemo_rl_fakes"]
    ray.cloudpickle.register_pickle_by_value(module)
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            logging_level="ERROR",
            log_to_driver=False,
            _temp_dir=folder,
        )
        yield ray
        ray.shutdown()
    ray.cloudpickle.unregister_pickle_by_value(module)


def test_in_actors_of_ray(cluster: Any, tmp_path: Path) -> None:
    """The callback lives with the controller in an actor, the engines in others."""
    workers = [cluster.remote(num_cpus=0)(RayWorker).remote() for _ in range(2)]
    controller = cluster.remote(num_cpus=0)(RayController).remote(workers)
    trace = tmp_path / "trace.jsonl"

    attach_actor(
        controller, partial(StalenessCallback, trace=trace, sinks=[]), engine=ScriptedEngine
    )
    heard = cluster.get(controller.run.remote(), timeout=60)

    [step] = list(steps(trace))
    assert (step.tokens_by_version, step.coverage, step.violations) == ({0: 40}, 1.0, 0)
    # The first time nobody had asked anything of the engines: there was nothing to pause.
    assert heard == [["mark", "done", "pause keep False", "mark", "done", "resume"]] * 2
    assert [e.status for e in read(trace) if isinstance(e, RunFinished)] == ["finished"]


def test_turns_of_the_controller_in_actors_of_ray(cluster: Any, tmp_path: Path) -> None:
    """Without Gym each turn is a task of Ray, by whose id it is linked: exact, too."""
    workers = [cluster.remote(num_cpus=0)(RayWorker).remote() for _ in range(2)]
    controller = cluster.remote(num_cpus=0)(RayController).remote(workers)
    trace = tmp_path / "trace.jsonl"

    attach_actor(
        controller, partial(StalenessCallback, trace=trace, sinks=[]), engine=ScriptedEngine
    )
    heard = cluster.get(controller.run_native.remote(), timeout=60)

    first, second = list(steps(trace))
    assert (first.tokens, first.violations) == (1, 0)
    assert (second.tokens, second.coverage, second.violations) == (80, 1.0, 0)
    assert (second.tokens_by_version, second.spanning_calls) == ({0: 20, 1: 60}, 2)
    assert heard[0].count("pause keep False") == 2


def test_the_script_for_a_machine_with_gpus(tmp_path: Path) -> None:
    """It runs NeMo RL's launcher, unchanged, and reads the trace: here with stand-ins for both."""
    checkout, programs, work = (tmp_path / name for name in ("RL", "bin", "work"))
    for folder in (checkout / "examples", checkout / "nemo_rl" / "algorithms", programs, work):
        folder.mkdir(parents=True)
    launcher = """
        import sys
        from nemo_rl.algorithms.single_controller import SingleControllerActor
        def main():
            assert "grpo.max_num_steps=8" in sys.argv, sys.argv
            controller = SingleControllerActor.remote(master_config=None)
            controller.run()
    """
    actor = """
        from tests.nemo_rl_fakes import LocalActor as SingleControllerActor
    """
    uv = f"""
        #!/bin/sh
        case "$1" in
        run) shift 4; exec {sys.executable} "$@" ;;
        pip) test -d "$7" && test -f "$8/setup.cfg" ;;
        esac
    """
    run = checkout / "examples" / "run_grpo_single_controller.py"
    run.write_text(textwrap.dedent(launcher))
    algorithms = checkout / "nemo_rl" / "algorithms"
    (algorithms / "single_controller.py").write_text(textwrap.dedent(actor))
    (programs / "uv").write_text(textwrap.dedent(uv).lstrip())
    (programs / "uv").chmod(0o755)
    root = Path(__file__).parents[1]
    paths = {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(root)}

    done = subprocess.run(
        [sys.executable, str(root / "examples" / "nemo_rl_gpu.py"), str(checkout)],
        cwd=work,
        env={**os.environ, **paths},
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert done.returncode == 0, done.stderr
    [step] = list(steps(work / "rollout_trace.jsonl"))
    assert (step.tokens, step.violations) == (7, 0)
    assert "batch_age" in done.stdout or "age" in done.stdout
    for arguments in ([], [str(tmp_path)]):
        wrong = subprocess.run(
            [sys.executable, str(root / "examples" / "nemo_rl_gpu.py"), *arguments],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert wrong.returncode == 2
        assert len(wrong.stderr.splitlines()) == 1
