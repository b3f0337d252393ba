"""Whether an engine is paused, for each way in which vLLM's front ends have asked their cores.

The front ends are fakes: each has the methods, and calls those of its core, as its version of vLLM
does. That real ones behave so is tested with engines (test_vllm.py, test_vllm_server.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from rl_staleness import captured
from rl_staleness.engines import Cut
from rl_staleness.integrations import vllm_pauses
from rl_staleness.integrations.vllm import VllmEngine
from rl_staleness.integrations.vllm_pauses import PauseWatch
from tests.asgi import FakeCore, FakeLLM


class Core(FakeCore):
    """A core that answers a pause when the test lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = asyncio.Event()
        self.answers.set()
        self.asked: list[str] = []

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        self.asked.append(method)
        if method.startswith(("pause", "sleep")):
            self.paused = True
            await self.answers.wait()
        if method.startswith(("resume", "wake")):
            self.paused = False
        return await super().call_utility_async(method, *args)

    async def sleep_async(self, level: int = 1, mode: str = "abort") -> None:
        await self.call_utility_async("sleep", level, mode)

    async def wake_up_async(self, tags: list[str] | None = None) -> None:
        await self.call_utility_async("wake_up", tags)


class CoreOf29(Core):
    """vLLM 0.29 to 0.32."""

    async def pause_scheduler_async(self, mode: str = "abort", clear_cache: bool = True) -> None:
        await self.call_utility_async("pause_scheduler", mode, clear_cache)

    async def resume_scheduler_async(self) -> None:
        await self.call_utility_async("resume_scheduler")


class CoreOf33(CoreOf29):
    """vLLM 0.33, whose `pause_scheduler_async` is for its own use."""

    async def pause_generation_async(self, mode: str = "abort", clear_cache: bool = True) -> None:
        await self.call_utility_async("pause_generation", mode, clear_cache)


class Front(FakeLLM):
    """A front end with the methods that users call."""

    core: Callable[[], Core]
    pause_of_core = resume_of_core = sleep_of_core = wake_of_core = ""

    def __init__(self) -> None:
        super().__init__()
        self.engine_core: Any = self.core()

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:
        await getattr(self.engine_core, self.pause_of_core)(mode=mode, clear_cache=clear_cache)
        await asyncio.sleep(0)

    async def resume_generation(self) -> None:
        await getattr(self.engine_core, self.resume_of_core)()

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        await getattr(self.engine_core, self.sleep_of_core)(level, mode)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        await getattr(self.engine_core, self.wake_of_core)(tags)


class FrontOf29(Front):
    """vLLM 0.29 to 0.32."""

    core = CoreOf29
    pause_of_core, resume_of_core = "pause_scheduler_async", "resume_scheduler_async"
    sleep_of_core, wake_of_core = "sleep_async", "wake_up_async"


class FrontOf33(FrontOf29):
    """vLLM 0.33."""

    core = CoreOf33
    pause_of_core = "pause_generation_async"


class FrontToCome(Front):
    """One that asks its core in a way that nobody knows yet."""

    core = Core

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:
        await self.engine_core.call_utility_async("pause_all", mode, clear_cache)

    async def resume_generation(self) -> None:
        await self.engine_core.call_utility_async("resume_all")

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        await self.engine_core.call_utility_async("sleep_all", level, mode)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        await self.engine_core.call_utility_async("wake_all", tags)


every_front = pytest.mark.parametrize("front", [FrontOf29, FrontOf33, FrontToCome])


async def call_of(llm: Any, tokens: int) -> str:
    """Begin a call and let it grow; its name."""
    with captured() as capture:
        await llm.add_request("r", [], SimpleNamespace(n=1))
    llm.make("r", tokens)
    return str(capture.calls[0].call)


def marked(engine: VllmEngine, cuts: list[Cut | None]) -> None:
    """Mark refit 1."""
    engine.mark(1, version=1, mode="keep", deliver=cuts.append)


