"""A run of verl's own trainer, sampler, queue, agent loops and clients, without a GPU.

Replaced are the workers: the servers sample one token id a version, ``WATERMARK + label``, so that
each token says which weights made it; the actor updates nothing and counts. Started as a program
by the tests, since verl reads ``VERL_USE_EXTERNAL_MODULES`` when it is first imported:

    python tests/verl_run.py FOLDER '{"overrides": ["trainer.v1.trainer_mode=staleness_sync"]}'

It writes ``truth.json`` into the folder: what was trained, by step, as the actor saw it.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

WATERMARK = 10
MODULE = "rl_staleness.integrations.verl"


def write_model(folder: Path) -> None:
    """The smallest model that verl's workers take: a tokenizer and a configuration."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    words = {word: i for i, word in enumerate([*(f"t{i}" for i in range(200)), "E", "P", "U"])}
    raw = Tokenizer(models.WordLevel(words, unk_token="U"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="E", pad_token="P", unk_token="U"
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    tokenizer.save_pretrained(folder)
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=203,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        intermediate_size=8,
    ).save_pretrained(folder)


class Server:
    """What verl asks of a server: generates the token of its weights, can be aborted and parked."""

    def __init__(self, seconds_a_token: float) -> None:
        self._label: int | None = None
        self._seconds = seconds_a_token
        self._is_open = asyncio.Event()
        self._running = 0
        self._rejects = False

    async def generate(
        self, *, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, **_: Any
    ) -> Any:
        from verl.workers.rollout.replica import TokenOutput

        while not self._is_open.is_set():
            if self._rejects:
                return TokenOutput(
                    token_ids=[], stop_reason="aborted", extra_fields={"global_steps": self._label}
                )
            await self._is_open.wait()
        limit = min(sampling_params.get("max_tokens", 24), 24)
        number = 4 + sum(map(ord, request_id)) % 20
        tokens: list[int] = []
        self._running += 1
        try:
            while self._is_open.is_set() and len(tokens) < min(limit, number):
                await asyncio.sleep(self._seconds)
                if self._is_open.is_set():
                    tokens.append(WATERMARK + (self._label or 0))
        finally:
            self._running -= 1
        is_whole = len(tokens) >= min(limit, number)
        return TokenOutput(
            token_ids=tokens,
            log_probs=[0.0] * len(tokens),
            stop_reason="completed" if is_whole else "aborted",
            extra_fields={"global_steps": self._label},
        )

    async def set_global_steps(self, global_steps: int | None) -> None:
        if global_steps is not None:
            self._label = global_steps
        self._rejects = False
        self._is_open.set()

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        self._rejects = reject_request
        self._is_open.clear()
        while self._running:
            await asyncio.sleep(0.001)

    async def resume_generation(self) -> None:
        self._rejects = False
        self._is_open.set()

    async def nothing(self) -> None:
        pass


class Reward:
    """Scores a row by its length: some groups are all alike, and filtered where that is asked."""

    def __init__(self, failing: int) -> None:
        self._failing = failing

    async def compute_score(self, data: Any) -> dict[str, Any]:
        length = int(data.non_tensor_batch["response_len"][-1])
        if self._failing and length % self._failing == 0:
            raise ValueError("a session that fails, as it was asked to")
        return {"reward_score": float(length % 2), "reward_extra_info": {}}


class Replica:
    """A server and its address, with the methods that the checkpoint manager calls."""

    def __init__(self, number: int, seconds_a_token: float) -> None:
        import ray

        self.server_address = f"server-{number}"
        self.workers: list[Any] = []
        self.handle = ray.remote(Server).options(max_concurrency=100).remote(seconds_a_token)

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        await self.handle.abort_all_requests.remote(reject_request)

    async def resume_generation(self) -> None:
        await self.handle.resume_generation.remote()

    async def nothing(self) -> None:
        pass

    sleep = wake_up = release_kv_cache = resume_kv_cache = nothing


class Actors:
    """The worker group: sends labels to servers, keeps what it is asked to train."""

    world_size = 1

    def __init__(self, replicas: list[Replica]) -> None:
        self._dispatch_info = {"actor": [0, 1]}
        self._replicas = replicas
        self.samples: list[list[str]] = []

    def update_weights(self, *, global_steps: int | None, mode: str) -> list[Any]:
        return [r.handle.set_global_steps.remote(global_steps) for r in self._replicas]

    def compute_log_prob(self, batch: Any) -> Any:
        """Every third token is far from what the servers said: it may be rejected."""
        import torch
        import transfer_queue as tq
        from tensordict import TensorDict

        data = tq.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=["input_ids"]
        )
        far = [
            torch.tensor([-3.0 * (i % 3 == 0) for i in range(len(r))]) for r in data["input_ids"]
        ]
        nested = torch.nested.as_nested_tensor(far, layout=torch.jagged)
        columns = TensorDict({"log_probs": nested, "entropy": nested}, batch_size=len(batch))
        tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=columns)
        return batch

    def update_actor(self, batch: Any) -> Any:
        import transfer_queue as tq

        data = tq.kv_batch_get(
            keys=batch.keys,
            partition_id=batch.partition_id,
            select_fields=["responses", "response_mask"],
        )
        rows = [
            [int(t) for t, m in zip(ids, mask, strict=True) if m]
            for ids, mask in zip(data["responses"], data["response_mask"], strict=True)
        ]
        self.samples.append([json.dumps(row) for row in rows])
        return {"metrics": {"mfu": [0.0], "loss": [0.0]}}

    def save_checkpoint(self, *_: Any, **__: Any) -> None:
        pass

    def load_checkpoint(self, **_: Any) -> None:
        pass


