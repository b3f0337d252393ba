"""Every token of a real vLLM server, over HTTP, against what the trainer's side says sampled it.

The model of `watermark` makes the truth of each token readable. One server is shared by the tests;
those of a restart and of a server without the middleware start one of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from rl_staleness import StalenessCallback
from rl_staleness.events import LARGEST
from rl_staleness.integrations.vllm_http import VllmServerEngine
from tests.watermark import END, MARGIN
from tests.watermark_server import KEY, HttpRun, ServedOverHttp


def has_spans() -> bool:
    """Whether this vLLM reports spans itself."""
    from vllm.outputs import CompletionOutput

    return "weight_versions" in CompletionOutput.__dataclass_fields__


# Under the older vLLM the whole file is for `make test-all`: the front end is the same there.
pytestmark = [pytest.mark.engine] if has_spans() else [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module")
def http_served(watermark_model: Path) -> Iterator[ServedOverHttp]:
    """One server for all tests of this file."""
    served = ServedOverHttp(
        watermark_model, **({"enable_scale_out": True} if has_spans() else {})
    ).wait()
    yield served
    served.stop()


@pytest.fixture
def run(http_served: ServedOverHttp, tmp_path: Path) -> Iterator[HttpRun]:
    """A callback on the shared server."""
    run = HttpRun(http_served, tmp_path / "trace.jsonl")
    yield run
    run.staleness.close()


@pytest.mark.parametrize(
    ("calls", "tokens"), [(400, 400), (900, 200)], ids=["in flight", "and queued"]
)
def test_many_calls_at_once(run: HttpRun, calls: int, tokens: int) -> None:
    """Every token is right, over three refits, with more requests than are run at once."""

    async def work() -> None:
        async with run.client(), run.pilot() as reached:
            rollouts = run.rollouts(calls, tokens)  # long, so that they outlast the refits
            await run.begun(calls // 2)
            for clear_cache in (False, True, False):
                await reached(25)
                await run.refit(clear_cache=clear_cache)
            await asyncio.gather(*rollouts)
            await run.settle(3)

    asyncio.run(work())
    verdict = run.verdict()
    verdict.assert_exact()
    assert verdict.online.tokens > calls * tokens
    assert verdict.step.spanning_calls > 10
    assert [cut.kv for cut in run.cuts()] == ["kept", "recomputed", "kept"]
    if has_spans():
        assert verdict.num_spans >= 0.9 * calls


def test_a_trainer_that_is_late(run: HttpRun) -> None:
    """The server takes the cut at the pause, whenever the trainer says what it was for."""

    async def work() -> None:
        async with run.client():
            ending = run.rollouts(25, **run.until(1))
            rollouts = run.rollouts(25, 800)
            await run.ahead(50, 30)
            run.staleness.on_step([])
            await run.pause()
            rollouts += run.rollouts(20, 200)  # they begin in the pause
            await run.begun(50 + 1 + 20)
            await run.move()
            await run.post("/resume")
            await asyncio.gather(*ending)  # and are published before the trainer says why
            await run.staleness.aon_refit_paused()
            await run.staleness.aon_refit_done()
            rollouts += run.rollouts(10, 50)
            await asyncio.gather(*rollouts)
            await run.settle(1)

    asyncio.run(work())
    verdict = run.verdict()
    assert verdict.online.wrong == 0
    assert (verdict.step.coverage, verdict.step.violations) == (1.0, 0)
    assert verdict.step.spanning_calls >= 25


def test_a_refit_that_fails_and_its_repetition(run: HttpRun) -> None:
    """The cut of a failed refit is void: the calls go on with the old weights."""

    async def work() -> None:
        async with run.client():
            rollouts = run.rollouts(30, **run.until(1))
            await run.ahead(30, 30)
            run.staleness.on_step([])
            await run.pause()
            with pytest.raises(RuntimeError, match="no network"):
                async with run.staleness.refit():
                    raise RuntimeError("no network")
            await run.post("/resume")
            await run.rollout(30)
            await run.pause()
            async with run.staleness.refit():
                await run.move()
            await run.post("/resume")
            await asyncio.gather(*rollouts)
            await run.settle(1)

    asyncio.run(work())
    verdict = run.verdict()
    verdict.assert_exact()
    assert set(verdict.step.tokens_by_version) == {run.first, run.first + 1}
    assert verdict.step.spanning_calls == 30


@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_modes_that_leave_nothing_running(run: HttpRun, mode: str) -> None:
    """Aborted and finished calls are of the old version; what waited, or came again under the same
    id after it was refused, is of the new one.
    """

    async def work() -> None:
        async with run.client():
            rollouts = run.rollouts(30, 120)
            await asyncio.sleep(0.3)
            refit = asyncio.create_task(run.refit(mode=mode))
            await asyncio.sleep(0.01)
            rollouts += run.rollouts(10, 50)
            await refit
            rollouts += run.rollouts(10, 50)
            await asyncio.gather(*rollouts)
            await run.settle(1)

    asyncio.run(work())
    verdict = run.verdict()
    verdict.assert_exact()
    (cut,) = run.cuts()
    assert set((cut.calls or {}).values()) <= {0}


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {}),
    "n": ("/v1/completions", {"n": 3, "temperature": 1.0}),
    "prompts": ("/v1/completions", {"prompt": [[1, 2], [3, 4], [5, 6]], "n": 2, "temperature": 1}),
    "chat": ("/v1/chat/completions", {"n": 2, "temperature": 1.0}),
}


@pytest.mark.parametrize(
    ("streams", "by"),
    [
        pytest.param(False, "header", id="whole-header"),
        pytest.param(True, "response", id="stream-response"),
        pytest.param(False, "response", id="whole-response", marks=pytest.mark.slow),
        pytest.param(True, "header", id="stream-header", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_requests_of_every_kind(run: HttpRun, kind: str, streams: bool, by: str) -> None:
    """Their calls are found by either id, in the order of their choices."""
    path, more = KINDS[kind]
    body = run.body(120, **more)
    if kind == "chat":
        del body["prompt"]
        body["messages"] = [{"role": "user", "content": "w1 w2"}]
    number = {"completion": 1, "n": 3, "prompts": 6, "chat": 2}[kind]

    async def one() -> None:
        sent = run.next_request() if by == "header" else None
        received: list[list[int]] = [[] for _ in range(number)]
        if streams:
            name = await run.stream(path, body, received, request=sent)
        else:
            answer = await run.post(path, body, request=sent)
            name = answer["id"]
            for choice in answer["choices"]:
                received[choice["index"]] = choice["token_ids"]
        await run.publish(sent or name, received)

    async def work() -> None:
        async with run.client(), run.pilot() as reached:
            rollouts = [asyncio.create_task(one()) for _ in range(6)]
            await reached(40)
            await run.refit()
            await asyncio.gather(*rollouts)
            await run.settle(1)

    asyncio.run(work())
    verdict = run.verdict()
    verdict.assert_exact()
    assert verdict.online.tokens > 6 * number * 120


def test_choices_of_different_lengths(run: HttpRun) -> None:
    """Calls stand in the order of the choices, each with the tokens of its own."""
    params = {"n": 4, "temperature": 1.0, "stop_token_ids": [END], "logit_bias": {END: MARGIN - 4}}

    async def work() -> None:
        async with run.client(), run.pilot() as reached:
            body = run.body(300, prompt=[[1], [2], [3]], **params)
            asked = [
                asyncio.create_task(run.post("/v1/completions", body, request=f"lengths{i}"))
                for i in range(5)
            ]
            await reached(40)
            await run.refit()
            for answer in await asyncio.gather(*asked):
                choices = sorted(answer["choices"], key=lambda choice: choice["index"])
                received = [choice["token_ids"] for choice in choices]
                lengths = [call.tokens for call in await run.engine.acalls([answer["id"]])]
                assert lengths == [len(tokens) for tokens in received]
                assert len(set(lengths)) > 3
                await run.publish(answer["id"], [[t for t in r if t != END] for r in received])
            await run.settle(1)

    asyncio.run(work())
    run.verdict().assert_exact()


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
def test_clients_that_hang_up(run: HttpRun, streams: bool) -> None:
    """Their calls are aborted and end; what was received of them is right."""

    moved = asyncio.Event()
    lengths: list[int] = []

    async def one() -> None:
        request, received = run.next_request(), [[]]
        body = run.body(3000)
        if streams:
            await run.stream("/v1/completions", body, received, request=request, most=100)
        else:
            asked = asyncio.create_task(run.post("/v1/completions", body, request=request))
            await moved.wait()
            asked.cancel()
        (call,) = await run.publish(request, received)
        assert len(received[0]) <= call.tokens
        lengths.append(call.tokens)

    async def work() -> None:
        async with run.client(), run.pilot() as reached:
            rollouts = [asyncio.create_task(one()) for _ in range(20)]
            for _ in range(2):
                await reached(40)
                await run.refit()
            moved.set()
            await asyncio.gather(*rollouts)
            await run.settle(2)

    asyncio.run(work())
    run.verdict().assert_exact()
    assert min(lengths) < 3000


@pytest.mark.skipif(not has_spans(), reason="needs a vLLM that reports spans")
def test_spans_that_the_response_carries(run: HttpRun) -> None:
    """Where vLLM gives its spans over HTTP, ours are the same."""
    answers: list[Any] = []
    num_spans: list[int] = []

    async def one() -> None:
        params = {**run.until(2), "temperature": 0, "ignore_eos": True}
        body = {"model": "m", "token_ids": [1, 2, 3], "sampling_params": params}
        answers.append(await run.post("/inference/v1/generate", body))

    async def work() -> None:
        async with run.client():
            rollouts = [asyncio.create_task(one()) for _ in range(20)]
            for number in (20, 21):
                await run.ahead(number, 40)
                await run.refit()
            await asyncio.gather(*rollouts)
            for answer in answers:
                (choice,) = answer["choices"]
                (call,) = await run.publish(answer["request_id"], [choice["token_ids"]])
                theirs = [
                    (span["start"], span["end"], int(span["version"]))
                    for span in choice["weight_versions"]
                ]
                assert call.spans == tuple(theirs)
                num_spans.append(len(theirs))
            assert set(num_spans) == {3}
            await run.settle(2)

    asyncio.run(work())
    run.verdict().assert_exact()


def test_two_readers(run: HttpRun) -> None:
    """A process of the rollouts reads what the one of the refits drives."""

    async def work() -> None:
        async with run.client(), run.pilot() as reached:
            reader = VllmServerEngine(run.served.url, name="server", api_key=KEY)
            rollouts = run.rollouts(10, 100)
            await reached(30)
            await run.refit()
            await asyncio.gather(*rollouts)
            for request, calls, _ in run.made:
                assert await reader.acalls(request) == calls
            await run.settle(1)

    asyncio.run(work())
    run.verdict().assert_exact()


def test_the_key_and_the_selftest(run: HttpRun) -> None:
    """The server's key guards our routes; a live call shows what the engine can say."""
    served = run.served
    assert served.ask("GET", "/staleness", key=None) == 401
    assert served.ask("GET", "/staleness/calls", key="another") == 401
    about = served.ask("GET", "/staleness")
    assert (about["what"], about["schema"]) == ("rl_staleness", 1)
    run.staleness.start()
    evidence = asyncio.run(run.staleness.selftest())["server"]
    assert isinstance(evidence, dict)
    assert evidence["problems"] == []
    assert {evidence[each] for each in ("calls", "cuts", "labels")} == {True}
    assert evidence["spans"] == has_spans()


