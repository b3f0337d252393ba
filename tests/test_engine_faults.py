"""Engines that are killed, stopped and cut off in the middle of refits, for real.

Two engines, each in a process of its own: something happens to ``b``, and ``a`` goes on. Every
token is the version that made it, so that what is said of it can be held against the truth.
"""

from __future__ import annotations

import contextlib
import http.client
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
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlencode

import pytest

from rl_staleness import Call, StalenessCallback, read, steps
from rl_staleness.engines import Engine
from rl_staleness.events import LARGEST, GroupPublished, StepTrained
from rl_staleness.integrations.vllm_http import VllmServerEngine
from rl_staleness.ledger import Ledger
from rl_staleness.staleness import StepStaleness
from tests.fakes import FakeEngine, noticed

os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # listen on the loopback interface only

ROOT = Path(__file__).parents[1]

PATIENCE = 2.0
"""Seconds that a hook waits for engines here."""


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
            at: the point where something happens: ``paused`` before the library hears of it,
                ``cut`` before the weights move, ``loaded`` before the library hears that they are
                in, ``told`` before generation resumes.
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
        time.sleep(0.3)  # it is what a transfer takes, and longer than an engine takes to notice
        reach("loaded")
        if failed:
            self.hook(self.staleness.on_refit_aborted, reason="no transfer", engines=failed)
        there = [name for name in names if name not in failed]
        if there:
            self.hook(self.staleness.on_refit_done, engines=there)
        reach("told")
        for name in names:
            order(name, "resume")

    def refit_across_calls(self) -> StepStaleness:
        """Refit the engines at token 10 of 20 of a call of each, ``a-late`` and so on; train it."""
        for name, seat in self.seats.items():
            seat.begin(f"{name}-late")
            seat.make(f"{name}-late", 10)
        self.train()
        self.refit()
        for name, seat in self.seats.items():
            seat.make(f"{name}-late", 10)
            self.publish(name, f"{name}-late")
        return self.train()

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
        assert all(oldest < newest for _, _, oldest, newest in staleness.spans(call))
        staleness.on_publish("g", calls=[call])
        step = staleness.on_step(["g"])
    assert step is not None
    assert step.coverage == 0
    found = compared(path, truth, list(steps(path)))
    assert (found.covered["c"], found.open["c"]) == (0, 4)


def test_what_an_engine_does_not_know_stays_open(tmp_path: Path) -> None:
    """Also where it may not have heard of a refit, so that nothing else of it is believed."""
    path = tmp_path / "rollout_trace.jsonl"
    engine = Late()
    with StalenessCallback(
        trace=path, engines=[engine], sinks=[], timeout=0, late_masks=True
    ) as staleness:
        staleness.on_step([])
        staleness.on_refit_paused()
        engine.late = True
        staleness.on_refit_done()
        call = Call(call="c", engine="b", version=0, tokens=4, spans=((0, 4, 0, LARGEST),))
        assert staleness.spans(call) == [(0, 4, 0, 1)]
        staleness.on_publish("g", calls=[call])
        staleness.on_step(["g"])
    found = compared(path, {"c": [0, 0, 1, 1]}, list(steps(path)))
    assert (found.covered, found.open) == ({}, {"c": 4})


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
    trainer.refit_across_calls()
    return trainer.close()


def assert_b_is_back(
    found: Compared, trainer: Trainer, caplog: pytest.LogCaptureFixture, restarted: str
) -> None:
    """What is covered after `killed_in_a_refit`, what is not, and what was counted and logged."""
    assert found.covered == {**A_ALONE, "b-early": 10, "b-late": 20}
    assert found.open == {"b-back": 5, "b-over": 10}
    missing, lines = trainer.staleness.missing(), logged(caplog)
    assert missing.pop("refits had no cut") in (1, 2)
    for what, times in missing.items():
        assert re.fullmatch("times telling engine 'b' of (pause|done|aborted) failed", what)
        assert times == 1
        assert lines[f"rl_staleness: {what.removeprefix('times ')}; {GOES_ON}"] == 1
    restarts = [lines[line] for line in lines if f"engine 'b': {restarted}" in line]
    assert restarts == [1]


