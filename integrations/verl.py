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
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec

from rl_staleness.callback import StalenessCallback
from rl_staleness.engines import Cut
from rl_staleness.events import LARGEST, Call
from rl_staleness.guard import Guard

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["OPTIONS", "TESTED", "Measurement", "aligned", "measured", "recording", "register"]

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
STATE = "rl_staleness.json"
ATTEMPTS = f"reading the attempts of rows (workers of your own: `recording` in {__name__})"

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

Piece = tuple[int, int, int]
"""Tokens ``[start, stop)`` of a call, and the place of the first one in the row's response."""


class Attempt(NamedTuple):
    """One request to a server, from its sending to its answer."""

    server: str
    label: int | None
    """The server's ``global_steps`` when it answered."""
    tokens: Sequence[int]


_session: ContextVar[list[Attempt] | None] = ContextVar("rl_staleness_verl_session", default=None)
_server: ContextVar[str] = ContextVar("rl_staleness_verl_server", default="")

_guard = Guard(strict=False, timeout=0.0)
"""Of what runs in agent loop workers, where there is no callback."""


# What a row is made of: pure functions.


def aligned(
    attempts: Sequence[Sequence[int]], ids: Sequence[int], mask: Sequence[int]
) -> tuple[list[list[Piece]], int]:
    """Find the trained tokens of a row in the tokens that its attempts generated.

    Returns:
        The trained pieces of each attempt, and the number of trained tokens that none made.

    Attempts of 2 and 3 tokens, a tool's answer, an attempt of 2 that was cut off at 1:

    >>> aligned([[5, 6], [7, 8, 9], [4, 3]], [5, 6, 7, 8, 9, 0, 4], [1, 1, 1, 1, 1, 0, 1])
    ([[(0, 2, 0)], [(0, 3, 2)], [(0, 1, 6)]], 0)
    """
    pieces: list[list[Piece]] = [[] for _ in attempts]
    unknown = following = 0
    for begin, end in _runs(mask):
        place = begin
        while place < end:
            number = _next_attempt(attempts, following, ids, place, end)
            if number is None:
                break
            length = min(len(attempts[number]), end - place)
            pieces[number].append((0, length, place))
            place, following = place + length, number + 1
        unknown += end - place
    return pieces, unknown


def _next_attempt(
    attempts: Sequence[Sequence[int]], first: int, ids: Sequence[int], place: int, end: int
) -> int | None:
    for number in range(first, len(attempts)):
        tokens = attempts[number]
        length = min(len(tokens), end - place)
        if length and list(tokens[:length]) == list(ids[place : place + length]):
            return number
    return None


def _runs(mask: Sequence[int]) -> Iterator[tuple[int, int]]:
    """``[start, stop)`` of the stretches that are not 0."""
    begin = None
    for place, value in enumerate((*mask, 0)):
        if value and begin is None:
            begin = place
        elif not value and begin is not None:
            yield begin, place
            begin = None


def evidence(
    attempts: Sequence[Attempt],
    rows: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    process: str,
) -> list[dict[str, Any]]:
    """What travels with each row of a session: numbers and names of servers, no token.

    Args:
        rows: (response ids, response mask) of each output.
        process: the trainer's process; labels of another one are read by its checkpoint.
    """
    found = [aligned([a.tokens for a in attempts], ids, mask) for ids, mask in rows]
    used = [any(pieces[n] for pieces, _ in found) for n in range(len(attempts))]
    return [
        {
            "process": process,
            "unknown": unknown,
            # What no row trains is a call of the first one.
            "calls": [
                [a.server, a.label, len(a.tokens), [list(piece) for piece in pieces[n]]]
                for n, a in enumerate(attempts)
                if pieces[n] or (row == 0 and not used[n])
            ],
        }
        for row, (pieces, unknown) in enumerate(found)
    ]


def minibatches(
    keys: Sequence[str], *, rows: int, ranks: int, epochs: int
) -> list[list[str]] | None:
    """The rows of each update in order, as the ranks cut them; None where that does not add up.

    >>> minibatches(["a", "b", "c", "d"], rows=2, ranks=2, epochs=1)
    [['a', 'c'], ['b', 'd']]
    """
    if not rows or len(keys) % rows or rows % ranks:
        return None
    share, small = len(keys) // ranks, rows // ranks
    cut = [
        [keys[rank * share + at + i] for rank in range(ranks) for i in range(small)]
        for at in range(0, share, small)
    ]
    return cut * epochs


def _inside(pieces: Iterable[Piece], mask: Sequence[int]) -> list[tuple[int, int]]:
    """What a mask over the response leaves of a call's pieces."""
    return [
        (start + begin, start + end)
        for start, stop, place in pieces
        for begin, end in _runs(mask[place : place + stop - start])
    ]


