"""TRL's asynchronous GRPO: exact ages of what it trains, by one callback.

    trainer = AsyncGRPOTrainer(..., callbacks=[StalenessCallback()])
    trainer.train()

    vllm serve MODEL --middleware rl_staleness.integrations.vllm_server.StalenessMiddleware

The server's part is for full weights: it says where each running call was cut. Without it calls
that a sync may have touched have bounds, and the coverage says how many do not. With LoRA the
response says which adapter made it, and nothing is asked of the server.

The numbers stand in TRL's own log record, under ``staleness/``, so that whatever ``report_to``
names has them, beside TRL's own ``sample/staleness_mean``. That one is in syncs, taken as a row
leaves the queue (the loader is a step ahead of the training) and from a tag that a group got before
its calls began; ours are in policy updates, of each token, as the step consumes it.

Tested with TRL 1.16.0. Nothing of TRL is subclassed or patched: methods of the one trainer are
replaced on it, and put back at the end of the training. The rollouts run in another process, which
is asked in `rl_staleness.integrations.trl_rollouts`. With several ranks the first one, which holds
the queue and hands out the rows of all, tells everything; the others do nothing.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from types import TracebackType
from typing import Any, cast

from transformers import TrainerCallback

import rl_staleness
from rl_staleness.engines import Engine
from rl_staleness.integrations.trl_batches import Batches, Rows
from rl_staleness.integrations.trl_policy import Policy
from rl_staleness.integrations.trl_rollouts import Origin, RecordedLoop
from rl_staleness.integrations.trl_window import merged
from rl_staleness.sinks import Sink, StepObserver, active_sinks

__all__ = ["TESTED", "StalenessCallback"]

TESTED = ("1.16.0",)
"""Versions of TRL."""

SAVED = "rl_staleness"
"""Key in the trainer's state, and so in its checkpoints, of what a resumed run goes on with."""

_log = logging.getLogger(__name__)

Names = Sequence[tuple[str, "tuple[str, ...] | None"]]
"""Attributes; of functions with their first parameters, of anything else with None."""

_LOOP: Names = (("_post", ("self", "path")), ("_score_group", ("self", "group")))


