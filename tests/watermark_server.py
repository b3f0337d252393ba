"""The watermark model behind vLLM's HTTP server, and a run of a callback that talks to it.

The server is the real one, in processes of its own; requests, refits and what the library asks all
go over the loopback.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp

from rl_staleness import StalenessCallback
from rl_staleness.events import Call, RefitCut
from rl_staleness.integrations.vllm_http import MIDDLEWARE, VllmServerEngine
from rl_staleness.trace import read
from tests.watermark import ARGUMENTS, SETTINGS, Compared, Verdict, _replay, token, versions_of

KEY = "a key of the test's server"

ROOT = Path(__file__).parent.parent

PACE = 0.003
"""Seconds that the engine sleeps before each step.

Without it engine and worker, which wait for each other in busy loops, keep two cores so busy that
other processes do not run for seconds: a client's calls are over before it can ask for a refit.
"""

LONGEST = 3500
"""Tokens of a call that is meant to outlast what a test does."""

TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


class ServedOverHttp:
    """A running server and the version of its weights; tests share it, one after the other."""

    def __init__(
        self, model: Path, *, middleware: bool = True, port: int | None = None, **settings: Any
    ) -> None:
        self.port = port or _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.version = 0
        template = model / "template.jinja"
        template.write_text(TEMPLATE)
        arguments = {
            **ARGUMENTS,
            "model": model,
            "served_model_name": "m",
            "host": "127.0.0.1",
            "port": self.port,
            "worker_extension_cls": "tests.watermark.Weights",
            "api_key": KEY,
            "chat_template": template,
            **({"middleware": MIDDLEWARE} if middleware else {}),
            **settings,
        }
        program = ["-m", "vllm.entrypoints.openai.api_server"]
        if "api_server_count" in settings:  # several are the command's to start
            program = ["-m", "tests.vllm_command", "serve"]
        command = [sys.executable, "-W", "ignore", *program]
        for name, value in arguments.items():
            option = "--" + name.replace("_", "-")
            command += [option] if value is True else [option, str(value)]
        self._command = command
        self._log = model.parent / f"server-{self.port}.log"
        self._start()

    def _start(self) -> None:
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                self._command,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # its workers end with it, by the group's id
                env={**os.environ, **SETTINGS, "VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": path},
            )

    def wait(self, *, seconds: float = 600) -> ServedOverHttp:
        """Wait until it serves."""
        end = time.monotonic() + seconds
        while self._process.poll() is None and time.monotonic() < end:
            with contextlib.suppress(OSError), urllib.request.urlopen(self.url + "/health"):
                self.ask("POST", "/collective_rpc", {"method": "set_pace", "args": [PACE]})
                return self
            time.sleep(0.2)
        log = self._log.read_text()
        self.stop()
        raise RuntimeError(f"the server does not serve:\n{log[-4000:]}")

    def restart(self) -> None:
        """End it and start it again, with the weights of version 0."""
        self.stop()
        self.version = 0
        self._start()
        self.wait()

    def log(self) -> str:
        """What it wrote so far."""
        return self._log.read_text()

    def stop(self) -> None:
        """End it and its workers."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=20)

    def ask(self, method: str, path: str, body: Any = None, *, key: str | None = KEY) -> Any:
        """One request and its JSON answer; the status alone where that is an error."""
        request = urllib.request.Request(
            self.url + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={
                "Content-Type": "application/json",
                **({"Authorization": f"Bearer {key}"} if key else {}),
            },
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return json.loads(response.read() or b"null")
        except urllib.error.HTTPError as error:
            return error.code

    def move_to(self, version: int) -> None:
        """Give the engine other weights."""
        self.ask("POST", "/collective_rpc", {"method": "set_version", "args": [version]})
        self.version = version

    def refit_to(self, version: int) -> None:
        """Pause, move, resume, without a word to anybody."""
        self.ask("POST", "/pause?mode=keep&clear_cache=false")
        self.move_to(version)
        self.ask("POST", "/resume")


class Refused(Exception):
    """The engine was paused, to abort or to wait: vLLM 0.33 and later take no request then."""


class HttpRun:
    """One callback that speaks to a server: its rollouts, its refits, the comparison at its end."""

    def __init__(self, served: ServedOverHttp, trace: Path, **callback: Any) -> None:
        self.served = served
        self.engine = VllmServerEngine(served.url, name="server", api_key=KEY)
        self.staleness = StalenessCallback(
            engines=[self.engine],
            trace=trace,
            version=served.version,
            late_masks=True,
            sinks=(),
            **callback,
        )
        self.trace = trace
        self.first = served.version
        self.made: list[tuple[str, tuple[Call, ...], list[list[int]]]] = []
        """Published groups, their calls, and the tokens that the client got of each."""
        self._name, self._sent = secrets.token_hex(4), 0
        self._session: aiohttp.ClientSession | None = None
        self._before = 0

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[HttpRun]:
        """Requests go out in here."""
        headers = {"Authorization": f"Bearer {KEY}"}
        # The server closes what is idle, and a message may be on its way there then.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        limits = aiohttp.ClientTimeout(total=300)
        async with aiohttp.ClientSession(
            self.served.url, headers=headers, connector=connector, timeout=limits
        ) as self._session:
            await self.staleness.astart()
            self._before = await self._num_begun()
            yield self

    async def post(self, path: str, body: Any = None, *, request: str | None = None) -> Any:
        """Send a request; return its JSON."""
        assert self._session is not None
        headers = {} if request is None else {"X-Request-Id": request}
        async with self._session.post(path, json=body, headers=headers) as response:
            if response.status == 503:
                raise Refused(await response.text())
            assert response.status == 200, await response.text()
            return await response.json()

    async def stream(
        self,
        path: str,
        body: Any,
        received: list[list[int]],
        *,
        request: str | None = None,
        most: int = 1 << 30,
    ) -> str:
        """Read a stream to its end, or hang up after so many tokens; its id."""
        assert self._session is not None
        headers = {} if request is None else {"X-Request-Id": request}
        name = ""
        async with self._session.post(
            path, json={**body, "stream": True}, headers=headers
        ) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                chunk = json.loads(line[6:])
                name = chunk["id"]
                for choice in chunk["choices"]:
                    received[choice["index"]] += choice.get("token_ids") or []
                if sum(map(len, received)) >= most:
                    break
        return name

    @contextlib.asynccontextmanager
    async def pilot(self) -> AsyncIterator[Callable[[int], Awaitable[None]]]:
        """A long stream, to say when calls like it have so many tokens more; then it hangs up."""
        request, received, seen = self.next_request(), [[]], 0
        body = self.body(LONGEST)
        reading = asyncio.create_task(
            self.stream("/v1/completions", body, received, request=request)
        )

        async def reached(tokens: int) -> None:
            nonlocal seen
            while len(received[0]) < seen + tokens and not reading.done():
                await asyncio.sleep(0.01)
            seen = len(received[0])

        await reached(1)
        yield reached
        reading.cancel()
        await asyncio.wait([reading])
        await self.publish(request, received)

    def body(self, tokens: int = 200, **more: Any) -> dict[str, Any]:
        """A completion of so many tokens."""
        return {
            "model": "m",
            "prompt": [1, 2, 3],
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **more,
        }

    def until(self, updates: int) -> dict[str, Any]:
        """What ends a call at its first token of weights so many updates after the first ones.

        However late this process or the server's front end is, such a call is cut by the refits
        before.
        """
        return {"max_tokens": LONGEST, "stop_token_ids": [token(self.first + updates)]}

    def next_request(self) -> str:
        """A name for a request."""
        self._sent += 1
        return f"{self._name}-{self._sent}"

    async def rollout(self, tokens: int = 200, **more: Any) -> None:
        """Generate and publish one group of one request; come again where it is refused."""
        request, received, body = self.next_request(), [], self.body(tokens, **more)
        while True:
            try:
                answer = await self.post("/v1/completions", body, request=request)
                break
            except Refused:
                received.append([])
                await asyncio.sleep(0.02)
        received += [choice["token_ids"] for choice in answer["choices"]]
        await self.publish(request, received)

    async def ahead(self, number: int, tokens: int) -> None:
        """Wait until so many requests since `client` are so many tokens further.

        They are in the engine then, since a call that came after them has as many tokens.
        """
        await self.begun(number)
        await self.rollout(tokens)

    async def begun(self, number: int) -> None:
        """Wait until so many requests have reached the server since `client`."""
        deadline = time.monotonic() + 60
        while await self._num_begun() - self._before < number:
            assert time.monotonic() < deadline, f"there are no {number} requests"
            await asyncio.sleep(0.02)

    async def _num_begun(self) -> int:
        assert self._session is not None
        async with self._session.get("/staleness") as response:
            about = await response.json()
        # A quick request may have ended before a later one begins.
        return int(about["open"] + about["finished"])

    async def publish(self, request: str, received: list[list[int]]) -> tuple[Call, ...]:
        """Publish a group of which the trainer got these tokens, call by call."""
        calls = await self.engine.acalls([request])
        assert len(calls) == len(received), (request, calls)
        masks = {c.call: [(0, len(r))] for c, r in zip(calls, received, strict=True)}
        self.made.append((request, calls, received))
        self.staleness.on_publish(request, calls=calls, trained=masks)
        return calls

    def rollouts(self, number: int, tokens: int = 200, **more: Any) -> list[asyncio.Task[None]]:
        """Begin many."""
        return [asyncio.create_task(self.rollout(tokens, **more)) for _ in range(number)]

    async def refit(self, *, mode: str = "keep", clear_cache: bool = False) -> None:
        """Pause, move the weights by one update, resume."""
        self.staleness.on_step([])  # the policy is one version further
        await self.pause(mode=mode, clear_cache=clear_cache)
        async with self.staleness.refit(mode=mode):
            await self.move()
        await self.post("/resume")

    async def pause(self, *, mode: str = "keep", clear_cache: bool = False) -> None:
        """Pause."""
        await self.post(f"/pause?mode={mode}&clear_cache={str(clear_cache).lower()}")

    async def move(self) -> None:
        """Give the engine the weights of the policy."""
        version = self.staleness.version
        await self.post("/collective_rpc", {"method": "set_version", "args": [version]})
        self.served.version = version

    async def settle(self, cuts: int) -> list[RefitCut]:
        """Wait until so many cuts are written."""
        deadline = time.monotonic() + 60
        while len(self.cuts()) < cuts and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        return self.cuts()

    def cuts(self) -> list[RefitCut]:
        """The cuts in the trace."""
        return [event for event in read(self.trace) if isinstance(event, RefitCut)]

    def verdict(self) -> Verdict:
        """Train on all of it, close, and compare every token."""
        truth = {
            call.call: versions_of(tokens, self.first)
            for _, calls, received in self.made
            for call, tokens in zip(calls, received, strict=True)
        }
        calls = {call.call: call for _, of_group, _ in self.made for call in of_group}
        online = Compared()
        for name, sampled in truth.items():
            online.add(self.staleness.spans(calls[name]), sampled)
        step = self.staleness.on_step([name for name, _, _ in self.made])
        self.staleness.close()
        assert step is not None
        parts = {}
        for kind in ("cuts", "spans"):
            segments, _ = _replay(self.trace, only=kind)
            parts[kind] = Compared()
            for name, sampled in truth.items():
                parts[kind].add(segments[name], sampled)
        _, replayed = _replay(self.trace)
        assert replayed == step
        return Verdict(
            online=online,
            **parts,
            step=step,
            num_spans=sum(call.spans is not None for call in calls.values()),
        )


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])
