"""Exact batch age for NeMo RL's single controller, attached from outside: nothing of it is edited.

The controller is a Ray actor, so the attachment is made in its process, before it runs:

    controller = SingleControllerActor.remote(master_config, actor_args, setup_timing_metrics)
    attach_actor(controller, partial(StalenessCallback, trace=path), engine=VllmEngine)
    ray.get(controller.run.remote())

What fires where, in the words of the controller:

    _sync_weights     _weight_synchronizer.sync_weights: pause (keep), cut, weights, done, resume
    rollouts          _buffer.commit, .commit_finalized, .seal_group: on_publish
    sampling          _buffer.remove, .remove_group: on_drop
    training          _trainer.train_microbatches_from_meta a chunk; finish_train_step: on_step
    logging           _logger.log_metrics(prefix="train") carries ``train/staleness/...``

Its labels count trainer steps; they are converted to policy updates at each refit, which differ
under PPO. With Gym's token capture a call is linked where the capture begins it (`captured`), and
receipts say which calls a row was assembled from; without Gym by the task of Ray that generates a
turn. Nothing is added to what Gym stores or a checkpoint saves.

Held to NeMo RL's sources at `TESTED`, by stand-ins with its signatures: it cannot run without GPUs.
What it cannot see: which rows the advantage stage masks, unless ``masks=True``; refits that do not
pass the weight synchronizer (a colocated Megatron wake after a save); calls of Gym without its
capture, and of back ends other than vLLM, have bounds instead of cuts.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

from rl_staleness.callback import StalenessCallback
from rl_staleness.guard import Guard
from rl_staleness.integrations.nemo_rl_rollouts import Rollouts
from rl_staleness.integrations.nemo_rl_seats import MakeEngine
from rl_staleness.integrations.nemo_rl_steps import Steps
from rl_staleness.integrations.nemo_rl_workers import Worker, start_workers
from rl_staleness.integrations.nemo_rl_wraps import Wraps, mismatches
from rl_staleness.pauses import Answer

__all__ = ["TESTED", "Attachment", "attach", "attach_actor"]

TESTED = ("7ea279ab", "00420a15")
"""Commits of NVIDIA-NeMo/RL that this was held to: without and with Gym's token capture."""

GENERATION = "generation"
"""Name of the engine of a back end that reports nothing."""

RESUMES = 3
"""How often a worker is asked to resume that did not say that it did."""

_log = logging.getLogger(__name__)

_NEEDED = {
    "_weight_synchronizer.sync_weights": ("kv_scales",),
    "_buffer.commit": ("group_id", "record", "start_weight_version"),
    "_buffer.remove": ("idxs", "remove_in_dp"),
    "_buffer.remove_group": ("group_id",),
    "_sampler.select": (),
    "_trainer.begin_train_step": (),
    "_trainer.train_microbatches_from_meta": ("meta",),
    "_trainer.finish_train_step": (),
    "_logger.log_metrics": ("metrics", "step", "prefix"),
    "_logger.finish": (),
    "_save_checkpoint": (),
    "_advantage_stage": ("meta",),
    "_call_dp": ("method_name",),
    "_trainer_version": (),
    "_train_steps": (),
    "_buffer._group_ids": (),
    "_buffer.ready_list": (),
    "_buffer.meta_list": (),
    "_buffer.start_weight_list": (),
}
"""What an attachment holds on to, and the parameters that it reads by name."""

_IF_THERE = {
    "_finalize_with_actor": ("request",),
    "_buffer.commit_finalized": ("group_id", "meta", "group_min_wv"),
    "_buffer.seal_group": ("group_id", "record"),
    "_buffer.load_state_dict": ("state",),
}
"""What only some versions have."""

_WORKERS = {
    "_gen.worker_group.run_single_worker_single_data": ("method_name", "worker_idx"),
    "_gen.worker_group.dp_leader_worker_indices": (),
}


# What a user calls.


def attach_actor(
    actor: Any,
    make: Callable[..., StalenessCallback],
    *,
    engine: MakeEngine | None = None,
    masks: bool = False,
    timeout: float = 5.0,
) -> None:
    """Attach to a controller in its Ray actor; before its ``run``. Arguments as for `attach`.

    ``make`` and ``engine`` travel there: functions and classes that can be imported in the
    environments of the controller and of the vLLM workers, or a `functools.partial` of one.
    """
    options = {"engine": engine, "masks": masks, "timeout": timeout}
    actor.__ray_call__.remote(_attach_here, make, options).future().result()


def _attach_here(
    controller: Any, make: Callable[..., StalenessCallback], options: dict[str, Any]
) -> None:
    attach(controller, make, **options)


def attach(
    controller: Any,
    staleness: StalenessCallback | Callable[..., StalenessCallback],
    *,
    engine: MakeEngine | None = None,
    masks: bool = False,
    timeout: float = 5.0,
) -> Attachment:
    """Attach to a single controller, in its process, before its ``run``.

    Args:
        controller: the object behind ``SingleControllerActor``.
        staleness: the callback, or what makes it: called with the ``version`` and ``step`` that
            the controller starts from.
        engine: VllmEngine, for vLLM's asynchronous workers. None: a back end that reports
            nothing; calls count under the version that they began on, with bounds.
        masks: read from the data plane, a chunk, which rows the advantage stage left for the loss.
            It needs ``StalenessCallback(late_masks=True)``.
        timeout: seconds that a refit, or a group, waits for a worker to answer.

    Raises:
        ValueError: this NeMo RL lacks what the attachment needs, by name; or the callback counts
            from elsewhere; or a worker has no engine.
    """
    _check(controller, engine)
    start = {"version": controller._trainer_version, "step": controller._train_steps + 1}
    workers = [] if engine is None else start_workers(controller._gen.worker_group, engine)
    try:
        if not isinstance(staleness, StalenessCallback):
            staleness = staleness(**start)
        counted = {"version": staleness.version, "step": staleness.step}
        if counted != start:
            raise ValueError(
                f"staleness: it counts from {counted}, the controller from {start}; pass what"
                " makes it instead, or these numbers"
            )
        return Attachment(controller, staleness, workers=workers, masks=masks, timeout=timeout)
    except BaseException:
        for worker in workers:
            worker.detach()
        raise


