"""A run as its pictures need it, collected in one pass over its trace. Nothing is drawn here.

Several steps are only ever shown as one by adding up their tokens first: every number of a
`Stretch` is a ratio of sums, so that a step of 90 tokens weighs nine times one of 10.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import TypeVar

import msgspec

from rl_staleness.events import (
    JOINED,
    Call,
    Event,
    Gap,
    GroupDropped,
    RefitAborted,
    RefitCut,
    RefitDone,
    RunFinished,
    RunStarted,
    StepTrained,
    TraceError,
)
from rl_staleness.ledger import Ledger
from rl_staleness.ranges import within
from rl_staleness.spans import NEVER
from rl_staleness.staleness import StepStaleness, quantile
from rl_staleness.trace import read

__all__ = [
    "MOST",
    "Found",
    "Interval",
    "Mark",
    "Refit",
    "Row",
    "RunView",
    "Stretch",
    "look_at",
    "marks",
    "stretches",
]

MOST = 400
"""Stretches of a picture at most: what a laptop's screen can tell apart."""

_Key = TypeVar("_Key", str, int)


class Refit(msgspec.Struct, frozen=True, kw_only=True):
    """One refit of one engine that was done or aborted."""

    engine: str
    version: int
    """What the engine was moved to."""
    pause_seconds: float | None = None
    """None: the trace does not say."""
    aborted: str | None = None
    """The reason; None: it was done."""


class Interval(msgspec.Struct, kw_only=True):
    """What happened between two steps. Filled while the trace is read, left alone afterwards."""

    refits: list[Refit] = []
    dropped: Counter[str] = msgspec.field(default_factory=Counter[str])
    """Tokens by the reason for which their groups were dropped."""
    dropped_ages: Counter[int] = msgspec.field(default_factory=Counter[int])
    """Those whose version is known or bounded, by the age that they had when they were dropped:
    the version that the policy had then, minus the oldest that may have sampled the token."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One training step, and what happened since the one before."""

    numbers: StepStaleness
    updates: int
    """Policy updates that the step made."""
    before: Interval


class Found(msgspec.Struct, kw_only=True):
    """The violations of one name."""

    times: int = 0
    step: int
    """The step that was being made ready, or trained, when the first was found."""
    detail: str
    """Of the first."""


class RunView(msgspec.Struct, kw_only=True):
    """All that the pictures of a run show."""

    run: str = ""
    incarnations: int = 0
    """How often the run was started or resumed."""
    started: float = 0.0
    """Unix seconds of the first line."""
    ended: float = 0.0
    """Unix seconds of the last line."""
    status: str | None = None
    """How the run closed its trace; None: it has not."""
    rows: list[Row] = []
    """Steps in order of their numbers."""
    after: Interval = msgspec.field(default_factory=Interval)
    """What happened after the last step."""
    undone: int = 0
    """Steps that a resume from before them made again; they are in no row."""
    found: dict[str, Found] = {}
    """Violations by name, those outside the rows included."""
    refits: Counter[str] = msgspec.field(default_factory=Counter[str])
    """Refits that were done, by engine; how one joined the run is none of them."""
    aborted: Counter[str] = msgspec.field(default_factory=Counter[str])
    without_cut: Counter[str] = msgspec.field(default_factory=Counter[str])
    """Refits that were done with no count of the running calls, or one that is not exact."""
    lost_lines: int = 0

    @property
    def violations(self) -> int:
        """Facts that cannot all be true, in the whole trace."""
        return sum(found.times for found in self.found.values())

    @property
    def updates(self) -> int:
        """Policy updates of all steps."""
        return sum(row.updates for row in self.rows)

    @property
    def intervals(self) -> list[Interval]:
        """Before each step, and after the last."""
        return [*(row.before for row in self.rows), self.after]

    @property
    def whole(self) -> Stretch | None:
        """The run as one stretch; None: it has no step."""
        return Stretch.of(self.rows) if self.rows else None

    @property
    def dropped_tokens(self) -> int:
        """Trained tokens of groups that were dropped, those after the last step included."""
        return sum(sum(interval.dropped.values()) for interval in self.intervals)


