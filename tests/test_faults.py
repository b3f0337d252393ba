"""A trainer's process that is killed, starved, forked and made to run for ever, for real."""

from __future__ import annotations

import gc
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from rl_staleness import Call, StalenessCallback, read, steps
from rl_staleness.engines import Cut
from rl_staleness.events import Gap, RunStarted
from rl_staleness.ledger import Ledger
from rl_staleness.resume import counted_steps
from rl_staleness.staleness import StepStaleness
from tests.fakes import FakeEngine

SEED = int(os.environ.get("RL_STALENESS_SEED", secrets.randbelow(2**32)))
KILLS = int(os.environ.get("RL_STALENESS_KILLS", "200"))
STEPS = 8


# A trainer that does the same at a step whenever it comes to it.


class Trainer:
    """Two engines, groups that wait for a step or two, a checkpoint every second step."""

    def __init__(self, folder: Path, *, hook: Callable[[], None] = lambda: None) -> None:
        self.trace = folder / "rollout_trace.jsonl"
        self.checkpoint = folder / "checkpoint.json"
        self.hook = hook
        """Called before every hook."""
        self.engines = [FakeEngine("a", counts={}), FakeEngine("b", counts={})]
        self.queue: list[str] = []
        anew: dict[str, Any] = {} if self.checkpoint.exists() else {"version": 0, "step": 1}
        self.staleness = StalenessCallback(
            trace=self.trace, run="r", engines=self.engines, sinks=[], timeout=60, **anew
        )
        if not anew:
            saved = json.loads(self.checkpoint.read_text())
            self.queue = saved["queue"]
            self.staleness.load_state_dict(saved["staleness"], waiting=self.queue)
        self.hook()
        self.staleness.start()

    def run(self) -> None:
        """Train to the end, and close the trace."""
        while self.staleness.step <= STEPS:
            self.step(self.staleness.step)
        self.hook()
        self.staleness.close()

    def step(self, step: int) -> None:
        """Roll out, refit in the middle, train what has waited long enough."""
        chance = random.Random(step)
        staleness, version = self.staleness, self.staleness.version
        running: list[tuple[str, FakeEngine, int, int]] = []
        for number in range(4):
            name = f"{step}-{number}"
            engine = self.engines[number % 2]
            running.append((name, engine, chance.randint(2, 9), staleness.last_refit(engine.name)))
        held = {engine.name: self.version_of(engine) for engine in self.engines}
        for engine in self.engines:
            engine.counts = {f"{n}/c": t for n, e, t, _ in running if e is engine}
        self.hook()
        staleness.on_refit_paused()
        if chance.random() < 0.3:
            self.hook()
            staleness.on_refit_aborted(reason="the transfer failed")
        else:
            self.hook()
            staleness.on_refit_done(version=version)
        for name, engine, tokens, after in running:
            call = Call(
                call=f"{name}/c",
                engine=engine.name,
                version=held[engine.name],
                tokens=tokens + chance.randint(0, 5),
                after=after,
                until=staleness.last_refit(engine.name),
            )
            self.hook()
            if chance.random() < 0.2:
                staleness.on_drop(name, reason="filtered", calls=[call])
            else:
                staleness.on_publish(name, calls=[call])
                self.queue.append(name)
        taken, self.queue = self.queue[:3], self.queue[3:]
        self.hook()
        staleness.on_step(taken, updates=chance.randint(1, 2))
        if step % 2 == 0:
            self.hook()
            self.save()

    def version_of(self, engine: FakeEngine) -> int:
        """What the engine holds, by the trace."""
        return self.staleness._recorder.ledger.engine_version(engine.name)

    def save(self) -> None:
        """What a trainer keeps, with its engines at the policy's version, whole or not at all."""
        for engine in self.engines:
            engine.counts = {}
        self.staleness.on_refit_paused()
        self.staleness.on_refit_done()
        new = self.checkpoint.with_suffix(".new")
        kept = {"queue": self.queue, "staleness": self.staleness.state_dict()}
        new.write_text(json.dumps(kept))
        new.rename(self.checkpoint)


def numbers(step: StepStaleness) -> dict[str, Any]:
    """What does not depend on how long things took, nor on what was dropped in between."""
    fields = {name: getattr(step, name) for name in step.__struct_fields__}
    return {k: v for k, v in fields.items() if k not in ("refit_seconds", "dropped_tokens")}


