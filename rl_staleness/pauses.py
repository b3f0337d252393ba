"""Which refit each engine is in: tells all engines at once, writes down what they say of it.

A refit waits, up to a limit in time, for the engines to take notice. It never waits for counts: a
cut may be written after its ``refit_done``. An engine that does not answer has no cut, and that
costs the coverage of its own calls, nothing else.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias, cast

from rl_staleness.engines import Cut, Engine
from rl_staleness.events import (
    JOINED,
    LARGEST,
    Event,
    RefitAborted,
    RefitCut,
    RefitDone,
    ViolationFound,
)

__all__ = ["Answer", "Begun", "Cuts", "Pauses"]

ENGINE = "engine"
"""Name of the engine of a trainer that attached none and named none."""

MOST_OWED = 8
"""Refits of an engine whose cuts may be on their way; older ones have none until one comes."""

EMPTY_MODES = ("abort", "wait")
"""Pause modes in which every call has ended when the pause is complete; what an attached engine
queued meanwhile, it lists itself."""

Cuts = Mapping[str, Mapping[str, int]]
"""Tokens so far by engine and call, from a trainer that counts them itself."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An engine that was told something, and the future that says that it took notice."""

    engine: str
    what: str
    noticed: Future[None]


@dataclass(slots=True)
class _Pause:
    """One refit of one engine, from its pause on."""

    refit: int
    version: int
    mode: str
    kv: Literal["kept", "recomputed"] | None
    began: float
    """On the monotonic clock, in seconds."""
    noticed: Future[None] | None = None
    """Done once the engine knows of the pause; None for one that is not attached."""
    labelled: Future[None] | None = None
    """Done once the engine knows that the refit is done."""
    cut_due: bool = True
    given_up: bool = False
    """Its cut is counted as missing."""
    marking: bool = True
    """The hook itself is at work: what the engine says meanwhile is written there."""


@dataclass(frozen=True, slots=True)
class Begun:
    """The refits that one pause began, by engine, and what the engines answer to it."""

    answers: list[Answer]
    pauses: dict[str, _Pause]


Ending: TypeAlias = dict[str, "_Pause | None"]
"""Refits that end, by engine; None: nobody announced the pause."""


