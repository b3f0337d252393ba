"""Asynchronous GRPO on two vLLM engines, and how off-policy each of its batches is.

    make demo                                   make demo ARGS="--steps 40 --max-staleness 2"

The engines are Ray actors on the CPU. They generate while the trainer updates the policy, and get
new weights in the middle of their calls: pause(mode="keep"), load, resume. A row of the table is
one training step, and a point of the charts in the MLflow and W&B runs of tracking.py. The lines
that measure are marked `# staleness`.
"""

# Ray is typed in part:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

try:
    import tiny_model  # isort: skip  # first: it sets variables that Ray reads
    import msgspec
    import ray
    from tiny_model import Policy, Sample, new_prompt
    from tracking import ActiveRun, active_runs

    from rl_staleness import Call, StalenessCallback, StepStaleness, captured
    from rl_staleness.integrations.ray import RayEngine

    if find_spec("vllm") is None:
        raise ModuleNotFoundError(name="vllm")
except ModuleNotFoundError as missing:
    sys.exit(f"{missing.name} is not installed: `make demo` makes an environment and runs this")


class Generator:
    """A Ray actor with one vLLM engine."""

    def __init__(self, name: str, folder: Path) -> None:
        from rl_staleness.integrations.vllm import VllmEngine

        self.llm = tiny_model.start_engine(folder)
        self.staleness = VllmEngine(self.llm, name=name)  # staleness

    async def rollout(
        self, prompt: list[int], num_samples: int
    ) -> tuple[list[Sample], Sequence[Call]]:
        with captured() as capture:  # staleness: what is requested in here
            samples = await tiny_model.sample(self.llm, prompt, num_samples=num_samples)
        return samples, capture.records()

    async def pause(self) -> None:
        await self.llm.pause_generation(mode="keep")

    async def load(self, folder: Path) -> None:
        await tiny_model.load_weights(self.llm, folder)

    async def resume(self) -> None:
        await self.llm.resume_generation()

    async def close(self) -> None:
        self.llm.shutdown()


@dataclass(frozen=True, slots=True)
class Group:
    """The samples of one prompt, ready for training."""

    name: str
    version: int
    """Of the weights that the engines had when it was begun: no token is older."""
    samples: list[Sample]


