"""What one vLLM front end saw: its pauses and its calls, for trainers in other processes.

Pauses are numbered here, as the engine answers them, and each is cut at once, whether or not a
trainer says a word. A trainer has refit numbers of its own; it says, when it can, which of them
the last pause was for, and what is read from here is in its numbers:

    pause            1        2        3        4            as the engine saw them
    refit            5                 6        ?            2 was no refit; 4, nobody has said yet
    a call that began after pause 2 and ended after 3:       after 5, until 6
    one that began after 3 and ended after 4:                after 6, until not known yet

A pause can be claimed only as long as no later one is, so that the numbers of a call, once they
are given, stay as they are. Not a word of a prompt or a completion is kept. All methods are for the
engine's own thread.
"""

from __future__ import annotations

import secrets
import time
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rl_staleness.engines import Capture, Cut, LiveCall
from rl_staleness.events import LARGEST, Call
from rl_staleness.integrations.vllm import VllmEngine

__all__ = ["Conflict", "Journal", "KEPT_CALLS", "Request", "refusal"]

KEPT_CALLS = 32_768
"""Finished calls that are kept for readers, some 40 MB; the oldest requests are forgotten first."""

LONGEST_ID = 1024
"""Characters; a request that a client gave a longer id is not kept."""

KEPT_CUTS = 64
"""Pauses whose counts are kept."""

KEPT_REFITS = 4096
"""Refits of a run that are kept: of a call that began before the oldest no version is known."""


def refusal(llm: Any) -> str | None:
    """Why a front end is not followed, if it is not, and the way out."""
    number = getattr(llm, "_client_count", 1)
    if number == 1:
        return None
    return (
        f"this server has {number} front-end processes, each of which sees its own requests only:"
        " start it with --api-server-count 1"
    )


class Conflict(ValueError):
    """What a trainer says does not go with what happened here."""


@dataclass(slots=True)
class _Pause:
    """One pause of the engine."""

    number: int
    mode: str
    at: float
    """When the engine had answered, on the monotonic clock, in seconds."""
    refit: int | None = None
    """The trainer's number of it."""
    cut: Cut | None = None
    counted: bool = False
    """The engine has said what it counted, or that it cannot."""

    def deliver(self, cut: Cut | None) -> None:
        self.cut, self.counted = cut, True


@dataclass(slots=True)
class _Run:
    """What the trainer that drives the refits has said. Lists grow together, oldest first."""

    token: str
    first: int
    """The version that it started from: the stamp of what nobody knows more of."""
    begun: int | None
    """Its last refit when it started; None for one that went on when this was restarted."""
    known: bool
    """The version of the weights is."""
    pauses: list[int] = field(default_factory=list[int])
    refits: list[int] = field(default_factory=list[int])
    """The first is the start itself."""
    done: list[int] = field(default_factory=list[int])
    versions: list[int] = field(default_factory=list[int])
    ended: set[int] = field(default_factory=set[int])
    """Refits among those that are done or aborted."""
    before: int | None = None
    """The refit whose pause was before this process was there to be paused."""

    def start(self, pause: int, refit: int, version: int) -> None:
        """The weights are of this version from here on."""
        self.known = True
        self.pauses, self.refits = [pause], [refit]
        self.done, self.versions = [refit], [version]

    def refit_at(self, pause: int) -> int | None:
        """The last refit that began at this pause or before; None before the start."""
        place = bisect_right(self.pauses, pause)
        return self.refits[place - 1] if place else None

    def version_at(self, refit: int) -> int:
        """The version after the last refit up to this one that is done."""
        return self.versions[max(bisect_right(self.done, refit) - 1, 0)]

    def forget(self) -> None:
        for numbers in (self.pauses, self.refits, self.done, self.versions):
            del numbers[: len(numbers) - KEPT_REFITS]
        self.ended &= set(self.refits)


@dataclass(slots=True, eq=False)
class Request:
    """One generation request and its calls, in the order of its choices."""

    ids: list[str]
    """What it is found by: the client's ``X-Request-Id``, the response's id, the engine's."""
    capture: Capture = field(default_factory=Capture)
    is_open: bool = True
    """It may still begin calls."""

    @property
    def running(self) -> int:
        """Calls that have not ended; 1 where there may still be one."""
        return sum(not call.ended for call in self.capture.calls) or int(self.is_open)


