"""An engine in a Ray actor: what costs whom its coverage, and that nobody waits for others."""

from __future__ import annotations

import os
import secrets
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # listen on the loopback interface only
ray = pytest.importorskip("ray")

from rl_staleness import Call, StalenessCallback  # noqa: E402
from rl_staleness.engines import Cut  # noqa: E402
from rl_staleness.integrations import ray as ours  # noqa: E402
from rl_staleness.integrations.ray import RayEngine  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """A Ray of this module's own."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # Ray keeps the first one
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            logging_level="ERROR",
            log_to_driver=False,
            _temp_dir=folder,
        )
        yield
        ray.shutdown()


@pytest.fixture(autouse=True)
def actors() -> Iterator[list[Any]]:
    """The actors of a test, ended with it."""
    started.clear()
    yield started
    for actor in started:
        ray.kill(actor)


started: list[Any] = []


class Told:
    """An engine that notes what it is told.

    Args:
        settles: it counts at the mark; otherwise when its actor is told to.
        stuck_until: it takes no notice of marks until there is this file. A method of its actor
            could not tell it: Ray calls none while a request is being served.
    """

    def __init__(self, name: str, *, settles: bool = True, stuck_until: Path | None = None) -> None:
        self.name = name
        self.told: list[tuple[object, ...]] = []
        self.marks: list[Callable[[Cut | None], None]] = []
        self.noticed: Future[None] = Future()
        self.settles = settles
        if stuck_until is None:
            self.noticed.set_result(None)
        else:
            ours.INSIDE_SECONDS = 60  # of this actor's process
            threading.Thread(target=self.wait_for, args=(stuck_until,), daemon=True).start()

    def start(self, *, version: int, refit: int) -> Future[None]:
        return self.note("start", version, refit)

    def mark(
        self, refit: int, *, version: int, mode: str, deliver: Callable[[Cut | None], None]
    ) -> Future[None]:
        if self.settles:
            deliver(Cut(calls={"c": refit}))
        else:
            self.marks.append(deliver)
        self.note("mark", refit, version, mode)
        return self.noticed

    def done(self, refit: int, *, version: int) -> Future[None]:
        return self.note("done", refit, version)

    def aborted(self, refit: int) -> Future[None]:
        return self.note("aborted", refit)

    def detach(self) -> None:
        self.note("detach")

    def wait_for(self, file: Path) -> None:
        while not file.exists():
            time.sleep(0.02)
        self.noticed.set_result(None)

    def note(self, *what: object) -> Future[None]:
        self.told.append(what)
        noticed: Future[None] = Future()
        noticed.set_result(None)
        return noticed


class Actor:
    """Has an engine, in two places."""

    def __init__(self, engine: Callable[[], Told]) -> None:
        self.staleness = engine()
        self.holder = SimpleNamespace(engine=self.staleness)

    async def told(self) -> list[tuple[object, ...]]:
        return self.staleness.told

    async def settle(self) -> None:
        for mark in self.staleness.marks:
            mark(Cut(calls={"c": 7}))


class Blocking:
    """Has an engine, and a method that blocks."""

    def __init__(self) -> None:
        self.staleness = Told("e")

    def block(self) -> None:
        time.sleep(4)


def new_actor(name: str = "e", *, settles: bool = True, stuck_until: Path | None = None) -> Any:
    """Start an actor that comes up again once; wait until it is there."""
    engine = partial(Told, name, settles=settles, stuck_until=stuck_until)
    actor = ray.remote(num_cpus=0, max_restarts=1, max_task_retries=-1)(Actor).remote(engine)
    started.append(actor)
    ray.get(actor.told.remote())
    return actor


class Counts:
    """Takes delivered cuts and lets a test wait for them."""

    def __init__(self) -> None:
        self.cuts: list[Cut | None] = []
        self.came = threading.Event()

    def __call__(self, cut: Cut | None) -> None:
        self.cuts.append(cut)
        self.came.set()


def kill(actor: Any) -> None:
    """Kill the actor's process and wait until Ray knows it."""
    ray.kill(actor)

    def gone() -> bool:
        try:
            ray.get(actor.told.remote(), timeout=30)
        except ray.exceptions.RayActorError:
            return True
        return False

    wait_for(gone)


def restart(actor: Any) -> None:
    """Kill the actor's process and wait until it is there again, knowing nothing."""
    ray.kill(actor, no_restart=False)

    def came_back() -> bool:
        try:
            return ray.get(actor.told.remote(), timeout=30) == []
        except ray.exceptions.RayError:
            return False

    wait_for(came_back)


