"""Turns of rollouts that NeMo RL generates itself, without Gym: one task of Ray each.

The id of such a task is known on both sides: where the controller sends it, and in the worker that
carries it out. It is what links a turn to its call.
"""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from functools import wraps
from typing import Any

from rl_staleness.integrations.nemo_rl_wraps import Wraps

__all__ = ["Turns"]

KEPT = 4096
"""Rollouts that ended and were not committed yet."""

_sent: ContextVar[dict[int, list[str]] | None] = ContextVar("rl_staleness_nemo_rl", default=None)
"""Of the rollout that is open in this task: ids by the task of the trajectory that sent them."""


class Turns:
    """Notes which tasks each rollout sent to workers."""

    def __init__(self) -> None:
        self._rollouts: dict[int, list[list[str]]] = {}

    def wrap(self, wraps: Wraps, manager: Any, group: Any) -> None:
        """Hold where a rollout begins and ends, and where its turns are sent."""
        wraps.replace(manager, "run_rollout", self._rolling_out(manager.run_rollout))
        wraps.after(group, "run_single_worker_single_data", self._note)

    def take(self, record: Any) -> list[list[str]]:
        """The ids of a rollout that ended, by trajectory, in the order in which they began."""
        return self._rollouts.pop(id(record), [])

    def _rolling_out(self, original: Any) -> Any:
        @wraps(original)
        async def run_rollout(*args: Any, **kwargs: Any) -> Any:
            sent: dict[int, list[str]] = {}
            token = _sent.set(sent)
            try:
                record = await original(*args, **kwargs)
            finally:
                _sent.reset(token)
            self._rollouts[id(record)] = list(sent.values())
            if len(self._rollouts) > KEPT:
                del self._rollouts[next(iter(self._rollouts))]
            return record

        return run_rollout

    def _note(self, given: dict[str, Any], generator: Any) -> None:
        sent = _sent.get()
        if sent is not None and given["method_name"] == "generate_async":
            trajectory = id(asyncio.current_task())
            sent.setdefault(trajectory, []).append(generator.completed().task_id().hex())
