"""What is worth a warning while a run goes on: limits that are crossed, refits that stopped."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rl_staleness.staleness import StepStaleness

__all__ = ["Limits"]

PATIENCE = 4
"""Refits have stopped after so many times the most steps that ever lay between two of them."""

FEWEST_STEPS = 8
"""They have not stopped before so many steps without one."""


class Limits:
    """Tells when a number crosses a limit, and not again before it was back.

    Args:
        age_above: batch age, in policy updates, that is too high.
        coverage_below: share of tokens with a known version that is too low.

    Raises:
        ValueError: a limit is no finite number, or can never be crossed; the message names it.
    """

    def __init__(self, *, age_above: float | None, coverage_below: float | None) -> None:
        for name, limit in (("warn_age_above", age_above), ("warn_coverage_below", coverage_below)):
            if limit is not None and (type(limit) not in (int, float) or not math.isfinite(limit)):
                raise ValueError(f"{name}: {limit!r} is no limit; pass a finite number")
        if coverage_below is not None and not 0 < coverage_below <= 1:
            raise ValueError(
                f"warn_coverage_below: {coverage_below!r} is no share; pass one above 0, at most 1"
            )
        self._age = age_above
        self._coverage = coverage_below
        self._crossed: set[str] = set()
        self._refits = 0
        self._steps_without = 0
        self._longest = 0

    def crossed(self, step: StepStaleness, *, refits: int) -> Iterator[str]:
        """Say what this step, the next one, is beyond.

        Args:
            refits: how many were done so far, of any engine.
        """
        age, coverage = step.batch_age, step.coverage
        if self._age is not None and age is not None:
            text = f"batch age is {age:.4g} updates, above {self._age:g}"
            yield from self._tell("age", text, beyond=age > self._age)
        if self._coverage is not None and coverage is not None:
            text = f"coverage is {coverage:.4g}, below {self._coverage:g}: see `age_lo`, `age_hi`"
            yield from self._tell("coverage", text, beyond=coverage < self._coverage)
        if refits > self._refits:
            if self._refits:  # steps before the first one are no rhythm
                self._longest = max(self._longest, self._steps_without)
            self._refits, self._steps_without = refits, 0
        self._steps_without += 1
        if not self._refits and age and self._steps_without > FEWEST_STEPS:
            text = (
                f"no refit was told of in {self._steps_without} steps: call on_refit_paused and"
                " on_refit_done where the weights move, or every token counts as of the start"
            )
            yield from self._tell("untold", text, beyond=True)
        patience = max(FEWEST_STEPS, PATIENCE * self._longest)
        text = f"no refit was done in {self._steps_without} steps: engines go on with old weights"
        stopped = self._refits > 0 and self._steps_without > patience
        yield from self._tell("refits", text, beyond=stopped)

    def _tell(self, what: str, text: str, *, beyond: bool) -> Iterator[str]:
        if not beyond:
            self._crossed.discard(what)
        elif what not in self._crossed:
            self._crossed.add(what)
            yield text
