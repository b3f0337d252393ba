"""Runs elsewhere that a command names: which product has them, and what it can be asked.

The integration of the product is imported when it is needed; here is only what both have.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rl_staleness.events import TraceError
from rl_staleness.printable import printable
from rl_staleness.trace import run_of

__all__ = [
    "DestinationError",
    "Fetched",
    "Logged",
    "Product",
    "fetch",
    "in_scratch",
    "product_of",
    "replay",
    "upload",
]

Product = Literal["mlflow", "wandb"]

_MLFLOW_ID = re.compile(r"[0-9a-f]{32}")
_WANDB_PATH = re.compile(r"[^/\s]+/[^/\s]+/[^/\s]+")


class DestinationError(ValueError):
    """A run that cannot be reached or used; the message says why in one line."""


class Logged(NamedTuple):
    """What a run shows of one step, where its trace is not to be had."""

    step: int
    metrics: dict[str, float]
    """By the key that was logged."""
    tokens_by_age: dict[int, int] = {}  # noqa: RUF012  # never changed
    """Empty where it was not logged, or not exactly."""


Fetched = str | list[Logged]
"""The path of a trace, or what was logged, in order of the steps."""


def product_of(run: str) -> Product | None:
    """Which product a run is of, by the form of its name; None: it has the form of neither.

    >>> product_of("0123456789abcdef0123456789abcdef"), product_of("me/project/ab12cd34")
    ('mlflow', 'wandb')
    """
    if _is_offline(run):
        return "wandb"
    if _MLFLOW_ID.fullmatch(run):
        return "mlflow"
    return "wandb" if _WANDB_PATH.fullmatch(run.strip("/")) else None


def upload(trace: str, product: Product, *, run: str, **where: str | None) -> str:
    """Attach a trace, its report and its picture to a run; what was done, in one line.

    Args:
        where: ``tracking_uri`` of MLflow.

    Raises:
        DestinationError: it cannot be done.
        TraceError, OSError: the trace cannot be read.
    """
    _check_is_its_own(trace, product, run, where)
    return str(_runs_of(product).upload(trace, run=run, **where))


def replay(trace: str, product: Product, *, run: str | None, **where: str | None) -> str:
    """Bring all steps and files that a run has not; arguments and errors are those of `upload`.

    Args:
        run: default one that is made for this trace.
    """
    if run is not None:
        _check_is_its_own(trace, product, run, where)
    return str(_runs_of(product).replay(trace, run=run, **where))


def fetch(product: Product, *, run: str, folder: str, **where: str | None) -> Fetched:
    """Fetch a run's trace into the folder, or what it logged; errors are those of `upload`."""
    fetched: Fetched = _runs_of(product).fetch(run, folder, **where)
    return fetched


@contextmanager
def in_scratch() -> Generator[str]:
    """A folder for files on their way."""
    with tempfile.TemporaryDirectory(prefix="rl_staleness-") as folder:
        yield folder


def _check_is_its_own(
    trace: str, product: Product, run: str, where: Mapping[str, str | None]
) -> None:
    """See that a run has no trace of another one, which would be hidden under this.

    Raises:
        DestinationError: it has, or cannot be asked.
        TraceError, OSError: the trace cannot be read.
    """
    mine = run_of(trace)
    with in_scratch() as folder:
        there = _runs_of(product).fetch_trace(run, folder, **where)
        try:
            theirs = mine if there is None else run_of(there)
        except TraceError:
            return  # what it has is no trace: nothing is hidden
    if theirs != mine:
        raise DestinationError(
            f"{run}: it has the trace of run {printable(theirs)}, and this one is of"
            f" {printable(mine)}; name the run that it was, or replay it into one of its own"
        )


def _is_offline(run: str) -> bool:
    """Whether it is the folder of a W&B run on this machine."""
    path = Path(run)
    return path.is_dir() and any(path.glob("run-*.wandb"))


def _runs_of(product: Product) -> Any:
    return import_module(f"rl_staleness.integrations.{product}_runs")