GOES_ON = "training goes on, this is logged once"

A_ALONE = {"a-early": 10, "a-across": 20, "a-over": 10, "a-late": 20}
"""Tokens of the engine to which nothing happens."""


@pytest.mark.parametrize(
    ("point", "again"),
    [
        pytest.param("paused", False, marks=pytest.mark.slow),
        pytest.param("paused", True, marks=pytest.mark.slow),
        pytest.param("cutting", False, marks=pytest.mark.slow),
        ("cut", False),
        pytest.param("cut", True, marks=pytest.mark.slow),
        pytest.param("loaded", False, marks=pytest.mark.slow),
        pytest.param("telling", False, marks=pytest.mark.slow),
        ("told", False),
    ],
)
def test_an_actor_that_is_killed_in_a_refit(
    ray_trainer: Trainer, point: str, again: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Its calls have bounds from its return to the next refit; the other engine's are covered."""
    found = killed_in_a_refit(ray_trainer, point, again=again)
    assert_b_is_back(found, ray_trainer, caplog, "the actor was restarted")


@pytest.mark.slow
def test_an_actor_that_hangs_over_two_refits(ray_trainer: Trainer) -> None:
    """What it hears late of both, it does not pass off as what it heard in time."""
    a, b = ray_trainer.seats["a"], ray_trainer.seats["b"]
    for seat, call in ((a, "a"), (b, "b")):
        seat.begin(call)
        seat.make(call, 10)
    process = b.stop()
    try:
        ray_trainer.refit()
        a.make("a", 10)
        ray_trainer.publish("a", "a")
        ray_trainer.train()
        ray_trainer.refit()
    finally:
        os.kill(process, signal.SIGCONT)
    b.come_back()
    b.make("b", 10)
    ray_trainer.publish("b", "b")
    ray_trainer.train()
    ray_trainer.refit()
    ray_trainer.refit_across_calls()
    found = ray_trainer.close()
    assert found.covered.pop("b", 0) + found.open.pop("b", 0) == 20
    assert (found.covered, found.open) == ({"a": 20, "a-late": 20, "b-late": 20}, {})


def test_an_actor_that_is_replaced_by_another(actors: dict[str, RaySeat], tmp_path: Path) -> None:
    """One that is dead for good goes; what takes its name joins with the weights that it has."""
    import ray

    a, gone, new = actors["a"], RaySeat("b"), RaySeat("b")
    a.come_back()
    a.ask("renew")
    a.new_engine()
    gone.come_back()
    new.come_back()
    trainer = Trainer(tmp_path / "rollout_trace.jsonl", {"a": a, "b": gone})
    for seat, call in ((a, "a"), (gone, "b-early"), (gone, "b-lost")):
        seat.begin(call)
        seat.make(call, 10)
    trainer.publish("b", "b-early")
    trainer.train()
    trainer.refit(at="cut", fault=lambda: ray.kill(gone.actor))
    a.make("a", 10)
    trainer.publish("a", "a")
    trainer.train()
    trainer.hook(trainer.staleness.detach, "b")
    trainer.seats["b"] = new
    new.begin("b-untold")
    new.make("b-untold", 5)
    version = trainer.staleness.version
    new.obey("load", version=version)
    trainer.hook(trainer.staleness.attach, new.engine, version=version)
    new.make("b-untold", 5)
    trainer.publish("b", "b-untold")
    step = trainer.refit_across_calls()
    found = trainer.close()
    assert found.covered == {"a": 20, "b-early": 10, "a-late": 20, "b-late": 20}
    assert found.open == {"b-untold": 10}
    assert (version, step.tokens_by_version) == (3, {2: 10, 3: 10, 5: 20})
    ray.kill(new.actor)


# Engines behind HTTP servers.


def free_ports(number: int) -> list[int]:
    """Ports of the loopback that nobody listens on."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [int(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return ports


class Proxy:
    """Stands between a trainer's library and a server, and does to answers what a test says."""

    def __init__(self, port: int) -> None:
        self.behind = port
        self.faults: dict[str, list[str]] = {}
        """What happens to the next answers, by the last word of the path."""
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self) -> None:
        while True:
            try:
                client, _ = self.socket.accept()
            except OSError:
                return
            threading.Thread(target=self.relay, args=(client,), daemon=True).start()

    def relay(self, client: socket.socket) -> None:
        """Carry messages over one connection until either side ends it."""
        with contextlib.suppress(OSError), client, client.makefile("rb") as asked:
            while message := self.message(asked):
                route = message.split(b" ", 2)[1].partition(b"?")[0].rpartition(b"/")[2].decode()
                fault = self.faults[route].pop(0) if self.faults.get(route) else ""
                if fault == "unheard":
                    return
                try:
                    with socket.create_connection(("127.0.0.1", self.behind), timeout=20) as server:
                        server.sendall(message)
                        with server.makefile("rb") as said:
                            answer = self.message(said)
                        if fault == "heard twice":
                            with socket.create_connection(("127.0.0.1", self.behind)) as again:
                                again.sendall(message)
                                with again.makefile("rb") as said:
                                    answer = self.message(said)
                except OSError:
                    return
                if fault == "lost" or not answer:
                    return
                if fault == "slow":
                    time.sleep(PATIENCE + 1)
                if fault == "cut short":
                    client.sendall(answer[:-5])
                    return
                client.sendall(answer)
                if fault == "answered twice":
                    time.sleep(0.05)  # else it is read, and thrown away, with the first
                    client.sendall(answer)

    def message(self, stream: Any) -> bytes:
        """One message of HTTP with its body."""
        lines: list[bytes] = []
        try:
            while (line := stream.readline()).strip():
                lines.append(line)
            length = [
                line.split(b":")[1] for line in lines if line.lower().startswith(b"content-l")
            ]
            body = stream.read(int(length[0])) if length else b""
        except OSError:
            return b""
        return b"".join([*lines, b"\r\n", body]) if lines else b""

    def stop(self) -> None:
        self.socket.close()