def trainer_class(base: Any, options: dict[str, Any]) -> Any:
    """One of verl's trainers whose `_setup` makes the replaced parts, and nothing else."""

    class Trainer(base):  # type: ignore[misc]
        def _setup(self) -> None:
            import ray
            from omegaconf import OmegaConf
            from verl.checkpoint_engine import CheckpointEngineManager
            from verl.utils.config import omega_conf_to_dataclass
            from verl.utils.ray_utils import auto_await
            from verl.workers.rollout.llm_server import LLMServerManager

            actor = self.config.actor_rollout_ref
            self.tokenizer = omega_conf_to_dataclass(actor.model).tokenizer
            self.total_training_steps = self.config.trainer.total_training_steps
            self.steps_per_epoch = 1000
            self.train_dataloader = SimpleNamespace(
                state_dict=dict, load_state_dict=lambda state: None
            )
            self._init_dump_executor()
            self.reward_loop_manager = SimpleNamespace(
                reward_loop_worker_handles=[ray.remote(Reward).remote(options.get("failing", 0))]
            )
            self.resource_pool_manager = SimpleNamespace(get_n_gpus=lambda: 1)
            self.ref_in_actor, self.distillation_config = False, None
            replicas = [Replica(n, options.get("seconds_a_token", 0.01)) for n in range(2)]
            self.actor_rollout_wg = Actors(replicas)

            class Manager(LLMServerManager):  # type: ignore[misc]
                rollout_replica_class = None

            manager = Manager(config=self.config, worker_group=self.actor_rollout_wg)
            manager.rollout_replicas = replicas
            manager.server_handles = [r.handle for r in replicas]
            manager.server_addresses = [r.server_address for r in replicas]
            asyncio.run(manager._init_global_load_balancer())
            self.llm_server_manager = self.standalone_server_manager = manager
            engine = omega_conf_to_dataclass(actor.rollout.checkpoint_engine)
            engine.backend = "naive"

            class Separate(CheckpointEngineManager):  # type: ignore[misc]
                @auto_await
                async def update_weights(self, global_steps: int | None = None) -> Any:
                    await self.abort_replicas()  # and no process group
                    sent = await CheckpointEngineManager.update_weights(self, global_steps)
                    await self.resume_generation_replicas()
                    return sent

            is_separate = hasattr(base, "switch_to_trainer")
            manager_class = Separate if is_separate else CheckpointEngineManager
            self.checkpoint_manager = manager_class(
                config=engine, actor_wg=self.actor_rollout_wg, replicas=replicas
            )
            if is_separate:
                self.standalone_checkpoint_manager = self.checkpoint_manager
                self.current_mode = None  # of hybrid replicas: there are none
            assert ray.is_initialized() and OmegaConf.is_config(self.config)
            self._load_checkpoint()

        def _fetch_one_gen_batch(self) -> Any:
            import uuid

            import numpy as np
            from verl.utils import tensordict_utils as tu

            prompts = np.empty(1, dtype=object)
            prompts[0] = [{"role": "user", "content": "t1 t2 t3"}]
            columns = {
                "raw_prompt": prompts,
                "uid": np.array([str(uuid.uuid4())], dtype=object),
                "index": np.array([0], dtype=object),
                "data_source": np.array(["test"], dtype=object),
                "reward_model": np.array([{"ground_truth": ""}], dtype=object),
            }
            return tu.get_tensordict(columns)

        def _update_actor(self, batch: Any, metrics: Any) -> Any:
            batch = super()._update_actor(batch, metrics)
            self.truth.setdefault(self.global_steps, []).append(
                [json.loads(row) for row in self.actor_rollout_wg.samples.pop()]
            )
            return batch

        def _compute_metrics(self, batch: Any, metrics: Any, *args: Any, **kwargs: Any) -> None:
            super()._compute_metrics(batch, metrics, *args, **kwargs)
            self.logged = metrics

    return Trainer


