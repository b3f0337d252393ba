"""What runs in NeMo RL's vLLM workers: an engine, held for a controller in another process.

A worker is asked by `serve`. It neither imports nor names an engine: what makes one is sent along.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, cast
from weakref import WeakKeyDictionary

from rl_staleness.engines import Capture, Cut, Engine, captured, capturing
from rl_staleness.events import Call
from rl_staleness.guard import Guard
from rl_staleness.integrations.nemo_rl_wraps import Wraps

__all__ = ["Kept", "MakeEngine", "Operation", "Reply", "Request", "serve"]

INSIDE_SECONDS = 2.0
"""How long a request waits in a worker for its engine, ahead of later requests."""

KEPT_CALLS, KEPT_CUTS = 1 << 16, 16
"""What a worker keeps that the controller has not asked for: calls, and counts in refits."""

MakeEngine = Callable[..., Engine]
"""``(llm, *, name)`` to an engine: VllmEngine. It is called in the worker."""

Operation = Literal["start", "pause", "mark", "done", "aborted", "resume", "calls", "detach"]


@dataclass(frozen=True, slots=True)
class Request:
    """What travels to a worker."""

    operation: Operation
    name: str
    engine: MakeEngine
    refit: int
    arguments: dict[str, Any]
    wanted: frozenset[int]
    """Refits whose counts the controller waits for."""
    calls: tuple[str, ...]
    """Ids of captured calls that it wants to know of."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What a worker knows of a captured call."""

    call: Call
    generated: int | None
    """Tokens that the capture staged."""
    before: tuple[int, int] | None
    """Tokens that an earlier request of the call had made before a checkpoint, and their label."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What comes back."""

    cuts: dict[int, Cut | None]
    kept: dict[str, Kept]


@dataclass(slots=True)
class _Captured:
    """A call from the begin of its capture on."""

    capture: Capture
    before: tuple[int, int] | None
    generated: int | None = None


class _Seat:
    """What a worker's process holds for the controller: gone, and made anew, after a restart."""

    def __init__(self, worker: Any, name: str, make: MakeEngine) -> None:
        if getattr(worker, "llm", None) is None:
            raise ValueError("its attribute llm is no AsyncLLM")
        self._worker = worker
        self.engine = make(worker.llm, name=name)
        self.counts: dict[int, list[Cut | None]] = {}
        self.is_known = False
        """The engine was told its version."""
        self.paused_for = 0
        """The refit for which an engine of unknown version is paused."""
        self._paused_by_us = False
        self._calls: dict[str, _Captured] = {}
        self._guard = Guard(strict=False, timeout=0.0)
        self._wraps = Wraps(self._guard)
        self._capture: Any = None
        self._holds_generate = False

    # Calls: where Gym's capture begins and completes them.

    def follow_capture(self) -> None:
        """Hold the capture, once it is installed: there each call begins, in its own task."""
        if not self._holds_generate and hasattr(self._worker.llm, "generate"):
            self._holds_generate = True
            self._wraps.before(self._worker.llm, "generate", self._generating)
        capture = getattr(self._worker, "token_capture", None)
        if capture is None or capture is self._capture:
            return
        self._capture = capture
        self._wraps.after(capture, "begin_call", self._begun)
        self._wraps.before(capture, "complete_call", self._completed)

    def _begun(self, given: dict[str, Any], call: Any) -> None:
        del given
        cut = getattr(call, "generation_cut", None)
        before = None
        if cut is not None:
            before = (sum(value == 1.0 for value in cut.token_mask_delta), cut.weight_version)
        self._open(call.model_call_id, before)

    def _generating(self, *_: object) -> None:
        """A turn that the controller sent by itself, in a task of Ray."""
        turn = _turn() if capturing() is None else None
        if turn is not None:
            self._open(turn, None)

    def _open(self, name: str, before: tuple[int, int] | None) -> None:
        # It stays open: the task that was admitted here submits one request, and ends.
        self._calls[name] = _Captured(captured().__enter__(), before)
        if len(self._calls) > KEPT_CALLS:
            del self._calls[next(iter(self._calls))]

    def _completed(self, given: dict[str, Any], _: object) -> None:
        entry = self._calls.get(given["call"].model_call_id)
        if entry is not None:
            entry.generated = len(given["generated_token_ids"])

    def take(self, names: Iterable[str]) -> dict[str, Kept]:
        """What is known of captured calls; they are forgotten."""
        kept: dict[str, Kept] = {}
        for name in names:
            entry = self._calls.pop(name, None)
            records = entry.capture.records() if entry is not None else ()
            if entry is not None and records:
                kept[name] = Kept(records[-1], entry.generated, entry.before)
        return kept

    def detach(self) -> None:
        """Give vLLM and the capture their methods back."""
        self.resume()
        self.engine.detach()
        self._wraps.restore()
        self._calls.clear()

    # The engine. Nothing waits for counts: they may be taken after the resume.

    def pause(self) -> None:
        """Pause generation, unless somebody else did; running calls stay."""
        loop = _loop_of(self._worker)
        if loop is None or self._paused_by_us:  # nobody ever asked anything of this engine
            return
        self._paused_by_us = True
        pausing = asyncio.run_coroutine_threadsafe(_pause(self._worker.llm), loop)
        self._paused_by_us = pausing.result(INSIDE_SECONDS)

    def resume(self) -> None:
        """Undo `pause`."""
        ours, loop = self._paused_by_us, _loop_of(self._worker)
        if ours and loop is not None:
            resuming = self._worker.llm.resume_generation()
            asyncio.run_coroutine_threadsafe(resuming, loop).result(INSIDE_SECONDS)
        self._paused_by_us = False

    def mark(self, refit: int, arguments: Mapping[str, Any]) -> Future[None]:
        """Generation is paused."""
        counts: list[Cut | None] = []
        self.counts[refit] = counts
        for old in sorted(self.counts)[:-KEPT_CUTS]:
            del self.counts[old]
        return self.engine.mark(refit, deliver=counts.append, **arguments)

    def start(self, refit: int, arguments: Mapping[str, Any]) -> Future[None]:
        """The version of the weights is certain."""
        self.is_known = True
        return self.engine.start(refit=refit, **arguments)


