"""Engines that are killed, stopped and cut off in the middle of refits, for real.

Two engines, each in a process of its own: something happens to ``b``, and ``a`` goes on. Every token
is the version that made it, so that what is said of it can be held against the truth.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import pytest

from rl_staleness import Call, StalenessCallback, read, steps
from rl_staleness.engines import Engine
from rl_staleness.events import GroupPublished, StepTrained
from rl_staleness.integrations.vllm_http import VllmServerEngine
from rl_staleness.ledger import Ledger
from rl_staleness.staleness import StepStaleness
from tests.fakes import FakeEngine, noticed

os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # listen on the loopback interface only

ROOT = Path(__file__).parents[1]

PATIENCE = 2.0
"""Seconds that a hook waits for engines here."""

POINTS = ["paused", "cutting", "cut", "loaded", "telling", "told"]
"""Where in a refit: before the library hears of it, within and after its cut, after the weights are
in, while it tells the engine so, and before generation resumes."""


# A trainer.


class Seat(Protocol):
    """What a trainer does with one engine, wherever that lives. What fails raises."""

    engine: Engine

    def begin(self, call: str) -> None: ...

    def make(self, call: str, tokens: int) -> None: ...

    def finish(self, call: str) -> tuple[list[int], tuple[Call, ...]]:
        """The tokens that came, and the library's records."""
        ...

    def obey(self, order: str, *, version: int) -> None: ...

    def die_in(self, method: str) -> None: ...

    def kill(self) -> None: ...

    def come_back(self) -> None:
        """Wait until it is there again, with the weights of version 0."""
        ...


