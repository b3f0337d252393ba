"""What a W&B run holds, read from its file without W&B: log frames with protobuf records."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FILE_HEADER, FRAME_HEADER, BLOCK = 7, 7, 32 * 1024
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def payloads(data: bytes) -> Iterator[bytes]:
    """The records in the file; a torn end is the end."""
    at, parts = FILE_HEADER, b""
    while True:
        if BLOCK - at % BLOCK < FRAME_HEADER:
            at += BLOCK - at % BLOCK
        if len(data) < at + FRAME_HEADER:
            return
        _, length, kind = struct.unpack_from("<IHB", data, at)
        body = data[at + FRAME_HEADER : at + FRAME_HEADER + length]
        if kind == 0 or len(body) < length:
            return
        at += FRAME_HEADER + length
        parts = body if kind in (FULL, FIRST) else parts + body
        if kind in (FULL, LAST):
            yield parts


class RunFile:
    """The records of a run's folder, by kind; waits for the end of a run that was finished."""

    def __init__(self, folder: str | Path, *, finished: bool = True) -> None:
        from wandb.proto import wandb_internal_pb2

        (self.path,) = Path(folder).glob("*.wandb")
        end = time.monotonic() + 10
        while True:
            self.records = []
            for payload in payloads(self.path.read_bytes()):
                record = wandb_internal_pb2.Record()
                record.ParseFromString(payload)
                self.records.append(record)
            ended = any(r.WhichOneof("record_type") == "exit" for r in self.records)
            if ended or not finished or time.monotonic() > end:
                return
            time.sleep(0.01)

    def of(self, kind: str) -> list[Any]:
        """The records of a kind: history, metric, config, artifact, alert."""
        return [getattr(r, kind) for r in self.records if r.WhichOneof("record_type") == kind]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows in order; nested keys with dots."""
        return [_items(history.item) for history in self.of("history")]

    @property
    def summary(self) -> dict[str, Any]:
        """The last value of each key."""
        values: dict[str, Any] = {}
        for summary in self.of("summary"):
            values |= _items(summary.update)
        return values

    @property
    def config(self) -> dict[str, Any]:
        """The config."""
        values: dict[str, Any] = {}
        for config in self.of("config"):
            values |= _items(config.update)
        return values


def _items(items: Any) -> dict[str, Any]:
    return {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}