@dataclass
class AsyncGRPOTrainer:
    """Trains on groups while engines make others."""

    policy: Policy
    engines: dict[str, Any]
    """Handles of `Generator` actors."""
    callbacks: Sequence[StalenessCallback]
    max_staleness: int
    """Updates since a group was begun, when a step takes it; 0 is synchronous training."""
    refit_every: int = 1
    """Steps from one refit to the next."""
    updates_per_step: int = 1
    """Equal parts of a step's groups, with an update each."""
    groups_per_step: int = 8
    samples_per_group: int = 8
    runs: Sequence[ActiveRun] = ()
    """Where the trainer's own numbers go."""

    def __post_init__(self) -> None:
        self.version = self.version_of_engines = 0
        self.num_begun = self.num_dropped = 0
        self.rollouts: set[asyncio.Task[None]] = set()
        self.buffer: deque[Group] = deque()
        self.measured: list[StepStaleness] = []
        for callback in self.callbacks:
            for name, engine in self.engines.items():
                callback.attach(RayEngine(engine, name=name))  # staleness

    async def train(self, steps: int) -> None:
        for callback in self.callbacks:
            await callback.astart()  # staleness: before the first rollout
        size = self.groups_per_step // self.updates_per_step
        try:
            for step in range(1, steps + 1):
                self.begin_rollouts()
                groups = await self.take_groups()
                batches = [groups[start : start + size] for start in range(0, len(groups), size)]
                results: list[tuple[float, float]] = []
                for batch in batches:
                    samples = [group.samples for group in batch]
                    results.append(await asyncio.to_thread(self.policy.update, samples))
                self.version += len(batches)
                numbers: StepStaleness | None = None
                for callback in self.callbacks:
                    names = [[group.name for group in batch] for batch in batches]
                    numbers = callback.on_step(batches=names)  # staleness
                self.report(step, results, numbers)
                if step % self.refit_every == 0:
                    await self.refit()
        finally:
            for rollout in self.rollouts:
                rollout.cancel()

    def report(
        self, step: int, results: list[tuple[float, float]], numbers: StepStaleness | None
    ) -> None:
        reward, distance = (statistics.mean(values) for values in zip(*results, strict=True))
        for run in self.runs:
            run.log(step, {"train/reward": reward, "train/ratio_distance": distance})
        if numbers is not None:
            self.measured.append(numbers)
        print_row(step, reward, distance, numbers)

    def begin_rollouts(self) -> None:
        """Ask for the groups that steps can take in time, given the weights of the engines."""
        steps = (self.version_of_engines + self.max_staleness) // self.updates_per_step + 1
        while self.num_begun - self.num_dropped < steps * self.groups_per_step:
            self.num_begun += 1
            rollout = self.rollout(f"group-{self.num_begun}", self.version_of_engines)
            self.rollouts.add(asyncio.create_task(rollout))

    async def rollout(self, name: str, version: int) -> None:
        engine = random.choice(list(self.engines.values()))
        samples, calls = await engine.rollout.remote(new_prompt(), self.samples_per_group)
        for callback in self.callbacks:
            callback.on_publish(name, calls=calls)  # staleness
        self.buffer.append(Group(name, version, samples))

    async def take_groups(self) -> list[Group]:
        """Wait for the groups of a step, in the order in which they were finished."""
        groups: list[Group] = []
        while len(groups) < self.groups_per_step:
            while not self.buffer:
                finished, self.rollouts = await asyncio.wait(
                    self.rollouts, return_when=asyncio.FIRST_COMPLETED
                )
                for rollout in finished:
                    rollout.result()  # raises what it raised
            group = self.buffer.popleft()
            if self.version - group.version <= self.max_staleness:
                groups.append(group)
                continue
            for callback in self.callbacks:
                callback.on_drop(group.name, reason="too old")  # staleness
            self.num_dropped += 1
            self.begin_rollouts()
        return groups

    async def refit(self) -> None:
        """Move the weights into one engine after the other; the others go on generating."""
        self.policy.save()
        for name, engine in self.engines.items():
            await engine.pause.remote()
            for callback in self.callbacks:
                await callback.aon_refit_paused(engines=[name], kv="recomputed")  # staleness
            await engine.load.remote(self.policy.folder)
            for callback in self.callbacks:
                await callback.aon_refit_done(engines=[name])  # staleness
            await engine.resume.remote()
        self.version_of_engines = self.version


def print_row(step: int, reward: float, distance: float, numbers: StepStaleness | None) -> None:
    if step == 1:
        titles = "reward  |ratio-1|  batch age = in flight + in queue  p95  coverage"
        print(f"step  {titles}  tokens by version")
    row = f"{step:4}  {reward:6.3f}  {distance:9.5f}  "
    if numbers is not None:
        row += f"{numbers.batch_age:9.3f}   {numbers.age_in_flight:9.3f}   "
        row += f"{numbers.age_in_queue:8.3f}  {numbers.age_p95:3}  {numbers.coverage:8.3f}  "
        row += " ".join(f"v{version}:{n}" for version, n in numbers.tokens_by_version.items())
    print(row, flush=True)


