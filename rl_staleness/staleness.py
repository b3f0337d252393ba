"""The numbers of one training step: pure arithmetic on a tally of trained tokens.

The age of a token is the version that the policy had just before the update that consumed it, minus
the version that sampled it. The batch age is its mean over the trained tokens, every token weighing
one: 3 tokens of version 5 and 1 of version 7, trained at 7: (3 * 2 + 1 * 0) / 4 = 1.5.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import msgspec

__all__ = ["StepStaleness", "Versions", "measure", "quantile"]

LOGGED = (
    "batch_age",
    "age_p50",
    "age_p95",
    "age_max",
    "age_in_flight",
    "age_in_queue",
    "batch_age_refits",
    "age_lo",
    "age_hi",
    "coverage",
    "tokens",
    "spanning_calls",
    "dropped_tokens",
    "violations",
    "refit_seconds",
)
"""Names that are logged at every step, under ``staleness/``."""


class StepStaleness(msgspec.Struct, frozen=True, kw_only=True):
    """How old the tokens were that one training step consumed. Ages are in policy updates."""

    step: int
    version: int
    """The version that the step updated."""
    batch_age: float | None
    """Mean token age over the tokens with a known or bounded version; None: there are none."""
    age_max: int | None
    age_p50: int | None
    """The smallest age that at least half of the tokens do not exceed."""
    age_p95: int | None
    age_in_flight: float | None
    """The part gained until the newest trained version of the token's group; the rest is queue."""
    age_in_queue: float | None
    batch_age_refits: float | None
    """The same mean, counted in refits of any engine instead of updates."""
    coverage: float | None
    """Share of the trained tokens whose version is known exactly; None: some tokens are missing."""
    age_lo: float | None
    """No assignment of the uncertain tokens gives a lower mean over all trained tokens."""
    age_hi: float | None
    """Nor a higher one. Tokens without any version are in these means and not in `batch_age`."""
    tokens: int
    """Trained tokens, those of unknown version included."""
    tokens_by_version: dict[int, int]
    """Tokens by the version they count under: the oldest that may have sampled them."""
    spanning_calls: int
    """Calls with trained tokens of more than one version."""
    violations: int
    """Facts that cannot all be true, found since the step before."""
    dropped_tokens: int
    """Tokens of the groups that were dropped since the step before."""
    refit_seconds: float
    """How long engines were paused for refits since the step before, summed over engines."""
    tokens_by_age: dict[int, int]

    def metrics(self, prefix: str = "staleness/") -> dict[str, float]:
        """The scalars to log; a number that this step does not have is left out."""
        values = ((name, getattr(self, name)) for name in LOGGED)
        return {prefix + name: value for name, value in values if value is not None}


class Versions:
    """The distinct versions that refits led to, kept as even runs: a long history takes no room."""

    def __init__(self) -> None:
        self._runs: list[list[int]] = []  # first, last, stride; in order, apart

    def add(self, version: int) -> None:
        """Note a version; one that is there already changes nothing."""
        runs = self._runs
        at = len(runs)
        while at and runs[at - 1][0] > version:
            at -= 1
        run = runs[at - 1] if at else None
        if run is None or version > run[1]:
            last = at == len(runs)
            if run is not None and last and (run[0] == run[1] or version - run[1] == run[2]):
                run[1:] = version, version - run[1]
            else:
                runs.insert(at, [version, version, 1])
            return
        if (version - run[0]) % run[2] == 0:
            return
        split = run[0] + (version - run[0]) // run[2] * run[2]
        runs[at - 1 : at] = [
            [run[0], split, run[2]],
            [version, version, 1],
            [split + run[2], run[1], run[2]],
        ]

    def forget_above(self, version: int) -> None:
        """Forget what is newer: the run has been rolled back to this version."""
        kept = [run for run in self._runs if run[0] <= version]
        for run in kept:
            run[1] = min(run[1], run[0] + (version - run[0]) // run[2] * run[2])
        self._runs = kept

    def between(self, low: int, high: int) -> int:
        """How many lie above ``low`` and not above ``high``."""
        number = 0
        for first, last, stride in reversed(self._runs):
            if last <= low or high <= low:
                break
            if first <= high:
                number += (min(last, high) - first) // stride + 1
                number -= (low - first) // stride + 1 if low >= first else 0
        return number

    @property
    def size(self) -> int:
        """Entries held in memory."""
        return len(self._runs)


def measure(
    by_versions: Mapping[int, Mapping[tuple[int, int], int]],
    unknown: Mapping[int, int],
    *,
    arrived: int,
    refit_versions: Versions,
    late_updates: int,
    complete: bool,
    **rest: int | float,
) -> StepStaleness:
    """Compute a step's numbers.

    Args:
        by_versions: trained tokens by the version of the update that consumed them, and by the
            oldest and newest version that may have sampled them.
        unknown: trained tokens without any version, by that of the update.
        arrived: sum over the tokens of the newest version that counts in the token's group.
        late_updates: updates of the step after its first in which any token may have been consumed.
        complete: False if the step named groups whose tokens nobody knows.
        rest: the fields that are no matter of ages.
    """
    tally = [(at, *v, count) for at, by in by_versions.items() for v, count in by.items()]
    aged = sum(count for *_, count in tally)
    tokens = aged + sum(unknown.values())
    ages: Counter[int] = Counter()
    by_version: Counter[int] = Counter()
    age = low = refits = covered = 0
    in_flight = arrived
    for at, oldest, newest, count in tally:
        ages[at - oldest] += count
        by_version[oldest] += count
        age += (at - oldest) * count
        low += (at - newest) * count
        in_flight -= oldest * count
        refits += refit_versions.between(oldest, at) * count
        covered += count if oldest == newest else 0
    high = age + sum(at * count for at, count in unknown.items()) + late_updates * tokens

    def share(total: int, of: int) -> float | None:
        return total / of if of else None

    return StepStaleness(
        batch_age=share(age, aged),
        age_max=max(ages, default=None),
        age_p50=quantile(ages, aged, 50),
        age_p95=quantile(ages, aged, 95),
        age_in_flight=share(in_flight, aged),
        age_in_queue=share(age - in_flight, aged),
        batch_age_refits=share(refits, aged),
        coverage=share(covered, tokens) if complete else None,
        age_lo=share(low, tokens),
        age_hi=share(high, tokens),
        tokens=tokens,
        tokens_by_version=dict(sorted(by_version.items())),
        tokens_by_age=dict(sorted(ages.items())),
        **rest,  # type: ignore[arg-type]
    )


def quantile(ages: Mapping[int, int], tokens: int, percent: int) -> int | None:
    """The smallest age a such that at least this share of the tokens has age <= a; exact."""
    reached = 0
    for age in sorted(ages):
        reached += ages[age]
        if reached * 100 >= tokens * percent:
            return age
    return None
