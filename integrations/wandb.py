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

import gzip
import hashlib
import math
import os
import queue
import re
import sys
import tempfile
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from rl_staleness.events import SCHEMA, StepTrained, decode
from rl_staleness.guard import Guard
from rl_staleness.staleness import LOGGED, StepStaleness

if TYPE_CHECKING:
    from wandb import Run

__all__ = ["WandbSink", "active_sink"]

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
            names its steps (``step=``) and logs less often than it steps.
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
        keep_counter: bool = False,
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
        self._writers: list[_Writer] = []
        """One for each run that was active, the latest last."""
        self._logged = 0
        self._end: tuple[Any, str | None, float] | None = None
        """What `close` wants done: the run and the trace, and until when."""
        self._attached = False

    def log(self, step: StepStaleness) -> None:
        """Take a step's numbers for the run that is active now, and return at once."""
        if self._end is not None:
            raise RuntimeError(f"step {step.step} after close(): it is not in the W&B run")
        self._logged += 1
        if self._inbox.qsize() < KEPT:
            self._inbox.put((self._run(), step))
        self._ensure_thread()

    def close(self, *, trace: str | None, timeout: float) -> str | None:
        """Send what is left, with the trace attached; the run goes on. A second time does nothing.

        Returns:
            What W&B did not take within ``timeout`` seconds, in one line; None if it took all.
        """
        if self._end is not None:
            return None
        self._end = self._run(), trace, time.monotonic() + timeout
        self._inbox.put(None)
        thread = self._ensure_thread()
        thread.join(timeout)
        return self._missing("" if not thread.is_alive() else f"no answer within {timeout:g} s")

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
        if trace is not None and not self._attached and (writers or rows):
            lacking.append("the trace")
        parts = []
        if lacking:
            reasons = [silence] if silence else []
            if run is None and not writers:
                reasons.append("no run was active: call wandb.init() first, or pass run=")
            elif self._keep_counter and rows:
                reasons.append("the run's counter was kept")
            reasons += [f"{what} failed" for what in self._guard.failures]
            parts = [f"W&B did not take {' and '.join(lacking)}", *reasons]
        if not_finite := sum(writer.not_finite for writer in writers):
            parts.append(f"{not_finite} values are left out because they are not finite")
        return "; ".join(parts) or None

    # In the thread.

    def _work(self) -> None:
        while (entry := self._inbox.get()) is not None:
            with self._guard("giving a step to W&B"):
                self._take(*entry)
        assert self._end is not None
        self._finish(*self._end)

    def _take(self, run: Any, step: StepStaleness) -> None:
        writer = self._writer(run)
        if writer is None:
            self._waiting.append(step)
            return
        writer.take(step)
        self._alert(writer.run, "Batch age", step.batch_age, above=self._highest_age)
        self._alert(writer.run, "Coverage", step.coverage, below=self._lowest_coverage)

    def _writer(self, run: Any) -> _Writer | None:
        """The run's writer, with the steps that waited for it; of no run, the latest one."""
        writers = self._writers
        if run is not None and (not writers or writers[-1].run is not run):
            known = [writer for writer in writers if writer.run is run]
            writers[:] = [writer for writer in writers if writer.run is not run]
            writers.extend(known or [_Writer(run, self._wandb.Histogram)])
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

    def _finish(self, run: Any, trace: str | None, deadline: float) -> None:
        last = self._writer(run)
        for writer in self._writers:
            with self._guard("giving W&B the steps that waited"):
                writer.finish(deadline, keep_counter=self._keep_counter)
        if trace is not None and last is not None and time.monotonic() < deadline:
            with self._guard("giving W&B the trace"):
                _attach(self._wandb, last.run, trace)
                self._attached = True


class _Writer:
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
            self.run.summary.update(_row(newest, self._histogram)[0])

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
        """Say what the keys are: by exact names, a glob beside the trainer's is drawn by lot."""
        run = self.run
        run.config.update({"rl_staleness": DEFINITIONS}, allow_val_change=True)
        run.define_metric(AXIS, hidden=True)
        for key in (*(f"staleness/{name}" for name in LOGGED), HISTOGRAM):
            run.define_metric(key, step_metric=AXIS, step_sync=False)
        for part in HISTOGRAM_PARTS:
            run.define_metric(f"{HISTOGRAM}.{part}", step_metric=AXIS, step_sync=False, hidden=True)
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
        row, not_finite = _row(step, self._histogram)
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


def _row(step: StepStaleness, histogram: Any) -> tuple[dict[str, Any], int]:
    """What is logged of a step, and how many values were not finite and are left out."""
    metrics = step.metrics()
    row: dict[str, Any] = {k: v for k, v in metrics.items() if math.isfinite(v)}
    not_finite = len(metrics) - len(row)
    row[AXIS] = step.step
    if step.tokens_by_age:
        row[HISTOGRAM] = histogram(np_histogram=_bins(step.tokens_by_age))
    return row, not_finite


def _bins(tokens_by_age: dict[int, int]) -> tuple[list[int], list[int]]:
    """Token counts and the bins' edges, whole numbers all; as narrow as W&B allows.

    >>> _bins({0: 30, 2: 10})
    ([30, 0, 10], [0, 1, 2, 3])
    """
    first, last = min(tokens_by_age), max(tokens_by_age)
    width = (last - first) // BINS + 1
    counts = [0] * ((last - first) // width + 1)
    for age, tokens in tokens_by_age.items():
        counts[(age - first) // width] += tokens
    return counts, [first + width * i for i in range(len(counts) + 1)]


def _attach(wandb: Any, run: Any, trace: str) -> None:
    """Log the trace as an artifact of the run; blocks while the server is away, then raises."""
    if run.disabled:
        return
    paths, metadata = _files(trace, _folder(run))
    name = re.sub(r"[^A-Za-z0-9._-]", "-", f"staleness-trace-{run.id}")[:128]
    artifact = wandb.Artifact(name, type="rl-staleness-trace", metadata=metadata)
    for path in paths:
        artifact.add_file(path, name=os.path.basename(path), policy="immutable")
    run.log_artifact(artifact, aliases=["latest", "final"])


def _folder(run: Any) -> str:
    """A new folder that lives as long as the run's files: `wandb sync` may read it much later."""
    try:
        return tempfile.mkdtemp(prefix="staleness-", dir=run.sync_dir)
    except OSError:
        return tempfile.mkdtemp(prefix="staleness-")


def _files(trace: str, folder: str) -> tuple[list[str], dict[str, Any]]:
    """What the artifact holds, written into the folder, and what it says of the trace."""
    packed = os.path.join(folder, "rollout_trace.jsonl.gz")
    digest = hashlib.sha256()
    rows = 0
    steps: list[int] = []
    with open(trace, "rb") as source, gzip.open(packed, "wb", compresslevel=6) as target:
        for line in source:
            target.write(line)
            digest.update(line)
            rows += 1
            if line.startswith(b'{"event":"step_trained"') and line.endswith(b"\n"):
                event = decode(line)
                if isinstance(event, StepTrained):
                    steps = [steps[0] if steps else event.step, event.step]
    return [packed], {
        "schema": SCHEMA,
        "rows": rows,
        "first_step": steps[0] if steps else None,
        "last_step": steps[-1] if steps else None,
        "sha256": digest.hexdigest(),
    }


def _wandb() -> Any:
    try:
        import wandb

        wandb.Histogram  # noqa: B018  # a folder wandb/ of old runs imports as well
    except (ImportError, AttributeError) as error:
        raise ImportError("wandb is not installed: pip install 'rl-staleness[wandb]'") from error
    return wandb