async def run(
    options: argparse.Namespace,
    staleness: StalenessCallback,
    runs: Sequence[ActiveRun],
    folder: Path,
) -> list[StepStaleness]:
    """Start Ray and the engines, train, and leave none of their processes and files behind."""
    os.environ["TMPDIR"] = str(folder)  # for whatever the actors leave there
    ray.init(
        num_cpus=1,
        include_dashboard=False,
        logging_level=logging.ERROR,
        object_store_memory=100 * 2**20,
        _temp_dir=str(folder / "ray"),
    )
    policy = Policy(folder / "model")
    actor: Any = ray.remote(num_cpus=0)(Generator)
    names = [f"engine-{number}" for number in range(options.engines)]
    engines = {name: actor.remote(name, policy.folder) for name in names}
    try:
        await asyncio.gather(*(engine.__ray_ready__.remote() for engine in engines.values()))
        with staleness:
            trainer = AsyncGRPOTrainer(
                policy,
                engines,
                callbacks=[staleness],
                max_staleness=options.max_staleness,
                refit_every=options.refit_every,
                updates_per_step=options.updates_per_step,
                runs=runs,
            )
            await trainer.train(options.steps)
        return trainer.measured
    finally:
        closed = [engine.close.remote() for engine in engines.values()]
        await asyncio.gather(*closed, return_exceptions=True)
        ray.shutdown()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Asynchronous GRPO, and how off-policy it is.")
    parser.add_argument("--steps", type=int, default=30, metavar="N")
    parser.add_argument("--engines", type=int, default=2, metavar="N")
    parser.add_argument("--max-staleness", type=int, default=4, metavar="UPDATES")
    parser.add_argument("--refit-every", type=int, default=1, metavar="STEPS")
    parser.add_argument("--updates-per-step", type=int, default=1, metavar="N")
    parser.add_argument("--sync", action="store_true", help="generate, train, refit, by turns")
    parser.add_argument("--output", type=Path, default="demo", metavar="FOLDER")
    options = parser.parse_args()
    if min(options.steps, options.engines, options.refit_every, options.updates_per_step) < 1:
        parser.error("there must be at least one of everything")
    if 8 % options.updates_per_step:
        parser.error("--updates-per-step: must divide the 8 groups of a step")
    if options.sync:
        options.max_staleness = 0
    if options.sync and (options.refit_every, options.updates_per_step) != (1, 1):
        parser.error("--sync: has one update a step, and a refit after each")
    if options.max_staleness < (options.refit_every - 1) * options.updates_per_step:
        parser.error("--max-staleness: engines fall behind further between two refits")
    return options


def check(trace: str, online: list[StepStaleness], num_steps: int) -> bool:
    """Whether the trace alone gives the numbers that the callback gave."""
    command = [sys.executable, "-m", "rl_staleness.cli", "steps", "--json", trace]
    lines = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout.splitlines()
    offline = [msgspec.json.decode(line, type=StepStaleness) for line in lines]
    agree = online == offline and len(online) == num_steps
    verdict = "it agrees to the last digit" if agree else "IT DIFFERS"
    print(f"`rl-staleness steps {trace}` recomputes {len(offline)} steps from the trace: {verdict}")
    return agree


def draw(trace: str, report: Path) -> None:
    """Draw the trace, if what draws is installed."""
    command = [sys.executable, "-m", "rl_staleness.cli", "report", trace, "-o", str(report)]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    print(f"report: {report}" if done.returncode == 0 else done.stderr.strip())


def main() -> int:
    options = parse()
    kind = "sync" if options.sync else f"max-staleness-{options.max_staleness}"
    name = datetime.now().strftime(f"{kind}-%Y%m%d-%H%M%S")  # a run of its own, in the trace too
    options.output.mkdir(parents=True, exist_ok=True)
    print(f"starting Ray and {options.engines} vLLM engines on the CPU: a minute or less ...")
    with (
        active_runs(options.output.resolve(), name=kind, options=vars(options)) as runs,
        tempfile.TemporaryDirectory(prefix="async-grpo-") as folder,
    ):
        trace = options.output / "rollout_trace.jsonl"
        staleness = StalenessCallback(trace=trace, run=name)  # staleness: finds the active runs
        online = asyncio.run(run(options, staleness, runs, Path(folder)))
    written = staleness.trace or str(trace)  # another, if there was one already
    agree = check(written, online, options.steps)
    draw(written, Path(written).with_name("staleness_report.html"))
    for active in runs:
        print(active.how_to_open)
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
