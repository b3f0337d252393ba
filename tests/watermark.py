"""A model whose every token says which weights sampled it, the engine that serves it, and its load.

The embedding of every token is the unit vector of one version, attention and MLP add nothing to it,
and row ``t`` of the head answers to unit vector ``t`` only: weights of version ``v`` emit
``token(v)`` whatever came before, by a logit margin of 80. So the truth about each token is the
token. A refit is one call on the workers, which moves the embeddings to another unit
vector (the linear weights would not do: vLLM's CPU backend packs them once).
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from rl_staleness import Group, StalenessCallback
from rl_staleness.engines import LiveCall
from rl_staleness.events import GroupPublished, RefitCut, StepTrained
from rl_staleness.integrations.vllm import VllmEngine
from rl_staleness.ledger import Ledger
from rl_staleness.ranges import Segment
from rl_staleness.staleness import StepStaleness
from rl_staleness.trace import read

T = TypeVar("T")

SIZE = 256
"""Hidden size, and number of tokens."""

END = SIZE - 1
"""A token that no weights emit of themselves."""

MARGIN = 80.0
"""Logit of the version's token above the others, after the norm's factor sqrt(`SIZE`)."""

NUM_WORDS = 128
"""Versions are told apart modulo this; no test makes as many refits."""

SETTINGS = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


ARGUMENTS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 4096,
    "max_num_seqs": 512,
    "max_num_batched_tokens": 8192,
    "block_size": 32,
    "num_gpu_blocks_override": 1600,
}
"""Of an engine; its cache holds 1,600 blocks of 32 tokens, so that long calls preempt others."""


def token(version: int) -> int:
    """Say which token weights of this version emit."""
    return version % NUM_WORDS


def versions_of(tokens: list[int], first: int) -> list[int]:
    """Say which versions, from ``first`` on, sampled these tokens."""
    return [first + (each - first) % NUM_WORDS for each in tokens]


class Weights:
    """Mixed into vLLM's worker by its name: moves the weights to another version."""

    model_runner: Any

    def set_version(self, version: int) -> None:
        """Replace the embedding."""
        weight = self.model_runner.model.model.embed_tokens.weight.data
        weight.zero_()
        weight[:, token(version)] = 1.0

    def set_pace(self, seconds: float) -> None:
        """Sleep so long before each step."""
        self.model_runner.model.register_forward_pre_hook(lambda *_: time.sleep(seconds))


def write_model(folder: Path) -> Path:
    """Write the model at version 0, with a tokenizer that spells token 7 as ``w7``."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers

    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": SIZE,
        "intermediate_size": SIZE,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": SIZE,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": SIZE - 2,
        "eos_token_id": END,
    }
    embedding = torch.zeros(SIZE, SIZE)
    embedding[:, token(0)] = 1.0
    layer = "model.layers.0"
    weights = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": torch.ones(SIZE),
        "lm_head.weight": torch.eye(SIZE) * MARGIN / math.sqrt(SIZE),
        f"{layer}.input_layernorm.weight": torch.ones(SIZE),
        f"{layer}.post_attention_layernorm.weight": torch.ones(SIZE),
    }
    for name in ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o"):
        weights[f"{layer}.{name}_proj.weight"] = torch.zeros(SIZE, SIZE)
    for name in ("mlp.gate", "mlp.up", "mlp.down"):
        weights[f"{layer}.{name}_proj.weight"] = torch.zeros(SIZE, SIZE)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(SIZE)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0"})
    )
    return folder


def write_adapter(folder: Path, version: int) -> Path:
    """Write a LoRA adapter that outweighs the model: calls with it emit ``token(version)``.

    The value projection turns the norm's one entry of 16 into 1.6 everywhere, which attention
    leaves alone; the output projection sums that up into the version's unit vector, times 410.
    """
    import torch
    from safetensors.torch import save_file

    first = torch.zeros(8, SIZE)
    first[0] = 1.0
    value, output = torch.zeros(SIZE, 8), torch.zeros(SIZE, 8)
    value[:, 0] = 0.1
    output[token(version), 0] = 1.0
    layer = "base_model.model.model.layers.0.self_attn"
    weights = {
        f"{layer}.v_proj.lora_A.weight": first.clone(),
        f"{layer}.v_proj.lora_B.weight": value,
        f"{layer}.o_proj.lora_A.weight": first.clone(),
        f"{layer}.o_proj.lora_B.weight": output,
    }
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["v_proj", "o_proj"]}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({**config, "bias": "none"}))
    save_file(weights, folder / "adapter_model.safetensors")
    return folder


class Served:
    """A running engine and the version of its weights; tests share it, one after the other.

    It has processes of its own and speaks over the loopback only.
    """

    def __init__(
        self, model: Path, *, loop: asyncio.AbstractEventLoop | None = None, **settings: Any
    ) -> None:
        os.environ.update(SETTINGS)
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self.version = 0
        self.loop = loop or asyncio.new_event_loop()
        self._owns_loop = loop is None

        arguments = AsyncEngineArgs(
            str(model),
            enable_log_requests=False,
            worker_extension_cls="tests.watermark.Weights",
            **{**ARGUMENTS, **settings},
        )

        async def start() -> Any:
            return AsyncLLM.from_engine_args(arguments)

        self.llm = self.run(start(), timeout=300)

    def run(self, work: Coroutine[Any, Any, T], *, timeout: float = 120) -> T:
        """Do some work on the engine's loop."""
        return self.loop.run_until_complete(asyncio.wait_for(work, timeout))

    def stop(self) -> None:
        """End the engine's processes."""
        self.llm.shutdown()
        self.loop.run_until_complete(asyncio.sleep(0.1))
        if self._owns_loop:
            self.loop.close()

    async def sample(self, name: str, tokens: int, **params: Any) -> Any:
        """Generate; return the last output."""
        outputs = [output async for output in self.stream(name, tokens, **params)]
        return outputs[-1]

    def stream(self, name: str, tokens: int, *, lora: Any = None, **params: Any) -> Any:
        """Generate, one output after the other."""
        from vllm import SamplingParams

        chosen = {"temperature": 0, "ignore_eos": True, "detokenize": False, **params}
        return self.llm.generate(
            {"prompt_token_ids": [1, 2, 3]},
            SamplingParams(max_tokens=tokens, **chosen),
            name,
            lora_request=lora,
        )

    async def move_to(self, version: int) -> None:
        """Give the engine other weights."""
        await self.llm.collective_rpc("set_version", args=(version,))
        self.version = version


