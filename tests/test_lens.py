"""What other frameworks would have shown, on batches whose numbers are worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rl_staleness import Call, StalenessCallback, lens
from rl_staleness.definitions import (
    DEFINITIONS,
    NEEDS_CALLS,
    NEEDS_DISPATCH,
    NEEDS_PROMPTS,
    NEEDS_PULL,
    NEEDS_SAMPLES,
    NO_TOKENS,
)
from rl_staleness.lens import LensStep
from tests.lines import (
    Line,
    aborted,
    call,
    cut,
    done,
    dropped,
    end,
    published,
    run,
    start,
    step,
    write,
)
from tests.traces import write_trace

A = call("a", 450, 0, after=0, until=2)
"""100 tokens on version 0, 300 on 2, 50 on 4."""

B = call("b", 150, 4, after=2, until=2)

ABOUT_A = {"prompt_tokens": 200, "dispatched_step": 1, "pulled_version": 4}
ABOUT_B = {"prompt_tokens": {"b": 200}, "dispatched_step": 3, "pulled_version": 6}


def before() -> list[Line]:
    """Three steps of two updates each, every one followed by a refit: versions 0, 2, 4, 6."""
    lines = [start()]
    for number, counts in ((1, {"a": 100}), (2, {"a": 400}), (3, {})):
        version = 2 * number - 2
        about = {"summed_calls": {str(version): 4}}
        lines += [
            published(f"w{number}", tokens={str(version): 40}, about=about),
            step(number, version, f"w{number}", updates=2),
            cut(number, counts, version=version + 2),
            done(number, version=version + 2),
        ]
    return lines


def last(path: Path, *lines: Line) -> LensStep:
    """The last step of a trace of these lines."""
    return list(lens.look(write(path, *lines)))[-1]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Where a trace may be written."""
    return tmp_path / "rollout_trace.jsonl"


def two_groups(**fields: Any) -> list[Line]:
    """One batch, many answers: A and B in a group each, trained at 6."""
    fields = fields or {"updates": 2}
    return [
        *before(),
        published("A", A, about=ABOUT_A),
        published("B", B, about=ABOUT_B),
        step(4, 6, "A", "B", **fields),
    ]


ONE_BATCH = {
    "verl": 1.0,
    "verl_worst": 2.0,
    "prime_rl": 2.0,
    "areal": 1100 / 600,
    "areal_prox": 500 / 600,
    "megatron": 2.0,
    "megatron_rows": ((600 + 300 + 600 + 50) / 650 + 1) / 2,
    "trl": 1.5,  # A was pulled at 4, two syncs behind, B at 6
    "trl_at_step": 2.0,
    "skyrl": 2.0,
    "nemo_rl": 2.0,
    "pipelinerl": 12.0,  # four calls a step, since version 0
    "fast_llm": (950 / 450 + 1) / 2,
    "end_stamp": 1.0,
    "begin_stamp": 2.5,
}
"""By hand: of A, 100 tokens are three refits old, 300 two and 50 one; of B, 150 are one."""


def test_one_batch_has_many_answers(file: Path) -> None:
    """The exact age is 3.667 updates and 1.833 refits; the others read from 0.833 to 2.5."""
    seen = last(file, *two_groups())
    assert seen.numbers.batch_age == pytest.approx(2200 / 600)
    assert seen.numbers.batch_age_refits == pytest.approx(1100 / 600)
    assert {name: seen.values[name] for name in ONE_BATCH} == pytest.approx(ONE_BATCH)
    assert seen.missing == {}
    rounded = {name: round(value, 3) for name, value in seen.values.items()}
    assert (rounded["fast_llm"], rounded["areal_prox"]) == (1.556, 0.833)


def test_a_batch_that_is_split_over_two_updates(file: Path) -> None:
    """The exact age is 3.917 then; the others have one baseline for the step."""
    seen = last(file, *two_groups(batches=[["A"], ["B"]]))
    assert seen.numbers.batch_age == pytest.approx(2350 / 600)
    assert seen.values["areal"] == pytest.approx(1100 / 600)
    assert seen.values["begin_stamp"] == 2.5


