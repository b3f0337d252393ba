"""A run as its logged numbers show it, where its trace is not to be had: less than a trace says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from rl_staleness.destinations import Logged
from rl_staleness.staleness import LOGGED, StepStaleness
from rl_staleness.view import Found, Interval, Row, RunView

__all__ = ["is_from_trace", "view_of"]

_WHOLE = frozenset(
    {"age_p50", "age_p95", "age_max", "tokens", "spanning_calls", "dropped_tokens", "violations"}
)


def view_of(steps: Iterable[Logged], *, run: str) -> RunView:
    """What can be shown of logged steps; versions, refits and reasons are unknown.

    >>> view_of([Logged(1, {"staleness/tokens": 90.0, "staleness/batch_age": 1.5})], run="r").run
    'r'
    """
    view = RunView(run=run, rows=[_row(step) for step in steps])
    violations = sum(row.numbers.violations for row in view.rows)
    if violations:
        first = next(row.numbers.step for row in view.rows if row.numbers.violations)
        view.found["violations"] = Found(times=violations, step=first, detail="see the trace")
    return view


def is_from_trace(view: RunView) -> bool:
    """Whether the view knows what a trace says: it knows when the run was started."""
    return view.incarnations > 0


def _row(logged: Logged) -> Row:
    values: dict[str, float | int | None] = {}
    for name in LOGGED:
        value = logged.metrics.get(f"staleness/{name}")
        values[name] = None if value is None else int(value) if name in _WHOLE else value
    for name in ("tokens", "spanning_calls", "violations", "dropped_tokens", "refit_seconds"):
        values[name] = values[name] or 0
    numbers = StepStaleness(
        step=logged.step,
        version=0,
        tokens_by_version={},
        tokens_by_age=dict(logged.tokens_by_age),
        **values,  # type: ignore[arg-type]
    )
    dropped = Counter({"unknown": numbers.dropped_tokens} if numbers.dropped_tokens else {})
    return Row(numbers=numbers, updates=0, before=Interval(dropped=dropped))
