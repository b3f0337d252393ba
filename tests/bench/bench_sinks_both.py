"""What a step pays on the training thread with both sinks on: servers up, with checkpoints, dead.

W&B runs online against a stub server, MLflow against a real one with sqlite, both on loopback.
Targets: median under 2 ms, p99 under 10 ms, for both sinks together. Exits 1 if one is missed.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("WANDB_ERROR_REPORTING", "false")

import mlflow
import wandb

from rl_staleness import Call, StalenessCallback
from rl_staleness.integrations.mlflow import MlflowSink
from rl_staleness.integrations.wandb import WandbSink
from rl_staleness.staleness import StepStaleness
from tests.mlflow_places import Server
from tests.wandb_stub import StubServer

PAUSE_SECONDS = 0.02
"""Between two steps, so that the sinks' threads work while they are taken."""
MEDIAN_MS, P99_MS = 2.0, 10.0
CLOSE_SECONDS = 3.0


class Timed:
    """Both sinks, and how long each step took in them."""

    def __init__(self, *sinks: WandbSink | MlflowSink) -> None:
        self.sinks = sinks
        self.milliseconds: list[float] = []

    def __call__(self, step: StepStaleness) -> None:
        began = time.perf_counter()
        for sink in self.sinks:
            sink.log(step)
        self.milliseconds.append((time.perf_counter() - began) * 1e3)


def train(
    staleness: StalenessCallback, run: Any, steps: int, *, checkpoint: Callable[[], None]
) -> None:
    """Steps of 16 calls; the trainer logs, too, and makes a checkpoint every 100 steps."""
    for _ in range(steps):
        step, version = staleness.step, staleness.version
        calls = [
            Call(call=str(n), engine="e", version=max(version - n % 4, 0), tokens=100)
            for n in range(16)
        ]
        staleness.on_publish(f"g{step}", calls=calls)
        staleness.on_step([f"g{step}"])
        run.log({f"train/{index}": float(step) for index in range(12)})
        if step % 100 == 0:
            checkpoint()
        time.sleep(PAUSE_SECONDS)


def told(name: str, milliseconds: list[float]) -> bool:
    """Print a row; whether it keeps the targets."""
    median = statistics.median(milliseconds)
    p99 = statistics.quantiles(milliseconds, n=100)[98]
    print(
        f"{name}: median {median:.3f} ms, p99 {p99:.3f} ms, worst {max(milliseconds):.2f} ms of"
        f" {len(milliseconds)} steps (targets: {MEDIAN_MS:g} and {P99_MS:g} ms)",
        flush=True,
    )
    return median < MEDIAN_MS and p99 < P99_MS


def wandb_run(stub: StubServer) -> Any:
    """A quiet online run."""
    settings = wandb.Settings(
        silent=True,
        console="off",
        x_disable_stats=True,
        x_disable_machine_info=True,
        base_url=stub.url,
        api_key="0" * 40,
        finish_timeout=1,
    )
    return wandb.init(project="bench", entity="e", settings=settings)


def closed(timed: Timed, trace: str | None, seconds: float) -> None:
    """Close both sinks, and print how long that took."""
    for sink in timed.sinks:
        began = time.perf_counter()
        line = sink.close(trace=trace, timeout=seconds)
        took = time.perf_counter() - began
        name = type(sink).__name__
        print(f"  {name}.close(timeout={seconds:g}): {took:.2f} s, {line or 'all delivered'}")


def main() -> int:
    """Run all of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    steps = parser.parse_args().steps
    logging.getLogger("rl_staleness").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        for variable in ("WANDB_DIR", "WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"):
            os.environ[variable] = name
        folder = Path(name)
        stub, server = StubServer(), Server(folder)
        server.start()
        try:
            run = wandb_run(stub)
            runs = [mlflow.MlflowClient(server.uri).create_run("0").info.run_id for _ in range(2)]
            fine = True
            timed = Timed(WandbSink(run), MlflowSink(runs[0], tracking_uri=server.uri))
            trace = str(folder / "trace.jsonl")
            with StalenessCallback(trace=trace, sinks=[timed]) as staleness:
                train(staleness, run, steps, checkpoint=lambda: None)
                fine &= told("servers up", timed.milliseconds[1:])
                timed.milliseconds.clear()

                def attach() -> None:
                    for sink in timed.sinks:
                        sink.attach(trace)

                train(staleness, run, steps, checkpoint=attach)
                fine &= told("servers up, a checkpoint every 100 steps", timed.milliseconds)
            closed(timed, trace, 60.0)
            timed = Timed(WandbSink(run), MlflowSink(runs[1], tracking_uri=server.uri))
        finally:
            server.kill()
            stub.stop()
        trace = str(folder / "trace-2.jsonl")
        with StalenessCallback(trace=trace, sinks=[timed]) as staleness:
            train(staleness, run, steps, checkpoint=lambda: None)
        fine &= told("both servers dead", timed.milliseconds[1:])
        closed(timed, trace, CLOSE_SECONDS)
        run.finish()
    return int(not fine)


if __name__ == "__main__":
    sys.exit(main())