def test_both_calls_in_one_group(file: Path) -> None:
    """Ages by group are those of its oldest call."""
    about = {"prompt_tokens": 200, "dispatched_step": 1, "pulled_version": 6}
    seen = last(file, *before(), published("AB", A, B, about=about), step(4, 6, "AB"))
    expected = {"miles": 3.0, "nemo_rl": 3.0, "skyrl": 3.0, "trl": 3.0, "trl_at_step": 3.0}
    assert {name: seen.values[name] for name in expected} == expected
    assert seen.values["verl_worst"] == 2.0


@pytest.mark.parametrize(("group", "expected"), [("A", 1550 / 650), ("B", 1.0)])
def test_a_row_of_megatron(file: Path, group: str, expected: float) -> None:
    """Prompt tokens count, with the version of the begin: 2.385 and 1."""
    lines = [*before(), published("A", A, about=ABOUT_A), published("B", B, about=ABOUT_B)]
    assert last(file, *lines, step(4, 6, group)).values["megatron_rows"] == pytest.approx(expected)


def test_every_definition_has_its_line() -> None:
    """Name, unit, formula and source of each are there, each in one line."""
    record = lens.definitions_record()
    assert set(record) == set(ONE_BATCH) | {"miles"}
    for entry in record.values():
        assert all(text and "\n" not in text for text in entry.values())
        assert entry["unit"] in ("refits", "training steps", "samples")
    for name in ("verl", "prime-rl", "AReaL", "Megatron-LM", "TRL", "SkyRL", "NeMo RL"):
        assert any(definition.title.startswith(name) for definition in DEFINITIONS)


# Published formulas, on cases of their own.


def test_prime_rl_hides_negative_ages(file: Path) -> None:
    """It clamps each episode at 0; the exact age stays negative."""
    early = published("x", call("x", 10, 6, after=3, until=3), about={"prompt_tokens": 1})
    late = [step(4, 4, "x")]  # says 4 where the count is 6
    seen = last(file, *before(), early, *late)
    assert seen.numbers.batch_age == -2
    assert seen.values["prime_rl"] == 0
    assert seen.values["verl"] == -1


def test_megatron_counts_tokens_that_the_loss_leaves_out(file: Path) -> None:
    """Of 450 tokens the last 50 are trained: AReaL sees those, Megatron's row all and 50 more."""
    masked = {**A, "trained": [[400, 450]]}
    lines = [*before(), published("A", masked, about={"prompt_tokens": 50}), step(4, 6, "A")]
    seen = last(file, *lines)
    assert seen.values["areal"] == 1
    assert seen.values["fast_llm"] == 1
    assert seen.values["megatron_rows"] == pytest.approx((150 + 300 + 600 + 50) / 500)
    assert seen.values["megatron"] == 3


def test_an_attempt_without_a_token_sets_the_oldest_version(file: Path) -> None:
    """Admitted at 0, aborted without a token, then 200 tokens on 2: worst is 1 for its row."""
    lines = [
        start(),
        published("w", tokens={"0": 8}),
        step(1, 0, "w"),
        cut(1, {"try": 0}),
        done(1),
        published("g", call("try", 0, 0, after=0, until=1), call("c", 200, 1, after=1, until=1)),
        step(2, 1, "g"),
    ]
    seen = last(file, *lines)
    assert seen.numbers.batch_age == 0
    assert seen.values["verl_worst"] == 0.5
    assert seen.values["miles"] == 1
    assert seen.values["fast_llm"] == 0


def test_areal_weighs_tokens_and_fast_llm_documents(file: Path) -> None:
    """10 tokens one refit old beside 990 fresh ones: 0.01 and 0.5."""
    lines = [
        start(),
        step(1, 0),
        cut(1),
        done(1),
        published("old", call("x", 10, 0, after=0, until=0)),
        published("new", call("y", 990, 1, after=1, until=1)),
        step(2, 1, "old", "new"),
    ]
    seen = last(file, *lines)
    assert seen.values["areal"] == pytest.approx(0.01)
    assert seen.values["areal_prox"] == pytest.approx(-0.99)
    assert seen.values["fast_llm"] == 0.5