def refusals() -> tuple[type[Exception], ...]:
    """What vLLM raises of a request that it does not take; 0.33 in a pause to abort or to wait."""
    from vllm import exceptions

    refusal = getattr(exceptions, "RetryableRequestError", None)
    return () if refusal is None else (refusal,)


@dataclass(kw_only=True, slots=True)
class Compared:
    """What came of comparing every token with what the library says of it."""

    tokens: int = 0
    wrong: int = 0
    """Tokens whose version is none of those that may have sampled them."""
    covered: int = 0
    """Tokens of which it says one version."""

    def add(self, segments: list[Segment], truth: list[int]) -> None:
        """Compare one call."""
        assert sum(stop - start for start, stop, _, _ in segments) >= len(truth)
        for start, stop, oldest, newest in segments:
            there = truth[start:stop]
            self.tokens += len(there)
            self.wrong += sum(not oldest <= version <= newest for version in there)
            self.covered += len(there) if oldest == newest else 0


@dataclass(kw_only=True, slots=True)
class Verdict:
    """Every token of a run, compared under each kind of evidence."""

    online: Compared
    cuts: Compared
    """From the trace, without the engine's own spans."""
    spans: Compared
    """From the trace, without the cuts."""
    step: StepStaleness
    """The step that trained all of it."""
    num_spans: int
    """Calls with spans of the engine's own."""
    calls: list[LiveCall] = field(default_factory=list)

    def assert_exact(self) -> None:
        """Hold every token against the truth, by spans and cuts together and by cuts alone."""
        tokens = self.online.tokens
        assert tokens > 0
        assert self.online == Compared(tokens=tokens, covered=tokens)
        assert self.cuts == Compared(tokens=tokens, covered=tokens)
        assert self.spans.wrong == 0
        assert (self.step.coverage, self.step.violations) == (1.0, 0)
        assert all(call.ended for call in self.calls)


