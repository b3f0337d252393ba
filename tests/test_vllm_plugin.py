"""Following an AsyncLLM that another program owns, in an actor.

The front ends here are made up; vLLM's own loading of the plugin, and Ray, are real in the last.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rl_staleness.engines import Cut, captured
from rl_staleness.integrations import vllm_plugin
from rl_staleness.integrations.vllm_http import ServerError, VllmServerEngine
from tests.asgi import FakeLLM

ROOT = Path(__file__).parent.parent


class Actor:
    """A handle whose calls run here, on a thread of their own as Ray's do, beside its loop."""

    def __init__(self) -> None:
        self.options = lambda **_: self
        self.failing = False
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Do some work on the actor's loop."""
        asyncio.run_coroutine_threadsafe(work, self.loop).result(10)

    @property
    def __ray_call__(self) -> Any:
        return self

    def remote(self, work: Any, *args: Any) -> Any:
        result: Future[Any] = Future()

        def run() -> None:
            try:
                if self.failing:
                    raise RuntimeError("the actor is dead")
                result.set_result(work(self, *args))
            except Exception as error:  # noqa: BLE001  # as Ray hands it on
                result.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        return SimpleNamespace(future=lambda: result)


@pytest.fixture
def front_ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[FakeLLM]]:
    """A vLLM whose front end is made up."""
    module = ModuleType("vllm.v1.engine.async_llm")
    front_end = type("AsyncLLM", (FakeLLM,), {})
    module.AsyncLLM = front_end  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.v1", "vllm.v1.engine"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(vllm_plugin, "_followed", vllm_plugin._Followed())
    yield front_end


async def submit(llm: FakeLLM, name: str, tokens: int) -> None:
    """A call from begin to end."""
    await llm.add_request(name, [], SimpleNamespace(n=1))
    llm.make(name, tokens)
    llm.finish(name)


