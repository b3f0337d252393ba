"""What following a vLLM engine costs its event loop, with the demo's engine under full load.

Targets: a refit with 256 running calls costs the loop under 0.2 ms of our work; our CPU time on the
loop is at most 0.5 % of the engine's (profiled by function). Both are taken as in the demo, where
the trainer's process has the callback, and with the callback on the engine's own loop.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import pstats
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))

import tiny_model  # noqa: E402

from rl_staleness import StalenessCallback, captured  # noqa: E402
from rl_staleness.integrations.vllm import VllmEngine  # noqa: E402

NUM_CALLS, GROUP = 256, 8
IN_A_ROW = 40
"""Refits a pause."""


class Elsewhere:
    """Does to an engine what a callback in another process has done in the engine's own."""

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine
        self._version = 0
        engine.start(version=0, refit=0)

    @contextmanager
    def group(self) -> Iterator[Any]:
        with captured() as capture:
            yield capture

    def ended(self, capture: Any) -> None:
        capture.records()

    def refit(self) -> None:
        version = self._version = self._version + 1
        self._engine.mark(version, version=version, mode="keep", deliver=lambda cut: None)
        self._engine.done(version, version=version)

    def close(self) -> None:
        self._engine.detach()


class Here:
    """A callback on the engine's own loop."""

    def __init__(self, engine: VllmEngine, folder: Path) -> None:
        self._staleness = StalenessCallback(engines=[engine], trace=folder / "bench.jsonl")
        self.group = self._staleness.group

    def ended(self, group: Any) -> None:
        self._staleness.on_publish(group)
        self._staleness.on_drop(group, reason="a benchmark trains nothing")

    def refit(self) -> None:
        self._staleness.on_refit_paused()
        self._staleness.on_refit_done()

    def close(self) -> None:
        self._staleness.close()
        assert self._staleness.missing() == {}, self._staleness.missing()