def _check(controller: Any, engine: MakeEngine | None) -> None:
    """Refuse, by name, what an attachment cannot hold on to; tell of a version that is new."""
    problems = [
        *mismatches(controller, _NEEDED),
        *mismatches(controller, _IF_THERE, optional=True),
        *(mismatches(controller, _WORKERS) if engine is not None else ()),
    ]
    version = str(getattr(sys.modules.get("nemo_rl"), "__version__", ""))
    tested = f"tested are NeMo RL's commits {', '.join(TESTED)}"
    if problems:
        raise ValueError(
            f"controller: {'; '.join(problems)}; {tested}, this is {version or 'none'}"
        )
    commit = version.partition("+")[2]
    if version and not (commit and any(known.startswith(commit[:8]) for known in TESTED)):
        _log.warning("rl_staleness: %s; this is %s, whose signatures match", tested, version)


class Attachment:
    """What `attach` put into a controller; it lets go when the controller's logger is finished.

    Args:
        staleness: the callback, which counts from where the controller does.
        workers: its engines; none for a back end that reports nothing.
    """

    def __init__(
        self,
        controller: Any,
        staleness: StalenessCallback,
        *,
        workers: Sequence[Worker],
        masks: bool,
        timeout: float,
    ) -> None:
        self.staleness = staleness
        self._controller = controller
        self._workers = workers
        self._names = [worker.name for worker in workers] or [GENERATION]
        self._guard = Guard(strict=False, timeout=timeout)
        self._wraps = Wraps(self._guard)
        self._refit: object | None = None
        self._labels: dict[int, int] = {controller._trainer_version: staleness.version}
        rollouts = Rollouts(
            controller,
            staleness,
            workers=workers,
            engine=self._names[0],
            labels=self._labels,
            guard=self._guard,
            timeout=timeout,
        )
        staleness.attach(*workers)
        staleness.start()
        synchronizer = _Synchronizer(controller._weight_synchronizer, self)
        self._wraps.replace(controller, "_weight_synchronizer", synchronizer)
        rollouts.wrap(self._wraps)
        steps = Steps(controller, staleness, rollouts=rollouts, guard=self._guard)
        steps.wrap(self._wraps, masks=masks)
        self._wraps.before(controller._logger, "finish", self._end)

    def missing(self) -> dict[str, int]:
        """What the attachment had to do without, by kind; `StalenessCallback.missing` says more."""
        return {f"times {what} failed": number for what, number in self._guard.failures.items()}

    def detach(self) -> None:
        """Restore every object to what it was; a second time does nothing. The callback goes on."""
        self._wraps.restore()
        for worker in self._workers:
            worker.detach()

    def close(self, status: str = "finished") -> None:
        """End the trace, and detach."""
        last = [Answer(worker.name, "the end", worker.flush()) for worker in self._workers]
        self._guard.wait(last)
        self.staleness.close(status)
        self.detach()

    # Refits: in the thread in which the weights are sent.

    def refit_begins(self) -> object:
        """Pause the engines and take the cuts; what it returns tells this refit from the next."""
        given_up, self._refit = self._refit, object()
        token = self._refit
        with self._guard("the begin of a refit"):
            if given_up is not None:
                self.staleness.on_refit_aborted(reason="given up", engines=self._names)
            self._labels[self._controller._trainer_version] = self.staleness.version
            self._guard.wait([Answer(w.name, "a pause", w.pause()) for w in self._workers])
            self.staleness.on_refit_paused(engines=self._names)
        return token

    def refit_ends(self, token: object, *, reason: str | None) -> None:
        """The weights are in, or not; one that was given up on in the meantime says nothing."""
        if token is not self._refit:
            return
        self._refit = None
        with self._guard("the end of a refit"):
            if reason is None:
                self.staleness.on_refit_done(engines=self._names)
            else:
                self.staleness.on_refit_aborted(reason=reason, engines=self._names)
        for _ in range(RESUMES):  # whatever else goes wrong, nobody may stay paused
            resumed = [Answer(w.name, "the resume", w.resume()) for w in self._workers]
            self._guard.wait(resumed)
            if all(a.noticed.done() and a.noticed.exception() is None for a in resumed):
                break

    def _end(self, *_: object) -> None:
        """The controller's logger is finished: the last that it does, also when it fails."""
        self.close("finished" if sys.exc_info()[0] is None else "failed")


class _Synchronizer:
    """Stands in for the controller's weight synchronizer: the same, between pause and resume."""

    def __init__(self, original: Any, attachment: Attachment) -> None:
        self._original = original
        self._attachment = attachment

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def sync_weights(self, **options: Any) -> Any:
        """Send the weights."""
        token = self._attachment.refit_begins()
        try:
            result = self._original.sync_weights(**options)
        except BaseException as error:
            self._attachment.refit_ends(token, reason=type(error).__name__)
            raise
        self._attachment.refit_ends(token, reason=None)
        return result
