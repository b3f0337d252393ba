"""NeMo RL's own launcher of the single controller, with batch age: for a machine with two GPUs.

    python3 examples/nemo_rl_gpu.py ~/RL                # a checkout of NeMo RL
    python3 examples/nemo_rl_gpu.py ~/RL --config ...   # the rest goes to NeMo RL's launcher

It needs what NeMo RL needs (uv, CUDA, its Python) and nothing else: rl_staleness is installed into
a folder of its own, which the actors find by PYTHONPATH. NeMo RL is not edited, and its launcher
does all the work; between making the controller and running it, the callback is attached.

Without further arguments it trains Qwen3-0.6B for eight steps with batches one version ahead, and
takes a few minutes. What to expect:

* ``rollout_trace.jsonl`` in the current folder; the table below comes from it.
* ``train/staleness/batch_age`` beside NeMo RL's own metrics of each step, wherever it logs.
* Step 1 has age 0. From step 2 on it is between 0 and 1: no token is more than one version old.
* ``violations`` is 0, and `rl-staleness doctor` finds nothing. A run with other numbers is a bug of
  rl_staleness: please send its trace, which holds counts and versions and no text.
* ``coverage`` is 1: calls that a refit cut are split at the token. They are linked by the task of
  Ray that generates them, or, with ``token_capture.enabled=true`` (NeMo RL at 00420a15), by Gym's
  capture. With Gym and without its capture they have bounds, ``age_lo`` to ``age_hi``.
* Generation pauses for each refit (``keep``: running calls stay) and goes on after it.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
LAUNCHER = "examples/run_grpo_single_controller.py"

SMALL = (
    "policy.model_name=Qwen/Qwen3-0.6B",
    "grpo.num_prompts_per_step=4",
    "grpo.num_generations_per_prompt=4",
    "grpo.max_num_steps=8",
    "policy.train_global_batch_size=16",
    "policy.train_micro_batch_size=1",
    "cluster.gpus_per_node=2",
    "logger.tensorboard_enabled=true",
    "logger.wandb_enabled=false",
    "logger.monitor_gpus=false",
    "checkpointing.enabled=false",
    "data_plane.enabled=true",
    "data_plane.impl=transfer_queue",
    "data_plane.backend=simple",
    "async_rl.sampler.name=in_order",
    "async_rl.sampler.max_lookahead_versions=1",
    "async_rl.min_groups_for_streaming_train=2",
    "async_rl.max_inflight_prompts=8",
    "async_rl.max_buffered_rollouts=8",
)
"""What NeMo RL's functional test of the single controller sets, and batches one version ahead."""


def start(checkout: Path, arguments: list[str]) -> int:
    """Install rl_staleness beside NeMo RL's environments, and run this file in them."""
    if not (checkout / LAUNCHER).is_file():
        print(f"{checkout}: no checkout of NeMo RL, it has no {LAUNCHER}", file=sys.stderr)
        return 2
    if shutil.which("uv") is None:
        print("uv: not found; NeMo RL's environments are made with it", file=sys.stderr)
        return 2
    python = ["uv", "run", "--project", str(checkout), "python"]
    asked = [*python, "-c", "import sys; print(sys.executable)"]
    found = subprocess.run(asked, cwd=checkout, check=True, capture_output=True, text=True)
    with tempfile.TemporaryDirectory(prefix="rl_staleness-") as folder:
        install = ["uv", "pip", "install", "--quiet", "--python", found.stdout.strip()]
        install += ["--target", folder, str(HERE.parents[1])]
        subprocess.run(install, cwd=checkout, check=True)
        paths = [folder, str(checkout), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        trace = Path.cwd() / "rollout_trace.jsonl"
        run = [*python, str(HERE), "--in", str(trace), *arguments]
        ran = subprocess.run(run, cwd=checkout, env=environment, check=False)
        for report in ("steps", "doctor") if trace.exists() else ():
            call = (
                f"from rl_staleness.cli import main; raise SystemExit(main({[report, str(trace)]}))"
            )
            subprocess.run([*python, "-c", call], cwd=checkout, env=environment, check=False)
    return ran.returncode


def launch(trace: str, arguments: list[str]) -> None:
    """NeMo RL's launcher, whose controller gets the callback before it runs."""
    from rl_staleness import StalenessCallback
    from rl_staleness.integrations.nemo_rl import attach_actor
    from rl_staleness.integrations.vllm import VllmEngine

    path = Path.cwd() / LAUNCHER
    spec = importlib.util.spec_from_file_location("launcher", path)
    assert spec is not None and spec.loader is not None
    launcher: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(launcher)
    original: Any = import_module("nemo_rl.algorithms.single_controller").SingleControllerActor
    make = partial(StalenessCallback, trace=trace, sinks=[])

    class Attached:
        """Made as the original is."""

        @staticmethod
        def remote(**options: Any) -> Any:
            controller = original.remote(**options)
            attach_actor(controller, make, engine=VllmEngine)
            return controller

    launcher.SingleControllerActor = Attached
    sys.argv = [str(path), *(arguments or SMALL)]
    launcher.main()


def main() -> int:
    arguments = sys.argv[1:]
    if arguments[:1] == ["--in"]:
        launch(arguments[1], arguments[2:])
        return 0
    if not arguments or arguments[0].startswith("-"):
        print("usage: nemo_rl_gpu.py NEMO_RL_CHECKOUT [ARGUMENTS OF ITS LAUNCHER]", file=sys.stderr)
        return 2
    return start(Path(arguments[0]).expanduser().resolve(), arguments[1:])


if __name__ == "__main__":
    sys.exit(main())
