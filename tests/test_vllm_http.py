"""The trainer's side of a vLLM server, and the server's, on a front end without vLLM.

Real HTTP over the loopback; what needs a real engine is in `test_vllm_server`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rl_staleness import Call, StalenessCallback
from rl_staleness.engines import Cut
from rl_staleness.events import LARGEST, RefitCut
from rl_staleness.integrations.vllm_http import ServerError, VllmServerEngine
from rl_staleness.integrations.vllm_server import StalenessMiddleware
from rl_staleness.trace import read
from tests.asgi import AsgiServer, FakeLLM, Inner, served


class Place:
    """A server, its front end, and an engine that speaks to it."""

    def __init__(self, server: AsgiServer, llm: FakeLLM, **engine: Any) -> None:
        self.server, self.llm = server, llm
        self.engine = VllmServerEngine(server.url, timeout=5.0, **engine)
        self.requests: list[Any] = []

    def begin(self, name: str, *, header: str | None = None) -> None:
        """Begin a request."""
        headers = [] if header is None else [(b"x-request-id", header.encode())]
        exchange = self.server.exchange("POST", f"/v1/{name}", headers, b"{}")
        self.requests.append(asyncio.run_coroutine_threadsafe(exchange, self.server.loop))
        states = self.llm.output_processor.request_states
        while name not in states:
            self.server.run(asyncio.sleep(0.001))

    def make(self, name: str, tokens: int) -> None:
        """Let its call grow."""

        async def work() -> None:
            self.llm.make(name, tokens)

        self.server.run(work())

    def finish(self, name: str) -> None:
        """Let it end, and be answered."""

        async def work() -> None:
            self.llm.finish(name)

        self.server.run(work())
        for request in self.requests:
            if name not in self.llm.output_processor.request_states:
                request.done() or self.server.run(asyncio.sleep(0.01))

    def call(self, name: str, tokens: int, **more: Any) -> None:
        """A call from begin to end."""
        self.begin(name, **more)
        self.make(name, tokens)
        self.finish(name)

    def restart(self) -> None:
        """Come up again, with nothing that was."""
        self.llm = FakeLLM()
        self.server.state = SimpleNamespace(engine_client=self.llm)
        self.server.app = StalenessMiddleware(Inner(self.llm))

    def post(self, route: str, **body: Any) -> tuple[int, Any]:
        """Say something without the engine."""
        status, said = self.server.run(
            self.server.exchange("POST", f"/staleness/{route}", [], json.dumps(body).encode())
        )
        return status, json.loads(said)

    def get(self, route: str = "") -> Any:
        """Read something."""
        _, said = self.server.run(self.server.exchange("GET", f"/staleness{route}", [], b""))
        return json.loads(said)


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """A server with the middleware."""
    llm = FakeLLM()
    app = StalenessMiddleware(Inner(llm), **getattr(request, "param", {}))
    with served(app, engine_client=llm) as server:
        place = Place(server, llm)
        yield place
        place.engine.detach()


def refit(place: Place, number: int, version: int, *, calls: int | None = None) -> Cut | None:
    """Pause, mark, done, resume; what was counted."""
    cuts: list[Cut | None] = []
    there = threading.Event()

    def deliver(cut: Cut | None) -> None:
        cuts.append(cut)
        there.set()

    place.server.run(place.llm.pause())
    place.engine.mark(number, version=version, mode="keep", deliver=deliver).result(5)
    place.engine.done(number, version=version).result(5)
    place.server.run(place.llm.resume())
    assert there.wait(5)
    assert len(cuts) == 1
    return cuts[0]


def test_a_run(place: Place, tmp_path: Path) -> None:
    """A callback's run over HTTP: calls before, across and after a refit."""
    with StalenessCallback(
        engines=[place.engine], trace=tmp_path / "trace.jsonl", sinks=(), version=3
    ) as staleness:
        staleness.start()
        place.call("before", 10, header="b")
        place.begin("across")
        place.make("across", 20)
        staleness.on_step([])
        place.server.run(place.llm.pause())
        place.begin("paused")
        with staleness.refit():
            pass
        place.server.run(place.llm.resume())
        place.make("across", 30)
        place.make("paused", 5)
        place.finish("across")
        place.finish("paused")
        place.call("after", 7)
        calls = place.engine.calls(["b", "across", "paused", "after"])
        assert [(c.tokens, c.version, c.after, c.until) for c in calls] == [
            (10, 3, 0, 0),
            (50, 3, 0, 1),
            (5, 4, 1, 1),
            (7, 4, 1, 1),
        ]
        staleness.on_publish("g", calls=calls)
        step = staleness.on_step(["g"])
    assert step is not None
    assert step.tokens_by_version == {3: 30, 4: 42}
    assert (step.coverage, step.violations) == (1.0, 0)
    (cut,) = [event for event in read(tmp_path / "trace.jsonl") if isinstance(event, RefitCut)]
    assert (cut.calls, cut.kv, cut.exact) == ({calls[1].call: 20}, "kept", None)


