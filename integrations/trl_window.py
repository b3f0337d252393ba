"""The steps since TRL wrote its last log record, as one: every token weighs one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rl_staleness.staleness import LOGGED, StepStaleness, quantile

__all__ = ["merged"]

SUMS = frozenset(("tokens", "spanning_calls", "dropped_tokens", "violations", "refit_seconds"))
"""Counts and durations add up; shares and ages are means over tokens."""


def merged(steps: Sequence[StepStaleness], *, prefix: str = "staleness/") -> dict[str, float]:
    """What a log record says of these steps; one step's numbers are as they are.

    Ages are means over the aged tokens, bounds and coverage over all trained ones, as in a step.
    """
    if len(steps) == 1:
        return steps[0].metrics(prefix)
    values: dict[str, float | None] = {name: _total(steps, name) for name in LOGGED}
    ages = sum((Counter(step.tokens_by_age) for step in steps), Counter[int]())
    aged = ages.total()
    values["age_max"] = max(ages, default=None)
    values["age_p50"], values["age_p95"] = quantile(ages, aged, 50), quantile(ages, aged, 95)
    return {prefix + name: value for name, value in values.items() if value is not None}


def _total(steps: Sequence[StepStaleness], name: str) -> float | None:
    values: list[tuple[float | None, StepStaleness]] = [(getattr(s, name), s) for s in steps]
    known = [(value, step) for value, step in values if value is not None]
    if name in SUMS:
        return sum(value for value, _ in known)
    weights = [
        step.tokens
        if name in ("age_lo", "age_hi", "coverage")
        else sum(step.tokens_by_age.values())
        for _, step in known
    ]
    if not sum(weights):
        return None
    return sum(v * w for (v, _), w in zip(known, weights, strict=True)) / sum(weights)
