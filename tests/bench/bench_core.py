"""What the hooks cost a step, and what recomputing a trace costs, as ratios in one run.

Targets: `group`, `on_publish` and `on_step` for 4,096 calls, a tenth of them cut, under 10 ms
together; recomputing a trace of a million calls takes no longer than `json.loads` of its lines, in
memory that does not grow with the file.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from rl_staleness import Call, StalenessCallback
from rl_staleness.engines import LiveCall

CALLS_A_STEP = 4096
CALLS_A_GROUP = 16


def live_calls(step: int, start: int, number: int) -> Iterator[LiveCall]:
    """Ended calls as an engine leaves them; every tenth was cut by the refit of this step."""
    for index in range(start, start + number):
        cut = index % 10 == 0
        yield LiveCall(
            call=f"request-{step}-{index}/abcdef",
            engine="engine",
            version=max(step - 1 - cut, 0),
            after=max(step - 1 - cut, 0),
            tokens=300 + index % 100,
            until=max(step - 1, 0),
            ended=True,
        )


def long_runs(folder: Path, steps: int, *, spans: bool) -> Path:
    """A trace whose calls each go on over three refits, 256 of them a step."""
    path = folder / f"long-{spans}.jsonl"
    with StalenessCallback(trace=path, sinks=[]) as staleness:
        for step in range(steps):
            born = step - 3
            names = [f"request-{born}-{index}/abcdef" for index in range(256 if born >= 0 else 0)]
            said = tuple((100 * part, 100 * part + 100, born + part) for part in range(4))
            for start in range(0, len(names), CALLS_A_GROUP):
                calls = [
                    Call(
                        call=name,
                        engine="engine",
                        version=born,
                        tokens=400,
                        after=born,
                        until=step,
                        spans=said if spans else None,
                    )
                    for name in names[start : start + CALLS_A_GROUP]
                ]
                staleness.on_publish(f"{step}-{start}", calls=calls)
            staleness.on_step([f"{step}-{start}" for start in range(0, len(names), CALLS_A_GROUP)])
            running = {
                f"request-{of}-{index}/abcdef": 100 * (step + 1 - of)
                for of in range(max(born + 1, 0), step + 1)
                for index in range(256)
            }
            staleness.on_refit_paused(cuts={"engine": running})
            staleness.on_refit_done()
    return path


def one_step(staleness: StalenessCallback, step: int) -> float:
    """A step of 256 groups; seconds that our hooks took."""
    prepared = [
        list(live_calls(step, start, CALLS_A_GROUP))
        for start in range(0, CALLS_A_STEP, CALLS_A_GROUP)
    ]
    began = time.perf_counter()
    groups = []
    for calls in prepared:
        with staleness.group() as group:
            group.capture.calls.extend(calls)
        staleness.on_publish(group)
        groups.append(group)
    numbers = staleness.on_step(groups)
    seconds = time.perf_counter() - began
    assert numbers is not None and numbers.coverage == 1 and numbers.violations == 0, numbers
    running = {
        call.call: 100 for call in live_calls(step + 1, 0, CALLS_A_STEP) if call.after != call.until
    }
    staleness.on_refit_paused(cuts={"engine": running})
    staleness.on_refit_done()
    return seconds


def hooks(folder: Path) -> None:
    """Print what the hooks of one step cost."""
    with StalenessCallback(trace=folder / "hooks.jsonl", sinks=[]) as staleness:
        one_step(staleness, 1)
        seconds = [one_step(staleness, step) for step in range(2, 40)]
    print(
        f"group + on_publish + on_step, {CALLS_A_STEP} calls in {CALLS_A_STEP // CALLS_A_GROUP}"
        f" groups, a tenth cut: median {statistics.median(seconds) * 1e3:.2f} ms,"
        f" worst {max(seconds) * 1e3:.2f} ms (target: under 10 ms)"
    )


def trace_of(folder: Path, calls: int, *, late_masks: bool) -> Path:
    """A trace with about this many calls."""
    path = folder / f"trace-{calls}-{late_masks}.jsonl"
    with StalenessCallback(trace=path, sinks=[], late_masks=late_masks) as staleness:
        for step in range(1, calls // CALLS_A_STEP + 1):
            one_step(staleness, step)
    return path


def seconds_of(code: str, path: Path) -> tuple[float, float]:
    """Run code over a file in a process of its own: seconds, and MiB at the peak."""
    measured = (
        "import resource, sys, time; path = sys.argv[1]\n"
        f"{code}\n"
        "began = time.perf_counter(); work(path); seconds = time.perf_counter() - began\n"
        "print(seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)"
    )
    output = subprocess.run(
        [sys.executable, "-c", measured, str(path)], capture_output=True, text=True, check=True
    ).stdout.split()
    return float(output[0]), float(output[1])


LOADS = """
import json
def work(path):
    with open(path, "rb") as file:
        for line in file:
            json.loads(line)
"""

STEPS = """
import os
from rl_staleness.cli import main
sys.stdout, shown = open(os.devnull, "w"), sys.stdout
def work(path):
    assert main(["steps", "--json", path]) == 0
    sys.stdout = shown
"""


def recompute(folder: Path, calls: int, *, late_masks: bool) -> None:
    """Print what recomputing costs beside reading the JSON alone."""
    kind = "every call one by one" if late_masks else "a tenth of the calls one by one"
    compare(trace_of(folder, calls, late_masks=late_masks), f"{calls:,} calls ({kind}")


def compare(path: Path, what: str) -> None:
    """Print how long recomputing a trace takes beside reading its JSON alone."""
    pairs = [(seconds_of(STEPS, path), seconds_of(LOADS, path)) for _ in range(3)]
    ours = min(pair[0][0] for pair in pairs)
    loads = min(pair[1][0] for pair in pairs)
    print(
        f"`steps --json` of {what}, {path.stat().st_size / 2**20:.0f} MiB):"
        f" {ours:.2f} s, json.loads {loads:.2f} s, ratio {ours / loads:.2f} (target: at most 1),"
        f" peak {pairs[0][0][1]:.0f} MiB"
    )
    path.unlink()


def main() -> None:
    """Run all of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=1_000_000)
    calls = parser.parse_args().calls
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        hooks(folder)
        for late_masks in (False, True):
            recompute(folder, calls // 10, late_masks=late_masks)
            recompute(folder, calls, late_masks=late_masks)
        for spans in (False, True):
            said = "with the engine's spans" if spans else "without spans"
            path = long_runs(folder, calls // 2560, spans=spans)
            compare(path, f"{calls // 10:,} calls (each over three refits, {said}")


if __name__ == "__main__":
    main()
