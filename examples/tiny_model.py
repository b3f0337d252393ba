"""What both examples train and sample: a language model made on the spot, with random weights.

The reward is the share of tokens of a completion that four divides. A random model gets 1/4.
"""

# torch, transformers and vLLM are typed in part:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import logging
import os
import random
import secrets
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.update(  # read by Ray, torch and vLLM when they are imported or start a process
    CUDA_VISIBLE_DEVICES="",
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
    PYTHONWARNINGS="ignore::FutureWarning,ignore:resource_tracker:UserWarning",
    RAY_AUTH_TOKEN=secrets.token_hex(32),
    RAY_DEDUP_LOGS_SKIP_REGEX="Triton is installed",  # and of no use, engines say
    RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",  # Ray listens on the loopback interface only
    RAY_USAGE_STATS_ENABLED="0",
    TORCH_COMPILE_DISABLE="1",  # it would take longer than the run
    TORCH_CPP_LOG_LEVEL="ERROR",
    TORCH_LOGS="-all",  # errors only: that there is no Triton is no news on a CPU
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",  # lets the executor "uni" save a process an engine
    VLLM_HOST_IP="127.0.0.1",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
)

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

logging.getLogger("vllm").setLevel(logging.ERROR)  # vLLM says things before it reads its level

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

VOCABULARY = 64
LONGEST_PROMPT, LONGEST_COMPLETION = 4, 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A completion, and the log-probabilities with which its tokens were sampled."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]

    @property
    def reward(self) -> float:
        return sum(token % 4 == 0 for token in self.tokens) / len(self.tokens)


def new_prompt() -> list[int]:
    return random.choices(range(VOCABULARY), k=LONGEST_PROMPT)


def start_engine(folder: Path) -> AsyncLLM:
    """Start vLLM on the weights in a folder."""
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = AsyncEngineArgs(
        model=str(folder),
        dtype="float32",
        max_model_len=LONGEST_PROMPT + LONGEST_COMPLETION,
        skip_tokenizer_init=True,
        enforce_eager=True,
        distributed_executor_backend="uni",
        use_tqdm_on_load=False,
    )
    return AsyncLLM.from_engine_args(arguments)


async def sample(llm: AsyncLLM, prompt: list[int], *, num_samples: int) -> list[Sample]:
    """Sample completions of one prompt: one request, ``num_samples`` calls, of random length."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        n=num_samples,
        max_tokens=random.randint(LONGEST_COMPLETION // 2, LONGEST_COMPLETION),
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    stream = llm.generate(prompt, params, uuid.uuid4().hex)
    [final] = [output async for output in stream]
    samples: list[Sample] = []
    for output in final.outputs:
        tokens = list(output.token_ids)
        places = zip(tokens, output.logprobs or (), strict=True)
        logprobs = [ranked[token].logprob for token, ranked in places if ranked]
        samples.append(Sample(prompt=prompt, tokens=tokens, logprobs=logprobs))
    return samples


async def load_weights(llm: AsyncLLM, folder: Path) -> None:
    """Load the weights in a folder into the running, paused engine."""
    await llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})


class Policy:
    """The model that is trained; its weights are written where the engines read them."""

    def __init__(self, folder: Path, *, learning_rate: float = 2e-3) -> None:
        disable_progress_bar()
        torch.manual_seed(0)
        torch.set_num_threads(1)
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=LONGEST_PROMPT + LONGEST_COMPLETION,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
        )
        self.model = LlamaForCausalLM(config)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=learning_rate)
        self.folder = folder
        self.save()

    def save(self) -> None:
        self.model.save_pretrained(self.folder)

    def logprobs(self, samples: list[Sample]) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities of all tokens but the first, and which of them are completion."""
        texts = [[*sample.prompt, *sample.tokens] for sample in samples]
        length = max(len(text) for text in texts)
        ids = torch.tensor([text + [0] * (length - len(text)) for text in texts])
        logprobs = self.model(ids[:, :-1]).logits.log_softmax(-1)
        starts = torch.tensor([[len(sample.prompt)] for sample in samples])
        stops = torch.tensor([[len(text)] for text in texts])
        places = torch.arange(1, length)
        mask = (places >= starts) & (places < stops)
        return logprobs.gather(-1, ids[:, 1:, None]).squeeze(-1), mask

    def update(self, groups: list[list[Sample]], *, clip: float = 0.2) -> tuple[float, float]:
        """Make one GRPO update: clipped ratios to the sampling policy, advantages by group.

        Returns:
            The mean reward, and how far the ratios are from 1 on average.
        """
        samples = [sample for group in groups for sample in group]
        rewards = torch.tensor([[sample.reward for sample in group] for group in groups])
        centered = rewards - rewards.mean(dim=1, keepdim=True)
        advantages = (centered / (rewards.std(dim=1, keepdim=True) + 1e-4)).reshape(-1, 1)
        logprobs, mask = self.logprobs(samples)
        sampled = torch.zeros_like(logprobs)
        sampled[mask] = torch.tensor([value for sample in samples for value in sample.logprobs])
        ratio = torch.where(mask, logprobs - sampled, 0).exp()
        gain = torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
        loss = -gain[mask].mean()
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return rewards.mean().item(), (ratio - 1).abs()[mask].mean().item()