# The trainer's side.


class _Replica:
    """A server whose calls are over when it is refitted: keeps the numbers of its refits."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.refits: dict[int, int] = {}
        """The last refit that was done, by the version that it led to."""

    def start(self, *, version: int, refit: int) -> Future[None]:
        self.refits[version] = refit
        return _noticed()

    def mark(
        self, refit: int, *, version: int, mode: str, deliver: Callable[[Cut | None], None]
    ) -> Future[None]:
        deliver(Cut(calls={}))
        return _noticed()

    def done(self, refit: int, *, version: int) -> Future[None]:
        self.refits[version] = refit
        return _noticed()

    def aborted(self, refit: int) -> Future[None]:
        return _noticed()

    def detach(self) -> None:
        pass


def _noticed() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """What stands beside verl's own checkpoint."""

    version: int
    """Policy updates so far."""
    labels: dict[int, int]
    """Versions by label."""
    run: str | None = None


class Row(NamedTuple):
    """One output of an agent loop, as the trainer finds it in the queue."""

    key: str
    """``{uid}_{session}_{output}``."""
    tag: Mapping[str, Any]
    found: Mapping[str, Any] | None
    """Its `evidence`, if a worker of ours made it."""


class Measurement:
    """Translates what verl's trainer does into the hooks of a callback.

    Args:
        callback: its engines are made here: the servers.
        by_row: a sample is split into several mini-batches, so rows are trained one by one.
        late_masks: ``response_mask`` changes after the rollout.
        labels: versions by label, from the checkpoint.
        run: the run's identity, for the checkpoint.
        strict: let what goes wrong here raise, too.
    """

    def __init__(
        self,
        callback: StalenessCallback,
        *,
        servers: Iterable[str] = (),
        by_row: bool = False,
        late_masks: bool = False,
        labels: Mapping[int, int] | None = None,
        run: str | None = None,
        strict: bool = False,
    ) -> None:
        self.callback = callback
        self.process = uuid.uuid4().hex
        self.labels = dict(labels or {})
        self.late_masks = late_masks
        self.guard = Guard(strict=strict, timeout=0.0)
        self._run = run
        self._by_row = by_row
        self._replicas = {name: _Replica(name) for name in dict.fromkeys(servers)}
        self._pieces: dict[str, dict[str, list[Piece]]] = {}
        self._groups: dict[str, None] = {}
        self._batches: list[list[str]] | None = []
        self._updates = 0
        callback.attach(*self._replicas.values())

    # Refits.

    @contextmanager
    def refit(self, servers: Iterable[str], label: int | None) -> Generator[None]:
        """Weights are sent to servers; their requests are aborted first, or none are running."""
        names = list(servers)
        self.callback.on_refit_paused(engines=names, mode="abort")
        try:
            yield
        except BaseException as error:
            self.callback.on_refit_aborted(reason=type(error).__name__, engines=names)
            raise
        if label is not None:
            self.labels[label] = self.callback.version
        self.callback.on_refit_done(engines=names)

    # Rows.

    def unit(self, key: str) -> str:
        """The group that a row belongs to."""
        return key if self._by_row else key.split("_")[0]

    def publish(self, rows: Iterable[Row]) -> None:
        """The sampler chose these rows."""
        for group, members in self._grouped(rows).items():
            content = [self._calls(row) for row in members]
            self.callback.on_publish(
                group,
                calls=[call for calls, _ in content for call in calls],
                unknown=sum(unknown for _, unknown in content),
                restored=any(self._is_restored(row) for row in members),
            )
            self._groups[group] = None

    def drop(self, rows: Iterable[Row], *, reason: Callable[[str], str]) -> None:
        """These rows will not be trained; `reason` says why by prompt."""
        for group, members in self._grouped(rows).items():
            calls = [call for row in members for call in self._calls(row)[0]]
            self.callback.on_drop(group, reason=reason(members[0].key.split("_")[0]), calls=calls)
            for row in members:
                self._pieces.pop(row.key, None)

    def _grouped(self, rows: Iterable[Row]) -> dict[str, list[Row]]:
        groups: dict[str, list[Row]] = {}
        for row in rows:
            if not row.tag.get("is_padding"):
                groups.setdefault(self.unit(row.key), []).append(row)
        return groups

    def _is_restored(self, row: Row) -> bool:
        return row.found is not None and row.found["process"] != self.process

    def _calls(self, row: Row) -> tuple[list[Call], int]:
        if row.found is None:
            self.guard.note(ATTEMPTS)
            return self._bounded(row), 0
        pieces = self._pieces.setdefault(row.key, {}) if self.late_masks else {}
        calls: list[Call] = []
        for number, (server, label, tokens, trained) in enumerate(row.found["calls"]):
            name = f"{row.key}.{number}"
            pieces[name] = [(start, stop, place) for start, stop, place in trained]
            call = self._call(name, server, label, tokens, is_restored=self._is_restored(row))
            ranges = tuple((start, stop) for start, stop, _ in trained)
            if tokens and ranges != ((0, tokens),):
                call = msgspec.structs.replace(call, trained=ranges)
            calls.append(call)
        return calls, row.found["unknown"]

    def _call(
        self, name: str, server: str, label: int | None, tokens: int, *, is_restored: bool
    ) -> Call:
        """A call that lies in one version, by the table of labels."""
        version = None if label is None else self.labels.get(label)
        if version is None:
            self.guard.note("finding which version a label stands for", KeyError(label))
            return _between(name, server, tokens, oldest=0, newest=LARGEST)
        replica = self._replicas.get(server)
        refit = None if replica is None else replica.refits.get(version)
        if is_restored or refit is None:
            return _between(name, server, tokens, oldest=version, newest=version)
        return Call(
            call=name, engine=server, version=version, tokens=tokens, after=refit, until=refit
        )

    def _bounded(self, row: Row) -> list[Call]:
        """A row of which only its tags are known: the labels of its first and last attempt."""
        oldest = self.labels.get(row.tag.get("min_global_steps", -1))
        newest = self.labels.get(row.tag.get("max_global_steps", -1))
        tokens = row.tag.get("trained", row.tag.get("response_len", 0))
        return [
            _between(
                f"{row.key}.0",
                "unknown",
                tokens,
                oldest=0 if oldest is None else oldest,
                newest=LARGEST if newest is None else newest,
            )
        ]

    # Steps.

    def update(
        self, keys: Sequence[str], *, is_padding: Sequence[bool], cut: list[list[str]] | None
    ) -> None:
        """The actor was updated on a sample whose rows are these, in this order.

        Args:
            cut: the rows of each update, None where the split is not known.
        """
        padding = {key for key, is_one in zip(keys, is_padding, strict=True) if is_one}
        if cut is None or self._batches is None:
            self._batches = None
            return
        entries = [
            list(dict.fromkeys(self.unit(key) for key in rows if key not in padding))
            for rows in cut
        ]
        if not self._by_row and len({tuple(entry) for entry in entries}) > 1:
            self._batches = None  # the rows of a prompt are in several updates
        else:
            self._batches += entries

    def count(self, updates: int) -> None:
        """The actor made so many policy updates on a sample."""
        self._updates += updates

    def step(self, number: int, *, masks: Mapping[str, Sequence[int]] | None = None) -> None:
        """A global step is over.

        Args:
            masks: final ``response_mask`` by row.
        """
        groups, batches, updates = list(self._groups), self._batches, self._updates
        self._groups, self._batches, self._updates = {}, [], 0
        trained: dict[str, dict[str, list[tuple[int, int]]]] = {}
        for key, mask in (masks or {}).items():
            for call, pieces in self._pieces.pop(key, {}).items():
                trained.setdefault(self.unit(key), {})[call] = _inside(pieces, mask)
        self._pieces.clear()
        if not updates:
            for group in groups:
                self.callback.on_drop(group, reason="no policy update (critic warm-up)")
            self.callback.on_step((), step=number, updates=0)
        elif batches is not None and len(batches) == updates:
            self.callback.on_step(batches=batches, step=number, trained=trained or None)
        else:
            self.callback.on_step(groups, step=number, updates=updates, trained=trained or None)

    # Checkpoints.

    def save(self, folder: Path) -> None:
        """Write what a resumed run needs beside verl's own checkpoint."""
        labels = dict(sorted(self.labels.items())[-1000:])
        saved = Saved(run=self._run, version=self.callback.version, labels=labels)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / STATE).write_bytes(msgspec.json.encode(saved))

    def close(self, status: str) -> None:
        """The run is over."""
        self.callback.close(status)
        failures = "; ".join(f"{what}: {n} times" for what, n in self.guard.failures.items())
        if failures:
            _log.warning("rl_staleness: failed: %s", failures)


def _between(name: str, server: str, tokens: int, *, oldest: int, newest: int) -> Call:
    span = (0, tokens, oldest) if newest == oldest else (0, tokens, oldest, max(oldest, newest))
    spans = (span,) if tokens else None
    return Call(call=name, engine=server, version=oldest, tokens=tokens, spans=spans)


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
