"""An engine that lives in a Ray actor, seen from the driver. Works with Ray 2.60.

The actor needs a line where it builds its engine, and a capture where it generates:

    self.staleness = VllmEngine(self.llm, name=name)        # any rl_staleness.engines.Engine

    with captured() as capture:
        output = await self.generate(prompt)
    return output, capture.records()                        # group.add(records) in the driver

The driver needs ``StalenessCallback(engines=[RayEngine(actor, name=name), ...])``.

Requests go out at once, each engine's answers are taken by a thread of its own: a slow or dead
actor costs its own calls their coverage and holds up nobody else.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any, Literal
from weakref import WeakKeyDictionary

from ray.exceptions import RayError

from rl_staleness.engines import Cut, Engine

__all__ = ["RayEngine"]

Operation = Literal["start", "mark", "done", "aborted", "detach", "counts"]

FIRST_SECONDS, LONGEST_SECONDS = 0.01, 1.0
"""Counts that an answer did not bring are asked for after the first, then in growing intervals."""

INSIDE_SECONDS = 2.0
"""How long a request waits in the actor for the engine to take notice, ahead of later requests."""

KEPT = 16
"""Counts that an actor keeps, in refits: the driver fetches them long before."""

_log = logging.getLogger(__name__)


class RayEngine:
    """An engine in a Ray actor.

    Args:
        actor: the actor's handle.
        name: the engine's name, the same as in the actor.
        attribute: where the actor keeps the engine; dots lead further in.
        concurrency_group: Ray's group for the requests, for an actor whose methods block: one that
            generates in all of its threads answers when it is too late. Async actors need none.
        patience: seconds after which counts that the actor does not have are given up.
    """

    def __init__(
        self,
        actor: Any,
        *,
        name: str,
        attribute: str = "staleness",
        concurrency_group: str | None = None,
        patience: float = 60.0,
    ) -> None:
        self._actor = actor
        self._name = name
        self._attribute = attribute
        self._options = {"concurrency_group": concurrency_group, "max_task_retries": 0}
        self._patience = patience
        self._lock = threading.Lock()
        self._receivers: dict[int, Callable[[Cut | None], None]] = {}
        """By refit whose counts are not there yet."""
        self._marked: dict[int, float] = {}
        """Those of them that the actor was marked for, and until when they are waited for."""
        self._boot = ""
        self._inbox: queue.SimpleQueue[_Answer | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def name(self) -> str:
        """Unique in the run."""
        return self._name

    def start(self, *, version: int, refit: int) -> Future[None]:
        """The run starts. An actor that is still being built answers when it is there."""
        return self._send("start", refit, version=version)

    def mark(
        self, refit: int, *, version: int, mode: str, deliver: Callable[[Cut | None], None]
    ) -> Future[None]:
        """Generation is paused: the future says that the mark is in the engine's stream."""
        with self._lock:
            self._receivers[refit] = deliver
        return self._send("mark", refit, version=version, mode=mode)

    def done(self, refit: int, *, version: int) -> Future[None]:
        """The new weights are in. A mark that was not taken by now may come after the resume."""
        self._void(refit)
        return self._send("done", refit, version=version)

    def aborted(self, refit: int) -> Future[None]:
        """The refit failed: the engine goes on with the version from before."""
        self._void(refit)
        return self._send("aborted", refit)

    def detach(self) -> None:
        """Restore what was wrapped in the actor, without waiting for it."""
        with self._lock:
            thread, self._thread = self._thread, None
            self._receivers.clear()
            self._marked.clear()
        if thread is not None:
            self._send("detach")
            self._inbox.put(None)

    def _void(self, refit: int) -> None:
        if refit not in self._marked:
            self._deliver(refit, None)

    def _deliver(self, refit: int, cut: Cut | None) -> None:
        with self._lock:
            self._marked.pop(refit, None)
            deliver = self._receivers.pop(refit, None)
        if deliver is not None:
            deliver(cut)

    def _send(self, operation: Operation, refit: int = 0, **arguments: Any) -> Future[None]:
        taken: Future[None] = Future()
        taken.set_running_or_notify_cancel()  # whoever stops waiting for it does not cancel it
        with self._lock:
            wanted = {*self._marked, refit}
            if self._thread is None and operation != "detach":
                self._thread = threading.Thread(target=self._listen, daemon=True)
                self._thread.start()
        request = _Request(self._attribute, self._name, operation, refit, arguments, wanted)
        answer: Future[_Said] = Future()
        try:
            call = self._actor.__ray_call__.options(**self._options)
            answer = call.remote(_serve, request).future()
        except RayError as error:
            answer.set_exception(error)
        answer.add_done_callback(
            lambda said: self._inbox.put(_Answer(operation, refit, said, taken))
        )
        return taken

    def _listen(self) -> None:
        """Take the answers one by one; ask for counts that did not come with any."""
        interval, asked = FIRST_SECONDS, False
        while True:
            try:
                answer = self._inbox.get(timeout=interval if self._marked else None)
            except queue.Empty:
                interval = min(2 * interval, LONGEST_SECONDS)
                self._give_up()
                if not asked:
                    asked = True
                    self._send("counts")
                continue
            if answer is None:
                return
            if answer.operation == "counts":
                asked = False
            elif answer.operation == "mark":
                interval = FIRST_SECONDS
            try:
                self._take(answer)
            except Exception as error:  # noqa: BLE001  # handed on to whoever waits
                answer.taken.set_exception(error)
            else:
                answer.taken.set_result(None)

    def _take(self, answer: _Answer) -> None:
        """Deliver what came with an answer; raise what the request raised."""
        if answer.operation == "mark":
            if answer.said.exception() is not None:
                self._deliver(answer.refit, None)
            with self._lock:
                if answer.refit in self._receivers:
                    self._marked[answer.refit] = time.monotonic() + self._patience
        said = answer.said.result()
        self._note_boot(said.boot, begun=answer.operation == "start")
        for refit, cut in said.cuts.items():
            if refit in self._marked:
                self._deliver(refit, cut)

    def _note_boot(self, boot: str, *, begun: bool) -> None:
        """An engine that was restarted has lost its calls, and the counts of before."""
        before, self._boot = self._boot, boot
        if not begun and before not in ("", boot):
            _log.warning(
                "rl_staleness: engine %r: the actor was restarted: the calls it had are lost, and"
                " of new ones no version is known until the next refit is done",
                self._name,
            )

    def _give_up(self) -> None:
        with self._lock:
            late = [refit for refit, end in self._marked.items() if time.monotonic() > end]
        for refit in late:
            self._deliver(refit, None)


