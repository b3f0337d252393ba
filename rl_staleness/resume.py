"""Where in its trace a resumed run goes on, and what waited there. It reads, and never writes.

A trainer that goes back to an older checkpoint undoes what came after it: its version 7 and that of
the part that was undone are different weights from where they part. The trace keeps both parts, and
the ``run_started`` between them says at which version they do.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from rl_staleness.events import (
    Call,
    Event,
    GroupPublished,
    RefitAborted,
    RefitCut,
    RefitDone,
    RunStarted,
    StepTrained,
    TraceError,
    Whole,
)
from rl_staleness.ledger import Ledger
from rl_staleness.ranges import within
from rl_staleness.spans import NEVER
from rl_staleness.staleness import StepStaleness
from rl_staleness.trace import numbered_events

__all__ = [
    "Point",
    "Resumption",
    "Saved",
    "counted_steps",
    "resumption",
    "saved_of",
    "timed_steps",
]


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """What a trainer's checkpoint holds of a run; all else is in the trace."""

    run: str
    incarnation: Whole
    line: Whole
    """Lines of the trace so far."""
    version: Whole
    """What the policy has in the checkpoint."""
    step: Whole
    """Number of the next step."""
    refits: dict[str, Whole] = {}
    """Last refit number of each engine: the trace may be lost, or have no line of it."""


class Point(NamedTuple):
    """A place in a run."""

    line: int
    """Lines of the trace up to here; 0: none of it is the run's past."""
    version: int
    """What the policy has here."""
    step: int
    """Number of the next step."""


class Resumption(NamedTuple):
    """How a run goes on."""

    point: Point
    waiting: tuple[GroupPublished, ...] = ()
    """The groups that waited there, as they are published again."""
    undone: tuple[str, ...] = ()
    """The groups that wait at the end of the trace, and were published after the point."""


def saved_of(state: Mapping[str, Any]) -> Saved | None:
    """Read what `StalenessCallback.state_dict` gave; None: a checkpoint that holds nothing of it.

    Raises:
        ValueError: it is something else.
    """
    if not state:
        return None
    try:
        return msgspec.convert(state, Saved)
    except msgspec.ValidationError as error:
        raise ValueError(f"state: it is not what state_dict() gave: {error}") from error


def resumption(
    ledger: Ledger,
    trace: str | None,
    *,
    lines: int,
    version: int | None,
    step: int | None,
    saved: Saved | None = None,
) -> Resumption:
    """Find out how a run goes on.

    Args:
        ledger: of the whole trace.
        lines: of the trace.
        version, step: what the trainer says of itself, where it does.
        saved: what its checkpoint says; it holds for both, unless they are passed.

    Raises:
        TraceError, OSError: the trace cannot be read again.
    """
    if saved is not None:
        version = saved.version if version is None else version
        step = saved.step if step is None else step
    if ledger.run is None or trace is None:
        return Resumption(Point(0, version or 0, 1 if step is None else step))
    if saved is not None and saved.run == ledger.run.run:
        line = min(saved.line, lines)
    elif saved is not None:
        line = 0  # of another run: this one starts again where that one was
    elif (version is None or version >= ledger.version) and (step is None or step >= ledger.step):
        line = lines
    else:
        found = _last_point(trace, version=version, step=step)
        line = found.line
        version = found.version if version is None else version
    before = ledger if line == lines else _ledger_at(trace, line)
    point = Point(
        line,
        before.version if version is None else version,
        step if step is not None else before.step if before.run else 1,
    )
    # The trainer may have made steps whose lines are lost.
    now = max(before.newest, point.version)
    waiting = tuple(_restored(group, before, now=now) for group in before.waiting())
    names = {group.group for group in waiting}
    undone = tuple(group.group for group in ledger.waiting() if group.group not in names)
    return Resumption(point, waiting, undone)


