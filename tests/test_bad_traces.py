"""Malformed lines and files: one line on stderr that says where and what, exit 2, no traceback.

What has the right type and cannot be true is no error: it is counted as a violation, and the
command ends with 0.
"""

from __future__ import annotations

import copy
import gzip
import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rl_staleness import trace
from rl_staleness.cli import main
from rl_staleness.events import TraceError, decode
from rl_staleness.ledger import Ledger

Event = dict[str, Any]

STARTED: Event = {
    "event": "run_started",
    "time": 1.0,
    "schema": 1,
    "run": "r",
    "incarnation": 0,
    "version": 1,
    "step": 0,
    "engines": {"e": 0},
    "about": {"trainer": "t"},
    "torn": 3,
}
CUT: Event = {
    "event": "refit_cut",
    "time": 2.0,
    "engine": "e",
    "refit": 1,
    "version": 1,
    "calls": {"c": 10},
    "exact": True,
    "kv": "kept",
    "mode": "keep",
    "snapshot_seconds": 0.001,
    "generated": 4096,
}
DONE: Event = {
    "event": "refit_done",
    "time": 3.0,
    "engine": "e",
    "refit": 1,
    "version": 1,
    "pause_seconds": 0.5,
}
ABORTED: Event = {
    "event": "refit_aborted",
    "time": 3.0,
    "engine": "e",
    "refit": 1,
    "version": 1,
    "reason": "the push failed",
}
CALL: Event = {
    "call": "c",
    "engine": "e",
    "version": 0,
    "tokens": 20,
    "after": 0,
    "until": 1,
    "spans": [[0, 10, 0], [10, 20, 1]],
    "trained": [[0, 20]],
}
PUBLISHED: Event = {
    "event": "group_published",
    "time": 4.0,
    "group": "g",
    "tokens": {"0": 5},
    "calls": [CALL],
    "unknown": 1,
    "restored": False,
    "about": {"reward": 0.5},
}
DROPPED: Event = {
    "event": "group_dropped",
    "time": 5.0,
    "group": "h",
    "reason": "too old",
    "tokens": {"0": 5},
    "calls": [CALL],
}
TRAINED: Event = {
    "event": "step_trained",
    "time": 6.0,
    "step": 0,
    "version": 1,
    "groups": ["g"],
    "updates": 1,
    "trained": {"g": {"c": [[0, 10]]}},
    "kept": ["g"],
}
BATCHES: Event = {
    "event": "step_trained",
    "time": 6.0,
    "step": 0,
    "version": 1,
    "batches": [["g"], []],
    "updates": 2,
}
VIOLATION: Event = {"event": "violation", "time": 7.0, "name": "type", "detail": "not a number"}
GAP: Event = {"event": "gap", "time": 8.0, "lost": 2}
FINISHED: Event = {"event": "run_finished", "time": 9.0, "status": "finished"}

EVENTS = [
    STARTED,
    CUT,
    DONE,
    ABORTED,
    PUBLISHED,
    DROPPED,
    TRAINED,
    BATCHES,
    VIOLATION,
    GAP,
    FINISHED,
]

OPTIONAL = {
    "run_started": ["about", "torn"],
    "refit_cut": ["exact", "kv", "mode", "snapshot_seconds", "generated"],
    "refit_done": ["pause_seconds"],
    "refit_aborted": [],
    "group_published": ["unknown", "restored", "about"],
    "group_dropped": [],
    "step_trained": ["updates", "trained", "kept"],
    "violation": [],
    "gap": [],
    "run_finished": [],
}
MAY_BE_LEFT_OUT = {
    "run_started": ["engines"],
    "refit_cut": ["calls"],
    "group_published": ["tokens", "calls"],
    "group_dropped": ["tokens", "calls"],
    "step_trained": ["groups", "batches"],
}
"""Empty ones may be left out; `groups` and `batches` stand for one another."""

