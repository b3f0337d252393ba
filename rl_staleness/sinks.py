"""Where a step's numbers go beside the trace, and what may go wrong there without harm.

A sink that was asked for and cannot start raises when it is made. After that nothing of it reaches
the trainer: what it raises is logged once with its traceback and counted, the other sinks go on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from rl_staleness.staleness import StepStaleness

__all__ = ["Sink", "StepObserver"]

StepObserver = Callable[[StepStaleness], None]
"""The least that can be told of steps; also a sink, with nothing to close."""


@runtime_checkable
class Sink(Protocol):
    """A place that shows runs."""

    def log(self, step: StepStaleness) -> None:
        """Take a step's numbers and return at once; called in the order of the steps."""
        ...

    def close(self, *, trace: str | None, timeout: float) -> str | None:
        """Send what is left, with the trace attached, and let go; the run itself is the user's.

        Returns:
            What could not be delivered within ``timeout`` seconds, in one line; None if all was.
        """
        ...
