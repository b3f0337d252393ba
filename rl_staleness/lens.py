"""What other frameworks would have shown for the steps of a trace, next to the exact value.

One pass through the one fold, in constant memory. A definition that needs what the trace does not
hold has no number, and says what it needs. Optional fields of a group's ``about`` carry it:
``prompt_tokens`` (a number, or ``{call: number}``), ``dispatched_step``, ``pulled_version`` and
``summed_calls`` (``{version: number of calls}``, for calls that were summed).

Where coverage is below 1, tokens have the version that they count under, as in `batch_age`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import msgspec

from rl_staleness.definitions import DEFINITIONS, GroupRow, Row, Rows
from rl_staleness.events import LARGEST, RefitDone, RunStarted, StepTrained
from rl_staleness.ledger import Ledger
from rl_staleness.staleness import StepStaleness, Versions
from rl_staleness.trace import numbered_events
from rl_staleness.trained import CallTokens, GroupTokens, Trained, counts_by_name, groups_of

__all__ = ["LensStep", "as_record", "definitions_record", "lens_rows", "look"]

ROLLED_BACK = "tokens of a part of the run that was rolled back"
UNKNOWN_GROUPS = "the step trained groups that nobody published"
VERSIONS_KEPT = 4096
"""Versions whose number of trained samples is remembered."""


class LensStep(msgspec.Struct, frozen=True, kw_only=True):
    """One step through every lens."""

    numbers: StepStaleness
    """The exact ones."""
    values: dict[str, float]
    """By definition."""
    missing: dict[str, str]
    """Why a definition has no value."""


def look(trace: str | os.PathLike[str]) -> Iterator[LensStep]:
    """Compute what each definition would have shown, a step at a time.

    Raises:
        TraceError: as `rl_staleness.trace.read`.
        OSError: the trace cannot be read.
    """
    ledger, counters = Ledger(), _Counters()
    for _, event in numbered_events(trace):
        rows: Rows | str = ""
        if isinstance(event, StepTrained):
            rows = _rows_of(event, list(groups_of(event, ledger)), counters)
        numbers = ledger.apply(event)
        if isinstance(event, RunStarted):
            counters.start(event.version)
        elif isinstance(event, RefitDone):
            counters.refit(event.version)
        if numbers is not None:
            yield _seen(numbers, rows)
            counters.step(ledger.version, rows)


def definitions_record() -> dict[str, dict[str, str]]:
    """Every definition by name, for machines."""
    return {
        d.name: {"title": d.title, "unit": d.unit, "formula": d.formula, "source": d.source}
        for d in DEFINITIONS
    }


def as_record(step: LensStep) -> dict[str, Any]:
    """One step as a JSON object."""
    exact = step.numbers
    return {
        "step": exact.step,
        "version": exact.version,
        "batch_age": exact.batch_age,
        "batch_age_refits": exact.batch_age_refits,
        "coverage": exact.coverage,
        "lens": step.values,
        "missing": step.missing,
    }


def lens_rows(steps: Iterator[LensStep]) -> Iterator[str]:
    """Lay out steps as they come, then say what each column is and what empty cells need."""
    names = [definition.name for definition in DEFINITIONS]
    titles = ["step", "batch_age", "refits", "coverage", *names]
    widths = [max(len(title), 6) for title in titles]
    header = "  ".join(title.rjust(width) for title, width in zip(titles, widths, strict=True))
    reasons: dict[str, str] = {}
    for step in steps:
        if header:  # none before an error
            yield header
        header = ""
        exact = step.numbers
        cells = [str(exact.step), _cell(exact.batch_age), _cell(exact.batch_age_refits)]
        cells.append(_cell(exact.coverage))
        for name in names:
            reason = step.missing.get(name)
            if reason is None:
                cells.append(f"{step.values[name]:.3f}")
            else:
                cells.append("?" + reasons.setdefault(reason, chr(ord("a") + len(reasons))))
        yield "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
    if header:
        yield header
    yield ""
    for reason, letter in reasons.items():
        yield f"?{letter}: {reason}"
    yield "batch_age: mean age of the trained tokens, in policy updates; refits: the same in refits"
    for d in DEFINITIONS:
        yield f"{d.name}: {d.title}: {d.formula}; in {d.unit}; {d.source}"


def _cell(number: float | None) -> str:
    return "-" if number is None else f"{number:.3f}"


def _seen(numbers: StepStaleness, rows: Rows | str) -> LensStep:
    values: dict[str, float] = {}
    missing: dict[str, str] = {}
    for definition in DEFINITIONS:
        value = rows if isinstance(rows, str) else definition.value(rows)
        if isinstance(value, str):
            missing[definition.name] = value
        else:
            values[definition.name] = value
    return LensStep(numbers=numbers, values=values, missing=missing)


class _Counters:
    """How frameworks would have numbered the versions of this run."""

    def __init__(self) -> None:
        self._refits, self._steps = Versions(), Versions()
        self._samples: dict[int, tuple[int, int]] = {}
        """Samples that were trained as a version was made, since their number was lost last."""
        self._lost = self._trained = self._last_refit = 0

    def start(self, version: int) -> None:
        """The run starts, or goes on, with the policy at this version."""
        for versions in (self._refits, self._steps):
            versions.forget_above(version)
        self._samples = {v: samples for v, samples in self._samples.items() if v <= version}
        self._lost, self._trained = self._samples.setdefault(version, (self._lost + 1, 0))
        self._last_refit = version

    def refit(self, version: int) -> None:
        """An engine was moved to a version."""
        self._refits.add(version)
        self._last_refit = max(version, self._last_refit)

    def step(self, version: int, rows: Rows | str) -> None:
        """A step has brought the policy to a version."""
        self._steps.add(version)
        numbers = [None] if isinstance(rows, str) else [row.number for row in rows.rows]
        if None in numbers:
            self._lost, self._trained = self._lost + 1, 0
        else:
            self._trained += sum(number for number in numbers if number is not None)
        self._samples[version] = self._lost, self._trained
        if len(self._samples) > VERSIONS_KEPT:
            del self._samples[next(iter(self._samples))]

    def refits(self, old: int, new: int) -> int:
        """Refits from a version to another; negative backwards."""
        return self._refits.between(old, new) if old <= new else -self._refits.between(new, old)

    def steps(self, old: int, new: int) -> int:
        """Training steps from a version to another; negative backwards."""
        return self._steps.between(old, new) if old <= new else -self._steps.between(new, old)

    def samples(self, version: int) -> int | None:
        """Samples that were trained after a version was made, up to the last refit."""
        then, now = self._samples.get(version), self._samples.get(self._last_refit)
        if then is None or now is None or then[0] != now[0]:
            return None
        return now[1] - then[1]


def _rows_of(event: StepTrained, groups: Trained, counters: _Counters) -> Rows | str:
    """The rows of a step, each group once; or why there are none."""
    named = {name for batch in event.consumed for name in batch}
    once = {group.group.group: group for _, group in groups}
    if named - once.keys():
        return UNKNOWN_GROUPS
    if any(group.num_rolled_back for group in once.values()):
        return ROLLED_BACK
    return Rows(
        step=event.step,
        version=event.version,
        groups=[_group_row(group) for group in once.values() if group.sums or group.calls],
        refits=counters.refits,
        steps=counters.steps,
        samples=counters.samples,
    )


def _group_row(group: GroupTokens) -> GroupRow:
    said = group.about.get("prompt_tokens")
    prompts = counts_by_name(said)
    same = _whole(said)
    rows = [
        _call_row(c, same if prompts is None else prompts.get(c.call.call)) for c in group.calls
    ]
    numbers = group.summed_calls
    for version, count in group.sums.items():
        rows.append(
            Row(
                stamp=version,
                first=version,
                oldest=version,
                newest=version,
                generated={version: count},
                trained={version: count},
                prompt=None,
                number=None if numbers is None else numbers[version],
            )
        )
    return GroupRow(
        rows=rows,
        dispatched_step=_whole(group.about.get("dispatched_step")),
        pulled_version=_whole(group.about.get("pulled_version")),
    )


def _call_row(call: CallTokens, prompt: int | None) -> Row:
    generated: dict[int, int] = {}
    trained: dict[int, int] = {}
    for tokens, segments in ((generated, call.segments), (trained, call.trained)):
        for start, stop, oldest, _ in segments:
            tokens[oldest] = tokens.get(oldest, 0) + stop - start
    return Row(
        stamp=call.call.version,
        first=call.begin,
        oldest=call.oldest,
        newest=call.newest,
        generated=generated,
        trained=trained,
        prompt=prompt,
        number=1,
    )


def _whole(said: object) -> int | None:
    return said if type(said) is int and 0 <= said <= LARGEST else None