def test_pipelinerl_counts_samples_up_to_the_last_refit(file: Path) -> None:
    """Six samples trained before version 1, two before 2, which no refit has brought out yet."""
    made = [published(f"g{n}", call(f"c{n}", 5, 0, after=0, until=0)) for n in range(8)]
    lines = [
        start(),
        *made,
        step(1, 0, *[f"g{n}" for n in range(6)]),
        cut(1),
        done(1),
        step(2, 1, "g6", "g7"),
        published("last", call("x", 5, 0, after=0, until=0)),
        step(3, 2, "last"),
    ]
    assert last(file, *lines).values["pipelinerl"] == 6
    assert last(file, *lines[:-1], cut(2), done(2), lines[-1]).values["pipelinerl"] == 8
    other = done(1, engine="f", version=0)  # it joins with the weights of the start
    assert last(file, *lines[:-1], other, lines[-1]).values["pipelinerl"] == 6


def test_training_steps_are_not_refits(file: Path) -> None:
    """Three steps between two refits: steps count three, refits one."""
    lines = [
        start(),
        *(step(n, n - 1) for n in (1, 2, 3)),
        cut(1, version=3),
        done(1, version=3),
        published("g", call("c", 5, 0, after=0, until=0), about={"dispatched_step": 2}),
        step(4, 3, "g"),
    ]
    seen = last(file, *lines)
    steps = {"prime_rl": 3.0, "megatron": 3.0, "megatron_rows": 3.0, "skyrl": 2.0}
    refits = {"verl": 1.0, "areal": 1.0, "nemo_rl": 1.0, "miles": 1.0, "trl_at_step": 1.0}
    assert {n: seen.values[n] for n in (*steps, *refits)} == {**steps, **refits}


def test_trl_looks_as_a_row_leaves_the_queue(file: Path) -> None:
    """Pulled at 1 and trained at 2 it reads one sync less than at the step."""
    lines = [
        start(),
        *(line for n in (1, 2) for line in (step(n, n - 1), cut(n), done(n))),
        published("g", call("c", 5, 0, after=0, until=0), about={"pulled_version": 1}),
        step(3, 2, "g"),
    ]
    seen = last(file, *lines)
    assert (seen.values["trl"], seen.values["trl_at_step"]) == (1, 2)


# What a trace does not hold.


def test_what_a_definition_needs_is_said(file: Path) -> None:
    """Without any `about` nothing is guessed."""
    seen = last(file, *before(), published("AB", A, B), step(4, 6, "AB"))
    assert seen.missing == {
        "megatron_rows": NEEDS_PROMPTS,
        "trl": NEEDS_PULL,
        "skyrl": NEEDS_DISPATCH,
    }


SUMMED = published("S", tokens={"2": 30, "4": 60})


def test_summed_calls_have_no_number(file: Path) -> None:
    """Means over calls are unknown where calls were summed; over tokens and groups they are not."""
    seen = last(file, *before(), SUMMED, step(4, 6, "S"))
    unknown = {name for name, reason in seen.missing.items() if reason == NEEDS_CALLS}
    assert unknown == {"verl", "verl_worst", "prime_rl", "megatron", "megatron_rows", "fast_llm"}
    assert seen.values["areal"] == seen.values["end_stamp"] == pytest.approx(120 / 90)
    assert seen.values["miles"] == 2


def test_summed_calls_that_all_read_the_same_need_no_number(file: Path) -> None:
    """One version, one answer."""
    seen = last(file, *before(), published("S", tokens={"2": 30}), step(4, 6, "S"))
    expected = dict.fromkeys(("verl", "verl_worst", "prime_rl", "megatron_rows", "fast_llm"), 2.0)
    assert {name: seen.values[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"2": 1, "4": 3}, 1.25),
        ({"2": 1}, None),
        ({"2": 1, "4": 0}, None),
        ({"2": 1, "4": 3, "6": 1}, None),
        ({"2": True, "4": 3}, None),
        ({"2": "1", "4": 3}, None),
        ([1, 3], None),
        ("x" * 5000, None),
    ],
)
def test_about_may_say_how_many_calls_were_summed(
    file: Path, said: Any, expected: float | None
) -> None:
    """A number for every version makes the means known; anything else is as if it was not there."""
    lines = [*before(), {**SUMMED, "about": {"summed_calls": said}}, step(4, 6, "S")]
    seen = last(file, *lines)
    assert seen.values.get("verl") == expected
    assert (seen.missing.get("verl") == NEEDS_CALLS) is (expected is None)


