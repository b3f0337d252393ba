"""Stand-ins with NeMo RL's signatures: it cannot run here (CUDA, Python 3.13). No code is theirs.

The signatures were written down from NVIDIA-NeMo/RL: of the single controller, the reassembler and
its actor at commit ``00420a153d2c45366226de1eedf44609b5a7b144``, of the replay buffer and the vLLM
worker as stored of the same weeks, of all else at ``7ea279abfbeb698b092856d0dab61e7cf39bc909``
(no token capture: `OldBuffer`, `OldController`). The capture in the worker is that of
NVIDIA-NeMo/Gym's ``token_id_capture/staging/capture.py`` of those weeks.
`REAL` says which class is which; test_nemo_rl.py compares them where the package is installed.
"""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from rl_staleness.engines import Cut, LiveCall, capturing
from tests.fakes import noticed


class Column(list[Any]):
    """A tensor, as far as it is read."""

    def tolist(self) -> list[Any]:
        return list(self)


class Row(Column):
    pass


class Scalar:
    def __init__(self, value: float) -> None:
        self.value = value

    def tolist(self) -> float:
        return self.value


@dataclass
class KVBatchMeta:
    """Rows in the data plane: names and lengths, never tokens."""

    partition_id: str
    sample_ids: list[str]
    sequence_lengths: list[int]
    tags: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Completion:
    message_log: list[dict[str, Any]]


@dataclass
class PromptGroupRecord:
    prompt: list[dict[str, Any]]
    completions: list[Completion]


@dataclass(frozen=True)
class ReassemblyRequest:
    """What is sent to an actor that assembles the rows of a group."""

    group_id: str
    rollout_ids: tuple[str, ...]
    canonical_sample_ids: tuple[str, ...]
    receipts: tuple[dict[str, Any] | None, ...]
    rewards: tuple[float, ...]
    fallback_weight_version: int
    prompt_idx: int
    mask_sample: tuple[bool, ...]


class WeightSynchronizer:
    """Moves weights: here it calls what the test wants to happen meanwhile."""

    def __init__(self) -> None:
        self.during: Callable[[], object] = lambda: None
        self.is_stale = True
        self.heard: list[dict[str, Any]] = []

    def sync_weights(
        self,
        *,
        timer: Any | None = None,
        kv_scales: dict[str, float] | None = None,
    ) -> dict[str, float] | None:
        self.heard.append({"timer": timer, "kv_scales": kv_scales})
        self.during()
        self.is_stale = False
        return {"sent": 1.0}

    def init_communicator(self) -> None:
        pass

    def shutdown(self) -> None:
        self.heard.append({"shutdown": True})