class StalenessCallback(TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """Measures exactly how off-policy each step of an ``AsyncGRPOTrainer`` was.

    Given in ``callbacks=`` it finds its trainer as the training begins. One that is added later
    needs it: ``trainer.add_callback(StalenessCallback(trainer))``, before ``train()``.

    A run that is resumed from a checkpoint goes on in the trace where that is still there: its name
    and its count of policy updates are in the trainer's state.

    Args:
        trainer: for a callback that is added to it.
        trace: where the evidence is written; None writes nothing.
        run: the run's identity; default: a new one, or that of the checkpoint.
        sinks: told every step, beside TRL's log record; default: the W&B and MLflow runs that are
            active. They get the trace and the report at the end.
        timeout: seconds that a sync waits for the server to take notice.
        close_timeout: seconds that each sink has at the end to send what is left.
        warn_age_above: log a warning when a step's batch age rises above so many updates.
        warn_coverage_below: log one when the coverage falls below this share.
        strict: let what fails here end the training.

    Raises:
        ValueError: an argument cannot be used, or the trainer is not one that this can be added to;
            the message names it. Without ``trainer``, from ``train()``.
    """

    def __init__(
        self,
        trainer: Any = None,
        *,
        trace: str | os.PathLike[str] | None = "rollout_trace.jsonl",
        run: str | None = None,
        sinks: Iterable[Sink | StepObserver] | None = None,
        timeout: float = 5.0,
        close_timeout: float = 30.0,
        warn_age_above: float | None = None,
        warn_coverage_below: float | None = None,
        strict: bool = False,
    ) -> None:
        self._trace, self._strict = trace, strict
        self._run: str | None = run
        self._options: dict[str, Any] = {
            "sinks": None if sinks is None else list(sinks),
            "timeout": timeout,
            "close_timeout": close_timeout,
            "warn_age_above": warn_age_above,
            "warn_coverage_below": warn_coverage_below,
            "strict": strict,
        }
        rl_staleness.StalenessCallback(trace=None, **self._options)  # raises what would later
        self._trainer: Any = None
        self._wraps = _Wraps()
        self._loop: RecordedLoop | None = None
        self._core: rl_staleness.StalenessCallback | None = None
        self._policy = Policy(None, adapters=False)
        self._batches: Batches | None = None
        self._names = itertools.count(1)
        self._window: list[Any] = []
        self._syncing = self._closed = False
        self._status = "failed"
        self._complaints: set[str] = set()
        if trainer is not None and _is_first_rank(trainer):
            self._attach(trainer)

    @property
    def staleness(self) -> rl_staleness.StalenessCallback | None:
        """The callback of the core, from the first sync on; None on all ranks but the first."""
        return self._core

    @property
    def trace(self) -> str | None:
        """Where the trace is written; None before the first sync, and on ranks that write none."""
        return None if self._core is None else self._core.trace

    # What the trainer tells.

    def on_train_begin(
        self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **_: Any
    ) -> None:
        """Follow the rows; find the trainer, where it was not given."""
        if not state.is_world_process_zero:
            return
        if self._closed:
            _log.warning(
                "rl_staleness: the training that this callback followed has ended, and nothing is"
                " measured now; give another training a StalenessCallback of its own"
            )
            return
        if self._trainer is None:
            self._attach(_trainer_of(train_dataloader))
        trainer: Any = self._trainer
        collator = getattr(train_dataloader, "base_dataloader", train_dataloader).collate_fn
        _require(
            {"the loader's": (collator, (("torch_call", ("examples",)),))},
            {"trainer._rollout_dataset": (trainer._rollout_dataset, (("queue", None),))},
        )
        rows = Rows(self._publish, self._drop, self._publish_unknown)
        self._batches = batches = Batches(rows, trainer._metrics["train"], self._guard)
        self._wraps.put(collator, "torch_call", batches.collate(collator.torch_call))
        dataset = trainer._rollout_dataset
        self._wraps.put(dataset, "queue", batches.queue(dataset.queue))
        self._wraps.put(trainer, "training_step", batches.train(trainer.training_step))

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """A step is over: before the sync that may follow, and before TRL writes its record."""
        if self._batches is None or self._closed:
            return
        with self._guard("counting a step"):
            core = self._start()
            skipped = self._trainer.accelerator.optimizer_step_was_skipped
            numbers = core.on_step(self._batches.take(), updates=0 if skipped else 1)
            state.stateful_callbacks[SAVED] = self._saved()
            if numbers is not None:
                self._log(numbers)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """A checkpoint was written."""
        if self._core is not None:
            self._core.on_checkpoint()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The training came to its end; what is left is done as the rollouts are stopped."""
        self._status = "finished"

    def detach(self) -> None:
        """Put back what was replaced, and close the trace. The end of the training does it."""
        if self._closed:
            return
        self._closed = True
        self._wraps.restore()
        if self._core is not None:
            if self._syncing:
                self._core.on_refit_aborted(reason="the training ended")
            self._core.close(self._status)

    # The trainer.

    def _attach(self, trainer: Any) -> None:
        adapters = bool(getattr(trainer, "_lora_sync", False))
        by = "weight_transfer" if getattr(trainer, "weight_transfer", None) else "vllm_client"
        parts: dict[str, tuple[Any, Names]] = {
            "trainer": (
                trainer,
                (
                    ("training_step", ("model", "inputs")),
                    ("model_version", None),
                    ("_metrics", None),
                    ("accelerator", None),
                ),
            ),
            f"trainer.{by}": (getattr(trainer, by, None), (("pause", ()), ("resume", ()))),
            "trainer.rollout_worker": (getattr(trainer, "rollout_worker", None), (("stop", ()),)),
        }
        if adapters:
            loads: Names = (("load_lora_adapter", ("lora_name", "lora_path")),)
            parts["trainer.vllm_client "] = (trainer.vllm_client, loads)
        _require(parts)
        if _trl_version() not in TESTED:
            _log.warning(
                "rl_staleness: TRL %s was not tested, %s was; what is needed of it has the same"
                " names",
                _trl_version(),
                " and ".join(TESTED),
            )
        self._trainer = trainer
        target, worker = getattr(trainer, by), trainer.rollout_worker
        self._wraps.put(target, "pause", self._pausing(target.pause))
        self._wraps.put(target, "resume", self._resuming(target.resume))
        if adapters:
            client = trainer.vllm_client
            self._wraps.put(client, "load_lora_adapter", self._loading(client.load_lora_adapter))
        self._wraps.put(worker, "stop", self._stopping(worker.stop))
        self._follow_rollouts(worker)

    def _follow_rollouts(self, worker: Any) -> None:
        make = getattr(worker, "_loop_cls", None)
        unmet = _unmet(f"{type(worker).__name__}._loop_cls", make, _LOOP)
        if unmet:
            _log.warning(
                "rl_staleness: the rollouts of %s cannot be followed (no %s): of its tokens only"
                " bounds are known",
                type(worker).__name__,
                ", ".join(unmet),
            )
            return
        self._loop = RecordedLoop(cast("Callable[..., Any]", make), server=None)
        self._wraps.put(worker, "_loop_cls", self._loop)

    def _start(self) -> rl_staleness.StalenessCallback:
        """Open the trace, when the trainer knows at which step it is."""
        if self._core is not None:
            return self._core
        trainer, state = self._trainer, self._trainer.state
        adapters = bool(getattr(trainer, "_lora_sync", False))
        server = None if adapters else _server_of(trainer)
        if self._loop is not None and server is not None:
            self._loop.server = trainer.vllm_client.server_url
        self._policy = Policy(server, adapters=adapters)
        kept: dict[str, Any] = state.stateful_callbacks.get(SAVED) or {}
        saved: dict[str, Any] = kept.get("attributes") or {}
        self._run = self._run or str(saved.get("run") or uuid.uuid4().hex)
        if self._options["sinks"] is None:  # TRL's own log record has the numbers in any case
            self._options["sinks"] = [sink for _, sink in active_sinks(())]
        self._core = rl_staleness.StalenessCallback(
            engines=[self._policy],
            trace=self._trace,
            run=self._run,
            version=saved.get("version", state.global_step),
            step=state.global_step + 1,
            about={
                "trainer": f"TRL {_trl_version()}",
                "sync": "adapters" if adapters else "weights",
            },
            **self._options,
        )
        # Rows that were queued when the process died are lost with its worker.
        self._core.load_state_dict({}, waiting=())
        state.stateful_callbacks[SAVED] = self._saved()
        self._core.start()
        return self._core

    def _saved(self) -> dict[str, Any]:
        version = 0 if self._core is None else self._core.version
        return {"args": {}, "attributes": {"run": self._run, "version": version}}

    # Syncs.

    def _pausing(self, pause: Callable[..., Any]) -> Callable[..., Any]:
        def paused(*arguments: Any, **more: Any) -> Any:
            core = self._start()
            number = self._trainer.model_version + 1
            self._policy.pausing(model_version=number, at=time.monotonic())
            output = pause(*arguments, **more)
            self._syncing = True
            core.on_refit_paused()
            return output

        return paused

    def _loading(self, load: Callable[..., Any]) -> Callable[..., Any]:
        def loaded(lora_name: str, *arguments: Any, **more: Any) -> Any:
            output = load(lora_name, *arguments, **more)
            with self._guard("seeing which adapter is loaded"):
                self._policy.loaded(lora_name)
            return output

        return loaded

    def _resuming(self, resume: Callable[..., Any]) -> Callable[..., Any]:
        def resumed(*arguments: Any, **more: Any) -> Any:
            if self._core is not None and self._syncing:
                self._syncing = False
                self._policy.synced(at=time.monotonic())
                self._core.on_refit_done()
            return resume(*arguments, **more)

        return resumed

    def _stopping(self, stop: Callable[..., Any]) -> Callable[..., Any]:
        def stopped(*arguments: Any, **more: Any) -> Any:
            try:
                return stop(*arguments, **more)
            finally:
                self.detach()

        return stopped

    # Rows.

    def _publish(self, sample: Any) -> str:
        core = self._start()
        name = self._name()
        origin: Origin | None = getattr(sample.metrics, "origin", None)
        if origin is None:
            tokens, stamp = int(sample.completion_mask.sum()), int(sample.model_version)
            self._complain("its rollouts do not say where their tokens are from", None)
            calls = [self._policy.stamped(name, tokens=tokens, model_version=stamp)]
        else:
            calls = [self._policy.call(*part) for part in origin.parts]
        core.on_publish(
            name,
            calls=calls,
            unknown=0 if origin is None else origin.unknown,
            about={"group_id": int(sample.group_id), "model_version": int(sample.model_version)},
        )
        return name

    def _publish_unknown(self, tokens: int) -> str:
        name = self._name()
        self._start().on_publish(name, calls=(), unknown=tokens)
        self._complain("rows are trained that did not come from its queue", None)
        return name

    def _drop(self, name: str, reason: str) -> None:
        self._start().on_drop(name, reason=reason)

    def _name(self) -> str:
        return f"{self._trainer.model_version}/{next(self._names)}"

    def _log(self, numbers: Any) -> None:
        """Put the numbers of the steps since the last record where TRL makes the next one of."""
        record = self._trainer._metrics["train"]
        if "staleness/tokens" not in record:
            self._window.clear()
        self._window.append(numbers)
        for key, value in merged(self._window).items():
            record[key] = [value]

    # What goes wrong.

    def _guard(self, what: str) -> _Guard:
        return _Guard(self, what)

    def forgives(self, what: str, error: Exception) -> bool:
        """Log what failed, once; False if it is to end the training."""
        if not self._strict:
            self._complain(f"{what} failed", error)
        return not self._strict

    def _complain(self, what: str, error: Exception | None) -> None:
        if what not in self._complaints:
            self._complaints.add(what)
            _log.warning(
                "rl_staleness: TRL %s: %s: the training goes on, the numbers with less coverage",
                _trl_version(),
                what,
                exc_info=error,
            )


class _Guard:
    """Keeps what fails in it from the trainer, unless the user wants it otherwise."""

    def __init__(self, callback: StalenessCallback, what: str) -> None:
        self._callback, self._what = callback, what

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        return isinstance(error, Exception) and self._callback.forgives(self._what, error)


class _Wraps:
    """Attributes that were replaced on single objects, to be put back."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any, bool]] = []

    def put(self, target: Any, name: str, value: Any) -> None:
        """Replace an attribute on this object."""
        own = name in vars(target)
        self._before.append((target, name, getattr(target, name), own))
        setattr(target, name, value)

    def restore(self) -> None:
        """Put everything back, the last one first."""
        while self._before:
            target, name, value, own = self._before.pop()
            if own:
                setattr(target, name, value)
            else:
                delattr(target, name)


def _require(*objects: dict[str, tuple[Any, Names]]) -> None:
    """Raise if something is not as it was in the versions that were tested."""
    unmet = [
        each
        for by_name in objects
        for what, (target, names) in by_name.items()
        for each in _unmet(what, target, names)
    ]
    if unmet:
        raise ValueError(
            f"StalenessCallback: TRL {_trl_version()} has no {', no '.join(unmet)}: this knows"
            f" AsyncGRPOTrainer as it is in TRL {' and '.join(TESTED)}"
        )


def _unmet(what: str, target: Any, names: Names) -> list[str]:
    unmet: list[str] = []
    for name, parameters in names:
        found = getattr(target, name, None)
        if parameters is None:
            is_there = hasattr(target, name)
        else:
            is_there = callable(found) and _parameters(found)[: len(parameters)] == parameters
        if not is_there:
            listed = "" if parameters is None else f"({', '.join(parameters)})"
            unmet.append(f"{what}.{name}{listed}")
    return unmet


def _parameters(function: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


def _trainer_of(loader: Any) -> Any:
    """The trainer to which a loader belongs; a callback is not told.

    TRL's dataset of rollouts asks its trainer for the number of the sync by a function of one line,
    which holds the trainer.
    """
    found: Any = None
    dataset = getattr(getattr(loader, "base_dataloader", loader), "dataset", None)
    while dataset is not None and not hasattr(dataset, "model_version_fn"):
        dataset = getattr(dataset, "dataset", None)
    if dataset is not None and inspect.isfunction(dataset.model_version_fn):
        found = inspect.getclosurevars(dataset.model_version_fn).nonlocals.get("self")
    if found is None or getattr(found, "_rollout_dataset", None) is not dataset:
        raise ValueError(
            "StalenessCallback: it did not find its trainer, which is to be TRL's AsyncGRPOTrainer:"
            " add it by trainer.add_callback(StalenessCallback(trainer)) before trainer.train()"
        )
    return found


def _is_first_rank(trainer: Any) -> bool:
    accelerator = getattr(trainer, "accelerator", None)
    return accelerator is None or bool(accelerator.is_main_process)


def _server_of(trainer: Any) -> Engine | None:
    """The middleware of the trainer's server; None, and one line, where it has none."""
    http = import_module("rl_staleness.integrations.vllm_http")
    url = str(getattr(trainer.vllm_client, "server_url", ""))
    try:
        engine = http.VllmServerEngine(url, name="vllm")
        said = engine.problem(timeout=5.0)
        if said is None:
            return engine  # type: ignore[no-any-return]
    except ValueError as error:
        said = str(error)
    _log.warning(
        "rl_staleness: the vLLM server at %s does not say where syncs cut its running calls: their"
        " tokens have bounds, see staleness/coverage: %s",
        url.rpartition("@")[2],  # without a password
        said,
    )
    return None


def _trl_version() -> str:
    try:
        return installed_version("trl")
    except PackageNotFoundError:
        return "unknown"