def _turn() -> str | None:
    """The id of the task of Ray that generates here, if one does."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    context = ray.get_runtime_context()
    name = context.get_task_function_name() or ""
    return str(context.get_task_id()) if name.endswith("generate_async") else None


async def _pause(llm: Any) -> bool:
    """Whether it was us who paused it."""
    if await llm.is_paused():
        return False
    await llm.pause_generation(mode="keep", clear_cache=False)
    return True


def _loop_of(worker: Any) -> asyncio.AbstractEventLoop | None:
    """The loop on which a worker's engine lives: in some versions that of its HTTP server."""
    handler = getattr(worker.llm, "output_handler", None)
    loop = handler.get_loop() if handler is not None else getattr(worker, "_engine_loop", None)
    return cast("asyncio.AbstractEventLoop | None", loop)


_seats: WeakKeyDictionary[Any, _Seat] = WeakKeyDictionary()


def serve(worker: Any, *, request: Request) -> Reply:
    """Carry out a request in a worker, and say what is known by now of counts and calls.

    Ray runs it beside the event loop of the worker.
    """
    if request.operation == "detach":
        left = _seats.pop(worker, None)
        if left is not None:
            left.detach()
        return Reply({}, {})
    seat = _seats.get(worker)
    if seat is None:
        seat = _seats[worker] = _Seat(worker, request.name, request.engine)
    seat.follow_capture()
    noticed = _pass_on(seat, request)
    if noticed is not None:
        noticed.result(INSIDE_SECONDS)
    lost: list[Cut | None] = [None]  # in a restart
    counts = [(refit, seat.counts.get(refit, lost)) for refit in request.wanted]
    return Reply({refit: cut[0] for refit, cut in counts if cut}, seat.take(request.calls))


def _pass_on(seat: _Seat, request: Request) -> Future[None] | None:
    """Do it; an engine that was restarted hears of refits when its version is certain.

    Nobody knows which weights it came up with. It is certain when a refit is done for which it was
    paused after the restart.
    """
    refit, arguments = request.refit, request.arguments
    match request.operation:
        case "start":
            return seat.start(refit, arguments)
        case "pause":
            seat.pause()
        case "resume":
            seat.resume()
        case "mark" if seat.is_known:
            return seat.mark(refit, arguments)
        case "mark":
            seat.paused_for = refit
        case "done" if seat.is_known:
            return seat.engine.done(refit, **arguments)
        case "done" if seat.paused_for == refit:
            return seat.start(refit, arguments)
        case "done":
            raise RuntimeError(f"the engine was restarted during refit {refit}")
        case "aborted" if seat.is_known:
            return seat.engine.aborted(refit)
        case _:
            pass
    return None
