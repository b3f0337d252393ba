"""Any bytes may stand in a trace, and anything may be at the other end of a connection.

No crash, no hang, no memory without bounds. What is tried here is the same on every run, and some
more that is new each time; ``python -m tests.fuzz TARGET`` goes on for as long as it is told to,
led by what the inputs reach.
"""

from __future__ import annotations

import gzip
import os
import random
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rl_staleness import StalenessCallback, trace
from rl_staleness.events import LONGEST_MESSAGE, TraceError, decode
from rl_staleness.trace import LONGEST_LINE, MOST_UNPACKED, TraceWriter
from tests.fuzz import targets
from tests.fuzz.mutations import mutated, seeds

START = (
    b'{"event":"run_started","time":1.0,"schema":1,"run":"r","incarnation":0,"version":0,"step":0}'
    b"\n"
)

GIB = 1 << 30

LIMITED = settings(
    max_examples=40,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.mark.parametrize(("name", "times"), targets.RUNS)
def test_what_is_nearly_right(name: str, times: int, tmp_path: Path) -> None:
    """What is drawn from a fixed seed, then from the run's own."""
    for chance in (random.Random(1), random.Random(int(os.environ["RL_STALENESS_SEED"]))):
        for _ in range(times):
            targets.TARGETS[name](mutated(chance.choice(targets.SEEDS[name]), chance), tmp_path)


@LIMITED
@given(chance=st.randoms(use_true_random=False), which=st.integers(0, 3))
def test_traces_that_shrink(chance: random.Random, which: int, tmp_path: Path) -> None:
    """The same by Hypothesis, which makes a small one of what fails."""
    targets.read_trace(mutated(seeds()[which], chance, largest=1 << 14), tmp_path)


@LIMITED
@given(line=st.binary(max_size=200))
def test_any_line(line: bytes) -> None:
    """It is an event, or an error of one short line."""
    try:
        decode(line)
    except TraceError as error:
        assert len(str(error)) <= LONGEST_MESSAGE


@pytest.mark.parametrize(
    "line",
    [
        b'{"event":"' + b"x" * 1_000_000 + b'","time":1}',
        START[:-2] + b',"' + b"y" * 1_000_000 + b'":1}',
        START[:-2] + b',"about":{"a":' + b"9" * 10_000 + b"}}",
        b'{"event":"gap","time":' + b"9" * 1000 + b',"lost":1}',
        b'{"event":"gap","time":1,"lost":' + b"9" * 1000 + b"}",
        b'{"event":"gap","time":1e999,"lost":1}',
        START[:-2] + b',"about":{"a":' + b"[" * 10**6 + b"]" * 10**6 + b"}}",
        b"[" * 10**6,
        b'{"a":' * 10**6,
    ],
    ids=lambda line: repr(line[:40]),
)
def test_lines_of_no_measure(line: bytes, tmp_path: Path) -> None:
    """Long names, numbers of a thousand digits and deep nesting are errors of a readable length."""
    with pytest.raises(TraceError) as error:
        decode(line)
    assert ": " in str(error.value) and len(str(error.value)) <= LONGEST_MESSAGE
    targets.read_trace(START + line + b"\n", tmp_path)


def test_numbers_of_a_thousand_digits_that_can_be_read(tmp_path: Path) -> None:
    """`about` may hold any; whoever looks for a count there finds none."""
    digits = "9" * 1000
    about = f'{{"prompt_tokens":{digits},"dispatched_step":{digits},"pulled_version":{digits},'
    about += f'"summed_calls":{{"0":{digits}}},"orphan_after":{digits}}}'
    group = f'{{"event":"group_published","time":1,"group":"g","tokens":{{"0":1}},"about":{about}}}'
    named = group.replace(f':{digits},"dis', f':{{"c":{digits}}},"dis').replace('"g"', '"h"')
    named = named.replace(
        '"about"', '"calls":[{"call":"c","engine":"e","version":0,"tokens":5}],"about"'
    )
    step = '{"event":"step_trained","time":1,"step":0,"version":0,"groups":["g","h"]}'
    start = START.decode()[:-2] + f',"about":{about}}}'
    targets.read_trace("\n".join((start, group, named, step, "")).encode(), tmp_path)


def test_nesting_that_can_be_read_can_be_told(tmp_path: Path) -> None:
    """What a reader takes, no command stumbles over."""
    for depth in (100, 500, 900, 990, 2000):
        deep = b'{"a":' * depth + b"1" + b"}" * depth
        group = b'{"event":"group_published","time":1,"group":"g","tokens":{"0":1},"about":'
        step = b'{"event":"step_trained","time":1,"step":0,"version":0,"groups":["g"]}\n'
        targets.read_trace(
            START[:-2] + b',"about":' + deep + b"}\n" + group + deep + b"}\n" + step, tmp_path
        )


def test_lines_too_long_are_never_written(tmp_path: Path) -> None:
    """What no reader would take is refused like a wrong type, and the trace stays whole."""
    path = tmp_path / "trace.jsonl"
    staleness = StalenessCallback(trace=path, run="r")
    staleness.on_drop("g", reason="x" * LONGEST_LINE)
    staleness.on_step([])
    staleness.close()
    assert staleness.missing()["events had a value of a wrong type and were refused"] == 1
    assert [type(event).__name__ for event in trace.read(path)][1] == "StepTrained"
    assert path.stat().st_size < 10_000


MEASURED = """
{what}
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
"""
"""Not what `getrusage` says, which begins with the memory of the process that started it."""


def memory_of(what: str, *, seconds: float = 60) -> int:
    """The most memory in MiB that a process had that did this."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURED.format(what=textwrap.dedent(what))],
        capture_output=True,
        text=True,
        timeout=seconds,
        cwd=Path(trace.__file__).parents[1],
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return int(done.stdout.split()[-1]) // 1024


def test_a_line_of_a_gibibyte(tmp_path: Path) -> None:
    """Readers stop at the longest line, wherever it stands; nobody holds more than a few."""
    first, later, last = (tmp_path / f"{name}.jsonl" for name in ("first", "later", "last"))
    for path, start in ((first, b""), (later, START), (last, START)):
        path.write_bytes(start)
        with path.open("rb+") as file:
            file.truncate(GIB)  # takes no place on the disk
    with pytest.raises(TraceError, match=f":2: line: longer than {LONGEST_LINE} bytes"):
        list(trace.read(later))
    with pytest.raises(TraceError, match=r"its last line is longer than .* pass trace="):
        TraceWriter(last, run="r")
    assert last.stat().st_size == GIB, "it is left as it is"
    code = f"""
    from rl_staleness.artifacts import pack
    from rl_staleness.cli import main
    from rl_staleness.events import TraceError
    from rl_staleness.trace import TraceWriter
    assert main(["steps", {str(first)!r}]) == main(["doctor", {str(later)!r}]) == 2
    for what in (lambda: pack({str(later)!r}, {str(tmp_path)!r}),
                 lambda: TraceWriter({str(last)!r}, run="r")):
        try:
            what()
        except TraceError:
            continue
        raise AssertionError("taken")
    """
    assert memory_of(code) < 400


def bomb(path: Path, block: bytes, *, times: int) -> Path:
    """A packed trace that is small, and is not once it is unpacked."""
    path.write_bytes(gzip.compress(START) + times * gzip.compress(block))
    return path


def test_a_packed_line_of_gibibytes(tmp_path: Path) -> None:
    """Only as much is unpacked as the longest line has."""
    path = bomb(tmp_path / "t.jsonl.gz", bytes(1 << 24), times=1024)
    assert path.stat().st_size < 20_000_000
    code = f"""
    from rl_staleness.cli import main
    assert main(["doctor", {str(path)!r}]) == 2
    """
    assert memory_of(code) < 400


def test_a_packed_trace_of_many_good_lines(tmp_path: Path) -> None:
    """Good lines that wait for ever would fill the memory: a file holds a hundred times its size.

    A real trace holds about ten times.
    """
    group = b'{"event":"group_published","time":1,"group":"%s"}\n' % (b"x" * (1 << 20))
    path = bomb(tmp_path / "t.jsonl.gz", group, times=96)
    assert MOST_UNPACKED * path.stat().st_size < 96 << 20
    with pytest.raises(TraceError, match=":65: line: the file unpacks to more than 100 times its"):
        for _ in trace.read(path):
            pass
    small = bomb(tmp_path / "s.jsonl.gz", group, times=60)
    assert sum(1 for _ in trace.read(small)) == 61, "what is small when unpacked is read"
    gaps = b"".join(b'{"event":"gap","time":%d,"lost":1}\n' % at for at in range(100_000))
    path.write_bytes(gzip.compress(START) + 20 * gzip.compress(gaps, 1))
    assert 20 * len(gaps) > LONGEST_LINE
    assert sum(1 for _ in trace.read(path)) == 2_000_001, "it holds what it may"


def test_a_last_line_of_many_blocks_is_looked_at_once(tmp_path: Path) -> None:
    """A torn line of some megabytes is cut off, and no more is read than it has."""
    path = tmp_path / "trace.jsonl"
    for torn in (1, 65_535, 65_536, 65_537, 5_000_000):
        path.write_bytes(START + b"x" * torn)
        writer = TraceWriter(path, run="r")
        writer.close()
        assert writer.torn == torn and path.read_bytes() == START
    path.write_bytes(START + START[:-1].replace(b'"run":', b'"engines":{},"run":'))
    writer = TraceWriter(path, run="r")
    writer.close()
    assert writer.torn == 0 and path.read_bytes().endswith(b"}\n")