class Run:
    """One callback on a served engine: its rollouts, its refits, and the comparison at its end."""

    def __init__(self, served: Served, trace: Path, **engine: Any) -> None:
        self.served = served
        self.engine = VllmEngine(served.llm, **engine)
        self.staleness = StalenessCallback(
            engines=[self.engine], trace=trace, version=served.version, late_masks=True
        )
        self.trace = trace
        self.first = served.version
        self._most = 0
        self.num_refused = 0
        """Requests that came while the engine was paused, and that it did not take."""
        self.made: list[tuple[Group, list[list[int]]]] = []
        """Published groups, and the tokens that the trainer got of each of their calls."""

    async def rollout(self, tokens: int = 200, **params: Any) -> Group:
        """Generate and publish one group of one request."""
        received: list[list[int]] = []
        with self.staleness.group() as group:
            while True:
                name = f"r{group.name}/{len(received)}"
                try:
                    output = await self.served.sample(name, tokens, **params)
                    break
                except refusals():
                    received += [[] for _ in group.calls[len(received) :]]
                    self.num_refused += 1
                    await asyncio.sleep(0.005)
        received += [list(part.token_ids) for part in output.outputs]
        self.publish(group, received)
        return group

    def publish(self, group: Group, received: list[list[int]]) -> None:
        """Publish a group of which the trainer got these tokens, call by call."""
        assert len(received) == len(group.calls)
        masks = {c.call: [(0, len(r))] for c, r in zip(group.calls, received, strict=True)}
        self.made.append((group, received))
        self.staleness.on_publish(group, trained=masks)

    def rollouts(self, number: int, tokens: int = 200, **params: Any) -> list[asyncio.Task[Group]]:
        """Begin many."""
        return [asyncio.create_task(self.rollout(tokens, **params)) for _ in range(number)]

    async def reached(self, tokens: int) -> None:
        """Wait until a running call has so many tokens more than any had at the last refit."""
        await asyncio.sleep(0.005)  # tasks that were just made begin
        while self.engine._running:
            most = max(len(running.output) for running in self.engine._running.values())
            if most >= self._most + tokens:
                self._most = most
                return
            await asyncio.sleep(0.005)

    async def refit(self, *, mode: str = "keep", clear_cache: bool = False) -> None:
        """Pause, move the weights by one update, resume."""
        self.staleness.on_step([])  # the policy is one version further
        await self.served.llm.pause_generation(mode=mode, clear_cache=clear_cache)
        async with self.staleness.refit(mode=mode):
            await self.served.move_to(self.staleness.version)
        await self.served.llm.resume_generation()

    async def settle(self) -> None:
        """Wait until everything that was generated is read, and every cut is written."""
        deadline = time.monotonic() + 60
        while self.num_cuts() < self.num_refits() and time.monotonic() < deadline:
            await asyncio.sleep(0.02)

    def num_cuts(self) -> int:
        return sum(isinstance(event, RefitCut) for event in read(self.trace))

    def num_refits(self) -> int:
        return self.engine._refit

    def compared(self) -> Compared:
        """Compare every token with what the library says of it now."""
        compared = Compared()
        for group, received in self.made:
            for call, tokens in zip(group.calls, received, strict=True):
                compared.add(self.staleness.spans(call), versions_of(tokens, self.first))
        return compared

    def verdict(self) -> Verdict:
        """Train on all of it, close, and compare every token."""
        truth = {
            call.call: versions_of(tokens, self.first)
            for group, received in self.made
            for call, tokens in zip(group.calls, received, strict=True)
        }
        online = self.compared()
        step = self.staleness.on_step([group for group, _ in self.made])
        self.staleness.close()
        assert step is not None
        assert self.staleness.missing() == {}
        said = Counter(version for sampled in truth.values() for version in sampled)
        assert step.tokens_by_version == dict(said)
        segments, replayed = _replay(self.trace)
        assert replayed == step
        again = Compared()
        for name, sampled in truth.items():
            again.add(segments[name], sampled)
        assert again == online
        parts = {}
        for kind in ("cuts", "spans"):
            segments, _ = _replay(self.trace, only=kind)
            parts[kind] = Compared()
            for name, sampled in truth.items():
                parts[kind].add(segments[name], sampled)
        calls = [call for group, _ in self.made for call in group.capture.calls]
        return Verdict(
            online=online,
            **parts,
            step=step,
            num_spans=sum(call.spans is not None for call in calls),
            calls=calls,
        )


def _replay(path: Path, *, only: str | None = None) -> tuple[dict[str, list[Segment]], Any]:
    """Read a trace again, perhaps with one kind of evidence only: versions by call, last step."""
    ledger, segments, last = Ledger(), {}, None
    for event in read(path):
        if only == "spans" and isinstance(event, RefitCut):
            continue
        if only == "cuts" and isinstance(event, GroupPublished):
            calls = tuple(msgspec.structs.replace(c, spans=None) for c in event.calls or ())
            event = msgspec.structs.replace(event, calls=calls)
        if isinstance(event, StepTrained):
            for group in ledger.waiting():
                segments.update({call.call: ledger.spans(call) for call in group.calls or ()})
        last = ledger.apply(event) or last
    return segments, last


@asynccontextmanager
async def load(seconds: float) -> AsyncIterator[None]:
    """Keep the loop busy: each time that it comes round, for so many seconds."""

    async def burn() -> None:
        while True:
            end = time.perf_counter() + seconds
            while time.perf_counter() < end:
                pass
            await asyncio.sleep(0)

    task = asyncio.create_task(burn()) if seconds else None
    try:
        yield
    finally:
        if task is not None:
            task.cancel()


@contextmanager
def held(llm: Any, method: str) -> Iterator[None]:
    """Hold a coroutine method of an object back until the block ends."""
    event, original = asyncio.Event(), getattr(llm, method)

    async def wait() -> Any:
        await event.wait()
        return await original()

    setattr(llm, method, wait)
    try:
        yield
    finally:
        event.set()
        delattr(llm, method)


def held_outputs(llm: Any) -> AbstractContextManager[None]:
    """Let outputs gather in the front end's queue, unread."""
    return held(llm.engine_core, "get_output_async")


def held_requests(llm: Any) -> AbstractContextManager[None]:
    """Hold requests back between their submission and the moment at which the engine knows them."""
    return held(llm, "get_supported_tasks")
