"""Exact batch age for verl 0.9 (trainer v1), through verl's own ways in: nothing of it is patched.

    export VERL_USE_EXTERNAL_MODULES=rl_staleness.integrations.verl
    python -m verl.trainer.main_ppo ... \\
        trainer.v1.trainer_mode=staleness_separate_async \\
        +trainer.staleness.warn_age_above=8                   # optional, see `OPTIONS`

``staleness_sync`` and ``staleness_colocate_async`` are there as well; a trainer of your own is
``@register_trainer("mine") class Mine(measured(PPOTrainerSync))``. Engine and agent loop workers
run in other processes: with Ray on several machines the variable belongs in
``+ray_kwargs.ray_init.runtime_env.env_vars`` too. The numbers stand as ``staleness/...`` in verl's
own Tracking record of the step, beside its ``training/off_policy/*``; the trace is
``<trainer.default_local_dir>/rollout_trace.jsonl``, ``rl-staleness upload`` attaches it to a run.

What is held where, and through what:

    register_trainer            a subclass of verl's trainer overrides its own hooks:
      get_llm_client            each attempt of a request is a call: (server, label, tokens)
      step, _update_actor       on_step, with the mini-batches that the workers cut (`batches`)
      _balance_batch            on_publish: what the sampler chose, before padding is added
      _compute_metrics, fit     the numbers, the end
      _save_checkpoint          policy updates and labels, ``rl_staleness.json`` in its folder
    agent_loop_manager_class    workers that put the attempts into ``extra_fields`` of their rows;
                                set by the trainer. Your own manager: ``recording(YourManager)``,
                                else a row has the bounds of its tags, exact where they agree
    no official hook            the replay buffer's evictions and the checkpoint managers'
                                ``update_weights``: the trainer holds subclass twins of its own
                                objects until `fit` ends

Its words: a label is ``global_steps``, the step after which weights were sent. A step makes
``parameter_sync_step`` x mini-batches x ``ppo_epochs`` policy updates; `version` counts those, so
label g is the count at the end of step g. Its ``trajectory_staleness`` counts labels, from the
newest tokens of a row on; `batch_age_refits` is the nearest of ours. Aborted requests are sent
again, so a call lies in one version, no cut is needed, and coverage is 1 unless evidence is lost.

A row is a group where a sample is split into several mini-batches, else a prompt is. It cannot see
tokens that ``rollout_correction`` rejects within the loss (``bypass_mode`` with ``rollout_rs``),
the split of a shuffled sample (bounds), a request that verl's abort did not reach before weights
moved (it warns), nor the time at which a row was finished: rows are published when they are
sampled. ``experimental.fully_async_policy`` names its classes in its own code and has no way in:
it is not measured, the mode ``separate_async`` does the same. Tested with verl 0.9.1.
"""

from __future__ import annotations

import inspect
import logging
import sys
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from functools import cache
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from rl_staleness.callback import StalenessCallback
from rl_staleness.guard import Guard
from rl_staleness.integrations.verl_measurement import ATTEMPTS, STATE, Measurement, Row, Saved
from rl_staleness.integrations.verl_rows import Attempt, evidence, minibatches

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["OPTIONS", "TESTED", "measured", "recording", "register"]

TESTED = ("0.9.1",)
"""Released versions of verl that this was tested with."""

OPTIONS = (
    "trace",
    "run",
    "timeout",
    "warn_age_above",
    "warn_coverage_below",
    "strict",
    "orphan_after",
)
"""Arguments of `StalenessCallback` that ``+trainer.staleness.<name>=`` sets."""

MODES = ("sync", "colocate_async", "separate_async")
PREFIX = "staleness_"
FIELD = "rl_staleness"
"""Where the attempts of a row travel: a key of its ``extra_fields``."""

