"""Runs of W&B on this machine's disk: what their files say, read without a server.

A run's file is a header, then log frames in blocks of 32 KiB whose payloads are protobuf records.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from rl_staleness.integrations.wandb_files import TYPE

__all__ = ["OfflineRun", "folders_of", "read_run"]

_FILE_HEADER, _FRAME_HEADER, _BLOCK = 7, 7, 32 * 1024
_FULL, _FIRST, _LAST = 1, 2, 4


class OfflineRun(NamedTuple):
    """The records of a run that are of use here."""

    id: str
    entity: str
    project: str
    folder: Path
    rows: list[dict[str, Any]]
    """In order; the parts of a nested value have dots in their keys."""
    artifacts: list[dict[str, str]]
    """Files of each staleness artifact by name, where they are on this machine; the last one last,
    with ``sha256``: what it says of its trace."""
    ended: bool
    """It was finished, and nothing comes after this."""


def read_run(folder: str | os.PathLike[str]) -> OfflineRun:
    """Read the file of a run's folder; a torn end is the end.

    Raises:
        OSError: there is none, or it cannot be read.
    """
    pb: Any = import_module("wandb.proto.wandb_internal_pb2")
    (path, *_) = [*Path(folder).glob("run-*.wandb"), Path(folder, "run.wandb")]
    names: dict[str, str] = {"run_id": "", "entity": "", "project": ""}
    rows: list[dict[str, Any]] = []
    artifacts: list[dict[str, str]] = []
    ended = False
    for payload in _payloads(path.read_bytes()):
        record: Any = pb.Record()
        record.ParseFromString(payload)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            names = {key: getattr(record.run, key) or known for key, known in names.items()}
        elif kind == "history":
            rows.append(_items(record.history.item))
        elif kind == "artifact" and record.artifact.type == TYPE:
            artifacts.append(_files(record.artifact))
        ended = ended or kind == "exit"
    return OfflineRun(
        names["run_id"], names["entity"], names["project"], Path(folder), rows, artifacts, ended
    )


def folders_of(run_id: str, parent: str | os.PathLike[str]) -> list[Path]:
    """The folders of one run, which it has one of for each time that it was resumed, in order."""
    return sorted(Path(parent).glob(f"offline-run-*-{run_id}"))


def _files(artifact: Any) -> dict[str, str]:
    files = {entry.path: entry.local_path for entry in artifact.manifest.contents}
    return {**files, "sha256": str(json.loads(artifact.metadata or "{}").get("sha256"))}


def _items(items: Iterable[Any]) -> dict[str, Any]:
    return {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}


def _payloads(data: bytes) -> Iterator[bytes]:
    at, parts = _FILE_HEADER, b""
    while True:
        if _BLOCK - at % _BLOCK < _FRAME_HEADER:
            at += _BLOCK - at % _BLOCK
        if len(data) < at + _FRAME_HEADER:
            return
        _, length, kind = struct.unpack_from("<IHB", data, at)
        body = data[at + _FRAME_HEADER : at + _FRAME_HEADER + length]
        if kind == 0 or len(body) < length:
            return
        at += _FRAME_HEADER + length
        parts = body if kind in (_FULL, _FIRST) else parts + body
        if kind in (_FULL, _LAST):
            yield parts
