"""The engines in NeMo RL's vLLM workers, as the controller's process sees them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from rl_staleness.engines import Cut
from rl_staleness.integrations.nemo_rl_seats import MakeEngine, Operation, Reply, Request, serve

__all__ = ["Worker", "start_workers"]

START_SECONDS = 60.0
"""How long a worker may take to find its engine: it may still be loading."""


def start_workers(group: Any, engine: MakeEngine) -> list[Worker]:
    """An engine for each of vLLM's front ends: the leaders of the data parallel shards.

    Raises:
        ValueError: a worker has none; the others are let go.
    """
    workers = [
        Worker(group, index, name=f"vllm-{shard}", engine=engine)
        for shard, index in enumerate(group.dp_leader_worker_indices)
    ]
    for worker, found in [(worker, worker.flush()) for worker in workers]:
        try:
            found.result(START_SECONDS)
        except Exception as error:
            for other in workers:
                other.detach()
            raise ValueError(
                f"engine: worker {worker.name!r} has none ({error}); it needs"
                " vllm_cfg.async_engine=true and rl_staleness in its environment, or pass None"
            ) from error
    return workers


class Worker:
    """An engine in one of NeMo RL's vLLM workers.

    Counts come back with whatever the worker answers next, at the latest with the calls of a group:
    a call that a cut lists has ended only after it was counted.

    Args:
        group: the worker group, which knows the actors.
        index: of the worker in it.
        name: unique in the run.
        engine: what makes an engine there.
    """

    def __init__(self, group: Any, index: int, *, name: str, engine: MakeEngine) -> None:
        self._group = group
        self._index = index
        self._name = name
        self._engine = engine
        self._lock = threading.Lock()
        self._receivers: dict[int, Callable[[Cut | None], None]] = {}
        self._pause: Future[None] | None = None

    @property
    def name(self) -> str:
        """Unique in the run."""
        return self._name

    def start(self, *, version: int, refit: int) -> Future[None]:
        """The run starts."""
        return self._tell("start", refit, version=version)

    def pause(self) -> Future[None]:
        """Pause generation, unless somebody else did."""
        self._pause = self._tell("pause")
        return self._pause

    def resume(self) -> Future[None]:
        """Resume it, if `pause` paused it."""
        return self._tell("resume")

    def mark(
        self, refit: int, *, version: int, mode: str, deliver: Callable[[Cut | None], None]
    ) -> Future[None]:
        """Generation is paused for a refit, if it is: else no count belongs to any place."""
        paused = self._pause
        if paused is None or not paused.done() or paused.exception() is not None:
            deliver(None)
            return self._tell("mark", refit, version=version, mode=mode)
        marked = self._tell("mark", refit, version=version, mode=mode)
        with self._lock:  # what the worker answers later brings the counts
            self._receivers[refit] = deliver
        marked.add_done_callback(lambda m: self._deliver(refit, None) if m.exception() else None)
        return marked

    def done(self, refit: int, *, version: int) -> Future[None]:
        """The new weights are in."""
        return self._tell("done", refit, version=version)

    def aborted(self, refit: int) -> Future[None]:
        """The refit failed."""
        self._deliver(refit, None)
        return self._tell("aborted", refit)

    def detach(self) -> None:
        """Have it let go of its engine, without waiting."""
        self._tell("detach")

    def flush(self) -> Future[None]:
        """Have it send what it counted."""
        return self._tell("calls")

    def calls(self, ids: Sequence[str]) -> Future[Reply]:
        """Have it send what it knows of captured calls, and forget them."""
        return self._ask("calls", calls=tuple(ids))

    def _tell(self, operation: Operation, refit: int = 0, **arguments: Any) -> Future[None]:
        return noticed(self._ask(operation, refit, **arguments))

    def _ask(
        self, operation: Operation, refit: int = 0, calls: tuple[str, ...] = (), **arguments: Any
    ) -> Future[Reply]:
        with self._lock:
            wanted = frozenset(self._receivers)
        request = Request(operation, self._name, self._engine, refit, arguments, wanted, calls)
        answer: Future[Reply] = Future()
        answer.set_running_or_notify_cancel()  # whoever stops waiting for it does not cancel it

        def take(replied: Future[Reply]) -> None:
            error = replied.exception()
            if error is not None:
                answer.set_exception(error)
                return
            for number, cut in replied.result().cuts.items():
                self._deliver(number, cut)
            answer.set_result(replied.result())

        try:
            replied = self._group.run_single_worker_single_data(
                "__ray_call__", worker_idx=self._index, fn=serve, request=request
            )
            replied.future().add_done_callback(take)
        except Exception as error:  # noqa: BLE001  # handed on as the answer, and looked at
            answer.set_exception(error)
        return answer

    def _deliver(self, refit: int, cut: Cut | None) -> None:
        with self._lock:
            deliver = self._receivers.pop(refit, None)
        if deliver is not None:
            deliver(cut)


def noticed(answer: Future[Reply]) -> Future[None]:
    """Done, or failed, with an answer."""
    taken: Future[None] = Future()
    taken.set_running_or_notify_cancel()

    def settle(answered: Future[Reply]) -> None:
        error = answered.exception()
        if error is None:
            taken.set_result(None)
        else:
            taken.set_exception(error)

    answer.add_done_callback(settle)
    return taken