class HttpSeat:
    """An engine behind a server that is a process of its own; requests go to it, and what the
    library says goes through a proxy.
    """

    def __init__(self, name: str, port: int) -> None:
        self.name, self.port = name, port
        self.received: dict[str, int] = {}
        """Tokens that the trainer got of each request, as from a stream."""
        self.proxy = Proxy(self.port)
        self.new_engine()
        self.launch()

    def new_engine(self) -> None:
        """For the next run."""
        self.engine = VllmServerEngine(self.proxy.url, name=self.name, timeout=10.0)

    def launch(self) -> None:
        """Start the process."""
        command = [sys.executable, "-m", "tests.scripted", str(self.port)]
        self.process = subprocess.Popen(command, cwd=ROOT)

    def order(self, what: str, **query: Any) -> Any:
        """Have the server do something."""
        address = f"http://127.0.0.1:{self.port}/order/{what}?{urlencode(query)}"
        with urllib.request.urlopen(address, timeout=PATIENCE) as response:
            return json.load(response)

    def begin(self, call: str) -> None:
        address = f"http://127.0.0.1:{self.port}/v1/{call}"
        request = urllib.request.Request(address, b"{}", {"X-Request-Id": call})
        threading.Thread(target=self.request, args=(request,), daemon=True).start()
        wait_for(lambda: call in self.order("running"))
        self.received[call] = 0

    def request(self, request: urllib.request.Request) -> None:
        """Wait for the response, if one comes."""
        with contextlib.suppress(OSError, http.client.HTTPException):
            urllib.request.urlopen(request, timeout=60).read()

    def make(self, call: str, tokens: int) -> None:
        self.order("make", call=call, tokens=tokens)
        self.received[call] += tokens

    def finish(self, call: str) -> tuple[list[int], tuple[Call, ...]]:
        tokens = self.order("finish", call=call)
        time.sleep(0.02)  # its response is on the way
        return tokens, self.calls(call)

    def calls(self, call: str) -> tuple[Call, ...]:
        """What the library says of a request, also of one that the server has lost."""
        calls: tuple[Call, ...] = self.engine.calls({call: self.received[call]})
        return calls

    def obey(self, order: str, *, version: int) -> None:
        self.order(order, version=version, until=time.time() + PATIENCE)

    def die_in(self, method: str) -> None:
        self.order("die_in", method=method)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def come_back(self) -> None:
        """As its supervisor would have it."""
        if self.process.poll() is not None:
            self.launch()

        def there() -> bool:
            try:
                return self.order("running") is not None
            except OSError:
                return False

        wait_for(there)

    def end(self) -> None:
        """End the process."""
        self.kill()
        self.proxy.stop()


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, HttpSeat]]:
    """Two of them."""
    pytest.importorskip("uvicorn")
    seats = {name: HttpSeat(name, port) for name, port in zip("ab", free_ports(2), strict=True)}
    yield seats
    for seat in seats.values():
        seat.end()