@pytest.mark.slow
def test_a_restart(run: HttpRun) -> None:
    """The server comes up anew: its calls lose their coverage until the next refit."""
    assert run.staleness.version == run.served.version

    async def before() -> None:
        async with run.client():
            await asyncio.gather(*run.rollouts(10, 50))

    async def after() -> None:
        run.served.move_to(run.staleness.version)  # as a trainer would, without a word to us
        async with run.client(), run.pilot() as reached:
            lost = run.engine.calls({"nobody knows": 7})
            assert [(c.tokens, c.spans) for c in lost] == [(7, ((0, 7, 0, LARGEST),))]
            rollouts = run.rollouts(10, 200)
            await reached(30)
            await run.refit()
            await asyncio.gather(*rollouts)
            rollouts = run.rollouts(10, 150)
            await reached(30)
            await run.refit()
            await asyncio.gather(*rollouts)
            await run.settle(1)

    asyncio.run(before())
    run.served.restart()
    asyncio.run(after())
    verdict = run.verdict()
    assert verdict.online.wrong == 0
    assert verdict.step.violations == 0
    assert verdict.online.covered == 10 * 50 + 10 * 150
    assert verdict.step.coverage == verdict.online.covered / verdict.online.tokens


@pytest.mark.slow
def test_several_front_ends(
    watermark_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each sees its own requests alone: the server serves, and both sides say what to change."""
    served = ServedOverHttp(watermark_model, api_server_count=2).wait()
    try:
        assert served.ask("GET", "/staleness") == 501
        body = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 5, "ignore_eos": True}
        assert served.ask("POST", "/v1/completions", body)["usage"]["completion_tokens"] == 5
        engine = VllmServerEngine(served.url, name="server", api_key=KEY)
        with StalenessCallback(engines=[engine], trace=tmp_path / "t.jsonl", sinks=()) as staleness:
            staleness.start()
        told = "start it with --api-server-count 1"
        assert told in caplog.text
        assert told in served.log()
    finally:
        served.stop()