_HOOKS: dict[str, dict[str, tuple[str, ...]]] = {
    "verl.trainer.ppo.v1.trainer_base:PPOTrainer": {
        "__init__": ("config",),
        "_setup": (),
        "_build_replay_buffer": (),
        "get_llm_client": (),
        "fit": ("agent_loop_manager",),
        "step": ("metrics", "timing_raw"),
        "_balance_batch": ("batch", "metrics"),
        "_update_actor": ("batch", "metrics"),
        "_compute_metrics": ("batch", "metrics", "timing_raw", "global_steps", "epoch"),
        "_save_checkpoint": (),
    },
    "verl.trainer.ppo.v1.replay_buffer:ReplayBuffer": {
        "_clear_groups": ("partition_id", "uids"),
        "_evict_terminal_groups": ("global_steps", "partition_id", "eviction_reasons"),
    },
    "verl.trainer.ppo.v1.agent_loop_tq:AgentLoopWorkerTQ": {
        "_run_agent_loop": ("sampling_params", "trajectory"),
        "_agent_loop_postprocess": ("output", "validate"),
    },
    "verl.workers.rollout.llm_server:LLMServerClient": {
        "_acquire_server": ("request_id",),
        "generate": ("request_id", "prompt_ids", "sampling_params"),
    },
    "verl.checkpoint_engine:CheckpointEngineManager": {"update_weights": ("global_steps",)},
}
"""Methods that are overridden, by class, with the parameters that they must have."""

_log = logging.getLogger(__name__)

_session: ContextVar[list[Attempt] | None] = ContextVar("rl_staleness_verl_session", default=None)
_server: ContextVar[str] = ContextVar("rl_staleness_verl_server", default="")

_guard = Guard(strict=False, timeout=0.0)
"""Of what runs in agent loop workers, where there is no callback."""


# verl's own classes, with ours in front. Under `TYPE_CHECKING`: what is overridden, as in `TESTED`.

if TYPE_CHECKING:

    class _Trainer:
        config: Any
        global_steps: int
        parameter_sync_step: int
        actor_rollout_wg: Any

        def __init__(self, config: Any) -> None: ...
        def _setup(self) -> None: ...
        def _build_replay_buffer(self) -> Any: ...
        def get_llm_client(self) -> Any: ...
        def fit(self, agent_loop_manager: Any) -> None: ...
        def step(self, metrics: Any, timing_raw: Any) -> Any: ...
        def _balance_batch(self, batch: Any, metrics: Any, *args: Any, **kwargs: Any) -> Any: ...
        def _update_actor(self, batch: Any, metrics: Any) -> Any: ...
        def _compute_metrics(
            self, batch: Any, metrics: Any, timing_raw: Any, global_steps: int, epoch: int
        ) -> None: ...
        def _save_checkpoint(self) -> None: ...

    class _Client:
        async def _acquire_server(self, request_id: str, **extra: Any) -> tuple[str, Any]: ...
        async def generate(self, request_id: str, **kwargs: Any) -> Any: ...

    class _Worker:
        llm_client: Any

        async def _run_agent_loop(self, *args: Any, **kwargs: Any) -> Any: ...
        async def _agent_loop_postprocess(
            self, output: Any, validate: bool, **kwargs: Any
        ) -> Any: ...

    class _Manager:
        agent_loop_workers_class: Any

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...

else:
    _Trainer = _Client = _Worker = _Manager = object


