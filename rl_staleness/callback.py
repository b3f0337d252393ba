"""The object that a user adds to a trainer: hooks in, events out.

It translates, writes and notifies; it does no arithmetic. No hook raises, stalls or stops training
unless the user asked for ``strict=True``. Where each hook fires in an asynchronous loop:

    with StalenessCallback(engines=[engine]) as staleness:
        rollout:   with staleness.group() as group:      # requests in here are calls of this group
                       sample
                   staleness.on_publish(group)           # before a trainer can take it
        train:     take groups, update the policy
                   staleness.on_step(groups)             # after the step's last update
        refit:     pause generation
                   staleness.on_refit_paused()           # after the pause, before the weights move
                   move weights
                   staleness.on_refit_done()             # after the weights, before the resume
                   resume generation
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Literal, cast

import msgspec

from rl_staleness.engines import Engine, LiveCall, captured
from rl_staleness.events import (
    Call,
    Event,
    GroupDropped,
    GroupPublished,
    RunFinished,
    StepTrained,
    ViolationFound,
)
from rl_staleness.group import Group, name_of, names_of
from rl_staleness.guard import Guard
from rl_staleness.incarnation import Incarnation, is_count
from rl_staleness.limits import Limits
from rl_staleness.pauses import Answer, Begun, Cuts, Pauses
from rl_staleness.publication import Content, Masks, about_of, content_of, mask_of, written
from rl_staleness.ranges import Segment
from rl_staleness.recorder import Recorder
from rl_staleness.refit import Refit, engine_names
from rl_staleness.resume import Saved, saved_of
from rl_staleness.sinks import Sink, Sinks, StepObserver
from rl_staleness.staleness import StepStaleness

__all__ = ["Group", "StalenessCallback"]

_log = logging.getLogger(__name__)


class StalenessCallback:
    """Measures exactly how off-policy each training batch was.

    Args:
        engines: the engines that are paused and refitted; `attach` takes more until the run starts.
        trace: where the evidence is written; None writes nothing.
        run: the run's identity; with that of the trace that stands there, the run goes on.
        version: policy updates in the weights that the run starts from; default 0, or what the
            trace of the same run says. An older one than that undoes what came after it.
        step: number of the first step; default 1, or what the trace says, likewise.
        sinks: told every step, in this order; a function of a step will do. Default: the W&B
            and MLflow runs that are active, looked for at each step until there is one.
        timeout: seconds that a refit waits for an engine to take notice.
        close_timeout: seconds that each sink has at `close` to send what is left.
        warn_age_above: log a warning when a step's batch age rises above so many updates.
        warn_coverage_below: log one when the coverage falls below this share.
        strict: let hooks raise.
        late_masks: loss masks become known at `on_step` (``trained=``); every call is then
            written one by one.
        orphan_after: refits after which a call that no group published is forgotten.
        about: what a reader of the trace may want to know (library, trainer); never text.
        clock: Unix seconds.

    Raises:
        ValueError: an argument cannot be used; the message names it.
        OSError: the trace cannot be written.
        TraceError: what stands at ``trace`` is no trace.
    """

    def __init__(
        self,
        *,
        engines: Iterable[Engine] = (),
        trace: str | os.PathLike[str] | None = "rollout_trace.jsonl",
        run: str | None = None,
        version: int | None = None,
        step: int | None = None,
        sinks: Iterable[Sink | StepObserver] | None = None,
        timeout: float = 5.0,
        close_timeout: float = 30.0,
        warn_age_above: float | None = None,
        warn_coverage_below: float | None = None,
        strict: bool = False,
        late_masks: bool = False,
        orphan_after: int = 64,
        about: Mapping[str, Any] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        _check_counts(version=version, step=step, orphan_after=orphan_after)
        _check_seconds(timeout=timeout, close_timeout=close_timeout)
        _check_kinds(trace=trace, about=about, clock=clock)
        self._limits = Limits(age_above=warn_age_above, coverage_below=warn_coverage_below)
        self._timeout = timeout
        self._close_timeout = close_timeout
        engines = _several("engines", engines)
        self._guard = Guard(strict=strict, timeout=timeout)
        self._sinks = Sinks(None if sinks is None else _several("sinks", sinks), guard=self._guard)
        self._late_masks = late_masks
        self._clock = clock
        self._trace, self._given = trace, (run, version, step)
        self._started = self._closed = False
        self._pauses = Pauses(
            self._record,
            guard=self._guard,
            clock=clock,
            last_refit=lambda engine: self._recorder.ledger.last_refit(engine),
        )
        self.attach(*engines)  # before a file is made: a wrong one leaves none
        self._about = {**(about or {}), "orphan_after": orphan_after}
        self._recorder = Recorder(trace, run=run or uuid.uuid4().hex)
        self._incarnation = self._new_incarnation()
        self._version, self._step = self._incarnation.start.version, self._incarnation.start.step
        self._step_lock = threading.RLock()  # sinks hear of steps in their order
        self._told: list[Answer] = []
        self._numbers: StepStaleness | None = None
        self._names = itertools.count(1)

    # What is known.

    @property
    def version(self) -> int:
        """Policy updates so far, counted whether or not their step could be written."""
        return self._version

    @property
    def step(self) -> int:
        """Number of the next step."""
        return self._step

    @property
    def trace(self) -> str | None:
        """Where the trace is written."""
        return self._recorder.path

    @property
    def silent_engines(self) -> frozenset[str]:
        """Engines that did not answer in time, and have not answered since."""
        return frozenset(self._guard.silent & self._pauses.engines.keys())

    def last_refit(self, engine: str = "engine") -> int:
        """Number of an engine's last refit whose pause began, 0 if none: what a call that begins
        now has as ``after``, and one that ends now as ``until``. Numbers go on after a resume."""
        return self._pauses.last_refit(engine)

    def metrics(self, step: int | None = None) -> dict[str, float]:
        """The scalars of a step for a trainer that logs by itself, beside ``sinks=[]``.

        Args:
            step: its number; default the last one. Of another one, or one without numbers, there
                are none: the dict is empty, and never a reason for the trainer to fail.
        """
        numbers = self._numbers
        if numbers is None or step not in (None, numbers.step):
            return {}
        return numbers.metrics()

    def age(self, group: Group | str) -> StepStaleness:
        """How old a waiting group is: what a step that trained it alone now would report."""
        self._ensure_started(closed_too=True)
        self._pauses.settle(self._timeout)
        with self._recorder.lock:
            ledger = self._recorder.ledger
            return ledger.age([name_of(group)], version=self._version, step=self._step)

    def spans(self, call: LiveCall | Call) -> list[Segment]:
        """``(start, stop, oldest, newest)`` of a call's tokens, by the evidence so far.

        Both versions are -1 where weights made them that a run which went back never had.
        """
        self._ensure_started(closed_too=True)
        self._pauses.settle(self._timeout)
        with self._recorder.lock:
            ledger = self._recorder.ledger
            record = written(
                call,
                masks={},
                in_doubt=self._pauses.in_doubt,
                policy_version=self.version,
                version_during=partial(ledger.version_during, now=self.version),
            )
            before = self._incarnation.call_before(record)
            return ledger.spans(before or record, now=self.version, restored=before is not None)

    async def selftest(self) -> dict[str, object]:
        """Run one live call on each engine that can; what evidence each of them gives."""
        tests = {
            name: test
            for name, engine in self._pauses.engines.items()
            if (test := getattr(engine, "selftest", None)) is not None
        }
        return {name: await test() for name, test in tests.items()}

    # Hooks.

    def attach(self, *engines: Engine, version: int | None = None) -> None:
        """Take in engines; of those that join while the run goes on, wait until they know.

        Args:
            version: policy updates in the weights that they hold, where the run has started; no
                older than those of an engine that had the name before. What they began before they
                heard of it, as with `start`, is not known as well.

        Raises:
            ValueError: a name is taken, or the weights cannot be these.
        """
        held = self._held_by(engines, version)
        with self._guard("attach"):
            self._guard.wait(self._take_in(engines, held))

    async def aattach(self, *engines: Engine, version: int | None = None) -> None:
        """Like `attach`, without blocking the loop."""
        held = self._held_by(engines, version)
        with self._guard("attach"):
            await self._guard.wait_async(self._take_in(engines, held))

    def detach(self, *engines: str) -> None:
        """Let engines go for good, by their names: dead ones are waited for no longer.

        Another one may join under the name; that of one that left its process is a new object.
        """
        for name in engines:
            with self._guard(f"detaching engine {name!r}"):
                self._pauses.detach(name)

    def start(self, *, engines: Mapping[str, int] | None = None) -> None:
        """The run starts: label the engines' weights, and wait until they know.

        By itself that happens at the first hook, which waits for nobody: what an engine in another
        process begins until it has heard is not known as well as what comes after.

        Args:
            engines: versions of those that do not hold the policy's: ``{"engine": 0}`` where one
                came back with the base weights.
        """
        with self._guard("start"):
            self._begin(engines)
            self._guard.wait(self._told)

    async def astart(self, *, engines: Mapping[str, int] | None = None) -> None:
        """Like `start`, without blocking the loop."""
        with self._guard("start"):
            self._begin(engines)
            await self._guard.wait_async(self._told)

    def state_dict(self) -> dict[str, Any]:
        """What the trainer's checkpoint has to hold of this; small, and plain JSON.

        Fires when the checkpoint is made: what is published from now on is no part of it.
        """
        with self._guard("state_dict"):
            self._ensure_started(closed_too=True)
            self._pauses.settle(self._timeout)
            with self._step_lock, self._recorder.lock:  # a step is in it whole, or not at all
                saved = Saved(
                    run=self._recorder.run,
                    incarnation=self._incarnation.start.incarnation,
                    line=self._recorder.lines,
                    version=self._version,
                    step=self._step,
                    # Also of pauses of which no line is written, yet or at all.
                    refits={**self._recorder.ledger.last_refits(), **self._pauses.last_refits()},
                )
            return dict(msgspec.to_builtins(saved))
        return {}

    def load_state_dict(
        self, state: Mapping[str, Any], *, waiting: Iterable[Group | str] | None = None
    ) -> None:
        """Go on from a checkpoint; before the first hook.

        Its run goes on, in its trace, unless this was made with another ``run=``. Groups that
        waited then may be trained now; what was published later is dropped. An empty dict changes
        nothing: the trace alone says where the run goes on.

        Args:
            waiting: the groups that the trainer still has, default all that waited.

        Raises:
            ValueError: the run has started, or ``state`` is something else.
            TraceError, OSError: the trace cannot be gone on with.
        """
        if self._started:
            raise ValueError("state: the run has started; load it before the first hook")
        saved = saved_of(state)
        if saved is not None and self._given[0] is None and saved.run != self._recorder.run:
            self._recorder.discard()
            self._recorder = Recorder(self._trace, run=saved.run)
        kept = None if waiting is None else frozenset(names_of(waiting))
        self._incarnation = self._new_incarnation(saved, kept)
        self._version, self._step = self._incarnation.start.version, self._incarnation.start.step

    @contextmanager
    def group(self, name: str | None = None) -> Generator[Group]:
        """Open a group: requests that this task submits in here are its calls."""
        with self._guard("group"):
            self._ensure_started()
        group = Group(name or f"{self._incarnation.start.incarnation}/{next(self._names)}")
        with captured(group.capture):
            yield group

    def on_publish(
        self,
        group: Group | str,
        *,
        calls: Iterable[LiveCall | Call] | None = None,
        trained: Masks | None = None,
        unknown: int = 0,
        about: Mapping[str, Any] | None = None,
        restored: bool = False,
    ) -> None:
        """A finished group becomes available for training; fires before a trainer can take it.

        Args:
            calls: those of the group, where it was not captured here.
            trained: final loss masks by call name; default: every token of every call.
            unknown: trained tokens that no call made (an end token that the trainer appended).
            about: numbers that a reader may want (prompt tokens, rewards); never text.
            restored: it was published before the run's last resume.
        """
        with self._guard("on_publish"):
            self._ensure_started()
            calls = None if calls is None else _calls(calls)
            with self._recorder.lock:
                before = self._recorder.ledger.published(name_of(group))
                if before is not None and before.restored:
                    if restored:
                        return  # what was found in the trace is at least as exact
                    anew = GroupDropped(
                        time=self._clock(), group=before.group, reason="published anew"
                    )
                    self._record(anew)
                content = self._content(group, calls, trained, sum_up=not restored)
                self._record(
                    GroupPublished(
                        time=self._clock(),
                        group=name_of(group),
                        tokens=content.tokens,
                        calls=content.calls,
                        unknown=unknown or None,
                        restored=restored or None,
                        about=about_of(content, about),
                    )
                )
            if not (content.calls or content.tokens or unknown):
                with self._guard("on_publish finding a call in its group"):
                    raise ValueError(f"group {name_of(group)!r} has no call and no token")

    def on_drop(
        self,
        group: Group | str,
        *,
        reason: str,
        calls: Iterable[LiveCall | Call] | None = None,
    ) -> None:
        """A group will not be trained, published or not; fires when that is decided."""
        with self._guard("on_drop"):
            self._ensure_started()
            calls = None if calls is None else _calls(calls)
            with self._recorder.lock:
                content = Content({}, ())
                if not self._recorder.ledger.is_waiting(name_of(group)):
                    content = self._content(group, calls, None)
                self._record(
                    GroupDropped(
                        time=self._clock(),
                        group=name_of(group),
                        reason=reason,
                        tokens=content.tokens,
                        calls=content.calls,
                    )
                )

    def on_step(
        self,
        groups: Iterable[Group | str] | None = None,
        *,
        step: int | None = None,
        version: int | None = None,
        updates: int | None = None,
        batches: Iterable[Iterable[Group | str]] | None = None,
        trained: Mapping[str, Masks] | None = None,
        kept: Iterable[Group | str] = (),
    ) -> StepStaleness | None:
        """A training step is over; fires after its last update, before the next refit.

        Args:
            groups: what the step consumed, or ``batches``: the groups of each update in order.
            step, version: the trainer's own count, if it has one: a difference is a violation.
            updates: policy updates that the step made, default 1; 0 for a skipped one.
            trained: loss masks by group and call, where they are known only now.
            kept: groups that may be trained again.

        Returns:
            The step's numbers; None if its line was lost or refused.
        """
        told: StepTrained | Exception
        made = updates if type(updates) is int and updates >= 0 else 1
        try:  # read what may be a generator before anything is locked
            split = None if batches is None else tuple(names_of(batch) for batch in batches)
            made = made if split is None else len(split)
            told = StepTrained(
                time=self._clock(),
                step=0,
                version=0,
                groups=None if groups is None and split is not None else names_of(groups),
                updates=updates,
                batches=split,
                trained={
                    group: {call: mask_of(mask) for call, mask in masks.items()}
                    for group, masks in (trained or {}).items()
                }
                or None,
                kept=names_of(kept) or None,
            )
        except Exception as error:  # noqa: BLE001  # raised below, where the step is counted
            told = error
        with self._step_lock, self._guard("on_step"):
            self._numbers = None
            numbers = self._numbers = self._count_step(told, step, version, made)
            if numbers is not None:
                self._notify(numbers)
            return numbers
        return None

    def on_refit_paused(
        self,
        *,
        version: int | None = None,
        engines: Iterable[str] | None = None,
        mode: str = "keep",
        kv: Literal["kept", "recomputed"] | None = None,
        cuts: Cuts | None = None,
    ) -> None:
        """Generation is paused; fires before the weights move.

        Args:
            version: what the engines are moved to, default the policy's.
            engines: names of those that are paused, default all.
            mode: ``keep`` (running calls go on after it), ``abort`` or ``wait``.
            kv: whether running calls keep the KV cache of the old weights.
            cuts: tokens so far, ``{engine: {call: tokens}}``, from a trainer that counts them
                itself; an engine that is not attached is called ``"engine"`` unless it is named.
        """
        with self._guard("on_refit_paused"):
            self._guard.wait(self._paused(version, engines, mode, kv, cuts).answers)

    async def aon_refit_paused(
        self,
        *,
        version: int | None = None,
        engines: Iterable[str] | None = None,
        mode: str = "keep",
        kv: Literal["kept", "recomputed"] | None = None,
        cuts: Cuts | None = None,
    ) -> None:
        """Like `on_refit_paused`, without blocking the loop."""
        with self._guard("on_refit_paused"):
            begun = self._paused(version, engines, mode, kv, cuts)
            await self._guard.wait_async(begun.answers)

    def on_refit_done(
        self, *, version: int | None = None, engines: Iterable[str] | None = None
    ) -> None:
        """The weights are in; fires before generation resumes."""
        with self._guard("on_refit_done"):
            self._ensure_started()
            version = self._refit_version(version)
            ending = self._pauses.end(engine_names(engines))
            try:
                self._guard.wait(self._pauses.moved(ending, version=version))
            finally:
                self._pauses.done(ending, version=version, policy=self.version)

    async def aon_refit_done(
        self, *, version: int | None = None, engines: Iterable[str] | None = None
    ) -> None:
        """Like `on_refit_done`, without blocking the loop."""
        with self._guard("on_refit_done"):
            self._ensure_started()
            version = self._refit_version(version)
            ending = self._pauses.end(engine_names(engines))
            try:
                await self._guard.wait_async(self._pauses.moved(ending, version=version))
            finally:  # also where it is cancelled: the weights are in
                self._pauses.done(ending, version=version, policy=self.version)

    def on_refit_aborted(self, *, reason: str, engines: Iterable[str] | None = None) -> None:
        """The refit failed, the engines keep their weights; fires before generation resumes."""
        with self._guard("on_refit_aborted"):
            self._ensure_started()
            self._guard.wait(self._pauses.abort(engine_names(engines), reason=reason))

    async def aon_refit_aborted(self, *, reason: str, engines: Iterable[str] | None = None) -> None:
        """Like `on_refit_aborted`, without blocking the loop."""
        with self._guard("on_refit_aborted"):
            self._ensure_started()
            await self._guard.wait_async(self._pauses.abort(engine_names(engines), reason=reason))

    def refit(
        self,
        *,
        version: int | None = None,
        engines: Iterable[str] | None = None,
        mode: str = "keep",
        kv: Literal["kept", "recomputed"] | None = None,
    ) -> Refit:
        """Bracket the move of the weights: cuts, then done, or aborted when the block raises.

        What the block itself says with `on_refit_done` or `on_refit_aborted`, of engines of which
        it knows already, stands.
        """
        names = engine_names(engines)
        return Refit(
            self,
            engines=names,
            guard=self._guard,
            pause=partial(self._paused, version, names, mode, kv, None),
            left=self._pauses.left,
        )

    def on_checkpoint(self) -> None:
        """The trainer saved its state: attach the trace so far to the runs. Waits for nothing."""
        with self._guard("on_checkpoint"):
            self._ensure_started()
            if self.trace is not None:
                self._sinks.attach(self.trace)

    # The end.

    def close(self, status: str = "finished") -> None:
        """End the trace and let go of the engines; the run itself is the user's. Never raises."""
        if self._closed:
            return
        with self._guard("close"):
            self._ensure_started()
            self._pauses.settle(self._timeout)
            self._pauses.close()
            self._record(RunFinished(time=self._clock(), status=status))
        self._closed = True
        for name, engine in self._pauses.engines.items():
            with self._guard(f"detaching engine {name!r}"):
                engine.detach()
        with self._guard("close"):
            self._recorder.close()
        self._sinks.close(self.trace, timeout=self._close_timeout)
        listed = "; ".join(f"{number} {what}" for what, number in self.missing().items())
        if listed:
            _log.warning("rl_staleness: %s", listed)

    def missing(self) -> dict[str, int]:
        """What the numbers and the trace had to do without, by kind; empty for a sound run."""
        counts = {
            "lines of the trace could not be written": self._recorder.lost,
            "events had a value of a wrong type and were refused": self._recorder.refused,
            "refits had no cut": self._pauses.without_cut,
            "calls that cuts listed were never published": self._recorder.ledger.orphans,
            self._recorder.damage or "": int(self._recorder.damage is not None),
            **{f"violations {name}": n for name, n in self._recorder.violations.items()},
            **{f"times {what} failed": number for what, number in self._guard.failures.items()},
        }
        return {what: number for what, number in counts.items() if number}

    def __enter__(self) -> StalenessCallback:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close("finished" if kind is None else "failed")

    # What they share.

    def _ensure_started(self, *, closed_too: bool = False) -> None:
        """Write ``run_started`` at the first hook, so that engines can be attached until then."""
        if self._closed and not closed_too:
            raise RuntimeError("it was called after close() and did nothing")
        if not self._started:
            self._start_run({})

    def _held_by(self, engines: Sequence[Engine], version: int | None) -> int | None:
        """The version that engines hold as they join the run; None: it has not started."""
        self._pauses.check(engines)
        if not self._started:
            if version is not None:
                raise ValueError("version: the run has not started; pass start(engines={name: })")
            return None
        oldest = max((self._recorder.ledger.engine_version(e.name) for e in engines), default=0)
        if not is_count(version) or (held := self._refit_version(version) or 0) < oldest:
            raise ValueError(
                f"version: {version!r}; the run goes on, and what had these names was at {oldest}:"
                " pass the policy updates in the weights that the engines hold, once they are no"
                " older"
            )
        return held

    def _take_in(self, engines: Sequence[Engine], held: int | None) -> list[Answer]:
        """Have engines in the run, before its start or now; what they answer."""
        if held is None:
            for engine in engines:
                self._pauses.attach(engine)
            return []
        self._ensure_started()
        self._guard.silent.difference_update(engine.name for engine in engines)
        return [self._pauses.join(engine, version=held) for engine in engines]

    def _begin(self, engines: Mapping[str, int] | None) -> None:
        if engines and self._started:
            raise ValueError("engines: the run has started, on other versions")
        if not self._started and not self._closed:
            self._start_run(engines or {})
        self._ensure_started()

    def _new_incarnation(
        self, saved: Saved | None = None, kept: frozenset[str] | None = None
    ) -> Incarnation:
        _, version, step = self._given
        return Incarnation(
            self._recorder,
            version=version,
            step=step,
            about=self._about,
            clock=self._clock,
            saved=saved,
            kept=kept,
        )

    def _start_run(self, engines: Mapping[str, int]) -> None:
        with self._recorder.lock:
            if self._started:
                return
            held = dict.fromkeys(self._pauses.engines, self._incarnation.start.version)
            held.update(engines)
            self._incarnation.begin(held, version=self._version, step=self._step)
            self._told = self._pauses.start(held)
            self._started = True
        self._guard.watch(self._told)

    def _record(self, event: Event) -> StepStaleness | None:
        if self._closed or not self._started:
            raise RuntimeError(f"{type(event).__name__} outside of the run: not in the trace")
        return self._recorder.record(event)

    def _count_step(
        self, told: StepTrained | Exception, step: int | None, version: int | None, made: int
    ) -> StepStaleness | None:
        """Write a step, and count it whatever comes of its line: the trainer has made it."""
        number = self._step if step is None else step
        updated = self._version if version is None else version
        try:
            self._ensure_started()
            if version is not None:
                updated = self._incarnation.translated(version, expected=self._version)
            if isinstance(told, Exception):
                raise told
            self._pauses.settle(self._timeout)
            return self._record(msgspec.structs.replace(told, step=number, version=updated))
        except Exception:
            self._recorder.skip_step()
            raise
        finally:
            self._step = (number if is_count(number) else self._step) + 1
            self._version = (updated if is_count(updated) else self._version) + made

    def _paused(
        self,
        version: int | None,
        engines: Iterable[str] | None,
        mode: str,
        kv: Literal["kept", "recomputed"] | None,
        cuts: Cuts | None,
    ) -> Begun:
        self._ensure_started()
        if kv not in (None, "kept", "recomputed") or type(mode) is not str:
            raise ValueError(f"mode, kv: {mode!r}, {kv!r}; kv is 'kept', 'recomputed' or None")
        version = self._refit_version(version)
        return self._pauses.begin(
            engine_names(engines),
            version=self.version if version is None else version,
            mode=mode,
            kv=kv,
            cuts=cuts,
        )

    def _content(
        self,
        group: Group | str,
        calls: list[LiveCall | Call] | None,
        trained: Masks | None,
        *,
        sum_up: bool = True,
    ) -> Content:
        """What to write of a group; the caller holds the lock."""
        members = group.calls if isinstance(group, Group) else []
        if calls:
            members = list({id(call): call for call in (*calls, *members)}.values())
        running = [c.call for c in members if isinstance(c, LiveCall) and not c.ended]
        if running:
            detail = f"group {name_of(group)!r}: {len(running)} calls were still running"
            self._record(ViolationFound(time=self._clock(), name="calls_running", detail=detail))
        astray = trained.keys() - {call.call for call in members} if trained else ()
        for name in sorted(astray):
            detail = f"call {name!r} of group {name_of(group)!r} is not among its calls"
            self._record(
                ViolationFound(time=self._clock(), name="mask_of_unknown_call", detail=detail)
            )
        ledger = self._recorder.ledger
        return content_of(
            members,
            masks=trained or {},
            sum_up=sum_up and not self._late_masks,
            sole_version=ledger.sole_version,
            listed_on=ledger.listed,
            in_doubt=self._pauses.in_doubt,
            policy_version=self._version,
            version_during=partial(ledger.version_during, now=self._version),
        )

    def _refit_version(self, version: int | None) -> int | None:
        """The version of a refit in this run's count, where the trainer passes one."""
        if version is None:
            return None
        return self._incarnation.translated(version, expected=self._version, refit=True)

    def _notify(self, numbers: StepStaleness) -> None:
        for warning in self._limits.crossed(numbers, refits=self._pauses.num_done):
            _log.warning("rl_staleness: step %d: %s", numbers.step, warning)
        self._sinks.log(numbers, trained=self._recorder.trained, trace=self.trace)


