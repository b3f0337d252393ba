"""What TRL really trains: rows from the queue, through the loader, to the step that consumes them.

TRL's loader is ahead of the step: what is pulled from the queue now is trained one step later, or
two. So a row is published as it is pulled, carries the name that it got there through planner and
collator, and counts where the training step takes its micro-batch:

    queue.get ──► publish ──► planner ──► collator: batch number ──► training_step: rows consumed
                      └─► drop: TRL counted one more as it came back for the next
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from rl_staleness.integrations.trl_rollouts import Rewards

__all__ = ["Batches", "DROPS", "Rows"]

NUMBER = "rl_staleness_batch"
"""Key of a micro-batch under which its number travels to the training step."""

DROPS = {"sample/dropped_stale_total": "stale", "batch/dropped_oversize_total": "oversize"}
"""TRL's counters, to which one is appended as a row is dropped, and the reasons."""

KEPT_BATCHES = 1024
"""Micro-batches between collator and step; there are one or two."""

Guard = Callable[[str], AbstractContextManager[None, bool]]


class Rows(NamedTuple):
    """What is told of rows, in the trainer's thread."""

    publish: Callable[[Any], str]
    """A sample was pulled; gives the name of its group."""
    drop: Callable[[str, str], None]
    """A group is not trained, for this reason."""
    astray: Callable[[int], str]
    """So many tokens are trained that nothing is known of; gives the name of their group."""


class Batches:
    """Follows rows from the queue to the step.

    Args:
        rows: is told.
        metrics: TRL's own, in which it counts what it drops.
        guard: keeps what goes wrong here from the trainer.
    """

    def __init__(self, rows: Rows, metrics: Mapping[str, Sequence[Any]], guard: Guard) -> None:
        self._rows, self._metrics, self._guard = rows, metrics, guard
        self._numbers: dict[int, list[str]] = {}
        self._num_batches = 0
        self._last: str | None = None
        self._drops: dict[str, int] = {}
        self._consumed: list[str] = []

    def take(self) -> list[str]:
        """The groups that were consumed since the last time, in order."""
        consumed, self._consumed = self._consumed, []
        return consumed

    def queue(self, queue: Any) -> Any:
        """A queue that tells what is pulled from it."""
        return _Queue(queue, self)

    def pulling(self) -> None:
        """The loader is back for a sample: what became of the last one?"""
        with self._guard("seeing what is dropped"):
            for key, reason in DROPS.items():
                # Only a drop appends here, and nothing clears it between a drop and this.
                if self._last is not None and self._count(key) == self._drops.get(key, 0) + 1:
                    self._rows.drop(self._last, reason)
            self._last = None

    def pulled(self, sample: Any) -> None:
        """The loader has a sample."""
        with self._guard("publishing a row"):
            name = self._rows.publish(sample)
            rewards = sample.metrics
            if not isinstance(rewards, Rewards):
                sample.metrics = rewards = Rewards(rewards)
            rewards.group = self._last = name
            self._drops = {key: self._count(key) for key in DROPS}

    def collate(self, collate: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """A collator that numbers its batches."""

        def numbered(examples: Any) -> Any:
            batch = collate(examples)
            with self._guard("seeing what is in a batch"):
                (rows,) = examples
                groups = [self._name(sample) for row in rows for sample in row.samples]
                self._num_batches += 1
                # One number for each rank: the loader hands out rows.
                batch[NUMBER] = batch["global_n_tokens"].new_full((len(rows),), self._num_batches)
                self._numbers[self._num_batches] = groups
                self._numbers.pop(self._num_batches - KEPT_BATCHES, None)
            return batch

        return numbered

    def train(self, training_step: Callable[..., Any]) -> Callable[..., Any]:
        """A training step that tells what it consumes."""

        def consuming(model: Any, inputs: Any, *rest: Any, **more: Any) -> Any:
            groups: list[str] = []
            with self._guard("seeing what a step consumes"):
                number = inputs.pop(NUMBER, None)
                known = None if number is None else self._numbers.pop(int(number[0]), None)
                if known is None:
                    groups.append(self._rows.astray(int(inputs["global_n_tokens"][0])))
                groups += known or ()
            output = training_step(model, inputs, *rest, **more)
            self._consumed += groups
            return output

        return consuming

    def _name(self, sample: Any) -> str:
        name = getattr(sample["metrics"], "group", None)
        return self._rows.astray(int(sample["completion_mask"].sum())) if name is None else name

    def _count(self, key: str) -> int:
        # Not by subscript, which would put the key there.
        return len(self._metrics.get(key, ()))


class _Queue:
    """TRL's queue of samples, with its owner listening."""

    def __init__(self, queue: Any, batches: Batches) -> None:
        self._queue, self._batches = queue, batches

    def get(self, *arguments: Any, **more: Any) -> Any:
        """Wait for the next sample."""
        self._batches.pulling()
        sample = self._queue.get(*arguments, **more)
        self._batches.pulled(sample)
        return sample

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)
