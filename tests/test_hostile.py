"""What comes from outside is hostile: names in traces, servers, whoever asks a server.

Nothing of it steers a page, a terminal, a path or a key, nothing secret is written or told, and
nothing that was read is ever run.
"""

from __future__ import annotations

import ast
import asyncio
import gzip
import io
import json
import logging
import os
import secrets
import socket
import subprocess
import sys
import threading
import traceback
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from rl_staleness import StalenessCallback
from rl_staleness.artifacts import PACKED, PICTURE, REPORT
from rl_staleness.cli import main
from rl_staleness.destinations import DestinationError
from rl_staleness.integrations import vllm_exchange
from rl_staleness.integrations.vllm_http import VllmServerEngine
from rl_staleness.integrations.vllm_journal import LONGEST_ID
from rl_staleness.integrations.vllm_server import LARGEST_BODY, StalenessMiddleware
from tests import lines
from tests.asgi import AsgiServer, FakeLLM, served
from tests.fuzz.mutations import HOSTILE
from tests.fuzz.targets import is_harmless, read_trace

ROOT = Path(__file__).resolve().parent.parent

# Names.


def hostile_trace(path: Path) -> Path:
    """A run in which every text is an attack, and some are very long."""
    name, long = HOSTILE, HOSTILE * 1000
    about = {name: name, "trainer": name, "library": long, "definitions": {name: [name]}}
    call = {**lines.call(name, 9, 0), "engine": name}
    return lines.write(
        path,
        lines.start(run=name, engines={name: 0, "e": 0}, about=about),
        lines.published(
            name, call, tokens={"0": 7}, about={name: name, "prompt_tokens": {name: 3}}
        ),
        lines.published(long, {**call, "call": long}),
        lines.cut(1, {name: 3, long: 5}, engine=name, mode=name),
        lines.done(1, engine=name, pause_seconds=0.5),
        {**lines.aborted(1), "reason": name},
        lines.step(1, 0, name, f"nobody {name}"),
        lines.published("g", tokens={"0": 5}),
        lines.dropped("g", reason=name),
        lines.dropped("h", reason=long, tokens={"0": 3}),
        lines.violation(name, long),
        lines.step(2, 1, long),
        lines.end(name),
    )