def start_ray(folder: Path) -> None:
    """Start it; on a busy machine its node is now and then too late for the limit in its code."""
    import ray

    for attempt in range(3):
        try:
            ray.init(
                num_cpus=32,
                include_dashboard=False,
                logging_level="ERROR",
                log_to_driver=False,
                _temp_dir=str(folder),
                runtime_env={"env_vars": {"PYTHONPATH": os.getcwd()}},
            )
        except Exception as error:  # Ray raises nothing narrower
            if attempt == 2 or "timed out during startup" not in str(error):
                raise
            ray.shutdown()
        else:
            return


def main(folder: Path, options: dict[str, Any], *, ray_folder: Path) -> None:
    """Run, and write down what was trained."""
    os.environ.update(
        VERL_USE_EXTERNAL_MODULES=MODULE,
        RAY_USAGE_STATS_ENABLED="0",
        RAY_AUTH_TOKEN=secrets.token_hex(32),
        RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",  # listen on the loopback interface only
        HF_HUB_OFFLINE="1",
    )
    import ray
    import transfer_queue as tq
    import verl
    from hydra import compose, initialize_config_dir
    from verl.trainer.ppo.v1 import AgentLoopManagerTQ, get_trainer_cls
    from verl.utils.import_utils import load_class_from_fqn

    from rl_staleness.integrations.verl import PREFIX, measured

    model = folder / "model"
    write_model(model)
    configs = Path(verl.__file__).parent / "trainer" / "config"
    with initialize_config_dir(str(configs), version_base=None):
        config = compose(
            "ppo_trainer",
            overrides=[
                f"actor_rollout_ref.model.path={model}",
                f"trainer.default_local_dir={folder / 'checkpoints'}",
                "trainer.logger=[console]",
                "trainer.total_epochs=1000",
                "trainer.val_before_train=false",
                "trainer.test_freq=-1",
                "algorithm.adv_estimator=grpo",
                "algorithm.rollout_correction.bypass_mode=true",
                "actor_rollout_ref.rollout.calculate_log_probs=true",
                "actor_rollout_ref.rollout.name=vllm",
                "actor_rollout_ref.rollout.agent.num_workers=1",
                "actor_rollout_ref.rollout.n=2",
                "data.train_batch_size=4",
                "++data.gen_batch_size=1",
                "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
                *options.get("overrides", ()),
            ],
        )
    mode = config.trainer.v1.trainer_mode
    base = get_trainer_cls(mode.removeprefix(PREFIX))
    start_ray(ray_folder)
    config.transfer_queue.enable = True
    tq.init(config.transfer_queue)
    trainer_cls = trainer_class(base, options)
    trainer = (measured(trainer_cls) if mode.startswith(PREFIX) else trainer_cls)(config=config)
    trainer.truth = {}
    trainer.replay_buffer.poll_interval = 0.05
    trainer.init()
    name = config.actor_rollout_ref.rollout.agent.agent_loop_manager_class
    manager = load_class_from_fqn(name) if name else AgentLoopManagerTQ
    loops = manager.create(
        config=config,
        llm_client=trainer.get_llm_client(),
        teacher_client=None,
        reward_loop_worker_handles=trainer.get_reward_handles(),
    )
    trainer.fit(loops)
    truth = {
        "steps": {
            step: [Counter(t - WATERMARK for row in s for t in row) for s in samples]
            for step, samples in trainer.truth.items()
        },
        "logged": {k: v for k, v in trainer.logged.items() if isinstance(v, (int, float))},
        "types": [
            type(part).__module__ for part in (trainer.checkpoint_manager, trainer.replay_buffer)
        ],
    }
    (folder / "truth.json").write_text(json.dumps(truth, default=float))
    tq.close()
    ray.shutdown()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="ray-") as ray_folder:
        main(Path(sys.argv[1]), json.loads(sys.argv[2]), ray_folder=Path(ray_folder))