def test_none_is_a_number(file: Path) -> None:
    """No prompt at all, a group of the very first step, pulled at once: nothing is missing."""
    about = {"prompt_tokens": 0, "dispatched_step": 0, "pulled_version": 0}
    seen = last(file, *before(), published("A", A, about=about), step(4, 6, "A"))
    assert seen.missing == {}
    expected = {"megatron_rows": 950 / 450, "skyrl": 4, "trl": 0}
    assert {name: seen.values[name] for name in expected} == pytest.approx(expected)


@pytest.mark.parametrize("field", ["dispatched_step", "pulled_version", "prompt_tokens"])
@pytest.mark.parametrize("said", ["3", -1, True, 1.5, None, [3]])
def test_about_of_another_type_is_no_evidence(file: Path, field: str, said: Any) -> None:
    """What is no whole number is not taken for one."""
    lines = [*before(), published("A", A, about={field: said}), step(4, 6, "A")]
    assert {"megatron_rows", "trl", "skyrl"} == set(last(file, *lines).missing)


def test_samples_of_a_step_that_are_not_known_make_later_lags_unknown(file: Path) -> None:
    """And they are known again for versions from then on."""
    one = [published(f"g{n}", call(f"c{n}", 5, n, after=n, until=n)) for n in range(3)]
    lines = [
        start(),
        published("s", tokens={"0": 5}),
        step(1, 0, "s"),
        cut(1),
        done(1),
        one[0],
        one[1],
        step(2, 1, "g1"),
        cut(2),
        done(2),
    ]
    assert last(file, *lines, step(3, 2, "g0")).missing["pipelinerl"] == NEEDS_SAMPLES
    fresh = published("h", call("d", 5, 1, after=1, until=1))
    assert last(file, *lines, fresh, step(3, 2, "h")).values["pipelinerl"] == 1


def test_a_step_of_unknown_groups_has_no_lens(file: Path) -> None:
    """Half of a step says nothing about the whole."""
    seen = last(file, *before(), published("A", A), step(4, 6, "A", "nobody"))
    assert seen.values == {}
    assert set(seen.missing.values()) == {lens.UNKNOWN_GROUPS}


def test_a_step_without_tokens(file: Path) -> None:
    """There is nothing to take a mean of."""
    seen = last(file, *before(), step(4, 6))
    assert seen.values == {}
    assert set(seen.missing.values()) == {NO_TOKENS}


def test_tokens_of_a_rolled_back_part_have_no_version(file: Path) -> None:
    """A restored group of version 2 in a run that went on from 0."""
    again = start(incarnation=1)
    restored = published("S", tokens={"2": 30}, restored=True)
    seen = last(file, *before(), again, restored, step(1, 0, "S"))
    assert set(seen.missing.values()) == {lens.ROLLED_BACK}


def test_a_rollback_takes_back_steps_refits_and_samples(file: Path) -> None:
    """Steps from 2 to 6 were undone: at 4 the second time, version 0 is two steps old."""
    again = [start(incarnation=1, version=2, number=2), published("w", tokens={"2": 5})]
    again += [step(2, 2, "w", updates=2), cut(4, version=4), done(4, version=4)]
    old = published("o", call("o", 5, 0, spans=[[0, 5, 0]]), restored=True)
    seen = last(file, *before(), *again, old, step(3, 4, "o"))
    assert (seen.values["prime_rl"], seen.values["verl"]) == (2, 2)


def test_groups_that_are_dropped_or_aborted_refits_are_in_no_lens(file: Path) -> None:
    """Kept rows only; a refit that failed led nowhere."""
    lines = [
        *before(),
        published("A", A, about=ABOUT_A),
        published("B", B, about=ABOUT_B),
        dropped("A"),
        cut(4, version=7),
        aborted(4, version=7),
        step(4, 6, "B"),
    ]
    seen = last(file, *lines)
    assert (seen.values["verl"], seen.values["begin_stamp"]) == (1, 1)


