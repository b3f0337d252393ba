"""The writer and the reader of a trace as a pair, on real files, a full disk included."""

from __future__ import annotations

import errno
import gzip
import json
import logging
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rl_staleness import Call, StalenessCallback, TraceError, read, steps, trace
from rl_staleness.events import (
    LONGEST_MESSAGE,
    GroupPublished,
    RefitCut,
    RunStarted,
    StepTrained,
    decode,
    encode,
)
from rl_staleness.trace import TraceWriter

START = RunStarted(time=1.0, schema=1, run="r", incarnation=0, version=0, step=1)


def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    """Every event comes back equal, optional fields, names of any script and masks included."""
    events = [
        START,
        RefitCut(time=2.0, engine="é", refit=1, version=2, calls={'a/\n"': 3}, exact=False),
        GroupPublished(
            time=3.0,
            group="组",
            tokens={0: 5},
            calls=(
                Call(
                    call="c",
                    engine="é",
                    version=0,
                    tokens=9,
                    after=0,
                    until=1,
                    spans=((0, 4, 0), (4, 9, 0, 2)),
                    trained=(),
                ),
            ),
            unknown=1,
        ),
        StepTrained(time=4.0, step=1, version=0, batches=(("组",), ()), kept=("组",)),
    ]
    writer = TraceWriter(tmp_path / "trace.jsonl", run="r")
    assert all(writer.append(event) for event in events)
    writer.close()
    assert list(read(tmp_path / "trace.jsonl")) == events
    assert [decode(encode(event)) for event in events] == events


def test_the_first_field_of_a_line_is_its_event(tmp_path: Path) -> None:
    """A person who looks at the file sees first what a line is."""
    assert encode(START).startswith(b'{"event":"run_started",')


def write(path: Path, *, step: int) -> None:
    """A run of one step."""
    with StalenessCallback(trace=path, run="r", step=step) as staleness:
        staleness.on_step([])


def test_a_torn_last_line_is_reported_by_readers_and_cut_off_at_the_next_opening(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The rest is used; how many bytes went is in the next run_started."""
    path = tmp_path / "trace.jsonl"
    write(path, step=1)
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"event":"refit_do')
    with caplog.at_level(logging.WARNING):
        assert len(list(steps(path))) == 1
    assert any(f"{path}:4: torn last line" in r.getMessage() for r in caplog.records)
    write(path, step=2)
    assert path.read_bytes().startswith(whole + b'{"event":"run_started"')
    (resumed,) = [e for e in read(path) if isinstance(e, RunStarted) and e.incarnation == 1]
    assert resumed.torn == len(b'{"event":"refit_do')


def test_a_whole_last_line_without_its_newline_gets_it(tmp_path: Path) -> None:
    """Nothing of a line that is whole is thrown away."""
    path = tmp_path / "trace.jsonl"
    write(path, step=1)
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    write(path, step=2)
    starts = [event for event in read(path) if isinstance(event, RunStarted)]
    assert [event.torn for event in starts] == [None, None]


def test_a_tear_in_the_middle_is_an_error(tmp_path: Path) -> None:
    """Only the last line can have been in the making when a process died."""
    path = tmp_path / "trace.jsonl"
    write(path, step=1)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1][:20] + b"\n" + lines[2])
    with pytest.raises(TraceError, match=f"^{path}:2: "):
        list(read(path))


def test_a_file_that_is_no_trace_is_left_alone(tmp_path: Path) -> None:
    """A user's own file at the path is never appended to."""
    path = tmp_path / "trace.jsonl"
    path.write_text("my notes\n")
    with pytest.raises(TraceError, match=f"{path}:1"):
        StalenessCallback(trace=path)
    assert path.read_text() == "my notes\n"


def test_gzip_by_ending(tmp_path: Path) -> None:
    """A trace that was compressed reads the same; a truncated one is an error, not a guess."""
    path = tmp_path / "trace.jsonl"
    write(path, step=1)
    packed = tmp_path / "trace.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert list(steps(packed)) == list(steps(path))
    packed.write_bytes(packed.read_bytes()[:-12])
    with pytest.raises(TraceError, match="gzip"):
        list(steps(packed))


def test_a_full_disk_makes_a_gap_and_no_torn_line(tmp_path: Path) -> None:
    """Lines that do not fit are lost whole, counted, and said as soon as writing works again."""
    path = tmp_path / "trace.jsonl"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with StalenessCallback(trace=path) as staleness:
            staleness.on_step([])
            full = path.stat().st_size + 100
            resource.setrlimit(resource.RLIMIT_FSIZE, (full, before[1]))
            lost = [staleness.on_step(["x" * 200]) for _ in range(3)]
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            again = staleness.on_step([], step=5, version=4)
            missing = staleness.missing()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, old)
    assert lost == [None, None, None]
    assert missing == {"lines of the trace could not be written": 3}
    written = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert [line["event"] for line in written] == [
        "run_started",
        "step_trained",
        "gap",
        "step_trained",
        "run_finished",
    ]
    assert written[2]["lost"] == 3
    assert again is not None
    assert again.violations == 0  # the lost lines explain the jump
    assert list(steps(path))[-1] == again