def test_a_trainer_that_is_late(place: Place) -> None:
    """The cut is that of the pause, also when the trainer says after the resume what it was for."""
    place.engine.start(version=0, refit=0).result(5)
    place.begin("a")
    place.make("a", 10)
    place.server.run(place.llm.pause())
    place.begin("b")
    place.server.run(place.llm.resume())
    place.make("a", 10)
    place.make("b", 10)
    place.finish("b")
    (early,) = place.engine.calls(["b"])
    assert (early.after, early.until) == (None, None)  # nobody knows yet what that pause was
    cuts: list[Cut | None] = []
    place.engine.mark(1, version=1, mode="keep", deliver=cuts.append).result(5)
    place.engine.done(1, version=1).result(5)
    place.finish("a")
    a, b = place.engine.calls(["a", "b"])
    (cut,) = cuts
    assert cut is not None
    assert (cut.calls, cut.exact) == ({a.call: 10}, True)
    assert (a.version, a.after, a.until) == (0, 0, 1)
    assert (b.version, b.after, b.until) == (1, 1, 1)


def test_pauses_that_are_no_refits(place: Place) -> None:
    """Pauses that the trainer never claims do not count, nor does one that is repeated."""
    place.engine.start(version=5, refit=7).result(5)
    for _ in range(3):
        place.server.run(place.llm.pause())
        place.server.run(place.llm.resume())
    place.begin("a")
    place.make("a", 10)
    place.server.run(place.llm.pause())
    cut = refit(place, 8, 6)
    assert cut is not None
    assert list(cut.calls.values()) == [10]
    place.finish("a")
    (call,) = place.engine.calls(["a"])
    assert (call.version, call.after, call.until) == (5, 7, 8)


def test_an_answer_that_is_lost(place: Place) -> None:
    """What is said twice, because the answer was lost, is one cut and one refit."""
    for lose in range(2):
        place.server.lose_answers = 1
        place.engine.start(version=0, refit=0).result(5)
        place.begin(f"a{lose}")
        place.make(f"a{lose}", 10)
        place.server.run(place.llm.pause())
        cuts: list[Cut | None] = []
        place.server.lose_answers = 3
        place.engine.mark(1, version=1, mode="keep", deliver=cuts.append).result(5)
        place.server.lose_answers = 1
        place.engine.done(1, version=1).result(5)
        place.server.run(place.llm.resume())
        place.make(f"a{lose}", 5)
        place.finish(f"a{lose}")
        (call,) = place.engine.calls([f"a{lose}"])
        assert [cut and dict(cut.calls) for cut in cuts] == [{call.call: 10}]
        assert (call.after, call.until) == (0, 1)
    assert place.get()["pause"] == 2 * 2  # starts are counted as well
    assert sum("/mark" in request for request in place.server.requests) > 4


