"""A vLLM server, 0.29 to 0.33, as an engine of a trainer in another process: the trainer's side.

    vllm serve MODEL --middleware rl_staleness.integrations.vllm_server.StalenessMiddleware

    engine = VllmServerEngine("http://localhost:8000", api_key=...)
    with StalenessCallback(engines=[engine]) as staleness:
        response = post(".../v1/completions", headers={"X-Request-Id": "r1"})
        staleness.on_publish("g1", calls=engine.calls(["r1"]))    # or [response["id"]]
        ...
        post(".../pause?mode=keep"); staleness.on_refit_paused()
        move weights
        staleness.on_refit_done(); post(".../resume")

Refits are announced from the process that makes them. Any process may read calls, with an engine of
its own for the same url; one that only reads starts no thread.

No hook waits for the network: a thread sends what it is told in order, and tries again until
``timeout``. A message that came twice changes nothing. A server that is away, slow or was restarted
costs its own calls their coverage, nothing else. `VllmServerEngine.calls` waits for an answer, and
`VllmServerEngine.acalls` does so beside the loop; neither raises.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import logging
import queue
import secrets
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol, cast
from urllib.parse import urlsplit

import msgspec

from rl_staleness.engines import Cut
from rl_staleness.events import LARGEST, Call, Whole
from rl_staleness.integrations.vllm_exchange import LONGEST_ERROR, exchanged
from rl_staleness.printable import printable

__all__ = ["Answer", "ServerError", "Transport", "VllmServerEngine", "understood"]

MIDDLEWARE = "rl_staleness.integrations.vllm_server.StalenessMiddleware"

FIRST_SECONDS, LONGEST_SECONDS = 0.01, 1.0
"""Between one try and the next, and between questions for counts: after the first, then longer."""

ATTEMPT_SECONDS = 5.0
"""How long one try waits for the server."""

IDLE = 8
"""Connections that are kept open."""

_log = logging.getLogger(__name__)

Tokens = Mapping[str, "int | Sequence[int]"]
"""How many tokens the trainer got of each request, or of each of its choices."""


class ServerError(RuntimeError):
    """What a server answered that will not get better by asking again."""


class Found(msgspec.Struct):
    running: int
    calls: tuple[Call, ...]


class Counted(msgspec.Struct):
    refit: int | None
    cut: Cut | None


class Answer(msgspec.Struct):
    """Whatever any route says."""

    boot: str = ""
    error: str = ""
    question: str = ""
    """What it answers; a connection may still hold an answer to another one."""
    schema: int | None = None
    known: bool = True
    first: Whole = 0
    cuts: list[Counted] = []
    found: list[list[Found]] = []
    evidence: dict[str, Any] = {}


@dataclass(slots=True)
class _Operation:
    """What the callback said, until the server has taken notice."""

    route: str
    body: dict[str, Any]
    called: float
    """On the monotonic clock, in seconds."""
    taken: Future[None] = field(default_factory=Future[None])


class Transport(Protocol):
    """What carries messages to an engine's journal. From any thread."""

    url: str
    """What messages call it."""

    def ask(self, method: str, path: str, body: bytes | None, *, seconds: float) -> Answer:
        """Send a message, one that may come twice, as all of these may, and read the answer.

        Raises:
            ServerError: what was refused, or has no such route.
            OSError, HTTPException: it cannot be reached, or did not answer in time.
        """
        ...

    def close(self) -> None:
        """Close what is idle."""
        ...