def _last_point(trace: str, *, version: int | None, step: int | None) -> Point:
    """Find the last line at which the policy was at this version, before this step.

    Where it never was, the last one that is older in both.
    """
    exact = near = None
    below = here = Point(0, 0, 1)
    for number, event in numbered_events(trace):
        if isinstance(event, RunStarted):
            here = Point(number, event.version, event.step)
        elif isinstance(event, StepTrained):
            here = Point(number, event.version + event.num_updates, event.step + 1)
        at = here._replace(line=number)
        if version in (None, at.version) and step in (None, at.step):
            exact = at
        elif version == at.version:
            near = at
        elif at.version <= (math.inf if version is None else version) and at.step <= (
            math.inf if step is None else step
        ):
            below = at
    return exact or near or below


def _ledger_at(trace: str, line: int) -> Ledger:
    """The fold up to a line, with what later lines say of refits that had begun by then."""
    ledger = Ledger()
    for number, event in numbered_events(trace):
        if number > line:
            if isinstance(event, RunStarted):  # also where nothing is before the line
                break
            if not isinstance(event, RefitCut | RefitDone | RefitAborted):
                continue
            if event.refit > ledger.last_refit(event.engine):
                continue
        ledger.apply(event)
    return ledger


def _restored(group: GroupPublished, ledger: Ledger, *, now: int) -> GroupPublished:
    """A waiting group as it is published again: its calls with spans, refit numbers left out."""
    limit = math.inf if ledger.run is None or not group.restored else ledger.run.version
    lost = sum(count for version, count in group.tokens.items() if version > limit)
    calls: list[Call] = []
    for call in group.calls:
        segments = ledger.spans(call, now=now, restored=group.restored)
        known = [segment for segment in segments if segment[2] != NEVER]
        mask = call.trained
        if len(known) < len(segments):  # without a version, and no span can say so
            trained = ((0, call.tokens),) if mask is None else mask
            mask = tuple((start, stop) for start, stop, *_ in within(known, trained))
            lost += sum(stop - start for start, stop, *_ in within(segments, trained))
            lost -= sum(stop - start for start, stop in mask)
        spans = tuple((a, b, old) if old == new else (a, b, old, new) for a, b, old, new in known)
        calls.append(
            msgspec.structs.replace(call, after=None, until=None, spans=spans or None, trained=mask)
        )
    return msgspec.structs.replace(
        group,
        tokens={version: count for version, count in group.tokens.items() if version <= limit},
        calls=tuple(calls),
        unknown=(group.unknown or 0) + lost or None,
        restored=True,
    )


def _applied(
    trace: str | os.PathLike[str],
) -> Iterator[tuple[Event, StepStaleness | None]]:
    """Every event, with what the fold makes of it."""
    ledger = Ledger()
    for number, event in numbered_events(trace):
        try:
            step = ledger.apply(event)
        except TraceError as error:
            raise TraceError(f"{trace}:{number}: {error}") from error
        yield event, step


def timed_steps(trace: str | os.PathLike[str]) -> Iterator[tuple[float, StepStaleness]]:
    """Recompute every step, each after its time in Unix seconds, undone ones included.

    Raises:
        TraceError: as `rl_staleness.trace.read`.
        OSError: it cannot be read.
    """
    for event, step in _applied(trace):
        if step is not None:
            yield event.time, step


def counted_steps(
    trace: str | os.PathLike[str],
) -> Iterator[tuple[float, StepStaleness | None, Counter[int]]]:
    """Recompute every step, in a form that can be summed up: what is undone is taken off again.

    Yields the time, the step, and nothing; or, where the run goes on from before steps that it had
    made, the time, None, and the tokens of those by their age. Errors are those of `timed_steps`.
    """
    starts = [event.step for _, event in numbered_events(trace) if isinstance(event, RunStarted)]
    doomed: list[StepStaleness] = []  # steps that a later start will undo
    begun = 0
    for event, step in _applied(trace):
        if isinstance(event, RunStarted):
            begun += 1
            undone = [step for step in doomed if step.step >= event.step]
            doomed = [step for step in doomed if step.step < event.step]
            if undone:
                tokens = Counter[int]()
                for each in undone:
                    tokens.update(each.tokens_by_age)
                yield event.time, None, tokens
        if step is not None:
            if any(step.step >= start for start in starts[begun:]):
                doomed.append(step)
            yield event.time, step, Counter()
