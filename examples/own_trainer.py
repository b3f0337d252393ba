"""A loop of one's own around one AsyncLLM, with every hook where it belongs.

    python examples/own_trainer.py

Four lines measure: the `with`, the group around the requests, `on_publish`, `on_step`; and the
block around the weights. Everything else is an asynchronous trainer as it was before.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import asyncio
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

try:
    from tiny_model import Policy, Sample, load_weights, new_prompt, sample, start_engine

    from rl_staleness import Group, StalenessCallback

    if find_spec("vllm") is None:
        raise ModuleNotFoundError(name="vllm")
except ModuleNotFoundError as missing:
    sys.exit(f"{missing.name} is not installed: `make demo` makes .venv, which has it")

NUM_STEPS = 20
GROUPS_PER_STEP = 4
STEPS_AHEAD = 2
"""Groups for so many later steps may be under way or waiting."""


async def main(folder: Path) -> None:
    from rl_staleness.integrations.vllm import VllmEngine

    policy = Policy(folder)
    llm = start_engine(folder)
    buffer: asyncio.Queue[tuple[Group, list[Sample]]] = asyncio.Queue()
    room = asyncio.Semaphore(GROUPS_PER_STEP * (STEPS_AHEAD + 1))

    # The run starts; without `trace=` its evidence goes to ./rollout_trace.jsonl.
    with StalenessCallback(engines=[VllmEngine(llm)]) as staleness:

        async def roll_out() -> None:
            while True:
                await room.acquire()
                # Requests that are submitted in here are calls of this group.
                with staleness.group() as group:
                    samples = await sample(llm, new_prompt(), num_samples=8)
                # Fires when the group is finished, before a trainer can take it.
                staleness.on_publish(group)
                buffer.put_nowait((group, samples))

        rollouts = [asyncio.create_task(roll_out()) for _ in range(2 * GROUPS_PER_STEP)]
        for step in range(1, NUM_STEPS + 1):
            batch = [await buffer.get() for _ in range(GROUPS_PER_STEP)]
            reward, _ = await asyncio.to_thread(policy.update, [samples for _, samples in batch])
            # Fires after the step's last update: the policy is one version further now.
            numbers = staleness.on_step([group for group, _ in batch])
            if numbers is not None:
                print(
                    f"step {step}: reward {reward:.3f}, batch age {numbers.batch_age:.3f}, "
                    f"coverage {numbers.coverage:.0%}, tokens {numbers.tokens_by_version}"
                )
            policy.save()
            await llm.pause_generation(mode="keep")
            # Fires after the pause; at its end, after the weights and before the resume.
            async with staleness.refit(kv="recomputed"):
                await load_weights(llm, folder)
            await llm.resume_generation()
            for _ in batch:
                room.release()
        for rollout in rollouts:
            rollout.cancel()
        await asyncio.gather(*rollouts, return_exceptions=True)
    llm.shutdown()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="own-trainer-") as name:
        asyncio.run(main(Path(name)))
    sys.unraisablehook = lambda _: None  # vLLM's finalizer comes too late and complains
