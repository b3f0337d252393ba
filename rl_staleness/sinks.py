"""Where a step's numbers go beside the trace, and what may go wrong there without harm.

A sink that was asked for and cannot start raises when it is made. After that nothing of it reaches
the trainer: what it raises is logged once with its traceback and counted, the other sinks go on.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from importlib import import_module
from typing import Protocol, runtime_checkable

from rl_staleness.guard import Guard
from rl_staleness.staleness import StepStaleness

__all__ = ["Sink", "Sinks", "StepObserver", "active_sinks"]

_log = logging.getLogger(__name__)

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


class Sinks:
    """Those of one run, in the order in which they are told.

    Args:
        given: None: the runs that are active, looked for at every step until there is one of each
            library.

    Raises:
        ValueError: one of them is none.
    """

    def __init__(self, given: Sequence[Sink | StepObserver] | None, *, guard: Guard) -> None:
        for sink in given or ():
            if not (isinstance(sink, Sink) or callable(sink)):
                raise ValueError(
                    f"sinks: {sink!r} is none; it needs log and close, or to be called"
                )
        self._sinks = list(given or ())
        self._new = list(self._sinks)
        self._active: dict[str, Sink] | None = {} if given is None else None
        self._is_alone = False
        self._guard = guard

    def log(self, step: StepStaleness, *, trained: Counter[int], trace: str | None) -> None:
        """Tell all of them of a step.

        Args:
            trained: tokens by age of all steps of the run so far, this one included.
        """
        if self._active is not None:
            self._look_for_runs(self._active, trace)
        if self._new:
            self._tell_past(step, trained)
        for sink in self._sinks:
            with self._guard(_title(sink)):
                if isinstance(sink, Sink):
                    sink.log(step)
                else:
                    sink(step)

    def attach(self, trace: str) -> None:
        """Have the trace so far attached, by those that can."""
        for sink in self._sinks:
            if (attach := getattr(sink, "attach", None)) is not None:
                with self._guard(_title(sink)):
                    attach(trace)

    def close(self, trace: str | None, *, timeout: float) -> None:
        """Close each, which has so many seconds; what it could not deliver is logged."""
        for sink in self._sinks:
            if isinstance(sink, Sink):
                with self._guard(_title(sink)):
                    undelivered = sink.close(trace=trace, timeout=timeout)
                    if undelivered is not None:
                        _log.warning("rl_staleness: %s: %s", _title(sink), undelivered)

    def _look_for_runs(self, active: dict[str, Sink], trace: str | None) -> None:
        with self._guard("looking for active runs"):
            for library, sink in active_sinks(active):
                active[library] = sink
                self._sinks.append(sink)
                self._new.append(sink)
            if not (active or self._is_alone):
                self._is_alone = True
                _log.warning(
                    "rl_staleness: no W&B or MLflow run is active here: the numbers go to %s alone;"
                    " for charts, start a run before, or pass sinks=",
                    trace or "on_step's caller",
                )

    def _tell_past(self, step: StepStaleness, trained: Counter[int]) -> None:
        """Tell new sinks that sum the run up what was trained before this step, ever."""
        past = trained.copy()
        past.subtract(step.tokens_by_age)
        for sink in self._new:
            if (resume := getattr(sink, "resume", None)) is not None:
                with self._guard(_title(sink)):
                    resume(+past)
        self._new.clear()


def _title(sink: Sink | StepObserver) -> str:
    return f"sink {getattr(sink, '__qualname__', type(sink).__qualname__)}"