def _check_counts(**given: object) -> None:
    for name, number in given.items():
        if number is not None and not is_count(number):
            raise ValueError(f"{name}: {number!r} is no count; pass a whole number, not negative")


def _check_seconds(**given: object) -> None:
    for name, seconds in given.items():
        if type(seconds) not in (int, float) or not cast(float, seconds) >= 0:
            raise ValueError(f"{name}: {seconds!r} is no time; pass seconds, not negative")


def _check_kinds(*, trace: object, about: object, clock: object) -> None:
    if not (trace is None or isinstance(trace, (str, os.PathLike))):
        raise ValueError(f"trace: {trace!r} is no path; pass that of a file, or None")
    if not (about is None or isinstance(about, Mapping)):
        raise ValueError(f"about: {about!r} has no names; pass {{name: number}}")
    if not callable(clock):
        raise ValueError(f"clock: {clock!r} cannot be called; pass time.time, or one like it")


def _several(name: str, given: Iterable[Any]) -> list[Any]:
    """What was given, where only several will do.

    Raises:
        ValueError: it is one alone.
    """
    try:
        return list(given)
    except TypeError:
        raise ValueError(f"{name}: {given!r} is not several; pass a list, [{name[:-1]}]") from None


def _calls(calls: Iterable[Any]) -> list[LiveCall | Call]:
    if isinstance(calls, (Call, LiveCall)):
        return [calls]
    listed = list(calls)
    for call in listed:
        if not isinstance(call, (Call, LiveCall)):
            raise TypeError(f"calls: {call!r} is no call; pass rl_staleness.Call(...) records")
    return listed
