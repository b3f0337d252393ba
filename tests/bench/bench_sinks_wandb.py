"""What a step pays on the training thread for the W&B sink: offline, and online with a dead server.

Beside it, what the trainer's own `run.log` of twelve numbers takes in the same loop, with and
without the sink. Steps are 20 ms apart. Targets: median under 2 ms, p99 under 10 ms.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("WANDB_ERROR_REPORTING", "false")

import wandb

from rl_staleness.integrations.wandb import WandbSink
from rl_staleness.staleness import StepStaleness, Versions, measure
from tests.wandb_stub import StubServer

PAUSE_SECONDS = 0.02
CLOSE_SECONDS = 3.0


def numbers(step: int) -> StepStaleness:
    """A step's numbers, of 4,096 tokens."""
    tally = {(1000 - age, 1000 - age): 512 for age in range(8)}
    return measure(
        {1000: tally},
        {},
        arrived=1000 * 4096,
        refit_versions=Versions(),
        late_updates=0,
        complete=True,
        step=step,
        version=1000,
        spanning_calls=0,
        violations=0,
        dropped_tokens=0,
        refit_seconds=0.5,
    )


def run_of(mode: str, stub: StubServer) -> Any:
    """A quiet run."""
    settings = wandb.Settings(
        silent=True,
        console="off",
        x_disable_stats=True,
        x_disable_machine_info=True,
        base_url=stub.url,
        api_key="0" * 40,
        finish_timeout=1,
    )
    return wandb.init(project="bench", entity="e", mode=mode, settings=settings)


def measured(run: Any, sink: WandbSink | None, steps: int) -> tuple[list[float], list[float]]:
    """Seconds of the sink and of the trainer's own call, a step; the first is the set-up."""
    ours, theirs = [], []
    for step in range(1, steps + 1):
        step_numbers = numbers(step)
        began = time.perf_counter()
        if sink is not None:
            sink.log(step_numbers)
        between = time.perf_counter()
        run.log({f"train/{index}": float(step) for index in range(12)})
        ended = time.perf_counter()
        ours.append(between - began)
        theirs.append(ended - between)
        time.sleep(PAUSE_SECONDS)
    return ours, theirs


def told(seconds: list[float]) -> str:
    """Median and p99 of all, in milliseconds."""
    p99 = sorted(seconds)[int(0.99 * len(seconds))]
    worst = max(seconds)
    return (
        f"median {statistics.median(seconds) * 1e3:.3f} ms, p99 {p99 * 1e3:.3f} ms,"
        f" worst {worst * 1e3:.3f} ms"
    )


def main() -> None:
    """Run all of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    steps = parser.parse_args().steps
    for case in ("offline", "online", "online, dead server"):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            for name in ("WANDB_DIR", "WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"):
                os.environ[name] = folder
            trace = Path(folder) / "trace.jsonl"
            trace.write_bytes(b"")
            stub = StubServer()
            run = run_of(case.partition(",")[0], stub)
            _, alone = measured(run, None, steps)
            if "dead" in case:
                stub.stop()
            sink = WandbSink(run)
            ours, theirs = measured(run, sink, steps)
            began = time.perf_counter()
            line = sink.close(trace=str(trace), timeout=CLOSE_SECONDS)
            closing = time.perf_counter() - began
            run.finish()
            stub.stop()
        print(f"{case}, {steps} steps:")
        print(f"  the sink on the training thread: {told(ours)} (target: 2 and 10 ms)")
        print(f"  the trainer's own log beside it: {told(theirs)}; without it: {told(alone)}")
        print(f"  close: {closing:.2f} s of at most {CLOSE_SECONDS} s, {line or 'all was taken'}")


if __name__ == "__main__":
    main()