def run(*arguments: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, in a folder of its own."""
    own = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(
        [sys.executable, "-m", "rl_staleness.cli", *arguments],
        env=own,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        stdin=subprocess.DEVNULL,
    )


def files_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_no_command_prints_or_names_a_file_by_what_stands_in_a_trace(tmp_path: Path) -> None:
    """Every command, and the picture: clean text, and no file but the one that was asked for."""
    place = tmp_path / "deep" / "place"
    place.mkdir(parents=True)
    trace = hostile_trace(place / "rollout_trace.jsonl")
    read_trace(trace.read_bytes(), place)
    assert files_in(tmp_path) == {"deep/place/rollout_trace.jsonl", "deep/place/page.html"}
    done = run("plot", trace.name, folder=place)
    assert (done.returncode, done.stdout) == (0, "")
    assert is_harmless(done.stderr)
    assert files_in(tmp_path) - {"deep/place/page.html"} == {
        "deep/place/rollout_trace.jsonl",
        "deep/place/staleness.png",
    }
    words = (place / "staleness.png").read_bytes()
    assert b"onerror" not in words and b"onerror" not in b"".join(texts_of(words))


def test_a_run_goes_by_a_hostile_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The callback, its warnings and the trace it makes beside another: no name steers them."""
    path = tmp_path / "rollout_trace.jsonl"
    for name in (HOSTILE, f"2{HOSTILE}"):
        with StalenessCallback(trace=path, run=name, sinks=[]) as staleness:
            staleness.on_publish(HOSTILE, calls=[], unknown=3)
            staleness.on_step([HOSTILE, f"no {HOSTILE}"], version=7)
            staleness.on_drop(HOSTILE, reason=HOSTILE)
            staleness.on_step([1000 * HOSTILE])
    assert files_in(tmp_path) == {"rollout_trace.jsonl", "rollout_trace-2.jsonl"}
    assert len(caplog.records) > 2
    for record in caplog.records:
        assert is_harmless(record.getMessage()) and len(record.getMessage()) < 1000


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """One browser for all pages."""
    from tests.chromium import browser, program

    if program() is None:
        pytest.skip("Chromium is not installed (apt-get install chromium)")
    with browser() as running:
        yield running


@pytest.mark.parametrize("command", ["report", "compare"])
def test_a_browser_runs_asks_for_and_shows_nothing_of_them(
    command: str, tmp_path: Path, chromium: Any
) -> None:
    """No dialog, no request, no error on the console, no element, no character that is not seen."""
    trace = hostile_trace(tmp_path / "trace.jsonl")
    traces = [trace.name] * (2 if command == "compare" else 1)
    done = run(command, *traces, "-o", "page.html", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    file = tmp_path / "page.html"
    hit = "window.hit = []; for (const f of ['alert', 'eval']) window[f] = x => hit.push(x);"
    page = chromium.open(file.as_uri(), first=hit)
    page.wait("document.documentElement.dataset.drawn !== undefined", what="the charts")
    assert [url for url in page.requests if not url.startswith("data:")] == [file.as_uri()]
    assert page.errors == []
    assert page.value("window.hit") == []
    assert page.value("document.querySelectorAll('img, iframe, object, a, form').length") == 0
    text = page.value("document.documentElement.innerText")
    assert "onerror=alert(1)" in text, "the names are shown"
    assert is_harmless(text.replace("\t", " "))
    assert is_harmless(page.value("document.title"))


def offline(folder: Path) -> dict[str, str]:
    """Variables of a W&B that writes to this folder alone."""
    names = ("WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR")
    return {
        **dict.fromkeys(names, str(folder / "home")),
        "WANDB_MODE": "offline",
        "WANDB_ERROR_REPORTING": "false",
    }


def test_times_that_no_database_holds() -> None:
    """A trace may say any time; what cannot be brought is told as such."""
    from rl_staleness.integrations.mlflow_points import milliseconds

    assert milliseconds(1.5) == 1500
    for seconds in (1e308, -1e308, 1e16):
        with pytest.raises(DestinationError, match=r"^time: .* is none that MLflow can hold$"):
            milliseconds(seconds)


# A server that is broken, or means it.


class Hostile:
    """A server that sends pieces to whoever asks, until they are all sent or nobody listens."""

    def __init__(self, pieces: Callable[[], Iterator[bytes]]) -> None:
        self._pieces = pieces
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(120)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.heard: list[bytes] = []
        self.most = 0
        """Bytes of one answer, as far as they were taken."""
        self.finished = 0
        """Answers that were sent to their end."""
        self.hung_up = threading.Event()
        """Somebody stopped listening before the end."""
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            connection.settimeout(60)
            try:
                self.heard.append(connection.recv(65536))
                sent = 0
                for piece in self._pieces():
                    connection.sendall(piece)
                    sent += len(piece)
                    self.most = max(self.most, sent)
                self.finished += 1
            except OSError:
                self.hung_up.set()

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@contextmanager
def hostile(pieces: Callable[[], Iterator[bytes]]) -> Iterator[Hostile]:
    """Such a server."""
    server = Hostile(pieces)
    try:
        yield server
    finally:
        server.close()


OK = b"HTTP/1.1 200 OK\r\n"


def drip(start: bytes, piece: bytes) -> Iterator[bytes]:
    """A byte now and then for ten minutes: each comes long before a wait for one would end."""
    yield start
    waiting = threading.Event()
    for _ in range(12_000):
        waiting.wait(0.05)
        yield piece


def flood(start: bytes, piece: bytes) -> Iterator[bytes]:
    """Much at once, without end."""
    yield start
    for _ in range(1 << 14):
        yield piece


ENDLESS: dict[str, Callable[[], Iterator[bytes]]] = {
    "a status line that drips": lambda: drip(b"HTTP/1.1 2", b"0"),
    "headers that drip": lambda: drip(OK + b"X: ", b"x"),
    "a body that drips": lambda: drip(OK + b"Content-Length: 99999\r\n\r\n", b" "),
    "chunks that drip": lambda: drip(OK + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
    "interim answers for ever": lambda: flood(b"", 5000 * b"HTTP/1.1 100 Go on\r\n\r\n"),
    "a body for ever": lambda: flood(OK + b"Connection: close\r\n\r\n", (1 << 20) * b" "),
    "chunks for ever": lambda: flood(
        OK + b"Transfer-Encoding: chunked\r\n\r\n", b"100000\r\n" + (1 << 20) * b" " + b"\r\n"
    ),
}


@pytest.mark.parametrize("what", ENDLESS)
def test_an_answer_without_an_end(what: str) -> None:
    """It is given up at the deadline, or when it is too large, whichever way it comes."""
    with hostile(ENDLESS[what]) as server:
        engine = VllmServerEngine(server.url, timeout=0.3)
        (lost,) = engine.calls({"a": 5}, timeout=0.3)
        assert (lost.call, lost.tokens) == ("a/lost0", 5)
        assert server.hung_up.wait(60) and server.finished == 0
        assert server.most < vllm_exchange.LARGEST_ANSWER + (32 << 20), "and what the kernel holds"
        engine.detach()


def test_an_answer_that_is_too_large(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its size ends it, long before its time does."""
    monkeypatch.setattr(vllm_exchange, "LARGEST_ANSWER", 1 << 20)
    for what in ("a body for ever", "interim answers for ever"):
        with hostile(ENDLESS[what]) as server:
            engine = VllmServerEngine(server.url, timeout=60.0)
            assert "the answer is larger than 1048576 bytes" in str(engine.problem(timeout=60.0))
            engine.detach()


def once(data: bytes) -> Callable[[], Iterator[bytes]]:
    return lambda: iter([data])


def body(data: bytes, *headers: bytes) -> bytes:
    """An answer with this body."""
    length = b"Content-Length: %d" % len(data)
    return OK + b"\r\n".join((*headers, length)) + b"\r\n\r\n" + data


NO_ANSWERS = {
    "nothing": b"",
    "no HTTP": b"\x1b[2J\x9b31mSSH-2.0\r\n\r\n",
    "a length of a petabyte": OK + b"Content-Length: 1000000000000000\r\n\r\n{}",
    "a length beyond all": OK + b"Content-Length: " + b"9" * 1000 + b"\r\n\r\n{}",
    "a chunk of a petabyte": OK + b"Transfer-Encoding: chunked\r\n\r\n38D7EA4C68000\r\n{}",
    "a chunk of less than nothing": OK + b"Transfer-Encoding: chunked\r\n\r\n-5\r\n{}",
    "a body cut short": OK + b'Content-Length: 100\r\n\r\n{"boot":"x"',
    "too many headers": OK + 200 * b"X: y\r\n" + b"\r\n{}",
    "a header too long": OK + b"X: " + 100_000 * b"y" + b"\r\n\r\n{}",
    "no JSON": body(b"\xff\xfe"),
    "deep nesting": body(b'{"boot":"x","evidence":{"a":' + 100_000 * b"["),
    "another type": body(b'{"boot":"x","found":7}'),
    "no answer for the request": body(b'{"boot":"x","found":[]}'),
    "two for one": body(b'{"boot":"x","found":[[],[]]}'),
    "less than no version": body(b'{"boot":"x","found":[[]],"first":-1}'),
    "a version of thirty digits": body(b'{"boot":"x","found":[[]],"first":' + 30 * b"9" + b"}"),
    "an error that steers": b"HTTP/1.1 409 \x1b[2J\r\n"
    + body(json.dumps({"boot": "x", "error": HOSTILE * 100}).encode()).partition(b"\r\n")[2],
}


@pytest.mark.parametrize("what", NO_ANSWERS)
def test_answers_that_are_none(what: str, caplog: pytest.LogCaptureFixture) -> None:
    """The call is lost and that is said, in one clean line; the thread that tells goes on."""
    with hostile(once(NO_ANSWERS[what])) as server, caplog.at_level(logging.DEBUG):
        seconds = 3.0 if what == "a body cut short" else 0.2  # its errors are told from timeouts
        engine = VllmServerEngine(server.url, timeout=seconds, patience=0.2, api_key="hush")
        (lost,) = engine.calls({"a": 5}, timeout=0.2)
        assert (lost.tokens, lost.version, engine.num_lost) == (5, 0, 1)
        delivered: list[Any] = []
        got = threading.Event()
        futures = [engine.start(version=0, refit=0)]
        futures.append(
            engine.mark(
                1, version=1, mode="keep", deliver=lambda cut: (delivered.append(cut), got.set())[0]
            )
        )
        errors = [future.exception(timeout=60) for future in futures]
        assert got.wait(60) and delivered == [None]
        assert asyncio.run(engine.selftest(timeout=0.2)) is not None
        assert engine.problem(timeout=0.2) is None or "hush" not in str(engine.problem())
        engine.detach()
    if what == "a body cut short":
        assert "IncompleteRead" in str(errors[0]), "it may be whole the next time"
    for error in errors:
        assert is_harmless("".join(traceback.format_exception(error)))
    said = [record.getMessage() for record in caplog.records] + [str(error) for error in errors]
    assert len(said) > 2
    for line in said:
        assert is_harmless(line) and len(line) < 1000 and "hush" not in line


def test_a_compressed_answer_is_not_unpacked() -> None:
    """Nobody asked for one; what would be gibibytes stays what it is."""
    packed = 64 * gzip.compress(bytes(1 << 24))
    with hostile(once(body(packed, b"Content-Encoding: gzip"))) as server:
        engine = VllmServerEngine(server.url, timeout=20.0)
        assert len(engine.calls({"a": 5}, timeout=20.0)) == 1
        assert b"gzip" not in server.heard[0], "it did not say that it takes such"
        engine.detach()


def test_the_key_goes_to_no_other_server() -> None:
    """A redirect is no answer, and is not followed."""
    with hostile(once(body(b"{}"))) as other:
        away = b"HTTP/1.1 302 Found\r\nLocation: %s/\r\nConnection: close\r\n\r\n"
        with hostile(once(away % other.url.encode())) as server:
            engine = VllmServerEngine(server.url, timeout=5.0, api_key="hush")
            assert len(engine.calls({"a": 5}, timeout=5.0)) == 1
            assert b"Bearer hush" in server.heard[0]
            engine.detach()
        assert other.heard == []


def test_no_password_of_an_url_is_shown() -> None:
    """Neither where it is refused, nor where the server is away."""
    with pytest.raises(ValueError, match="is none of a server") as error:
        VllmServerEngine("ftp://me:hush@host")
    assert "hush" not in str(error.value)
    engine = VllmServerEngine("http://me:hush@127.0.0.1:1", timeout=0.1)
    assert "hush" not in str(engine.start(version=0, refit=0).exception(60))
    assert "hush" not in str(engine.problem())
    engine.detach()


# Whoever asks our side of a server.


class Model:
    """The application inside: it reads the prompt, and answers with a completion."""

    def __init__(self, llm: FakeLLM, completion: str) -> None:
        self.llm, self.completion = llm, completion

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        said = await receive()
        headers = {key.decode(): value.decode() for key, value in scope["headers"]}
        name = headers.get("x-request-id", "r")
        await self.llm.add_request(name, said["body"].decode(), SimpleNamespace(n=1))
        self.llm.output_processor.request_states[name].detokenizer.token_ids += [TOKEN] * 7
        self.llm.finish(name)
        answer = json.dumps({"id": name, "text": self.completion}).encode()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": answer})


PROMPT, COMPLETION, KEY, PASSWORD = (f"secret{word}{secrets.token_hex(6)}" for word in "pckw")
TOKEN = 918273645
"""A token's number."""

MARKS = (PROMPT, COMPLETION, KEY, PASSWORD, str(TOKEN))


@contextmanager
def guarded(*, key: str | None = KEY) -> Iterator[AsgiServer]:
    """A server with a key."""
    llm = FakeLLM()
    app = StalenessMiddleware(Model(llm, COMPLETION))
    with served(app, engine_client=llm, args=SimpleNamespace(api_key=key)) as server:
        yield server


def exchange(
    server: AsgiServer, method: str, path: str, *headers: tuple[bytes, bytes], said: bytes = b""
) -> tuple[int, bytes]:
    answer: tuple[int, bytes] = server.run(server.exchange(method, path, list(headers), said))
    return answer


def bearer(key: str) -> tuple[bytes, bytes]:
    return b"authorization", f"Bearer {key}".encode()


ROUTES = [
    *[("GET", f"/staleness{route}") for route in ("", "/", "/cuts", "/calls", "/calls?id=r")],
    *[("POST", f"/staleness/{route}") for route in ("start", "mark", "done", "aborted", "calls")],
    *[("POST", "/staleness/selftest"), ("PUT", "/staleness/x"), ("OPTIONS", "/staleness")],
]


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_a_stranger_is_told_nothing(method: str, path: str) -> None:
    """On every route and by every wrong key: 401, and the same line, with nothing of the server."""
    wrong: list[tuple[tuple[bytes, bytes], ...]] = [
        (),
        (bearer(""),),
        (bearer(KEY[:-1]),),
        (bearer(KEY + "x"),),
        (bearer(KEY.upper()),),
        ((b"authorization", f"Basic {KEY}".encode()),),
        ((b"authorization", KEY.encode()),),
        ((b"authorization", b"Bearer \xff\xfe"),),
        ((b"x-api-key", KEY.encode()),),
        (bearer("wrong"), bearer(KEY)),
    ]
    with guarded() as server:
        exchange(server, "POST", "/v1/completions", said=PROMPT.encode())
        answers = {exchange(server, method, path, *each, said=b"{}") for each in wrong}
        assert answers == {
            (401, b'{"boot":"","error":"this server wants its --api-key, as a bearer token"}')
        }
        if path != "/staleness/selftest":  # it would wait for a call
            status, _ = exchange(server, method, path, bearer(KEY), said=b"{}")
            assert status != 401


def test_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each key as a whole, by digests of one length, also after one that fits."""
    compared: list[tuple[Any, Any]] = []
    original = secrets.compare_digest

    def noting(one: Any, other: Any) -> bool:
        compared.append((one, other))
        return original(one, other)

    monkeypatch.setattr(secrets, "compare_digest", noting)
    llm = FakeLLM()
    state = SimpleNamespace(api_key=["first", "second"])
    with served(StalenessMiddleware(Model(llm, "")), engine_client=llm, args=state) as server:
        for key, status in (("first", 200), ("second", 200), ("no", 401), ("", 401)):
            compared.clear()
            assert exchange(server, "GET", "/staleness", bearer(key))[0] == status
            assert len(compared) == 2
            assert {len(each) for pair in compared for each in pair} == {32}


def test_what_a_client_may_make_the_server_keep() -> None:
    """Ids and words are of bounded length, an id stands once in a question, a body is bounded."""
    with guarded(key=None) as server:
        for length, kept in ((9, 1), (LONGEST_ID + 1, 1), (60_000, 1), (10, 2)):
            name = length * b"x"
            exchange(server, "POST", "/v1/completions", (b"x-request-id", name), said=b"{}")
            found = json.loads(exchange(server, "GET", "/staleness/calls")[1])
            assert len(found["requests"]) == kept
        for route, said in (
            ("calls", {"ids": ["a", "a"]}),
            ("start", {"run": "x" * 257, "refit": 0, "version": 0}),
            ("mark", {"run": "x", "refit": 1, "version": 0, "mode": "x" * 257}),
            ("mark", {"run": "x", "refit": 2**63, "version": 0}),
            ("start", {"run": "x", "refit": 0, "version": 2**63}),
        ):
            text = json.dumps(said).encode()
            status, answer = exchange(server, "POST", f"/staleness/{route}", said=text)
            assert status == 400 and json.loads(answer)["error"], (route, answer)
        assert exchange(server, "GET", "/staleness/calls?id=a&id=a")[0] == 400
        large = bytes(LARGEST_BODY + 1)
        assert exchange(server, "POST", "/staleness/calls", said=large)[0] == 413
        assert json.loads(exchange(server, "GET", "/staleness")[1])["run"] is False


# What is written.


def texts_of(png: bytes) -> Iterator[bytes]:
    """The words in a PNG."""
    at = 8
    while at < len(png):
        length = int.from_bytes(png[at : at + 4], "big")
        kind, data = png[at + 4 : at + 8], png[at + 8 : at + 8 + length]
        at += 12 + length
        if kind == b"tEXt":
            yield data
        elif kind in (b"zTXt", b"iTXt"):
            yield data
            with suppress(zlib.error):
                yield zlib.decompress(data[data.index(b"\0") + 2 :])


def written_in(folder: Path) -> dict[str, bytes]:
    """Everything that stands in the files of a folder, unpacked."""
    found: dict[str, bytes] = {}
    for name in files_in(folder):
        data = (folder / name).read_bytes()
        if name.endswith(".gz"):
            data = gzip.decompress(data)
        if name.endswith(".png"):
            data += b"\n".join(texts_of(data))
        found[name] = data
    return found


class Written(NamedTuple):
    """All that a run and the commands after it have left behind."""

    folder: Path
    client: Any
    """Of the MLflow store."""
    experiment: str
    outputs: str
    """What commands printed."""
    log: str
    shown: bytes
    """What the server answered."""


def made_over_http(trace: Path) -> list[bytes]:
    """A run whose prompts, completions, tokens and keys are marked; what the server answered."""
    shown = []
    with guarded() as server:
        url = server.url.replace("http://", f"http://me:{PASSWORD}@")
        engine = VllmServerEngine(url, api_key=KEY)
        llm = server.state.engine_client
        with StalenessCallback(engines=[engine], trace=trace, run="r", sinks=[]) as staleness:
            for number, name in enumerate(("control-1", "control-2")):
                said = json.dumps({"prompt": PROMPT}).encode()
                headers = bearer(KEY), (b"x-request-id", name.encode())
                status, answer = exchange(server, "POST", "/v1/completions", *headers, said=said)
                assert status == 200 and COMPLETION in answer.decode()
                calls = engine.calls([name], timeout=20)
                assert [call.tokens for call in calls] == [7]
                staleness.on_publish(f"g{number}", calls=calls)
                staleness.on_step([f"g{number}"])
                server.run(llm.pause())
                staleness.on_refit_paused()
                staleness.on_refit_done()
                server.run(llm.resume())
            assert len(engine.calls({"never": 3}, timeout=20)) == 1
        shown += [
            exchange(server, "GET", f"/staleness{at}", bearer(KEY))[1] for at in ("", "/calls")
        ]
    mute = VllmServerEngine(url, api_key=KEY, timeout=0.1)
    shown.append(str(mute.start(version=0, refit=0).exception(60)).encode())
    mute.detach()
    return shown


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Written]:
    """That run, gone on with under hostile names, through every command and into both products."""
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("wandb")
    folder = tmp_path_factory.mktemp("written")
    trace = folder / "rollout_trace.jsonl"
    log = io.StringIO()
    handler, root = logging.StreamHandler(log), logging.getLogger()
    handler.setLevel(logging.DEBUG)
    ours = logging.getLogger("rl_staleness")
    uri = f"sqlite:///{folder}/runs.db"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, value in (
            *(("VLLM_API_KEY", KEY), ("MLFLOW_TRACKING_TOKEN", KEY)),
            *(("WANDB_API_KEY", KEY.ljust(40, "0")[:40]), ("MLFLOW_TRACKING_PASSWORD", PASSWORD)),
        ):
            patch.setenv(name, value)
        root.addHandler(handler)
        ours.setLevel(logging.DEBUG)
        try:
            shown = made_over_http(trace)
            names = hostile_trace(folder / "hostile.jsonl").read_bytes()
            trace.write_bytes(trace.read_bytes() + names)
            (folder / "hostile.jsonl").unlink()
            client = mlflow.MlflowClient(uri)
            experiment = client.create_experiment("e", str(folder / "artifacts"))
            patch.setenv("MLFLOW_EXPERIMENT_ID", experiment)
            outputs = []
            for arguments in (
                *[("steps", trace.name, "--json"), ("doctor", trace.name), ("lens", trace.name)],
                *[("report", trace.name), ("compare", trace.name, trace.name)],
                ("replay", trace.name, "--mlflow", "--tracking-uri", uri),
            ):
                out, err = io.StringIO(), io.StringIO()
                with redirect_stdout(out), redirect_stderr(err):
                    assert main(arguments) == (arguments[0] == "doctor"), err.getvalue()
                outputs += [out.getvalue(), err.getvalue()]
        finally:
            root.removeHandler(handler)
            ours.setLevel(logging.NOTSET)
        done = run("replay", trace.name, "--wandb", folder=folder, **offline(folder))
        assert done.returncode == 0, done.stderr
        outputs += [done.stdout, done.stderr]
    yield Written(folder, client, experiment, "".join(outputs), log.getvalue(), b"\n".join(shown))


def test_no_prompt_completion_token_or_credential_is_written(written: Written) -> None:
    """Every file, every output, every log and every answer is searched for them."""
    files = written_in(written.folder)
    assert sum(b"control-1" in data for data in files.values()) >= 3, "the trace, and two copies"
    assert {Path(name).suffix for name in files} >= {".jsonl", ".html", ".png", ".db", ".wandb"}
    told = {**files, "outputs": written.outputs.encode(), "log": written.log.encode()}
    assert "it has no calls of request 'never'" in written.log, "it is looked at"
    told["server"] = written.shown
    for name, data in told.items():
        for mark in MARKS:
            assert mark.encode() not in data, (name, mark)


def test_names_in_mlflow(written: Written) -> None:
    """Keys, tags and paths are ours; what people see of the run's name is clean."""
    from rl_staleness.integrations.mlflow_points import DEFINITIONS, KEYS

    assert "4 steps brought" in written.outputs and is_harmless(written.outputs)
    (found,) = written.client.search_runs([written.experiment])
    assert set(found.data.metrics) <= set(KEYS) and found.data.params == {}
    ours = {*DEFINITIONS, "staleness.replay_of", "staleness.run", "staleness.trace_sha256"}
    assert {tag for tag in found.data.tags if not tag.startswith("mlflow.")} == ours
    for text in (found.info.run_name, *found.data.tags.values()):
        assert is_harmless(text)
    files = {path.split("/artifacts/")[1] for path in files_in(written.folder / "artifacts")}
    assert files == {REPORT, PICTURE, f"staleness/{PACKED}"}


def test_names_in_wandb(written: Written) -> None:
    """The same for a run of W&B on the disk."""
    from tests.wandb_files import RunFile

    (folder,) = (written.folder / "wandb").glob("offline-run-*")
    found = RunFile(folder)
    assert len(found.rows) == 4
    for row in found.rows:
        assert all(key.startswith(("staleness/", "_")) for key in row)
    ours = {"rl_staleness", "rl_staleness_replay"}
    assert {key for key in found.config if not key.startswith("_")} == ours
    for texts in (found.config, found.summary):
        assert is_harmless(json.dumps(texts, ensure_ascii=False))
    (began, *_) = found.of("run")
    assert is_harmless(began.display_name) and began.display_name.startswith("staleness of ")
    (artifact,) = found.of("artifact")
    assert {entry.path for entry in artifact.manifest.contents} == {PACKED, PICTURE, REPORT}
    assert is_harmless(artifact.name)
    assert all(is_harmless(name) and ".." not in name for name in files_in(written.folder))


# What is run.

FORBIDDEN = {
    "pickle",
    "cPickle",
    "_pickle",
    "dill",
    "cloudpickle",
    "joblib",
    "marshal",
    "shelve",
    "code",
    "codeop",
    "runpy",
    "pty",
    "ctypes",
    "yaml",
    "jsonpickle",
}
"""Modules that run what they read, or could."""

FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "execfile", "system", "popen", "input"}

NETWORK = {"socket", "socketserver", "ssl", "http", "urllib", "ftplib", "smtplib", "xmlrpc"}

SOURCES = sorted([*(ROOT / "rl_staleness").glob("*.py"), *(ROOT / "integrations").glob("*.py")])


def modules_of(tree: ast.AST) -> Iterator[str]:
    """First names of what a file imports, also by a function with a constant name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield str(node.module).partition(".")[0]
        elif isinstance(node, ast.Call) and called(node) == "import_module":
            yield ast.unparse(node.args[0]).strip("f'\"").partition(".")[0]


def called(node: ast.Call) -> str:
    """The last name of what is called."""
    function = node.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def reasons_against(tree: ast.AST) -> Iterator[str]:
    """What in a file runs, or may run, what it reads."""
    yield from (f"imports {name}" for name in modules_of(tree) if name in FORBIDDEN)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name, text = called(node), ast.unparse(node.func)
        if name in FORBIDDEN_CALLS and text not in ("re.compile",):
            yield f"line {node.lineno} calls {text}"
        for keyword in node.keywords:
            if keyword.arg in ("shell", "allow_pickle", "executable"):
                yield f"line {node.lineno} passes {keyword.arg}"
        started = text.startswith(("subprocess.", "os.exec", "os.spawn", "os.posix_spawn"))
        if started and not isinstance(node.args[0] if node.args else None, ast.List):
            yield f"line {node.lineno} starts what is no list of words"


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_nothing_that_was_read_is_run(source: Path) -> None:
    """No pickle, no eval, no shell, in the whole package.

    Ray pickles what it sends between a driver and its actors, with its own means and on its own
    connections, whoever uses it: `RayEngine` and the adapters over it rely on that.
    """
    assert list(reasons_against(ast.parse(source.read_text()))) == []


@pytest.mark.parametrize(
    "code",
    [
        *["import pickle", "from yaml import load", "import_module('cloudpickle')", "eval(x)"],
        *["builtins.exec(x)", "os.system(x)", "os.popen(x)", "f(shell=True)", "__import__(x)"],
        *["subprocess.run('rm -r x')", "subprocess.Popen(words)", "np.load(x, allow_pickle=True)"],
    ],
)
def test_what_runs_what_it_reads_would_be_seen(code: str) -> None:
    """The look above sees each of them."""
    assert list(reasons_against(ast.parse(code))) != []


def test_the_core_has_no_network_and_starts_only_itself() -> None:
    """Sockets are the integrations' alone; one module starts a process, this library's own."""
    core = [source for source in SOURCES if source.parent.name == "rl_staleness"]
    trees = {source.name: ast.parse(source.read_text()) for source in core}
    assert {name for name, tree in trees.items() if NETWORK & set(modules_of(tree))} == set()
    starting = {n for n, tree in trees.items() if {"subprocess", "pty"} & set(modules_of(tree))}
    assert starting == {"artifacts.py"}
    integrations = [source for source in SOURCES if source.parent.name == "integrations"]
    for source in integrations:
        names = set(modules_of(ast.parse(source.read_text())))
        assert "subprocess" not in names
        if NETWORK & names - {"urllib"}:
            assert source.name in ("vllm_http.py", "vllm_exchange.py"), source