class Meter:
    """CPU seconds that the loop's thread spends on refits: in their hooks, and after them."""

    def __init__(self, engine: Any) -> None:
        self.seconds = self.sending = 0.0
        self._engine = engine
        engine._put_marker = self._measured(engine._put_marker)
        engine._ask = self._measured(engine._ask)
        call_utility_async = engine._core.call_utility_async

        def sending(*args: Any) -> Any:
            return Sending(self, call_utility_async(*args))

        engine._core = Core(engine._core, sending)

    def _measured(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """A method whose callback, its last argument, is measured."""

        def measured(*args: Any, **kwargs: Any) -> Any:
            if "then" in kwargs:
                return method(*args, then=self.timed(kwargs["then"]))
            return method(self.timed(args[0]))

        return measured

    def timed(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            began = time.thread_time()
            try:
                return work(*args)
            finally:
                self.seconds += time.thread_time() - began

        return timed


class Core:
    """vLLM's client, whose sending of messages is measured."""

    def __init__(self, core: Any, call_utility_async: Callable[..., Any]) -> None:
        self._core = core
        self.call_utility_async = call_utility_async

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)


class Sending:
    """The steps of a coroutine of vLLM's, on the clock."""

    def __init__(self, meter: Meter, coroutine: Any) -> None:
        self._meter = meter
        self._steps = coroutine.__await__()

    def __await__(self) -> Sending:
        return self

    def __iter__(self) -> Sending:
        return self

    def __next__(self) -> Any:
        began = time.thread_time()
        try:
            return next(self._steps)
        finally:
            self._meter.sending += time.thread_time() - began


class Load:
    """Keeps so many calls running, group by group, as the demo does."""

    def __init__(self, llm: Any, follower: Elsewhere | Here) -> None:
        self.tokens = 0
        self._llm = llm
        self._follower = follower
        self._tasks: list[asyncio.Task[None]] = []

    async def _one(self) -> None:
        while True:
            with self._follower.group() as group:
                samples = await tiny_model.sample(
                    self._llm, tiny_model.new_prompt(), num_samples=GROUP
                )
            self._follower.ended(group)
            self.tokens += sum(len(sample.tokens) for sample in samples)

    async def __aenter__(self) -> Load:
        self._tasks = [asyncio.create_task(self._one()) for _ in range(NUM_CALLS // GROUP)]
        await asyncio.sleep(1)
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)


async def refits(llm: Any, engine: VllmEngine, follower: Elsewhere | Here, number: int) -> None:
    """Milliseconds of the loop a refit: what the hooks do, and the marker, and the answers.

    Several refits a pause: the first finds everything in memory only, where the engine's steps have
    left it, the last ones in the caches.
    """
    spent: list[list[float]] = [[] for _ in range(IN_A_ROW)]
    sent: list[float] = []
    running: list[int] = []
    meter = Meter(engine)
    async with Load(llm, follower):
        for _ in range(number):
            await asyncio.sleep(0.2)
            await llm.pause_generation(mode="keep", clear_cache=False)
            running.append(len(engine._running))
            for times in spent:
                meter.seconds = meter.sending = 0.0
                meter.timed(follower.refit)()
                for _ in range(20):
                    await asyncio.sleep(0)  # the marker is reached
                times.append(1e3 * (meter.seconds - meter.sending))
                sent.append(1e3 * meter.sending)
            await asyncio.sleep(0.05)  # the engine has answered
            await llm.resume_generation()
    first, last = statistics.median(spent[0]), statistics.median(spent[-1])
    print(
        f"  a refit with {statistics.mean(running):.0f} running calls: {last:.3f} ms; the first one"
        f" after the engine ran, with cold caches, {first:.3f} ms (medians of {number} pauses);"
        f" and {statistics.median(sent):.3f} ms in which vLLM sends the label"
    )


async def share(llm: Any, follower: Elsewhere | Here, seconds: int) -> None:
    """Our share of the loop's CPU time, and of the engine's, with a refit a second."""
    profile, me = cProfile.Profile(), psutil.Process()
    async with Load(llm, follower) as load:
        load.tokens, before = 0, cpu_seconds(me)
        profile.enable()
        for _ in range(seconds):
            await asyncio.sleep(1)
            await llm.pause_generation(mode="keep", clear_cache=False)
            follower.refit()
            await llm.resume_generation()
        profile.disable()
        used = cpu_seconds(me) - before
    ours, total = by_function(profile)
    spent = sum(ours.values())
    print(f"  {load.tokens / seconds:.0f} tokens a second, profiled for {seconds} s; functions:")
    for name, own in sorted(ours.items(), key=lambda item: -item[1])[:8]:
        print(f"  {1e3 * own / seconds:10.3f} ms/s  {name}")
    print(
        f"  our share of the loop's CPU time: {100 * spent / total:.2f} %, "
        f"of all of the engine's: {100 * spent / used:.2f} %"
    )


def by_function(profile: cProfile.Profile) -> tuple[dict[str, float], float]:
    """Seconds in each of our functions, with what they call of the interpreter's, and in all."""
    ours: dict[str, float] = {}
    total = 0.0
    stats: dict[Any, Any] = vars(pstats.Stats(profile))["stats"]
    for (file, _, name), (_, _, own, _, callers) in stats.items():
        if file == "~" and "poll" in name:
            continue  # it waits in there
        total += own
        if is_ours(file):
            ours[name] = ours.get(name, 0.0) + own
        elif file == "~" or file.endswith("contextlib.py"):
            for (caller, _, _), (_, _, own_for_caller, _) in callers.items():
                if is_ours(caller):
                    ours[f"{name} for ours"] = ours.get(f"{name} for ours", 0.0) + own_for_caller
    return ours, total


def is_ours(file: str) -> bool:
    return Path(file).parent.name in ("rl_staleness", "integrations")


def cpu_seconds(me: psutil.Process) -> float:
    """CPU time of this process, which has the front end, and of the engine's others."""
    processes = [me, *me.children(recursive=True)]
    return sum(sum(process.cpu_times()[:2]) for process in processes)


async def run(options: argparse.Namespace, folder: Path) -> None:
    llm = tiny_model.start_engine(tiny_model.Policy(folder / "model").folder)
    try:
        for what in ("the callback in another process", "the callback on the engine's own loop"):
            print(f"{what} (targets: 0.2 ms, 0.5 %)")
            for measure in ("refits", "share"):
                engine = VllmEngine(llm)
                follower = Elsewhere(engine) if "another" in what else Here(engine, folder)
                if measure == "refits":
                    await refits(llm, engine, follower, options.refits)
                else:
                    await share(llm, follower, options.seconds)
                follower.close()
    finally:
        llm.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--refits", type=int, default=30, metavar="N")
    parser.add_argument("--seconds", type=int, default=10, metavar="S")
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(run(parser.parse_args(), Path(folder)))


if __name__ == "__main__":
    main()