def test_areal_is_the_exact_age_in_refits(tmp_path: Path) -> None:
    """On every step of a made-up run: it is the same mean, in another unit."""
    trace = tmp_path / "rollout_trace.jsonl"
    write_trace(trace, steps=25, blind=0.2, abort=0.1, seed=3)
    seen = list(lens.look(trace))
    assert len(seen) == 25
    for one in seen:
        assert one.values["areal"] == pytest.approx(one.numbers.batch_age_refits)
        assert one.values["end_stamp"] <= one.values["areal"] <= one.values["begin_stamp"]


# The command.


def test_the_table(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A row a step, then what empty cells need, then each definition."""
    write(file, *before(), published("AB", A, B), step(4, 6, "AB"), end())
    status, out, err = run(capsys, "lens", str(file))
    rows = out.splitlines()
    assert (status, err) == (0, "")
    assert rows[0].split()[:6] == ["step", "batch_age", "refits", "coverage", "verl", "verl_worst"]
    cells = dict(zip(rows[0].split(), rows[4].split(), strict=True))
    assert (cells["batch_age"], cells["verl"], cells["begin_stamp"]) == ("3.667", "1.000", "2.500")
    assert [len(row) for row in rows[1:5]] == [len(rows[0])] * 4
    assert (cells["trl"], cells["skyrl"]) == ("?a", "?b")
    assert f"{cells['skyrl']}: {NEEDS_DISPATCH}" in rows
    assert f"{cells['megatron_rows']}: {NEEDS_PROMPTS}" in rows
    for definition in DEFINITIONS:
        assert any(row.startswith(f"{definition.name}: ") for row in rows)


def test_json(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The definitions first, then an object a step."""
    write(file, *two_groups())
    status, out, _ = run(capsys, "lens", str(file), "--json")
    first, *steps = [json.loads(line) for line in out.splitlines()]
    assert status == 0
    assert first == {"definitions": lens.definitions_record()}
    assert [one["step"] for one in steps] == [1, 2, 3, 4]
    assert steps[-1]["lens"]["verl"] == 1.0
    assert steps[0]["missing"]["skyrl"] == NEEDS_DISPATCH
    assert steps[-1]["batch_age"] == pytest.approx(2200 / 600)


def test_a_run_without_steps(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The header and the definitions alone."""
    status, out, _ = run(capsys, "lens", str(write(file, start())))
    assert status == 0
    assert out.split()[:2] == ["step", "batch_age"]


def test_samples_of_long_ago_are_forgotten(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory does not grow with the steps; what is too old is not known."""
    monkeypatch.setattr(lens, "VERSIONS_KEPT", 2)
    seen = last(file, *before(), published("A", A), step(4, 6, "A"))
    assert seen.missing["pipelinerl"] == NEEDS_SAMPLES
    seen = last(file, *before(), published("B", B), step(4, 6, "B"))
    assert seen.values["pipelinerl"] == 4


def test_an_unreadable_trace(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 2, one line, and no header without a step."""
    file.write_text("{}\n")
    status, out, err = run(capsys, "lens", str(file))
    assert (status, out, len(err.splitlines())) == (2, "", 1)


def test_a_run_of_the_callback_says_how_many_calls_it_summed(file: Path) -> None:
    """Two calls of version 0, a longer one of version 1: a mean over calls is none over tokens."""
    with StalenessCallback(trace=file, sinks=[]) as staleness:
        short = [
            Call(call=name, engine="engine", version=0, tokens=n, after=0, until=0)
            for name, n in (("a", 10), ("b", 30), ("none", 0))
        ]
        staleness.on_publish("old", calls=short, about={"rewards": [0.5]})
        staleness.on_step([])
        staleness.on_refit_paused(cuts={"engine": {}})
        staleness.on_refit_done()
        long = Call(call="c", engine="engine", version=1, tokens=60, after=1, until=1)
        staleness.on_publish("new", calls=[long])
        staleness.on_step(["old", "new"])
    found = list(lens.look(file))[-1]
    assert found.numbers.batch_age == 0.4
    assert found.values["verl"] == pytest.approx(2 / 3)