def test_a_second_cut_of_a_mark_that_came_twice(place: Place) -> None:
    """A mark that is sent again after the resume does not move the cut, nor do done and aborted."""
    said = {"run": "r", "refit": 1, "version": 1}
    place.post("start", run="r", refit=0, version=0)
    place.begin("a")
    place.make("a", 10)
    place.server.run(place.llm.pause())
    assert place.post("mark", **said)[1]["cuts"][0]["pause"] == 2
    place.post("done", **said)
    place.server.run(place.llm.resume())
    place.make("a", 10)
    for _ in range(2):
        (cut,) = place.post("mark", **said)[1]["cuts"]
        assert (cut["pause"], list(cut["cut"]["calls"].values())) == (2, [10])
        assert place.post("done", **said)[0] == 200
        assert place.post("aborted", run="r", refit=1)[0] == 200
        assert place.post("start", run="r", refit=0, version=0)[0] == 200
    place.finish("a")
    (call,) = place.engine.calls(["a"])
    assert (call.after, call.until) == (0, 1)
    assert place.llm.engine_core.labels == ["0", "1"]


def test_a_refit_that_is_done_after_the_next_pause(place: Place) -> None:
    """The engine is not led back to it: what runs keeps its numbers and stays in the cuts."""
    place.engine.start(version=0, refit=0).result(5)
    place.begin("a")
    place.make("a", 10)
    place.server.run(place.llm.pause())
    place.engine.mark(1, version=1, mode="keep", deliver=lambda _: None).result(5)
    place.server.run(place.llm.resume())
    place.server.run(place.llm.pause())
    place.engine.done(1, version=1).result(5)
    place.server.run(place.llm.resume())
    place.make("a", 10)
    cut = refit(place, 2, 2)
    place.finish("a")
    place.call("b", 10)
    a, b = place.engine.calls(["a", "b"])
    assert cut is not None
    assert cut.calls == {a.call: 20}
    assert [(c.version, c.after, c.until) for c in (a, b)] == [(0, 0, 2), (2, 2, 2)]


def test_a_refit_that_fails(place: Place) -> None:
    """The engine goes on with the version from before."""
    place.engine.start(version=0, refit=0).result(5)
    place.server.run(place.llm.pause())
    place.engine.mark(1, version=1, mode="keep", deliver=lambda _: None).result(5)
    place.engine.aborted(1).result(5)
    place.server.run(place.llm.resume())
    place.call("a", 10)
    refit(place, 2, 1)
    place.call("b", 10)
    a, b = place.engine.calls(["a", "b"])
    assert [(c.version, c.after, c.until) for c in (a, b)] == [(0, 1, 1), (1, 2, 2)]


def test_two_readers_and_one_driver(place: Place) -> None:
    """Others read the same calls under their own names; another run takes over by starting."""
    place.engine.start(version=0, refit=0).result(5)
    place.call("a", 10, header="x")
    place.call("b", 20, header="x")
    reader = VllmServerEngine(place.server.url + "/v1", name="reader")
    for ids in (["x"], ["a", "b"], ["a", "x"]):
        mine, theirs = place.engine.calls(ids), reader.calls(ids)
        assert [call.tokens for call in mine] == [10, 20]
        assert [(c.call, c.tokens) for c in mine] == [(c.call, c.tokens) for c in theirs]
        assert ({c.engine for c in mine}, {c.engine for c in theirs}) == ({"engine"}, {"reader"})
    assert asyncio.run(reader.acalls("x")) == reader.calls("x")
    seen = place.get("/calls?since=0&limit=1")
    rest = place.get(f"/calls?since={seen['next']}")
    assert [len(each["requests"]) for each in (seen, rest)] == [1, 1]
    assert place.get(f"/calls?since={rest['next']}")["requests"] == []

    reader.start(version=4, refit=2).result(5)
    (late,) = place.engine.calls(["a"])
    assert (late.after, late.spans) == (None, ((0, 10, 0, LARGEST),))
    with pytest.raises(ServerError, match="another run has started on this server"):
        place.engine.mark(1, version=1, mode="keep", deliver=lambda _: None).result(5)
    reader.detach()


