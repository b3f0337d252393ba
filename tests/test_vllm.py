"""Every token of a real vLLM against the version that the library says sampled it.

The model of `watermark` makes the truth of each token readable. Each test compares all of its
tokens online and from the trace, by the engine's own spans and the cuts together, by the cuts
alone (all that vLLM 0.29 has) and by the spans alone.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from rl_staleness import Group, StalenessCallback
from rl_staleness.engines import captured
from rl_staleness.events import LARGEST, RefitCut, RefitDone
from rl_staleness.integrations.vllm import VllmEngine
from rl_staleness.trace import read
from tests.watermark import (
    ARGUMENTS,
    END,
    MARGIN,
    Compared,
    Run,
    Served,
    held_outputs,
    held_requests,
    load,
    token,
    versions_of,
    write_adapter,
)

pytestmark = pytest.mark.engine


@pytest.fixture
def run(served: Served, tmp_path: Path) -> Iterator[Run]:
    """A callback on the session's engine."""
    run = Run(served, tmp_path / "trace.jsonl")
    yield run
    run.staleness.close()
    assert "add_request" not in vars(served.llm)


def has_spans(llm: Any) -> bool:
    """Whether this vLLM reports spans itself."""
    from vllm.outputs import CompletionOutput

    return "weight_versions" in CompletionOutput.__dataclass_fields__


def cuts_of(run: Run) -> list[RefitCut]:
    """The cuts in the run's trace."""
    return [event for event in read(run.trace) if isinstance(event, RefitCut)]