class TQReplayBuffer:
    """Slots of groups, in lists side by side."""

    def __init__(self) -> None:
        self.meta_list: list[KVBatchMeta | None] = []
        self.start_weight_list: list[int] = []
        self.end_weight_list: list[int] = []
        self.ready_list: list[bool] = []
        self._group_ids: list[str] = []
        self.rows: dict[str, dict[str, Any]] = {}
        """The data plane: by sample, its columns."""

    def reserve(
        self,
        *,
        weight_version: int,
        target_step: int | None = None,
        group_id: str | None = None,
        rollout_ids: list[str] | None = None,
    ) -> str:
        group_id = group_id or uuid.uuid4().hex
        self.meta_list.append(None)
        self.start_weight_list.append(weight_version)
        self.end_weight_list.append(-1)
        self.ready_list.append(False)
        self._group_ids.append(group_id)
        return group_id

    def _fill(self, group_id: str, meta: KVBatchMeta, start: int, end: int) -> KVBatchMeta:
        place = self._group_ids.index(group_id)
        self.meta_list[place], self.ready_list[place] = meta, True
        self.start_weight_list[place], self.end_weight_list[place] = start, end
        return meta

    async def commit(
        self,
        group_id: str,
        record: PromptGroupRecord,
        start_weight_version: int,
        end_weight_version: int,
    ) -> KVBatchMeta:
        await asyncio.sleep(0)
        names = [f"{group_id}_g{i}" for i in range(len(record.completions))]
        logs = [completion.message_log for completion in record.completions]
        lengths = [sum(len(m["token_ids"]) for m in log) for log in logs]
        for name, log in zip(names, logs, strict=True):
            mask = [float(m["role"] == "assistant") for m in log for _ in m["token_ids"]]
            self.rows[name] = {"token_mask": Row(mask), "sample_mask": Scalar(1.0)}
        meta = KVBatchMeta("rollout_data", names, lengths)
        return self._fill(group_id, meta, start_weight_version, end_weight_version)

    async def commit_finalized(
        self,
        cut: Any,
        group_id: str,
        meta: KVBatchMeta,
        group_min_wv: int,
        group_max_wv: int,
        *,
        staging_keys: list[str] | None = None,
    ) -> KVBatchMeta:
        return self._fill(group_id, meta, group_min_wv, group_max_wv)

    async def seal_group(
        self, group_id: str, record: PromptGroupRecord, end_weight_version: int
    ) -> KVBatchMeta:
        start = self.start_weight_list[self._group_ids.index(group_id)]
        return await TQReplayBuffer.commit(self, group_id, record, start, end_weight_version)

    async def remove_group(self, group_id: str, *, remove_in_dp: bool = False) -> int:
        if group_id not in self._group_ids:
            raise ValueError(f"unknown group_id={group_id!r}")
        return await self._delete([group_id])

    async def remove(self, idxs: list[int], remove_in_dp: bool) -> int:
        return await self._delete([self._group_ids[i] for i in idxs])

    async def claim_for_training(self, idxs: list[int]) -> int:
        return await self._delete([self._group_ids[i] for i in idxs])

    async def _delete(self, groups: list[str]) -> int:
        await asyncio.sleep(0)
        for group in groups:
            place = self._group_ids.index(group)
            for slots in (self.meta_list, self.start_weight_list, self.end_weight_list):
                del slots[place]
            del self.ready_list[place], self._group_ids[place]
        return len(groups)

    async def load_state_dict(
        self,
        state: dict[str, Any],
        *,
        max_groups: int,
        expected_partition_id: str,
        expected_group_size: int,
        expected_manifest_digest: str,
    ) -> int:
        for group in state["groups"]:
            self.reserve(weight_version=group["start"], group_id=group["group_id"])
            self._fill(group["group_id"], group["meta"], group["start"], group["end"])
        return len(state["groups"])

    def state(self) -> dict[str, Any]:
        """What a checkpoint would save."""
        return {
            "groups": [
                {"group_id": g, "start": s, "end": e, "meta": vars(m) if m else None}
                for g, s, e, m in zip(
                    self._group_ids,
                    self.start_weight_list,
                    self.end_weight_list,
                    self.meta_list,
                    strict=True,
                )
            ],
            "rows": {
                name: {k: column.tolist() for k, column in row.items()}
                for name, row in self.rows.items()
            },
        }


class OldBuffer:
    """The buffer of a version without token capture; slots and rows as above."""

    _fill, _delete, state = TQReplayBuffer._fill, TQReplayBuffer._delete, TQReplayBuffer.state
    __init__ = TQReplayBuffer.__init__
    commit, remove, remove_group = (
        TQReplayBuffer.commit,
        TQReplayBuffer.remove,
        TQReplayBuffer.remove_group,
    )

    def reserve(
        self,
        *,
        weight_version: int,
        target_step: int | None = None,
        group_id: str | None = None,
    ) -> str:
        return TQReplayBuffer.reserve(self, weight_version=weight_version, group_id=group_id)  # type: ignore[arg-type]