def watched(llm: Front) -> tuple[PauseWatch, list[str]]:
    """Follow a front end's pauses; the modes of those that are complete."""
    modes: list[str] = []
    watch = PauseWatch(modes.append)
    for owner, name, ours in watch.wrappers(llm, llm.engine_core):
        setattr(owner, name, ours)
    return watch, modes


@every_front
def test_a_pause_is_known_when_it_is_complete(front: type[Front]) -> None:
    """Whoever marks then, gets an exact cut at once, and no core is asked."""

    async def work() -> None:
        llm = front()
        cuts: list[Cut | None] = []
        modes: list[str] = []

        def told(mode: str) -> None:
            modes.append(mode)
            marked(engine, cuts)
            assert len(cuts) == 1  # while the front end still holds its caller

        engine = VllmEngine(llm, on_pause=told)
        engine.start(version=0, refit=0)
        name = await call_of(llm, 7)
        await llm.pause_generation(mode="keep", clear_cache=False)
        assert modes == ["keep"]
        assert "is_scheduler_paused" not in llm.engine_core.asked
        (cut,) = cuts
        assert cut is not None
        assert (cut.calls, cut.exact, cut.kv) == ({name: 7}, True, "kept")
        engine.detach()

    asyncio.run(work())


@every_front
@pytest.mark.parametrize(
    "pause",
    [
        pytest.param(lambda llm: llm.pause_generation(), id="pause"),
        pytest.param(lambda llm: llm.sleep(1), id="sleep"),
    ],
)
def test_while_a_pause_is_under_way_a_cut_is_not_exact(
    front: type[Front], pause: Callable[[Any], Any]
) -> None:
    """The core says that it is paused, and outputs of before are still being made."""

    async def work() -> None:
        llm = front()
        engine = VllmEngine(llm)
        engine.start(version=0, refit=0)
        name = await call_of(llm, 7)
        llm.engine_core.answers.clear()
        pausing = asyncio.create_task(pause(llm))
        await asyncio.sleep(0)
        cuts: list[Cut | None] = []
        marked(engine, cuts)
        await asyncio.sleep(0)
        assert [(cut.calls, cut.exact) for cut in cuts if cut] == [({name: 7}, False)]
        llm.engine_core.answers.set()
        await pausing
        engine.detach()

    asyncio.run(work())


@every_front
@pytest.mark.parametrize(
    ("pause", "resume"), [("pause_generation", "resume_generation"), ("sleep", "wake_up")]
)
def test_after_the_resume_the_core_is_asked(front: type[Front], pause: str, resume: str) -> None:
    """What was paused once is not taken for paused later: there is no cut."""

    async def work() -> None:
        llm = front()
        engine = VllmEngine(llm)
        engine.start(version=0, refit=0)
        await call_of(llm, 7)
        await getattr(llm, pause)()
        await getattr(llm, resume)()
        cuts: list[Cut | None] = []
        marked(engine, cuts)
        await asyncio.sleep(0)
        assert cuts == [None]
        assert "is_scheduler_paused" in llm.engine_core.asked
        engine.detach()

    asyncio.run(work())


@every_front
@pytest.mark.parametrize("first", [0, 1])
def test_two_that_follow_one_front_end(front: type[Front], first: int) -> None:
    """Each hears of a pause once and has its exact cut, also when the other has let go."""

    async def work() -> None:
        llm = front()
        cuts: list[list[Cut | None]] = [[], []]
        engines: list[VllmEngine] = []

        def told(number: int, mode: str) -> None:
            marked(engines[number], cuts[number])

        engines += [VllmEngine(llm, name=str(n), on_pause=partial(told, n)) for n in range(2)]
        for engine in engines:
            engine.start(version=0, refit=0)
        await call_of(llm, 7)
        await llm.pause_generation(mode="keep")
        assert [[cut is not None and cut.exact for cut in each] for each in cuts] == [[True]] * 2
        await llm.resume_generation()
        engines[first].detach()
        other = 1 - first
        engines[other].aborted(1)
        await llm.pause_generation(mode="keep")
        assert [cut is not None and cut.exact for cut in cuts[other]] == [True, True]
        engines[other].detach()

    asyncio.run(work())


