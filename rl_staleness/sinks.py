"""Where a step's numbers go beside the trace, and what may go wrong there without harm.

A sink that was asked for and cannot start raises when it is made. After that nothing of it reaches
the trainer: what it raises is logged once with its traceback and counted, the other sinks go on.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterator
from importlib import import_module
from typing import Protocol, runtime_checkable

from rl_staleness.staleness import StepStaleness

__all__ = ["Sink", "StepObserver", "active_sinks"]

StepObserver = Callable[[StepStaleness], None]
"""The least that can be told of steps; also a sink, with nothing to close."""


@runtime_checkable
class Sink(Protocol):
    """A place that shows runs.

    It may have two methods more, which return at once too: ``attach(trace)``, told at a checkpoint
    to attach the trace so far, and ``resume(tokens_by_age)``, told before its first step what a run
    that goes on had trained by then.
    """

    def log(self, step: StepStaleness) -> None:
        """Take a step's numbers and return at once; called in the order of the steps."""
        ...

    def close(self, *, trace: str | None, timeout: float) -> str | None:
        """Send what is left, with the trace attached, and let go; the run itself is the user's.

        Returns:
            What could not be delivered within ``timeout`` seconds, in one line; None if all was.
        """
        ...


_ACTIVE = {"wandb": "active_sink", "mlflow": "active_run_sink"}
"""By library: the function of its integration that finds the run that is active."""


def active_sinks(known: Container[str]) -> Iterator[tuple[str, Sink]]:
    """Find the runs that are active in this process and thread, of libraries that are not known.

    A library that nobody imported has no run, so that nothing heavy is loaded to find out.
    """
    for library, function in _ACTIVE.items():
        if library in sys.modules and library not in known:
            found = getattr(import_module(f"rl_staleness.integrations.{library}"), function)()
            if found is not None:
                yield library, found
