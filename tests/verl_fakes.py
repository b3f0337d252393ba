"""Stand-ins with the signatures of verl 0.9.1, for where it is not installed.

They keep the order in which verl's trainer v1 calls its own methods, and nothing of what those do.
`REAL` says which class each stands for; a test compares them where verl is installed.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

REAL = {
    "PPOTrainer": "verl.trainer.ppo.v1.trainer_base",
    "ReplayBuffer": "verl.trainer.ppo.v1.replay_buffer",
    "AgentLoopWorkerTQ": "verl.trainer.ppo.v1.agent_loop_tq",
    "LLMServerClient": "verl.workers.rollout.llm_server",
    "FullyAsyncLLMServerClient": "verl.workers.rollout.llm_server",
    "CheckpointEngineManager": "verl.checkpoint_engine",
}


class Namespace(SimpleNamespace):
    """As much of a DictConfig as is asked for."""

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)


def config(folder: Any, *, mode: str = "staleness_separate_async", **changes: Any) -> Any:
    """A configuration of two prompts a step, two rows a prompt, two samples a step."""
    return Namespace(
        trainer=Namespace(
            v1=Namespace(trainer_mode=mode),
            staleness=changes.pop("staleness", None),
            default_local_dir=str(folder),
            resume_mode="auto",
        ),
        data=Namespace(train_batch_size=2),
        algorithm=Namespace(rollout_correction=changes.pop("rollout_correction", None)),
        actor_rollout_ref=Namespace(
            actor=Namespace(ppo_mini_batch_size=1, ppo_epochs=1, shuffle=False),
            rollout=Namespace(n=2, agent=Namespace(agent_loop_manager_class=None)),
        ),
    )


class Queue(ModuleType):
    """The transfer queue: rows by key."""

    def __init__(self) -> None:
        super().__init__("transfer_queue")
        self.rows: dict[str, dict[str, Any]] = {}

    def kv_batch_get(self, keys: Any, partition_id: str, select_fields: Any) -> dict[str, Any]:
        return {field: [self.rows[key][field] for key in keys] for field in select_fields}


class ActorClass:
    """What ``ray.remote`` makes of a class."""

    def __init__(self, plain: Any) -> None:
        self.__ray_actor_class__ = plain


def install(monkeypatch: pytest.MonkeyPatch) -> Queue:
    """Let the adapter find these modules in place of verl's."""
    queue = Queue()
    modules: dict[str, Any] = {
        "transfer_queue": queue,
        "omegaconf": SimpleNamespace(open_dict=nullcontext),
        "ray": SimpleNamespace(remote=ActorClass),
        "verl.utils.ray_utils": SimpleNamespace(auto_await=auto_await),
        "verl.workers.rollout.llm_server": SimpleNamespace(LLMServerClient=LLMServerClient),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return queue


def auto_await(function: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(function(*args, **kwargs))
        return function(*args, **kwargs)

    return call


class Batch:
    """Keys and tags of rows."""

    def __init__(self, keys: list[str], tags: list[dict[str, Any]]) -> None:
        self.keys, self.tags, self.partition_id = keys, tags, "train"


class ReplayBuffer:
    def __init__(self) -> None:
        self.partitions: dict[str, dict[str, Any]] = {"train": {}}

    def _evict_terminal_groups(
        self, global_steps: int, partition_id: str, eviction_reasons: Any
    ) -> Any:
        uids = set().union(*eviction_reasons[:3])
        self._clear_groups(partition_id, uids)
        return uids, 0, 0, {}

    def _clear_groups(self, partition_id: str, uids: set[str]) -> None:
        rows = self.partitions[partition_id]
        for key in [key for key in rows if key.split("_")[0] in uids]:
            del rows[key]

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> Any:
        rows = self.partitions[partition_id]
        uids = list(dict.fromkeys(key.split("_")[0] for key in rows))[:batch_size]
        keys = [key for key in rows if key.split("_")[0] in uids]
        return Batch(keys, [rows.pop(key) for key in keys]), {}


class CheckpointEngineManager:
    def __init__(self, replicas: list[Any]) -> None:
        self.replicas = replicas
        self.sent: list[int | None] = []
        self.error: Exception | None = None

    async def _update(self, global_steps: int | None) -> dict[str, int]:
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        self.sent.append(global_steps)
        return {"sync": 1}

    update_weights: Any


def _update_weights(self: Any, global_steps: int | None = None) -> Any:
    return self._update(global_steps)


CheckpointEngineManager.update_weights = auto_await(_update_weights)
CheckpointEngineManager.update_weights.__signature__ = __import__("inspect").signature(
    _update_weights
)


class PPOTrainer:
    def __init__(self, config: Any) -> None:
        self.config = config
        self.parameter_sync_step = 2
        self.replay_buffer = self._build_replay_buffer()
        self.global_steps = 0
        self.logged: list[dict[str, Any]] = []
        self.saves = False

    def _build_replay_buffer(self) -> Any:
        return ReplayBuffer()

    def _setup(self) -> None:
        self.checkpoint_manager = CheckpointEngineManager([Namespace(server_address="s")])
        self.actor_rollout_wg = SimpleNamespace(_dispatch_info={"actor": [0]})
        self.client = FullyAsyncLLMServerClient(self.config)

    def init(self) -> None:
        self._setup()
        self.checkpoint_manager.update_weights(self.global_steps)

    def get_llm_client(self) -> Any:
        return self.client

    def fit(self, agent_loop_manager: Any) -> None:
        for generate in agent_loop_manager:
            self.global_steps += 1
            generate(self)
            metrics: dict[str, Any] = {"training/off_policy/trajectory_staleness/mean": 0.5}
            batch = self.step(metrics, {})
            if self.saves:
                self._save_checkpoint()
            self.checkpoint_manager.update_weights(self.global_steps)
            self._compute_metrics(batch, metrics, {}, self.global_steps, 0)
            self.logged.append(metrics)

    def step(self, metrics: dict[str, Any], timing_raw: dict[str, Any]) -> Any:
        keys: list[str] = []
        tags: list[dict[str, Any]] = []
        for _ in range(self.parameter_sync_step):
            batch = self._step_once(metrics, timing_raw, 1)
            keys += batch.keys
            tags += batch.tags
        return Batch(keys, tags)

    def _step_once(
        self, metrics: dict[str, Any], timing_raw: dict[str, Any], sample_batch_size: int
    ) -> Any:
        batch, _ = self.replay_buffer.sample(self.global_steps, "train", sample_batch_size)
        return self._update_actor(self._balance_batch(batch, metrics), metrics)

    def _balance_batch(
        self,
        batch: Any,
        metrics: Any,
        logging_prefix: str = "global_seqlen",
        keep_minibatch: bool = False,
    ) -> Any:
        while len(batch.keys) % 2:
            batch.keys.append(f"pad_{len(batch.keys)}_0")
            batch.tags.append({"is_padding": True})
        return batch

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        return batch

    def _compute_metrics(
        self, batch: Any, metrics: Any, timing_raw: Any, global_steps: int, epoch: int
    ) -> None:
        pass

    def _save_checkpoint(self) -> None:
        pass


class LLMServerClient:
    """A client whose servers answer with what `answers` holds."""

    def __init__(self, config: Any, load_balancer_handle: Any = None, **kwargs: Any) -> None:
        self.config = config
        self.answers: list[Any] = []

    async def _acquire_server(self, request_id: str, **extra: Any) -> tuple[str, Any]:
        return "s", None

    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        image_data: Any = None,
        video_data: Any = None,
        audio_data: Any = None,
        mm_processor_kwargs: Any = None,
        **kwargs: Any,
    ) -> Any:
        await self._acquire_server(request_id)
        return self.answers.pop(0)


class FullyAsyncLLMServerClient(LLMServerClient):
    """Sends a request again until it is not aborted."""

    async def _acquire_server(self, request_id: str, **extra: Any) -> tuple[str, Any]:
        return await super()._acquire_server(request_id, **extra)

    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        image_data: Any = None,
        video_data: Any = None,
        audio_data: Any = None,
        mm_processor_kwargs: Any = None,
        **kwargs: Any,
    ) -> Any:
        tokens: list[int] = []
        while True:
            output = await super().generate(
                request_id=request_id,
                prompt_ids=prompt_ids + tokens,
                sampling_params=sampling_params,
            )
            tokens += output.token_ids
            if output.stop_reason != "aborted":
                return answer(tokens, output.extra_fields["global_steps"])


class AgentLoopWorkerTQ:
    def __init__(self, client: Any, queue: Queue) -> None:
        self.llm_client, self.queue = client, queue

    async def _run_agent_loop(
        self,
        sampling_params: dict[str, Any],
        trajectory: dict[str, Any],
        *,
        agent_name: str,
        trace: bool = True,
        **kwargs: Any,
    ) -> Any:
        output = await self.llm_client.generate(
            request_id="r", prompt_ids=[1], sampling_params=sampling_params
        )
        row = Namespace(
            response_ids=output.token_ids,
            response_mask=[1] * len(output.token_ids),
            extra_fields={},
        )
        return await self._agent_loop_postprocess(row, trajectory["validate"], **kwargs)

    async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> Any:
        self.queue.rows[f"{kwargs['uid']}_{kwargs['session_id']}_0"] = {
            "extra_fields": output.extra_fields,
            "response_mask": output.response_mask,
        }


def answer(tokens: list[int], label: int | None, reason: str = "completed") -> Any:
    """What a server says."""
    return Namespace(token_ids=tokens, stop_reason=reason, extra_fields={"global_steps": label})
