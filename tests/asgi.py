"""A vLLM front end without vLLM, and an HTTP server around an ASGI application, for tests.

The front end has what `VllmEngine` follows: requests are added to it, and its calls grow and end as
the test says. The server is the standard library's; a test may have it lose answers.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any


class FakeCore:
    """An engine's core: it pauses, resumes, and takes labels."""

    def __init__(self) -> None:
        self.paused = False
        self.labels: list[str] = []

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        if method == "set_weight_version":
            self.labels += args
        return self.paused if method == "is_scheduler_paused" else None

    async def pause_scheduler_async(self, mode: str = "abort", clear_cache: bool = True) -> None:
        self.paused = True

    async def resume_scheduler_async(self) -> None:
        self.paused = False


class FakeProcessor:
    """A front end's output processor, which knows the requests that run."""

    def __init__(self) -> None:
        self.request_states: dict[str, Any] = {}

    def add_request(self, request: Any) -> None:
        tokens: list[int] = []
        detokenizer = SimpleNamespace(token_ids=tokens, num_output_tokens=lambda: len(tokens))
        self.request_states[request.request_id] = SimpleNamespace(
            request_id=request.request_id,
            request_index=0,
            lora_request=None,
            detokenizer=detokenizer,
        )

    def _finish_request(self, req_state: Any) -> None:
        del self.request_states[req_state.request_id]

    def abort_requests(self, request_ids: Any) -> None:
        for name in request_ids:
            self.request_states.pop(name, None)


class FakeLLM:
    """A front end whose calls do what the test says."""

    output_handler = None

    def __init__(self, *, client_count: int = 1) -> None:
        self._client_count = client_count
        self.engine_core = FakeCore()
        self.output_processor = FakeProcessor()

    async def add_request(self, request_id: str, prompt: Any, params: Any) -> None:
        self.output_processor.add_request(SimpleNamespace(request_id=request_id))

    async def pause(self) -> None:
        """Pause, as a route of the server does."""
        await self.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)

    async def resume(self) -> None:
        """Resume."""
        await self.engine_core.resume_scheduler_async()

    def make(self, request_id: str, tokens: int) -> None:
        """Let a call grow."""
        self.output_processor.request_states[request_id].detokenizer.token_ids += [0] * tokens

    def finish(self, request_id: str) -> None:
        """Let it end."""
        self.output_processor._finish_request(self.output_processor.request_states[request_id])


class Inner:
    """The application inside: a POST adds a request named by the path, and waits for its end."""

    def __init__(self, llm: FakeLLM) -> None:
        self.llm = llm

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"].startswith("/v1/"):
            name = scope["path"][4:]
            params = SimpleNamespace(n=1)
            await self.llm.add_request(name, [], params)
            while name in self.llm.output_processor.request_states:
                await asyncio.sleep(0.001)
            await send({"type": "http.response.start", "status": 200, "headers": []})
        else:
            await send({"type": "http.response.start", "status": 404, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})


class AsgiServer:
    """An HTTP server around an ASGI application that runs on a loop of its own."""

    def __init__(self, app: Callable[..., Any], state: Any) -> None:
        self.app, self.state = app, state
        self.lose_answers = 0
        """So many answers are lost from here on: the connection is closed instead."""
        self.requests: list[str] = []
        self.loop = asyncio.new_event_loop()
        handler = type("Handler", (_Handler,), {"owner": self})
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        for target in (self.loop.run_forever, partial(self.http.serve_forever, 0.01)):
            threading.Thread(target=target, daemon=True).start()

    def run(self, work: Any, *, timeout: float = 10) -> Any:
        """Do some work on the application's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout)

    async def exchange(
        self, method: str, path: str, headers: list[tuple[bytes, bytes]], body: bytes
    ) -> tuple[int, bytes]:
        """One request."""
        path, _, query = path.partition("?")
        sent: list[Any] = []
        scope = {
            "type": "http",
            "app": SimpleNamespace(state=self.state),
            "method": method,
            "path": path,
            "query_string": query.encode(),
            "headers": headers,
        }

        async def receive() -> Any:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        await self.app(scope, receive, send)
        return sent[0]["status"], b"".join(each.get("body", b"") for each in sent[1:])

    def stop(self) -> None:
        self.http.shutdown()
        self.http.server_close()
        self.loop.call_soon_threadsafe(self.loop.stop)


class _Handler(BaseHTTPRequestHandler):
    owner: AsgiServer
    protocol_version = "HTTP/1.1"

    def handle_one_exchange(self) -> None:
        owner = self.owner
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        headers = [(k.lower().encode(), v.encode()) for k, v in self.headers.items()]
        owner.requests.append(f"{self.command} {self.path}")
        status, said = owner.run(owner.exchange(self.command, self.path, headers, body))
        if owner.lose_answers:
            owner.lose_answers -= 1
            self.close_connection = True
            return
        self.send_response(status)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    do_GET = do_POST = handle_one_exchange

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def served(app: Callable[..., Any], **state: Any) -> Iterator[AsgiServer]:
    """Serve an application whose ``app.state`` holds this."""
    server = AsgiServer(app, SimpleNamespace(**state))
    try:
        yield server
    finally:
        server.stop()