class Trainer:
    """Rolls out on two engines, refits them, and holds every token against the truth."""

    def __init__(self, trace: Path, seats: dict[str, Any]) -> None:
        self.seats: dict[str, Any] = seats
        self.trace = trace
        self.staleness = StalenessCallback(
            engines=[seat.engine for seat in seats.values()],
            trace=trace,
            sinks=[],
            timeout=PATIENCE,
            late_masks=True,
        )
        self.hook(self.staleness.start)
        self.truth: dict[str, list[int]] = {}
        """The versions that made the tokens of each call."""
        self.groups: list[str] = []
        self.online: list[StepStaleness] = []

    def hook(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a hook, which comes back in time whatever has happened."""
        began = time.monotonic()
        result = call(*args, **kwargs)
        assert time.monotonic() - began < PATIENCE + 5
        return result

    def publish(self, name: str, call: str) -> None:
        """Finish a call and publish it as a group."""
        tokens, records = self.seats[name].finish(call)
        (record,) = records
        assert record.tokens == len(tokens)
        self.truth[record.call] = tokens
        self.groups.append(call)
        self.hook(self.staleness.on_publish, call, calls=records)

    def train(self) -> StepStaleness:
        """Train what is published."""
        step = self.hook(self.staleness.on_step, self.groups)
        self.groups = []
        assert step is not None
        self.online.append(step)
        return step

    def refit(
        self,
        *,
        at: str = "",
        fault: Callable[[], None] = lambda: None,
        again: Callable[[], None] | None = None,
        engines: list[str] | None = None,
    ) -> None:
        """Pause, load, resume. What an engine refuses is a failed refit of that engine.

        Args:
            at: the point where something happens.
            again: instead of giving up an engine whose load failed, do this and load once more.
        """
        if not self.groups:
            self.train()
        version, names = self.staleness.version, engines or list(self.seats)

        def reach(point: str) -> None:
            if at == point:
                fault()

        def order(name: str, what: str) -> bool:
            try:
                self.seats[name].obey(what, version=version)
            except Exception:  # noqa: BLE001  # whatever a dead engine raises
                return False
            return True

        reach("begin")
        for name in names:
            order(name, "pause")
        reach("paused")
        self.hook(self.staleness.on_refit_paused, engines=names)
        reach("cut")
        failed = []
        for name in names:
            if order(name, "load"):
                continue
            if again is not None:
                again()
            if again is None or not order(name, "load"):
                failed.append(name)
        reach("loaded")
        if failed:
            self.hook(self.staleness.on_refit_aborted, reason="no transfer", engines=failed)
        there = [name for name in names if name not in failed]
        if there:
            self.hook(self.staleness.on_refit_done, engines=there)
        reach("told")
        for name in names:
            order(name, "resume")

    def close(self) -> Compared:
        """Close, and hold every token of the trace against the truth."""
        self.hook(self.staleness.close)
        assert list(steps(self.trace)) == self.online
        return compared(self.trace, self.truth, self.online)


class Compared:
    """What the trace says of every token that was trained."""

    def __init__(self) -> None:
        self.covered: Counter[str] = Counter()
        """Tokens of each call of which it says one version."""
        self.open: Counter[str] = Counter()
        """Tokens of each call of which it says bounds."""


def compared(trace: Path, truth: dict[str, list[int]], online: list[StepStaleness]) -> Compared:
    """Hold every token and every step against the truth."""
    found, ledger = Compared(), Ledger()
    waiting: dict[str, tuple[Call, ...]] = {}
    told = iter(online)
    for event in read(trace):
        if isinstance(event, GroupPublished):
            waiting[event.group] = event.calls
        elif isinstance(event, StepTrained):
            step = next(told)
            ages: list[int] = []
            for group in event.groups or ():
                for call in waiting.pop(group):
                    versions = truth[call.call]
                    ages += [event.version - version for version in versions]
                    for start, stop, oldest, newest in ledger.spans(call):
                        said = f"{call.call}: {start}-{stop} are {oldest}-{newest}, {versions}"
                        assert all(oldest <= v <= newest for v in versions[start:stop]), said
                        kind = found.covered if oldest == newest else found.open
                        kind[call.call.partition("/")[0]] += len(versions[start:stop])
            assert (step.tokens, step.violations) == (len(ages), 0), ledger.found
            if ages:
                assert step.age_lo is not None and step.age_hi is not None
                assert step.age_lo - 1e-9 <= sum(ages) / len(ages) <= step.age_hi + 1e-9
        ledger.apply(event)
    assert not waiting
    return found


def logged(caplog: pytest.LogCaptureFixture) -> Counter[str]:
    """How often each line of the library was logged."""
    return Counter(
        record.getMessage()
        for record in caplog.records
        if record.name.startswith("rl_staleness") and record.levelno >= logging.WARNING
    )


# What hooks conclude from answers that come late, or not.


class Late(FakeEngine):
    """An engine that answers when the test says."""

    def __init__(self) -> None:
        super().__init__("b")
        self.asked: list[Future[None]] = []
        self.late = False

        def answer() -> Future[None]:
            if not self.late:
                return noticed()
            self.asked.append(Future())
            return self.asked[-1]

        self.answer = answer

    def catch_up(self) -> None:
        """Answer everything."""
        for future in self.asked:
            future.set_result(None)
        self.asked.clear()


@pytest.mark.parametrize("ending", ["late", "aborted"])
def test_numbers_of_an_engine_that_heard_late_and_then_not_at_all(
    ending: str, tmp_path: Path
) -> None:
    """Whatever number it went on with may be too old: a refit that it missed moved its calls."""
    path = tmp_path / "rollout_trace.jsonl"
    engine, truth = Late(), {"c": [1, 1, 2, 2] if ending == "late" else [0, 0, 2, 2]}
    with StalenessCallback(
        trace=path, engines=[engine], sinks=[], timeout=0, late_masks=True
    ) as staleness:
        staleness.on_step([])
        engine.late = ending == "late"
        staleness.on_refit_paused()
        if ending == "late":
            staleness.on_refit_done()
        else:
            staleness.on_refit_aborted(reason="no transfer")
        engine.catch_up()
        staleness.on_step([])
        engine.late = True
        staleness.on_refit_paused()
        staleness.on_refit_done()
        # Begun and ended after refit 1 as far as the engine knows, across refit 2 in truth.
        call = Call(call="c", engine="b", version=truth["c"][0], tokens=4, after=1, until=1)
        staleness.on_publish("g", calls=[call])
        step = staleness.on_step(["g"])
    assert step is not None
    assert step.coverage == 0
    found = compared(path, truth, list(steps(path)))
    assert (found.covered["c"], found.open["c"]) == (0, 4)


# Engines in Ray actors.


class RaySeat:
    """An engine in an actor, which Ray starts again when it is dead."""

    def __init__(self, name: str) -> None:
        import ray

        from tests.scripted import Generator

        remote = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=0)(Generator)
        self.name = name
        self.actor = remote.remote(name)
        self.engine = self.new_engine()

    def new_engine(self) -> Any:
        """For the next run."""
        from rl_staleness.integrations.ray import RayEngine

        self.engine = RayEngine(self.actor, name=self.name)
        return self.engine

    def ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """One call, which must be answered in time."""
        import ray

        return ray.get(getattr(self.actor, method).remote(*args, **kwargs), timeout=PATIENCE)

    def begin(self, call: str) -> None:
        self.ask("begin", call)

    def make(self, call: str, tokens: int) -> None:
        self.ask("make", call, tokens)

    def finish(self, call: str) -> tuple[list[int], tuple[Call, ...]]:
        tokens, records = self.ask("finish", call)
        return tokens, records

    def obey(self, order: str, *, version: int) -> None:
        self.ask("obey", order, version=version, until=time.time() + PATIENCE)

    def die_in(self, method: str) -> None:
        self.ask("die_in", method)

    def kill(self) -> None:
        process = self.ask("process")
        os.kill(process, signal.SIGKILL)
        wait_for(lambda: not alive(process))

    def stop(self) -> int:
        """Let it hang; the process that does."""
        process: int = self.ask("process")
        os.kill(process, signal.SIGSTOP)
        return process

    def come_back(self) -> None:
        def there() -> bool:
            try:
                return bool(self.ask("process"))
            except Exception:  # noqa: BLE001  # whatever Ray raises until then
                return False

        wait_for(there)


def alive(process: int) -> bool:
    """Whether there is such a process, and no zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (OSError, IndexError):
        return False


def wait_for(condition: Callable[[], bool], *, seconds: float = 60) -> None:
    """Ask until it is so."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture(scope="module")
def actors() -> Iterator[dict[str, RaySeat]]:
    """A Ray of this module's own, with two engines."""
    ray = pytest.importorskip("ray")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # Ray keeps the first one
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        for module in ("tests.asgi", "tests.scripted"):
            ray.cloudpickle.register_pickle_by_value(importlib.import_module(module))
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            logging_level="ERROR",
            log_to_driver=False,
            _temp_dir=folder,
        )
        yield {name: RaySeat(name) for name in "ab"}
        ray.shutdown()


