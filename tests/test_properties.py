"""Random legal histories: the library against the truth, the slow reference and itself.

Every run draws new histories. A failure prints the seed: set RL_STALENESS_SEED to it to draw the
same ones again, and RL_STALENESS_EXAMPLES to draw more than the usual 500.
"""

from __future__ import annotations

import json
import logging
import math
import os
import secrets
import tempfile
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, note, seed, settings
from hypothesis import strategies as st

from rl_staleness import trace
from rl_staleness.events import decode, encode
from rl_staleness.ledger import Ledger
from tests import reference
from tests.histories import History, histories, long_history

SEED = int(os.environ.get("RL_STALENESS_SEED", secrets.randbelow(2**32)))
EXAMPLES = int(os.environ.get("RL_STALENESS_EXAMPLES", "500"))

FIELDS = (
    "step",
    "version",
    "batch_age",
    "age_max",
    "age_p50",
    "age_p95",
    "age_in_flight",
    "age_in_queue",
    "batch_age_refits",
    "coverage",
    "age_lo",
    "age_hi",
    "tokens",
    "tokens_by_version",
    "spanning_calls",
    "violations",
    "dropped_tokens",
    "refit_seconds",
)
ROUNDING = Fraction(1, 10**9)


def examples(share: int = 1) -> settings:
    """Settings for a `share`-th of the usual number of examples."""
    return settings(
        max_examples=max(EXAMPLES // share, 1),
        deadline=None,
        database=None,
        derandomize=False,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )


def line(event: dict[str, Any]) -> bytes:
    """The line of the trace that says this event, without its newline."""
    return json.dumps(event).encode()


def fold(events: list[dict[str, Any]]) -> list[Any]:
    """What a new ledger answers to the steps among the events."""
    ledger = Ledger()
    answers = [ledger.apply(decode(line(event))) for event in events]
    return [answer for answer in answers if answer is not None]


def numbers(step: Any) -> dict[str, Any]:
    """A step's numbers by their names in the contract."""
    return {name: getattr(step, name) for name in FIELDS}


def rounded(value: Any) -> Any:
    """Fractions and floats to twelve digits, to compare exact with rounded arithmetic."""
    if isinstance(value, float | Fraction):
        return float(f"{float(value):.12g}")
    return value


def assert_bounds(history: History, steps: list[Any]) -> None:
    """The true mean age lies in the bounds, and is batch_age where every token is covered."""
    assert [truth.step for truth in history.truths] == [step.step for step in steps]
    for step, truth in zip(steps, history.truths, strict=True):
        mean = truth.mean_age()
        assert len(truth.tokens) == step.tokens
        if mean is None:
            assert [step.batch_age, step.age_lo, step.age_hi, step.coverage] == [None] * 4
            continue
        assert Fraction(step.age_lo) - ROUNDING <= mean <= Fraction(step.age_hi) + ROUNDING, step
        if step.coverage == 1 and truth.split_known:
            assert math.isclose(mean, step.batch_age, abs_tol=1e-9), step


def assert_exact(history: History, steps: list[Any]) -> None:
    """Every token is covered, and batch age and bounds are the truth."""
    for step, truth in zip(steps, history.truths, strict=True):
        mean = truth.mean_age()
        if mean is None:
            continue
        assert step.coverage == 1, step
        if truth.split_known:
            ages = {rounded(age) for age in (mean, step.batch_age, step.age_lo, step.age_hi)}
            assert len(ages) == 1, (mean, step)


def assert_equal_to_reference(history: History, steps: list[Any]) -> None:
    """Every number of every step is that of the reference."""
    for wanted, step in zip(reference.steps(history.events), steps, strict=True):
        expected = {name: rounded(value) for name, value in wanted.items()}
        actual = {name: rounded(value) for name, value in numbers(step).items()}
        assert expected == actual


@seed(SEED)
@examples()
@given(histories())
def test_the_bounds_hold_the_truth(history: History) -> None:
    """The true mean age lies in the bounds, and is batch_age where every token is covered."""
    note(f"RL_STALENESS_SEED={SEED}")
    assert_bounds(history, fold(history.events))


@seed(SEED)
@examples()
@given(histories())
def test_every_number_equals_the_reference(history: History) -> None:
    """Every number of every step is that of the token-by-token reference."""
    note(f"RL_STALENESS_SEED={SEED}")
    assert_equal_to_reference(history, fold(history.events))


@seed(SEED)
@examples(share=2)
@given(histories(complete=True))
def test_complete_evidence_gives_the_truth(history: History) -> None:
    """With an exact cut for every refit and `after` for every call each number is the truth."""
    note(f"RL_STALENESS_SEED={SEED}")
    assert_exact(history, fold(history.events))


@pytest.mark.parametrize("nth", range(3))
def test_long_histories_equal_the_reference(nth: int) -> None:
    """Hundreds of refits in one incarnation change no number, though the fold forgets old ones."""
    print(f"RL_STALENESS_SEED={SEED}")
    history = long_history(SEED + nth, moves=8000, tidy=True)
    steps = fold(history.events)
    assert_bounds(history, steps)
    assert_equal_to_reference(history, steps)


@pytest.mark.parametrize("nth", range(3))
def test_long_histories_with_complete_evidence_are_exact(nth: int) -> None:
    """Hundreds of refits later every age is still the truth."""
    print(f"RL_STALENESS_SEED={SEED}")
    history = long_history(SEED + nth, moves=8000, complete=True, tidy=True)
    assert_exact(history, fold(history.events))


@pytest.mark.parametrize("orphan_after", [0, 1, 2, 5])
def test_forgotten_calls_are_bounded(orphan_after: int) -> None:
    """A call published after its cuts were forgotten has wider bounds that hold the truth."""
    print(f"RL_STALENESS_SEED={SEED}")
    history = long_history(SEED + orphan_after, moves=3000, orphan_after=orphan_after)
    assert_bounds(history, fold(history.events))


@seed(SEED)
@examples(share=2)
@given(histories())
def test_a_legal_history_has_no_violation(history: History) -> None:
    """Late lines, failed refits, races and restarts are legal: nothing is counted."""
    note(f"RL_STALENESS_SEED={SEED}")
    steps = fold(history.events)
    assert [0] * len(steps) == [step.violations for step in steps]


@seed(SEED)
@examples(share=2)
@given(histories())
def test_the_parts_make_the_whole(history: History) -> None:
    """In flight and in queue sum to the age, tokens by version and unknown ones to the tokens."""
    note(f"RL_STALENESS_SEED={SEED}")
    unknown = {
        event["group"]: event.get("unknown") or 0
        for event in history.events
        if event["event"] == "group_published"
    }
    trained = [event for event in history.events if event["event"] == "step_trained"]
    for step, event in zip(fold(history.events), trained, strict=True):
        batches = event.get("batches") or [event.get("groups") or []]
        without = sum(unknown[group] for batch in batches for group in batch)
        assert step.tokens == sum(step.tokens_by_version.values()) + without
        if step.batch_age is None:
            assert (step.age_in_flight, step.age_in_queue) == (None, None)
        else:
            assert math.isclose(
                step.batch_age, step.age_in_flight + step.age_in_queue, abs_tol=1e-9
            )
            assert step.age_lo <= step.batch_age + 1e-9
            # The bounds weigh tokens without any version too, and these may be the young ones.
            aged = step.tokens - without
            assert step.batch_age * aged <= step.age_hi * step.tokens + 1e-9
            assert 0 <= step.age_p50 <= step.age_p95 <= step.age_max
            assert step.batch_age_refits <= step.batch_age + 1e-9


@seed(SEED)
@examples(share=5)
@given(histories(), st.booleans())
def test_replay_equals_live(history: History, compressed: bool) -> None:
    """The lines read back from a file give the very same values as the events did one by one."""
    note(f"RL_STALENESS_SEED={SEED}")
    events = [decode(line(event)) for event in history.events]
    ledger = Ledger()
    live = [answer for answer in map(ledger.apply, events) if answer is not None]
    with tempfile.TemporaryDirectory() as folder:
        content = b"".join(encode(event) + b"\n" for event in events)
        path = written(Path(folder), content, compressed)
        assert events == list(trace.read(path))
        replayed = list(trace.steps(path))
    assert live == replayed
    assert repr(live) == repr(replayed)


def written(folder: Path, content: bytes, compressed: bool) -> Path:
    """A trace with that content, plain or in gzip's format by the ending of its name."""
    if not compressed:
        path = folder / "rollout_trace.jsonl"
        path.write_bytes(content)
        return path
    import gzip

    path = folder / "rollout_trace.jsonl.gz"
    path.write_bytes(gzip.compress(content))
    return path


@seed(SEED)
@examples(share=5)
@given(histories())
def test_lines_survive_a_round_trip(history: History) -> None:
    """An encoded event is one line that starts with the tag and decodes to an equal event."""
    note(f"RL_STALENESS_SEED={SEED}")
    for event in history.events:
        decoded = decode(line(event))
        encoded = encode(decoded)
        assert encoded.startswith(b'{"event":"' + event["event"].encode() + b'"')
        assert b"\n" not in encoded
        assert decoded == decode(encoded)
        again = json.loads(encoded)
        for name, value in event.items():
            if value not in (None, {}, [], True):
                assert value == pytest.approx(again[name]) if name == "time" else name in again


@seed(SEED)
@examples(share=2)
@given(histories(), st.randoms(use_true_random=False))
def test_damaged_histories_are_counted_and_never_raise(history: History, random: Any) -> None:
    """Lines that are lost, doubled or out of order leave a ledger that still answers, with parts
    that sum.
    """
    note(f"RL_STALENESS_SEED={SEED}")
    first, *rest = history.events
    damaged: list[dict[str, Any]] = []
    for event in rest:
        damage = random.randrange(8)
        copies = {0: 0, 1: 2}.get(damage, 1)
        for _ in range(copies):
            damaged.insert(len(damaged) - (damage == 2 and len(damaged) > 0), event)
    logging.disable(logging.WARNING)
    try:
        steps = fold([first, *damaged])
    finally:
        logging.disable(logging.NOTSET)
    assert sum(event["event"] == "step_trained" for event in damaged) == len(steps)
    for step in steps:
        if step.batch_age is not None:
            assert math.isclose(
                step.batch_age, step.age_in_flight + step.age_in_queue, abs_tol=1e-9
            )
        known = sum(step.tokens_by_version.values())
        assert known <= step.tokens
        if step.tokens and known == step.tokens:
            assert step.age_lo - 1e-9 <= step.batch_age <= step.age_hi + 1e-9
        assert step.coverage is None or 0 <= step.coverage <= 1
