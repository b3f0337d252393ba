"""The files of an MLflow run: its trace in a folder, report and picture at the root.

MLflow's compare page shows files of the same name at the roots of the runs, and nothing else.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress

from rl_staleness.artifacts import PACKED, PICTURE, REPORT, draw, pack_aside
from rl_staleness.attachments import Job
from rl_staleness.integrations.mlflow_points import Run, client_of, one_line

__all__ = ["FOLDER", "attach", "is_attached"]

FOLDER = "staleness"
"""Where the trace is, among the run's artifacts."""

DIGEST = "staleness.trace_sha256"
"""The tag that says of which lines the attached files are made."""


def attach(job: Job[Run]) -> dict[str, str]:
    """Make and upload the files; each fails alone, the trace goes first.

    Returns:
        By name, why one is not attached.
    """
    run = job.run
    with tempfile.TemporaryDirectory(prefix="rl_staleness-") as folder:
        try:
            packed = pack_aside(job.trace, folder, **job.limits)
            client_of(run.uri).log_artifact(run.id, packed.path, FOLDER)
        except Exception as error:  # noqa: BLE001  # of whatever store it is; it is said at the end
            return {", ".join((PACKED, REPORT, PICTURE)): one_line(error)}
        lacking = draw(packed.path, folder, **job.limits)
        for name in (REPORT, PICTURE):
            if name not in lacking:
                lacking |= _upload(run, os.path.join(folder, name), None)
        if not lacking:
            with suppress(Exception):  # it is there to spare work, no more
                client_of(run.uri).set_tag(run.id, DIGEST, packed.sha256)
    return lacking


def is_attached(run: Run, sha256: str) -> bool:
    """Whether the run has all files, made of these lines.

    Raises:
        MlflowException: the run cannot be asked.
    """
    client = client_of(run.uri)
    if client.get_run(run.id).data.tags.get(DIGEST) != sha256:
        return False
    files = [*client.list_artifacts(run.id), *client.list_artifacts(run.id, FOLDER)]
    return {REPORT, PICTURE, f"{FOLDER}/{PACKED}"} <= {file.path for file in files}


def _upload(run: Run, path: str, folder: str | None) -> dict[str, str]:
    try:
        client_of(run.uri).log_artifact(run.id, path, folder)
    except Exception as error:  # noqa: BLE001  # of whatever store it is
        return {os.path.basename(path): one_line(error)}
    return {}