class Sampler:
    """Takes the oldest groups that are ready; evicts what the test names."""

    def __init__(self, buffer: Any) -> None:
        self._buffer = buffer
        self.stale: set[str] = set()

    async def select(
        self,
        *,
        current_train_weight: int,
        min_prompt_groups: int,
        max_prompt_groups: int,
    ) -> tuple[KVBatchMeta | None, int]:
        ready = [i for i, is_ready in enumerate(self._buffer.ready_list) if is_ready]
        chosen = ready[:max_prompt_groups]
        if len(chosen) < min_prompt_groups:
            return None, 0
        metas = [self._buffer.meta_list[i] for i in chosen]
        if hasattr(self._buffer, "claim_for_training"):
            await self._buffer.claim_for_training(chosen)
        else:
            await self._buffer.remove(chosen, remove_in_dp=False)
        names = [name for meta in metas for name in meta.sample_ids]
        lengths = [length for meta in metas for length in meta.sequence_lengths]
        return KVBatchMeta("rollout_data", names, lengths), len(chosen)

    async def evict(self, *, current_train_weight: int) -> int:
        stale = [i for i, g in enumerate(self._buffer._group_ids) if g in self.stale]
        return await self._buffer.remove(stale, remove_in_dp=True) if stale else 0


class TQPolicy:
    """The trainer."""

    def begin_train_step(
        self, loss_fn: Any, gbs: int | None = None, mbs: int | None = None
    ) -> None:
        pass

    def train_microbatches_from_meta(
        self, meta: KVBatchMeta, timer: Any | None = None, **options: Any
    ) -> None:
        pass

    def finish_train_step(self) -> dict[str, Any]:
        return {"loss": 0.5}


class Logger:
    """Keeps what is logged."""

    def __init__(self) -> None:
        self.logged: list[tuple[str, int, dict[str, Any]]] = []
        self.finished = 0

    def log_metrics(
        self,
        metrics: dict[str, Any],
        step: int,
        prefix: str | None = "",
        step_metric: str | None = None,
        step_finished: bool = False,
    ) -> None:
        self.logged.append((prefix or "", step, metrics))

    def finish(self) -> None:
        self.finished += 1


class VllmGeneration:
    def __init__(self, worker_group: Any = None) -> None:
        self.worker_group = worker_group


class RolloutManager:
    """Runs the rollouts of a prompt: as the test says."""

    def __init__(self) -> None:
        self.rollout: Callable[[Any], Coroutine[Any, Any, PromptGroupRecord]] | None = None

    async def run_rollout(self, input_sample: Any) -> PromptGroupRecord:
        assert self.rollout is not None
        return await self.rollout(input_sample)


class SingleControllerActor:
    """The controller: how it calls the others, in its order, without anything they do."""

    def __init__(self, *, buffer: Any = None, version: int = 0, workers: Any = None) -> None:
        self._buffer: Any = buffer or TQReplayBuffer()
        self._sampler: Any = Sampler(self._buffer)
        self._trainer: Any = TQPolicy()
        self._logger: Any = Logger()
        self._gen: Any = VllmGeneration(workers)
        self._weight_synchronizer: Any = WeightSynchronizer()
        self._rollout_manager: Any = RolloutManager()
        self._trainer_version = self._train_steps = version
        self._is_ppo, self._ppo_epochs = False, 1
        self.checkpoints: list[dict[str, Any]] = []
        self.without_tokens: set[str] = set()
        """Groups in whose chunks nothing is left to train."""
        self.masked: set[str] = set()
        """Rows that the advantage stage takes out."""
        self.assembled: Callable[[ReassemblyRequest], Any] = lambda request: None
        """What an actor makes of a request: the meta of its rows, with their masks."""

    async def _call_dp(self, method_name: str, **kwargs: Any) -> Any:
        await asyncio.sleep(0)
        assert method_name == "get_samples"
        [name] = kwargs["select_fields"]
        return {name: Column(self._buffer.rows[s][name] for s in kwargs["sample_ids"])}

    async def _finalize_with_actor(self, request: ReassemblyRequest) -> Any | None:
        meta, start, end = await asyncio.to_thread(self.assembled, request)
        await self._buffer.commit_finalized(
            object(), request.group_id, meta, start, end, staging_keys=["key"]
        )
        return meta

    async def _advantage_stage(self, meta: KVBatchMeta) -> tuple[KVBatchMeta, bool]:
        for name in self.masked & set(meta.sample_ids):
            self._buffer.rows[name]["sample_mask"] = Scalar(0.0)
        groups = {name.rpartition("_g")[0] for name in meta.sample_ids}
        return meta, not groups <= self.without_tokens

    async def _save_checkpoint(
        self,
        step_metrics: dict[str, Any],
        *,
        is_policy_training_step: bool = True,
        is_final_checkpoint: bool = False,
    ) -> None:
        await asyncio.sleep(0)
        self.checkpoints.append({"buffer": self._buffer.state(), "metrics": dict(step_metrics)})

    async def _sync_weights(self, *, calibration_data: Any | None = None) -> int:
        await asyncio.to_thread(self._weight_synchronizer.sync_weights, kv_scales=None)
        return 0

    async def train_step(self, groups: int, *, chunk: int = 0, evict: bool = True) -> None:
        """One pass of the training loop: chunks, the update, the refit, a checkpoint, the log."""
        dispatched, step_open = 0, False
        while dispatched < groups:
            if evict:
                await self._sampler.evict(current_train_weight=self._trainer_version)
            meta, number = await self._sampler.select(
                current_train_weight=self._trainer_version,
                min_prompt_groups=1,
                max_prompt_groups=min(chunk or groups, groups - dispatched),
            )
            assert meta is not None
            meta, has_tokens = await self._advantage_stage(meta)
            for _ in range(self._ppo_epochs if has_tokens else 0):
                if not step_open:
                    await asyncio.to_thread(self._trainer.begin_train_step, None)
                    step_open = True
                await asyncio.to_thread(
                    self._trainer.train_microbatches_from_meta, meta, train_fields=()
                )
                if self._is_ppo:
                    await asyncio.to_thread(self._trainer.finish_train_step)
                    step_open = False
            dispatched += number
        if step_open:
            await asyncio.to_thread(self._trainer.finish_train_step)
        self._trainer_version += 1
        self._train_steps += 1
        await self._sync_weights()
        metrics = {"loss": 0.5}
        await self._save_checkpoint(metrics)
        self._logger.log_metrics(metrics, step=self._train_steps, prefix="train")
        self._logger.log_metrics(
            {"total": 1.0}, step=self._train_steps, prefix="timing/train", step_finished=True
        )