@dataclass(frozen=True, slots=True)
class _Request:
    """What travels to the actor."""

    attribute: str
    name: str
    operation: Operation
    refit: int
    arguments: dict[str, Any]
    wanted: set[int]
    """Refits whose counts the driver waits for."""


@dataclass(frozen=True, slots=True)
class _Said:
    """What the actor answers."""

    boot: str
    """Another one after a restart."""
    cuts: dict[int, Cut | None]
    """Those of the wanted ones that are there by now."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """What came back from it."""

    operation: Operation
    refit: int
    said: Future[_Said]
    taken: Future[None]
    """What the driver was given to wait for."""


@dataclass(slots=True)
class _Seat:
    """What the actor's process knows of one engine in it: nothing, right after a restart."""

    boot: str = field(default_factory=partial(secrets.token_hex, 8))
    known: bool = False
    """The engine was told its version."""
    paused_for: int = 0
    """The refit for which an engine of unknown version is paused."""
    counts: dict[int, list[Cut | None]] = field(default_factory=dict[int, "list[Cut | None]"])
    """By refit that the engine was marked for; empty until it delivers them."""


_seats: WeakKeyDictionary[Engine, _Seat] = WeakKeyDictionary()


def _serve(actor: object, request: _Request) -> _Said:
    """Carry out a request in the actor, and say which of the wanted counts are there by now.

    Ray runs it beside the event loop of an async actor. It does not wait for counts: they may be
    taken after the generation resumed, which is a later request to the same actor.
    """
    engine: Engine = attrgetter(request.attribute)(actor)
    if engine.name != request.name:
        place = f"the engine in {request.attribute!r} of the actor"
        raise ValueError(f"name: {place} is named {engine.name!r}, not {request.name!r}")
    seat = _seats.setdefault(engine, _Seat())
    taken = _pass_on(engine, seat, request)
    if taken is not None:
        taken.result(timeout=INSIDE_SECONDS)
    lost: list[Cut | None] = [None]  # in a restart
    counts = [(refit, seat.counts.get(refit, lost)) for refit in request.wanted]
    return _Said(seat.boot, {refit: delivered[0] for refit, delivered in counts if delivered})


def _pass_on(engine: Engine, seat: _Seat, request: _Request) -> Future[None] | None:
    """Tell the engine, or one that was restarted its version as soon as that is certain.

    Nobody knows which weights it came up with, and its calls say so. It is certain when a refit is
    done for which it was paused after the restart.
    """
    refit, arguments = request.refit, request.arguments
    match request.operation:
        case "start":
            seat.known = True
            return engine.start(refit=refit, **arguments)
        case "mark" if seat.known:
            counts: list[Cut | None] = []
            seat.counts[refit] = counts
            for old in sorted(seat.counts)[:-KEPT]:
                del seat.counts[old]
            return engine.mark(refit, deliver=counts.append, **arguments)
        case "mark":
            seat.paused_for = refit
        case "done" if seat.known:
            return engine.done(refit, **arguments)
        case "done" if seat.paused_for == refit:
            seat.known = True
            return engine.start(refit=refit, **arguments)
        case "done":
            raise RuntimeError(f"the engine was restarted during refit {refit}")
        case "aborted" if seat.known:
            return engine.aborted(refit)
        case "detach":
            engine.detach()
        case _:
            pass
    return None
