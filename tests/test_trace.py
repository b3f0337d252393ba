"""The writer and the reader of a trace as a pair, on real files, a full disk included."""

from __future__ import annotations

import gzip
import json
import logging
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rl_staleness import Call, StalenessCallback, TraceError, read, steps
from rl_staleness.events import GroupPublished, RefitCut, RunStarted, StepTrained, decode, encode
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
    """Ten times the steps, with refits and cuts, leave as many entries in the fold."""
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

    assert entries(3000) <= entries(600)
