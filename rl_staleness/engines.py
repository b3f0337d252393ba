"""What the callback asks of an engine, and the record of a call while it runs.

An engine is whatever can be paused and refitted as one: the objects that speak to a real one live
in ``rl_staleness.integrations``. Nothing here knows a product.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Literal, Protocol

import msgspec

from rl_staleness.events import Call

__all__ = ["Capture", "Cut", "Engine", "LiveCall", "captured", "capturing"]


class Cut(msgspec.Struct, frozen=True, kw_only=True):
    """Counts that an engine took at the pause of a refit."""

    calls: Mapping[str, int]
    """Output tokens so far of each captured call that had begun and not ended; 0 if none yet."""
    exact: bool = True
    kv: Literal["kept", "recomputed"] | None = None
    snapshot_seconds: float | None = None
    """What the engine's own thread spent on taking it."""
    generated: int | None = None
    """Output tokens of all calls, captured or not, since the engine was attached; None: it does
    not count."""


@dataclass(kw_only=True, slots=True)
class LiveCall:
    """One call from its begin to its end. Written by the engine's side only, on one thread."""

    call: str
    engine: str
    version: int
    """The version that its engine had when it began."""
    after: int | None = None
    """The last refit of its engine whose pause had begun when it began, 0 if none."""
    tokens: int = 0
    """Output tokens so far; final once ``ended``."""
    until: int | None = None
    spans: tuple[tuple[int, ...], ...] | None = None
    """``(start, stop, version)`` as the engine itself reported them at the end, or ``(start, stop,
    oldest, newest)`` from an engine that cannot say which (``LARGEST``: whatever is newest)."""
    ended: bool = False

    def record(self, *, trained: Sequence[tuple[int, int]] | None = None) -> Call:
        """Freeze it as it is now, for a trace or for the way to another process."""
        return Call(
            call=self.call,
            engine=self.engine,
            version=self.version,
            tokens=self.tokens,
            after=self.after,
            until=self.until if self.ended else None,
            spans=self.spans,
            trained=None if trained is None else tuple((start, stop) for start, stop in trained),
        )


@dataclass(slots=True)
class Capture:
    """The calls that were submitted while it was open, in the order in which they began."""

    calls: list[LiveCall] = field(default_factory=list[LiveCall])

    def records(self) -> tuple[Call, ...]:
        """Every call, frozen as it is now."""
        return tuple(call.record() for call in self.calls)


_open: ContextVar[Capture | None] = ContextVar("rl_staleness_capture", default=None)


def capturing() -> Capture | None:
    """The capture that is open in this task, if any: an engine asks it when a request comes in."""
    return _open.get()


class captured:
    """Make requests that this task, and tasks that it starts, submit in here calls of one capture.

    It is what links a request to its call: the variable is set here and read where the same task
    submits the request. In a process of its own (a Ray actor) the records travel back by hand:

        with captured() as capture:
            output = await generate(prompt)
        return output, capture.records()
    """

    __slots__ = ("_capture", "_token")

    def __init__(self, capture: Capture | None = None) -> None:
        self._capture = Capture() if capture is None else capture

    def __enter__(self) -> Capture:
        self._token = _open.set(self._capture)
        return self._capture

    def __exit__(self, *_: object) -> None:
        try:  # noqa: SIM105  # every group pays for it
            _open.reset(self._token)
        except ValueError:  # an async generator that another task than its own closes
            pass


class Engine(Protocol):
    """One paused-and-refitted unit as the callback sees it.

    Every method returns at once. The future says when the engine has *taken notice*, which is all
    that a refit ever waits for, and only up to the callback's limit in time. A future with an
    exception is an engine that did not answer. Methods are called from any thread.
    """

    @property
    def name(self) -> str:
        """Unique in the run; letters that can stand in a trace."""
        ...

    def start(self, *, version: int, refit: int) -> Future[None]:
        """The run starts: the engine holds ``version``, ``refit`` is its last refit so far."""
        ...

    def mark(
        self, refit: int, *, version: int, mode: str, deliver: Callable[[Cut | None], None]
    ) -> Future[None]:
        """Generation is paused for ``refit``, which moves the engine to ``version``.

        From now on calls begin after ``refit``. The counts belong to the place in the engine's
        stream of outputs that this marks; ``deliver`` is called once, from any thread, when they
        are known (it may be after the refit), or with None by an engine that cannot say.
        """
        ...

    def done(self, refit: int, *, version: int) -> Future[None]:
        """The weights of ``version`` are in, generation has not resumed yet."""
        ...

    def aborted(self, refit: int) -> Future[None]:
        """The refit failed: the engine goes on with the version from before."""
        ...

    def detach(self) -> None:
        """Restore what was wrapped; do nothing the second time."""
        ...
