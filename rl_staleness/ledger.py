"""The one fold over the events of a run, used online by the callback and offline by the commands.

It keeps what runs and waits now and the refits that may still be needed, and turns each
``step_trained`` into numbers. It never repairs: facts that cannot all be true are counted.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Set
from functools import partial
from operator import attrgetter
from typing import Any, cast

from rl_staleness.events import (
    Call,
    Event,
    Gap,
    GroupDropped,
    GroupPublished,
    RefitAborted,
    RefitCut,
    RefitDone,
    RunFinished,
    RunStarted,
    StepTrained,
    TraceError,
    ViolationFound,
)
from rl_staleness.groups import Find, StepTokens, num_trained
from rl_staleness.ranges import Segment
from rl_staleness.refits import Finding, Refits
from rl_staleness.staleness import StepStaleness, Versions, measure

__all__ = ["Ledger"]

_CALL = attrgetter("call")

ORPHAN_AFTER = 64
"""Refits after which a listed call that no group published is forgotten, unless a trace says so."""


class Ledger:
    """What the events of a run say so far; `apply` is the only way in."""

    def __init__(self) -> None:
        self.run: RunStarted | None = None
        self.version = 0
        """Policy updates so far: the version that the next step is expected to update."""
        self.step = 0
        """Number of the next step."""
        self._newest = 0  # that a refit led to
        self.found: list[Finding] = []
        """Violations that the last event showed, as (name, detail)."""
        self._engines: dict[str, Refits] = {}
        self._waiting: dict[str, GroupPublished] = {}
        self._calls_waiting: dict[str, set[str]] | None = None
        """Those of the waiting groups by engine; None: to be looked up when it is asked for."""
        self._found_before: dict[str, set[tuple[str, str]]] = {}
        self._refit_versions = Versions()
        self._last_refits: dict[str, int] = {}
        self._undone = False  # a part of the run
        self._orphans = 0
        self._violations = 0
        self._dropped_tokens = 0
        self._refit_seconds = 0.0
        self._lines_lost = False  # violations may be the gap's doing
        self._informed: set[str] | None = None  # engines with a refit_done since a gap, if any
        self._apply: dict[type, Callable[[Any], StepStaleness | None]] = {
            RunStarted: self._run_started,
            RefitCut: self._refit_cut,
            RefitDone: self._refit_done,
            RefitAborted: self._refit_aborted,
            GroupPublished: self._group_published,
            GroupDropped: self._group_dropped,
            StepTrained: self._step_trained,
            ViolationFound: self._violation,
            Gap: self._gap,
            RunFinished: lambda _: None,
        }

    def apply(self, event: Event) -> StepStaleness | None:
        """Take the next event; a ``step_trained`` gives its numbers.

        Raises:
            TraceError: it comes before the first ``run_started``; nothing is changed.
        """
        if self.run is None and type(event) is not RunStarted:
            raise TraceError("event: there is no run_started before it")
        if self.found:
            self.found = []
        return self._apply[type(event)](event)

    @property
    def newest(self) -> int:
        """The newest version that the policy is known to have had: lines of steps may be lost, and
        those of refits that came after them may not."""
        return max(self.version, self._newest)

    @property
    def orphans(self) -> int:
        """Listed calls that were forgotten because no group published them."""
        return self._orphans + sum(refits.orphans for refits in self._engines.values())

    @property
    def size(self) -> int:
        """Entries held in memory."""
        held = sum(refits.size for refits in self._engines.values())
        return held + len(self._waiting) + self._refit_versions.size

    def waiting(self) -> tuple[GroupPublished, ...]:
        """The groups that are published and may still be trained."""
        return tuple(self._waiting.values())

    def is_waiting(self, group: str) -> bool:
        """Whether this group is published and may still be trained."""
        return group in self._waiting

    def published(self, group: str) -> GroupPublished | None:
        """How a group that may still be trained was published; None: there is none."""
        return self._waiting.get(group)

    def last_refit(self, engine: str) -> int:
        """The highest refit number of an engine in any incarnation of the run."""
        refits = self._engines.get(engine)
        return self._last_refits.get(engine, 0) if refits is None else refits.last

    def last_refits(self) -> dict[str, int]:
        """The same of every engine that any incarnation of the run had."""
        names = {**self._last_refits, **self._engines}
        return {name: number for name in names if (number := self.last_refit(name))}

    def engine_version(self, engine: str) -> int:
        """The version that an engine has after the newest of its refits that are done."""
        refits = self._refits(engine)
        return refits.beside(refits.last + 1)[0]

    def version_during(self, call: Call, *, now: int) -> int:
        """A version that its engine had while a call ran, as far as cuts say when: before the
        first that lists it, else now.

        Args:
            now: version of the policy; `version` lags where lines are lost.
        """
        refits = self._refits(call.engine)
        counts = refits.calls.counts(call.call)
        if not counts:
            return self.engine_version(call.engine)
        return refits.before(min(counts), now=now)[0]

    def listed(self, engine: str) -> Mapping[str, object]:
        """The calls of an engine that cuts list, by name."""
        return self._refits(engine).calls.listed

    def sole_version(self, engine: str, after: int, until: int) -> int | None:
        """The version of a whole call that no refit touched; None if one may have.

        Args:
            after: the last refit whose pause began before the call did.
            until: the last refit whose pause began before the call ended.
        """
        if self._lines_missing(engine):
            return None
        return self._refits(engine).sole_version(after, until)

    def age(
        self, groups: Iterable[str], *, version: int | None = None, step: int | None = None
    ) -> StepStaleness:
        """What a step that trained these groups now would report; nothing changes.

        Args:
            version, step: the trainer's; default those of the ledger, which lag where lines are
                lost.
        """
        version = self.version if version is None else version
        step = self.step if step is None else step
        event = StepTrained(time=0.0, step=step, version=version, groups=tuple(groups))
        return self._numbers(event, self._consumed(event, find=_ignore))

    def spans(
        self, call: Call, *, now: int | None = None, restored: bool | None = None
    ) -> list[Segment]:
        """``(start, stop, oldest, newest)`` of a call's tokens, as the evidence stands.

        Args:
            now: version of the policy, which nothing is newer than; default `version`, which lags
                where lines are lost.
            restored: it is of a group that was published before the run's last resume.
        """
        now = self.version if now is None else now
        return self._tokens(now, _ignore).spans(call, restored=restored)[0]

    # The events.

    def _run_started(self, event: RunStarted) -> None:
        before = self.run
        if before is not None and event.run != before.run:
            self._find("run_changed", f"{event.run!r} goes on where {before.run!r} was")
        elif before is not None and not _follows(event, before):
            detail = f"incarnation {event.incarnation} follows {before.incarnation}"
            self._find("incarnation", detail)
        self._orphans = self.orphans
        self._last_refits.update({name: refits.last for name, refits in self._engines.items()})
        self._undone = self._undone or event.version < self.newest
        self._newest = 0
        self.run, self.version, self.step = event, event.version, event.step
        self._engines, self._waiting, self._found_before = {}, {}, {}
        self._calls_waiting = None
        self._refit_versions.forget_above(event.version)  # what a rolled back part led to
        for name, number in _refits_before(event).items():
            self._last_refits[name] = max(number, self._last_refits.get(name, 0))
        self._lines_lost, self._informed = False, None
        ahead = {n: v for n, v in event.engines.items() if v > event.version}
        if ahead:
            self._find("engine_version_beyond_policy", f"{ahead}, the policy has {event.version}")

    def _refit_cut(self, event: RefitCut) -> None:
        self._find_all(self._refits(event.engine).cut(event))

    def _refit_done(self, event: RefitDone) -> None:
        self._find_all(self._refits(event.engine).done(event))
        if event.version > self.version:
            detail = f"refit {event.refit} of {event.engine!r} leads to {event.version}"
            self._find("engine_version_beyond_policy", f"{detail}, the policy has {self.version}")
        self._refit_versions.add(event.version)
        self._newest = max(self._newest, event.version)
        self._refit_seconds += event.pause_seconds or 0.0
        self._lines_lost = False
        if self._informed is not None:
            self._informed.add(event.engine)

    def _refit_aborted(self, event: RefitAborted) -> None:
        self._find_all(self._refits(event.engine).aborted(event))

    def _group_published(self, event: GroupPublished) -> None:
        if event.group in self._waiting:
            self._find("published_again", f"group {event.group!r} is waiting already")
            self._release(event.group)
        self._waiting[event.group] = event
        self._calls_waiting = None
        calls = event.calls
        if len(calls) > 1 and len(set(map(_CALL, calls))) < len(calls):
            names = Counter(call.call for call in calls)
            twice = [name for name, number in names.items() if number > 1]
            self._find_all(("call_named_twice", f"{n!r} of {event.group!r}") for n in twice)

    def _group_dropped(self, event: GroupDropped) -> None:
        waiting = self._waiting.get(event.group)
        self._dropped_tokens += num_trained(event if waiting is None else waiting)
        if waiting is not None:
            self._release(event.group)
        else:
            for call in event.calls:
                self._refits(call.engine).left(call)

    def _step_trained(self, event: StepTrained) -> StepStaleness:
        if event.version != self.version:
            self._find("step_version", f"updates {event.version}, the count is {self.version}")
        if event.step != self.step:
            self._find("step_number", f"is {event.step}, the count is {self.step}")
        tokens = self._consumed(event, find=self._find_once)
        numbers = self._numbers(event, tokens)
        tokens.leave()
        waiting, kept = self._waiting, set(event.kept or ())
        self._calls_waiting = None
        for batch in event.consumed:
            for name in batch:
                if name not in kept:
                    waiting.pop(name, None)
        if self._found_before:
            found = self._found_before
            self._found_before = {name: found[name] for name in found if name in waiting}
        self.version, self.step = event.version + event.num_updates, event.step + 1
        self._violations = self._dropped_tokens = 0
        self._refit_seconds = 0.0
        self._lines_lost = False
        return numbers

    def _violation(self, event: ViolationFound) -> None:
        self.found.append((event.name, event.detail))
        self._violations += 1

    def _gap(self, event: Gap) -> None:
        self._lines_lost, self._informed = True, set()

    # What they lead to.

    def _consumed(self, event: StepTrained, *, find: Find) -> StepTokens:
        """The tokens of a step's groups."""
        masks = event.trained or {}
        trained = {name for batch in event.consumed for name in batch} if masks else set[str]()
        for name in masks.keys() - trained:
            find(name, "", "mask_of_unknown_group", "the step did not train it")
        tokens = self._tokens(event.version, find)
        waiting, missing = self._waiting, tokens.missing
        for at, batch in enumerate(event.consumed, start=event.version):
            groups = list(map(waiting.get, batch))
            if not all(groups):
                missing.update((name, None) for name in batch if name not in waiting)
            tokens.add(filter(None, groups), masks, at)
        for name in missing:
            find(name, "", "unknown_group", "not published, or used up")
        return tokens

    def _numbers(self, event: StepTrained, tokens: StepTokens) -> StepStaleness:
        return measure(
            tokens.by_versions,
            tokens.unknown,
            arrived=tokens.arrived,
            refit_versions=self._refit_versions,
            late_updates=max(event.num_updates - 1, 0) if event.batches is None else 0,
            complete=not tokens.missing,
            step=event.step,
            version=event.version,
            spanning_calls=tokens.spanning_calls,
            violations=self._violations,
            dropped_tokens=self._dropped_tokens,
            refit_seconds=self._refit_seconds,
        )

    def _tokens(self, now: int, find: Find) -> StepTokens:
        limit = 0 if self.run is None else self.run.version
        lost = self._lines_missing
        return StepTokens(self._refits, lost=lost, now=now, limit=limit, find=find)

    def _lines_missing(self, engine: str) -> bool:
        return self._informed is not None and engine not in self._informed

    def _refits(self, engine: str) -> Refits:
        refits = self._engines.get(engine)
        if refits is None:
            assert self.run is not None
            orphan_after = (self.run.about or {}).get("orphan_after")
            refits = self._engines[engine] = Refits(
                start=self.run.engines.get(engine, self.run.version),
                base=self._last_refits.get(engine, 0),
                limit=self.run.version if self.run.incarnation else None,
                undone=self._undone,
                waiting=partial(self._waiting_calls, engine),
                orphan_after=orphan_after if type(orphan_after) is int else ORPHAN_AFTER,
            )
        return refits

    def _waiting_calls(self, engine: str) -> Set[str]:
        """The calls of an engine that groups wait with: what cuts say of them stays."""
        if self._calls_waiting is None:
            by_engine = self._calls_waiting = defaultdict[str, set[str]](set)
            for group in self._waiting.values():
                for call in () if group.restored else group.calls:
                    by_engine[call.engine].add(call.call)
        return self._calls_waiting.get(engine, frozenset())

    def _release(self, name: str) -> None:
        """A group is dropped, or another one comes in its place."""
        group = self._waiting.pop(name)
        self._calls_waiting = None
        if not group.restored:
            for call in group.calls:
                self._refits(call.engine).left(call)
        self._found_before.pop(name, None)

    def _find(self, name: str, detail: str) -> None:
        """Count a violation, unless lines that were lost just before may explain it."""
        if not self._lines_lost:
            self.found.append((name, detail))
            self._violations += 1

    def _find_once(self, group: str, call: str, name: str, detail: str) -> None:
        """Count a violation once a name and call (or group), however often the group is trained."""
        if group not in self._waiting:
            self._find(name, f"group {group!r}: {detail}")
            return
        found = self._found_before.setdefault(group, set())
        if (name, call) not in found:
            found.add((name, call))
            subject = f"call {call!r} of group" if call else "group"
            self._find(name, f"{subject} {group!r}: {detail}")

    def _find_all(self, found: Iterable[Finding]) -> None:
        for name, detail in found:
            self._find(name, detail)


def _follows(event: RunStarted, before: RunStarted) -> bool:
    """Whether a start is the next one; some between may not have reached the disk."""
    ahead = event.incarnation - before.incarnation
    return ahead == 1 or (ahead > 1 and "resumed" in (event.about or {}))


def _refits_before(event: RunStarted) -> dict[str, int]:
    """The last refit numbers of engines, where they are higher than any that a line names."""
    said: object = (event.about or {}).get("refits_before")
    numbers = cast("dict[str, object]", said) if isinstance(said, dict) else {}
    return {name: number for name, number in numbers.items() if type(number) is int}


def _ignore(group: str, call: str, name: str, detail: str) -> None:
    """Leave a violation to the step that really trains."""