def made(path: Path) -> list[dict[str, Any]]:
    """The steps that a trace has in the end, each as it was made last."""
    found: dict[int, dict[str, Any]] = {}
    for _, step, _ in counted_steps(path):
        if step is not None:
            found[step.step] = numbers(step)
    return [found[step] for step in sorted(found)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The steps of the run that nobody killed."""
    folder = tmp_path_factory.mktemp("whole")
    Trainer(folder).run()
    expected = made(folder / "rollout_trace.jsonl")
    assert len(expected) == STEPS
    assert all(step["violations"] == 0 and step["coverage"] == 1 for step in expected)
    assert any(step["spanning_calls"] for step in expected)
    assert any(step["batch_age"] for step in expected)
    return expected


class Death:
    """Kills this process at a write of its trace: before it, after it, or in the middle of it."""

    def __init__(self, at: int, how: str) -> None:
        self.left, self.how, self.write = at, how, os.write

    def __call__(self, file: int, data: bytes) -> int:
        self.left -= 1
        if self.left:
            return self.write(file, data)
        if self.how != "before":
            self.write(file, data if self.how == "after" else data[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("it outlived its kill")


def in_child(do: Callable[[], None]) -> int:
    """Do something in a fork of this process; the signal that ended it, 0 if none did."""
    child = os.fork()
    if not child:
        try:
            do()
            os._exit(0)
        finally:
            os._exit(9)
    _, status = os.waitpid(child, 0)
    assert not os.WIFEXITED(status) or not os.WEXITSTATUS(status)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def killed(folder: Path, chance: random.Random) -> bool:
    """Train in a process that is killed somewhere; whether it was."""
    at, how = chance.randint(1, 120), chance.choice(["hook", "before", "after", "within"])

    def train() -> None:
        left = at

        def hook() -> None:
            nonlocal left
            left -= 1
            if how == "hook" and not left:
                os.kill(os.getpid(), signal.SIGKILL)

        if how != "hook":
            os.write = Death(at, how)  # type: ignore[assignment]
        Trainer(folder, hook=hook).run()

    return in_child(train) == signal.SIGKILL


def test_a_trainer_killed_anywhere_leaves_a_true_trace_and_goes_on_exactly(
    tmp_path: Path, whole: list[dict[str, Any]]
) -> None:
    """At any hook and in any write: the trace is readable, its steps are those of the run that
    was not killed, and what goes on from the last checkpoint ends with the same steps.
    """
    print(f"RL_STALENESS_SEED={SEED}")
    chance = random.Random(SEED)
    deaths = runs = most = 0
    while deaths < KILLS:
        runs += 1
        folder = tmp_path / str(runs)
        folder.mkdir()
        path = folder / "rollout_trace.jsonl"
        while killed(folder, chance):
            deaths += 1
            if path.exists() and path.read_bytes().count(b"\n"):
                left = made(path)
                assert left == whole[: len(left)], f"run {runs}, death {deaths}"
        assert made(path) == whole, f"run {runs}"
        lives = [event for event in read(path) if isinstance(event, RunStarted)]
        assert [life.incarnation for life in lives] == list(range(len(lives)))
        most = max(most, len(lives))
    assert most > 2  # some went on more than once


# The disk.


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 128 kB, where this process may make one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount here")
    if done.returncode:
        pytest.skip(f"mounting is not allowed here: {done.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_loses_whole_lines_and_says_so(small_disk: Path) -> None:
    """Training goes on; the trace stays readable, says how many lines are lost, and the run goes
    on in it when there is room again.
    """
    path = small_disk / "rollout_trace.jsonl"
    rubbish = small_disk / "rubbish"
    with StalenessCallback(trace=path, run="r", sinks=[]) as staleness:
        staleness.on_step([])
        with open(rubbish, "wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
            while True:
                file.write(b"x" * 4096)
        while staleness.on_step(["y" * 500]) is not None:  # what is left of the last page
            pass
        assert staleness.on_step(["y" * 500]) is None
        assert len(list(steps(path))) == staleness.step - 3
        rubbish.unlink()
        again = staleness.on_step([])
        missing = staleness.missing()
    assert again is not None
    assert (again.violations, missing["lines of the trace could not be written"]) == (0, 2)
    assert [event.lost for event in read(path) if isinstance(event, Gap)] == [2]
    assert list(steps(path))[-1] == again


READ_ONLY = """
import os, sys
from rl_staleness import StalenessCallback, steps
os.setgid(65534); os.setuid(65534)
try:
    StalenessCallback(trace=sys.argv[1], sinks=[])
except PermissionError as error:
    print(error)
"""


def test_a_trace_that_may_not_be_written_is_refused_where_it_is_named(tmp_path: Path) -> None:
    """Read-only to this user: at construction, with the way out; nothing is changed."""
    if os.getuid():
        pytest.skip("only root can be somebody who may not write")
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    path = tmp_path / "rollout_trace.jsonl"
    with StalenessCallback(trace=path, sinks=[]) as staleness:
        staleness.on_step([])
    path.chmod(0o444)
    before = path.read_bytes()
    command = [sys.executable, "-c", READ_ONLY, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert "pass trace= a file that can be written" in done.stdout, done.stderr
    assert path.read_bytes() == before


def test_a_file_system_that_turns_read_only_stops_nothing(small_disk: Path) -> None:
    """It is what a kernel does after an error of the disk: lines are lost, a new run is refused."""
    path = small_disk / "rollout_trace.jsonl"
    staleness = StalenessCallback(trace=path, run="r", sinks=[])
    staleness.on_step([])
    staleness._recorder.close()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    assert [step.step for step in steps(path)] == [1]
    with pytest.raises(OSError, match="pass trace= a file that can be written"):
        StalenessCallback(trace=path, run="r", sinks=[])


# Clocks, threads, forks.


def test_clocks_that_jump_change_no_number(tmp_path: Path) -> None:
    """Times are for people: days back and forth between lines leave ages and pauses alone."""
    chance = random.Random(SEED)
    print(f"RL_STALENESS_SEED={SEED}")

    def run(path: Path, clock: Callable[[], float]) -> list[dict[str, Any]]:
        with StalenessCallback(trace=path, sinks=[], clock=clock) as staleness:
            for step in range(20):
                staleness.on_refit_paused(cuts={"engine": {f"c{step}": 3}})
                staleness.on_refit_done()
                call = Call(
                    call=f"c{step}",
                    engine="engine",
                    version=max(step - 1, 0),
                    tokens=9,
                    after=step,
                    until=step + 1,
                )
                staleness.on_publish(f"g{step}", calls=[call])
                numbers = staleness.on_step([f"g{step}"])
                assert numbers is not None
                assert 0 <= numbers.refit_seconds < 60
        assert list(steps(path))[-1] == numbers
        return made(path)

    steady = run(tmp_path / "steady.jsonl", lambda: 1e9)
    assert steady == run(tmp_path / "jumps.jsonl", lambda: chance.uniform(-1e9, 2e9))
    assert [step["violations"] for step in steady] == [0] * 20


def test_all_hooks_from_eight_threads(tmp_path: Path) -> None:
    """Each thread rolls out, refits an engine of its own, and trains what it published."""
    engines = [FakeEngine(str(number), counts={}) for number in range(8)]
    path = tmp_path / "rollout_trace.jsonl"
    online: list[StepStaleness] = []
    states: list[dict[str, Any]] = []
    with StalenessCallback(trace=path, engines=engines, sinks=[online.append]) as staleness:
        barrier = threading.Barrier(8, timeout=60)
        staleness.start()

        def work(number: int) -> None:
            engine = engines[number]
            barrier.wait()
            for index in range(25):
                name = f"{number}/{index}"
                after = staleness.last_refit(engine.name)
                engine.counts = {name: 4}
                held = staleness._recorder.ledger.engine_version(engine.name)
                with staleness.refit(engines=[engine.name]):
                    pass
                call = Call(
                    call=name,
                    engine=engine.name,
                    version=held,
                    tokens=10,
                    after=after,
                    until=staleness.last_refit(engine.name),
                )
                staleness.on_publish(name, calls=[call])
                if index % 5:
                    staleness.on_step([name])
                else:
                    staleness.on_drop(name, reason="odd")
                states.append(staleness.state_dict())
                staleness.spans(call)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=120)
        assert not any(thread.is_alive() for thread in threads)
        assert staleness.missing() == {}
    assert [step.step for step in online] == list(range(1, 161))
    assert online == list(steps(path))
    assert sum(step.tokens for step in online) == 1600
    assert {step.coverage for step in online} == {1.0}
    ledger, places = Ledger(), {}
    for number, event in enumerate(read(path), start=1):
        ledger.apply(event)
        places[number] = ledger.version, ledger.step
    assert len(states) == 200
    for state in states:  # no step is half in it
        assert (state["version"], state["step"]) == places[state["line"]]


def test_a_fork_after_construction_is_harmless(tmp_path: Path) -> None:
    """A child that calls hooks writes nothing, and ends as if it had none; the parent goes on."""
    path = tmp_path / "rollout_trace.jsonl"
    engine = FakeEngine(counts={})
    with StalenessCallback(trace=path, run="r", engines=[engine], sinks=[]) as staleness:

        def hooks() -> None:
            staleness.on_publish("g", calls=[Call(call="c", engine="engine", version=0, tokens=3)])
            staleness.on_step(["g"])
            with staleness.refit():
                pass
            staleness.state_dict()
            staleness.close()

        assert in_child(hooks) == 0  # before the first hook
        staleness.on_step([])
        before = path.read_bytes()
        assert in_child(hooks) == 0
        assert path.read_bytes() == before
        numbers = staleness.on_step([])
    assert numbers is not None
    assert (numbers.step, numbers.violations) == (2, 0)


# A long time.


def test_ten_thousand_groups_that_are_never_trained(tmp_path: Path) -> None:
    """Calls that no group ever publishes are forgotten and counted; groups that wait take what
    they need, and nothing once they are dropped.
    """
    path = tmp_path / "rollout_trace.jsonl"
    with StalenessCallback(trace=path, sinks=[]) as staleness:
        ledger = staleness._recorder.ledger
        sizes = []
        for number in range(1000):
            counts = {f"{number}/{index}": 1 for index in range(10)}
            staleness.on_refit_paused(cuts={"engine": counts})
            staleness.on_refit_done()
            sizes.append(ledger.size)
        assert ledger.orphans == 10_000 - 640
        assert max(sizes) == max(sizes[:600])
        empty = ledger.size
        names = [f"g{number}" for number in range(10_000)]
        for name in names:
            call = Call(call=name, engine="engine", version=0, tokens=5, after=1000, until=1000)
            staleness.on_publish(name, calls=[call])
        assert ledger.size - empty == 10_000
        for name in names:
            staleness.on_drop(name, reason="too old")
        assert ledger.size == empty
        numbers = staleness.on_step([])
        missing = staleness.missing()
    assert numbers is not None
    assert numbers.dropped_tokens == 50_000
    assert missing == {"calls that cuts listed were never published": 9360}


def silent() -> Future[None]:
    """The answer of an engine that never answers."""
    return Future()


def run_of(
    staleness: StalenessCallback, engines: list[FakeEngine], first: int, last: int, *, uneven: bool
) -> int:
    """Steps of an asynchronous run with late cuts, drops and calls that nobody publishes.

    Args:
        uneven: refits that fail now and then, and steps of several updates.

    Returns:
        Bytes that are held at most.
    """
    most = 0
    for step in range(first, last):
        held = {e.name: staleness._recorder.ledger.engine_version(e.name) for e in engines}
        staleness.on_refit_paused()
        if uneven and step % 7 == 0:
            staleness.on_refit_aborted(reason="the transfer failed")
        else:
            staleness.on_refit_done()
            for engine in engines:
                engine.deliver(Cut(calls={f"{step}": 5, f"lost/{step}": 1}))
        for engine in engines:
            refit = staleness.last_refit(engine.name)
            call = Call(
                call=f"{step}",
                engine=engine.name,
                version=held[engine.name],
                tokens=20,
                after=refit - 1,
                until=refit,
            )
            staleness.on_publish(f"g{step}/{engine.name}", calls=[call])
        numbers = staleness.on_step([f"g{step}/a"], updates=1 + step % 2 if uneven else 1)
        assert numbers is not None
        assert (numbers.violations, numbers.coverage) == (0, 1.0)
        staleness.on_drop(f"g{step}/b", reason="too old")
        for each in staleness._pauses.engines.values():
            assert isinstance(each, FakeEngine)
            each.heard.clear()
        if step % 3 == 0:
            gc.collect()
            most = max(most, tracemalloc.get_traced_memory()[0])
    return most


@pytest.mark.parametrize("uneven", [False, True])
def test_a_long_run_in_fast_motion(uneven: bool) -> None:
    """Four times the history holds as many bytes: ledger, pauses, sums and all. Of refits that
    fail, lead on unevenly or reach no engine, each is remembered: less than 200 bytes.
    """
    engines = [FakeEngine("a"), FakeEngine("b")]
    dead = FakeEngine("dead")
    dead.answer = silent
    staleness = StalenessCallback(
        trace=None,
        engines=[*engines, dead] if uneven else engines,
        sinks=[],
        orphan_after=8,
        timeout=0,
    )
    staleness.start()
    gc.freeze()  # what other tests have imported is not looked through each time
    tracemalloc.start()
    try:
        short = run_of(staleness, engines, 0, 400, uneven=uneven)
        long = run_of(staleness, engines, 400, 1600, uneven=uneven)
    finally:
        tracemalloc.stop()
        gc.unfreeze()
        staleness.close()
    if uneven:
        assert (long - short) / (1200 * 3) < 200
    else:
        assert long < short * 1.25