def test_ids_that_a_run_before_gave_too(place: Place) -> None:
    """A run that is started anew on the same server means its own requests."""
    for tokens in (10, 20):
        place.engine.start(version=0, refit=0).result(5)
        place.call(f"a{tokens}", tokens, header="same")
        assert [call.tokens for call in place.engine.calls("same")] == [tokens]
    place.engine.start(version=0, refit=0).result(5)
    assert [call.tokens for call in place.engine.calls("same")] == [10, 20]


def test_calls_of_before_the_run(place: Place) -> None:
    """Nobody knows their version, and their tokens are counted."""
    place.call("a", 10)
    place.begin("b")
    place.make("b", 10)
    place.engine.start(version=9, refit=0).result(5)
    place.make("b", 5)
    place.finish("b")
    calls = place.engine.calls(["a", "b"])
    assert [(c.tokens, c.after, c.spans) for c in calls] == [
        (10, None, ((0, 10, 0, LARGEST),)),
        (15, None, ((0, 15, 0, LARGEST),)),
    ]


def test_a_server_that_was_restarted(
    place: Place, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It costs its own calls their coverage, up to the next refit, and nothing else."""
    with StalenessCallback(
        engines=[place.engine], trace=tmp_path / "trace.jsonl", sinks=(), version=3
    ) as staleness:
        staleness.start()
        place.call("a", 10)
        place.restart()
        place.call("b", 20)
        early = place.engine.calls(["b"])  # before the run has said a word to it
        assert [call.version for call in early] == [3]
        place.begin("c")
        place.make("c", 5)
        staleness.on_step([])
        place.server.run(place.llm.pause())
        with staleness.refit():
            pass
        place.server.run(place.llm.resume())
        place.make("c", 5)
        place.finish("c")
        place.call("d", 40)
        calls = place.engine.calls({"a": [4, 6], "b": 20, "c": 10, "d": 40})
        assert [c.tokens for c in calls] == [4, 6, 20, 10, 40]
        staleness.on_publish("g", calls=calls)
        step = staleness.on_step(["g"])
        staleness.on_step([])
        place.server.run(place.llm.pause())
        with staleness.refit():
            pass
    assert step is not None
    assert (step.tokens, step.coverage, step.violations) == (80, 40 / 80, 0)
    assert (step.age_lo, step.age_hi) == (0.0, 4 * 40 / 80)
    assert place.engine.num_lost == 1
    said = [record.getMessage() for record in caplog.records]
    assert sum("was restarted" in each for each in said) == 1
    assert sum("no calls of request 'a'" in each for each in said) == 1
    assert len([e for e in read(tmp_path / "trace.jsonl") if isinstance(e, RefitCut)]) == 1


def test_restarted_in_the_middle_of_a_refit(place: Place) -> None:
    """Which weights it has then, nobody knows."""
    place.engine.start(version=0, refit=0).result(5)
    place.server.run(place.llm.pause())
    place.engine.mark(1, version=1, mode="keep", deliver=lambda _: None).result(5)
    place.restart()
    with pytest.raises(ServerError, match="restarted in the middle"):
        place.engine.done(1, version=1).result(5)
    place.call("a", 10)
    (call,) = place.engine.calls(["a"])
    assert (call.after, call.spans) == (None, ((0, 10, 0, LARGEST),))
    assert refit(place, 2, 2) is None
    place.call("b", 10)
    (call,) = place.engine.calls(["b"])
    assert (call.version, call.after, call.until, call.spans) == (2, 2, 2, None)


@pytest.mark.parametrize("place", [{"kept_calls": 5}], indirect=True)
def test_the_oldest_calls_are_forgotten(place: Place) -> None:
    """Memory is bounded; what is forgotten is counted, and costs coverage only."""
    place.engine.start(version=0, refit=0).result(5)
    place.begin("running")
    for number in range(12):
        place.call(f"r{number}", 10, header=f"h{number}")
    assert {k: place.get()[k] for k in ("open", "finished", "kept", "forgotten")} == {
        "open": 1,
        "finished": 12,
        "kept": 5,
        "forgotten": 7,
    }
    journal = place.server.app._journal
    assert len(journal._by_id) == 5 * 2
    assert journal._closed == []
    seen = place.get("/calls?since=0")
    assert (len(seen["requests"]), seen["next"], seen["forgotten"]) == (5, 12, 7)
    (lost,) = place.engine.calls({"h3": 10})
    assert lost == Call(
        call="h3/lost0", engine="engine", version=0, tokens=10, spans=((0, 10, 0, LARGEST),)
    )
    assert place.engine.calls(["h4"]) == ()
    assert place.engine.num_lost == 2
    place.finish("running")
    (call,) = place.engine.calls(["running"])
    assert (call.tokens, call.spans) == (0, None)


def test_calls_that_have_not_ended(place: Place) -> None:
    """They are waited for, up to the limit in time."""
    place.engine.start(version=0, refit=0).result(5)
    place.begin("a", header="h")
    place.make("a", 10)
    assert place.engine.calls({"a": 10}, timeout=0.05)[0].call == "a/lost0"
    threading.Timer(0.1, place.finish, ["a"]).start()
    while not (calls := place.engine.calls("h")):
        pass
    assert [(call.tokens, call.after) for call in calls] == [(10, 0)]


def test_a_client_that_asks_before_there_is_a_call(place: Place) -> None:
    """A request that has come but made no call yet is waited for like one that runs."""
    entered, go_on = threading.Event(), asyncio.Event()
    place.engine.start(version=0, refit=0).result(5)
    original = place.llm.add_request

    async def slow(*args: Any) -> None:
        entered.set()
        await go_on.wait()
        await original(*args)

    place.llm.add_request = slow  # type: ignore[method-assign]
    exchange = place.server.exchange("POST", "/v1/a", [(b"x-request-id", b"h")], b"{}")
    asyncio.run_coroutine_threadsafe(exchange, place.server.loop)
    assert entered.wait(5)
    assert place.get("/calls?id=h")["found"] == [[{"ids": ["h"], "running": 1, "calls": []}]]
    place.server.loop.call_soon_threadsafe(go_on.set)
    while "a" not in place.llm.output_processor.request_states:
        pass
    place.make("a", 10)
    place.finish("a")
    assert [call.tokens for call in place.engine.calls("h", timeout=10)] == [10]


def test_what_needs_a_key(place: Place) -> None:
    """The server's own key guards these routes too; a wrong one is one clear line."""
    place.server.state.args = SimpleNamespace(api_key=["first", "second"])
    for key, allowed in ((None, False), ("third", False), ("first", True), ("second", True)):
        engine = VllmServerEngine(place.server.url, api_key=key)
        started = engine.start(version=0, refit=0)
        if allowed:
            started.result(5)
        else:
            with pytest.raises(ServerError, match="wants its --api-key"):
                started.result(5)
        engine.detach()
    place.server.state.args = SimpleNamespace(api_key=None)
    place.engine.start(version=0, refit=0).result(5)


def test_the_key_of_the_environment(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own variable counts where no key is on the command line."""
    monkeypatch.setenv("VLLM_API_KEY", "from there")
    assert place.get()["error"].startswith("this server wants")
    engine = VllmServerEngine(place.server.url, api_key="from there")
    engine.start(version=0, refit=0).result(5)
    engine.detach()


def test_a_server_without_the_middleware(caplog: pytest.LogCaptureFixture) -> None:
    """One clear line says what to add; nothing raises in a hook, and no answer is waited for."""
    with served(Inner(FakeLLM())) as server:
        engine = VllmServerEngine(server.url)
        with pytest.raises(ServerError, match=r"no such route: start it with --middleware rl_sta"):
            engine.start(version=0, refit=0).result(5)
        cuts: list[Cut | None] = []
        with pytest.raises(ServerError, match="no such route"):
            engine.mark(1, version=1, mode="keep", deliver=cuts.append).result(5)
        assert cuts == [None]
        with caplog.at_level(logging.WARNING):
            assert [call.tokens for call in engine.calls({"a": 10, "b": 20})] == [10, 20]
        assert "start it with --middleware" in caplog.text
        engine.detach()


def test_several_front_ends_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    """Each would see its own requests only: one line says so, and how to start the server."""
    llm = FakeLLM(client_count=4)
    with served(StalenessMiddleware(Inner(llm)), engine_client=llm) as server:
        engine = VllmServerEngine(server.url)
        with pytest.raises(ServerError, match=r"4 front-end processes.*--api-server-count 1"):
            engine.start(version=0, refit=0).result(5)
        engine.detach()
        assert "add_request" not in vars(llm)


def test_a_server_that_is_away(place: Place) -> None:
    """A message is tried again until its limit in time; the thread ends with the engine."""
    engine = VllmServerEngine("http://127.0.0.1:9", timeout=0.2)
    cuts: list[Cut | None] = []
    started = engine.start(version=0, refit=0)
    marked = engine.mark(1, version=1, mode="keep", deliver=cuts.append)
    for future in (started, marked):
        with pytest.raises(ServerError, match=r"127\.0\.0\.1:9.*Refused"):
            future.result(5)
    assert cuts == [None]
    assert [call.tokens for call in engine.calls({"a": 3})] == [3]
    thread = engine._thread
    assert thread is not None
    engine.detach()
    engine.detach()
    thread.join(5)
    assert not thread.is_alive()


def test_calls_of_a_server_that_stays_away(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is waited for the first time, hardly the next, and again once it has answered."""
    ask, tries, away = place.engine._server.ask, [0], True

    def asked(*args: Any, **kwargs: Any) -> Any:
        tries[-1] += 1
        if away:
            raise ConnectionRefusedError("away")
        return ask(*args, **kwargs)

    monkeypatch.setattr(place.engine._server, "ask", asked)
    monkeypatch.setattr(place.engine, "_timeout", 0.5)
    for _ in range(2):
        assert place.engine.calls("a") == ()
        tries.append(0)
    assert tries[0] > tries[1] > 0
    away = False
    place.call("a", 10)
    assert len(place.engine.calls("a", timeout=10)) == 1
    away = True
    tries.append(0)
    assert place.engine.calls("a") == ()
    assert tries[-1] > tries[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"url": "localhost:8000"}, "url: 'localhost:8000'"),
        ({"url": "ftp://host"}, "url: 'ftp://host'"),
        ({"url": "http://host:port"}, "url: 'http://host:port'"),
        ({"url": "http://host", "name": ""}, "name:"),
        ({"url": "http://host", "timeout": 0}, "timeout: 0"),
        ({"url": "http://host", "api_key": "a\nb"}, "api_key:"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    """They are named at once."""
    with pytest.raises(ValueError, match=message):
        VllmServerEngine(**arguments)


@pytest.mark.parametrize(
    ("route", "body", "status"),
    [
        ("mark", {"run": "r", "refit": -1, "version": 0}, 400),
        ("mark", {"run": "r", "refit": 1}, 400),
        ("mark", {"run": "r", "refit": "1", "version": 0}, 400),
        ("start", {"refit": 1, "version": 0}, 400),
        ("calls", {"ids": "a"}, 400),
        ("nothing", {}, 404),
    ],
)
def test_messages_that_are_none(
    place: Place, route: str, body: dict[str, Any], status: int
) -> None:
    """They are answered with one line, and change nothing."""
    answered, said = place.post(route, **body)
    assert answered == status
    assert said["error"]
    assert place.get()["run"] is False


def test_no_text_is_served(place: Place) -> None:
    """Names, counts and versions are all that leaves the server."""
    place.engine.start(version=0, refit=0).result(5)
    place.call("a", 10)
    assert set(place.get("/calls?id=a")["found"][0][0]) == {"ids", "running", "calls"}
    assert set(place.get("/calls?id=a")["found"][0][0]["calls"][0]) <= set(Call.__struct_fields__)
