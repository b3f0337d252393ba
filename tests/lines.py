"""Lines of hand-written traces, and the command on them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rl_staleness.cli import main

__all__ = [
    "Line",
    "call",
    "cut",
    "done",
    "end",
    "published",
    "run",
    "start",
    "step",
    "write",
]

Line = dict[str, Any]


def _line(event: str, **fields: Any) -> Line:
    return {"event": event, "time": 1.0, **fields}


def start(*, incarnation: int = 0, version: int = 0, number: int = 1, **fields: Any) -> Line:
    """A run_started of one engine named e."""
    fields = {"engines": {"e": version}, "run": "r", **fields}
    return _line(
        "run_started", schema=1, incarnation=incarnation, version=version, step=number, **fields
    )


def cut(refit: int, calls: dict[str, int] | None = None, **fields: Any) -> Line:
    """A refit_cut of engine e, by default to the version of its number."""
    fields = {"engine": "e", "version": refit, **fields}
    return _line("refit_cut", refit=refit, calls=calls or {}, **fields)


def done(refit: int, **fields: Any) -> Line:
    """A refit_done of engine e, by default to the version of its number."""
    return _line("refit_done", refit=refit, **{"engine": "e", "version": refit, **fields})


def aborted(refit: int, **fields: Any) -> Line:
    """A refit_aborted of engine e, by default to the version of its number."""
    fields = {"engine": "e", "version": refit, **fields}
    return _line("refit_aborted", refit=refit, reason="lost", **fields)


def call(name: str, tokens: int, version: int, **fields: Any) -> Line:
    """A call of engine e."""
    return {"call": name, "engine": "e", "version": version, "tokens": tokens, **fields}


def published(group: str, *calls: Line, **fields: Any) -> Line:
    """A group_published."""
    return _line("group_published", group=group, calls=list(calls), **fields)


def dropped(group: str, *calls: Line, reason: str = "old", **fields: Any) -> Line:
    """A group_dropped."""
    return _line("group_dropped", group=group, reason=reason, calls=list(calls), **fields)


def step(number: int, version: int, *groups: str, **fields: Any) -> Line:
    """A step_trained."""
    if "batches" not in fields:
        fields["groups"] = list(groups)
    return _line("step_trained", step=number, version=version, **fields)


def gap(lost: int) -> Line:
    """A gap."""
    return _line("gap", lost=lost)


def violation(name: str, detail: str = "so it is") -> Line:
    """A violation that was found online."""
    return _line("violation", name=name, detail=detail)


def end(status: str = "finished") -> Line:
    """A run_finished."""
    return _line("run_finished", status=status)


def write(path: Path, *lines: Line) -> Path:
    """A trace of these lines."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of a command."""
    status = main(list(argv))
    captured = capsys.readouterr()
    return status, captured.out, captured.err
