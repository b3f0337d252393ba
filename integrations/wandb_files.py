"""The files of a W&B run: trace, report and picture as one artifact."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from typing import Any

from rl_staleness.artifacts import PACKED, PICTURE, REPORT, draw, pack_aside
from rl_staleness.attachments import Job, Limits

__all__ = ["TYPE", "attach"]

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
        packed = pack_aside(job.trace, folder, **job.limits)
        left = job.limits["seconds"]
        limits: Limits = {**job.limits, "seconds": max(left / 2, left - LOGGING_SECONDS)}
        lacking = draw(packed.path, folder, **limits)
        name = re.sub(r"[^A-Za-z0-9._-]", "-", f"staleness-trace-{run.id}")[:128]
        artifact = wandb.Artifact(name, type=TYPE, metadata=packed.metadata)
        for file in (PACKED, PICTURE, REPORT):
            if os.path.isfile(path := os.path.join(folder, file)):
                artifact.add_file(path, name=file, policy="immutable")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    also = "final" if job.final else f"step-{packed.last_step}"
    run.log_artifact(artifact, aliases=["latest", also])
    return lacking


def _folder(run: Any) -> str:
    """A new folder that lives as long as the run's files: `wandb sync` may read it much later."""
    try:
        return tempfile.mkdtemp(prefix="staleness-", dir=run.sync_dir)
    except OSError:
        return tempfile.mkdtemp(prefix="staleness-")