class _MeasuredTrainer(_Trainer):
    """verl's hooks, each followed or preceded by ours."""

    _staleness: Measurement | None = None

    def __init__(self, config: Any) -> None:
        self._originals: dict[str, Any] = {}
        _adopt(config)
        super().__init__(config)

    def _build_replay_buffer(self) -> Any:
        buffer = self._originals["replay_buffer"] = super()._build_replay_buffer()
        return _dropping(buffer, self._dropped)

    def _setup(self) -> None:
        super()._setup()
        managers = {
            name: getattr(self, name)
            for name in ("checkpoint_manager", "standalone_checkpoint_manager")
            if getattr(self, name, None) is not None
        }
        servers = [name for manager in managers.values() for name in _servers(manager)]
        self._staleness = _measurement(self, servers)
        self._originals.update(managers)
        for name, manager in managers.items():
            setattr(self, name, _refitting(manager, self._staleness))

    def get_llm_client(self) -> Any:
        client = super().get_llm_client()
        return client if self._staleness is None else _answering(client, self._staleness.process)

    def fit(self, agent_loop_manager: Any) -> None:
        status = "failed"
        try:
            super().fit(agent_loop_manager)
            status = "finished"
        finally:
            self.detach_staleness(status)

    def detach_staleness(self, status: str = "finished") -> None:
        """Close the measurement, and give the trainer its own objects back."""
        measurement, self._staleness = self._staleness, None
        if measurement is not None:
            measurement.close(status)
        for name, original in self._originals.items():
            setattr(self, name, original)
        self._originals.clear()

    def step(self, metrics: Any, timing_raw: Any) -> Any:
        batch = super().step(metrics, timing_raw)
        measurement = self._staleness
        if measurement is not None:
            masks: dict[str, list[int]] | None = None
            if measurement.late_masks:
                with measurement.guard("reading response_mask"):
                    masks = _masks(batch)
            with measurement.guard("telling of a step"):
                measurement.step(self.global_steps, masks=masks)
        return batch

    def _balance_batch(self, batch: Any, metrics: Any, *args: Any, **kwargs: Any) -> Any:
        if self._staleness is not None:
            with self._staleness.guard("telling of a sample"):
                rows = _rows(batch.keys, batch.tags, batch.partition_id, self._staleness.guard)
                self._staleness.publish(rows)
        return super()._balance_batch(batch, metrics, *args, **kwargs)

    def _update_actor(self, batch: Any, metrics: Any) -> Any:
        batch = super()._update_actor(batch, metrics)
        if self._staleness is not None:
            with self._staleness.guard("counting policy updates"):
                self._staleness.count(_num_updates(self, batch))
            with self._staleness.guard("finding the mini-batches of a sample"):
                padding = [bool(tag.get("is_padding")) for tag in batch.tags]
                cut = _cut(self, batch)
                self._staleness.update(batch.keys, is_padding=padding, cut=cut)
        return batch

    def _compute_metrics(
        self, batch: Any, metrics: Any, timing_raw: Any, global_steps: int, epoch: int
    ) -> None:
        super()._compute_metrics(batch, metrics, timing_raw, global_steps, epoch)
        if self._staleness is not None:
            with self._staleness.guard("logging"):
                metrics.update(self._staleness.callback.metrics(global_steps))

    def _save_checkpoint(self) -> None:
        if self._staleness is not None:
            with self._staleness.guard(f"writing {STATE}"):
                folder = Path(self.config.trainer.default_local_dir)
                self._staleness.save(folder / f"global_step_{self.global_steps}")
        super()._save_checkpoint()

    def _dropped(self, buffer: Any, uids: Iterable[str], reason: Callable[[str], str]) -> None:
        if self._staleness is not None:
            with self._staleness.guard("telling of a drop"):
                tags = {
                    key: tag
                    for key, tag in buffer.partitions["train"].items()
                    if key.split("_")[0] in uids
                }
                rows = _rows([*tags], [*tags.values()], "train", self._staleness.guard)
                self._staleness.drop(rows, reason=reason)


class _RecordingClient(_Client):
    """Notes each attempt of a request; stands right before verl's `LLMServerClient`."""

    async def _acquire_server(self, request_id: str, **extra: Any) -> tuple[str, Any]:
        server_id, server = await super()._acquire_server(request_id, **extra)
        _server.set(server_id)
        return server_id, server

    async def generate(self, request_id: str, **kwargs: Any) -> Any:
        output = await super().generate(request_id, **kwargs)
        _note(output)
        return output


class _RecordingWorker(_Worker):
    """Gathers the attempts of a session and puts them into its rows."""

    async def _run_agent_loop(self, *args: Any, **kwargs: Any) -> Any:
        token = _session.set([])
        try:
            return await super()._run_agent_loop(*args, **kwargs)
        finally:
            _session.reset(token)

    async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> Any:
        if not validate:
            _attach(output, process=getattr(self.llm_client, FIELD, ""))
        return await super()._agent_loop_postprocess(output, validate, **kwargs)


class _RecordingManager(_Manager):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = _recording_worker(self.agent_loop_workers_class)