def wait_for(condition: Callable[[], bool], *, seconds: float = 30) -> None:
    """Ask until it is so."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_engine_is_told_what_the_run_tells() -> None:
    """Every hook reaches the engine with its numbers, in order; the second detach does nothing."""
    actor, counts = new_actor(), Counts()
    engine = RayEngine(actor, name="e")
    engine.start(version=3, refit=5).result(10)
    engine.mark(6, version=4, mode="keep", deliver=counts).result(10)
    engine.done(6, version=4).result(10)
    engine.mark(7, version=5, mode="wait", deliver=counts).result(10)
    engine.aborted(7).result(10)
    engine.detach()
    engine.detach()
    expected = [
        ("start", 3, 5),
        ("mark", 6, 4, "keep"),
        ("done", 6, 4),
        ("mark", 7, 5, "wait"),
        ("aborted", 7),
        ("detach",),
    ]
    wait_for(lambda: ray.get(actor.told.remote()) == expected)
    assert counts.cuts == [Cut(calls={"c": 6}), Cut(calls={"c": 7})]


def test_counts_that_are_known_at_the_mark_come_before_it_is_acknowledged() -> None:
    """A cut does not have to be asked for where the engine has it at once."""
    actor, counts = new_actor(), Counts()
    engine = RayEngine(actor, name="e")
    engine.start(version=0, refit=0).result(10)
    engine.mark(1, version=1, mode="keep", deliver=counts).result(10)
    assert counts.cuts == [Cut(calls={"c": 1})]
    engine.detach()


def test_counts_may_come_after_the_refit() -> None:
    """The mark's future waits for the mark alone; counts are asked for until they are there."""
    actor, counts = new_actor(settles=False), Counts()
    engine = RayEngine(actor, name="e")
    engine.start(version=0, refit=0).result(10)
    engine.mark(1, version=1, mode="keep", deliver=counts).result(10)
    engine.done(1, version=1).result(10)
    assert counts.cuts == []
    ray.get(actor.settle.remote())
    assert counts.came.wait(10)
    assert counts.cuts == [Cut(calls={"c": 7})]
    engine.detach()


def test_counts_that_never_come_are_given_up() -> None:
    """After `patience` seconds the engine cannot say."""
    actor, counts = new_actor(settles=False), Counts()
    engine = RayEngine(actor, name="e", patience=0.1)
    engine.start(version=0, refit=0).result(10)
    engine.mark(1, version=1, mode="keep", deliver=counts).result(10)
    assert counts.came.wait(10)
    ray.get(actor.settle.remote())
    time.sleep(0.2)
    assert counts.cuts == [None]
    engine.detach()


@pytest.mark.parametrize("ending", ["done", "aborted"])
def test_mark_that_was_not_taken_in_the_pause_is_void(ending: str, tmp_path: Path) -> None:
    """What a slow actor counts after the refit went on is not the cut of that refit."""
    actor, counts = new_actor(stuck_until=tmp_path / "now"), Counts()
    engine = RayEngine(actor, name="e")
    engine.start(version=0, refit=0).result(10)
    noticed = engine.mark(1, version=1, mode="keep", deliver=counts)
    with pytest.raises(TimeoutError):
        noticed.result(0.3)
    if ending == "done":
        engine.done(1, version=1)
    else:
        engine.aborted(1)
    assert counts.cuts == [None]
    (tmp_path / "now").touch()
    noticed.result(30)
    time.sleep(0.2)
    assert counts.cuts == [None]
    engine.detach()


def test_slow_and_dead_actors_hold_up_nobody_else(tmp_path: Path) -> None:
    """Two engines that do not answer cost the third one nothing."""
    slow = new_actor("slow", stuck_until=tmp_path / "never")
    dead, well = new_actor("dead"), new_actor("well")
    engines = {
        name: RayEngine(actor, name=name)
        for name, actor in (("slow", slow), ("dead", dead), ("well", well))
    }
    for engine in engines.values():
        engine.start(version=0, refit=0).result(10)
    kill(dead)
    counts = {name: Counts() for name in engines}
    began = time.monotonic()
    noticed = {
        name: engine.mark(1, version=1, mode="keep", deliver=counts[name])
        for name, engine in engines.items()
    }
    assert time.monotonic() - began < 1
    noticed["well"].result(5)
    assert counts["well"].cuts == [Cut(calls={"c": 1})]
    with pytest.raises(ray.exceptions.RayActorError):
        noticed["dead"].result(10)
    assert counts["dead"].cuts == [None]
    assert not noticed["slow"].done()
    assert counts["slow"].cuts == []
    for engine in engines.values():
        engine.detach()


def test_restarted_engine_is_told_its_version_when_a_refit_of_it_is_done() -> None:
    """Nobody knows what it came up with: that refit has no counts, the next one has."""
    actor, first, second = new_actor(), Counts(), Counts()
    engine = RayEngine(actor, name="e")
    engine.start(version=0, refit=0).result(10)
    restart(actor)
    engine.mark(1, version=1, mode="keep", deliver=first).result(10)
    assert first.cuts == [None]
    assert ray.get(actor.told.remote()) == []
    engine.done(1, version=1).result(10)
    assert ray.get(actor.told.remote()) == [("start", 1, 1)]
    engine.mark(2, version=2, mode="keep", deliver=second).result(10)
    assert second.cuts == [Cut(calls={"c": 2})]
    engine.detach()


