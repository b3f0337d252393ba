"""Every token of a real vLLM server, over HTTP, against what the trainer's side says sampled it.

The model of `watermark` makes the truth of each token readable. One server is shared by the tests;
those of a restart and of a server without the middleware start one of their own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from rl_staleness import StalenessCallback
from rl_staleness.events import LARGEST
from rl_staleness.integrations.vllm_http import VllmServerEngine
from tests.watermark_server import KEY, HttpRun, ServedOverHttp

pytestmark = pytest.mark.engine


def has_spans() -> bool:
    """Whether this vLLM reports spans itself."""
    from vllm.outputs import CompletionOutput

    return "weight_versions" in CompletionOutput.__dataclass_fields__


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


def test_many_calls_at_once(run: HttpRun) -> None:
    """Every token is right, over three refits with four hundred requests in flight."""

    async def work() -> None:
        async with run.client():
            rollouts = run.rollouts(400, 200)
            for clear_cache in (False, True, False):
                await asyncio.sleep(2.0)
                await run.refit(clear_cache=clear_cache)
            await asyncio.gather(*rollouts)
            await run.settle(3)

    asyncio.run(work())
    verdict = run.verdict()
    verdict.assert_exact()
    assert verdict.online.tokens == 400 * 200
    assert verdict.step.spanning_calls > 0
    assert [cut.kv for cut in run.cuts()] == ["kept", "recomputed", "kept"]
    if has_spans():
        assert verdict.num_spans >= 0.9 * 400
