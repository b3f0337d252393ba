"""vLLM's HTTP server, 0.29 to 0.33, as an engine of a trainer in another process: its side of it.

    vllm serve MODEL --middleware rl_staleness.integrations.vllm_server.StalenessMiddleware

That is all: refits are seen as the engine is paused (``/pause``, ``/sleep``, a route of your own),
and each is cut exactly there, also when the trainer is slow to say what it was for. The trainer's
side is `rl_staleness.integrations.vllm_http.VllmServerEngine`.

``--middleware`` and not ``vllm.endpoint_plugins``: a middleware stands around every request and so
can capture its calls, where a plugin only adds routes; it is named on the command line, by a path,
where a plugin is loaded only if ``VLLM_PLUGINS`` names it, which shuts out all that it does not
name. The class is a plain ASGI application: it hands requests and responses on as they are, and
looks into neither.

Every request is captured; the client finds its calls by the ``X-Request-Id`` that it sent, or by
the ``id`` of the response. Routes, all JSON, under the server's own ``--api-key`` where it has one:

GET  /staleness              ``schema``, ``boot`` (another one after a restart), versions, counts
POST /staleness/start        ``{run, version, refit}``; ``run`` is any token of the one that drives
POST /staleness/mark         ``{run, refit, version, mode, age, first}``: paused for this refit
                             ``age`` seconds ago, in a run that started from version ``first``
POST /staleness/done         ``{run, refit, version}``
POST /staleness/aborted      ``{run, refit}``
GET  /staleness/cuts         ``?since=PAUSE`` or ``?refit=N&refit=M``
GET  /staleness/calls        ``?since=PLACE&limit=N`` in the order in which requests ended, or
                             ``?id=A&id=B``; POST ``{ids: [...]}`` where they are many
POST /staleness/selftest     runs a call of a few tokens

One run drives, any number of readers read. A message that is sent again changes nothing. The oldest
finished calls are forgotten, see `KEPT_CALLS`. A server with several front-end processes
(``--api-server-count``) is refused: each of them would see its own requests only.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import asdict
from typing import Any

import msgspec

from rl_staleness.engines import captured
from rl_staleness.integrations.vllm_journal import KEPT_CALLS, Journal, refusal
from rl_staleness.integrations.vllm_routes import respond

__all__ = ["ROUTE", "StalenessMiddleware"]

ROUTE = "/staleness"

LARGEST_BODY = 16 * 2**20
"""Bytes of a message; the ids of a hundred thousand requests are fewer."""

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_log = logging.getLogger(__name__)


class _Refused(Exception):
    """A request that is answered with an error: the HTTP status and one line."""

    def __init__(self, status: int, error: str) -> None:
        super().__init__(error)
        self.status = status


class StalenessMiddleware:
    """Captures the calls of a vLLM server and answers what a trainer asks about them.

    Args:
        app: the application around which it stands.
        kept_calls: finished calls that are kept for readers.
    """

    def __init__(self, app: Any, *, kept_calls: int = KEPT_CALLS) -> None:
        self._app = app
        self._kept_calls = kept_calls
        self._journal: Journal | None = None
        self._refusal = "the server has no engine"
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request, or the server's start and end."""
        if not self._begun and "app" in scope:
            self._begin(scope["app"])
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path == ROUTE or path.startswith(ROUTE + "/"):
            await self._serve(path[len(ROUTE) :].strip("/"), scope, receive, send)
        elif scope["method"] == "POST" and self._journal is not None:
            await self._capture(self._journal, scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _begin(self, app: Any) -> None:
        """Take hold of the engine, which is there before the first request is."""
        self._begun = True
        llm = getattr(app.state, "engine_client", None)
        if llm is None:
            return
        refused = refusal(llm)
        if refused is not None:
            self._refusal = refused
            _log.error("rl_staleness: %s", refused)
            return
        try:
            self._journal = Journal(llm, kept_calls=self._kept_calls)
        except Exception as error:  # noqa: BLE001  # the server serves without us
            self._refusal = f"its engine cannot be followed: {type(error).__name__}: {error}"
            _log.exception("rl_staleness: %s", self._refusal)

    async def _capture(self, journal: Journal, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand a request on, and keep what calls it makes."""
        header = _header(scope, b"x-request-id")
        request = journal.open(*([header] if header else []))

        def note() -> None:
            state = scope.get("state", {})
            told = getattr(state.get("request_metadata"), "request_id", None)
            begun = [call.call.rpartition("/")[0] for call in request.capture.calls]
            new = [name for name in (told, *begun) if name and name not in request.ids]
            request.ids.extend(dict.fromkeys(new))
            journal.index(request)

        async def noting(message: Message) -> None:
            # The client may ask for its calls as soon as it has the response's first byte.
            if message["type"] == "http.response.start":
                note()
            await send(message)

        try:
            with captured(request.capture):
                await self._app(scope, receive, noting)
        finally:
            note()
            journal.close(request)

    async def _serve(self, route: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request of a trainer or a reader."""
        try:
            if not _is_allowed(scope):
                raise _Refused(401, "this server wants its --api-key, as a bearer token")
            if self._journal is None:
                raise _Refused(501, self._refusal)
            said = await _body(receive)
            if (scope["method"], route) == ("POST", "selftest"):
                evidence = asdict(await self._journal.engine.selftest())
                answer = {"boot": self._journal.boot, "evidence": evidence}
                status, body = 200, msgspec.json.encode(answer)
            else:
                query = scope.get("query_string", b"").decode("latin-1")
                status, body = respond(
                    self._journal, scope["method"], route, query=query, body=said
                )
        except _Refused as error:
            # A stranger is told nothing, not even whether the server was restarted.
            boot = getattr(self._journal, "boot", "") if error.status != 401 else ""
            status, body = error.status, msgspec.json.encode({"boot": boot, "error": str(error)})
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def _header(scope: Scope, name: bytes) -> str | None:
    return next((v.decode("latin-1") for k, v in scope["headers"] if k.lower() == name), None)


def _is_allowed(scope: Scope) -> bool:
    """Whether a request carries the server's own key, if it has one.

    The server itself asks for it under some paths only, and ours is not among them.
    """
    args = getattr(scope["app"].state, "args", None)
    keys = getattr(args, "api_key", None) or [os.environ.get("VLLM_API_KEY")]
    keys = [key for key in ([keys] if isinstance(keys, str) else keys) if key]
    scheme, _, said = (_header(scope, b"authorization") or "").partition(" ")
    digest = hashlib.sha256(said.encode()).digest()
    fits = [secrets.compare_digest(digest, hashlib.sha256(k.encode()).digest()) for k in keys]
    return not keys or (scheme.lower() == "bearer" and any(fits))


async def _body(receive: Receive) -> bytes:
    body, more = bytearray(), True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            raise _Refused(400, "the client is gone")
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > LARGEST_BODY:
            raise _Refused(413, f"more than {LARGEST_BODY} bytes")
    return bytes(body)