def test_what_was_written_survives_the_death_of_the_process(tmp_path: Path) -> None:
    """No line waits in a buffer of ours when the process is killed at once."""
    path = tmp_path / "trace.jsonl"
    code = (
        "import os, signal, sys\n"
        "from rl_staleness import StalenessCallback\n"
        "staleness = StalenessCallback(trace=sys.argv[1])\n"
        "for _ in range(50): staleness.on_step([])\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert [s.step for s in steps(path)] == list(range(1, 51))


def test_reading_takes_no_more_memory_for_a_longer_file(tmp_path: Path) -> None:
    """Three times the steps, with refits and cuts, leave as many entries in the fold."""
    from rl_staleness.ledger import Ledger

    def entries(num_steps: int) -> int:
        path = tmp_path / f"{num_steps}.jsonl"
        with StalenessCallback(trace=path) as staleness:
            for step in range(num_steps):
                calls = [
                    Call(
                        call=f"{step}-{index}",
                        engine="engine",
                        version=max(step - 1, 0),
                        tokens=20,
                        after=max(step - 1, 0),
                        until=step,
                    )
                    for index in range(3)
                ]
                staleness.on_publish(f"g{step}", calls=calls)
                staleness.on_step([f"g{step}"])
                cut = {f"{step + 1}-{index}": 5 for index in range(3)} | {f"lost-{step}": 1}
                staleness.on_refit_paused(cuts={"engine": cut})
                staleness.on_refit_done()
        ledger = Ledger()
        sizes = []
        for event in read(path):
            ledger.apply(event)
            sizes.append(ledger.size)
        assert ledger.orphans == num_steps - 64
        return max(sizes)

    assert entries(3000) <= entries(900)


# What the writer refuses, and what it leaves behind.


def test_a_compressed_file_is_not_written(tmp_path: Path) -> None:
    """The name says that it would have to be."""
    with pytest.raises(ValueError, match="compress it afterwards"):
        TraceWriter(tmp_path / "trace.jsonl.gz", run="r")
    assert list(tmp_path.iterdir()) == []


def test_a_line_that_readers_would_not_take_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One byte less is written; a reader that takes less refuses it by its number."""
    writer = TraceWriter(tmp_path / "trace.jsonl", run="r")
    size = len(encode(START))
    monkeypatch.setattr(trace, "LONGEST_LINE", size)
    with pytest.raises(TraceError, match=f"line: {size} bytes"):
        writer.append(START)
    assert writer.path.stat().st_size == 0
    monkeypatch.setattr(trace, "LONGEST_LINE", size + 1)
    assert writer.append(START)
    writer.close()
    assert list(read(writer.path)) == [START]
    monkeypatch.setattr(trace, "LONGEST_LINE", size)
    with pytest.raises(TraceError, match=f":1: line: longer than {size} bytes"):
        list(read(writer.path))
    with pytest.raises(TraceError, match="longer than"):
        TraceWriter(writer.path, run="r")
    monkeypatch.setattr(trace, "LONGEST_LINE", size + 1)
    writer.path.write_bytes(encode(START) + b"\n" + b"x" * (size + 1))
    with pytest.raises(TraceError, match=f"last line is longer than {size + 1} bytes"):
        TraceWriter(writer.path, run="r")


def test_a_torn_file_without_a_whole_line_holds_no_trace(tmp_path: Path) -> None:
    """A reader refuses it; the run that died while it wrote its first line takes it over."""
    path = tmp_path / "trace.jsonl"
    path.write_bytes(encode(START)[:20])
    with pytest.raises(TraceError, match=":1: line: torn; the file holds no trace"):
        list(read(path))
    writer = TraceWriter(path, run="r")
    assert (writer.torn, writer.continued) == (20, False)
    writer.close()


def test_a_packed_trace_with_more_in_it_than_one_has_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More bytes than a trace may have for the size of its file."""
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress(encode(START) + b"\n" + b" " * 100_000 + b"\n"))
    monkeypatch.setattr(trace, "LONGEST_LINE", 50_000)
    monkeypatch.setattr(trace, "MOST_UNPACKED", 1)
    with pytest.raises(TraceError) as caught:
        list(read(path))
    assert str(caught.value) == f"{path}:2: line: {trace._TOO_LARGE}"


