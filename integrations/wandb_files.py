"""The files of a W&B run: trace, report and picture as one artifact."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from typing import Any

from rl_staleness.artifacts import draw, pack
from rl_staleness.attachments import Job

__all__ = ["TYPE", "artifact_of", "attach"]

TYPE = "staleness-trace"

LOGGING_SECONDS = 5.0
"""Kept back for handing the artifact over once its files are drawn."""


def attach(wandb: Any, job: Job[Any]) -> dict[str, str]:
    """Log the files as an artifact of the run; blocks while the server is away, then raises.

    Returns:
        By name, why one is not in it.

    Raises:
        OSError: the trace cannot be read, or not be packed.
        Exception: whatever W&B raises.
    """
    run = job.run
    if run.disabled:
        return {}
    if getattr(run, "_is_finished", False):  # to find out below would take 30 s
        raise RuntimeError("the run is finished")
    folder = _folder(run)
    try:
        left = job.deadline - time.monotonic()
        artifact, lacking = artifact_of(
            wandb, run.id, job.trace, folder, seconds=max(left / 2, left - LOGGING_SECONDS)
        )
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    last = artifact.metadata["last_step"]
    run.log_artifact(artifact, aliases=["latest", "final" if job.final else f"step-{last}"])
    return lacking


def artifact_of(
    wandb: Any, run_id: str, trace: str, folder: str, *, seconds: float
) -> tuple[Any, dict[str, str]]:
    """Make the files in the folder and the artifact of them.

    Args:
        seconds: for drawing.

    Returns:
        The artifact; by name, why a file is not in it.
    """
    packed = pack(trace, folder)
    lacking = draw(packed.path, folder, seconds=seconds)
    name = re.sub(r"[^A-Za-z0-9._-]", "-", f"staleness-trace-{run_id}")[:128]
    artifact = wandb.Artifact(name, type=TYPE, metadata=packed.metadata)
    for file in sorted(os.listdir(folder)):
        artifact.add_file(os.path.join(folder, file), name=file, policy="immutable")
    return artifact, lacking


def _folder(run: Any) -> str:
    """A new folder that lives as long as the run's files: `wandb sync` may read it much later."""
    try:
        return tempfile.mkdtemp(prefix="staleness-", dir=run.sync_dir)
    except OSError:
        return tempfile.mkdtemp(prefix="staleness-")
