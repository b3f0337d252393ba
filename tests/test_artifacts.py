"""The files of a run: whole lines only, all or nothing, made without a training in their way."""

from __future__ import annotations

import gzip
import hashlib
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from rl_staleness import artifacts
from rl_staleness.artifacts import PACKED, PICTURE, REPORT, draw, pack, pack_aside
from rl_staleness.attachments import Attachments, Job
from rl_staleness.report import report
from tests.traces import write_trace

SMALL: dict[str, Any] = {"slots": 4, "group_size": 2, "groups_per_step": 3}


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A run of five steps."""
    path = tmp_path / "trace.jsonl"
    write_trace(path, steps=5, **SMALL)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where files are made."""
    (tmp_path / "files").mkdir()
    return tmp_path / "files"


@pytest.mark.parametrize(
    ("tail", "is_kept"),
    [(b'{"event":"step_tr', False), (b'{"event":"gap","time":1.0,"lost":1}', True), (b"", True)],
    ids=["torn", "whole without its newline", "nothing"],
)
def test_whole_lines_are_packed(trace: Path, folder: Path, tail: bytes, is_kept: bool) -> None:
    """A torn last line is no evidence; one that lacks its newline only is."""
    whole = trace.read_bytes()
    trace.write_bytes(whole + tail)
    packed = pack(trace, folder)
    expected = whole + (tail + b"\n" if tail and is_kept else b"")
    assert gzip.decompress(Path(packed.path).read_bytes()) == expected
    assert packed.metadata == {
        "schema": 1,
        "rows": expected.count(b"\n"),
        "first_step": 1,
        "last_step": 5,
        "sha256": hashlib.sha256(expected).hexdigest(),
    }


def test_the_same_lines_make_the_same_bytes(trace: Path, folder: Path, tmp_path: Path) -> None:
    """Whatever the file is called, packed already or not, packed here or in another process."""
    first = pack(trace, folder)
    content = Path(first.path).read_bytes()
    other = tmp_path / "other.jsonl.gz"
    other.write_bytes(gzip.compress(trace.read_bytes(), 1))
    assert pack(other, folder)[1:] == first[1:]
    assert Path(first.path).read_bytes() == content
    aside = pack_aside(trace, str(folder), seconds=60, in_background=True)
    assert aside == first
    assert Path(first.path).read_bytes() == content


def test_a_packed_trace_whose_end_is_missing_is_packed_up_to_there(
    trace: Path, folder: Path, tmp_path: Path
) -> None:
    """As a copy that broke off leaves it."""
    torn = tmp_path / "torn.jsonl.gz"
    torn.write_bytes(gzip.compress(trace.read_bytes())[:-600])
    packed = pack(torn, folder)
    lines = gzip.decompress(Path(packed.path).read_bytes())
    assert trace.read_bytes().startswith(lines) and lines.endswith(b"\n")


def test_nothing_is_left_of_a_file_that_cannot_be_made(trace: Path, folder: Path) -> None:
    """Neither here nor in the other process; the reason is raised."""
    with pytest.raises(FileNotFoundError):
        pack(trace.with_name("none"), folder)
    with pytest.raises(FileNotFoundError):
        pack_aside(trace.with_name("none"), str(folder), seconds=60, in_background=False)
    with pytest.raises(TimeoutError, match="packing the trace took longer than 0 s"):
        pack_aside(trace, str(folder), seconds=-1.0, in_background=False)
    assert os.listdir(folder) == []


def test_without_another_process_it_is_packed_here(
    trace: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trace matters more than a training that is held up a moment; the drawings do not."""
    for program in ("", "/no/such/python", "/bin/false"):
        monkeypatch.setattr(sys, "executable", program)
        assert pack_aside(trace, str(folder), seconds=60, in_background=False).rows > 5
        assert draw(str(trace), str(folder), seconds=60).keys() == {REPORT, PICTURE}
        assert os.listdir(folder) == [PACKED]


def test_both_are_drawn(trace: Path, folder: Path) -> None:
    """The same as the commands draw."""
    assert draw(str(trace), str(folder), seconds=120) == {}
    assert (folder / REPORT).read_text() == report(trace)
    assert sorted(os.listdir(folder)) == [PICTURE, REPORT]


def test_a_file_that_is_there_is_whole(folder: Path) -> None:
    """It is written beside its place, and nothing stays of an attempt that failed."""
    with pytest.raises(TypeError):
        artifacts._write(str(folder / "file"), None)  # type: ignore[arg-type]
    assert os.listdir(folder) == []


# The thread.


class Attaching:
    """Attaches when it may, and remembers what."""

    def __init__(self) -> None:
        self.may = threading.Event()
        self.begun = threading.Event()
        self.jobs: list[Job[str]] = []

    def __call__(self, job: Job[str]) -> dict[str, str]:
        self.begun.set()
        assert self.may.wait(60)
        self.jobs.append(job)
        return {"file": "why"} if job.trace == "lacking" else {}


def test_of_what_waits_the_newest_trace_of_a_run_is_attached() -> None:
    """It holds the older ones; nobody waits, and the last of all goes first."""
    attach = Attaching()
    files: Attachments[str] = Attachments(attach, title="test")
    files.add("run", "1")
    assert attach.begun.wait(60)
    for run, trace in (("run", "2"), ("other", "3"), ("third", "4"), ("other", "5")):
        files.add(run, trace)

    def go_on() -> None:
        while not any(job.final for job in tuple(files._jobs)):
            time.sleep(0.01)
        attach.may.set()

    threading.Thread(target=go_on, daemon=True).start()
    assert files.finish("run", "lacking", deadline=later()) == {"file": "why"}
    done = [("run", "1", False), ("run", "lacking", True)]
    assert [(job.run, job.trace, job.final) for job in attach.jobs[:2]] == done
    end = later()
    while len(attach.jobs) < 4 and time.monotonic() < end:
        time.sleep(0.01)
    assert [job.trace for job in attach.jobs[2:]] == ["4", "5"]


def later() -> float:
    """Long from now."""
    return time.monotonic() + 60


def test_what_does_not_end_is_left_at_the_deadline() -> None:
    """Without an answer."""
    attach = Attaching()
    files: Attachments[str] = Attachments(attach, title="test")
    assert files.finish("run", "trace", deadline=0.0) is None
    attach.may.set()


def test_what_raises_is_logged_once_and_told(caplog: pytest.LogCaptureFixture) -> None:
    """In one line, under no file's name."""

    def attach(job: Job[str]) -> dict[str, str]:
        raise ConnectionError("away\nfar")

    files: Attachments[str] = Attachments(attach, title="test")
    for _ in range(2):
        told = files.finish("run", "trace", deadline=later())
        assert told == {"": "ConnectionError: away far"}
    assert caplog.text.count("the trace is not attached; logged once") == 1


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_attaches_its_own() -> None:
    """Not what waits in its parent, whose thread it does not have."""
    attach = Attaching()
    files: Attachments[str] = Attachments(attach, title="test")
    files.add("run", "parent's")
    assert attach.begun.wait(60)
    child = os.fork()
    if child == 0:
        attach.may.set()
        files.finish("run", "child's", deadline=later())
        os._exit(0 if [job.trace for job in attach.jobs] == ["child's"] else 1)
    assert os.waitpid(child, 0)[1] == 0
    attach.may.set()
