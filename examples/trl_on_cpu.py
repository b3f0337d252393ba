"""What TRL's asynchronous GRPO takes to run on a CPU: nothing in here is needed on a GPU.

TRL's trainer, its rollout process and vLLM's server are the real ones. What they ask of CUDA is
replaced from outside: attention, the number of FLOPS, and the transfer of the weights, which goes
through a TCP store on the loopback in place of NCCL. The model is tiny, with random weights.

    python -m vllm.entrypoints.openai.api_server ... --worker-extension-cls trl_on_cpu.ByStore
"""

# torch, transformers, TRL and vLLM are typed in part:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false
# pyright: reportMissingTypeStubs=false, reportPrivateUsage=false
# pyright: reportPrivateImportUsage=false, reportUnknownLambdaType=false
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import string
import subprocess
import sys
import time
import urllib.request
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.update(  # read by torch and vLLM when they are imported or start a process
    CUDA_VISIBLE_DEVICES="",
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
    PYTHONWARNINGS="ignore",
    TOKENIZERS_PARALLELISM="false",
    TORCH_COMPILE_DISABLE="1",
    TRL_EXPERIMENTAL_SILENCE="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_HOST_IP="127.0.0.1",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
)

import torch
import torch.nn.functional as functional
from transformers import TrainerCallback
from transformers.utils import logging as transformers_logging
from vllm.distributed.utils import StatelessProcessGroup
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

warnings.filterwarnings("ignore", message="TRL currently supports vLLM")  # 0.32 works too
transformers_logging.disable_progress_bar()
transformers_logging.set_verbosity_error()

LONGEST_COMPLETION = 120
LONGEST = 256
"""Tokens of prompt and completion."""

MAX_STALENESS = 5
"""The server has two places for adapters more."""

CONFIG = {
    "use_cpu": True,
    "bf16": False,
    "dtype": "float32",
    "gradient_checkpointing": False,
    "dataloader_pin_memory": False,
}
"""Of the trainer."""

TRANSFER = "store"
"""What the server calls the way its weights come."""

TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}={% endfor %}"
    "{% if add_generation_prompt %}{% endif %}"
)


def write_model(folder: Path) -> Path:
    """A random Llama of 0.3 M parameters, and a tokenizer of characters with a chat template."""
    from tokenizers import Regex, Tokenizer
    from tokenizers.decoders import Fuse
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = string.digits + string.ascii_letters + "+-*=?. "
    words = ["<pad>", "<eos>", "<unk>", *letters]
    tokens = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokens.pre_tokenizer = Split(Regex("."), "isolated")
    tokens.decoder = Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokens, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    tokenizer.chat_template = TEMPLATE
    # TRL refuses a template that it does not know, unless it is told how to read a response.
    tokenizer.response_template = {"defaults": {"role": "assistant"}, "fields": {}}
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LONGEST,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


# The server.


class Server:
    """A vLLM server in a process group of its own, to be waited for and to be stopped.

    Args:
        model: the folder of the model.
        lora: adapters are loaded while it runs; else whole weights are transferred.
        middleware: what stands around every request.
        log: where it writes.
    """

    def __init__(self, model: Path, *, lora: bool, middleware: str | None, log: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        way: dict[str, Any] = {
            "enable-lora": True,
            "max-loras": MAX_STALENESS + 2,
            "max-lora-rank": 8,
        }
        if not lora:
            way = {
                "weight-transfer-config": json.dumps({"backend": TRANSFER}),
                "worker-extension-cls": "trl_on_cpu.ByStore",
            }
        options: dict[str, Any] = {
            "model": model,
            "host": "127.0.0.1",
            "port": port,
            "dtype": "float32",
            "max-model-len": LONGEST,
            "max-num-seqs": 32,
            # A prefill in parts ends vLLM's CPU engine where requests have seeds, as TRL's do.
            "max-num-batched-tokens": 32 * LONGEST,
            "enforce-eager": True,
            "disable-log-stats": True,
            **way,
            **({"middleware": middleware} if middleware else {}),
        }
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        for name, value in options.items():
            command += [f"--{name}"] if value is True else [f"--{name}", str(value)]
        here = Path(__file__).resolve().parent
        path = os.pathsep.join(
            filter(None, (str(here), str(here.parent), os.environ.get("PYTHONPATH")))
        )
        with log.open("w") as output:
            self._process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={
                    **os.environ,
                    "PYTHONPATH": path,
                    "VLLM_SERVER_DEV_MODE": "1",
                    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
                },
            )

    def wait(self, *, seconds: float = 300) -> Server:
        """Wait until it serves.

        Raises:
            RuntimeError: it does not, and this is what it wrote.
        """
        end = time.monotonic() + seconds
        while self._process.poll() is None and time.monotonic() < end:
            with contextlib.suppress(OSError), urllib.request.urlopen(self.url + "/health"):
                return self
            time.sleep(0.2)
        self.stop()
        raise RuntimeError(f"the server does not serve:\n{self._log.read_text()[-4000:]}")

    def stop(self) -> None:
        """End it and its workers."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=20)

    def __enter__(self) -> Server:
        return self.wait()

    def __exit__(self, *_: object) -> None:
        self.stop()


class ByStore:
    """Named on the server's command line, so that its workers read this file."""