TEXT: list[Any] = [7, 1.5, True, ["a"], {"a": 1}]
COUNT: list[Any] = ["7", 1.5, True, -1, [1], {"a": 1}]
VERSION: list[Any] = ["7", 1.5, True, [1], {"a": 1}]
SECONDS: list[Any] = ["7", True, [1.0], {"a": 1}]
FLAG: list[Any] = ["yes", 0, 1, [True], {}]
NAMES: list[Any] = ["g", 7, {"g": 1}, [7], [None], [["g"]]]
COUNTS: list[Any] = ["c", 7, ["c"], {"c": "7"}, {"c": 1.5}, {"c": -1}, {"c": None}, {"c": True}]
VERSIONS: list[Any] = ["e", 7, ["e"], {"e": "7"}, {"e": 1.5}, {"e": None}]
BY_VERSION: list[Any] = [
    *COUNTS,
    {"one": 5},
    {"1.5": 5},
    {"": 5},
    {"1": "5"},
    {"1": -5},
    {"1": None},
]
MASK: list[Any] = [
    "all",
    7,
    {"0": 10},
    [7],
    [[0]],
    [[0, 1, 2]],
    [["0", 10]],
    [[0, 1.5]],
    [[None, 10]],
    [[-1, 10]],
    [[10, 5]],
    [[0, 5], [9, 8]],
]
SPANS: list[Any] = [
    "all",
    7,
    [7],
    [[0, 10]],
    [[0, 10, 1, 2, 3]],
    [["0", 10, 1]],
    [[0, 10, "1"]],
    [[0, 10, None]],
    [[0, 10, 1.5]],
    [[-1, 10, 1]],
    [[10, 5, 1]],
    [[10, 5, 1, 2]],
]
WRONG: dict[str, dict[str, list[Any]]] = {
    "run_started": {
        "schema": ["1", 1.5, 0, -1, 2, 99],
        "run": TEXT,
        "incarnation": COUNT,
        "version": VERSION,
        "step": COUNT,
        "engines": VERSIONS,
        "about": ["text", 7, ["a"]],
        "torn": COUNT,
    },
    "refit_cut": {
        "engine": TEXT,
        "refit": COUNT,
        "version": VERSION,
        "calls": COUNTS,
        "exact": FLAG,
        "kv": [*TEXT, "forgotten", ""],
        "mode": TEXT,
        "snapshot_seconds": SECONDS,
        "generated": COUNT,
    },
    "refit_done": {"engine": TEXT, "refit": COUNT, "version": VERSION, "pause_seconds": SECONDS},
    "refit_aborted": {"engine": TEXT, "refit": COUNT, "version": VERSION, "reason": TEXT},
    "group_published": {
        "group": TEXT,
        "tokens": BY_VERSION,
        "calls": ["c", 7, {"c": 1}, [7], ["c"], [None], [[]]],
        "unknown": COUNT,
        "restored": FLAG,
        "about": ["text", 7, ["a"]],
    },
    "group_dropped": {
        "group": TEXT,
        "reason": TEXT,
        "tokens": BY_VERSION,
        "calls": ["c", 7, {"c": 1}, [7], ["c"], [None], [[]]],
    },
    "step_trained": {
        "step": COUNT,
        "version": VERSION,
        "groups": NAMES,
        "updates": COUNT,
        "trained": ["g", 7, ["g"], {"g": 7}, {"g": [[0, 1]]}, *({"g": {"c": m}} for m in MASK)],
        "kept": NAMES,
    },
    "violation": {"name": TEXT, "detail": TEXT},
    "gap": {"lost": COUNT},
    "run_finished": {"status": TEXT},
}
WRONG_CALL: dict[str, list[Any]] = {
    "call": TEXT,
    "engine": TEXT,
    "version": VERSION,
    "tokens": COUNT,
    "after": COUNT,
    "until": COUNT,
    "spans": SPANS,
    "trained": MASK,
}


def changed(event: Event, name: str, value: Any) -> Event:
    """The event with another value in one field."""
    return {**copy.deepcopy(event), name: value}


def with_call(event: Event, call: Event) -> Event:
    """The event with another call after its own."""
    return changed(event, "calls", [{**CALL, "call": "other"}, call])


def without(event: Event, name: str) -> Event:
    """The event without one of its fields."""
    return {key: value for key, value in event.items() if key != name}


