"""What is fuzzed: each takes any bytes, and raises where a promise is broken.

A target is given a folder that is its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import io
import json
import logging
import socket
import threading
import time
import unicodedata
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from rl_staleness import StalenessCallback
from rl_staleness.cli import main
from rl_staleness.events import TraceError
from rl_staleness.integrations.vllm_http import VllmServerEngine
from rl_staleness.integrations.vllm_server import StalenessMiddleware
from tests.asgi import FakeLLM, Inner
from tests.fuzz.mutations import HOSTILE, seeds

__all__ = ["RUNS", "SEEDS", "TARGETS", "is_harmless", "read_trace"]

COMMANDS: tuple[tuple[str, ...], ...] = (
    ("steps",),
    ("steps", "--json"),
    ("doctor",),
    ("doctor", "--json"),
    ("lens",),
    ("lens", "--json"),
    ("report",),
    ("compare",),
)
"""With no drawing of pictures, which is slow."""

LONGEST_TOLD = 2000
"""Characters of an error, most of them the path."""

LARGEST_SAID = 1 << 20
"""Bytes of an answer to a message of some hundred bytes, by a server that has served one call."""


def is_harmless(text: str) -> bool:
    """Whether a terminal shows it as it is: no character steers it or turns text around."""
    return not [c for c in text if unicodedata.category(c)[0] == "C" and c != "\n"]


def read_trace(data: bytes, folder: Path, commands: tuple[tuple[str, ...], ...] = COMMANDS) -> None:
    """Every command on a trace: 0, 1 or 2; with 2 one line that names the file; clean text."""
    packed = data[:1] == b"z"
    path = folder / f"rollout_trace.jsonl{'.gz' if packed else ''}"
    path.write_bytes(gzip.compress(data[1:]) if packed else data)
    verdicts: set[bool] = set()
    for command, *options in commands:
        traces = [str(path)] * (2 if command == "compare" else 1)
        files = ["-o", str(folder / "page.html")] if command in ("report", "compare") else []
        status, out, err = _said([command, *traces, *options, *files])
        assert status in ((0, 1, 2) if command == "doctor" else (0, 2)), (command, status)
        assert is_harmless(out) and is_harmless(err), (command, out[-500:], err[-500:])
        if status == 2:
            assert len(err.splitlines()) == 1, err
            assert str(path) in err and len(err) < LONGEST_TOLD, err
        if "--json" in options:
            for line in out.splitlines():
                json.loads(line)
        verdicts.add(status == 2)
    assert len(verdicts) == 1, "one command reads what another one does not"


def read_some(data: bytes, folder: Path) -> None:
    """Two of the commands; which, the bytes say."""
    at = zlib.crc32(data)
    read_trace(data, folder, (COMMANDS[at % 8], COMMANDS[at // 8 % 8]))


def resume_trace(data: bytes, folder: Path) -> None:
    """A run that finds this where its trace should be: it goes on, leaves it alone, or refuses."""
    for old in folder.iterdir():
        old.unlink()
    path = folder / "rollout_trace.jsonl"
    path.write_bytes(data)
    with _logged() as log:
        try:
            staleness = StalenessCallback(trace=path, run="r")
        except (TraceError, OSError, ValueError) as error:
            assert "trace: " in str(error) or str(path) in str(error), error
            assert len(str(error)) < LONGEST_TOLD
            return
        with staleness:
            staleness.on_step([])
    assert is_harmless(log.getvalue())
    assert staleness.trace is not None
    status, _, err = _said(["steps", str(staleness.trace)])
    assert status == 0, err


def ask_server(data: bytes, folder: Path) -> None:
    """The routes of a vLLM server: a message a line, as JSON, or a body as it is.

    Each is answered, with JSON of a bounded size, and nothing is an error of ours; the server
    goes on.
    """
    asyncio.run(_ask(data))


async def _ask(data: bytes) -> None:
    llm = FakeLLM()
    app = StalenessMiddleware(Inner(llm))
    state = SimpleNamespace(engine_client=llm, args=SimpleNamespace(api_key=None))
    request = asyncio.create_task(_message(app, state, "POST", "/v1/a", body=b"{}"))
    while "a" not in llm.output_processor.request_states:
        await asyncio.sleep(0)
    llm.make("a", 5)
    llm.finish("a")
    await request
    for line in data.splitlines()[:20]:
        status, body = await _message(app, state, *_parsed(line))
        assert status in (200, 400, 404, 409), (status, body[:500])
        assert isinstance(json.loads(body)["boot"], str) and len(body) < LARGEST_SAID
        if status != 200:
            assert json.loads(body)["error"]
    status, body = await _message(app, state, "GET", "/staleness/calls")
    assert status == 200 and len(json.loads(body)["requests"]) == 1


def _parsed(line: bytes) -> tuple[str, str, str, bytes]:
    """Method, path, query and body."""
    try:
        said = json.loads(line)
        assert isinstance(said, dict)
        route, method = str(said.get("route", "mark")), said.get("method")
        body = json.dumps(said.get("body"), allow_nan=False).encode()
        query = str(said.get("query", ""))
    except (ValueError, RecursionError, AssertionError):
        return "POST", "/staleness/mark", line.decode("latin-1"), line
    return "GET" if method == "GET" else "POST", f"/staleness/{route}", query, body


async def _message(
    app: Any, state: Any, method: str, path: str, query: str = "", body: bytes = b""
) -> tuple[int, bytes]:
    sent: list[Any] = []
    scope = {
        "type": "http",
        "app": SimpleNamespace(state=state),
        "method": method,
        "path": path,
        "query_string": query.encode("utf-8", "surrogatepass"),
        "headers": [],
    }

    async def receive() -> Any:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return sent[0]["status"], b"".join(each.get("body", b"") for each in sent[1:])


def hear_server(data: bytes, folder: Path) -> None:
    """A server that answers every request with these bytes, and closes the connection.

    No question raises, all end in time, and what is logged is clean.
    """
    with _logged() as log, _answering(data) as url:
        engine = VllmServerEngine(url, timeout=0.05, patience=0.05)
        begun = time.monotonic()
        calls = engine.calls(["a", "b"], timeout=0.05)
        assert len({call.call for call in calls}) == len(calls)
        taken = engine.start(version=0, refit=0)
        marked = engine.mark(1, version=1, mode="keep", deliver=lambda cut: None)
        for future in (taken, marked):
            future.exception(timeout=30)
        thread = engine._thread
        assert thread is not None and thread.is_alive(), "what it hears does not end the thread"
        engine.detach()
        thread.join(30)
        assert not thread.is_alive()
        assert time.monotonic() - begun < 60
    assert is_harmless(log.getvalue()), log.getvalue()
    assert len(log.getvalue()) < 10_000


@contextmanager
def _answering(data: bytes) -> Iterator[str]:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(60)

    def answer() -> None:
        with contextlib.suppress(OSError):  # it is closed, or the other side has gone
            while True:
                connection, _ = listener.accept()
                with connection, contextlib.suppress(OSError):
                    connection.settimeout(5)
                    connection.recv(65536)
                    connection.sendall(data)

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(30)


def _said(argv: list[str]) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    # Pages without the four megabytes that are the same in all of them.
    script: Callable[[], str] = str
    with (
        mock.patch("plotly.offline.get_plotlyjs", script),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        _logged(err),
    ):
        status = main(argv)
    return status, out.getvalue(), err.getvalue()


@contextmanager
def _logged(stream: io.StringIO | None = None) -> Iterator[io.StringIO]:
    """What the library logs, and nowhere else."""
    stream = io.StringIO() if stream is None else stream
    handler, log = logging.StreamHandler(stream), logging.getLogger("rl_staleness")
    log.addHandler(handler)
    log.propagate = False
    try:
        yield stream
    finally:
        log.removeHandler(handler)
        log.propagate = True


def _messages() -> list[bytes]:
    """What trainers and readers say."""
    said = {"run": "t", "refit": 1, "version": 1, "mode": "keep", "age": 0.5, "first": 0}
    lines: list[dict[str, Any]] = [
        {"route": "start", "body": {"run": "t", "refit": 0, "version": 0}},
        {"route": "mark", "body": said},
        {"route": "done", "body": {"run": "t", "refit": 1, "version": 1}},
        {"route": "aborted", "body": {"run": "t", "refit": 1}},
        {"route": "calls", "body": {"ids": ["a", "b", HOSTILE]}},
        {"route": "calls", "method": "GET", "query": "since=0&limit=10", "body": None},
        {"route": "calls", "method": "GET", "query": "id=a&id=b", "body": None},
        {"route": "cuts", "method": "GET", "query": "refit=1&since=0", "body": None},
        {"route": "", "method": "GET", "query": "", "body": None},
    ]
    return [b"".join(json.dumps(line).encode() + b"\n" for line in lines)]


def _answers() -> list[bytes]:
    """What servers say."""
    call = {"call": "a/0", "engine": "engine", "version": 0, "tokens": 9, "spans": [[0, 9, 0]]}
    found = {"running": 0, "calls": [call]}
    cut = {"refit": 1, "cut": {"calls": {"a/0": 3}, "exact": True, "generated": 9}}
    said = {"boot": "x", "found": [[found], []], "first": 0, "known": True, "cuts": [cut]}
    wrong = {"boot": "x", "error": HOSTILE}
    whole, refused = json.dumps(said).encode(), json.dumps(wrong).encode()
    return [
        b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + whole,
        b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(whole) + whole,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n" % len(whole)
        + whole
        + b"\r\n0\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 409 No\r\nConnection: close\r\n\r\n" + refused,
    ]


TARGETS: dict[str, Callable[[bytes, Path], None]] = {
    "trace": read_some,
    "resume": resume_trace,
    "server": ask_server,
    "client": hear_server,
}
SEEDS = {"trace": seeds(), "resume": seeds(), "server": _messages(), "client": _answers()}
RUNS = [("trace", 120), ("resume", 120), ("server", 200), ("client", 20)]
"""How often each runs in the tests, twice."""