@pytest.mark.parametrize(
    ("seconds", "calls", "tokens"),
    [(0.0, 400, 200), (0.002, 400, 150), (0.05, 150, 250)],
    ids=["quiet", "busy", "hogged"],
)
def test_many_calls_at_once(run: Run, seconds: float, calls: int, tokens: int) -> None:
    """Every token is right while the consumer leaves the loop free, keeps it busy, or hogs it."""

    async def work() -> None:
        rollouts = run.rollouts(calls, tokens)
        async with load(seconds):
            for clear_cache in (False, True, False):
                await run.reached(tokens // 5)
                await run.refit(clear_cache=clear_cache)
        await asyncio.gather(*rollouts)
        await run.settle()

    run.served.run(work())
    verdict = run.verdict()
    verdict.assert_exact()
    assert verdict.online.tokens == calls * tokens
    assert verdict.step.spanning_calls > 0
    assert [cut.kv for cut in cuts_of(run)] == ["kept", "recomputed", "kept"]
    if has_spans(run.served.llm):
        assert verdict.num_spans >= 0.9 * calls
        assert verdict.spans.covered >= 0.9 * verdict.spans.tokens


def test_lengths_and_refits_that_are_drawn(run: Run) -> None:
    """Calls of any length that begin at any time, refits at any place: other ones at each run."""
    seed = os.environ["RL_STALENESS_SEED"]  # new for each run, see conftest.py
    print(f"RL_STALENESS_SEED={seed}")
    draw = random.Random(int(seed))
    lengths = [
        draw.choice((1, 2, draw.randrange(3, 40), draw.randrange(40, 400))) for _ in range(90)
    ]

    async def work() -> None:
        left, rollouts = lengths[:], list[asyncio.Task[Group]]()
        for _ in range(draw.randrange(2, 7)):
            for _ in range(draw.randrange(5, 16)):
                rollouts += run.rollouts(1, left.pop()) if left else []
            await run.reached(draw.randrange(1, 40))
            await run.refit(clear_cache=draw.random() < 0.3)
        rollouts += [task for length in left for task in run.rollouts(1, length)]
        await asyncio.gather(*rollouts)
        await run.settle()

    run.served.run(work())
    verdict = run.verdict()
    verdict.assert_exact()
    assert verdict.online.tokens == sum(lengths)


def test_calls_begun_in_the_pause(run: Run) -> None:
    """A call that begins while the engine is paused is of the new version, wherever it begins."""

    async def work() -> None:
        llm, staleness = run.served.llm, run.staleness
        for _ in range(2):
            rollouts = run.rollouts(20)
            await run.reached(30)
            staleness.on_step([])
            await llm.pause_generation(mode="keep", clear_cache=False)
            rollouts += run.rollouts(10)
            await asyncio.sleep(0.05)
            await staleness.aon_refit_paused()
            rollouts += run.rollouts(10)
            await asyncio.sleep(0.05)
            await run.served.move_to(staleness.version)
            rollouts += run.rollouts(10)
            await asyncio.sleep(0)
            await staleness.aon_refit_done()
            rollouts += run.rollouts(10)
            await llm.resume_generation()
            await asyncio.gather(*rollouts)
        await run.settle()

    run.served.run(work())
    verdict = run.verdict()
    verdict.assert_exact()
    assert [sum(not n for n in (c.calls or {}).values()) for c in cuts_of(run)] == [10, 10]


def test_a_marker_that_is_reached_after_the_resume(run: Run) -> None:
    """The cut of a refit may be known after it, and holds nothing that began since its pause."""

    async def work() -> None:
        rollouts = run.rollouts(100, 150)
        for _ in range(2):
            await run.reached(30)
            run.staleness.on_step([])
            with held_outputs(run.served.llm):
                await asyncio.sleep(0.2)
                await run.served.llm.pause_generation(mode="keep", clear_cache=False)
                await run.staleness.aon_refit_paused()
                rollouts += run.rollouts(20, 100)
                await run.served.move_to(run.staleness.version)
                await run.staleness.aon_refit_done()
                await run.served.llm.resume_generation()
                await asyncio.sleep(0.2)
        await asyncio.gather(*rollouts)
        await run.settle()

    run.served.run(work())
    run.verdict().assert_exact()
    events = [event for event in read(run.trace) if isinstance(event, (RefitCut, RefitDone))]
    assert [type(event) for event in events] == [RefitDone, RefitCut] * 2


@pytest.mark.parametrize("mode", ["keep", "abort", "wait"])
def test_calls_submitted_but_not_yet_known(run: Run, mode: str) -> None:
    """A call that waits for its tokens to be prepared across a refit is of the new version."""

    async def work() -> None:
        rollouts = run.rollouts(10, 100)
        await run.reached(30)
        with held_requests(run.served.llm):
            rollouts += run.rollouts(10)
            await asyncio.sleep(0.05)
            await run.refit(mode=mode)
        await asyncio.gather(*rollouts)
        await run.settle()

    run.served.run(work())
    verdict = run.verdict()
    verdict.assert_exact()
    (cut,) = cuts_of(run)
    assert sum(not tokens for tokens in (cut.calls or {}).values()) == 10


def test_paused_before_the_first_token(run: Run) -> None:
    """Calls that the pause catches before their first token are listed with none."""

    async def work() -> None:
        for _ in range(3):
            rollouts = run.rollouts(30, 50)
            await asyncio.sleep(0)
            await run.refit()
            await asyncio.gather(*rollouts)
        await run.settle()

    run.served.run(work())
    run.verdict().assert_exact()
    assert any(0 in (cut.calls or {}).values() for cut in cuts_of(run))


def test_calls_that_end_during_the_pause(run: Run) -> None:
    """The last tokens of a call may be read after the hook: they are old, and it is in no cut."""

    async def work() -> None:
        rollouts = [task for tokens in range(1, 100) for task in run.rollouts(2, tokens)]
        for _ in range(2):
            await run.reached(20)
            with held_outputs(run.served.llm):
                await asyncio.sleep(0.3)
                await run.refit()
        await asyncio.gather(*rollouts)
        await run.settle()

    run.served.run(work())
    verdict = run.verdict()
    verdict.assert_exact()
    (first, _) = (set(cut.calls or ()) for cut in cuts_of(run))
    ended = [call for call in verdict.calls if call.until == 1 and call.call not in first]
    assert ended
    assert all(call.after == 0 for call in ended)


@pytest.mark.parametrize("kind", ["final", "stream"])
def test_several_completions_of_one_request(run: Run, kind: str) -> None:
    """n > 1 makes n calls, in the order of the completions, each with an end of its own."""
    from vllm.sampling_params import RequestOutputKind

    # At each token the call ends with a chance of one in fifty.
    params = {"n": 3, "temperature": 1.0, "logit_bias": {END: MARGIN - 4}, "stop_token_ids": [END]}
    if kind == "final":
        params["output_kind"] = RequestOutputKind.FINAL_ONLY

    async def one() -> None:
        with run.staleness.group() as group:
            received: list[list[int]] = [[], [], []]
            async for output in run.served.stream("n", 150, **params):
                for part in output.outputs:
                    received[part.index] = list(part.token_ids)
        assert [call.tokens for call in group.capture.calls] == [len(each) for each in received]
        run.publish(group, [[each for each in part if each != END] for part in received])

    async def work() -> None:
        rollouts = [asyncio.create_task(one()) for _ in range(30)]
        for _ in range(2):
            await run.reached(20)
            await run.refit()
        await asyncio.gather(*rollouts)
        await run.settle()

    run.served.run(work())
    verdict = run.verdict()
    verdict.assert_exact()
    assert len(verdict.calls) == len({call.call for call in verdict.calls}) == 90


@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_modes_that_leave_nothing_running(run: Run, mode: str) -> None:
    """Aborted and finished calls are of the old version; what waited, or came again after it was
    refused, is of the new one.
    """

    async def work() -> None:
        rollouts = run.rollouts(30, 120)
        await run.reached(20)
        refit = asyncio.create_task(run.refit(mode=mode))
        await asyncio.sleep(0.01)
        rollouts += run.rollouts(10, 50)  # they come while it is being paused
        await refit
        rollouts += run.rollouts(10, 50)
        await asyncio.gather(*rollouts)
        await run.settle()

    run.served.run(work())
    verdict = run.verdict()
    verdict.assert_exact()
    (cut,) = cuts_of(run)
    assert set((cut.calls or {}).values()) <= {0}
    assert (cut.mode, cut.kv) == (mode, None)
    ended = [call.tokens for call in verdict.calls[:30]]
    assert (max(ended) < 120) == (mode == "abort")
    refuses = hasattr(run.served.llm.engine_core, "pause_generation_async")  # vLLM 0.33
    assert (run.num_refused > 0) == refuses


def test_a_refit_that_fails_and_its_repetition(run: Run) -> None:
    """The cut of a failed refit is void: the calls go on with the old weights."""

    async def work() -> None:
        llm, staleness = run.served.llm, run.staleness
        rollouts = run.rollouts(50)
        await run.reached(30)
        staleness.on_step([])
        await llm.pause_generation(mode="keep", clear_cache=False)
        with pytest.raises(RuntimeError, match="no network"):
            async with staleness.refit():
                raise RuntimeError("no network")
        await llm.resume_generation()
        await run.reached(30)
        await llm.pause_generation(mode="keep", clear_cache=False)
        async with staleness.refit():
            await run.served.move_to(staleness.version)
        await llm.resume_generation()
        await asyncio.gather(*rollouts)
        while not cuts_of(run):
            await asyncio.sleep(0.02)

    run.served.run(work())
    verdict = run.verdict()
    verdict.assert_exact()
    assert set(verdict.step.tokens_by_version) == {run.first, run.first + 1}
    if has_spans(run.served.llm):
        assert verdict.num_spans == 50


def test_three_refits_across_one_call(run: Run) -> None:
    """A long call has tokens of four versions."""

    async def work() -> None:
        rollout = run.rollouts(1, 400)
        for _ in range(3):
            await run.reached(50)
            await run.refit()
        await asyncio.gather(*rollout)
        await run.settle()

    run.served.run(work())
    verdict = run.verdict()
    verdict.assert_exact()
    assert len(verdict.step.tokens_by_version) == 4


def test_stop_strings_and_stop_tokens(run: Run) -> None:
    """Calls that text or a token of the new version ends are counted to that token."""
    after = run.first + 1

    async def work() -> None:
        stop = " ".join([f"w{token(after)}"] * 3)
        rollouts = run.rollouts(20, 1000, stop=[stop], detokenize=True)
        rollouts += run.rollouts(20, 1000, stop_token_ids=[token(after)])
        await run.reached(20)
        await run.refit()
        await asyncio.gather(*rollouts)
        await run.settle()

    run.served.run(work())
    verdict = run.verdict()
    verdict.assert_exact()
    assert verdict.step.tokens_by_version[after] == 20 * 3 + 20 * 1


def test_requests_that_the_client_aborts(run: Run) -> None:
    """A call that its client gives up ends there; what it had received is right."""

    async def one(given_up_at: int) -> None:
        with run.staleness.group() as group:
            received: list[int] = []
            stream = run.served.stream("gone", 1000)
            async for output in stream:
                received = list(output.outputs[0].token_ids)
                if len(received) >= given_up_at:
                    break
            await stream.aclose()
        (call,) = group.capture.calls
        assert call.ended
        assert call.tokens >= len(received) >= given_up_at
        run.publish(group, [received])

    async def cancelled() -> None:
        with run.staleness.group() as group:
            waiting = asyncio.create_task(run.served.sample("cancelled", 1000))
            await asyncio.sleep(0.2)
            waiting.cancel()
            await asyncio.wait([waiting])
        assert group.capture.calls[0].ended
        run.publish(group, [[]])

    async def work() -> None:
        rollouts = [asyncio.create_task(one(20 + i)) for i in range(40)]
        rollouts += [asyncio.create_task(cancelled()) for _ in range(5)]
        rollouts += run.rollouts(5, 100)
        for _ in range(2):
            await run.reached(15)
            await run.refit()
        await asyncio.gather(*rollouts)
        await run.settle()

    run.served.run(work())
    run.verdict().assert_exact()
    assert not run.engine._running


def test_preemption(run: Run) -> None:
    """Calls that the scheduler preempts for lack of cache keep their counts."""
    preempted = _preemptions()

    async def work() -> None:
        rollouts = run.rollouts(64, 1000)
        for clear_cache in (False, True):
            await run.reached(200)
            await run.refit(clear_cache=clear_cache)
        await asyncio.gather(*rollouts)
        await run.settle()

    run.served.run(work())
    run.verdict().assert_exact()
    assert _preemptions() > preempted


def _preemptions() -> float:
    from vllm.v1.metrics.reader import get_metrics_snapshot

    return sum(m.value for m in get_metrics_snapshot() if m.name == "vllm:num_preemptions")


def test_traffic_that_nobody_captures(run: Run) -> None:
    """Evaluation beside the rollouts is in no cut, in no group and in nobody's way."""

    async def work() -> None:
        evaluation = [asyncio.create_task(run.served.sample("eval", 150)) for _ in range(30)]
        rollouts = run.rollouts(30, 150)
        await run.reached(30)
        await run.refit()
        await asyncio.gather(*rollouts, *evaluation)
        await run.settle()

    run.served.run(work())
    run.verdict().assert_exact()
    (cut,) = cuts_of(run)
    assert set(cut.calls or ()) == {
        call.call for group, _ in run.made for call in group.capture.calls
    }


def test_the_engine_counts_what_it_generates(run: Run) -> None:
    """Every cut says how many tokens there were by then: of captured calls, of evaluation, and of
    requests that were given up, whoever asked for them."""
    seen = 0

    async def given_up() -> None:
        nonlocal seen
        stream = run.served.stream("given up", 3000, n=2, temperature=1.0)
        async for output in stream:
            seen = sum(len(part.token_ids) for part in output.outputs)
            if seen > 60:
                break
        await stream.aclose()

    async def work() -> None:
        evaluation = [asyncio.create_task(run.served.sample("eval", 150)) for _ in range(5)]
        rollouts = run.rollouts(5, 150)
        await run.reached(30)
        await run.refit()
        await asyncio.gather(*rollouts, *evaluation)
        await run.refit()
        await given_up()
        await run.refit()
        await run.settle()

    run.served.run(work())
    run.verdict().assert_exact()
    amid, ended, beside = (cut.generated or 0 for cut in cuts_of(run))
    assert 5 * 30 < amid < ended == (5 + 5) * 150
    assert seen <= beside - ended < 2 * 3000


def test_hooks_that_wait_for_nothing(run: Run) -> None:
    """The plain hooks, called on the engine's own loop where they cannot wait, lose nothing."""

    async def work() -> None:
        rollouts = run.rollouts(100, 150)
        async with load(0.002):
            for _ in range(2):
                await run.reached(30)
                run.staleness.on_step([])
                await run.served.llm.pause_generation(mode="keep", clear_cache=False)
                run.staleness.on_refit_paused()
                await run.served.move_to(run.staleness.version)
                run.staleness.on_refit_done()
                await run.served.llm.resume_generation()
        await asyncio.gather(*rollouts)
        await run.settle()

    run.served.run(work())
    verdict = run.verdict()
    verdict.assert_exact()
    if has_spans(run.served.llm):
        assert verdict.num_spans == 100


def test_hooks_from_a_trainer_in_another_thread(run: Run) -> None:
    """A trainer that pauses, refits and resumes from its own thread gets the same cuts."""
    served, failures = run.served, []

    def train(loop: asyncio.AbstractEventLoop) -> None:
        def there(work: Any) -> None:
            asyncio.run_coroutine_threadsafe(work, loop).result(30)

        try:
            for _ in range(2):
                there(run.reached(30))
                run.staleness.on_step([])
                there(served.llm.pause_generation(mode="keep", clear_cache=False))
                run.staleness.on_refit_paused()
                there(served.move_to(run.staleness.version))
                run.staleness.on_refit_done()
                there(served.llm.resume_generation())
        except Exception as error:  # noqa: BLE001
            failures.append(error)

    async def work() -> None:
        trainer = threading.Thread(target=train, args=[asyncio.get_running_loop()])
        trainer.start()
        await asyncio.gather(*run.rollouts(100, 150))
        await asyncio.to_thread(trainer.join)
        await run.settle()

    served.run(work())
    assert not failures
    verdict = run.verdict()
    verdict.assert_exact()
    if has_spans(served.llm):
        assert verdict.num_spans == 100


def test_a_mark_without_a_pause_is_no_cut(run: Run) -> None:
    """Weights that move while the engine runs leave bounds, never a wrong version."""

    async def work() -> list[Any]:
        rollouts = run.rollouts(20, 150)
        await run.reached(30)
        run.staleness.on_step([])
        async with run.staleness.refit():
            await run.served.move_to(run.staleness.version)
        return await asyncio.gather(*rollouts)

    run.served.run(work())
    versions = {token(run.first), token(run.first + 1)}
    for group, received in run.made:
        assert set(received[0]) == versions
        (segment,) = run.staleness.spans(group.calls[0])
        assert segment == (0, 150, run.first, run.first + 1)
        assert group.capture.calls[0].spans is None
    assert cuts_of(run) == []
    assert run.staleness.missing() == {"refits had no cut": 1}


def test_a_refit_that_is_done_after_the_resume(run: Run) -> None:
    """Labels that came late are not believed; the cut, which came in time, is."""

    async def work() -> None:
        rollouts = run.rollouts(20, 60) + run.rollouts(20, 150)
        await run.reached(20)
        run.staleness.on_step([])
        await run.served.llm.pause_generation(mode="keep", clear_cache=False)
        await run.staleness.aon_refit_paused()
        await run.served.move_to(run.staleness.version)
        await run.served.llm.resume_generation()
        rollouts += run.rollouts(10, 20) + run.rollouts(10, 150)
        await run.reached(50)
        await run.staleness.aon_refit_done()
        await asyncio.gather(*rollouts)
        await run.settle()

    run.served.run(work())
    verdict = run.verdict()
    verdict.assert_exact()
    assert verdict.num_spans == 0


def test_labels_say_the_version(run: Run) -> None:
    """Other readers of vLLM's own label see the library's version, from the start of the run on."""

    async def work() -> list[str]:
        labels = []
        await run.rollout(5)
        labels.append(await run.served.llm.get_weight_version())
        for _ in range(2):
            await run.refit()
            labels.append(await run.served.llm.get_weight_version())
        await run.settle()
        return labels

    assert run.served.run(work()) == [str(run.first + i) for i in range(3)]


def test_labels_of_the_trainer_are_kept(run: Run) -> None:
    """A trainer that labels its weights keeps its labels, and the spans still say versions."""

    async def work() -> str:
        llm = run.served.llm
        rollouts = run.rollouts(20, 200)
        for number in range(2):
            await run.reached(30)
            run.staleness.on_step([])
            await llm.pause_generation(mode="keep", clear_cache=False)
            async with run.staleness.refit():
                await run.served.move_to(run.staleness.version)
                await llm.update_weight_version(f"step-{number}")
            await llm.resume_generation()
        await asyncio.gather(*rollouts)
        await run.settle()
        return await llm.get_weight_version()

    assert run.served.run(work()) == "step-1"
    verdict = run.verdict()
    verdict.assert_exact()
    assert verdict.num_spans == (20 if has_spans(run.served.llm) else 0)


def test_a_label_at_no_known_place_is_not_believed(run: Run) -> None:
    """A label that is set while generation runs says nothing; the cuts still do."""

    async def work() -> None:
        rollouts = run.rollouts(20, 200)
        await run.reached(30)
        await run.served.llm.update_weight_version("99")
        await run.refit()
        await asyncio.gather(*rollouts)
        await run.settle()

    run.served.run(work())
    verdict = run.verdict()
    verdict.assert_exact()
    assert verdict.num_spans == 0


def test_selftest(run: Run) -> None:
    """One live call says what evidence the engine gives."""
    run.staleness._ensure_started()
    evidence = run.served.run(run.engine.selftest())
    assert evidence.problems == ()
    assert (evidence.tested, evidence.calls, evidence.cuts, evidence.labels) == (True,) * 4
    assert evidence.spans == has_spans(run.served.llm)


def test_selftest_of_a_paused_engine(run: Run) -> None:
    """An engine that does not answer is reported, and nothing is left running."""

    async def work() -> Any:
        await run.served.llm.pause_generation(mode="keep")
        evidence = await run.engine.selftest(timeout=0.3)
        await run.served.llm.resume_generation()
        return evidence

    evidence = run.served.run(work())
    assert not evidence.calls
    assert evidence.problems
    assert not run.engine._running


def test_a_fault_of_ours_stays_ours(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever fails in the capture, requests are served; it is logged once, with traceback."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise KeyError("ours")

    for name in ("_begin", "_end", "_count"):
        setattr(run.engine, name, fail)

    async def work() -> None:
        for _ in range(3):
            output = await run.served.sample("served", 20)
            assert len(output.outputs[0].token_ids) == 20
        await run.refit()
        await run.served.sample("served", 20)

    run.served.run(work())
    assert sum(record.exc_info is not None for record in caplog.records) >= 1


def test_calls_of_an_engine_that_was_told_no_start(served: Served) -> None:
    """An engine object that knows no version says that it may be any."""
    engine = VllmEngine(served.llm)
    try:
        with captured() as capture:
            served.run(served.sample("early", 7))
    finally:
        engine.detach()
    (call,) = capture.calls
    assert (call.tokens, call.after, call.until, call.ended) == (7, None, None, True)
    assert call.spans == ((0, 7, 0, LARGEST),)


def test_an_engine_that_another_front_end_paused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs of before may be on their way still: the engine's own answer says when they came."""
    monkeypatch.setattr(run.served.llm, "_client_count", 2)

    async def work() -> None:
        rollouts = run.rollouts(50, 150)
        for _ in range(2):
            await run.reached(30)
            run.staleness.on_step([])
            pause = run.served.llm.pause_generation(mode="keep", clear_cache=False)
            paused = asyncio.create_task(pause)
            await asyncio.sleep(0)
            time.sleep(0.3)  # the engine pauses; nothing is read from its socket
            await run.staleness.aon_refit_paused()
            await run.served.move_to(run.staleness.version)
            await run.staleness.aon_refit_done()
            await paused
            await run.served.llm.resume_generation()
        await asyncio.gather(*rollouts)
        await run.settle()

    run.served.run(work())
    run.verdict().assert_exact()


@pytest.mark.parametrize("missing", ["_finish_request", "request_states"])
def test_a_version_that_cannot_be_followed(served: Served, missing: str) -> None:
    """An engine without what calls are followed with is served as ever and reports nothing."""
    engine = VllmEngine(_Without(served.llm, missing))
    evidence = served.run(engine.selftest())
    assert evidence.problems[0] == f"it has no {missing}"
    assert (evidence.calls, evidence.spans, evidence.cuts) == (False, False, False)
    cuts: list[object] = []
    engine.start(version=0, refit=0).result(0)
    engine.mark(1, version=1, mode="keep", deliver=cuts.append).result(0)
    engine.done(1, version=1).result(0)
    assert cuts == [None]
    engine.detach()


class _Without:
    """An engine whose output processor lacks something."""

    def __init__(self, llm: Any, missing: str) -> None:
        self._llm = llm
        names = {"_finish_request", "abort_requests", "request_states", "add_request"} - {missing}
        has = {name: getattr(llm.output_processor, name) for name in names}
        self.output_processor = SimpleNamespace(**has)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)


def test_detach_restores(served: Served) -> None:
    """Afterwards the engine is what it was, also the second time."""
    owners = (served.llm, served.llm.output_processor, served.llm.engine_core)
    before = [dict(vars(owner)) for owner in owners]
    engine = VllmEngine(served.llm)
    assert vars(served.llm) != before[0]
    engine.detach()
    engine.detach()
    assert [dict(vars(owner)) for owner in owners] == before


# Engines beside the session's own.


@pytest.fixture(scope="module")
def other(served: Served, watermark_model: Path) -> Iterator[Served]:
    """A second engine, which takes LoRA adapters."""
    other = Served(watermark_model, loop=served.loop, enable_lora=True, max_loras=4)
    yield other
    other.stop()


@pytest.fixture
def lora_versions() -> dict[str, object]:
    """What the trainer says of adapters by name."""
    return {}


@pytest.fixture
def lora_run(
    other: Served, tmp_path: Path, lora_versions: dict[str, Any], request: pytest.FixtureRequest
) -> Iterator[Run]:
    """A callback on the engine that takes adapters."""
    says = getattr(request, "param", None) and (lambda lora: lora_versions[lora.lora_name])
    run = Run(other, tmp_path / "trace.jsonl", lora_version=says)
    yield run
    run.staleness.close()


def test_lora_calls_keep_their_adapter(lora_run: Run, tmp_path: Path) -> None:
    """A call with an adapter is of the version that loaded it, whatever the engine has since."""
    from vllm.lora.request import LoRARequest

    run, llm = lora_run, lora_run.served.llm
    zero, one, two = range(run.first, run.first + 3)
    adapters = [
        LoRARequest(f"a{v}", v + 1, str(write_adapter(tmp_path / f"a{v}", v)))
        for v in (zero, one, two)
    ]

    async def work() -> None:
        await llm.add_lora(adapters[0])  # outside of a refit: nobody says its version
        rollouts = run.rollouts(5, 150) + run.rollouts(5, 150, lora=adapters[0])
        for adapter in adapters[1:]:
            await run.reached(30)
            run.staleness.on_step([])
            await llm.pause_generation(mode="keep", clear_cache=False)
            async with run.staleness.refit():
                await llm.add_lora(adapter)
                await run.served.move_to(run.staleness.version)
            await llm.resume_generation()
            rollouts += run.rollouts(5, 150, lora=adapter)
        await asyncio.gather(*rollouts)
        await run.settle()

    run.served.run(work())
    assert run.compared().wrong == 0
    said = {group.capture.calls[0].spans for group, _ in run.made}
    assert said >= {((0, 150, 0, LARGEST),), ((0, 150, one),), ((0, 150, two),)}
    assert [len(cut.calls or ()) for cut in cuts_of(run)] == [5, 5]
    step = run.staleness.on_step([group for group, _ in run.made])
    assert step is not None
    assert (step.violations, step.coverage) == (0, 15 / 20)


@pytest.mark.parametrize("lora_run", [True], indirect=True)
def test_lora_versions_that_the_trainer_says(
    lora_run: Run, lora_versions: dict[str, object], tmp_path: Path
) -> None:
    """A trainer that knows the version of an adapter says it."""
    from vllm.lora.request import LoRARequest

    version = lora_run.served.version
    folder = str(write_adapter(tmp_path / "adapter", version))
    lora_versions.update(known=version, unknown=None, broken="seven")

    async def work() -> None:
        for number, name in enumerate(lora_versions, start=100):
            await lora_run.rollout(20, lora=LoRARequest(name, number, folder))

    lora_run.served.run(work())
    assert [group.capture.calls[0].spans for group, _ in lora_run.made] == [
        ((0, 20, version),),
        ((0, 20, 0, LARGEST),),
        ((0, 20, 0, LARGEST),),
    ]


def test_two_engines_on_different_versions(served: Served, other: Served, tmp_path: Path) -> None:
    """Groups sample from two engines that are refitted at different times."""
    first = max(served.version, other.version)
    by_name = {"a": served, "b": other}
    staleness = StalenessCallback(
        engines=[VllmEngine(engine.llm, name=name) for name, engine in by_name.items()],
        trace=tmp_path / "trace.jsonl",
        version=first,
    )
    made: list[tuple[Group, list[list[int]]]] = []

    async def one() -> None:
        with staleness.group() as group:
            outputs = await asyncio.gather(*(e.sample("r", 150) for e in by_name.values()))
        assert [call.engine for call in group.capture.calls] == list(by_name)
        staleness.on_publish(group)
        made.append((group, [list(output.outputs[0].token_ids) for output in outputs]))

    async def work() -> None:
        for engine in by_name.values():
            await engine.move_to(first)
        rollouts = [asyncio.create_task(one()) for _ in range(20)]
        for name in ("a", "b", "a"):
            await asyncio.sleep(0.2)
            staleness.on_step([])
            engine = by_name[name]
            await engine.llm.pause_generation(mode="keep", clear_cache=False)
            async with staleness.refit(engines=[name]):
                await engine.move_to(staleness.version)
            await engine.llm.resume_generation()
            rollouts += [asyncio.create_task(one()) for _ in range(5)]
        await asyncio.gather(*rollouts)

    served.run(work())
    compared = Compared()
    for group, received in made:
        for call, tokens in zip(group.capture.calls, received, strict=True):
            compared.add(staleness.spans(call), versions_of(tokens, first))
    assert compared == Compared(tokens=35 * 300, covered=35 * 300)
    step = staleness.on_step([group for group, _ in made])
    assert step is not None
    assert (step.coverage, step.violations, len(step.tokens_by_version)) == (1.0, 0, 4)
    staleness.close()


@pytest.fixture(scope="module")
def replicas(watermark_model: Path) -> Iterator[Served]:
    """One front end with two engine cores behind it, each with half of the requests."""
    served = Served(watermark_model, data_parallel_size=2)
    assert len(served.llm.engine_core.core_engines) == 2
    yield served
    served.stop()


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.0, 0.02], ids=["quiet", "busy"])
def test_replicas_behind_one_front_end(replicas: Served, tmp_path: Path, seconds: float) -> None:
    """Data parallel cores are paused, labelled and counted as the one engine that they are."""
    run = Run(replicas, tmp_path / "trace.jsonl")
    if seconds == 0.0:
        evidence = replicas.run(run.engine.selftest())
        assert (evidence.problems, evidence.calls, evidence.cuts) == ((), True, True)

    async def work() -> None:
        rollouts = run.rollouts(200, 200)
        async with load(seconds):
            for clear_cache in (False, True, False):
                await run.reached(40)
                await run.refit(clear_cache=clear_cache)
                rollouts += run.rollouts(20, 100)
        await asyncio.gather(*rollouts)
        await run.settle()

    replicas.run(work())
    verdict = run.verdict()
    verdict.assert_exact()
    assert verdict.online.tokens == 200 * 200 + 60 * 100
    assert verdict.step.spanning_calls > 0
    if has_spans(replicas.llm):
        assert verdict.spans.covered >= 0.9 * verdict.spans.tokens