def test_a_writer_that_has_nothing_to_say_leaves_no_file(tmp_path: Path) -> None:
    """Discarded, an empty file goes and one with lines stays; after that nothing is written."""
    writer = TraceWriter(tmp_path / "trace.jsonl", run="r")
    writer.discard()
    assert list(tmp_path.iterdir()) == []
    writer.discard()
    assert writer.append(START) is False
    assert (writer.lost, writer.damage()) == (1, None)
    writer = TraceWriter(tmp_path / "trace.jsonl", run="r")
    writer.append(START)
    writer.discard()
    assert list(read(writer.path)) == [START]


def test_a_file_system_without_locks_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then nobody can tell whether there is another writer."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(trace.fcntl, "flock", refuse)
    writer = TraceWriter(tmp_path / "trace.jsonl", run="r")
    assert writer.append(START)
    writer.close()


@pytest.mark.parametrize("room", [0, 5])
def test_a_line_that_has_no_room_leaves_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A part that went in is taken out again; it is said once, and the next line tells of both."""
    writer = TraceWriter(tmp_path / "trace.jsonl", run="r")
    writer.append(START)
    size, write, left = writer.path.stat().st_size, os.write, [room]

    def nearly_full(file: int, data: bytes) -> int:
        if not left[0]:
            raise OSError(errno.ENOSPC, "no space left on device")
        left[0], some = 0, left[0]
        return write(file, data[:some])

    monkeypatch.setattr(trace.os, "write", nearly_full)
    step = StepTrained(time=4.0, step=1, version=0, groups=())
    assert writer.append(step) is False
    assert writer.append(step) is False
    assert writer.path.stat().st_size == size
    monkeypatch.undo()
    assert writer.append(step)
    assert [type(event).__name__ for event in read(writer.path)] == [
        "RunStarted",
        "Gap",
        "StepTrained",
    ]
    assert writer.lost == 2
    assert sum("could not be written" in r.getMessage() for r in caplog.records) == 1
    writer.close()


def test_values_of_a_wrong_type_are_refused_by_the_writer() -> None:
    """Encoding names the event; a long message keeps its start and its end."""
    with pytest.raises(TraceError, match="run_started: "):
        encode(RunStarted(time=1.0, schema=1, run=object(), incarnation=0, version=0, step=1))  # type: ignore[arg-type]
    long = json.dumps({"event": "run_started", "x" * 9000: 1}).encode()
    with pytest.raises(TraceError) as caught:
        decode(long)
    assert "…" in str(caught.value)
    assert len(str(caught.value)) <= LONGEST_MESSAGE
