"""What following a vLLM engine costs its event loop, with the demo's engine under full load.

Targets: a refit with 256 running calls costs the loop under 0.2 ms of our work; our CPU time on the
loop is at most 0.5 % of the engine's (profiled by function).
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import os
import pstats
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))

import tiny_model  # noqa: E402

from rl_staleness import StalenessCallback  # noqa: E402
from rl_staleness.integrations.vllm import VllmEngine  # noqa: E402

NUM_CALLS, GROUP = 256, 8


class Meter:
    """CPU seconds that the loop's thread spends in our code outside of hooks and requests."""

    def __init__(self, engine: Any) -> None:
        self.seconds = 0.0
        self._depth = 0
        self._guarded = engine._guarded
        engine._guarded = self._measured

    def _measured(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        began, self._depth = time.thread_time(), self._depth + 1
        try:
            return self._guarded(work, *args, **kwargs)
        finally:
            self._depth -= 1
            if not self._depth:
                self.seconds += time.thread_time() - began


class Load:
    """Keeps so many calls running, group by group, as the demo does."""

    def __init__(self, llm: Any, staleness: StalenessCallback | None) -> None:
        self.tokens = 0
        self._llm = llm
        self._staleness = staleness
        self._tasks: list[asyncio.Task[None]] = []

    async def _one(self) -> None:
        prompt = tiny_model.new_prompt()
        while True:
            if self._staleness is None:
                samples = await tiny_model.sample(self._llm, prompt, num_samples=GROUP)
            else:
                with self._staleness.group() as group:
                    samples = await tiny_model.sample(self._llm, prompt, num_samples=GROUP)
                self._staleness.on_publish(group)
                self._staleness.on_drop(group, reason="a benchmark trains nothing")
            self.tokens += sum(len(sample.tokens) for sample in samples)

    async def __aenter__(self) -> Load:
        self._tasks = [asyncio.create_task(self._one()) for _ in range(NUM_CALLS // GROUP)]
        await asyncio.sleep(1)
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)


async def refits(llm: Any, folder: Path, number: int) -> None:
    """Milliseconds of the loop a refit, its cut and its lines in the trace included."""
    engine = VllmEngine(llm)
    spent, counted = [], []
    with StalenessCallback(engines=[engine], trace=folder / "refits.jsonl") as staleness:
        meter = Meter(engine)
        async with Load(llm, staleness):
            for _ in range(number):
                await asyncio.sleep(0.2)
                staleness.on_step([])
                await llm.pause_generation(mode="keep", clear_cache=False)
                counted.append(len(engine._running))
                began, meter.seconds = time.thread_time(), 0.0
                await staleness.aon_refit_paused()
                await staleness.aon_refit_done()
                hooks = time.thread_time() - began
                await asyncio.sleep(0.05)  # the marker is reached, the engine has answered
                spent.append(1e3 * (hooks + meter.seconds))
                await llm.resume_generation()
        assert staleness.missing() == {}, staleness.missing()
    print(
        f"a refit with {statistics.mean(counted):.0f} running calls: "
        f"{statistics.median(spent):.3f} ms of the loop (median of {number}, "
        f"worst {max(spent):.3f}; target 0.2)"
    )


async def share(llm: Any, folder: Path, seconds: float) -> None:
    """Our share of the loop's CPU time, and of the engine's, with a refit a second."""
    profile, me = cProfile.Profile(), psutil.Process()
    engine = VllmEngine(llm)
    with StalenessCallback(engines=[engine], trace=folder / "share.jsonl") as staleness:
        async with Load(llm, staleness) as load:
            load.tokens, before = 0, cpu_seconds(me)
            profile.enable()
            for _ in range(round(seconds)):
                await asyncio.sleep(1)
                staleness.on_step([])
                await llm.pause_generation(mode="keep", clear_cache=False)
                async with staleness.refit():
                    pass
                await llm.resume_generation()
            profile.disable()
            used = cpu_seconds(me) - before
    ours = {}
    total = 0.0
    for (file, _, name), (_, _, own, _, callers) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        if "poll" in name and file == "~":
            continue  # it waits in there
        total += own
        if is_ours(file):
            ours[name] = ours.get(name, 0.0) + own
        elif file == "~" or file.endswith("contextlib.py"):
            for (caller, _, _), times in callers.items():
                if is_ours(caller):
                    ours[f"{name} for ours"] = ours.get(f"{name} for ours", 0.0) + times[2]
    spent = sum(ours.values())
    print(f"{load.tokens / seconds:.0f} tokens a second, profiled for {seconds:.0f} s")
    for name, own in sorted(ours.items(), key=lambda item: -item[1])[:12]:
        print(f"  {1e3 * own / seconds:8.3f} ms/s  {name}")
    print(
        f"our share of the loop's CPU time {100 * spent / total:.2f} %, "
        f"of the engine's processes {100 * spent / used:.2f} % (target 0.5 %)"
    )


def is_ours(file: str) -> bool:
    return Path(file).parent.name in ("rl_staleness", "integrations")


def cpu_seconds(me: psutil.Process) -> float:
    """CPU time of this process, which has the front end, and of the engine's others."""
    processes = [me, *me.children(recursive=True)]
    return sum(sum(process.cpu_times()[:2]) for process in processes)


async def run(options: argparse.Namespace, folder: Path) -> None:
    llm = tiny_model.start_engine(tiny_model.Policy(folder / "model").folder)
    try:
        await refits(llm, folder, options.refits)
        await share(llm, folder, options.seconds)
    finally:
        llm.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--refits", type=int, default=30, metavar="N")
    parser.add_argument("--seconds", type=float, default=10, metavar="S")
    options = parser.parse_args()
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(run(options, Path(folder)))


if __name__ == "__main__":
    main()