def malformed() -> Iterator[tuple[str, Event]]:
    """The field that is wrong and the event that holds it."""
    for event in EVENTS:
        kind = event["event"]
        free = OPTIONAL[kind] + MAY_BE_LEFT_OUT.get(kind, [])
        for name in event:
            if name not in ("event", *free):
                yield name, without(event, name)
                yield name, changed(event, name, None)
        for name, values in WRONG[kind].items():
            if name in event:
                for value in values:
                    yield name, changed(event, name, value)
        for value in ("now", True, [1.0], {}):
            yield "time", changed(event, "time", value)
        yield "surprise", changed(event, "surprise", 1)
        yield "event", changed(event, "event", "refit_finished")
        yield "event", changed(event, "event", None)
        yield "event", changed(event, "event", 7)
        yield "event", without(event, "event")
    for event in (PUBLISHED, DROPPED):
        for name, values in WRONG_CALL.items():
            for value in values:
                yield name, with_call(event, changed(CALL, name, value))
        for name in ("call", "engine", "version", "tokens"):
            yield name, with_call(event, without(CALL, name))
            yield name, with_call(event, changed(CALL, name, None))
        yield "surprise", with_call(event, changed(CALL, "surprise", 1))
    for value in ("g", 7, {"g": 1}, ["g"], [7], [None], [["g"], [7]], [["g"], None]):
        yield "batches", changed(BATCHES, "batches", value)


def label(value: Any) -> str | None:
    """A short name of a case: the event, its field and what is wrong."""
    if isinstance(value, dict):
        return str(value.get("event"))
    return None


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of a command."""
    try:
        status = main(list(argv))
    except SystemExit as stop:
        assert isinstance(stop.code, int)
        status = stop.code
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def assert_refused(
    capsys: pytest.CaptureFixture[str], path: Path, number: int | None, field: str = ""
) -> None:
    """Exit 2 and the one line `FILE:LINE: FIELD: reason`."""
    status, out, err = said(capsys, "steps", str(path), "--json")
    assert status == 2, err
    assert "Traceback" not in err
    assert len(err.splitlines()) == 1, err
    where = r"\d+" if number is None else str(number)
    match = re.search(rf"{re.escape(str(path))}:{where}: ([^:]+): \S.*$", err)
    assert match, err
    assert field in match[1], err
    for written in out.splitlines():
        json.loads(written)


def write(path: Path, *lines: Event | bytes) -> Path:
    """A trace of these lines, each with its newline."""
    path.write_bytes(
        b"".join((x if isinstance(x, bytes) else json.dumps(x).encode()) + b"\n" for x in lines)
    )
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Where a trace may be written."""
    return tmp_path / "rollout_trace.jsonl"


