"""A run of TRL against a real vLLM server, and the truth about every token that it trained.

    python -m tests.trl_runs FOLDER '{"lora": false, "max_steps": 6}'

The truth needs nobody's word: with the policy's weights kept after every update, a token's
log-probability says which of them sampled it. What the trace says is held against that, and the
server's own spans and the names of the adapters against what the trace says. Prints one JSON
object. The folder of the examples must be on the path.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import queue
import signal
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import LlamaForCausalLM, TrainerCallback

from rl_staleness.events import GroupPublished, RefitCut, StepTrained
from rl_staleness.integrations.trl import StalenessCallback
from rl_staleness.integrations.vllm_http import MIDDLEWARE
from rl_staleness.ledger import Ledger
from rl_staleness.ranges import Segment
from rl_staleness.trace import read

CLOSE = 1e-4
"""Log-probabilities of the same weights agree to this on server and trainer."""

FAR = 1e-3
"""Those of other weights are told apart from here on."""


class Snapshots(TrainerCallback):
    """The policy's weights by version, each as they were before the next update."""

    def __init__(self) -> None:
        self.weights: list[dict[str, torch.Tensor]] = []

    def on_train_begin(self, *_: Any, model: Any, **__: Any) -> None:
        self._keep(model)

    def on_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
        self._keep(model)

    def _keep(self, model: Any) -> None:
        self.weights.append({k: v.detach().clone() for k, v in model.state_dict().items()})

    def logprobs(self, model: Any, texts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Of each text, by version: of every token but the first."""
        rows: dict[str, list[torch.Tensor]] = {name: [] for name in texts}
        for weights in self.weights:
            model.load_state_dict(weights)
            for name, ids in texts.items():
                with torch.no_grad():
                    scores = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
                rows[name].append(scores.gather(-1, ids[1:, None])[:, 0])
        return {name: torch.stack(row) for name, row in rows.items()}


class Fresh(TrainerCallback):
    """Throws away what waits before each sync, so that the next rows are those that it cuts."""

    def __init__(self, staleness: StalenessCallback) -> None:
        self._staleness = staleness

    def on_step_end(self, *_: Any, **__: Any) -> None:
        waiting = self._staleness._trainer.rollout_worker.rollout_buffer
        end = time.monotonic() + 10
        with contextlib.suppress(queue.Empty):
            while time.monotonic() < end:
                waiting.get(timeout=0.2)


def record(staleness: StalenessCallback) -> dict[str, Any]:
    """Keep every row that is published, by the name of its group."""
    rows: dict[str, Any] = {}
    publish = staleness._publish

    def published(sample: Any) -> str:
        name = publish(sample)
        rows[name] = sample
        return name

    staleness._publish = published  # type: ignore[method-assign]
    return rows


def trained(trace: str, *, only: str | None = None) -> dict[str, list[Segment]]:
    """What a trace says of each row as its step is applied, perhaps by one kind of evidence."""
    ledger, found = Ledger(), dict[str, list[Segment]]()
    published: dict[str, GroupPublished] = {}
    for event in read(trace):
        if only == "spans" and isinstance(event, RefitCut):
            continue
        if isinstance(event, GroupPublished):
            if only == "cuts":
                calls = tuple(msgspec.structs.replace(c, spans=None) for c in event.calls)
                event = msgspec.structs.replace(event, calls=calls)
            published[event.group] = event
        if isinstance(event, StepTrained):
            for group in event.groups or ():
                content = published[group]
                if only == "spans" and not (content.calls and all(c.spans for c in content.calls)):
                    continue
                segments = [(0, n, version, version) for version, n in content.tokens.items()]
                for call in content.calls:
                    segments += ledger.spans(call)
                found[group] = [tuple(each) for each in segments]  # type: ignore[misc]
        ledger.apply(event)
    return found


def verdict(
    trace: str, rows: dict[str, Any], snapshots: Snapshots, model: Any, *, lora: bool
) -> dict[str, int]:
    """Hold every token that was trained against the truth."""
    counts = dict.fromkeys(
        ("tokens", "covered", "wrong", "told_apart", "mixed_rows", "spans_differ", "spans"), 0
    )
    by_spans, by_cuts = trained(trace, only="spans"), trained(trace, only="cuts")
    said = trained(trace)
    texts = {group: torch.from_numpy(rows[group].input_ids) for group in said}
    truths = snapshots.logprobs(model, texts)
    for group, segments in said.items():
        sample = rows[group]
        places = sample.completion_mask.nonzero()[0]
        truth = truths[group][:, places - 1]
        sampled = torch.from_numpy(sample.old_log_probs[places])
        error = (truth - sampled).abs()
        counts["tokens"] += len(places)
        assert segments[-1][1] == len(places)
        for start, stop, oldest, newest in segments:
            if oldest == newest:
                counts["covered"] += stop - start
                counts["wrong"] += int((error[oldest, start:stop] > CLOSE).sum())
            else:
                near = error[oldest : newest + 1, start:stop].amin(0)
                counts["wrong"] += int((near > CLOSE).sum())
        counts["told_apart"] += int(((error > FAR).sum(0) == len(truth) - 1).sum())
        counts["mixed_rows"] += len({segment[2] for segment in segments}) > 1
        if group in by_spans:
            counts["spans"] += 1
            counts["spans_differ"] += merged(by_spans[group]) != merged(by_cuts[group])
        if lora:
            ((turn, _, _),) = sample.metrics.origin.parts
            assert turn.model.startswith("trl-policy-v")
    return counts


def merged(segments: list[Segment]) -> list[int]:
    """The version of each token."""
    return [oldest for start, stop, oldest, _ in segments for _ in range(start, stop)]


def given_up(*_: Any) -> None:
    """Who started this waits no longer: say where it hangs, and stop the server on the way out."""
    faulthandler.dump_traceback()
    raise SystemExit("given up")


def main() -> None:
    import trl_async_grpo as example
    import trl_on_cpu as cpu

    folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    lora, middleware = options.pop("lora"), options.pop("middleware", True)
    logging.basicConfig(level=logging.WARNING)
    signal.signal(signal.SIGTERM, given_up)
    cpu.use_cpu()
    path = cpu.write_model(folder / "model")
    staleness = StalenessCallback(trace=folder / "rollout_trace.jsonl", strict=True)
    rows, snapshots = record(staleness), Snapshots()
    server = cpu.Server(
        path, lora=lora, middleware=MIDDLEWARE if middleware else None, log=folder / "server.log"
    )
    with server:
        trainer = example.train(
            path,
            server.url,
            folder / "out",
            staleness,
            lora=lora,
            more=[snapshots, Fresh(staleness)],
            **options,
        )
    model: Any = LlamaForCausalLM.from_pretrained(path)
    if lora:
        from peft import get_peft_model

        model = get_peft_model(model, example.adapter())
    assert staleness.trace is not None
    print(
        json.dumps(
            {
                "verdict": verdict(staleness.trace, rows, snapshots, model, lora=lora),
                "log": [r for r in trainer.state.log_history if "staleness/tokens" in r],
                "steps": example.recomputed(staleness.trace),
                "missing": staleness.staleness.missing() if staleness.staleness else None,
                "own": [n for n in ("training_step", "log") if n in vars(trainer)]
                + [n for n in ("_loop_cls", "stop") if n in vars(trainer.rollout_worker)]
                + [n for n in ("pause", "resume") if n in vars(trainer.vllm_client)],
            }
        )
    )


if __name__ == "__main__":
    main()
