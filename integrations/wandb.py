"""Staleness in a Weights & Biases run, beside what the trainer logs. Works with wandb 0.31.

    StalenessCallback(..., sinks=[WandbSink()])       # the run that is active
    StalenessCallback(..., sinks=[WandbSink(run)])    # this one

Every row has an axis of its own, ``staleness/step``. W&B puts all rows on one counter and drops
what comes below it, so the counter is moved only where the trainer cannot lose by it; a row that
finds no place waits, at the latest until `WandbSink.close`, which belongs before ``run.finish()``.

All of it happens in a thread of the sink's own. What W&B's process took is W&B's to upload: it
keeps it on disk while the server is away (``wandb sync``).
"""

from __future__ import annotations

import functools
import math
import queue
import sys
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from rl_staleness.attachments import Attachments
from rl_staleness.guard import Guard
from rl_staleness.integrations.wandb_files import attach
from rl_staleness.integrations.wandb_rows import KEPT, Writer
from rl_staleness.staleness import StepStaleness

if TYPE_CHECKING:
    from wandb import Run

__all__ = ["WandbSink", "active_sink"]


def active_sink() -> WandbSink | None:
    """A sink for the active run, or None; imports nothing, so that it may be asked any time."""
    wandb = sys.modules.get("wandb")
    return None if getattr(wandb, "run", None) is None else WandbSink()