class OldController(SingleControllerActor):
    """A version without token capture: no reassembler, another buffer, fewer arguments."""

    _finalize_with_actor = None  # type: ignore[assignment]

    def __init__(self, **options: Any) -> None:
        super().__init__(buffer=OldBuffer(), **options)

    async def _save_checkpoint(self, step_metrics: dict[str, Any]) -> None:  # type: ignore[override]
        await super()._save_checkpoint(step_metrics)


REAL = {
    WeightSynchronizer: ("nemo_rl.weight_sync.interfaces", "WeightSynchronizer"),
    TQReplayBuffer: ("nemo_rl.algorithms.async_utils.replay_buffer", "TQReplayBuffer"),
    Sampler: ("nemo_rl.algorithms.async_utils.staleness_sampler", "PromptGroupSampler"),
    TQPolicy: ("nemo_rl.models.policy.tq_policy", "TQPolicy"),
    Logger: ("nemo_rl.utils.logger", "Logger"),
    SingleControllerActor: ("nemo_rl.algorithms.single_controller", "SingleControllerActor"),
}
"""By stand-in: module and class whose methods it stands for."""


# Workers, and Gym's capture in them.


@dataclass(frozen=True)
class CaptureAdmission:
    rollout_id: str
    model_call_id: str
    parent_call_id: str | None = None


@dataclass
class GenerationCut:
    """What a checkpoint had of a call, when it was resumed from one."""

    token_mask_delta: list[float]
    weight_version: int


@dataclass
class ActiveCall:
    admission: CaptureAdmission
    weight_version: int
    generation_cut: GenerationCut | None = None

    @property
    def model_call_id(self) -> str:
        return self.admission.model_call_id