class Stretch(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive steps as one; names and units are those of `StepStaleness`."""

    first: int
    last: int
    num_steps: int
    version: int
    """That the first of the steps updated."""
    tokens: int
    tokens_by_age: dict[int, int]
    tokens_by_version: dict[int, int]
    batch_age: float | None
    age_in_flight: float | None
    age_in_queue: float | None
    age_p50: int | None
    age_p95: int | None
    age_lo: float | None
    age_hi: float | None
    coverage: float | None
    """None: there are no tokens, or `num_incomplete` is not 0."""
    known_coverage: float | None
    """The same over the steps that have a coverage."""
    num_incomplete: int
    """Steps that trained groups whose tokens nobody knows."""
    violations: int
    dropped: dict[str, int]
    """Tokens by reason, of groups that were dropped before these steps."""

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Stretch:
        """Add up one or more steps."""
        steps = [row.numbers for row in rows]
        by_age = _sum(step.tokens_by_age for step in steps)
        aged = sum(by_age.values())
        incomplete = sum(step.coverage is None and step.tokens > 0 for step in steps)
        tokens = sum(step.tokens for step in steps)
        known = _mean([(s.coverage, s.tokens) for s in steps])
        return cls(
            first=steps[0].step,
            last=steps[-1].step,
            num_steps=len(steps),
            version=steps[0].version,
            tokens=tokens,
            tokens_by_age=by_age,
            tokens_by_version=_sum(step.tokens_by_version for step in steps),
            batch_age=_mean([(s.batch_age, _aged(s)) for s in steps]),
            age_in_flight=_mean([(s.age_in_flight, _aged(s)) for s in steps]),
            age_in_queue=_mean([(s.age_in_queue, _aged(s)) for s in steps]),
            age_p50=quantile(by_age, aged, 50),
            age_p95=quantile(by_age, aged, 95),
            age_lo=_mean([(s.age_lo, s.tokens) for s in steps]),
            age_hi=_mean([(s.age_hi, s.tokens) for s in steps]),
            coverage=None if incomplete else known,
            known_coverage=known,
            num_incomplete=incomplete,
            violations=sum(step.violations for step in steps),
            dropped=_sum(row.before.dropped for row in rows),
        )


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """The refits between two steps, or between the steps of a stretch."""

    at: float
    """Where on the axis of steps: half a step before the next one."""
    refits: tuple[Refit, ...]

    @property
    def pause_seconds(self) -> dict[str, float]:
        """Engine-seconds of pause by engine, of refits that were done and say so."""
        seconds: dict[str, float] = {}
        for refit in self.refits:
            if refit.pause_seconds is not None:
                seconds[refit.engine] = seconds.get(refit.engine, 0.0) + refit.pause_seconds
        return seconds


def marks(view: RunView, most: int) -> list[Mark]:
    """Where engines were refitted, neighbours taken together as in `stretches`."""
    places = [row.numbers.step - 0.5 for row in view.rows]
    places.append(view.rows[-1].numbers.step + 0.5 if view.rows else 0.5)
    size = max(1, -(-len(view.rows) // most))
    parts = view.intervals
    found: list[Mark] = []
    for at in range(0, len(places), size):
        together = tuple(chain.from_iterable(part.refits for part in parts[at : at + size]))
        if together:
            where = places[at : at + size]
            found.append(Mark(at=(where[0] + where[-1]) / 2, refits=together))
    return found


def stretches(rows: Sequence[Row], most: int) -> list[Stretch]:
    """Cut a run into at most ``most`` stretches of equally many steps (the last may have fewer)."""
    size = max(1, -(-len(rows) // most))
    return [Stretch.of(rows[at : at + size]) for at in range(0, len(rows), size)]


def look_at(trace: str | os.PathLike[str]) -> RunView:
    """Collect what the pictures show in one pass.

    Raises:
        TraceError: as `rl_staleness.trace.read`.
        OSError: the trace cannot be read.
    """
    collector = _Collector()
    for event in read(trace):
        try:
            collector.take(event)
        except TraceError as error:
            raise TraceError(f"{trace}: {error}") from error
    return collector.finished()


class _Collector:
    """The one fold of the library, and beside it what its steps do not say."""

    def __init__(self) -> None:
        self._ledger = Ledger()
        self._view = RunView()
        self._rows: dict[int, Row] = {}
        self._since = Interval()
        self._done: set[tuple[str, int]] = set()
        self._cut: set[tuple[str, int]] = set()
        self._joined: set[tuple[str, int]] = set()

    def take(self, event: Event) -> None:
        view = self._view
        view.started = view.started if view.incarnations else event.time
        view.ended = event.time
        if isinstance(event, GroupDropped):
            self._drop(event)
        step = self._ledger.step
        numbers = self._ledger.apply(event)
        for name, detail in self._ledger.found:
            view.found.setdefault(name, Found(step=step, detail=detail)).times += 1
        if isinstance(event, StepTrained) and numbers is not None:
            self._rows[numbers.step] = Row(
                numbers=numbers, updates=event.num_updates, before=self._since
            )
            self._since = Interval()
        elif isinstance(event, RefitDone):
            if (event.engine, event.refit) in self._joined:
                return
            self._done.add((event.engine, event.refit))
            view.refits[event.engine] += 1
            self._refit(event, aborted=None)
        elif isinstance(event, RefitAborted):
            view.aborted[event.engine] += 1
            self._refit(event, aborted=event.reason)
        else:
            self._note(event)

    def finished(self) -> RunView:
        view = self._view
        view.rows = [self._rows[step] for step in sorted(self._rows)]
        view.after = self._since
        view.without_cut = Counter(engine for engine, _ in self._done - self._cut)
        return view

    def _note(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._start(event)
        elif isinstance(event, RefitCut) and event.mode == JOINED:
            self._joined.add((event.engine, event.refit))
        elif isinstance(event, RefitCut) and event.exact is not False:
            self._cut.add((event.engine, event.refit))
        elif isinstance(event, Gap):
            self._view.lost_lines += event.lost
        elif isinstance(event, RunFinished):
            self._view.status = event.status

    def _start(self, event: RunStarted) -> None:
        """A run that goes on from before steps that it had made does them again."""
        again = [step for step in self._rows if step >= event.step]
        for step in again:
            del self._rows[step]
        view = self._view
        view.undone += len(again)
        view.run, view.status = event.run, None
        view.incarnations += 1

    def _refit(self, event: RefitDone | RefitAborted, *, aborted: str | None) -> None:
        pause = event.pause_seconds if isinstance(event, RefitDone) else None
        self._since.refits.append(
            Refit(engine=event.engine, version=event.version, pause_seconds=pause, aborted=aborted)
        )

    def _drop(self, event: GroupDropped) -> None:
        """Note a dropped group's tokens as they are before the ledger forgets them."""
        ledger = self._ledger
        if ledger.run is None:
            return
        if ledger.is_waiting(event.group):
            numbers = ledger.age([event.group])
            tokens, ages = numbers.tokens, Counter(numbers.tokens_by_age)
        else:
            ages = Counter[int]()
            for version, count in event.tokens.items():
                ages[ledger.version - version] += count
            for call in event.calls:
                ages.update(_ages_of(call, ledger))
            tokens = sum(ages.values())
        self._since.dropped[event.reason] += tokens
        self._since.dropped_ages.update(ages)


def _ages_of(call: Call, ledger: Ledger) -> Counter[int]:
    ages: Counter[int] = Counter()
    segments = ledger.spans(call)
    for start, stop, oldest, _ in (
        segments if call.trained is None else within(segments, call.trained)
    ):
        if oldest != NEVER:
            ages[ledger.version - oldest] += stop - start
    return ages


def _aged(step: StepStaleness) -> int:
    """Tokens that its means are over; all, where a step of logged numbers does not say."""
    return sum(step.tokens_by_age.values()) or step.tokens


def _sum(counts: Iterable[Mapping[_Key, int]]) -> dict[_Key, int]:
    total: dict[_Key, int] = {}
    for name, count in chain.from_iterable(each.items() for each in counts):
        total[name] = total.get(name, 0) + count
    return total


def _mean(values: Sequence[tuple[float | None, int]]) -> float | None:
    """The mean over tokens of step means; each times its tokens is a whole number of them.

    >>> _mean([(1.0, 90), (2.0, 10), (None, 0)])
    1.1
    """
    known = [(value, tokens) for value, tokens in values if value is not None]
    if len(known) < 2:
        return known[0][0] if known else None
    tokens = sum(tokens for _, tokens in known)
    return sum(round(value * tokens) for value, tokens in known) / tokens if tokens else None
