"""Points of an MLflow run: what a step becomes, and how it is sent without MLflow's own retries."""

from __future__ import annotations

import functools
import importlib
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import accumulate, groupby
from operator import attrgetter
from typing import Any, NamedTuple
from urllib.parse import unquote

from rl_staleness.artifacts import LONGEST_REASON
from rl_staleness.destinations import DestinationError
from rl_staleness.events import LARGEST
from rl_staleness.staleness import LOGGED, StepStaleness

__all__ = [
    "BATCH",
    "DEFINITIONS",
    "KEYS",
    "Point",
    "Run",
    "Summary",
    "client_of",
    "describe",
    "http_status",
    "milliseconds",
    "one_line",
    "points_of",
    "refused_of",
    "without_passwords",
]

REQUEST_SECONDS = 20.0
"""How long a server may take to answer one batch."""

DEFINITIONS = {
    "staleness.unit": "policy updates",
    "staleness.token_age": "version of the policy just before the update that consumed the token,"
    " minus the version that sampled it",
    "staleness.batch_age": "mean token age over a step's trained tokens, every token weighing one",
    "staleness.run_mean": "mean token age over all tokens that the run has trained so far, those"
    " before a resume included, of steps made again the later ones",
}
"""Tags of the run: what the numbers mean. Not parameters, which a resumed run could not repeat."""

KEYS = (*(f"staleness/{name}" for name in (*LOGGED, "run_mean", "run_p95", "run_max")),)
"""What a step may log."""

BATCH = 1000 - len(DEFINITIONS)
"""Points in a request: MLflow takes 1000 things at once, tags among them."""


class Run(NamedTuple):
    """Where points go."""

    uri: str
    id: str


class Point(NamedTuple):
    """One value of one metric."""

    key: str
    value: float
    timestamp: int
    """Unix milliseconds."""
    step: int


class Summary:
    """The run so far in three numbers, from sums: the compare page shows last values only."""

    def __init__(self, tokens_by_age: Mapping[int, int] | None = None) -> None:
        self._ages: Counter[int] = Counter(tokens_by_age)

    def add(self, tokens_by_age: Mapping[int, int]) -> None:
        """Count tokens that were trained."""
        self._ages.update(tokens_by_age)

    def take_off(self, tokens_by_age: Mapping[int, int]) -> None:
        """Forget tokens of steps that a resume has undone."""
        self._ages -= Counter(tokens_by_age)

    def metrics(self) -> dict[str, float]:
        """Their mean, 95th percentile and largest age; empty as long as there are none.

        >>> summary = Summary({0: 90, 1: 9})
        >>> summary.add({9: 1})
        >>> summary.metrics()
        {'staleness/run_mean': 0.18, 'staleness/run_p95': 1, 'staleness/run_max': 9}
        """
        ages = self._ages
        tokens = ages.total()
        if not tokens:
            return {}
        ordered = sorted(ages)
        reached = accumulate(ages[age] for age in ordered)
        p95 = next(a for a, n in zip(ordered, reached, strict=True) if n * 100 >= tokens * 95)
        return {
            "staleness/run_mean": sum(age * count for age, count in ages.items()) / tokens,
            "staleness/run_p95": p95,
            "staleness/run_max": ordered[-1],
        }


def points_of(step: StepStaleness, summary: Summary, *, seconds: float) -> tuple[list[Point], int]:
    """What a step logs, and how many values no chart can show.

    Args:
        summary: of the run before the step; the step is added.
        seconds: the points' time, Unix seconds.
    """
    summary.add(step.tokens_by_age)
    values = {**step.metrics(), **summary.metrics()}
    points = [
        Point(key, number, milliseconds(seconds), step.step)
        for key, value in values.items()
        if (number := _finite(value)) is not None
    ]
    return points, len(values) - len(points)


def milliseconds(seconds: float) -> int:
    """A time as MLflow holds it.

    Raises:
        DestinationError: it is none that a database can hold.

    >>> milliseconds(1.5)
    1500
    """
    if not abs(seconds) < LARGEST / 1000:
        raise DestinationError(f"time: {seconds:g} is none that MLflow can hold")
    return int(seconds * 1000)


def refused_of(run: Run, points: list[Point], *, tags: Mapping[str, str]) -> dict[str, str]:
    """Send points, key by key if MLflow refuses them together.

    Returns:
        Keys that it refuses while it takes others, with its reasons.
    """
    if not points:
        return {}
    try:
        _log_batch(run, points, tags)
    except Exception as error:
        if http_status(error) != 400:
            raise
        refused: dict[str, str] = {}
        keys = groupby(sorted(points, key=attrgetter("key")), attrgetter("key"))
        for key, of_key in keys:
            try:
                _log_batch(run, list(of_key), {})
            except Exception as problem:
                if http_status(problem) != 400:
                    raise
                refused[key] = one_line(problem)
        if len(refused) == len({point.key for point in points}):
            raise
        return refused
    return {}


def _log_batch(run: Run, points: list[Point], tags: Mapping[str, str]) -> None:
    """Send points and tags in one request.

    To a server they go without MLflow's own retries, which take four minutes and have no other
    switch than an environment variable that would change the user's clients too.
    """
    if not run.uri.startswith(("http://", "https://")):
        from mlflow.entities import Metric, RunTag

        metrics = [Metric(*point) for point in points]
        client_of(run.uri).log_batch(run.id, metrics, tags=[RunTag(*tag) for tag in tags.items()])
        return
    rest: Any = importlib.import_module("mlflow.utils.rest_utils")
    credentials: Any = importlib.import_module("mlflow.utils.credentials")
    rest.http_request_safe(
        credentials.get_default_host_creds(run.uri),
        "/api/2.0/mlflow/runs/log-batch",
        "POST",
        max_retries=0,
        timeout=REQUEST_SECONDS,
        json={
            "run_id": run.id,
            "metrics": [point._asdict() for point in points],
            "tags": [{"key": key, "value": value} for key, value in tags.items()],
        },
    )


@functools.cache
def client_of(uri: str) -> Any:
    """A client of this process; it makes no database where there is none."""
    from mlflow import MlflowClient

    path = unquote(uri.removeprefix("sqlite:///").partition("?")[0])
    if uri.startswith("sqlite:///") and not os.path.exists(path):
        raise FileNotFoundError(
            f"tracking_uri: there is no database {path!r}; pass another one, or set"
            " MLFLOW_TRACKING_URI"
        )
    return MlflowClient(uri)


def http_status(error: Exception) -> int | None:
    """The HTTP status that an error of MLflow stands for, also one of a local store."""
    from mlflow.exceptions import MlflowException

    return error.get_http_status_code() if isinstance(error, MlflowException) else None


def _finite(value: object) -> float | None:
    """A number that a chart can show."""
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def describe(points: Iterable[Point]) -> str:
    """How many values of which steps."""
    steps = [point.step for point in points]
    return f"{len(steps)} values of steps {min(steps)} to {max(steps)}"


def one_line(error: Exception) -> str:
    """An error's text without line breaks, cut to a readable length."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return without_passwords(text)[:LONGEST_REASON]


def without_passwords(text: str) -> str:
    """An address of a server may hold one."""
    return re.sub(r"//[^/@\s]+@", "//", text)
