"""TRL's asynchronous GRPO against a vLLM server, and how off-policy every step of it was.

    make demo-trl                        # on a CPU, a few minutes
    make demo-trl ARGS="--lora"          # adapters in place of whole weights; needs peft

What a user of TRL adds is one line, marked below, and ``--middleware`` on the command line of the
server. What makes TRL run on a CPU is in `trl_on_cpu`. At the end stands, step by step, TRL's own
number beside ours, and which versions the tokens were sampled from.
"""

# TRL, transformers and datasets are typed in part:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false
# pyright: reportMissingTypeStubs=false

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

try:
    import trl_on_cpu as cpu
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback
    from trl.experimental.async_grpo.async_grpo_config import AsyncGRPOConfig
    from trl.experimental.async_grpo.async_grpo_trainer import AsyncGRPOTrainer

    from rl_staleness.integrations.trl import StalenessCallback
    from rl_staleness.integrations.vllm_http import MIDDLEWARE
except ModuleNotFoundError as missing:
    sys.exit(f"{missing.name} is not installed: `make demo-trl` makes .venv, which has it")

HEAD = "step  reward      kl  TRL's number  batch age = in flight + in queue  p95  coverage  "


def even_digits(completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
    """The reward: how many letters of a completion are even digits."""
    texts = [messages[-1]["content"] for messages in completions]
    return [sum(letter in "02468" for letter in text) / (len(text) + 1) for text in texts]


def sums() -> Dataset:
    """Prompts."""
    texts = [f"{a}+{b}" for a in range(10) for b in range(10)]
    return Dataset.from_dict({"prompt": [[{"role": "user", "content": text}] for text in texts]})


def adapter() -> Any:
    """What is trained with ``--lora``."""
    return import_module("peft").LoraConfig(
        r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"
    )


def train(
    model: Path,
    url: str,
    output: Path,
    staleness: StalenessCallback,
    *,
    lora: bool,
    more: Sequence[TrainerCallback] = (),
    **options: Any,
) -> AsyncGRPOTrainer:
    """Train, as anybody would, but for the lines that are for the CPU."""
    settings: dict[str, Any] = {
        "output_dir": str(output),
        "vllm_server_base_url": url,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": cpu.LONGEST_COMPLETION,
        "max_inflight_tasks": 16,
        "token_budget": 0,
        "learning_rate": 2e-3,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        **cpu.CONFIG,
        **options,
    }
    trainer = AsyncGRPOTrainer(
        model=str(model),
        reward_funcs=even_digits,
        args=AsyncGRPOConfig(**settings),
        train_dataset=sums(),
        peft_config=adapter() if lora else None,
        callbacks=[staleness, cpu.BigModel(), *more],  # staleness: all that is added
    )
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(cpu.StopSoon(trainer))
    trainer.train()
    return trainer


def show(log: list[dict[str, Any]], steps: list[dict[str, Any]]) -> None:
    """A row a step: TRL's record, and which versions its tokens were sampled from."""
    print(HEAD + "tokens by version")
    for record, step in zip(log, steps, strict=True):
        ours = {key: record.get(f"staleness/{key}") for key in step}
        versions = " ".join(f"v{v}:{n}" for v, n in step["tokens_by_version"].items())
        print(
            f"{record['step']:4d}  {record['reward']:.4f}  {record['kl']:6.4f}"
            f"  {record['sample/staleness_mean']:12.3f}  {ours['batch_age']:9.3f}"
            f"  {ours['age_in_flight']:11.3f}  {ours['age_in_queue']:9.3f}"
            f"  {ours['age_p95']:3.0f}  {ours['coverage']:8.3f}  {versions}"
        )


def recomputed(trace: str) -> list[dict[str, Any]]:
    """The steps as the trace alone gives them."""
    command = [sys.executable, "-m", "rl_staleness.cli", "steps", "--json", trace]
    lines = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout.splitlines()
    return [json.loads(line) for line in lines]


def agree(log: list[dict[str, Any]], steps: list[dict[str, Any]]) -> bool:
    """Whether TRL's log record has the numbers of the trace, and TRL's count of the tokens."""
    return len(log) == len(steps) and all(
        record["batch/trained_tokens_per_step"] == step["tokens"]
        and all(
            value == step[key.removeprefix("staleness/")]
            for key, value in record.items()
            if key.startswith("staleness/")
        )
        for record, step in zip(log, steps, strict=True)
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="TRL's asynchronous GRPO on a CPU, measured.")
    parser.add_argument("--steps", type=int, default=12, metavar="N")
    parser.add_argument("--lora", action="store_true", help="sync adapters; needs peft")
    parser.add_argument("--sync-every", type=int, default=1, metavar="STEPS")
    parser.add_argument("--accumulate", type=int, default=1, metavar="BATCHES")
    parser.add_argument("--max-staleness", type=int, default=3, metavar="SYNCS")
    parser.add_argument("--no-middleware", action="store_true", help="see what that costs")
    parser.add_argument("--output", type=Path, default=Path("demo/trl"), metavar="FOLDER")
    options = parser.parse_args()
    if min(options.steps, options.sync_every, options.accumulate) < 1:
        parser.error("there must be at least one of everything")
    if not 0 <= options.max_staleness <= cpu.MAX_STALENESS:
        parser.error(f"--max-staleness: from 0 to {cpu.MAX_STALENESS}")
    if options.lora and find_spec("peft") is None:
        parser.error("--lora: it needs peft: pip install peft")
    return options


def main() -> int:
    options = parse()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    options.output.mkdir(parents=True, exist_ok=True)
    cpu.use_cpu()
    with tempfile.TemporaryDirectory(prefix="trl-") as folder:
        model = cpu.write_model(Path(folder) / "model")
        print("starting a vLLM server on the CPU: a minute or less ...", flush=True)
        middleware = None if options.no_middleware else MIDDLEWARE
        log = Path(folder) / "server.log"
        staleness = StalenessCallback(trace=options.output / "rollout_trace.jsonl")
        with cpu.Server(model, lora=options.lora, middleware=middleware, log=log) as server:
            print("training: TRL starts a process for the rollouts ...", flush=True)
            trainer = train(
                model,
                server.url,
                options.output,
                staleness,
                lora=options.lora,
                max_steps=options.steps,
                weight_sync_steps=options.sync_every,
                gradient_accumulation_steps=options.accumulate,
                max_staleness=options.max_staleness,
            )
    trace = staleness.trace
    assert trace is not None
    records = [record for record in trainer.state.log_history if "staleness/tokens" in record]
    steps = recomputed(trace)
    show(records, steps)
    same = agree(records, steps)
    verdict = "TRL's log has the same, to the last digit" if same else "TRL'S LOG DIFFERS"
    print(f"`rl-staleness steps {trace}` recomputes {len(steps)} steps from the trace: {verdict}")
    print(f"more of it: .venv/bin/rl-staleness report {trace}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
