"""The server that samples for TRL, as the callback sees it, and what each refit of it led to.

TRL counts syncs (``model_version``; the first one, before training, is number 1) and names adapters
by them. Here every sync is a refit of one engine, with the version that it led to:

    model_version   1   2   3        a sync every 2 updates
    version         0   2   4
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import msgspec

from rl_staleness.engines import Cut, Engine
from rl_staleness.events import Call, Mask
from rl_staleness.integrations.trl_rollouts import Turn

__all__ = ["ENGINE", "Policy"]

KEPT_SYNCS = 256
"""A call that began before the oldest of these may be of any version since the start."""

ENGINE = "vllm"
"""What the trace calls the server."""


@dataclass(slots=True)
class _Sync:
    """One refit."""

    refit: int
    version: int
    model_version: int
    adapter: str | None = None
    paused: float = 0.0
    """When its pause was asked for, on the monotonic clock."""
    done: float = float("inf")
    """When its weights were in."""


class Policy:
    """The engine of a TRL run: counts of a server that has the middleware, none of another.

    Args:
        server: speaks to the middleware; None where there is none, or nothing to ask it.
        adapters: calls keep the LoRA adapter that they name, so that no refit cuts any.
    """

    def __init__(self, server: Engine | None, *, adapters: bool) -> None:
        self._server = server
        self._adapters = adapters
        self._syncs: list[_Sync] = []
        self._next: tuple[int, float] = (0, 0.0)

    # The engine.

    @property
    def name(self) -> str:
        """What the trace calls it."""
        return ENGINE

    def start(self, *, version: int, refit: int) -> Future[None]:
        """The run starts."""
        self._syncs = [_Sync(refit, version, 0, done=0.0)]
        return (
            _noticed() if self._server is None else self._server.start(version=version, refit=refit)
        )

    def mark(
        self, refit: int, *, version: int, mode: str, deliver: Callable[[Cut | None], None]
    ) -> Future[None]:
        """Generation is paused for a refit."""
        model_version, paused = self._next
        self._syncs.append(_Sync(refit, version, model_version, paused=paused))
        del self._syncs[1:-KEPT_SYNCS]  # the start stays
        if self._adapters:
            deliver(Cut(calls={}))
        elif self._server is None:
            deliver(None)
        else:
            return self._server.mark(refit, version=version, mode=mode, deliver=deliver)
        return _noticed()

    def done(self, refit: int, *, version: int) -> Future[None]:
        """The weights are in."""
        if self._adapters or self._server is None:
            return _noticed()
        return self._server.done(refit, version=version)

    def aborted(self, refit: int) -> Future[None]:
        """The refit failed."""
        if self._adapters or self._server is None:
            return _noticed()
        return self._server.aborted(refit)

    def detach(self) -> None:
        """Let go of the server."""
        if self._server is not None:
            self._server.detach()

    # What TRL does with it, in the trainer's thread.

    def pausing(self, *, model_version: int, at: float) -> None:
        """A pause is asked for; the sync will be number ``model_version``."""
        self._next = (model_version, at)

    def loaded(self, adapter: str) -> None:
        """The sync that is under way publishes this adapter."""
        self._syncs[-1].adapter = adapter

    def synced(self, *, at: float) -> None:
        """The weights of the sync that is under way are in; nothing was sampled from them yet."""
        self._syncs[-1].done = at

    # What that says of calls.

    def call(self, turn: Turn, mask: Mask, seen: Call | None) -> Call:
        """A turn as a call.

        Args:
            mask: which of its tokens are trained.
            seen: the call as the server saw it, where it was asked.
        """
        trained = None if mask == ((0, turn.tokens),) else mask
        if self._adapters:
            for sync in self._syncs:
                if sync.adapter is not None and sync.adapter == turn.model:
                    return Call(
                        call=turn.request,
                        engine=ENGINE,
                        version=sync.version,
                        tokens=turn.tokens,
                        # It keeps its adapter, so no later refit touches it.
                        after=sync.refit,
                        until=sync.refit,
                        trained=trained,
                    )
            return self._between(turn.request, turn.tokens, trained, self._syncs)
        if seen is not None:
            return msgspec.structs.replace(seen, engine=ENGINE, trained=trained)
        begun = max(0, bisect_right([sync.done for sync in self._syncs], turn.begun) - 1)
        ended = bisect_right([sync.paused for sync in self._syncs], turn.ended)
        syncs = self._syncs[begun : max(ended, begun + 1)]
        return self._between(turn.request, turn.tokens, trained, syncs)

    def stamped(self, name: str, *, tokens: int, model_version: int) -> Call:
        """All that is known of a row is the sync that had been made before it was begun."""
        syncs = [sync for sync in self._syncs if sync.model_version >= model_version]
        return self._between(name, tokens, None, syncs or self._syncs[-1:])

    def _between(
        self, name: str, tokens: int, trained: Mask | None, syncs: Sequence[_Sync]
    ) -> Call:
        """A call that one of these syncs, or several, sampled."""
        oldest, newest = syncs[0].version, syncs[-1].version
        span = (0, tokens, oldest) if oldest == newest else (0, tokens, oldest, newest)
        return Call(
            call=name,
            engine=ENGINE,
            version=oldest,
            tokens=tokens,
            spans=(span,) if tokens else None,
            trained=trained,
        )


def _noticed() -> Future[None]:
    noticed: Future[None] = Future()
    noticed.set_result(None)
    return noticed
