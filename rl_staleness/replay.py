"""Steps of a trace with the time at which each was trained, and where the trace comes from."""

from __future__ import annotations

import hashlib
import os
from typing import NamedTuple

from rl_staleness.events import RunFinished, RunStarted
from rl_staleness.page import clean
from rl_staleness.resume import timed_steps
from rl_staleness.trace import read

__all__ = ["Origin", "origin_of", "timed_steps"]


class Origin(NamedTuple):
    """The run that a trace was written by."""

    run: str
    started: float
    """Unix seconds of the first line."""
    ended: float
    """Unix seconds of the last line."""
    status: str | None
    """How the run closed its trace; None: it has not."""

    @property
    def id(self) -> str:
        """A short name for what is made of this run, always the same; letters and digits.

        >>> Origin("r", 0.0, 1.0, None).id
        '454349e422f05297191e'
        """
        return hashlib.sha256(self.run.encode()).hexdigest()[:20]

    @property
    def title(self) -> str:
        """For people."""
        return f"staleness of {clean(self.run)}"


def origin_of(trace: str | os.PathLike[str]) -> Origin:
    """Read where a trace comes from, in one pass.

    Raises:
        TraceError: as `rl_staleness.trace.read`.
        OSError: it cannot be read.
    """
    run, started, ended, status = "", None, 0.0, None
    for event in read(trace):
        ended = event.time
        started = ended if started is None else started
        if isinstance(event, RunStarted):
            run, status = event.run, None
        elif isinstance(event, RunFinished):
            status = event.status
    return Origin(run, started or 0.0, ended, status)