class RolloutTokenCapture:
    """Stamps a call as it begins, and stages its tokens as it ends: what Gym stores."""

    def __init__(self) -> None:
        self.weight_version = 0
        self.staged: dict[str, dict[str, Any]] = {}

    def begin_call(
        self,
        admission: CaptureAdmission,
        *,
        prefix_token_ids: list[int] | None = None,
        generation_cut: GenerationCut | None = None,
        generation_cut_staging_keys: tuple[str, ...] | None = None,
        stream: bool = False,
    ) -> ActiveCall:
        return ActiveCall(admission, self.weight_version, generation_cut)

    def complete_call(
        self,
        call: ActiveCall,
        *,
        prompt_token_ids: list[int],
        generated_token_ids: list[int],
        generated_logprobs: list[float],
        extras: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        before = list(call.generation_cut.token_mask_delta) if call.generation_cut else []
        mask = before or [0.0] * len(prompt_token_ids)
        mask += [1.0] * len(generated_token_ids)
        record = {
            "model_call_id": call.model_call_id,
            "parent_call_id": call.admission.parent_call_id,
            "weight_version": call.weight_version,
            "delta_len": len(mask),
        }
        self.staged[call.model_call_id] = {**record, "mask": mask}
        return record


class AsyncLLM:
    """A front end that says whether it is paused; `ScriptedEngine` makes its calls."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.paused = False
        self.num_requests = 0
        self.engine: ScriptedEngine | None = None

    async def generate(self, *, tokens: int) -> Any:
        """A request of so many tokens, half of them made once the engine has been paused."""
        engine = self.engine
        assert engine is not None
        self.num_requests += 1
        live = engine.submit(f"{engine.name}/{self.num_requests}")
        live.tokens = tokens // 2
        while "resume" not in self.heard:
            await asyncio.sleep(0.01)
        live.tokens = tokens
        engine.end(live)
        yield [1] * tokens

    async def is_paused(self) -> bool:
        return self.paused

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:
        self.heard.append(f"pause {mode} {clear_cache}")
        self.paused = True

    async def resume_generation(self) -> None:
        self.heard.append("resume")
        self.paused = False


class ScriptedEngine:
    """An engine in a worker whose calls grow when the test says so."""

    def __init__(self, llm: AsyncLLM, *, name: str) -> None:
        self.name = name
        self.llm: Any = llm
        llm.engine = self
        self.version = self.refit = 0
        self.running: dict[str, LiveCall] = {}
        self.late: list[Callable[[], None]] = []
        """Marks that are reached when the test says so, if `is_late`."""
        self.is_late = False
        self.is_attached = True

    def submit(self, call: str) -> LiveCall:
        """A request comes in: a call of whoever captures it."""
        capture = capturing()
        live = LiveCall(call=call, engine=self.name, version=self.version, after=self.refit)
        if capture is not None:
            self.running[call] = live
            capture.calls.append(live)
        return live

    def end(self, live: LiveCall) -> None:
        self.running.pop(live.call, None)
        live.until, live.ended = self.refit, True

    def start(self, *, version: int, refit: int) -> Future[None]:
        self.version, self.refit = version, refit
        return noticed()

    def mark(
        self, refit: int, *, version: int, mode: str, deliver: Callable[[Cut | None], None]
    ) -> Future[None]:
        self.llm.heard.append("mark")
        self.refit = refit
        counts = {name: live.tokens for name, live in self.running.items()}
        if self.is_late:
            self.late.append(lambda: deliver(Cut(calls=counts)))
        else:
            deliver(Cut(calls=counts))
        return noticed()

    def done(self, refit: int, *, version: int) -> Future[None]:
        self.llm.heard.append("done")
        self.version = version
        return noticed()

    def aborted(self, refit: int) -> Future[None]:
        self.llm.heard.append("aborted")
        return noticed()

    def detach(self) -> None:
        self.is_attached = False


class VllmAsyncGenerationWorker:
    """A worker: its engine, its capture, and the loop that both live on."""

    def __init__(self, llm: Any, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.llm = llm
        self.token_capture: RolloutTokenCapture | None = RolloutTokenCapture()
        self._engine_loop = loop


class RayWorkerGroup:
    """Actors that carry out what they are sent one by one, each in a thread of its own."""

    def __init__(self, workers: list[Any]) -> None:
        self.workers = workers
        self.dp_leader_worker_indices = list(range(len(workers)))
        self._pools = [ThreadPoolExecutor(1) for _ in workers]
        self.dead: set[int] = set()

    def run_single_worker_single_data(
        self, method_name: str, worker_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        assert method_name == "__ray_call__"
        fn = kwargs.pop("fn")

        def work() -> Any:
            if worker_idx in self.dead:
                raise ConnectionError("the actor died")
            return fn(self.workers[worker_idx], *args, **kwargs)

        return ObjectRef(self._pools[worker_idx].submit(work))

    def settle(self) -> None:
        """Wait until the workers did what they were sent."""
        for pool in self._pools:
            pool.submit(int).result()

    def stop(self) -> None:
        for pool in self._pools:
            pool.shutdown()


class ObjectRef:
    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def future(self) -> Future[Any]:
        return self._future


# A rollout of Gym: turns, each of them a call.


def assembled(controller: Any, staged: dict[str, dict[str, Any]]) -> None:
    """Have the controller's actors assemble rows from what was staged: terminal chains."""

    def assemble(request: ReassemblyRequest) -> tuple[KVBatchMeta, int, int]:
        lengths: list[int] = []
        versions: list[int] = []
        for name, receipt in zip(request.canonical_sample_ids, request.receipts, strict=True):
            mask: list[float] = []
            at = receipt["terminal_model_call_id"] if receipt else None
            while at is not None:
                mask = staged[at]["mask"] + mask
                versions.append(staged[at]["weight_version"])
                at = staged[at]["parent_call_id"]
            weight = Scalar(1.0 if mask else 0.0)
            mask = mask or [0.0]
            lengths.append(len(mask))
            controller._buffer.rows[name] = {"token_mask": Row(mask), "sample_mask": weight}
        meta = KVBatchMeta("rollout_data", list(request.canonical_sample_ids), lengths)
        return meta, min(versions, default=0), max(versions, default=0)

    controller.assembled = assemble


def request(group: str, receipts: list[dict[str, Any] | None]) -> ReassemblyRequest:
    names = tuple(f"{group}_g{i}" for i in range(len(receipts)))
    return ReassemblyRequest(
        group_id=group,
        rollout_ids=names,
        canonical_sample_ids=names,
        receipts=tuple(receipts),
        rewards=(1.0,) * len(names),
        fallback_weight_version=0,
        prompt_idx=0,
        mask_sample=(False,) * len(names),
    )


def receipt(manifest: list[dict[str, Any]]) -> dict[str, Any]:
    """A receipt whose terminal call is the last one."""
    return {"manifest": manifest, "terminal_model_call_id": manifest[-1]["model_call_id"]}


class LoopThread:
    """A loop that runs in a thread of its own, as a worker's does."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(120)

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


# The same in real actors of Ray.


class RayWorker(VllmAsyncGenerationWorker):
    """A worker in an actor; it serves calls on its own loop."""

    def __init__(self) -> None:
        super().__init__(AsyncLLM())
        self._calls: dict[str, tuple[ActiveCall, LiveCall]] = {}

    async def begin(self, call: str) -> None:
        self._engine_loop = asyncio.get_running_loop()
        assert self.token_capture is not None and self.llm.engine is not None
        active = self.token_capture.begin_call(CaptureAdmission("rollout", call))
        self._calls[call] = active, self.llm.engine.submit(f"request-{call}")

    async def finish(self, call: str, tokens: int) -> tuple[dict[str, Any], dict[str, Any]]:
        active, live = self._calls.pop(call)
        live.tokens = tokens
        assert self.token_capture is not None
        self.llm.engine.end(live)
        record = self.token_capture.complete_call(
            active,
            prompt_token_ids=[0, 0, 0],
            generated_token_ids=[1] * tokens,
            generated_logprobs=[],
        )
        return record, self.token_capture.staged[call]

    async def generate_async(self, data: Any, greedy: bool = False) -> Any:
        """A turn of the controller's own: its request is submitted by a task of this one."""
        self._engine_loop = asyncio.get_running_loop()

        async def sample() -> list[int]:
            async for output in self.llm.generate(tokens=data):
                return output
            return []

        yield 0, await asyncio.create_task(sample())

    async def heard(self) -> list[str]:
        return list(self.llm.heard)

    async def num_running(self) -> int:
        return len(self.llm.engine.running) if self.llm.engine else 0


class ActorGroup:
    """A worker group of handles: as the real one sends a method to one worker."""

    def __init__(self, handles: list[Any]) -> None:
        self.handles = handles
        self.dp_leader_worker_indices = list(range(len(handles)))

    def run_single_worker_single_data(
        self, method_name: str, worker_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        return getattr(self.handles[worker_idx], method_name).remote(*args, **kwargs)


class RayController(SingleControllerActor):
    """The controller in an actor, with a run of one step."""

    def __init__(self, handles: list[Any]) -> None:
        super().__init__(workers=ActorGroup(handles))
        self._handles = handles

    async def run_native(self) -> list[list[str]]:
        """Two rollouts of a group at once, on a worker each; a step's refit comes in between."""
        await self._sync_weights()
        buffer, group = self._buffer, self._gen.worker_group
        first = buffer.reserve(weight_version=0)
        one = Completion([{"role": "assistant", "token_ids": [1]}])
        await buffer.commit(first, PromptGroupRecord([], [one]), 0, 0)
        second = buffer.reserve(weight_version=0)

        async def trajectory(index: int) -> Completion:
            log: list[dict[str, Any]] = []
            for turn in range(2):
                sent = group.run_single_worker_single_data(
                    method_name="generate_async", worker_idx=index, data=20, greedy=False
                )
                reply = await anext(sent)
                _, tokens = await reply
                log.append({"role": "assistant", "token_ids": tokens})
                log.append({"role": "user", "token_ids": [0] * turn})
            return Completion(log)

        async def rollout(prompt: Any) -> PromptGroupRecord:
            tasks = [asyncio.ensure_future(trajectory(index)) for index in range(2)]
            return PromptGroupRecord([], list(await asyncio.gather(*tasks)))

        self._rollout_manager.rollout = rollout
        running = asyncio.ensure_future(self._rollout_manager.run_rollout(None))
        for handle in self._handles:
            while not await handle.num_running.remote():
                await asyncio.sleep(0.01)
        await self.train_step(1)
        await buffer.commit(second, await running, 0, 1)
        await self.train_step(1)
        self._logger.finish()
        return [await handle.heard.remote() for handle in self._handles]

    async def run(self) -> list[list[str]]:
        staged: dict[str, dict[str, Any]] = {}
        assembled(self, staged)
        await self._sync_weights()
        receipts: list[dict[str, Any] | None] = []
        for number, handle in enumerate(self._handles):
            await handle.begin.remote(f"call{number}")
        for number, handle in enumerate(self._handles):
            record, staged[f"call{number}"] = await handle.finish.remote(f"call{number}", 20)
            receipts.append(receipt([record]))
        self._buffer.reserve(weight_version=0, group_id="a")
        await self._finalize_with_actor(request("a", receipts))
        await self.train_step(1)
        self._logger.finish()
        return [await handle.heard.remote() for handle in self._handles]


class LocalActor:
    """The controller's class as Ray decorates it, in this process: for a launcher's ``remote``."""

    def __init__(self, controller: SingleControllerActor, loop: LoopThread) -> None:
        self._controller = controller
        self._loop = loop

    @classmethod
    def remote(cls, **options: Any) -> LocalActor:
        loop = LoopThread()
        group = RayWorkerGroup([VllmAsyncGenerationWorker(AsyncLLM(), loop.loop)])
        return cls(SingleControllerActor(workers=group), loop)

    @property
    def __ray_call__(self) -> Any:
        def remote(fn: Callable[..., Any], *args: Any) -> ObjectRef:
            future: Future[Any] = Future()
            future.set_result(fn(self._controller, *args))
            return ObjectRef(future)

        method = type("Method", (), {})()
        method.remote = remote
        return method

    def run(self) -> None:
        controller = self._controller
        record = PromptGroupRecord([], [Completion([{"role": "assistant", "token_ids": [1] * 7}])])

        async def work() -> None:
            await controller._sync_weights()
            group = controller._buffer.reserve(weight_version=0)
            await controller._buffer.commit(group, record, 0, 0)
            await controller.train_step(1)
            controller._logger.finish()

        asyncio.run(work())
        controller._gen.worker_group.stop()
        self._loop.stop()
