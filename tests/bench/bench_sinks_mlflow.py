"""What a step pays on the training thread for the MLflow sink, with the server up and dead.

Targets: median under 2 ms, p99 under 10 ms, in `on_step` with the sink beside `on_step` without.
Exits 1 if one is missed. Starts an ``mlflow server`` of its own on loopback.
"""

from __future__ import annotations

import logging
import statistics
import sys
import tempfile
import time
from pathlib import Path

import mlflow

from rl_staleness import Call, StalenessCallback
from rl_staleness.integrations.mlflow import MlflowSink
from rl_staleness.staleness import StepStaleness

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.mlflow_places import Server

STEPS = 1500
INTERVAL_SECONDS = 0.01
"""Between two steps, so that the writer works while they are taken."""
MEDIAN_MS, P99_MS = 2.0, 10.0


class Timed:
    """A sink, and how long each call of it took."""

    def __init__(self, sink: MlflowSink) -> None:
        self._sink = sink
        self.milliseconds: list[float] = []

    def __call__(self, step: StepStaleness) -> None:
        began = time.perf_counter()
        self._sink.log(step)
        self.milliseconds.append((time.perf_counter() - began) * 1e3)


def train(folder: Path, sink: MlflowSink) -> list[float]:
    """Milliseconds that each step spent in the sink."""
    timed = Timed(sink)
    with StalenessCallback(trace=folder / "trace.jsonl", sinks=[timed]) as staleness:
        for step in range(STEPS):
            calls = [Call(call=str(n), engine="e", version=step, tokens=100) for n in range(16)]
            staleness.on_publish(f"g{step}", calls=calls)
            staleness.on_step([f"g{step}"])
            time.sleep(INTERVAL_SECONDS)
    return timed.milliseconds


def report(name: str, milliseconds: list[float]) -> bool:
    """Print a row; whether it keeps the targets."""
    median = statistics.median(milliseconds)
    p99 = statistics.quantiles(milliseconds, n=100)[98]
    print(
        f"{name}: median {median:.3f} ms, p99 {p99:.3f} ms, worst {max(milliseconds):.2f} ms"
        f" of {len(milliseconds)} steps (targets: {MEDIAN_MS:g} and {P99_MS:g} ms)"
    )
    return median < MEDIAN_MS and p99 < P99_MS


def main() -> int:
    logging.getLogger("rl_staleness").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        server = Server(folder)
        server.start()
        try:
            run = mlflow.MlflowClient(server.uri).create_run("0").info.run_id
            sink = MlflowSink(run, tracking_uri=server.uri)
            fine = report("server up", train(folder, sink))
            began = time.perf_counter()
            missing = sink.close(trace=str(folder / "trace.jsonl"), timeout=60)
            print(f"close: {time.perf_counter() - began:.2f} s, not delivered: {missing}")
        finally:
            server.kill()
        sink = MlflowSink(run, tracking_uri=server.uri)
        fine &= report("server dead", train(folder, sink))
        began = time.perf_counter()
        missing = sink.close(trace=None, timeout=3)
        print(f"close(timeout=3): {time.perf_counter() - began:.2f} s, not delivered: {missing}")
    return int(not fine)


if __name__ == "__main__":
    sys.exit(main())