class Pauses:
    """The refits of all engines of a run.

    Args:
        record: writes and applies an event; it is called from any thread.
        guard: keeps what goes wrong with a cut from the engine that counted it.
        clock: Unix seconds.
        last_refit: the highest refit number of an engine in the trace.
    """

    def __init__(
        self,
        record: Callable[[Event], object],
        *,
        guard: Callable[[str], AbstractContextManager[None, bool]],
        clock: Callable[[], float],
        last_refit: Callable[[str], int],
    ) -> None:
        self.engines: dict[str, Engine] = {}
        self.num_done = 0
        """Refits of an engine that were done."""
        self._record = record
        self._guard = guard
        self._clock = clock
        self._last_refit = last_refit
        self._lock = threading.Lock()
        self._attached_any = False
        self._numbers: dict[str, int] = {}
        self._paused: dict[str, _Pause] = {}
        self._started: dict[str, int] = {}
        self._last_noticed: dict[str, int] = {}
        self._stuck: dict[str, list[tuple[int, int]]] = {}
        """First and last of the numbers that an engine may have gone on with when it should not."""
        self._unlabelled: dict[str, set[int]] = {}
        self._num_without_cut = 0
        self._owed: dict[str, list[_Pause]] = {}
        """Refits of each engine that was told of them and has not said yet what it counted."""
        self._clerk: ThreadPoolExecutor | None = None
        self._writing: list[Future[None]] = []

    def check(self, engines: Iterable[Engine]) -> None:
        """See that engines can be taken in.

        Raises:
            ValueError: a name is taken, or cannot stand in a trace.
        """
        taken = set(self.engines)
        for engine in engines:
            _check_name(engine)
            if engine.name in taken:
                raise ValueError(f"engines: two are named {engine.name!r}; give each its own name")
            taken.add(engine.name)

    def attach(self, engine: Engine) -> None:
        """Take an engine in, before the run starts."""
        self._attached_any = True
        self.engines[engine.name] = engine

    def join(self, engine: Engine, *, version: int) -> Answer:
        """Take an engine in while the run goes on: its weights count as those of a refit.

        The cut of that refit says nothing of calls.
        """
        name = engine.name
        with self._lock:
            refit = self._numbers[name] = self._started[name] = self._number(name) + 1
        self._last_noticed.pop(name, None)
        self._record(
            RefitCut(
                time=self._clock(),
                engine=name,
                refit=refit,
                version=version,
                exact=False,
                mode=JOINED,
            )
        )
        self._record(RefitDone(time=self._clock(), engine=name, refit=refit, version=version))
        answer = _told(name, "start", partial(engine.start, version=version, refit=refit))
        self.attach(engine)  # whoever refits all engines by now refits this one too
        return answer

    def detach(self, name: str) -> None:
        """Let an engine go; a refit that it is in stays open.

        Raises:
            KeyError: there is none of that name.
        """
        engine = self.engines.pop(name)
        pause = self._paused.pop(name, None)
        if pause is not None:
            self._deliver(name, pause, None)
        engine.detach()

    def start(self, versions: Mapping[str, int]) -> list[Answer]:
        """Tell every engine which version it holds as the run starts."""
        self._started = {name: self._number(name) for name in self.engines}
        return [
            _told(
                name,
                "start",
                partial(engine.start, version=versions[name], refit=self._number(name)),
            )
            for name, engine in self.engines.items()
        ]

    def begin(
        self,
        names: Iterable[str] | None,
        *,
        version: int,
        mode: str,
        kv: Literal["kept", "recomputed"] | None,
        cuts: Cuts | None,
    ) -> Begun:
        """Generation is paused: number the refit on each engine and ask for the cuts."""
        begun = Begun([], {})
        for name in self._with_cuts(names, cuts):
            left_open = self._paused.pop(name, None)
            if left_open is not None:
                self._doubt(name, left_open)
                detail = f"refit {left_open.refit} of {name!r} was neither done nor aborted"
                self._violation("refit_left_open", detail)
            with self._lock:
                refit = self._numbers[name] = self._number(name) + 1
            pause = self._paused[name] = _Pause(refit, version, mode, kv, time.monotonic())
            begun.pauses[name] = pause
            engine = self.engines.get(name)
            if engine is not None:
                mark = partial(
                    engine.mark,
                    refit,
                    version=version,
                    mode=mode,
                    deliver=partial(self._deliver, name, pause),
                )
                begun.answers.append(_told(name, "pause", mark))
                pause.noticed = begun.answers[-1].noticed
                self._owe(name, pause)
            pause.marking = False
        for name, pause in begun.pauses.items():
            if cuts is not None and name in cuts:
                self._deliver(name, pause, Cut(calls=cuts[name]))
            elif pause.noticed is None and mode in EMPTY_MODES:
                self._deliver(name, pause, Cut(calls={}))
            elif pause.noticed is None:
                self._deliver(name, pause, None)
        return begun

    def left(self, begun: Begun | None, names: Iterable[str] | None) -> list[str]:
        """The engines of a block of which nothing was said since it began.

        Args:
            begun: None if its pause could not be taken: all but those that are paused for another.
        """
        if begun is None:
            return [name for name in self._chosen(names) if name not in self._paused]
        return [name for name, pause in begun.pauses.items() if self._paused.get(name) is pause]

    def end(self, names: Iterable[str] | None) -> Ending:
        """The weights are in on these engines: whatever is said of them from now on is later."""
        return {name: self._paused.pop(name, None) for name in self._chosen(names)}

    def moved(self, ending: Ending, *, version: int | None) -> list[Answer]:
        """The weights are in: tell the engines. `done` writes it down."""
        answers: list[Answer] = []
        for name, pause in ending.items():
            engine = self.engines.get(name)
            if engine is not None and pause is not None:
                to = pause.version if version is None else version
                answers.append(_told(name, "done", partial(engine.done, pause.refit, version=to)))
                pause.labelled = answers[-1].noticed
        return answers

    def done(self, ending: Ending, *, version: int | None, policy: int) -> None:
        """Write down that the refit is done on each engine.

        Args:
            policy: version of the policy, for a refit whose pause nobody announced.
        """
        for name, pause in ending.items():
            if pause is None:
                self._violation("refit_done_without_pause", f"engine {name!r} was not paused")
                with self._lock:
                    refit = self._numbers[name] = self._number(name) + 1
                if name in self.engines:
                    self._miss(name, refit)
                to, seconds = policy if version is None else version, None
            else:
                self._doubt(name, pause)
                refit, seconds = pause.refit, time.monotonic() - pause.began
                to = pause.version if version is None else version
            self._record(
                RefitDone(
                    time=self._clock(), engine=name, refit=refit, version=to, pause_seconds=seconds
                )
            )
            self.num_done += 1

    def abort(self, names: Iterable[str] | None, *, reason: str) -> list[Answer]:
        """The refit failed on these engines: write it down and tell them."""
        answers: list[Answer] = []
        for name, pause in self.end(names).items():
            if pause is None:
                self._violation("refit_aborted_without_pause", f"engine {name!r} was not paused")
                continue
            self._settle_cut(pause, missing=False)
            if pause.noticed is not None and _succeeded(pause.noticed):
                self._last_noticed[name] = pause.refit
            self._record(
                RefitAborted(
                    time=self._clock(),
                    engine=name,
                    refit=pause.refit,
                    version=pause.version,
                    reason=reason,
                )
            )
            engine = self.engines.get(name)
            if engine is not None:
                answers.append(_told(name, "aborted", partial(engine.aborted, pause.refit)))
        return answers

    def in_doubt(self, engine: str, after: int | None, until: int | None) -> tuple[bool, bool]:
        """Whether refit numbers, and spans, that an engine gave a call may be too old.

        An engine that did not take notice of a refit goes on counting from the one before, and
        labels what it generates with the version from before.
        """
        numbers = any(
            number is not None and oldest <= number <= newest
            for oldest, newest in self._stuck.get(engine, ())
            for number in (after, until)
        )
        first, last = after or 0, LARGEST if until is None else until
        spans = numbers or any(first <= n <= last for n in self._unlabelled.get(engine, ()))
        return numbers, spans

    def _doubt(self, name: str, pause: _Pause) -> None:
        """Note, as a refit ends, whether its engine had taken notice of the pause."""
        if pause.noticed is None:
            return
        if _succeeded(pause.noticed):
            self._last_noticed[name] = pause.refit
        else:
            self._miss(name, pause.refit)
        if pause.labelled is not None and not _succeeded(pause.labelled):
            self._unlabelled.setdefault(name, set()).add(pause.refit)

    def _miss(self, name: str, refit: int) -> None:
        """An attached engine does not know of this refit: it goes on as if there was none.

        Which number it goes on with is not known either: what it was told of the refits since the
        last one that it took notice of in time may have come late.
        """
        before = self._last_noticed.get(name, self._started.get(name, 0))
        stuck = self._stuck.setdefault(name, [])
        if stuck and stuck[-1][0] == before:
            stuck.pop()
        stuck.append((before, refit - 1))
        self._unlabelled.setdefault(name, set()).add(refit)

    def _deliver(self, name: str, pause: _Pause, cut: Cut | None) -> None:
        """Write down what an engine counted, the first time that it says so."""
        if not self._settle_cut(pause, missing=cut is None) or cut is None:
            return
        if pause.marking or not _on_a_loop():
            self._write(name, pause, cut)
        else:
            # An engine counts on its own loop, where nothing is written: it generates there.
            if self._clerk is None:
                self._clerk = ThreadPoolExecutor(1, thread_name_prefix="rl_staleness-cuts")
            self._writing.append(self._clerk.submit(self._write, name, pause, cut))

    @property
    def without_cut(self) -> int:
        """Refits of an engine that has not said how far its calls were, or could not."""
        with self._lock:
            owed = sum(pause.cut_due for pauses in self._owed.values() for pause in pauses)
            return self._num_without_cut + owed

    def last_refits(self) -> dict[str, int]:
        """Number of the last refit whose pause began, of every engine that had one here."""
        with self._lock:
            names = list(self._numbers)
        return {name: self._number(name) for name in names}

    def _owe(self, name: str, pause: _Pause) -> None:
        """Remember that a cut is to come, for as long as it may be on its way."""
        with self._lock:
            owed = [each for each in self._owed.get(name, ()) if each.cut_due]
            for given_up in owed[: max(len(owed) + 1 - MOST_OWED, 0)]:
                given_up.given_up = True
                self._num_without_cut += 1
            self._owed[name] = [*owed, pause][-MOST_OWED:]

    def _settle_cut(self, pause: _Pause, *, missing: bool) -> bool:
        """A cut has come, is not needed, or is missing for good; whether it was due until now."""
        with self._lock:
            due, pause.cut_due = pause.cut_due, False
            if due:
                self._num_without_cut += missing - pause.given_up
        return due

    def settle(self, timeout: float) -> None:
        """Wait until what engines have delivered is written, for so many seconds at most."""
        if self._writing:
            for written in wait(list(self._writing), timeout).done:
                self._writing.remove(written)

    def close(self) -> None:
        """Let the thread that writes end; a second time does nothing."""
        if self._clerk is not None:
            self._clerk.shutdown(wait=False)

    def _write(self, name: str, pause: _Pause, cut: Cut) -> None:
        with self._guard(f"writing what engine {name!r} counted"):
            self._record(
                RefitCut(
                    time=self._clock(),
                    engine=name,
                    refit=pause.refit,
                    version=pause.version,
                    calls=dict(cut.calls),
                    exact=None if cut.exact else False,
                    kv=pause.kv or cut.kv,
                    mode=pause.mode,
                    snapshot_seconds=cut.snapshot_seconds,
                    generated=cut.generated,
                )
            )

    def _chosen(self, names: Iterable[str] | None) -> list[str]:
        if names is not None:
            return [names] if isinstance(names, str) else list(names)
        if self._attached_any:
            return list(self.engines)
        return list(self._numbers) or [ENGINE]

    def _with_cuts(self, names: Iterable[str] | None, cuts: Cuts | None) -> list[str]:
        """The engines that are paused: without others, those that ``cuts`` names.

        Raises:
            ValueError: ``cuts`` is of another shape, or names others.
        """
        cuts = {} if cuts is None else cuts
        shapes: list[object] = list(cuts.values())
        if not all(isinstance(calls, Mapping) for calls in shapes):
            raise ValueError(f"cuts: {cuts!r} is no {{engine: {{call: tokens}}}}")
        if names is None and not self._attached_any:
            return list(dict.fromkeys([*self._numbers, *cuts])) or [ENGINE]
        chosen = self._chosen(names)
        astray = sorted(cuts.keys() - set(chosen))
        if astray:
            raise ValueError(f"cuts: {astray} are not paused, {chosen} are; pass engines=")
        return chosen

    def last_refit(self, engine: str) -> int:
        """Number of the last refit of an engine whose pause began; 0 if none."""
        return self._number(engine)

    def _number(self, name: str) -> int:
        return max(self._numbers.get(name, 0), self._last_refit(name))

    def _violation(self, name: str, detail: str) -> None:
        self._record(ViolationFound(time=self._clock(), name=name, detail=detail))


def _check_name(engine: object) -> None:
    """See that an engine has a name that can stand in a trace.

    Raises:
        ValueError: it has none.
    """
    name = getattr(engine, "name", None)
    try:
        usable = isinstance(name, str) and bool(name.encode()) and hasattr(engine, "mark")
    except UnicodeEncodeError:
        usable = False
    if not usable:
        raise ValueError(
            f"engines: {engine!r} is none, or has no name; pass VllmEngine(llm, name=...), or"
            " another of rl_staleness.integrations"
        )


def _told(engine: str, what: str, tell: Callable[[], object]) -> Answer:
    """Tell one engine; what it raises is its answer, so that the others are told too."""
    try:
        noticed = tell()
        if not isinstance(noticed, Future):
            raise TypeError(f"engine {engine!r} answered {noticed!r} instead of a future")
        return Answer(engine, what, cast("Future[None]", noticed))
    except Exception as error:  # noqa: BLE001  # handed on as the answer, and looked at
        failed: Future[None] = Future()
        failed.set_exception(error)
        return Answer(engine, what, failed)


def _on_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _succeeded(future: Future[None]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None