def understood(
    url: str, path: str, status: int, said: bytes, *, missing: str, question: str = ""
) -> Answer:
    """Read what an engine's journal answered, see `Transport.ask`.

    Args:
        question: the token that the message was sent with, if it was.
        missing: the way out where there is no journal.
    """
    try:
        answer = msgspec.json.decode(said, type=Answer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        answer = Answer()
    if answer.question not in ("", question):
        raise http.client.HTTPException("this answers another message")
    if status == 200 and answer.boot:
        return answer
    if status in (200, 404, 405) and not answer.boot:
        raise ServerError(f"{url}: the server has no such route: {missing}")
    if status in (502, 503, 504):  # something in front of it
        raise http.client.HTTPException(f"status {status}")
    error = printable(answer.error, longest=LONGEST_ERROR) or "refused"
    raise ServerError(f"{url}{path}: {error} ({status})")


class VllmServerEngine:
    """A vLLM server with the middleware, as the callback sees it.

    Args:
        url: of the server, ``http`` or ``https``; a ``/v1`` at its end is left out. Or what carries
            messages to an engine elsewhere, see `rl_staleness.integrations.vllm_plugin`.
        name: unique in the run.
        api_key: the server's own, where it has one.
        timeout: seconds after which a message is given up. The callback waits for less, see there.
        patience: seconds after which counts that the server does not have are given up.

    Raises:
        ValueError: an argument cannot be used; the message names it.
    """

    def __init__(
        self,
        url: str | Transport,
        *,
        name: str = "engine",
        api_key: str | None = None,
        timeout: float = 30.0,
        patience: float = 60.0,
    ) -> None:
        if not name:
            raise ValueError("name: an engine needs one that can stand in a trace")
        if not timeout > 0:
            raise ValueError(f"timeout: {timeout!r} is no time; pass seconds, more than none")
        self._name = name
        self._server = _Server(url, api_key) if isinstance(url, str) else url
        self._timeout, self._patience = timeout, patience
        self._lock = threading.Lock()
        self._inbox: queue.SimpleQueue[_Operation | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()
        self._news = threading.Event()
        """Something was said, or this ends: whoever waits to try again tries now."""
        self._run = ""
        self._first = 0  # the version that the run started from
        self._boot = ""
        self._receivers: dict[int, Callable[[Cut | None], None]] = {}
        self._marked: dict[int, float] = {}
        """Refits whose counts the server does not have yet, and until when they are waited for."""
        self._complaints: set[str] = set()
        self._silent = False
        """The last question about calls had no answer."""
        self.num_lost = 0
        """Requests whose calls the server could not give."""

    @property
    def name(self) -> str:
        """Unique in the run."""
        return self._name

    # What the callback says, from any thread.

    def start(self, *, version: int, refit: int) -> Future[None]:
        """The run starts. A server that is still starting answers when it is there."""
        self._run, self._first = secrets.token_hex(8), version
        return self._send("start", version=version, refit=refit)

    def mark(
        self, refit: int, *, version: int, mode: str, deliver: Callable[[Cut | None], None]
    ) -> Future[None]:
        """Generation was paused: say for which refit. The server has taken the cut by itself."""
        with self._lock:
            self._receivers[refit] = deliver
        return self._send("mark", refit=refit, version=version, mode=mode, first=self._first)

    def done(self, refit: int, *, version: int) -> Future[None]:
        """The new weights are in."""
        return self._send("done", refit=refit, version=version)

    def aborted(self, refit: int) -> Future[None]:
        """The refit failed: the engine goes on with the version from before."""
        return self._send("aborted", refit=refit)

    def detach(self) -> None:
        """Let the thread end; the server goes on, for the next run and for other readers."""
        with self._lock:
            thread, self._thread = self._thread, None
            self._receivers.clear()
            self._marked.clear()
        if thread is not None:
            self._stopped.set()
            self._inbox.put(None)
            self._news.set()
        self._server.close()

    def problem(self, *, timeout: float = 5.0) -> str | None:
        """Why the server does not answer, in one line; None: it does."""
        try:
            self._server.ask("GET", "", None, seconds=timeout)
        except (ServerError, OSError, http.client.HTTPException) as error:
            return _said(error)
        return None

    async def selftest(self, *, timeout: float = 30.0) -> Mapping[str, Any]:
        """Have the server run a call of a few tokens, and say what evidence it gives.

        It never raises; what went wrong is among the ``problems``.
        """
        try:
            answer = await asyncio.to_thread(
                self._server.ask, "POST", "/selftest", b"", seconds=timeout
            )
            return answer.evidence
        except (ServerError, OSError, http.client.HTTPException) as error:
            return {"problems": (f"{type(error).__name__}: {error}",)}

    # Calls.

    def calls(
        self, requests: Iterable[str] | Tokens, *, timeout: float | None = None
    ) -> tuple[Call, ...]:
        """The calls of finished requests, request by request, in the order of their choices.

        Args:
            requests: their ids (one alone will do): the ``X-Request-Id`` that was sent, or the
                ``id`` of the response. With the tokens that were received by id, a request that
                the server has forgotten, or lost in a restart, gives calls of that many tokens, of
                unknown version.
            timeout: seconds to wait, for the server and for calls that are still being aborted;
                default: the engine's, or hardly at all as long as the server does not answer.
        """
        ids = list(dict.fromkeys((requests,) if isinstance(requests, str) else requests))
        received: Tokens = {}
        if isinstance(requests, Mapping):
            received = cast("Tokens", requests)
        if timeout is None:
            timeout = self._timeout / 50 if self._silent else self._timeout
        end = time.monotonic() + timeout
        found = self._find(ids, end) if ids else []
        calls: dict[str, Call] = {}
        for request, of_it in zip(ids, found, strict=True):
            if not of_it:
                of_it = self._lose(request, received.get(request, ()))
            calls.update((call.call, call) for call in of_it)
        return tuple(calls.values())

    async def acalls(
        self, requests: Iterable[str] | Tokens, *, timeout: float | None = None
    ) -> tuple[Call, ...]:
        """Like `calls`, without blocking the loop."""
        return await asyncio.to_thread(self.calls, requests, timeout=timeout)

    def _find(self, ids: Sequence[str], end: float) -> list[list[Call]]:
        """The calls of each request; none of one that is not there, or does not end in time."""
        interval = FIRST_SECONDS
        found: list[list[Found]] = [[] for _ in ids]
        while True:
            try:
                body = msgspec.json.encode({"ids": ids})
                answer = self._server.ask("POST", "/calls", body, seconds=_left(end))
                if len(answer.found) != len(ids):
                    raise ServerError(f"{self._server.url}/calls: not an answer for each request")
                found, self._first = answer.found, self._first or answer.first
                self._silent = False
            except ServerError as error:
                self._complain("calls", error)
                break
            except (OSError, http.client.HTTPException) as error:
                if time.monotonic() + interval >= end:
                    self._silent = True
                    self._complain("calls", error)
                    break
            else:
                running = any(request.running for of_it in found for request in of_it)
                if not running or time.monotonic() + interval >= end:
                    break
            self._stopped.wait(interval)
            interval = min(2 * interval, LONGEST_SECONDS)
        return [
            []
            if any(request.running for request in of_it)
            else [self._own(call) for request in of_it for call in request.calls]
            for of_it in found
        ]

    def _own(self, call: Call) -> Call:
        # A server that was restarted does not know yet from which version the run started.
        version = max(call.version, self._first)
        return msgspec.structs.replace(call, engine=self._name, version=version)

    def _lose(self, request: str, tokens: int | Sequence[int]) -> list[Call]:
        """Calls that nobody knows anything of but their length."""
        self.num_lost += 1
        self._complain(
            "lost", f"it has no calls of request {request!r}: restarted, forgotten, or not captured"
        )
        return [
            Call(
                call=f"{request}/lost{index}",
                engine=self._name,
                version=self._first,
                tokens=number,
                spans=((0, number, 0, LARGEST),) if number else None,
            )
            for index, number in enumerate([tokens] if isinstance(tokens, int) else tokens)
        ]

    # The thread.

    def _send(self, route: str, **body: Any) -> Future[None]:
        operation = _Operation(route, {"run": self._run, **body}, time.monotonic())
        operation.taken.set_running_or_notify_cancel()  # whoever stops waiting does not cancel it
        with self._lock:
            if self._thread is None:
                self._stopped.clear()
                self._thread = threading.Thread(
                    target=self._work, name=f"rl_staleness-{self._name}", daemon=True
                )
                self._thread.start()
        self._inbox.put(operation)
        self._news.set()
        return operation.taken

    def _work(self) -> None:
        """Send one thing after the other; ask for counts that did not come with an answer."""
        interval = FIRST_SECONDS
        while True:
            try:
                operation = self._inbox.get(timeout=interval if self._marked else None)
            except queue.Empty:
                interval = min(2 * interval, LONGEST_SECONDS)
                self._ask_for_counts()
                continue
            if operation is None:
                return
            interval = FIRST_SECONDS
            try:
                self._carry_out(operation)
            except Exception as error:  # noqa: BLE001  # handed on to whoever waits
                if operation.route == "mark":
                    self._deliver(operation.body["refit"], None)
                operation.taken.set_exception(error)
            else:
                operation.taken.set_result(None)

    def _carry_out(self, operation: _Operation) -> None:
        end, interval = operation.called + self._timeout, FIRST_SECONDS
        body, refit = operation.body, operation.body["refit"]
        while True:
            if operation.route == "mark":
                body["age"] = time.monotonic() - operation.called
            try:
                said = msgspec.json.encode(body)
                answer = self._server.ask("POST", f"/{operation.route}", said, seconds=_left(end))
                break
            except (OSError, http.client.HTTPException) as error:
                # Whoever is there after the first pause may be another than the run started on.
                stale = operation.route == "start" and self._receivers
                if stale or time.monotonic() + interval >= end:
                    raise ServerError(f"{self._server.url}: {_said(error)}") from error
                if self._news.wait(interval):
                    self._news.clear()
                    interval = FIRST_SECONDS
                if self._stopped.is_set():
                    raise ServerError(f"{self._server.url}: {_said(error)}") from error
                interval = min(2 * interval, LONGEST_SECONDS)
        self._note_boot(answer.boot, begun=operation.route == "start")
        if operation.route == "mark":
            with self._lock:
                self._marked[refit] = time.monotonic() + self._patience
            if not answer.known:
                self._deliver(refit, None)
            self._take(answer)

    def _note_boot(self, boot: str, *, begun: bool) -> None:
        """A server that was restarted has lost its calls, and the counts of before."""
        before, self._boot = self._boot, boot
        if begun or before in ("", boot):
            return
        _log.warning(
            "rl_staleness: engine %r: the server was restarted: the calls it had are lost, and of"
            " new ones no version is known until the next refit is done",
            self._name,
        )
        for refit in list(self._marked):
            self._deliver(refit, None)

    def _ask_for_counts(self) -> None:
        refits = "&".join(f"refit={refit}" for refit in self._marked)
        try:
            answer = self._server.ask("GET", f"/cuts?{refits}", None, seconds=ATTEMPT_SECONDS)
            self._note_boot(answer.boot, begun=False)
            self._take(answer)
        except (ServerError, OSError, http.client.HTTPException) as error:
            _log.debug("rl_staleness: engine %r: %s", self._name, error)
        for refit, end in list(self._marked.items()):
            if time.monotonic() > end:
                self._deliver(refit, None)

    def _take(self, answer: Answer) -> None:
        for counted in answer.cuts:
            if counted.refit in self._marked:
                self._deliver(counted.refit, counted.cut)

    def _deliver(self, refit: int, cut: Cut | None) -> None:
        with self._lock:
            self._marked.pop(refit, None)
            deliver = self._receivers.pop(refit, None)
        if deliver is not None:
            deliver(cut)

    def _complain(self, kind: str, error: object) -> None:
        """Log, the first time."""
        if kind not in self._complaints:
            self._complaints.add(kind)
            said = _said(error) if isinstance(error, Exception) else error
            _log.warning("rl_staleness: engine %r: %s", self._name, said)


class _Server:
    """The connections to one server, for any thread."""

    def __init__(self, url: str, api_key: str | None) -> None:
        parts = urlsplit(url)
        try:
            port, known = parts.port, parts.scheme in ("http", "https") and not parts.query
        except ValueError:
            port, known = None, False
        if not known or parts.hostname is None:
            shown = url.rpartition("@")[2]  # without a password
            raise ValueError(f"url: {shown!r} is none of a server; pass one like http://host:8000")
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise ValueError("api_key: it cannot stand in a header")
        path = parts.path.rstrip("/")
        self._root = path.removesuffix("/v1") + "/staleness"
        self.url = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{self._root}"
        self._host, self._port = parts.hostname, port
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._idle: queue.LifoQueue[http.client.HTTPConnection] = queue.LifoQueue(IDLE)

    def ask(self, method: str, path: str, body: bytes | None, *, seconds: float) -> Answer:
        """Send one request and read the answer, see `Transport`."""
        question = secrets.token_hex(4)
        asked = f"{path}{'&' if '?' in path else '?'}question={question}"
        try:
            status, said = self._exchange(self._idle.get_nowait(), method, asked, body, seconds)
        except (queue.Empty, OSError, http.client.HTTPException) as error:
            if isinstance(error, TimeoutError):
                raise
            # It may have been closed since it was used last.
            status, said = self._exchange(self._connection(), method, asked, body, seconds)
        try:
            missing = f"start it with --middleware {MIDDLEWARE}"
            return understood(self.url, path, status, said, missing=missing, question=question)
        except http.client.HTTPException:
            self.close()  # an answer that came twice would be read as the next one
            raise

    def close(self) -> None:
        """Close what is idle."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._idle.get_nowait().close()

    def _connection(self) -> http.client.HTTPConnection:
        if self._tls is None:
            return http.client.HTTPConnection(self._host, self._port)
        return http.client.HTTPSConnection(self._host, self._port, context=self._tls)

    def _exchange(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        body: bytes | None,
        seconds: float,
    ) -> tuple[int, bytes]:
        answer = exchanged(
            connection, method, self._root + path, body, headers=self._headers, seconds=seconds
        )
        try:
            self._idle.put_nowait(connection)
        except queue.Full:
            connection.close()
        return answer


def _left(end: float) -> float:
    """How long the next try may wait."""
    return min(max(end - time.monotonic(), FIRST_SECONDS), ATTEMPT_SECONDS)


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, ServerError) else f"{type(error).__name__}: {error}"
