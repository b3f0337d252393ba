"""Whether a trace is sound: every violation and broken invariant by name, with its lines.

One pass through the one fold, in memory that does not grow with the trace; a second one for the
token ledger where groups come back that were trained or dropped before a rollback: only then are
their names known. What is *broken* and what is only *noted* is in `rl_staleness.invariants`.

    rl-staleness doctor TRACE     exits 1 when an invariant is broken
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Set
from itertools import chain
from typing import Any

import msgspec

from rl_staleness.balance import Account, Balance
from rl_staleness.bookkeeper import Bookkeeper
from rl_staleness.contrasts import Contrast, Contrasts
from rl_staleness.events import RunFinished, RunStarted, StepTrained
from rl_staleness.invariants import invariant
from rl_staleness.ledger import Ledger
from rl_staleness.printable import printable
from rl_staleness.symptoms import FIRST_LINES, Remark, Remarks, Symptoms
from rl_staleness.trace import numbered_events
from rl_staleness.trained import groups_of

__all__ = ["Diagnosis", "as_record", "examine", "told"]

LONGEST_DETAIL = 200


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """What a trace shows beside its numbers."""

    run: str
    starts: int
    lines: int
    steps: int
    updates: int
    tokens: int
    """Trained tokens of all steps."""
    batch_age: float | None
    """Of all steps together, every token weighing one."""
    coverage: float | None
    """The same; None: some step trained tokens that nobody knows."""
    status: str | None
    broken: list[Remark]
    noted: list[Remark]
    balance: Balance
    contrasts: list[Contrast]

    @property
    def sound(self) -> bool:
        """No invariant is broken."""
        return not self.broken


class _Totals(msgspec.Struct):
    """Sums over the steps."""

    starts: int = 0
    lines: int = 0
    steps: int = 0
    updates: int = 0
    tokens: int = 0
    aged: int = 0
    age: int = 0
    covered: int = 0
    complete: bool = True
    status: str | None = None


def examine(trace: str | os.PathLike[str]) -> Diagnosis:
    """Read a trace and find what is broken and what is worth a word.

    Raises:
        TraceError: as `rl_staleness.trace.read`.
        OSError: the trace cannot be read.
    """
    remarks, totals, ledger = Remarks(), _Totals(), Ledger()
    symptoms, books, contrasts = Symptoms(remarks), Bookkeeper(), Contrasts()

    def torn(line: int, size: int) -> None:
        remarks.add("torn_line", line, f"{size} bytes")

    for line, event in numbered_events(trace, torn=torn):
        groups = list(groups_of(event, ledger)) if isinstance(event, StepTrained) else []
        symptoms.before(line, event, ledger, groups)
        books.take(event, ledger, groups)
        contrasts.take(event, ledger, groups)
        numbers = ledger.apply(event)
        symptoms.after(line, numbers, ledger)
        for name, detail in ledger.found:
            remarks.add(name, line, detail)
        totals.lines = line
        if isinstance(event, RunStarted):
            totals.starts, totals.status = totals.starts + 1, None
        elif isinstance(event, RunFinished):
            totals.status = event.status
        elif isinstance(event, StepTrained) and numbers is not None:
            contrasts.look(numbers)
            totals.steps, totals.updates = totals.steps + 1, totals.updates + event.num_updates
            totals.tokens += numbers.tokens
            totals.aged += sum(numbers.tokens_by_age.values())
            totals.age += sum(age * count for age, count in numbers.tokens_by_age.items())
            totals.covered += round((numbers.coverage or 0.0) * numbers.tokens)
            totals.complete &= numbers.coverage is not None or not numbers.tokens
    symptoms.finish(ledger)
    balance = books.close(ledger)
    if books.returned and os.path.isfile(trace):  # a pipe can be read once only
        balance = _balance(trace, totals.lines, books.returned)
    return _diagnosis(ledger, remarks, totals, balance, list(contrasts.found()))


def _balance(trace: str | os.PathLike[str], lines: int, returning: Set[str]) -> Balance:
    """The token ledger of the first lines of a trace, with the groups followed that come back."""
    ledger, books = Ledger(), Bookkeeper(returning)
    for line, event in numbered_events(trace, torn=_is_said):
        if line > lines:  # it was written since
            break
        groups = list(groups_of(event, ledger)) if isinstance(event, StepTrained) else []
        books.take(event, ledger, groups)
        ledger.apply(event)
    return books.close(ledger)


def _is_said(number: int, size: int) -> None:
    """Of a torn last line the first look has told."""


def _diagnosis(
    ledger: Ledger,
    remarks: Remarks,
    totals: _Totals,
    balance: Balance,
    contrasts: list[Contrast],
) -> Diagnosis:
    if balance.lost_hi is not None and balance.lost_hi < 0:
        detail = f"{-balance.lost_hi} tokens at least"
        remarks.add("tokens_beyond_generated", totals.lines, detail)
    found = list(remarks.by_name.values())
    covered = totals.covered / totals.tokens if totals.tokens else None
    return Diagnosis(
        run="" if ledger.run is None else ledger.run.run,
        starts=totals.starts,
        lines=totals.lines,
        steps=totals.steps,
        updates=totals.updates,
        tokens=totals.tokens,
        batch_age=totals.age / totals.aged if totals.aged else None,
        coverage=covered if totals.complete else None,
        status=totals.status,
        broken=[remark for remark in found if invariant(remark.name).broken],
        noted=[remark for remark in found if not invariant(remark.name).broken],
        balance=balance,
        contrasts=contrasts,
    )


def as_record(found: Diagnosis) -> dict[str, Any]:
    """A diagnosis as one JSON object for machines."""
    record: dict[str, Any] = msgspec.to_builtins(found)
    record["sound"] = found.sound
    for remark in chain(record["broken"], record["noted"]):
        entry = invariant(remark["name"])
        remark.update(meaning=entry.meaning, cause=entry.cause, way_out=entry.way_out)
    balance = found.balance
    accounts = record["balance"]
    for name in ("trained", "trained_again", "masked", "waiting", "discarded"):
        accounts[name] = _account(getattr(balance, name))
    accounts["dropped"] = {reason: _account(a) for reason, a in balance.dropped.items()}
    return record


def _account(account: Account) -> dict[str, Any]:
    return {"tokens": account.tokens, "mean_age": account.mean_age}


def told(found: Diagnosis) -> Iterator[str]:
    """Tell a diagnosis in lines for a terminal; names are made harmless."""
    for line in _lines(found):
        indent = len(line) - len(line.lstrip())
        yield " " * indent + printable(line)


def _lines(found: Diagnosis) -> Iterator[str]:
    status = "no end" if found.status is None else f"status {_short(found.status)}"
    yield (
        f"run {_short(found.run)}: {_plural(found.lines, 'line')},"
        f" {_plural(found.starts, 'start')}, {_plural(found.steps, 'step')},"
        f" {_plural(found.updates, 'update')}, {status}"
    )
    if found.batch_age is not None:
        coverage = "unknown" if found.coverage is None else f"{found.coverage:.6g}"
        yield (
            f"batch age of the run: {found.batch_age:.3f} policy updates over {found.tokens:,}"
            f" tokens, coverage {coverage}"
        )
    for kind, remarks in (("broken", found.broken), ("noted", found.noted)):
        for remark in remarks:
            yield from _remark_lines(kind, remark)
    yield from _balance_lines(found.balance)
    if found.contrasts:
        yield "other ways to measure would have read, over the whole run:"
    for contrast in found.contrasts:
        yield (
            f"  {contrast.name}: {contrast.reads:.3f} instead of {contrast.true:.3f}:"
            f" {contrast.what}"
        )
    broken = f"broken: {_plural(len(found.broken), 'invariant')}" if found.broken else "sound"
    yield f"{broken}; noted: {len(found.noted)}"


def _remark_lines(kind: str, remark: Remark) -> Iterator[str]:
    entry = invariant(remark.name)
    more = ", ..." if remark.times > len(remark.lines) >= FIRST_LINES else ""
    lines = ", ".join(str(line) for line in remark.lines)
    word = "line" if len(remark.lines) == 1 else "lines"
    yield f"{kind}: {_short(remark.name)}: {entry.meaning}"
    yield f"  {remark.times:,} in all, {word} {lines}{more}: {_short(remark.detail)}"
    yield f"  usual cause: {entry.cause}"
    yield f"  way out: {entry.way_out}"


def _balance_lines(balance: Balance) -> Iterator[str]:
    generated = "unknown" if balance.generated is None else f"{balance.generated:,}"
    yield f"tokens generated, by the engines' counters up to their last cuts: {generated}"
    rows: list[tuple[str, Account]] = [
        ("trained", balance.trained),
        ("masked out of the loss", balance.masked),
        *((f"dropped, {_short(reason)}", a) for reason, a in balance.dropped.items()),
        ("waiting", balance.waiting),
        ("discarded at a resume", balance.discarded),
    ]
    for name, account in rows:
        if account.tokens or name == "trained":
            yield f"  {name}: {account.tokens:,}, mean age {_age(account)}"
    if balance.running:
        yield f"  running at the last cuts: {balance.running:,}, age unknown"
    if balance.after or balance.undecided:
        unsure = f" to {balance.after + balance.undecided:,}" if balance.undecided else ""
        yield f"  of these made after the last cuts: {balance.after:,}{unsure}"
    if balance.lost_lo is None or balance.lost_hi is None:
        yield f"  lost: unknown: {'; '.join(balance.open)}"
    else:
        most = "" if balance.lost_hi == balance.lost_lo else f" to {balance.lost_hi:,}"
        yield f"  lost (calls that nobody captured or published): {balance.lost_lo:,}{most}"
    if balance.trained_again.tokens:
        again = balance.trained_again
        yield f"trained once more: {again.tokens:,}, mean age {_age(again)}"
    if balance.appended:
        yield f"trained tokens that no call made: {balance.appended:,}"


def _age(account: Account) -> str:
    return "-" if account.mean_age is None else f"{account.mean_age:.3f}"


def _plural(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _short(text: str) -> str:
    return printable(text, longest=LONGEST_DETAIL)