def test_engine_restarted_during_a_refit_stays_unknown_until_the_next() -> None:
    """Whether the new weights reached it before or after the restart cannot be known."""
    actor, counts = new_actor(settles=False), Counts()
    engine = RayEngine(actor, name="e")
    engine.start(version=0, refit=0).result(10)
    engine.mark(1, version=1, mode="keep", deliver=counts).result(10)
    restart(actor)
    with pytest.raises(RuntimeError, match="restarted during refit 1"):
        engine.done(1, version=1).result(10)
    assert counts.came.wait(10)
    assert counts.cuts == [None]
    assert ray.get(actor.told.remote()) == []
    engine.mark(2, version=2, mode="keep", deliver=counts).result(10)
    engine.done(2, version=2).result(10)
    assert ray.get(actor.told.remote()) == [("start", 2, 2)]
    engine.detach()


def test_engine_of_another_name_is_refused_by_both_names() -> None:
    """Records carry the name in the actor, refits the one in the driver."""
    engine = RayEngine(new_actor("inside"), name="outside")
    with pytest.raises(ValueError, match="'inside', not 'outside'"):
        engine.start(version=0, refit=0).result(10)
    engine.detach()


def test_receiver_that_raises_stops_nothing() -> None:
    """What it raises is the answer to the mark, and the next refit has its counts."""
    actor, counts = new_actor(), Counts()
    engine = RayEngine(actor, name="e")
    engine.start(version=0, refit=0).result(10)

    def raising(cut: Cut | None) -> None:
        raise OSError(str(cut))

    with pytest.raises(OSError, match="calls="):
        engine.mark(1, version=1, mode="keep", deliver=raising).result(10)
    engine.done(1, version=1).result(10)
    engine.mark(2, version=2, mode="keep", deliver=counts).result(10)
    assert counts.cuts == [Cut(calls={"c": 2})]
    engine.detach()


def test_attribute_leads_to_the_engine() -> None:
    """An actor keeps its engine where it likes."""
    actor = new_actor()
    engine = RayEngine(actor, name="e", attribute="__dict__")
    with pytest.raises(AttributeError):
        engine.start(version=0, refit=0).result(10)
    engine.detach()
    engine = RayEngine(actor, name="e", attribute="holder.engine")
    engine.start(version=0, refit=0).result(10)
    assert ray.get(actor.told.remote()) == [("start", 0, 0)]
    engine.detach()


def test_concurrency_group_answers_while_the_actor_is_busy() -> None:
    """Without one, an actor that blocks answers when its method is done."""
    groups = {"control": 1}
    actor = ray.remote(num_cpus=0, concurrency_groups=groups)(Blocking).remote()
    busy = RayEngine(actor, name="e")
    busy.start(version=0, refit=0).result(30)
    actor.block.remote()
    began = time.monotonic()
    engine = RayEngine(actor, name="e", concurrency_group="control")
    engine.mark(1, version=1, mode="keep", deliver=Counts()).result(10)
    assert time.monotonic() - began < 3
    busy.done(1, version=1).result(10)
    assert time.monotonic() - began > 3
    for each in (busy, engine):
        each.detach()


def test_dead_actor_costs_its_own_calls_their_coverage() -> None:
    """A whole refit through the callback, with one engine of two gone."""
    dead, well = new_actor("dead"), new_actor("well")
    engines = [RayEngine(dead, name="dead"), RayEngine(well, name="well")]
    staleness = StalenessCallback(engines=engines, trace=None, timeout=10)
    with staleness:
        early = Call(call="a", engine="well", version=0, tokens=1, after=0, until=0)
        staleness.on_publish("first", calls=[early])
        staleness.on_step(["first"])
        wait_for(lambda: ray.get(well.told.remote()) == [("start", 0, 0)])
        kill(dead)
        began = time.monotonic()
        staleness.on_refit_paused()
        staleness.on_refit_done()
        assert time.monotonic() - began < 9
        calls = [
            Call(call="c", engine="well", version=0, tokens=10, after=0, until=1),
            Call(call="d", engine="dead", version=0, tokens=10, after=0),
        ]
        staleness.on_publish("second", calls=calls)
        step = staleness.on_step(["second"])
    assert step is not None
    assert step.tokens_by_version == {0: 1 + 10, 1: 9}
    assert step.coverage == 10 / 20
    assert (step.age_lo, step.batch_age, step.age_hi) == (1 / 20, 11 / 20, 11 / 20)
    assert step.violations == 0


def test_waiter_that_gives_up_does_not_cancel_the_request(tmp_path: Path) -> None:
    """A hook may stop waiting in a way that cancels its future."""
    actor, counts = new_actor(stuck_until=tmp_path / "now"), Counts()
    engine = RayEngine(actor, name="e")
    engine.start(version=0, refit=0).result(10)
    noticed = engine.mark(1, version=1, mode="keep", deliver=counts)
    assert not noticed.cancel()
    (tmp_path / "now").touch()
    noticed.result(30)
    assert counts.cuts == [Cut(calls={"c": 1})]
    engine.detach()
