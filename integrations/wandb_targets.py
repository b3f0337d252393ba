"""A W&B run that a command adds to, on the server or on this disk, and what it has already."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any, NamedTuple

from rl_staleness.destinations import DestinationError
from rl_staleness.integrations.wandb_offline import OfflineRun, folders_of, read_run
from rl_staleness.integrations.wandb_rows import AXIS
from rl_staleness.replay import Origin

__all__ = ["NOTED", "Target", "existing", "made_for", "parts_of"]

NOTED = "rl_staleness_replay"
"""The key in a run's config under which commands note what they did."""


class Target(NamedTuple):
    """A run, and what it has already."""

    name: str
    """For people."""
    init: dict[str, Any]
    """Arguments of ``wandb.init`` that go on with it."""
    steps: Counter[int]
    """How often it has a row of each step."""
    attached: frozenset[str]
    """Digests of the traces that are attached, as far as it is known."""
    exit_code: int
    next_row: int | None = None
    """Value of the counter for the next row, where W&B does not know it."""
    warning: str | None = None


def existing(wandb: Any, run: str) -> Target:
    """The run of this folder, or of ENTITY/PROJECT/RUN.

    Raises:
        DestinationError: it still runs, or its file is empty.
        wandb.errors.Error: it cannot be asked for.
    """
    if os.path.isdir(run):
        return _on_disk(parts_of(run), name=run, exit_code=0)
    there = wandb.Api().run(run)
    if there.state == "running":
        raise DestinationError(f"W&B run {run} is still running; its own sink attaches the trace")
    return _on_server(there, run, exit_code=int(there.state != "finished"))


def made_for(wandb: Any, origin: Origin) -> Target:
    """The run that is made for a trace, now or by an earlier replay, where W&B puts runs.

    Raises:
        wandb.errors.Error: the server cannot be asked.
    """
    if wandb.setup().settings.mode in ("offline", "dryrun"):
        return _made_on_disk(wandb, origin)
    return _made_on_server(wandb, origin)


def parts_of(folder: str) -> list[OfflineRun]:
    """A run's folder, and those that were added to it.

    Raises:
        DestinationError: its file is empty.
    """
    run = read_run(folder)
    if not run.id:
        raise DestinationError(f"{folder}: the W&B run's file is empty")
    beside = folders_of(run.id, run.folder.absolute().parent)
    own = run.folder.resolve()
    others = [read_run(other) for other in beside if other.resolve() != own]
    return [run, *(other for other in others if other.id)]


def _made_on_disk(wandb: Any, origin: Origin) -> Target:
    """The run on this disk that is made for this trace, now or by an earlier replay."""
    run_id = _id_of(origin)
    folders = folders_of(run_id, wandb.setup().settings.wandb_dir)
    parts = [read_run(folder) for folder in folders]
    empty = ", ".join(str(part.folder) for part in parts if not part.id)
    warning = f"remove {empty}: it is empty, and `wandb sync` stumbles over it" if empty else None
    if parts := [part for part in parts if part.id]:
        target = _on_disk(parts, name=run_id, exit_code=_exit_code(origin))
        return target._replace(warning=warning)
    init = {"id": run_id, "mode": "offline", "name": origin.title}
    return Target(run_id, init, Counter(), frozenset(), _exit_code(origin), 0, warning)


def _made_on_server(wandb: Any, origin: Origin) -> Target:
    """The run on the server that is made for this trace, now or by an earlier replay."""
    api, settings = wandb.Api(), wandb.setup().settings
    entity = settings.entity or api.default_entity
    project, run_id = settings.project or "uncategorized", _id_of(origin)
    path = f"{entity}/{project}/{run_id}"
    try:
        there = api.run(path)
    except wandb.errors.CommError as error:
        if "Could not find run" not in str(error):
            raise
        init = {"entity": entity, "project": project, "id": run_id, "name": origin.title}
        return Target(path, init, Counter(), frozenset(), _exit_code(origin))
    return _on_server(there, path, exit_code=_exit_code(origin))


def _on_server(there: Any, path: str, *, exit_code: int) -> Target:
    noted: Any = dict(there.config).get(NOTED) or {}
    init = {"entity": there.entity, "project": there.project, "id": there.id, "resume": "must"}
    return Target(
        path,
        init,
        Counter(row[AXIS] for row in there.scan_history() if AXIS in row),
        frozenset(noted.get("attached") or ()),
        exit_code,
    )


def _on_disk(parts: list[OfflineRun], *, name: str, exit_code: int) -> Target:
    rows = [row for part in parts for row in part.rows]
    parent = parts[0].folder.absolute().parent
    return Target(
        name,
        {
            "id": parts[0].id,
            "mode": "offline",
            "resume": "allow",
            "project": parts[0].project or None,
            "entity": parts[0].entity or None,
            "dir": os.fspath(parent.parent if parent.name == "wandb" else parent),
        },
        Counter(row[AXIS] for row in rows if AXIS in row),
        frozenset(a["sha256"] for part in parts for a in part.artifacts if len(a) == 4),
        exit_code,
        next_row=max((row.get("_step", 0) + 1 for row in rows), default=0),
    )


def _id_of(origin: Origin) -> str:
    return f"staleness-{origin.id}"


def _exit_code(origin: Origin) -> int:
    return int(origin.status != "finished")
