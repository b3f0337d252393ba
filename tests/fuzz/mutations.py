"""Inputs that are nearly right: traces, messages and answers, changed at a random place or two.

A change is of bytes (one flipped, a piece cut out, doubled, moved) or of the JSON of a line: a
value replaced by one that is at some border, a field left out, added, or taken from elsewhere.
"""

from __future__ import annotations

import json
import random
from typing import Any

__all__ = ["HOSTILE", "mutated", "seeds"]

HOSTILE = (
    "</script><img src=x onerror=alert(1)>\x1b[2J\x9b31m\u202e\u2066\x00\r\n../../%{x}$\\frac{1$"
)
"""A name that attacks a page, a terminal, a path, a template and a formula at once."""

BORDERS: list[Any] = [
    0,
    1,
    -1,
    2**31,
    2**53,
    2**63 - 1,
    2**63,
    -(2**63),
    10**30,
    10**400,
    0.5,
    -0.0,
    1e308,
    -1e308,
    1e15,
    5e-324,
    True,
    False,
    None,
    "",
    "0",
    "x" * 5000,
    HOSTILE,
    [],
    {},
    [[]],
    [[0, 0]],
    [[0, 2**63 - 1]],
    [[0, 5, 0], [5, 9, 2**63 - 1]],
    [[0, 5, 0, 2**63 - 1]],
    {"0": 1},
    {"0": 2**63 - 1, str(2**63 - 1): 2**63 - 1},
    {HOSTILE: 2**63 - 1},
    {"": {"": [[0, 1]]}},
]

RAW = [
    b"9" * 1000,
    b"1e999",
    b"-1e-999",
    b"NaN",
    b"[" * 2000,
    b"[" * 700 + b"]" * 700,
    b'{"a":' * 700 + b"1" + b"}" * 700,
    b'"\\ud800"',
    b'"\xff"',
    b"\x00",
    b"\n",
    b"\xef\xbb\xbf",
    b"{",
    b"}",
    b'"',
    b",",
    b"\\",
]
"""Put into the bytes as they are."""


def _event(kind: str, **fields: Any) -> dict[str, Any]:
    return {"event": kind, "time": 1_790_000_000.0, **fields}


def _call(name: str, version: int, tokens: int, **fields: Any) -> dict[str, Any]:
    return {"call": name, "engine": "e", "version": version, "tokens": tokens, **fields}


def seeds() -> list[bytes]:
    """Whole traces of all kinds of events."""
    start = _event(
        "run_started",
        schema=1,
        run="r",
        incarnation=0,
        version=0,
        step=1,
        engines={"e": 0},
        about={"trainer": "t", "library": "l", "orphan_after": 2},
    )
    cut = _event(
        "refit_cut",
        engine="e",
        refit=1,
        version=1,
        calls={"a": 30, "b": 0},
        exact=True,
        kv="kept",
        mode="keep",
        snapshot_seconds=0.1,
        generated=99,
    )
    done = _event("refit_done", engine="e", refit=1, version=1, pause_seconds=0.5)
    group = _event(
        "group_published",
        group="g",
        tokens={"0": 5},
        calls=[
            _call("a", 0, 90, after=0, until=1, trained=[[0, 80]]),
            _call("b", 0, 20, after=0, until=1, spans=[[0, 20, 1]]),
        ],
        unknown=1,
        about={"prompt_tokens": {"a": 7, "b": 9}, "dispatched_step": 1, "pulled_version": 0},
    )
    other = _event("group_published", group="h", calls=[_call("c", 1, 10)])
    drop = _event("group_dropped", group="k", reason="old", tokens={"0": 9}, calls=[])
    step = _event("step_trained", step=1, version=0, groups=["g"], kept=["g"])
    two = _event(
        "step_trained", step=2, version=1, batches=[["g"], ["h"]], trained={"g": {"a": [[0, 9]]}}
    )
    again = {**start, "incarnation": 1, "version": 1, "step": 2}
    restored = {
        **group,
        "restored": True,
        "calls": [_call("a", 0, 9, spans=[[0, 9, 0, 1]])],
    }
    aborted = _event("refit_aborted", engine="e", refit=1, version=1, reason="lost")
    rest = [
        _event("violation", name="stamp", detail="so it is"),
        _event("gap", lost=2),
        _event("run_finished", status="finished"),
    ]
    traces = [
        [start, cut, done, group, step, other, two, drop, *rest],
        [start, group, cut, aborted, {**cut, "refit": 2}, {**done, "refit": 2}, step, again],
        [start, group, step, again, restored, {**step, "step": 2, "version": 1, "updates": 0}],
        [start, other, done, {**step, "groups": ["h"], "updates": 3}, *rest],
    ]
    return [b"".join(json.dumps(line).encode() + b"\n" for line in trace) for trace in traces]


def mutated(data: bytes, chance: random.Random, *, largest: int = 1 << 16) -> bytes:
    """The input with one to four changes.

    Args:
        largest: bytes; what has grown beyond is cut.
    """
    for _ in range(chance.randint(1, 4)):
        change = chance.choice([_bytes_changed, _value_changed, _value_changed, _lines_changed])
        data = change(data, chance)
    return data[:largest]


def _bytes_changed(data: bytes, chance: random.Random) -> bytes:
    at = chance.randint(0, len(data))
    to = min(len(data), at + chance.choice([0, 1, 1, 2, 8, 64]))
    piece = data[at:to]
    new = chance.choice(
        [
            b"",
            2 * piece,
            bytes(byte ^ 1 << chance.randrange(8) for byte in piece),
            chance.randbytes(chance.choice([1, 4])),
            chance.choice(RAW),
        ]
    )
    return data[:at] + new + data[to:]


def _lines_changed(data: bytes, chance: random.Random) -> bytes:
    lines = data.splitlines(keepends=True) or [b""]
    at = chance.randrange(len(lines))
    line = lines.pop(at)
    lines[chance.randint(0, len(lines)) : 0] = chance.choice([[], [line], [line, line]])
    return b"".join(lines)


def _value_changed(data: bytes, chance: random.Random) -> bytes:
    """One value of one line, wherever in it that is."""
    lines = data.splitlines(keepends=True) or [b""]
    at = chance.randrange(len(lines))
    try:
        event = json.loads(lines[at])
    except (ValueError, RecursionError):
        return _bytes_changed(data, chance)
    places = list(_places(event))
    if not places:
        return _bytes_changed(data, chance)
    owner, key = chance.choice(places)
    values = [value for values in places for value in [values[0][values[1]]]]
    what = chance.randrange(5)
    if what == 0:
        del owner[key]
    elif what == 1 and isinstance(owner, dict):
        owner[chance.choice(["surprise", HOSTILE, "", "0", str(2**63)])] = owner.pop(key)
    elif what == 2:
        owner[key] = json.loads(json.dumps(chance.choice(values)))
    else:
        owner[key] = chance.choice(BORDERS)
    try:
        lines[at] = json.dumps(event, ensure_ascii=chance.random() < 0.5).encode() + b"\n"
    except (ValueError, RecursionError):  # it is in itself, or not to be written
        return data
    return b"".join(lines)


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every key of every object and array in a value."""
    found: list[tuple[Any, Any]] = []
    stack = [value]
    while stack:
        owner = stack.pop()
        keys: Any = ()
        if isinstance(owner, dict):
            keys = list(owner)
        elif isinstance(owner, list):
            keys = range(len(owner))
        for key in keys:
            found.append((owner, key))
            stack.append(owner[key])
    return found