@pytest.fixture
def http_trainer(servers: dict[str, HttpSeat], tmp_path: Path) -> Iterator[Trainer]:
    """A run of its own on them."""
    for seat in servers.values():
        seat.come_back()
        seat.obey("load", version=0)
        seat.new_engine()
        seat.proxy.faults.clear()
    trainer = Trainer(tmp_path / "rollout_trace.jsonl", dict(servers))
    yield trainer
    trainer.staleness.close()


def publish_lost(trainer: Trainer, call: str, truth: list[int]) -> None:
    """Publish what came of a request before its server died."""
    (record,) = trainer.seats["b"].calls(call)
    assert record.tokens == len(truth)
    trainer.truth[record.call] = truth
    trainer.groups.append(call)
    trainer.hook(trainer.staleness.on_publish, call, calls=[record])


@pytest.mark.parametrize(
    ("point", "again"),
    [
        ("paused", False),
        ("cut", False),
        ("loaded", False),
        *(
            pytest.param(*fault, marks=pytest.mark.slow)
            for fault in (("cutting", False), ("telling", False), ("told", False))
        ),
        *(pytest.param(point, True, marks=pytest.mark.slow) for point in ("paused", "cut")),
    ],
)
def test_a_server_that_is_killed_in_a_refit(
    http_trainer: Trainer, point: str, again: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """As in an actor; and what came of a request before its server died has bounds too."""
    found = killed_in_a_refit(http_trainer, point, again=again)
    assert_b_is_back(found, http_trainer, caplog, "the server was restarted")


def test_what_came_of_a_request_before_its_server_died(http_trainer: Trainer) -> None:
    """Nobody knows more of it than its length, whatever else was in doubt then."""
    b = http_trainer.seats["b"]
    b.begin("b-lost")
    b.make("b-lost", 10)
    http_trainer.refit(at="loaded", fault=b.kill)
    b.come_back()
    publish_lost(http_trainer, "b-lost", [0] * 10)
    http_trainer.train()
    found = http_trainer.close()
    assert (found.covered, found.open) == ({}, {"b-lost": 10})


@pytest.mark.parametrize(
    ("away", "heard"),
    [
        (["start", "mark"], "before done"),
        pytest.param(["start", "mark"], "after done", marks=pytest.mark.slow),
        pytest.param(["mark"], "before done", marks=pytest.mark.slow),
        pytest.param(["mark"], "after done", marks=pytest.mark.slow),
    ],
)
def test_a_server_that_hears_what_was_meant_for_the_one_before(
    http_trainer: Trainer, away: list[str], heard: str
) -> None:
    """Weights that were in when it was killed are not those of the server that came after it."""
    a, b = http_trainer.seats["a"], http_trainer.seats["b"]
    if "start" in away:
        b.new_engine()
        folder = http_trainer.trace.parent / "again"
        folder.mkdir()
        http_trainer.staleness.close()
        a.new_engine()
        b.proxy.faults["start"] = ["unheard"] * 10_000
        http_trainer = Trainer(folder / "rollout_trace.jsonl", http_trainer.seats)
    b.proxy.faults["mark"] = ["unheard"] * 10_000

    def restart() -> None:
        b.kill()
        b.come_back()
        b.proxy.faults.clear()
        time.sleep(1.5)  # what was said is said again

    point = "loaded" if heard == "before done" else "told"
    http_trainer.refit(at=point, fault=restart)
    for seat, call in ((a, "a"), (b, "b")):
        seat.begin(call)
        seat.make(call, 10)
    for name in "ab":
        http_trainer.publish(name, name)
    http_trainer.train()
    found = http_trainer.close()
    assert (found.covered, found.open) == ({"a": 10}, {"b": 10})


@pytest.mark.parametrize(
    "fault",
    [
        "unheard",
        "lost",
        pytest.param("slow", marks=pytest.mark.slow),
        "cut short",
        "heard twice",
        "answered twice",
    ],
)
def test_messages_that_are_lost_slow_or_twofold(http_trainer: Trainer, fault: str) -> None:
    """What is not known for certain is not covered; what was only said again is one refit."""
    a, b = http_trainer.seats["a"], http_trainer.seats["b"]
    for seat, call in ((a, "a"), (b, "b")):
        seat.begin(call)
        seat.make(call, 10)
    b.begin("b-other")
    b.make("b-other", 7)
    b.finish("b-other")
    b.proxy.faults.update({route: [fault] for route in ("mark", "done", "calls")})
    http_trainer.refit()
    time.sleep(PATIENCE if fault == "slow" else 0)
    assert [call.tokens for call in b.calls("b-other")] == [7]
    time.sleep(0.1)
    for seat, call in ((a, "a"), (b, "b")):
        seat.make(call, 10)
        http_trainer.publish(call, call)
    http_trainer.refit_across_calls()
    found = http_trainer.close()
    if fault == "slow":  # the mark was answered in the pause, or not
        assert found.covered.pop("b", 0) + found.open.pop("b", 0) == 20
    else:
        assert found.covered.pop("b") == 20
    assert (found.covered, found.open) == ({"a": 20, "a-late": 20, "b-late": 20}, {})


@pytest.mark.slow
@pytest.mark.parametrize("point", ["paused", "cut", "told"])
def test_a_server_that_hangs_in_a_refit(http_trainer: Trainer, point: str) -> None:
    """Nobody waits for it longer than they must; it is exact again at the refit after it woke."""
    a, b = http_trainer.seats["a"], http_trainer.seats["b"]
    for seat, call in ((a, "a"), (b, "b")):
        seat.begin(call)
        seat.make(call, 10)
    try:
        http_trainer.refit(at=point, fault=lambda: b.process.send_signal(signal.SIGSTOP))
        a.make("a", 10)
        http_trainer.publish("a", "a")
        http_trainer.train()
        http_trainer.refit()
    finally:
        b.process.send_signal(signal.SIGCONT)
    b.come_back()
    b.make("b", 10)
    http_trainer.publish("b", "b")
    http_trainer.train()
    http_trainer.refit()
    http_trainer.refit_across_calls()
    found = http_trainer.close()
    assert {**found.covered, "b": 0} == {"a": 20, "a-late": 20, "b-late": 20, "b": 0}


def test_weights_that_reach_one_of_two_engines(http_trainer: Trainer) -> None:
    """The engine that has them and the one that has not are both covered, and so is the next."""
    a, b = http_trainer.seats["a"], http_trainer.seats["b"]
    for seat, call in ((a, "a"), (b, "b")):
        seat.begin(call)
        seat.make(call, 10)
    load = b.obey

    def refuse(order: str, *, version: int) -> None:
        if order == "load":
            raise ConnectionError("the transfer failed")
        load(order, version=version)

    b.obey = refuse
    http_trainer.refit()
    b.obey = load
    for seat, call in ((a, "a"), (b, "b")):
        seat.make(call, 10)
    http_trainer.refit()
    for seat, call in ((a, "a"), (b, "b")):
        seat.make(call, 10)
        http_trainer.publish(call, call)
    step = http_trainer.train()
    found = http_trainer.close()
    assert (found.covered, found.open) == ({"a": 30, "b": 30}, {})
    assert step.tokens_by_version == {0: 30, 1: 10, 2: 20}


# A real vLLM.


class RealSeat(RaySeat):
    """A real engine in an actor: calls are as long as they are, and end by themselves."""

    def __init__(self, name: str, model: Path) -> None:
        import ray

        from tests.scripted import Watermarked

        remote = ray.remote(num_cpus=0, max_restarts=1, max_task_retries=0)(Watermarked)
        self.name = name
        self.actor = remote.remote(name, str(model), str(ROOT))
        self.new_engine()

    def ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        import ray

        seconds = PATIENCE if method == "obey" else 30
        return ray.get(getattr(self.actor, method).remote(*args, **kwargs), timeout=seconds)

    def begin(self, call: str, tokens: int = 50) -> None:
        self.ask("begin", call, tokens)

    def kill(self) -> None:
        self.end()

    def end(self) -> None:
        """Kill the actor's process and those of the engine."""
        processes = self.ask("processes")
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        wait_for(lambda: not any(map(alive, processes)))

    def come_back(self) -> None:
        import ray

        deadline = time.monotonic() + 300
        while True:
            try:
                ray.get(self.actor.processes.remote(), timeout=300)
                return
            except ray.exceptions.RayError:
                assert time.monotonic() < deadline
                time.sleep(0.2)


@pytest.mark.engine
@pytest.mark.slow
def test_a_real_engine_that_is_killed_while_it_is_paused(
    actors: dict[str, RaySeat],
    watermark_model: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A real vLLM in an actor dies in a pause, is started again by Ray, and refitted."""
    a, b = actors["a"], RealSeat("b", watermark_model)
    a.come_back()
    a.ask("renew")
    a.new_engine()
    b.come_back()
    trainer = Trainer(tmp_path / "rollout_trace.jsonl", {"a": a, "b": b})
    b.begin("b-early")
    trainer.publish("b", "b-early")
    b.begin("b-lost", 2000)
    a.begin("a-across")
    for seat, call in ((a, "a-across"), (b, "b-lost")):
        seat.make(call, 10)
    trainer.train()
    trainer.refit(at="paused", fault=b.kill)
    a.make("a-across", 10)
    trainer.publish("a", "a-across")
    b.come_back()
    b.begin("b-back")
    trainer.publish("b", "b-back")
    trainer.train()
    trainer.refit()
    a.begin("a-late")
    b.begin("b-late", 2000)
    for seat, call in ((a, "a-late"), (b, "b-late")):
        seat.make(call, 20)
    trainer.train()
    trainer.refit()
    a.make("a-late", 20)
    for name, call in (("a", "a-late"), ("b", "b-late")):
        trainer.publish(name, call)
    step = trainer.train()
    found = trainer.close()
    b.end()
    assert found.covered == {"a-across": 20, "a-late": 40, "b-early": 50, "b-late": 2000}
    assert found.open == {"b-back": 50}
    assert step.spanning_calls == 2
    assert sum("engine 'b': the actor was restarted" in line for line in logged(caplog)) == 1
