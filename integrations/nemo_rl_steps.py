"""Training steps of NeMo RL's single controller: chunks, updates, masks, and its own log."""

from __future__ import annotations

from functools import wraps
from typing import Any, cast

from rl_staleness.callback import StalenessCallback
from rl_staleness.guard import Guard
from rl_staleness.integrations.nemo_rl_groups import group_of, groups_of
from rl_staleness.integrations.nemo_rl_rollouts import Rollouts
from rl_staleness.integrations.nemo_rl_wraps import Wraps, arguments_of

__all__ = ["Steps"]


class Steps:
    """Tells one step, whatever number of chunks it is streamed in.

    Chunks are selected on the controller's loop and trained in threads, one after the other.
    """

    def __init__(
        self, controller: Any, staleness: StalenessCallback, *, rollouts: Rollouts, guard: Guard
    ) -> None:
        self._controller = controller
        self._staleness = staleness
        self._rollouts = rollouts
        self._guard = guard
        self._is_ppo = bool(getattr(controller, "_is_ppo", False))
        self._updates: int = controller._ppo_epochs if self._is_ppo else 1
        self._selected: list[str] = []
        self._trained: list[str] = []
        self._batches: list[list[str]] = []
        self._masked: dict[str, dict[str, list[tuple[int, int]]]] = {}
        self._numbers: dict[str, float] = {}

    def wrap(self, wraps: Wraps, *, masks: bool) -> None:
        """Hold the sampler, the trainer and the logger."""
        controller = self._controller
        trainer, logger = controller._trainer, controller._logger
        wraps.after_awaited(controller._sampler, "select", self._chunk_selected)
        wraps.before(trainer, "begin_train_step", self._step_begun)
        wraps.after(trainer, "train_microbatches_from_meta", self._chunk_trained)
        wraps.after(trainer, "finish_train_step", self._update_made)
        wraps.after_awaited(controller, "_save_checkpoint", self._saved)
        wraps.replace(logger, "log_metrics", self._logging(logger.log_metrics))
        if masks:
            wraps.after_awaited(controller, "_advantage_stage", self._read_masks)

    def _chunk_selected(self, _: object, selected: Any) -> None:
        if selected[0] is not None:
            self._selected += groups_of(selected[0])

    def _step_begun(self, *_: object) -> None:
        self._trained = []

    def _chunk_trained(self, given: dict[str, Any], _: object) -> None:
        self._trained += groups_of(given["meta"])

    async def _read_masks(self, given: dict[str, Any], _: object) -> None:
        """Which rows are left for the loss: the last word comes after filters and penalties."""
        meta = given["meta"]
        column = await self._rollouts.column(meta, "sample_mask")
        for sample, value in zip(meta.sample_ids, column, strict=True):
            weights = cast("list[float]", value) if isinstance(value, list) else [float(value)]
            if any(weights):
                continue
            group = group_of(sample)
            for call in self._rollouts.rows.get(group, {}).get(sample, ()):
                self._masked.setdefault(group, {})[call] = []

    def _update_made(self, *_: object) -> None:
        self._batches.append(self._trained)
        self._trained = []
        if len(self._batches) == self._updates:
            self._step_made()

    def _step_made(self) -> None:
        """What the step trained, and what it selected and did not train."""
        batches, self._batches = self._batches, []
        selected, self._selected = self._selected, []
        masked, self._masked = self._masked, {}
        told: dict[str, Any] = {
            "step": self._controller._train_steps + 1,
            "trained": masked or None,
        }
        if not batches:  # the critic alone was trained
            batches = [selected]
            numbers = self._staleness.on_step(selected, updates=0, **told)
        elif self._is_ppo:  # its labels count steps, whatever number of updates those made
            numbers = self._staleness.on_step(batches=batches, **told)
        else:
            version = self._controller._trainer_version
            numbers = self._staleness.on_step(batches[0], version=version, **told)
        if numbers is not None:
            self._numbers = numbers.metrics()
        trained = {group for batch in batches for group in batch}
        for group in trained:
            self._rollouts.rows.pop(group, None)
        self._rollouts.drop(selected, reason="no trained token")

    def _logging(self, original: Any) -> Any:
        """The step's numbers in the controller's own record of the step."""

        @wraps(original)
        def ours(*args: Any, **kwargs: Any) -> Any:
            with self._guard("log_metrics"):
                given = arguments_of(original, args, kwargs)
                if given.get("prefix") == "train":
                    if self._selected:
                        self._step_made()
                    numbers, self._numbers = self._numbers, {}
                    kwargs = {**given, "metrics": {**given["metrics"], **numbers}}
                    args = ()
            return original(*args, **kwargs)

        return ours

    def _saved(self, *_: object) -> None:
        self._staleness.on_checkpoint()