def _note(output: Any) -> None:
    attempts = _session.get()
    if attempts is not None:
        with _guard("noting an attempt"):
            label = output.extra_fields.get("global_steps")
            label = None if label is None else int(label)
            attempts.append(Attempt(_server.get(), label, [*output.token_ids]))


def _attach(output: Any, *, process: str) -> None:
    attempts = _session.get()
    outputs: list[Any] = [output] if hasattr(output, "response_ids") else list(output)
    if attempts is not None:
        with _guard("attaching attempts to a row"):
            rows = [(one.response_ids, one.response_mask) for one in outputs]
            for one, found in zip(outputs, evidence(attempts, rows, process=process), strict=True):
                one.extra_fields[FIELD] = found


# From verl's classes and objects to ours.


@cache
def measured(trainer: Any) -> Any:
    """A subclass of one of verl's v1 trainers whose runs are measured."""
    return type(f"Measured{trainer.__name__}", (_MeasuredTrainer, trainer), {})


@cache
def recording(manager: Any) -> Any:
    """A subclass of an agent loop manager whose workers tell of each attempt."""
    return type(f"Recording{manager.__name__}", (_RecordingManager, manager), {})


@cache
def _recording_worker(worker: Any) -> Any:
    plain = worker.__ray_actor_class__
    subclass = type(f"Recording{plain.__name__}", (_RecordingWorker, plain), {})
    return import_module("ray").remote(subclass)


def _answering(client: Any, process: str) -> Any:
    """The same client, noting each attempt where the class of them all makes it."""
    innermost = import_module("verl.workers.rollout.llm_server").LLMServerClient
    inner = type("RecordingClient", (_RecordingClient, innermost), {})
    own = _class_of(client)
    bases = (inner,) if own is innermost else (own, inner)
    twin: Any = object.__new__(type(f"Recording{own.__name__}", bases, {}))
    twin.__dict__.update(client.__dict__)
    setattr(twin, FIELD, process)
    return twin


def _class_of(thing: Any) -> Any:
    return cast("Any", type(thing))


def _twin(original: Any, methods: Mapping[str, Any]) -> Any:
    """An object of a subclass with the state of another: they share it."""
    own = _class_of(original)
    twin: Any = object.__new__(type(own.__name__, (own,), dict(methods)))
    twin.__dict__ = original.__dict__
    return twin


def _refitting(manager: Any, measurement: Measurement) -> Any:
    """The same checkpoint manager, whose weight syncs are refits."""
    plain = _class_of(manager).update_weights

    async def update_weights(self: Any, global_steps: int | None = None) -> Any:
        with measurement.refit(_servers(self), global_steps):
            result: Any = plain(self, global_steps)
            return await result if inspect.isawaitable(result) else result

    auto_await = import_module("verl.utils.ray_utils").auto_await
    return _twin(manager, {"update_weights": auto_await(update_weights)})


def _servers(manager: Any) -> list[str]:
    names = [
        getattr(replica, "server_address", None) for replica in getattr(manager, "replicas", ())
    ]
    return [name for name in names if isinstance(name, str)]


def _dropping(buffer: Any, dropped: Callable[..., None]) -> Any:
    """The same replay buffer, telling which prompts it evicts, and why, before they are gone."""
    if not hasattr(buffer, "_clear_groups") or not hasattr(buffer, "_evict_terminal_groups"):
        name = type(buffer).__qualname__
        _log.warning("rl_staleness: %s does not say what it drops: dropped_tokens stays 0", name)
        return buffer
    clear = _class_of(buffer)._clear_groups
    evict = _class_of(buffer)._evict_terminal_groups
    reasons: dict[str, str] = {}

    def reason(uid: str) -> str:
        return reasons.get(uid, "surplus")

    def _evict_terminal_groups(self: Any, global_steps: int, partition_id: str, why: Any) -> Any:
        with _guard("reading why prompts are evicted"):
            for uids, name in zip(why, ("stale", "filtered", "failed"), strict=False):
                reasons.update(dict.fromkeys(uids, name))
        try:
            return evict(self, global_steps, partition_id, why)
        finally:
            reasons.clear()

    def _clear_groups(self: Any, partition_id: str, uids: Any) -> Any:
        if partition_id == "train":
            dropped(self, uids, reason)
        return clear(self, partition_id, uids)

    methods = {"_evict_terminal_groups": _evict_terminal_groups, "_clear_groups": _clear_groups}
    return _twin(buffer, methods)