class StoreTransferEngine(NCCLWeightTransferEngine):  # type: ignore[misc]
    """Takes weights as vLLM's engine for NCCL does, but from a TCP store."""

    def init_transfer_engine(self, init_info: Any) -> None:
        """Join the trainer's store."""
        self.group = StatelessProcessGroup.create(
            host=init_info.master_address, port=init_info.master_port, rank=1, world_size=2
        )

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load what the trainer sends; without waiting for CUDA, as the engine's own does."""
        for name, tensor in self.group.broadcast_obj(None, src=0):
            self.model.load_weights([(name, tensor)])

    def shutdown(self) -> None:
        """The store ends with its processes."""


with contextlib.suppress(ValueError):  # the file is read twice where it is the main one's
    WeightTransferEngineFactory.register_engine(TRANSFER, StoreTransferEngine)


# The trainer's process.


def use_cpu() -> None:
    """Replace, in TRL's modules, what they ask of CUDA."""
    from trl.experimental.async_grpo import async_grpo_trainer, packing, weight_transfer

    attention = SimpleNamespace(flash_attn_varlen_func=_attention)
    packing._flash_attn = lambda: attention
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None
    weight_transfer.open_trainer_endpoint = _open_store
    weight_transfer.packed_nccl_broadcast_producer = _send_by_store


def _open_store(init_info: dict[str, Any]) -> Any:
    group = StatelessProcessGroup.create(
        host=init_info["master_address"], port=init_info["master_port"], rank=0, world_size=2
    )
    return SimpleNamespace(group=group)


def _send_by_store(*, iterator: Iterator[Any], group: Any, **_: Any) -> None:
    group.group.broadcast_obj([(name, tensor.clone()) for name, tensor in iterator], src=0)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts_q: torch.Tensor,
    starts_k: torch.Tensor,
    *_: int,
    softmax_scale: float | None = None,
    **__: Any,
) -> torch.Tensor:
    """Causal attention of sequences that lie one after the other; a query sees the keys before it.

    The last query of a sequence stands at its last key.
    """
    outputs: list[torch.Tensor] = []
    bounds_q, bounds_k = starts_q.tolist(), starts_k.tolist()
    for i in range(len(bounds_q) - 1):
        q = query[bounds_q[i] : bounds_q[i + 1]].transpose(0, 1)
        k = key[bounds_k[i] : bounds_k[i + 1]].transpose(0, 1)
        v = value[bounds_k[i] : bounds_k[i + 1]].transpose(0, 1)
        num_q, num_k = q.shape[1], k.shape[1]
        mask = torch.ones(num_q, num_k, dtype=torch.bool).tril(num_k - num_q)
        output = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=softmax_scale, enable_gqa=True
        )
        outputs.append(output.transpose(0, 1))
    return torch.cat(outputs)


@dataclass
class BigModel(TrainerCallback):  # type: ignore[misc]
    """Makes every step last as long as a big model's would: else nothing gets old."""

    seconds: float = 0.3

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        time.sleep(self.seconds)


class StopSoon(TrainerCallback):  # type: ignore[misc]
    """Ends the rollout process at once; on two cores TRL waits 15 seconds for its full queues."""

    def __init__(self, trainer: Any) -> None:
        self._worker = trainer.rollout_worker

    def on_train_end(self, *_: Any, **__: Any) -> None:
        worker = self._worker
        worker._stop_event_mp.set()
        end = time.monotonic() + 10
        while worker._process.is_alive() and time.monotonic() < end:
            for waiting in (worker.rollout_buffer, worker.metrics_queue):
                with contextlib.suppress(queue.Empty):
                    waiting.get(timeout=0.02)
