"""How frameworks measure, as formulas on the rows of one step: definition and source in a line.

The versions of frameworks that count refits or training steps are counted here as the distinct
versions that refits, or steps, led to. All baselines are the policy's version at the begin of the
step. A call is one trajectory (rollout, episode, sample, document); a group is the trace's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

__all__ = ["DEFINITIONS", "Definition", "GroupRow", "Row", "Rows"]

NEEDS_CALLS = "calls were summed: needs them one by one (late_masks=True), or about.summed_calls"
NEEDS_PROMPTS = "needs about.prompt_tokens"
NEEDS_DISPATCH = "needs about.dispatched_step"
NEEDS_PULL = "needs about.pulled_version"
NEEDS_SAMPLES = "calls of an earlier step were summed: needs late_masks=True or about.summed_calls"
NO_TOKENS = "nothing to count"


class Row(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One trained call, or summed calls of one version."""

    stamp: int
    first: int
    """Version of the first token; without a token, the stamp."""
    oldest: int
    newest: int
    generated: dict[int, int]
    """All its tokens by version."""
    trained: dict[int, int]
    prompt: int | None
    """Prompt tokens of the call; None: not known, or not the same for all of the calls."""
    number: int | None
    """How many calls it stands for; None: the trace does not say."""


class GroupRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One trained group."""

    rows: list[Row]
    dispatched_step: int | None
    """The training step that was next when the group was dispatched."""
    pulled_version: int | None
    """The version that the policy had when the group left the queue."""

    @property
    def stamp(self) -> int:
        """The oldest stamp of its calls."""
        return min(row.stamp for row in self.rows)

    @property
    def oldest(self) -> int:
        """The oldest version of its tokens."""
        return min(row.oldest for row in self.rows)


class Rows(msgspec.Struct, frozen=True, kw_only=True):
    """What one step trained, and how its versions are counted."""

    step: int
    version: int
    groups: list[GroupRow]
    refits: Callable[[int, int], int]
    """Refits from a version to another; negative backwards."""
    steps: Callable[[int, int], int]
    """Training steps from a version to another."""
    samples: Callable[[int], int | None]
    """Calls that were trained after a version was made, up to the last refit."""

    @property
    def rows(self) -> list[Row]:
        """All calls of the step."""
        return [row for group in self.groups for row in group.rows]


class Definition(msgspec.Struct, frozen=True, kw_only=True):
    """One published way to measure."""

    name: str
    title: str
    unit: str
    formula: str
    source: str
    value: Callable[[Rows], float | str]
    """Its number for a step, or why there is none."""


Number = Callable[[Row], "int | float | str"]
Value = Callable[[Rows], "float | str"]


def _over_calls(rows: Iterable[Row], number: Number) -> float | str:
    """Mean over calls, every call weighing one; calls of unknown number if all read the same."""
    total: float = 0
    calls = 0
    counted = True
    seen: set[int | float] = set()
    for row in rows:
        value = number(row)
        if isinstance(value, str):
            return value
        seen.add(value)
        if row.number is None:
            counted = False
        else:
            total, calls = total + value * row.number, calls + row.number
    if len(seen) == 1:
        return float(seen.pop())
    if not seen:
        return NO_TOKENS
    return total / calls if counted else NEEDS_CALLS


def _over_groups(values: list[int | str]) -> float | str:
    """Mean over groups, every group weighing one."""
    numbers = [value for value in values if not isinstance(value, str)]
    if len(numbers) < len(values):
        return next(value for value in values if isinstance(value, str))
    return sum(numbers) / len(numbers) if numbers else NO_TOKENS


def _over_tokens(rows: Rows, version_of: Callable[[Row, int], int]) -> float | str:
    """Mean over trained tokens, in refits, of a version that is given to each."""
    total = tokens = 0
    for row in rows.rows:
        for version, count in row.trained.items():
            total += rows.refits(version_of(row, version), rows.version) * count
            tokens += count
    return total / tokens if tokens else NO_TOKENS


def _verl(rows: Rows) -> float | str:
    return _over_calls(rows.rows, lambda row: rows.refits(row.newest, rows.version))


def _verl_worst(rows: Rows) -> float | str:
    return _over_calls(rows.rows, lambda row: rows.refits(row.oldest, rows.version))


def _prime_rl(rows: Rows) -> float | str:
    return _over_calls(rows.rows, lambda row: max(0, rows.steps(row.stamp, rows.version)))


def _areal(rows: Rows) -> float | str:
    return _over_tokens(rows, lambda _, version: version)


def _areal_proximal(rows: Rows) -> float | str:
    theta = _areal(rows)
    return theta if isinstance(theta, str) else theta - 1


def _megatron(rows: Rows) -> float | str:
    return _over_calls(rows.rows, lambda row: rows.steps(row.oldest, rows.version))


def _megatron_rows(rows: Rows) -> float | str:
    def mean(row: Row) -> float | str:
        ages = {v: rows.steps(v, rows.version) for v in (row.first, *row.generated)}
        if len(set(ages.values())) == 1:  # whatever the length of the prompt
            return ages[row.first]
        if row.prompt is None:
            return NEEDS_PROMPTS
        tokens = row.prompt + sum(row.generated.values())
        total = ages[row.first] * row.prompt
        return (total + sum(ages[v] * count for v, count in row.generated.items())) / tokens

    return _over_calls(rows.rows, mean)


def _trl(rows: Rows) -> float | str:
    pulled: list[tuple[GroupRow, Row]] = []
    for group in rows.groups:
        if group.pulled_version is None:
            return NEEDS_PULL
        pulled += [(group, row) for row in group.rows]
    ages = {id(row): rows.refits(g.stamp, g.pulled_version or 0) for g, row in pulled}
    return _over_calls([row for _, row in pulled], lambda row: ages[id(row)])


def _trl_at_step(rows: Rows) -> float | str:
    ages = {id(row): rows.refits(g.stamp, rows.version) for g in rows.groups for row in g.rows}
    return _over_calls(rows.rows, lambda row: ages[id(row)])


def _skyrl(rows: Rows) -> float | str:
    said = [group.dispatched_step for group in rows.groups]
    return _over_groups([NEEDS_DISPATCH if step is None else rows.step - step for step in said])


def _nemo_rl(rows: Rows) -> float | str:
    return _over_groups([rows.refits(group.stamp, rows.version) for group in rows.groups])


def _miles(rows: Rows) -> float | str:
    return _over_groups([rows.refits(group.oldest, rows.version) for group in rows.groups])


def _pipelinerl(rows: Rows) -> float | str:
    if not rows.groups:
        return NO_TOKENS
    lag = rows.samples(min(group.oldest for group in rows.groups))
    return NEEDS_SAMPLES if lag is None else float(lag)


def _fast_llm(rows: Rows) -> float | str:
    def mean(row: Row) -> float:
        tokens = sum(row.trained.values())
        return sum(rows.refits(v, rows.version) * n for v, n in row.trained.items()) / tokens

    return _over_calls([row for row in rows.rows if any(row.trained.values())], mean)


def _end_stamp(rows: Rows) -> float | str:
    return _over_tokens(rows, lambda row, _: row.newest)


def _begin_stamp(rows: Rows) -> float | str:
    return _over_tokens(rows, lambda row, _: row.first)


def _definition(
    name: str, title: str, unit: str, formula: str, source: str, value: Value
) -> Definition:
    return Definition(
        name=name, title=title, unit=unit, formula=formula, source=source, value=value
    )


DEFINITIONS: tuple[Definition, ...] = (
    _definition(
        "verl",
        "verl training/off_policy/trajectory_staleness/mean",
        "refits",
        "(step - 1) - newest version of a trajectory, mean over trajectories",
        "verl-project/verl@1dda039b verl/trainer/ppo/v1/trainer_base.py",
        _verl,
    ),
    _definition(
        "verl_worst",
        "verl training/off_policy/trajectory_staleness_worst/mean",
        "refits",
        "(step - 1) - oldest version of a trajectory, mean over trajectories",
        "verl-project/verl@1dda039b verl/trainer/ppo/v1/trainer_base.py",
        _verl_worst,
    ),
    _definition(
        "prime_rl",
        "prime-rl off_policy/mean",
        "training steps",
        "max(0, (step - 1) - version at the dispatch of an episode), mean over episodes",
        "PrimeIntellect-ai/prime-rl@559b4477 src/prime_rl/orchestrator/utils.py",
        _prime_rl,
    ),
    _definition(
        "areal",
        "AReaL version_stats/sample_staleness_theta_avg",
        "refits",
        "current version - version of a token, mean over tokens of the loss",
        "areal-project/AReaL@cbff54d6 areal/trainer/ppo/actor.py",
        _areal,
    ),
    _definition(
        "areal_prox",
        "AReaL version_stats/sample_staleness_proximal_avg, before #1736",
        "refits",
        "(current version - 1) - version of a token, mean over tokens of the loss",
        "inclusionAI/AReaL@4aef98d8 areal/trainer/ppo/actor.py",
        _areal_proximal,
    ),
    _definition(
        "megatron",
        "Megatron-LM mean_policy_staleness",
        "training steps",
        "iteration - epoch of the oldest token of a rollout, mean over rollouts",
        "NVIDIA/Megatron-LM@d98e8a64 megatron/rl/rl_utils.py",
        _megatron,
    ),
    _definition(
        "megatron_rows",
        "Megatron-LM rollout_table, mean of its rows",
        "training steps",
        "mean over prompt and output tokens of a rollout, the prompt as of its first token",
        "NVIDIA/Megatron-LM@d98e8a64 megatron/rl/rl_utils.py",
        _megatron_rows,
    ),
    _definition(
        "trl",
        "TRL sample/staleness_mean",
        "refits",
        "syncs from the stamp of the group to the moment a sample leaves the queue, over samples",
        "huggingface/trl@f2cd5771 trl/experimental/async_grpo/async_grpo_trainer.py",
        _trl,
    ),
    _definition(
        "trl_at_step",
        "TRL's stamp, read as the step trains (its own number is mostly one sync lower)",
        "refits",
        "syncs from the stamp of the group to the step, mean over samples",
        "huggingface/trl@f2cd5771 trl/experimental/async_grpo/async_grpo_trainer.py",
        _trl_at_step,
    ),
    _definition(
        "skyrl",
        "SkyRL async/staleness_mean",
        "training steps",
        "step - step at which the group was scheduled, mean over groups",
        "NovaSky-AI/SkyRL@a9564572 skyrl/train/fully_async_trainer.py",
        _skyrl,
    ),
    _definition(
        "nemo_rl",
        "NeMo RL avg_trajectory_age",
        "refits",
        "current version - mean over groups of the version at their start",
        "NVIDIA-NeMo/RL@7ea279ab nemo_rl/algorithms/async_utils/replay_buffer.py",
        _nemo_rl,
    ),
    _definition(
        "pipelinerl",
        "PipelineRL stats/lag",
        "samples",
        "samples trained at the last broadcast - samples trained at the oldest version of the step",
        "ServiceNow/PipelineRL@58d39345 pipelinerl/finetune_loop.py",
        _pipelinerl,
    ),
    _definition(
        "fast_llm",
        "Fast-LLM document mean (there in documents)",
        "refits",
        "mean over the trained tokens of a document, then over documents",
        "ServiceNow/Fast-LLM@7d61a1ba layers/language_model/loss/policy_gradient.py",
        _fast_llm,
    ),
    _definition(
        "miles",
        "miles rollout/fully_async/avg_staleness",
        "refits",
        "current version - oldest version of a group, mean over groups",
        "radixark/miles@31f1ca96 miles/rollout/fully_async_data_buffer.py",
        _miles,
    ),
    _definition(
        "end_stamp",
        "a client that reads the version as the call returns",
        "refits",
        "newest version of a call for all of its trained tokens, mean over tokens",
        "none: common practice",
        _end_stamp,
    ),
    _definition(
        "begin_stamp",
        "a client that keeps the version of the begin",
        "refits",
        "version of the first token of a call for all of its trained tokens, mean over tokens",
        "none: common practice",
        _begin_stamp,
    ),
)