def test_it_is_inert_unless_asked_for(front_ends: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the variable nothing is touched, and an engine says what is missing."""
    monkeypatch.delenv(vllm_plugin.ASKED_BY, raising=False)
    vllm_plugin.attach()
    assert "__init__" not in vars(front_ends)
    assert "add_request" not in vars(front_ends())
    engine = VllmServerEngine(vllm_plugin.in_actor(Actor()))
    with pytest.raises(ServerError, match="set RL_STALENESS_ATTACH=1"):
        engine.start(version=0, refit=0).result(5)
    engine.detach()


def test_loading_it_imports_nothing() -> None:
    """vLLM loads it in each of its processes: that costs none of them a thing."""
    code = (
        "import sys, rl_staleness.integrations.vllm_plugin as plugin; plugin.attach();"
        "print([m for m in ('vllm', 'ray', 'msgspec') if m in sys.modules])"
    )
    env = {k: v for k, v in os.environ.items() if k != vllm_plugin.ASKED_BY}
    said = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=True
    )
    assert said.stdout.strip() == "[]"


def test_engines_are_followed(front_ends: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each engine that is built is cut at its pauses, and its requests are found by their ids."""
    monkeypatch.setenv(vllm_plugin.ASKED_BY, "1")
    for _ in range(2):
        vllm_plugin.attach()  # vLLM may load it again
    llms = [front_ends(), front_ends()]
    actor = Actor()
    engines = [
        VllmServerEngine(vllm_plugin.in_actor(actor, index=i), name=f"e{i}") for i in range(2)
    ]
    for engine, llm, tokens in zip(engines, llms, (10, 20), strict=True):
        engine.start(version=0, refit=0).result(5)
        cuts: list[Cut | None] = []
        actor.run(submit(llm, "before", tokens))
        actor.run(llm.pause())
        engine.mark(1, version=1, mode="keep", deliver=cuts.append).result(5)
        engine.done(1, version=1).result(5)
        actor.run(llm.resume())
        actor.run(submit(llm, "after", tokens))
        calls = engine.calls(["before", "after"])
        assert [(c.engine, c.tokens, c.version, c.after, c.until) for c in calls] == [
            (engine.name, tokens, 0, 0, 0),
            (engine.name, tokens, 1, 1, 1),
        ]
        assert [cut and dict(cut.calls) for cut in cuts] == [{}]
        engine.detach()


def test_the_owner_captures_itself(front_ends: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request in a capture of its owner's is left to that."""
    monkeypatch.setenv(vllm_plugin.ASKED_BY, "1")
    vllm_plugin.attach()
    llm, actor = front_ends(), Actor()

    async def work() -> list[int]:
        with captured() as capture:
            await submit(llm, "mine", 5)
        return [call.tokens for call in capture.calls]

    assert asyncio.run_coroutine_threadsafe(work(), actor.loop).result(10) == [5]
    engine = VllmServerEngine(vllm_plugin.in_actor(actor))
    assert engine.calls("mine") == ()


def test_an_actor_that_died(front_ends: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is tried again until the limit in time, and costs coverage only."""
    monkeypatch.setenv(vllm_plugin.ASKED_BY, "1")
    vllm_plugin.attach()
    llm, actor = front_ends(), Actor()
    engine = VllmServerEngine(vllm_plugin.in_actor(actor), timeout=0.2)
    engine.start(version=0, refit=0).result(5)
    actor.run(submit(llm, "a", 5))
    actor.failing = True
    with pytest.raises(ServerError, match="the actor is dead"):
        engine.done(1, version=1).result(5)
    assert [call.call for call in engine.calls({"a": 5})] == ["a/lost0"]
    actor.failing = False
    assert [call.tokens for call in engine.calls("a", timeout=30)] == [5]
    engine.detach()


def test_what_cannot_be_followed(
    front_ends: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine is built nevertheless, and a line says why it is not followed."""
    monkeypatch.setenv(vllm_plugin.ASKED_BY, "1")
    vllm_plugin.attach()
    llm = front_ends(client_count=2)
    assert "add_request" not in vars(llm)
    assert "2 front-end processes" in caplog.text
    monkeypatch.delitem(sys.modules, "vllm.v1.engine.async_llm")
    vllm_plugin.attach()
    assert "vLLM's engines are not followed" in caplog.text


ACTOR = """
import asyncio, sys
import ray

@ray.remote
class Engine:
    # what nobody can edit
    def __init__(self, model, arguments):
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM
        self.llm = AsyncLLM.from_engine_args(AsyncEngineArgs(
            model, worker_extension_cls="tests.watermark.Weights", **arguments))

    async def generate(self, name, tokens):
        from vllm import SamplingParams
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        async for output in self.llm.generate({"prompt_token_ids": [1, 2]}, params, name):
            pass
        return list(output.outputs[0].token_ids)

    async def pause(self):
        await self.llm.pause_generation(mode="keep", clear_cache=False)

    async def move(self, version):
        await self.llm.collective_rpc("set_version", args=(version,))

    async def resume(self):
        await self.llm.resume_generation()
"""


@pytest.mark.engine
@pytest.mark.slow
def test_a_real_engine_in_an_actor(
    watermark_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM loads the plugin by its entry point; every token of the actor's engine is right."""
    ray = pytest.importorskip("ray")
    from rl_staleness import StalenessCallback
    from tests.watermark import ARGUMENTS, SETTINGS, Compared, versions_of

    metadata = tmp_path / "plugin-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nrl_staleness_test = rl_staleness.integrations.vllm_plugin:attach\n"
    )
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    env = {**SETTINGS, "PYTHONPATH": path, vllm_plugin.ASKED_BY: "1"}
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # Ray keeps the first one
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        logging_level="ERROR",
        log_to_driver=False,
        object_store_memory=80 * 2**20,
        _node_ip_address="127.0.0.1",
        runtime_env={"env_vars": env},
    )
    try:
        space: dict[str, Any] = {"__name__": "__main__"}
        exec(ACTOR, space)  # by value: its module is not to be found there
        handle = space["Engine"].remote(str(watermark_model), ARGUMENTS)
        engine = VllmServerEngine(vllm_plugin.in_actor(handle), name="actor", timeout=300)
        staleness = StalenessCallback(
            engines=[engine], trace=tmp_path / "trace.jsonl", sinks=(), timeout=300
        )
        staleness.start()
        generated = {f"r{i}": handle.generate.remote(f"r{i}", 300) for i in range(20)}
        for _ in range(2):
            time.sleep(1.0)
            staleness.on_step([])
            ray.get(handle.pause.remote())
            with staleness.refit():
                ray.get(handle.move.remote(staleness.version))
            ray.get(handle.resume.remote())
        tokens = {name: ray.get(reference) for name, reference in generated.items()}
        compared = Compared()
        for name, received in tokens.items():
            (call,) = engine.calls(name)
            staleness.on_publish(name, calls=[call])
            compared.add(staleness.spans(call), versions_of(received, 0))
        step = staleness.on_step(list(tokens))
        staleness.close()
    finally:
        ray.shutdown()
    assert compared == Compared(tokens=20 * 300, covered=20 * 300)
    assert step is not None
    assert (step.coverage, step.violations) == (1.0, 0)