@pytest.mark.slow
def test_the_synchronous_engine(watermark_model: Path, tmp_path: Path) -> None:
    """An LLM is refitted between calls: every call is of one version."""
    from vllm import LLM, SamplingParams

    llm = LLM(str(watermark_model), worker_extension_cls="tests.watermark.Weights", **ARGUMENTS)
    try:
        params = SamplingParams(n=2, temperature=1.0, max_tokens=20, ignore_eos=True)
        engine = VllmEngine(llm)
        with StalenessCallback(engines=[engine], trace=tmp_path / "trace.jsonl") as staleness:
            groups = []
            for version in range(3):
                with staleness.group() as group:
                    outputs = llm.generate(
                        [{"prompt_token_ids": [1, 2]}] * 3, params, use_tqdm=False
                    )
                assert {t for o in outputs for c in o.outputs for t in c.token_ids} == {version}
                calls = group.capture.calls
                assert [(c.tokens, c.after, c.until) for c in calls] == [(20, version, version)] * 6
                staleness.on_publish(group)
                groups.append(group)
                staleness.on_step([])
                with staleness.refit():
                    llm.collective_rpc("set_version", args=(version + 1,))
            evidence = asyncio.run(engine.selftest())
            step = staleness.on_step(groups)
        assert step is not None
        assert (step.tokens_by_version, step.coverage) == ({0: 120, 1: 120, 2: 120}, 1.0)
        assert (step.violations, evidence.problems) == (0, ())
        assert (evidence.calls, evidence.cuts, evidence.labels) == (True, True, True)
        assert llm.llm_engine.get_weight_version() == "3"
    finally:
        llm.llm_engine.engine_core.shutdown()