def test_the_events_of_this_table_are_good(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each of them as it stands is read."""
    for event in EVENTS:
        decode(json.dumps(event).encode())
    write(file, STARTED, CUT, DONE, PUBLISHED, TRAINED, FINISHED)
    status, out, err = said(capsys, "steps", str(file), "--json")
    assert (status, err) == (0, "")
    (step,) = [json.loads(written) for written in out.splitlines()]
    assert step["violations"] == 0
    assert {
        "step",
        "version",
        "batch_age",
        "age_max",
        "age_p50",
        "age_p95",
        "age_in_flight",
        "age_in_queue",
        "batch_age_refits",
        "coverage",
        "age_lo",
        "age_hi",
        "tokens",
        "tokens_by_version",
        "spanning_calls",
        "violations",
    } <= set(step)
    assert step["tokens_by_version"] == {"0": 15}


@pytest.mark.parametrize("event", EVENTS, ids=label)
def test_optional_fields_may_be_left_out_or_null(event: Event) -> None:
    """An optional field that is null says what a missing one says."""
    for name in OPTIONAL[event["event"]]:
        if name in event:
            left_out = decode(json.dumps(without(event, name)).encode())
            assert left_out == decode(json.dumps(changed(event, name, None)).encode())


@pytest.mark.parametrize("name", ["after", "until", "spans", "trained"])
def test_optional_fields_of_a_call_may_be_left_out_or_null(name: str) -> None:
    """The same holds inside a call."""
    left_out = with_call(PUBLISHED, without(CALL, name))
    null = with_call(PUBLISHED, changed(CALL, name, None))
    assert decode(json.dumps(left_out).encode()) == decode(json.dumps(null).encode())


@pytest.mark.parametrize(
    ("at", "name"),
    [(0, "engines"), (1, "calls"), (3, "tokens"), (3, "calls"), (4, "tokens"), (4, "calls")],
)
def test_empty_fields_may_be_left_out(at: int, name: str) -> None:
    """A field that is left out gives the numbers that an empty one gives."""
    lines = [STARTED, CUT, DONE, PUBLISHED, DROPPED, without(TRAINED, "trained")]
    empty: Any = [] if name == "calls" and at > 1 else {}
    answers = []
    for event in (without(lines[at], name), changed(lines[at], name, empty)):
        ledger = Ledger()
        events = [*lines[:at], event, *lines[at + 1 :]]
        answers.append([ledger.apply(decode(json.dumps(e).encode())) for e in events])
    assert answers[0] == answers[1]


def test_an_empty_mask_is_not_a_missing_one() -> None:
    """`trained: []` trains nothing, no `trained` trains all: the two are different events."""
    empty = decode(json.dumps(with_call(PUBLISHED, changed(CALL, "trained", []))).encode())
    missing = decode(json.dumps(with_call(PUBLISHED, without(CALL, "trained"))).encode())
    assert empty != missing


@pytest.mark.parametrize(("field", "event"), list(malformed()), ids=label)
def test_malformed_line(
    field: str, event: Event, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong type, a missing, null, negative or unknown field: `FILE:LINE: FIELD: reason`, and
    exit 2.
    """
    with pytest.raises(TraceError, match=rf"^[^:\n]*{field}[^:\n]*: [^\n]+$"):
        decode(json.dumps(event).encode())
    lines = [event] if event.get("event") == "run_started" else [STARTED, DONE, event]
    write(file, *lines, FINISHED)
    assert_refused(capsys, file, len(lines), field)


@pytest.mark.parametrize("updates", [0, 1, 3])
def test_updates_that_is_not_the_number_of_batches(
    updates: int, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two batches and another number of updates."""
    write(file, STARTED, PUBLISHED, changed(BATCHES, "updates", updates))
    status, _, err = said(capsys, "steps", str(file), "--json")
    assert status == 2
    assert re.search(rf"{re.escape(str(file))}:3: [^:]*(updates|batches)[^:]*: ", err), err


RUBBISH = {
    "text": b"hello",
    "empty line": b"",
    "half": b'{"event": "refit_done", "time": 3.0, "eng',
    "two objects": json.dumps(DONE).encode() * 2,
    "array": b'["refit_done"]',
    "string": b'"refit_done"',
    "number": b"7",
    "null": b"null",
    "true": b"true",
    "not UTF-8 text": b'{"event": "refit_aborted", "time": 3.0, "engine": "e", "refit": 1,'
    b' "version": 1, "reason": "\xff\xfe"}',
    "not UTF-8 name": b'{"event": "group_published", "time": 3.0, "group": "\xc3"}',
    "binary": bytes(range(128, 256)),
    "zeros": b"\x00" * 40,
    "single quotes": b"{'event': 'gap', 'time': 1.0, 'lost': 1}",
    "trailing comma": b'{"event": "gap", "time": 1.0, "lost": 1,}',
    "comment": b'{"event": "gap", "time": 1.0, "lost": 1} // lost',
    "NaN": b'{"event": "gap", "time": NaN, "lost": 1}',
    "infinity": b'{"event": "refit_done", "time": 1.0, "engine": "e", "refit": 1, "version": 1,'
    b' "pause_seconds": Infinity}',
    "huge": b'{"event": "gap", "time": 1.0, "lost": 1e400}',
    "UTF-16": json.dumps(DONE).encode("utf-16"),
    "deep": b"[" * 100_000,
}


@pytest.mark.parametrize("rubbish", RUBBISH.values(), ids=RUBBISH.keys())
def test_rubbish_between_good_lines(
    rubbish: bytes, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is no JSON object, in the middle: its line is named, also where it looks like a torn
    one.
    """
    with pytest.raises(TraceError, match=r"^[^:\n]+: [^\n]+$"):
        decode(rubbish)
    write(file, STARTED, rubbish, FINISHED)
    assert_refused(capsys, file, 2)


@pytest.mark.parametrize("rubbish", RUBBISH.values(), ids=RUBBISH.keys())
def test_rubbish_at_the_end_with_a_newline(
    rubbish: bytes, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A last line that has its newline is not torn: it is an error as anywhere."""
    write(file, STARTED, rubbish)
    assert_refused(capsys, file, 2)


def test_byte_order_mark(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A byte order mark is no JSON."""
    write(file, b"\xef\xbb\xbf" + json.dumps(STARTED).encode(), FINISHED)
    assert_refused(capsys, file, 1)


@pytest.mark.parametrize("event", EVENTS[1:], ids=label)
def test_event_before_run_started(
    event: Event, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trace begins with `run_started`."""
    write(file, event, STARTED)
    assert_refused(capsys, file, 1)


def test_empty_file(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A trace without a line is an error."""
    write(file)
    assert_refused(capsys, file, None)


@pytest.mark.parametrize(
    "torn", [b'{"event": "gap", "ti', b"\x00\x00", b'{"event": "gap", "x": "\xc3']
)
def test_torn_last_line(
    torn: bytes,
    file: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A last line without a newline that is no JSON is reported and skipped."""
    write(file, STARTED, PUBLISHED, TRAINED)
    whole = [
        json.loads(written)
        for written in said(capsys, "steps", str(file), "--json")[1].splitlines()
    ]
    with file.open("ab") as stream:
        stream.write(torn)
    with caplog.at_level(logging.WARNING):
        status, out, err = said(capsys, "steps", str(file), "--json")
    assert status == 0
    assert "Traceback" not in err
    assert whole == [json.loads(written) for written in out.splitlines()]
    assert len(whole) == 1
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert str(file) in warning.getMessage()
    assert len(list(trace.read(file))) == 3


def test_whole_last_line_without_its_newline(
    file: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """It counts like any other line, and nothing is reported."""
    write(file, STARTED, PUBLISHED, TRAINED)
    file.write_bytes(file.read_bytes().removesuffix(b"\n"))
    status, out, err = said(capsys, "steps", str(file), "--json")
    assert (status, err, len(out.splitlines())) == (0, "", 1)
    assert caplog.records == []


def test_wrong_last_line_without_its_newline(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A whole JSON object with a wrong type is not torn: it is an error."""
    write(file, STARTED, changed(GAP, "lost", "two"))
    file.write_bytes(file.read_bytes().removesuffix(b"\n"))
    assert_refused(capsys, file, 2, "lost")


def test_steps_before_the_bad_line_are_streamed(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Reading is streaming: what comes before the bad line is there when the error is raised."""
    write(file, STARTED, PUBLISHED, TRAINED, b"rubbish", TRAINED)
    steps = trace.steps(file)
    assert next(steps).step == 0
    with pytest.raises(TraceError, match=rf"^{re.escape(str(file))}:4: [^:]+: "):
        next(steps)
    events = trace.read(file)
    assert len([next(events) for _ in range(3)]) == 3
    with pytest.raises(TraceError, match=rf"^{re.escape(str(file))}:4: [^:]+: "):
        next(events)


def test_compressed_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A trace whose name ends in .jsonl.gz is read through gzip."""
    path = tmp_path / "rollout_trace.jsonl.gz"
    content = b"".join(json.dumps(e).encode() + b"\n" for e in (STARTED, PUBLISHED, TRAINED))
    path.write_bytes(gzip.compress(content))
    status, out, err = said(capsys, "steps", str(path), "--json")
    assert (status, err, len(out.splitlines())) == (0, "", 1)


def test_compressed_trace_that_is_cut_short(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A gzip stream without its end cannot be read: one line, exit 2."""
    path = tmp_path / "rollout_trace.jsonl.gz"
    content = b"".join(json.dumps(e).encode() + b"\n" for e in (STARTED, PUBLISHED, TRAINED))
    path.write_bytes(gzip.compress(content)[:-20])
    assert_unreadable(capsys, path)


def test_compressed_trace_that_is_not_compressed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Plain lines under a name that ends in .gz: one line, exit 2."""
    assert_unreadable(capsys, write(tmp_path / "rollout_trace.jsonl.gz", STARTED, TRAINED))


def test_bad_line_in_a_compressed_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its number counts the lines of what is inside."""
    path = tmp_path / "rollout_trace.jsonl.gz"
    content = b"".join(json.dumps(e).encode() + b"\n" for e in (STARTED, changed(GAP, "lost", -1)))
    path.write_bytes(gzip.compress(content))
    assert_refused(capsys, path, 2, "lost")


def assert_unreadable(capsys: pytest.CaptureFixture[str], path: Path) -> None:
    """Exit 2 and one line that names the file."""
    status, _, err = said(capsys, "steps", str(path), "--json")
    assert status == 2
    assert len(err.splitlines()) == 1, err
    assert str(path) in err
    assert "Traceback" not in err


def test_missing_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that is not there."""
    assert_unreadable(capsys, tmp_path / "nothing.jsonl")


def test_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder is no trace."""
    assert_unreadable(capsys, tmp_path)


@pytest.mark.parametrize(
    "argv",
    [["steps"], ["steps", "a", "b"], ["steps", "a", "--surprise"], ["surprise"]],
    ids=" ".join,
)
def test_wrong_use(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Wrong use ends with 2, one line on stderr and nothing on stdout."""
    status, out, err = said(capsys, *argv)
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1, err


# What has the right type and cannot be true.

UNTRUE: dict[str, list[Event]] = {
    "a step of another version": [changed(without(TRAINED, "kept"), "version", 7)],
    "a step of another number": [changed(without(TRAINED, "kept"), "step", 7)],
    "an unknown group": [{**BATCHES, "batches": [["nobody"]], "updates": 1}],
    "a version from the future": [changed(DONE, "version", 8), TRAINED],
    "tokens from the future": [{**PUBLISHED, "tokens": {"8": 5}, "calls": []}, TRAINED],
    "a group published again": [PUBLISHED, PUBLISHED, TRAINED],
    "a call named twice": [changed(PUBLISHED, "calls", [CALL, CALL]), TRAINED],
    "overlapping spans": [
        with_call(PUBLISHED, changed(CALL, "spans", [[0, 12, 0], [8, 20, 1]])),
        {**TRAINED, "trained": None},
    ],
    "done and aborted": [DONE, ABORTED, TRAINED],
}


@pytest.mark.parametrize("events", UNTRUE.values(), ids=UNTRUE.keys())
def test_what_cannot_be_true_is_counted(
    events: list[Event], file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A violation is a number in the answer and no error of the file."""
    lines = events if PUBLISHED in events else [PUBLISHED, *events]
    if any(event["event"] == "group_published" for event in events):
        lines = events
    write(file, STARTED, *lines)
    status, out, err = said(capsys, "steps", str(file), "--json")
    assert (status, err) == (0, "")
    assert json.loads(out.splitlines()[-1])["violations"] >= 1


# The commands as programs.


def program(*argv: str) -> subprocess.CompletedProcess[str]:
    """A Python program's exit status, stdout and stderr."""
    return subprocess.run(
        [sys.executable, "-m", *argv],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=Path(trace.__file__).parents[1],
    )


@pytest.mark.parametrize(
    "module", [["rl_staleness.cli", "steps"], ["rl_staleness.trace"]], ids=" ".join
)
def test_program(module: list[str], file: Path) -> None:
    """The programs print a row a step and end with 0, also with violations; a bad line ends them
    with 2.
    """
    write(file, STARTED, PUBLISHED, TRAINED, changed(TRAINED, "step", 9))
    good = program(*module, str(file))
    assert (good.returncode, good.stderr) == (0, "")
    assert len(good.stdout.splitlines()) >= 2
    write(file, STARTED, changed(GAP, "lost", -1))
    bad = program(*module, str(file))
    assert bad.returncode == 2
    assert re.fullmatch(rf".*{re.escape(str(file))}:2: [^:]*lost[^:]*: .+\n", bad.stderr), (
        bad.stderr
    )


def test_programs_print_the_same_table(file: Path) -> None:
    """`python -m rl_staleness.trace` prints what `rl-staleness steps` prints."""
    write(file, STARTED, PUBLISHED, TRAINED)
    table = program("rl_staleness.trace", str(file)).stdout
    assert program("rl_staleness.cli", "steps", str(file)).stdout == table
    assert table != ""


@pytest.mark.parametrize(
    "module", [["rl_staleness.cli", "steps"], ["rl_staleness.trace"]], ids=" ".join
)
def test_program_without_a_file(module: list[str]) -> None:
    """A missing file and a missing argument are one line on stderr and exit 2."""
    for argv in ([], ["/nowhere/rollout_trace.jsonl"]):
        failed = program(*module, *argv)
        assert failed.returncode == 2
        assert len(failed.stderr.splitlines()) == 1, failed.stderr


def test_program_with_a_torn_last_line(file: Path) -> None:
    """A torn last line is reported in one line, and the steps before it are there."""
    write(file, STARTED, PUBLISHED, TRAINED)
    with file.open("ab") as stream:
        stream.write(b'{"event": "ga')
    torn = program("rl_staleness.cli", "steps", str(file), "--json")
    assert torn.returncode == 0
    assert len(torn.stdout.splitlines()) == 1
    assert len(torn.stderr.splitlines()) == 1, torn.stderr