class WandbSink:
    """Logs every step to a W&B run that somebody else creates, configures and finishes.

    Args:
        run: what ``wandb.init()`` returned; default: the active run, looked up at every step.
        keep_counter: leave out the steps that found no place, instead of giving them rows at the
            end, which moves the run's counter: for a run that will be resumed by a trainer that
            names its steps (``step=``) and logs less often than it steps. Default: where `close`
            is called because of an exception. ``rl-staleness replay`` brings what is left out.
        alert_above: send an alert when the batch age rises above this many updates.
        alert_coverage_below: send one when the coverage falls below this share.

    Raises:
        ImportError: wandb is not installed.
        ValueError: an argument cannot be used; the message names it.
    """

    def __init__(
        self,
        run: Run | None = None,
        *,
        keep_counter: bool | None = None,
        alert_above: float | None = None,
        alert_coverage_below: float | None = None,
    ) -> None:
        self._wandb = _wandb()
        if run is not None and not hasattr(run, "define_metric"):
            raise ValueError(f"run: {run!r} is no run; pass what wandb.init() returned")
        for name, limit in (
            ("alert_above", alert_above),
            ("alert_coverage_below", alert_coverage_below),
        ):
            if limit is not None and not math.isfinite(limit):
                raise ValueError(f"{name}: {limit!r} is no limit; pass a finite number")
        self._given = run
        self._keep_counter = keep_counter
        self._highest_age = alert_above
        self._lowest_coverage = alert_coverage_below
        self._crossed: set[str] = set()
        self._guard = Guard(strict=False, timeout=0.0)
        self._inbox: queue.SimpleQueue[tuple[Any, StepStaleness] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._waiting: deque[StepStaleness] = deque(maxlen=KEPT)
        """Steps from before there was a run."""
        self._writers: list[Writer] = []
        """One for each run that was active, the latest last."""
        self._logged = 0
        self._end: tuple[Any, str | None, float] | None = None
        """What `close` wants done: the run and the trace, and until when."""
        self._lacking: dict[str, str] | None = None
        """By name, why a file is not attached; None: none is."""
        self._files = Attachments(functools.partial(attach, self._wandb), title="W&B")

    def log(self, step: StepStaleness) -> None:
        """Take a step's numbers for the run that is active now, and return at once."""
        if self._end is not None:
            raise RuntimeError(f"step {step.step} after close(): it is not in the W&B run")
        self._logged += 1
        if self._inbox.qsize() < KEPT:
            self._inbox.put((self._run(), step))
        self._ensure_thread()

    def attach(self, trace: str) -> None:
        """Have the trace as it stands attached, with report and picture; returns at once.

        Each time makes another version of the run's artifact, with an alias ``step-N``.
        """
        run = self._run()
        if run is not None and self._end is None:
            self._files.add(run, trace)

    def close(self, *, trace: str | None, timeout: float) -> str | None:
        """Send what is left, with the trace attached; the run goes on. A second time does nothing.

        Returns:
            What W&B did not take within ``timeout`` seconds, in one line; None if it took all.
        """
        if self._end is not None:
            return None
        if self._keep_counter is None:
            self._keep_counter = sys.exc_info()[0] is not None
        deadline = time.monotonic() + timeout
        self._end = self._run(), trace, deadline
        self._inbox.put(None)
        thread = self._ensure_thread()
        thread.join(timeout)
        is_silent = thread.is_alive()
        if not is_silent and trace is not None and self._writers:
            self._lacking = self._files.finish(self._writers[-1].run, trace, deadline=deadline)
            is_silent = self._lacking is None
        return self._missing(f"no answer within {timeout:g} s" if is_silent else "")

    def _run(self) -> Any:
        return self._wandb.run if self._given is None else self._given

    def _ensure_thread(self) -> threading.Thread:
        if self._thread is None or not self._thread.is_alive():  # it does not survive a fork
            self._thread = threading.Thread(
                target=self._work, name="rl_staleness-wandb", daemon=True
            )
            self._thread.start()
        return self._thread

    def _missing(self, silence: str) -> str | None:
        """What W&B did not take and why, in one line."""
        assert self._end is not None
        run, trace, _ = self._end
        writers = tuple(self._writers)
        rows = self._logged - sum(writer.taken for writer in writers)
        lacking = [f"{rows} of {self._logged} steps"] if rows else []
        left_out = self._lacking or {}
        if trace is not None and (writers or rows) and (self._lacking is None or "" in left_out):
            lacking.append("the trace")
        parts = []
        if lacking:
            reasons = [silence] if silence else []
            if run is None and not writers:
                reasons.append("no run was active: call wandb.init() first, or pass run=")
            elif self._keep_counter and rows:
                reasons.append("the run's counter was kept")
            reasons += [f"{what} failed" for what in self._guard.failures]
            reasons += [why for name, why in left_out.items() if not name]
            parts = [f"W&B did not take {' and '.join(lacking)}", *reasons]
        parts += [f"{name} is not attached ({why})" for name, why in left_out.items() if name]
        if not_finite := sum(writer.not_finite for writer in writers):
            parts.append(f"{not_finite} values are left out because they are not finite")
        return "; ".join(parts) or None

    # In the thread.

    def _work(self) -> None:
        while (entry := self._inbox.get()) is not None:
            with self._guard("giving a step to W&B"):
                self._take(*entry)
        assert self._end is not None
        run, _, deadline = self._end
        self._finish(run, deadline)

    def _take(self, run: Any, step: StepStaleness) -> None:
        writer = self._writer(run)
        if writer is None:
            self._waiting.append(step)
            return
        writer.take(step)
        self._alert(writer.run, "Batch age", step.batch_age, above=self._highest_age)
        self._alert(writer.run, "Coverage", step.coverage, below=self._lowest_coverage)

    def _writer(self, run: Any) -> Writer | None:
        """The run's writer, with the steps that waited for it; of no run, the latest one."""
        writers = self._writers
        if run is not None and (not writers or writers[-1].run is not run):
            known = [writer for writer in writers if writer.run is run]
            writers[:] = [writer for writer in writers if writer.run is not run]
            writers.extend(known or [Writer(run, self._wandb.Histogram)])
            writers[-1].backlog.extend(self._waiting)
            self._waiting.clear()
        return writers[-1] if writers else None

    def _alert(
        self,
        run: Any,
        what: str,
        value: float | None,
        *,
        above: float | None = None,
        below: float | None = None,
    ) -> None:
        """Send an alert when a limit is crossed, and not again before the value was back."""
        if value is None or (above is None and below is None):
            return
        if not ((above is not None and value > above) or (below is not None and value < below)):
            self._crossed.discard(what)
        elif what not in self._crossed:
            self._crossed.add(what)
            limit = f"above {above:g}" if above is not None else f"below {below:g}"
            text = f"{what} is {value:.4g}, {limit}."
            run.alert(title=f"{what} {limit}", text=text, level="WARN", wait_duration=1)

    def _finish(self, run: Any, deadline: float) -> None:
        self._writer(run)
        for writer in self._writers:
            with self._guard("giving W&B the steps that waited"):
                writer.finish(deadline, keep_counter=bool(self._keep_counter))


def _wandb() -> Any:
    try:
        import wandb

        wandb.Histogram  # noqa: B018  # a folder wandb/ of old runs imports as well
    except (ImportError, AttributeError) as error:
        raise ImportError("wandb is not installed: pip install 'rl-staleness[wandb]'") from error
    return wandb