@every_front
def test_a_pause_that_is_taken_back_before_it_is_complete(front: type[Front]) -> None:
    """The engine runs when its answer comes: nobody is told, and it is not taken for paused."""

    async def work() -> None:
        llm = front()
        modes: list[str] = []
        engine = VllmEngine(llm, on_pause=modes.append)
        engine.start(version=0, refit=0)
        await call_of(llm, 7)
        llm.engine_core.answers.clear()
        pausing = asyncio.create_task(llm.pause_generation(mode="wait"))
        await asyncio.sleep(0)
        await llm.resume_generation()
        llm.engine_core.answers.set()
        await pausing
        assert modes == []
        cuts: list[Cut | None] = []
        marked(engine, cuts)
        await asyncio.sleep(0)
        assert cuts == [None]
        engine.detach()

    asyncio.run(work())


@every_front
def test_a_pause_that_fails_is_none(front: type[Front]) -> None:
    """Nobody is told, and the next one is complete as ever."""

    async def work() -> None:
        llm = front()
        modes: list[str] = []
        engine = VllmEngine(llm, on_pause=modes.append)
        engine.start(version=0, refit=0)
        await call_of(llm, 7)
        llm.engine_core.answers.clear()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(llm.pause_generation(mode="keep"), 0.01)
        assert modes == []
        await llm.resume_generation()
        llm.engine_core.answers.set()
        await llm.pause_generation(mode="wait")
        assert modes == ["wait"]
        cuts: list[Cut | None] = []
        marked(engine, cuts)
        assert [cut is not None and cut.exact for cut in cuts] == [True]
        engine.detach()

    asyncio.run(work())


@every_front
def test_the_mode_and_the_cache_of_each_pause(front: type[Front]) -> None:
    """As they were asked for; what a pause before said of the cache is over."""

    async def work() -> None:
        llm = front()
        watch, modes = watched(llm)
        await llm.pause_generation()
        await llm.sleep()
        await llm.sleep(1, "wait")
        await llm.sleep(mode="keep")
        assert modes == ["abort", "abort", "wait", "keep"]
        assert watch.take_cache() is None
        await llm.pause_generation(mode="keep", clear_cache=True)
        assert watch.take_cache() == "recomputed"
        assert watch.take_cache() is None
        await llm.pause_generation(mode="keep", clear_cache=False)
        await llm.sleep()
        assert watch.take_cache() is None
        assert vllm_pauses._asked.get() is None  # nothing of a pause stays with its task

    asyncio.run(work())


@pytest.mark.parametrize("front", [FrontOf29, FrontOf33])
def test_what_is_asked_of_the_core_directly(front: type[Front]) -> None:
    """As a trainer does that holds the core's client itself."""

    async def work() -> None:
        llm = front()
        watch, modes = watched(llm)
        core = llm.engine_core
        for pause, resume in (
            (getattr(core, front.pause_of_core), core.resume_scheduler_async),
            (core.sleep_async, core.wake_up_async),
        ):
            await pause(mode="wait")
            assert watch.paused
            await resume()
            assert not watch.paused
        assert modes == ["wait", "wait"]

    asyncio.run(work())


@every_front
def test_what_was_wrapped_is_given_back(front: type[Front]) -> None:
    """After `detach` the front end and its core have nothing of their own but what they had."""

    async def work() -> None:
        llm = front()
        before = [set(vars(owner)) for owner in (llm, llm.engine_core, llm.output_processor)]
        owners = (llm, llm.engine_core, llm.output_processor)
        engine = VllmEngine(llm)
        assert [set(vars(owner)) for owner in owners] != before
        engine.detach()
        assert [set(vars(owner)) for owner in owners] == before

    asyncio.run(work())