@pytest.fixture
def ray_trainer(actors: dict[str, RaySeat], tmp_path: Path) -> Iterator[Trainer]:
    """A run of its own on them."""
    for seat in actors.values():
        seat.come_back()
        seat.ask("renew")
        seat.new_engine()
    trainer = Trainer(tmp_path / "rollout_trace.jsonl", dict(actors))
    yield trainer
    trainer.staleness.close()


def fault_in(trainer: Trainer, point: str) -> tuple[str, Callable[[], None]]:
    """Where the trainer has to do something, and what, so that ``b`` is killed at a point."""
    seat = trainer.seats["b"]
    if point in ("cutting", "telling"):
        return "begin", lambda: seat.die_in("mark" if point == "cutting" else "done")
    return point, seat.kill


def killed_in_a_refit(trainer: Trainer, point: str, *, again: bool) -> Compared:
    """``b`` is killed at a point of a refit and comes back with other weights."""
    a, b = trainer.seats["a"], trainer.seats["b"]
    for seat, call in ((a, "a-early"), (b, "b-early"), (a, "a-across"), (b, "b-lost")):
        seat.begin(call)
        seat.make(call, 10)
    for name, call in (("a", "a-early"), ("b", "b-early")):
        trainer.publish(name, call)
    trainer.train()
    at, fault = fault_in(trainer, point)
    trainer.refit(at=at, fault=fault, again=b.come_back if again else None)
    a.make("a-across", 10)
    trainer.publish("a", "a-across")
    b.come_back()
    for seat, call in ((a, "a-over"), (b, "b-back"), (b, "b-over")):
        seat.begin(call)
        seat.make(call, 5)
    trainer.publish("b", "b-back")
    trainer.train()
    trainer.refit()
    for name, call in (("a", "a-over"), ("b", "b-over")):
        trainer.seats[name].make(call, 5)
        trainer.publish(name, call)
    for name, call in (("a", "a-late"), ("b", "b-late")):
        trainer.seats[name].begin(call)
        trainer.seats[name].make(call, 10)
    trainer.train()
    trainer.refit()
    for name, call in (("a", "a-late"), ("b", "b-late")):
        trainer.seats[name].make(call, 10)
        trainer.publish(name, call)
    trainer.train()
    return trainer.close()


GOES_ON = "training goes on, this is logged once"

A_ALONE = {"a-early": 10, "a-across": 20, "a-over": 10, "a-late": 20}
"""Tokens of the engine to which nothing happens."""


@pytest.mark.parametrize(
    ("point", "again"),
    [
        pytest.param("paused", False, marks=pytest.mark.slow),
        ("paused", True),
        pytest.param("cutting", False, marks=pytest.mark.slow),
        ("cut", False),
        pytest.param("cut", True, marks=pytest.mark.slow),
        ("loaded", False),
        pytest.param("telling", False, marks=pytest.mark.slow),
        ("told", False),
    ],
)
def test_an_actor_that_is_killed_in_a_refit(
    ray_trainer: Trainer, point: str, again: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Its calls have bounds from its return to the next refit; the other engine's are covered."""
    found = killed_in_a_refit(ray_trainer, point, again=again)
    assert found.covered == {**A_ALONE, "b-early": 10, "b-late": 20}
    assert found.open == {"b-back": 5, "b-over": 10}
    refits = 2 if point in ("paused", "cutting") else 1
    missing = ray_trainer.staleness.missing()
    assert missing.pop("refits had no cut") == refits
    lines = logged(caplog)
    for what, times in missing.items():
        assert re.fullmatch("times telling engine 'b' of (pause|done|aborted) failed", what)
        assert times == 1
        assert lines[f"rl_staleness: {what.removeprefix('times ')}; {GOES_ON}"] == 1
    restarts = [line for line in lines if "engine 'b': the actor was restarted" in line]
    assert [lines[line] for line in restarts] == [1]
