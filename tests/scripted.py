"""An engine without vLLM whose every token is the version of the weights that made it.

`VllmEngine` follows it as it follows a real front end. It lives in a Ray actor or, run as a
program, behind an HTTP server of its own: processes that a test may kill, stop and start again.
Orders carry the time until which they are to be obeyed, as collective transfers have a timeout: an
engine that was stopped does not load weights that its trainer has given up.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qsl

from rl_staleness.engines import Capture, captured
from rl_staleness.events import Call
from rl_staleness.integrations.vllm import VllmEngine
from tests.asgi import FakeLLM


class ScriptedLLM(FakeLLM):
    """A front end whose calls grow as the test says; weights come up with version 0."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = 0
        self.made: dict[str, list[int]] = {}

    def make(self, request_id: str, tokens: int) -> None:
        """Let a call grow by tokens of the weights that are in."""
        state = self.output_processor.request_states[request_id]
        state.detokenizer.token_ids += [self.weights] * tokens
        self.made[request_id] = list(state.detokenizer.token_ids)

    async def obey(self, order: str, *, until: float, version: int = 0) -> None:
        """Pause, load or resume."""
        if time.time() > until:
            raise TimeoutError(f"{order} came too late")
        if order == "load":
            self.weights = version
        else:
            await (self.pause() if order == "pause" else self.resume())


def die() -> None:
    """End this process at once."""
    os.kill(os.getpid(), signal.SIGKILL)


class Generator:
    """What lives in a Ray actor: an engine and its calls."""

    def __init__(self, name: str) -> None:
        self.llm = ScriptedLLM()
        self.staleness = VllmEngine(self.llm, name=name)
        self.captures: dict[str, Capture] = {}

    async def process(self) -> int:
        return os.getpid()

    async def renew(self) -> None:
        """As if it had just been started."""
        self.__init__(self.staleness.name)  # type: ignore[misc]

    async def die_in(self, method: str) -> None:
        """Die as soon as the engine has carried out what it is told next of this kind."""
        carry_out = getattr(self.staleness, method)

        def last(*args: Any, **kwargs: Any) -> None:
            carry_out(*args, **kwargs)
            die()

        setattr(self.staleness, method, last)

    async def begin(self, call: str) -> None:
        with captured() as capture:
            await self.llm.add_request(call, [], SimpleNamespace(n=1))
        self.captures[call] = capture

    async def make(self, call: str, tokens: int) -> None:
        self.llm.make(call, tokens)

    async def finish(self, call: str) -> tuple[list[int], tuple[Call, ...]]:
        self.llm.finish(call)
        return self.llm.made[call], self.captures.pop(call).records()

    async def obey(self, order: str, **more: Any) -> None:
        await self.llm.obey(order, **more)


class Watermarked:
    """What lives in a Ray actor too: a real vLLM with the model of `watermark`."""

    def __init__(self, name: str, model: str, root: str) -> None:
        sys.path.insert(0, root)
        os.environ["PYTHONPATH"] = root  # for the engine's own process
        from tests.watermark import ARGUMENTS, SETTINGS

        os.environ.update(SETTINGS)
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        extension = "tests.watermark.Weights"
        arguments = AsyncEngineArgs(model, worker_extension_cls=extension, **ARGUMENTS)
        self.llm = AsyncLLM.from_engine_args(arguments)
        self.staleness = VllmEngine(self.llm, name=name)
        self.received: dict[str, list[int]] = {}
        self.rollouts: dict[str, asyncio.Task[tuple[Call, ...]]] = {}

    async def processes(self) -> list[int]:
        """This one, and those of the engine."""
        import psutil

        return [os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))]

    async def begin(self, call: str, tokens: int) -> None:
        self.received[call] = []
        self.rollouts[call] = asyncio.create_task(self.rollout(call, tokens))

    async def rollout(self, call: str, tokens: int) -> tuple[Call, ...]:
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
        with captured() as capture:
            async for output in self.llm.generate({"prompt_token_ids": [1, 2, 3]}, params, call):
                self.received[call] = list(output.outputs[0].token_ids)
        return capture.records()

    async def make(self, call: str, tokens: int) -> None:
        """Wait until it has so many."""
        while len(self.received[call]) < tokens:
            await asyncio.sleep(0.001)

    async def finish(self, call: str) -> tuple[list[int], tuple[Call, ...]]:
        records = await self.rollouts.pop(call)
        return self.received[call], records

    async def obey(self, order: str, *, until: float, version: int = 0) -> None:
        """Pause, load or resume."""
        if time.time() > until:
            raise TimeoutError(f"{order} came too late")
        if order == "pause":
            await self.llm.pause_generation(mode="keep")
        elif order == "load":
            await self.llm.collective_rpc("set_version", args=(version,))
        else:
            await self.llm.resume_generation()

    async def shut_down(self) -> None:
        self.llm.shutdown()


class Server:
    """The application of an HTTP server: what a client asks for, and what the test orders."""

    def __init__(self) -> None:
        self.llm = ScriptedLLM()
        self.dies_in = ""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        said: Any = {}
        _, group, name = scope["path"].split("/")
        query = dict(parse_qsl(scope["query_string"].decode()))
        status = 200
        if group == "v1":
            await self.llm.add_request(name, [], SimpleNamespace(n=1))
            while name in self.llm.output_processor.request_states:
                await asyncio.sleep(0.002)
            said = self.llm.made[name]
        elif name in ("pause", "load", "resume"):
            try:
                version, until = int(query["version"]), float(query["until"])
                await self.llm.obey(name, version=version, until=until)
            except TimeoutError:
                status = 409
        elif name == "make":
            self.llm.make(query["call"], int(query["tokens"]))
        elif name == "finish":
            self.llm.finish(query["call"])
            said = self.llm.made[query["call"]]
        elif name == "running":
            said = list(self.llm.output_processor.request_states)
        elif name == "die_in":
            self.dies_in = query["method"]
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(said).encode()})


def serve(port: int) -> None:
    """Serve on the loopback until somebody ends this process."""
    import uvicorn

    from rl_staleness.integrations.vllm_server import StalenessMiddleware

    inner = Server()
    middleware = StalenessMiddleware(inner)
    place = SimpleNamespace(state=SimpleNamespace(engine_client=inner.llm))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        scope["app"] = place

        async def sending(message: Any) -> None:
            if inner.dies_in and scope["path"].endswith(f"/staleness/{inner.dies_in}"):
                die()  # it is carried out, and not answered
            await send(message)

        await middleware(scope, receive, sending)

    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning", lifespan="off")


if __name__ == "__main__":
    serve(int(sys.argv[1]))