def _rows(keys: Sequence[str], tags: Sequence[Any], partition: str, guard: Guard) -> list[Row]:
    """Fetch what the workers attached; what cannot be read is none."""
    found: list[Any] = [None] * len(keys)
    masks: dict[str, Any] = {}
    if keys:
        with guard(ATTEMPTS):
            extras = _fetch(keys, partition, "extra_fields")
            found = [getattr(one, "data", one).get(FIELD) for one in extras]
    bare = [key for key, one in zip(keys, found, strict=True) if one is None]
    if bare:
        with guard("reading response_mask"):
            masks = dict(zip(bare, _fetch(bare, partition, "response_mask"), strict=True))
    return [
        Row(key, {**tag, "trained": int(sum(masks[key]))} if key in masks else tag, one)
        for key, tag, one in zip(keys, tags, found, strict=True)
    ]


def _masks(batch: Any) -> dict[str, list[int]]:
    keys = [k for k, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding")]
    masks = _fetch(keys, batch.partition_id, "response_mask")
    return {key: [int(one) for one in mask] for key, mask in zip(keys, masks, strict=True)}


def _fetch(keys: Sequence[str], partition: str, field: str) -> list[Any]:
    queue = import_module("transfer_queue")
    data = queue.kv_batch_get(keys=list(keys), partition_id=partition, select_fields=[field])
    return list(data[field])


def _num_updates(trainer: Any, batch: Any) -> int:
    """Optimizer steps that the workers made on a sample."""
    actor = trainer.config.actor_rollout_ref.actor
    rows = actor.ppo_mini_batch_size * trainer.config.actor_rollout_ref.rollout.n
    return int(len(batch.keys) // rows * actor.ppo_epochs)


def _cut(trainer: Any, batch: Any) -> list[list[str]] | None:
    actor = trainer.config.actor_rollout_ref.actor
    rows = actor.ppo_mini_batch_size * trainer.config.actor_rollout_ref.rollout.n
    if len(batch.keys) == rows:
        return [list(batch.keys)] * actor.ppo_epochs
    if actor.shuffle:
        return None
    ranks = max(trainer.actor_rollout_wg._dispatch_info["actor"]) + 1
    return minibatches(batch.keys, rows=rows, ranks=ranks, epochs=actor.ppo_epochs)


# Configuration.


def _adopt(config: Any) -> None:
    """Let verl see its own mode, whose settings are the trainer's, and use workers of ours."""
    options: Mapping[str, Any] = config.trainer.get("staleness") or {}
    for name in options:
        if name not in OPTIONS:
            listed = ", ".join(OPTIONS)
            raise ValueError(
                f"trainer.staleness.{name}: there is no such option; there are {listed}"
            )
    rollout = config.actor_rollout_ref.rollout
    with import_module("omegaconf").open_dict(config):
        mode = config.trainer.v1.trainer_mode
        if mode.removeprefix(PREFIX) in MODES:
            config.trainer.v1.trainer_mode = mode.removeprefix(PREFIX)
        if not rollout.agent.get("agent_loop_manager_class"):
            rollout.agent.agent_loop_manager_class = f"{__name__}.AgentLoopManager"


def _measurement(trainer: Any, servers: Sequence[str]) -> Measurement:
    config, done = trainer.config, int(trainer.global_steps)
    options: dict[str, Any] = dict(config.trainer.get("staleness") or {})
    actor = config.actor_rollout_ref.actor
    sample = config.data.train_batch_size // trainer.parameter_sync_step
    saved = _restored(config, done)
    if saved is None:
        per_sample = max(1, sample // actor.ppo_mini_batch_size) * actor.ppo_epochs
        saved = Saved(version=done * per_sample * trainer.parameter_sync_step, labels={})
        _log.warning(
            "rl_staleness: the checkpoint of step %d has no %s: %d policy updates are assumed, and"
            " rollouts from before have bounds",
            *(done, STATE, saved.version),
        )
    run: str = options.pop("run", None) or saved.run or uuid.uuid4().hex
    if "trace" not in options:
        folder = Path(config.trainer.default_local_dir)
        folder.mkdir(parents=True, exist_ok=True)
        options["trace"] = folder / "rollout_trace.jsonl"
    late_masks = _masks_are_late(config)
    about = {
        "trainer": "verl",
        "verl": _installed(),
        "trainer_mode": str(config.trainer.v1.trainer_mode),
        "parameter_sync_step": int(trainer.parameter_sync_step),
    }
    callback = StalenessCallback(
        run=run,
        version=saved.version,
        step=done + 1,
        sinks=[],
        late_masks=late_masks,
        about=about,
        **options,
    )
    return Measurement(
        callback,
        servers=servers,
        by_row=sample > actor.ppo_mini_batch_size,
        late_masks=late_masks,
        labels=saved.labels,
        run=run,
        strict=bool(options.get("strict")),
    )


def _masks_are_late(config: Any) -> bool:
    """Whether tokens are rejected after the rollout, where the trainer sees it."""
    correction: Any = config.algorithm.get("rollout_correction") or {}
    if not correction.get("rollout_rs"):
        return False
    if correction.get("bypass_mode"):
        _log.warning(
            "rl_staleness: rollout_rs rejects tokens within the loss in bypass_mode: they are"
            " counted as trained"
        )
        return False
    return True


def _restored(config: Any, done: int) -> Saved | None:
    """What `Measurement.save` wrote with the checkpoint that verl goes on from, if any."""
    if not done:
        return Saved(version=0, labels={})
    folder = Path(config.trainer.default_local_dir) / f"global_step_{done}"
    if config.trainer.resume_mode == "resume_path":
        folder = Path(config.trainer.resume_from_path)
    try:
        return msgspec.json.decode((folder / STATE).read_bytes(), type=Saved)
    except (OSError, msgspec.MsgspecError):
        return None


def _installed() -> str:
    try:
        return metadata.version("verl")
    except metadata.PackageNotFoundError:
        return "unknown"


def mismatches() -> list[str]:
    """What the installed verl lacks of what is overridden here."""
    problems: list[str] = []
    for path, methods in _HOOKS.items():
        module, _, name = path.partition(":")
        owner: Any = getattr(import_module(module), name, None)
        owner = getattr(owner, "__ray_actor_class__", owner)
        for method, names in methods.items():
            function = getattr(owner, method, None)
            if function is None:
                problems.append(f"{name}.{method} is not there")
                continue
            there = inspect.signature(function).parameters
            problems += [f"{name}.{method} has no {n!r}" for n in names if n not in there]
    return problems


def register() -> None:
    """Register ``staleness_<mode>`` with verl; a second time does nothing.

    Raises:
        RuntimeError: the installed verl differs where it is held; the message names the places.
    """
    problems, version = mismatches(), _installed()
    if problems:
        raise RuntimeError(
            f"verl {version} cannot be measured (tested: {', '.join(TESTED)}): "
            + "; ".join(problems)
        )
    if version not in TESTED:
        listed = ", ".join(TESTED)
        _log.warning("rl_staleness: verl %s was not tested (tested: %s)", version, listed)
    v1 = import_module("verl.trainer.ppo.v1")
    for mode in MODES:
        v1.register_trainer(PREFIX + mode)(measured(v1.get_trainer_cls(mode)))


def __getattr__(name: str) -> Any:
    """``AgentLoopManager``, for verl's ``agent_loop_manager_class``: made when it is asked for."""
    if name == "AgentLoopManager":
        return recording(import_module("verl.trainer.ppo.v1").AgentLoopManagerTQ)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _register_where_verl_loads_us() -> None:
    try:
        register()
    except (RuntimeError, ImportError) as error:  # verl goes on, and does not know the mode
        _log.error("rl_staleness: %s", error)


if "verl" in sys.modules:
    _register_where_verl_loads_us()
