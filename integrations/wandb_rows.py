"""Rows of a W&B run: what a step becomes, and where it is put beside the trainer's own."""

from __future__ import annotations

import math
import time
from collections import deque
from typing import Any

from rl_staleness.events import SCHEMA
from rl_staleness.staleness import LOGGED, StepStaleness

__all__ = ["AXIS", "DEFINITIONS", "HISTOGRAM", "KEPT", "Writer", "bins_of", "declare", "row_of"]

AXIS = "staleness/step"
HISTOGRAM = "staleness/age_histogram"

HISTOGRAM_PARTS = "_type", "values", "bins"
"""What W&B makes of a histogram: keys of which each would fall under a glob of the trainer."""

BINS = 512
"""A histogram of W&B has no more."""

KEPT = 10_000
"""Steps that may wait for the thread, and for a place in a run; those beyond are left out."""

DEFINITIONS = {
    "schema": SCHEMA,
    "unit": "policy updates",
    "token_age": "version just before the update that consumed the token, minus the version that"
    " sampled it; versions count policy updates",
    "batch_age": "mean token age over the trained tokens of a step, every token weighing one",
    "coverage": "share of the trained tokens whose sampling version is known exactly",
}
"""What the keys mean, noted once in the run's config."""


class Writer:
    """Puts rows into one run without moving its counter below the trainer's feet.

    W&B collects what is logged at one value of the run's counter in one open row. The trainer
    commits it, or opens the next by an explicit step; a call with a step below the counter is lost.
    """

    def __init__(self, run: Any, histogram: Any) -> None:
        self.run = run
        self.backlog: deque[StepStaleness] = deque(maxlen=KEPT)
        """Steps that have no place yet."""
        self.taken = 0
        """Steps that the run has."""
        self.not_finite = 0
        self._histogram = histogram
        self._declared = False
        self._is_counted = True
        self._origin: int | None = None
        """The counter when it was first seen."""
        self._place: int | None = None
        """The counter at our last row, or later: no row of ours is open once it differs."""
        self._latest: StepStaleness | None = None
        """The step whose row came last."""

    def take(self, step: StepStaleness) -> None:
        """Put the step into a row that the trainer commits; without such a row it waits."""
        self.backlog.append(step)
        counter = self._counter()
        if counter is None or self._is_free(counter):
            while self.backlog:
                counter = self._put(self.backlog.popleft(), counter)
        elif counter != self._place:
            self._put(self.backlog.pop(), counter)

    def finish(self, deadline: float, *, keep_counter: bool) -> None:
        """Give every step that waits a row of its own: the trainer has logged its last."""
        if not self.backlog:
            return
        newest = max((*self.backlog, *filter(None, [self._latest])), key=lambda step: step.step)
        counter = self._counter()
        if keep_counter and counter is not None and not self._is_free(counter):
            if counter != self._place:
                self._put(self.backlog.pop(), counter)
            return
        while self.backlog and time.monotonic() < deadline:
            counter = self._put(self.backlog.popleft(), counter)
        if newest is not self._latest:  # the summary shows the last row
            self.run.log({}, commit=True)
            self.run.summary.update(row_of(newest, self._histogram)[0])

    def _counter(self) -> int | None:
        """The run's counter; None where it has none that matters (shared, disabled).

        Raises:
            wandb.errors.UsageError: the run is finished.
        """
        # Asking a finished run for its counter takes 30 s, this raises; and a resumed one that has
        # not logged says 0 (wandb 0.31).
        self.run.log({}, commit=False)
        if not self._declared:
            self._declare()
        if not self._is_counted:
            return None
        counter = self._read()
        if self._origin is None:
            self._origin = counter
        return counter

    def _read(self) -> int:
        return int(self.run.step)

    def _declare(self) -> None:
        run = self.run
        declare(run)
        self._is_counted = not (run.disabled or run.settings.mode == "shared")
        self._declared = True

    def _is_free(self, counter: int) -> bool:
        """Whether the trainer logs, and never names a step: then a commit of ours harms nobody.

        Before its first log nothing is known; the counter is not moved by us before that.
        """
        assert self._origin is not None
        telemetry = getattr(self.run, "_telemetry_obj", None)
        feature = getattr(telemetry, "feature", None)
        names_steps = getattr(feature, "set_step_log", True)
        return not names_steps and counter > self._origin

    def _put(self, step: StepStaleness, counter: int | None) -> int | None:
        """Log a row, after a commit if there is one of ours at this place; the counter then."""
        row, not_finite = row_of(step, self._histogram)
        if counter is None:
            self.run.log(row)
        else:
            if counter == self._place:
                self.run.log({}, commit=True)
            self.run.log(row, commit=False)
            counter = self._place = self._read()
        self._latest = step
        self.taken += 1
        self.not_finite += not_finite
        return counter


def declare(run: Any) -> None:
    """Say what the keys are: by exact names, a glob beside the trainer's is drawn by lot."""
    run.config.update({"rl_staleness": DEFINITIONS}, allow_val_change=True)
    run.define_metric(AXIS, hidden=True)
    for key in (*(f"staleness/{name}" for name in LOGGED), HISTOGRAM):
        run.define_metric(key, step_metric=AXIS, step_sync=False)
    for part in HISTOGRAM_PARTS:
        run.define_metric(f"{HISTOGRAM}.{part}", step_metric=AXIS, step_sync=False, hidden=True)


def row_of(step: StepStaleness, histogram: Any) -> tuple[dict[str, Any], int]:
    """What is logged of a step, and how many values were not finite and are left out."""
    metrics = step.metrics()
    row: dict[str, Any] = {k: v for k, v in metrics.items() if math.isfinite(v)}
    not_finite = len(metrics) - len(row)
    row[AXIS] = step.step
    if step.tokens_by_age:
        row[HISTOGRAM] = histogram(np_histogram=bins_of(step.tokens_by_age))
    return row, not_finite


def bins_of(tokens_by_age: dict[int, int]) -> tuple[list[int], list[int]]:
    """Token counts and the bins' edges, whole numbers all; as narrow as W&B allows.

    >>> bins_of({0: 30, 2: 10})
    ([30, 0, 10], [0, 1, 2, 3])
    """
    first, last = min(tokens_by_age), max(tokens_by_age)
    width = (last - first) // BINS + 1
    counts = [0] * ((last - first) // width + 1)
    for age, tokens in tokens_by_age.items():
        counts[(age - first) // width] += tokens
    return counts, [first + width * i for i in range(len(counts) + 1)]