class Journal:
    """The pauses and calls of one front end.

    Args:
        llm: its ``AsyncLLM``.
        kept_calls: finished calls that are kept.
    """

    def __init__(self, llm: Any, *, kept_calls: int = KEPT_CALLS) -> None:
        self.boot = secrets.token_hex(8)
        """Another one after a restart, which loses everything."""
        self.engine = VllmEngine(llm, on_pause=self._note_pause)
        self.forgotten = 0
        """Finished requests that no reader can have any more."""
        self._kept_calls = kept_calls
        self._born = time.monotonic()
        self._pauses: dict[int, _Pause] = {}
        self._num_pauses = 0  # and starts, which have a number each as well
        self._run: _Run | None = None
        self._by_id: dict[str, dict[Request, None]] = {}
        self._closed: list[Request] = []  # answered, with calls that are still being aborted
        self._finished: dict[int, Request] = {}
        self._num_finished = self._num_calls = self._num_running = self._num_open = 0

    # What the trainer that drives the refits says. Each may be said again, which changes nothing.

    def start(self, token: str, *, version: int, refit: int) -> Future[None] | None:
        """A run starts: the engine has this version now. The run before is over."""
        run = self._run
        if run is not None and (run.token, run.first, run.begun) == (token, version, refit):
            return None
        self._run = run = _Run(token, version, refit, known=True)
        self._num_pauses += 1  # what began before has a number from before
        run.start(self._num_pauses, refit, version)
        for pause in self._pauses.values():
            pause.refit = None  # the run before had the same numbers
        return self.engine.start(version=version, refit=self._num_pauses)

    def mark(
        self, token: str, refit: int, *, version: int, mode: str, age: float, first: int = 0
    ) -> bool:
        """Generation was paused for this refit, so many seconds ago.

        Args:
            first: the version that the run started from, for a server that was restarted since.

        Returns:
            Whether the version of the weights is known; not so right after a restart.

        Raises:
            Conflict: another run drives this engine.
        """
        run = self._driver(token, first)
        if refit not in run.refits:
            at = time.monotonic() - age
            if at < self._born:
                run.before = refit
            self._claim(run, refit, mode, at)
            self.engine.announce(run.pauses[-1], version=version)
        return run.known

    def done(self, token: str, refit: int, *, version: int) -> Future[None] | None:
        """The weights of this refit are in.

        Raises:
            Conflict: another run drives this engine, or it was restarted within the refit.
        """
        run = self._driver(token)
        if refit in run.ended:
            return None
        if not run.known and (refit not in run.refits or refit == run.before):
            # The weights may have gone to the process that was here before.
            raise Conflict(f"refit {refit}: the server was restarted in the middle of it")
        if refit not in run.refits:
            self._claim(run, refit, "keep", time.monotonic())  # what marked it was lost
        run.ended.add(refit)
        pause = run.pauses[run.refits.index(refit)]
        if not run.known:
            run.start(pause, refit, version)
            return self.engine.start(version=version, refit=self._num_pauses)
        run.done.append(refit)
        run.versions.append(version)
        if pause < self._num_pauses:
            return None  # the engine has been paused again: it would not know which was meant
        return self.engine.done(pause, version=version)

    def aborted(self, token: str, refit: int) -> Future[None] | None:
        """This refit failed, the weights are those from before.

        Raises:
            Conflict: another run drives this engine.
        """
        run = self._driver(token)
        if refit in run.ended or refit not in run.refits:
            return None
        run.ended.add(refit)
        pause = run.pauses[run.refits.index(refit)]
        return self.engine.aborted(pause) if pause == self._num_pauses and run.known else None

    def _driver(self, token: str, first: int = 0) -> _Run:
        run = self._run
        if run is None:  # of a run that has seen this server restart
            self._run = run = _Run(token, first, None, known=False)
        if run.token != token:
            raise Conflict("another run has started on this server since")
        return run

    def _claim(self, run: _Run, refit: int, mode: str, at: float) -> None:
        """Say that the newest pause that was complete then is this refit.

        One that was not seen, because something else than a pause keeps the engine from sampling,
        is cut now: the engine says whether it is paused.
        """
        last = max(run.pauses, default=0)
        pause = next((p for p in reversed(self._pauses.values()) if p.at <= at), None)
        if pause is None or pause.number <= last or pause.refit is not None:
            pause = self._note_pause(mode)
        pause.refit = refit
        run.pauses.append(pause.number)
        run.refits.append(refit)
        run.forget()

    def _note_pause(self, mode: str) -> _Pause:
        self._num_pauses += 1
        pause = _Pause(self._num_pauses, mode, time.monotonic())
        self._pauses[pause.number] = pause
        if len(self._pauses) > KEPT_CUTS:
            del self._pauses[next(iter(self._pauses))]
        self.engine.mark(pause.number, version=None, mode=mode, deliver=pause.deliver)
        return pause

    # Requests.

    def open(self, *ids: str) -> Request:
        """A request has come; `close` it when it is over."""
        self._num_open += 1
        request = Request(list(ids))
        self.index(request)  # its client may hang up, and ask, before it is answered
        return request

    def index(self, request: Request) -> None:
        """Let a request be found by its ids; again when there are more of them."""
        for name in request.ids:
            self._by_id.setdefault(name, {})[request] = None

    def close(self, request: Request) -> None:
        """A request was answered, or its client is gone."""
        self._num_open -= 1
        request.is_open = False
        if not request.capture.calls or self._longest_name(request) > LONGEST_ID:
            self._forget(request)
            return
        self._closed.append(request)
        if len(self._closed) > 2 * self._num_running + 64:
            self._settle()

    def _longest_name(self, request: Request) -> int:
        return max(len(name) for name in (*request.ids, *(c.call for c in request.capture.calls)))

    def _settle(self) -> None:
        """Keep what has ended for its readers, up to the limit; looked at now and then."""
        closed, self._closed = self._closed, []
        for request in closed:
            if request.running:
                self._closed.append(request)
                continue
            self._num_finished += 1
            self._finished[self._num_finished] = request
            self._num_calls += len(request.capture.calls)
        self._num_running = len(self._closed)
        while self._num_calls > self._kept_calls and self._finished:
            request = self._finished.pop(next(iter(self._finished)))
            self._num_calls -= len(request.capture.calls)
            self.forgotten += 1
            self._forget(request)

    def _forget(self, request: Request) -> None:
        for name in request.ids:
            found = self._by_id.get(name, {})
            found.pop(request, None)
            if not found:
                self._by_id.pop(name, None)

    # What readers see.

    @property
    def first(self) -> int:
        """The version that the run started from, 0 if there is none."""
        return 0 if self._run is None else self._run.first

    def about(self) -> dict[str, Any]:
        """How this is."""
        self._settle()
        return {
            "pause": self._num_pauses,
            "run": self._run is not None,
            "known": self._run is not None and self._run.known,
            "open": self._num_open,
            "finished": self._num_finished,
            "kept": len(self._finished),
            "forgotten": self.forgotten,
        }

    def cuts(self, *, since: int = 0, refits: Sequence[int] = ()) -> list[dict[str, Any]]:
        """What was counted at the pauses after this one, or for these refits; oldest first."""
        return [
            {
                "pause": pause.number,
                "refit": pause.refit,
                "mode": pause.mode,
                "cut": pause.cut,
            }
            for pause in self._pauses.values()
            if pause.counted and (pause.refit in refits if refits else pause.number > since)
        ]

    def finished(self, *, since: int = 0, limit: int = 1000) -> tuple[list[dict[str, Any]], int]:
        """Finished requests in the order in which they ended, from a place on, and the next place.

        Those that were forgotten meanwhile are missing: the first place is that of the oldest.
        """
        self._settle()
        first = next(iter(self._finished), self._num_finished + 1)
        places = range(max(since + 1, first), self._num_finished + 1)[:limit]
        entries = [self._entry(self._finished[place]) for place in places]
        return entries, places[-1] if places else max(since, first - 1)

    def found(self, ids: Iterable[str]) -> list[list[dict[str, Any]]]:
        """The requests of each id, in the order in which they came; none that is not known.

        Where a run gives an id that one before it gave too, its own are meant.
        """
        of_ids = [list(self._by_id.get(each, ())) for each in ids]
        return [
            [self._entry(each) for each in [r for r in of_id if self._is_of_run(r)] or of_id]
            for of_id in of_ids
        ]

    def _is_of_run(self, request: Request) -> bool:
        run = self._run
        return run is not None and any(
            call.after is not None and run.refit_at(call.after) is not None
            for call in request.capture.calls
        )

    def _entry(self, request: Request) -> dict[str, Any]:
        return {
            "ids": request.ids,
            "running": request.running,
            "calls": [self._record(call) for call in request.capture.calls if call.ended],
        }

    def _record(self, call: LiveCall) -> Call:
        """A call in the numbers of the run that is on; of unknown version if it is of no such."""
        record, run = call.record(), self._run
        begin = None
        if run is not None and run.known and call.after is not None:
            begin = run.refit_at(call.after)
        if run is None or begin is None:
            unknown = ((0, call.tokens, 0, LARGEST),) if call.tokens else None
            return msgspec.structs.replace(
                record, version=self.first, after=None, until=None, spans=unknown
            )
        after = None if self._is_open(run, call.after) else begin
        until = None if self._is_open(run, call.until) else run.refit_at(call.until or 0)
        return msgspec.structs.replace(
            record, version=run.version_at(begin), after=after, until=until
        )

    def _is_open(self, run: _Run, pause: int | None) -> bool:
        """Whether there are pauses up to this one that a run may still say are its refits."""
        return pause is not None and pause > max(run.pauses, default=0)
