"""What the doctor says of traces that break one invariant each, and of sound ones."""

from __future__ import annotations

import json
import os
import re
import threading
import tracemalloc
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rl_staleness import StalenessCallback, doctor
from rl_staleness.balance import Account
from rl_staleness.bookkeeper import NOT_FOLLOWED
from rl_staleness.contrasts import WHAT
from rl_staleness.doctor import Diagnosis
from rl_staleness.engines import Cut
from rl_staleness.events import RefitCut, StepTrained
from rl_staleness.invariants import BROKEN, NOTED, invariant
from rl_staleness.ledger import Ledger
from rl_staleness.symptoms import FIRST_LINES, MOST_NAMES, OTHER, REFITS_KEPT, Remarks
from rl_staleness.trace import read
from rl_staleness.trained import groups_of
from rl_staleness.view import look_at
from tests.fakes import FakeEngine
from tests.lines import (
    Line,
    aborted,
    call,
    cut,
    done,
    dropped,
    end,
    gap,
    published,
    run,
    start,
    step,
    violation,
    write,
)
from tests.traces import write_trace


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Where a trace may be written."""
    return tmp_path / "rollout_trace.jsonl"


def examined(path: Path, *lines: Line) -> Diagnosis:
    """What the doctor finds in a trace of these lines."""
    return doctor.examine(write(path, *lines))


def names(found: Diagnosis) -> set[str]:
    """Names of all that was found."""
    return {remark.name for remark in (*found.broken, *found.noted)}


SPANNING = call("c", 90, 0, after=0, until=1)
"""30 tokens on version 0, 60 on 1."""

SOUND = [
    start(),
    published("w", tokens={"0": 10}),
    step(1, 0, "w"),
    cut(1, {"c": 30}),
    done(1),
    published("g", SPANNING),
    step(2, 1, "g"),
    end(),
]


def test_a_sound_run(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is broken, nothing is noted, exit 0."""
    status, out, err = run(capsys, "doctor", str(write(file, *SOUND)))
    assert (status, err) == (0, "")
    rows = out.splitlines()
    assert rows[0] == "run r: 8 lines, 1 start, 2 steps, 2 updates, status finished"
    assert rows[1] == "batch age of the run: 0.300 policy updates over 100 tokens, coverage 1"
    assert rows[-1] == "sound; noted: 0"


# One trace for every name: what breaks it, and the lines that show it.

G = published("g", SPANNING)

BREAKS: dict[str, tuple[list[Line], list[int]]] = {
    "negative_age": ([start(), published("g", tokens={"3": 5}), step(1, 0, "g")], [3]),
    "step_version": ([start(), step(1, 4)], [2]),
    "step_number": ([start(), step(1, 0), step(1, 1)], [3]),
    "unknown_group": ([start(), step(1, 0, "g")], [2]),
    "published_again": ([start(), G, G], [3]),
    "call_named_twice": ([start(), published("g", SPANNING, SPANNING)], [2]),
    "stamp": ([start(), published("g", call("c", 9, 7)), step(1, 0, "g")], [3]),
    "after_contradicts_cut": (
        [
            start(),
            cut(1, {"c": 5}, version=0),
            done(1, version=0),
            published("g", call("c", 9, 0, after=1, until=1)),
            step(1, 0, "g"),
        ],
        [5],
    ),
    "until_contradicts_cut": (
        [
            start(),
            cut(1, {"c": 5}, version=0),
            done(1, version=0),
            published("g", call("c", 9, 0, after=0, until=0)),
            step(1, 0, "g"),
        ],
        [5],
    ),
    "after_beyond_until": (
        [
            start(),
            cut(1, version=0),
            done(1, version=0),
            published("g", call("c", 9, 0, after=1, until=0)),
            step(1, 0, "g"),
        ],
        [5],
    ),
    "absent_from_cut": (
        [
            start(),
            *(cut(n, {} if n == 2 else {"c": 9}, version=0) for n in (1, 2, 3)),
            *(done(n, version=0) for n in (1, 2, 3)),
            published("g", call("c", 9, 0, after=0, until=3)),
            step(1, 0, "g"),
        ],
        [9],
    ),
    "cut_counts_fall": (
        [
            start(),
            cut(1, {"c": 9}, version=0),
            cut(2, {"c": 5}, version=0),
            done(1, version=0),
            done(2, version=0),
            published("g", call("c", 9, 0, after=0, until=2)),
            step(1, 0, "g"),
        ],
        [7],
    ),
    "spans_overlap": (
        [
            start(),
            published("g", {**SPANNING, "spans": [[0, 50, 0], [40, 90, 0]]}),
            step(1, 0, "g"),
        ],
        [3],
    ),
    "span_contradicts_cut": (
        [*SOUND[:5], published("g", {**SPANNING, "spans": [[0, 90, 0]]}), step(2, 1, "g")],
        [7],
    ),
    "mask_beyond_call": (
        [*SOUND[:5], published("g", {**SPANNING, "trained": [[0, 91]]}), step(2, 1, "g")],
        [7],
    ),
    "mask_of_unknown_call": (
        [*SOUND[:6], step(2, 1, "g", trained={"g": {"d": [[0, 1]]}})],
        [7],
    ),
    "mask_of_unknown_group": ([*SOUND[:6], step(2, 1, "g", trained={"h": {}})], [7]),
    "calls_running": ([start(), violation("calls_running")], [2]),
    "engine_version_back": (
        [*SOUND[:5], cut(2, version=0), done(2, version=0)],
        [7],
    ),
    "engine_version_beyond_policy": ([start(), cut(1), done(1)], [3]),
    "refit_version": ([*SOUND[:4], done(1, version=0)], [5]),
    "refit_done_and_aborted": ([*SOUND[:5], aborted(1)], [6]),
    "refit_left_open": ([start(), violation("refit_left_open")], [2]),
    "refit_done_without_pause": ([start(), violation("refit_done_without_pause")], [2]),
    "refit_aborted_without_pause": ([start(), violation("refit_aborted_without_pause")], [2]),
    "run_changed": ([start(), start(run="s", incarnation=1)], [2]),
    "incarnation": ([start(), start(incarnation=2)], [2]),
    "counter_restarted": ([start(), violation("counter_restarted")], [2]),
    "beyond_resume": (
        [
            start(),
            start(incarnation=1),
            published("g", tokens={"2": 5}, restored=True),
            step(1, 0, "g"),
        ],
        [4],
    ),
    "lines_lost": ([start(), gap(3)], [2]),
    "line_after_end": ([start(), end(), step(1, 0)], [3]),
    "tokens_beyond_generated": (
        [*SOUND[:3], cut(1, {"c": 30}, generated=39), done(1), *SOUND[5:]],
        [8],
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_named_with_its_line(
    name: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit 1; the name, its lines, what it means, its usual cause and the way out."""
    lines, where = BREAKS[name]
    write(file, *lines)
    status, out, err = run(capsys, "doctor", str(file))
    assert (status, err) == (1, "")
    rows = out.splitlines()
    at = rows.index(f"broken: {name}: {BROKEN[name].meaning}")
    assert f"line {where[0]}: " in rows[at + 1]
    assert rows[at + 2] == f"  usual cause: {BROKEN[name].cause}"
    assert rows[at + 3] == f"  way out: {BROKEN[name].way_out}"
    assert rows[-1].startswith("broken: ")
    found = doctor.examine(file)
    (remark,) = [remark for remark in found.broken if remark.name == name]
    assert (remark.lines, bool(remark.detail)) == (where, True)


THREE = [line for n in (1, 2, 3) for line in (step(n, n - 1), cut(n), done(n))]

NOTES: dict[str, tuple[list[Line], list[int]]] = {
    "line_cut_off": ([start(), start(incarnation=1, torn=12), end()], [2]),
    "unfinished": (SOUND[:-1], [7]),
    "clock_back": ([start(), {**step(1, 0), "time": -0.5}, end()], [2]),
    "refit_without_cut": ([start(), step(1, 0), done(1), end()], [3]),
    "inexact_cut": ([start(), step(1, 0), cut(1, exact=False), done(1), end()], [4]),
    "refit_unsettled": ([start(), step(1, 0), cut(1), end()], [3]),
    "refit_not_repeated": ([start(), step(1, 0), cut(1), aborted(1), end()], [4]),
    "engine_never_refitted": (
        [start(engines={"e": 0, "f": 0}), step(1, 0), cut(1), done(1), end()],
        [1],
    ),
    "refits_stopped": (
        [start(), *THREE, *(step(n, n - 1) for n in range(4, 14)), end()],
        [19],
    ),
    "uncovered_tokens": ([*SOUND[:4], *SOUND[5:]], [6]),
    "unknown_tokens": (
        [start(), published("g", tokens={"0": 5}, unknown=1), step(1, 0, "g"), end()],
        [3],
    ),
    "orphans": (
        [
            start(about={"orphan_after": 1}),
            cut(1, {"c": 3}, version=0),
            done(1, version=0),
            cut(2, version=0),
            done(2, version=0),
            end(),
        ],
        [4],
    ),
    "groups_discarded": ([start(), G, start(incarnation=1), end()], [3]),
    "groups_never_trained": ([start(), G, end()], [3]),
    "steps_made_again": (
        [start(), step(1, 0), step(2, 1), start(incarnation=1, version=1, number=2), end()],
        [4],
    ),
    "step_without_tokens": ([start(), step(1, 0), end()], [2]),
}


@pytest.mark.parametrize("name", sorted(NOTED.keys() - {"torn_line"}))
def test_what_is_noted_is_not_broken(
    name: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit 0, with the lines."""
    lines, where = NOTES[name]
    status, out, _ = run(capsys, "doctor", str(write(file, *lines)))
    assert status == 0
    assert f"noted: {name}: {NOTED[name].meaning}" in out.splitlines()
    found = doctor.examine(file)
    (remark,) = [remark for remark in found.noted if remark.name == name]
    assert (remark.lines, bool(remark.detail)) == (where, True)
    assert found.sound


@pytest.mark.parametrize(
    ("name", "times"),
    [
        ("steps_made_again", 1),
        ("unknown_tokens", 1),
        ("groups_never_trained", 1),
        ("uncovered_tokens", 60),
        ("refits_stopped", 1),
        ("orphans", 1),
    ],
)
def test_how_much_is_noted(name: str, times: int, file: Path) -> None:
    """Steps, tokens, groups and calls are counted as such."""
    (remark,) = [r for r in examined(file, *NOTES[name][0]).noted if r.name == name]
    assert remark.times == times


def joined(refit: int, version: int, **fields: Any) -> list[Line]:
    """What stands in a trace where an engine f joins the run."""
    refitted = {"engine": "f", "version": version}
    return [
        cut(refit, exact=False, mode="joined", **refitted),
        done(refit, **refitted),
    ]


def test_an_engine_that_joins_lacks_nothing(file: Path) -> None:
    """It had no call to count; and refits that stopped have not come again with it."""
    lines = [start(), *joined(1, 0), step(1, 0), cut(1), done(1), end()]
    assert names(examined(file, *lines)) == {"step_without_tokens"}
    silent = [step(n, n - 1) for n in range(4, 14)]
    with_one = [start(), *THREE, *silent[:5], *joined(1, 3), *silent[5:], end()]
    assert "refits_stopped" in names(examined(file, *with_one))


def test_an_engine_that_joins_is_no_refit_in_a_picture(file: Path) -> None:
    """Its table counts what the trainer did, and what lacks a cut."""
    view = look_at(write(file, start(), *joined(1, 0), step(1, 0), cut(1), done(1), done(2), end()))
    assert (dict(view.refits), dict(view.without_cut)) == ({"e": 2}, {"e": 1})


def test_what_a_resume_gives_up_after_the_end(file: Path) -> None:
    """A run that was closed goes on from an earlier checkpoint: the drops are of its past."""
    again = start(incarnation=1)
    lines = [start(), G, end(), dropped("g", reason="rolled back"), again, step(1, 0), end()]
    assert "line_after_end" not in names(examined(file, *lines))


def test_tokens_of_between_the_last_cut_and_a_refit_without_one(file: Path) -> None:
    """The engine had their version when it was counted, and for as long after that as it had it."""
    lines = [start(), step(1, 0), cut(1, {"c": 4}, generated=4), aborted(1), done(2, version=1)]
    lines += [published("g", tokens={"0": 9}, about={"summed_calls": {"0": 1}}), step(2, 1, "g")]
    found = examined(file, *lines, end())
    assert [remark.name for remark in found.broken] == []
    assert (found.balance.generated, found.balance.trained.tokens) == (4, 9)
    assert (found.balance.lost_lo, found.balance.lost_hi) == (0, 0)


@pytest.mark.parametrize("first_was_refitted", [True, False])
def test_another_process_under_the_name_of_an_engine_counts_anew(
    file: Path, first_was_refitted: bool
) -> None:
    """What the first one made is not what the second one counts, however much that is."""
    f = {"engine": "f", "version": 0}
    lines = [start(engines={"f": 0})]
    lines += [cut(1, generated=100, **f), done(1, **f)] if first_was_refitted else []
    lines += [*joined(2, 0), cut(3, generated=150, **f), done(3, **f)]
    made = [call(n, 100, 0, engine="f", after=a, until=a) for n, a in (("old", 0), ("new", 2))]
    found = examined(file, *lines, published("g", *made), step(1, 0, "g"), end())
    assert [remark.name for remark in found.broken] == []
    assert found.balance.generated is None
    assert found.balance.open == ["an engine's counter fell: it was attached anew"]


@pytest.mark.parametrize(("silent", "stopped"), [(12, False), (13, True), (30, True)])
def test_refits_stop_after_four_times_the_longest_gap(
    file: Path, silent: int, stopped: bool
) -> None:
    """Three steps lay between two of them at most, one before the others."""
    lines = [start()]
    number = 0
    for gap_between in (9, 3, 1):  # the steps before the first one are no rhythm
        for _ in range(gap_between):
            number += 1
            lines.append(step(number, number - 1))
        refit = {9: 1, 3: 2, 1: 3}[gap_between]
        lines += [cut(refit, version=number), done(refit, version=number)]
    lines += [step(number + n, number + n - 1) for n in range(1, silent + 1)]
    found = examined(file, *lines, end())
    assert ("refits_stopped" in names(found)) is stopped


@pytest.mark.parametrize(("updates", "noted"), [(7, False), (8, True)])
def test_an_engine_that_no_refit_is_told_of(file: Path, updates: int, noted: bool) -> None:
    """A single engine is noted when the policy has moved on."""
    lines = [start(), step(1, 0, updates=updates), end()]
    assert ("engine_never_refitted" in names(examined(file, *lines))) is noted


def test_calls_are_forgotten_one_after_the_other(file: Path) -> None:
    """Each is counted once, where it is forgotten."""
    lines = [start(about={"orphan_after": 1})]
    for n in range(1, 6):
        lines += [cut(n, {f"c{n}": 3}, version=0), done(n, version=0)]
    (remark,) = [r for r in examined(file, *lines, end()).noted if r.name == "orphans"]
    assert (remark.times, remark.lines) == (4, [4, 6, 8, 10])


def test_how_many_lines_are_lost(file: Path) -> None:
    """Not how often."""
    (remark,) = examined(file, start(), gap(3), gap(4)).broken
    assert (remark.times, remark.lines, remark.detail) == (7, [2, 3], "3 lines")


def test_a_torn_last_line(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is a note of the doctor's, and no second word on stderr."""
    write(file, *SOUND)
    with file.open("ab") as stream:
        stream.write(b'{"event": "ga')
    status, out, err = run(capsys, "doctor", str(file))
    assert (status, err) == (0, "")
    assert "  1 in all, line 9: 13 bytes" in out.splitlines()


def test_names_that_a_trainer_gives_are_broken() -> None:
    """An unknown name is a violation that was found online."""
    assert invariant("whatever").broken
    assert not BROKEN.keys() & NOTED.keys()


NAMED = re.compile(
    r"""(?: ViolationFound\([^()]*(?:\(\))?[^()]*name= | _?find\((?:[^()"]*(?:"",[ ])?)
        | _violation\( | _find_all\(\( | append\(\( | \[\( )\s*"([a-z_]+)"
    """,
    re.VERBOSE,
)
"""Where the core gives a violation its name."""


def test_every_name_of_the_core_is_explained() -> None:
    """A violation that is named somewhere and not here would have no way out."""
    core = Path(doctor.__file__).parent
    found: set[str] = set()
    for module in core.glob("*.py"):
        found |= set(NAMED.findall(module.read_text()))
    assert found - BROKEN.keys() == set()
    doctors_own = {"lines_lost", "line_after_end", "tokens_beyond_generated"}
    assert BROKEN.keys() - found == doctors_own


# What is sound and may look odd.


RESTORED = published("g", {**SPANNING, "spans": [[0, 30, 0], [30, 90, 1]]}, restored=True)


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param([*SOUND[:3], done(1), cut(1, {"c": 30}), *SOUND[5:]], id="a late cut"),
        pytest.param(
            [
                *SOUND[:3],
                cut(1, {"c": 9}),
                aborted(1),
                cut(2, {"c": 30}, version=1),
                done(2, version=1),
                published("g", {**SPANNING, "until": 2}),
                *SOUND[6:],
            ],
            id="an aborted refit that is repeated",
        ),
        pytest.param(
            [*SOUND[:6], start(incarnation=1, version=1, number=2), RESTORED, *SOUND[6:]],
            id="a resume",
        ),
        pytest.param([*SOUND[:-1], {**end(), "time": 0.5}], id="lines that overtake by less"),
        pytest.param(
            [*SOUND[:5], cut(2, version=1), done(2, version=1), *SOUND[5:]], id="a second refit"
        ),
    ],
)
def test_what_is_sound(file: Path, lines: list[Line]) -> None:
    """No word of it."""
    assert names(examined(file, *lines)) == set()


def test_refit_numbers_go_on_at_a_resume(file: Path) -> None:
    """No refit is skipped between two starts, and one that is skipped within one is noted."""
    again = start(incarnation=1, version=1, number=2)
    resumed = [*SOUND[:5], again, cut(2, version=1), done(2, version=1), end()]
    assert names(examined(file, *resumed)) == set()
    skipped = [*SOUND[:5], again, cut(3, version=1), done(3, version=1), end()]
    assert names(examined(file, *skipped)) == {"refit_unsettled"}
    lost = start(version=1, number=2, incarnation=3, about={"refits_before": {"e": 7}})
    assert names(examined(file, lost, cut(8, version=1), done(8, version=1), end())) == set()


BLIND = call("c", 90, 0)
"""Neither its begin nor its end was seen."""


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ([*SOUND[:3], done(1), *SOUND[5:]], "a refit without a cut"),
        ([*SOUND[:3], cut(1, {"c": 30}, exact=False), done(1), *SOUND[5:]], "an inexact cut"),
        ([*SOUND[:4], *SOUND[5:]], "a refit that may have happened"),
        (
            [*SOUND[:4], published("g", {**SPANNING, "after": 1, "call": "c"}), *SOUND[6:]],
            "a refit that may have happened",
        ),
        ([*SOUND[:5], gap(1), *SOUND[5:]], "lines are lost"),
        (
            [*SOUND[:5], published("g", SPANNING, restored=True), *SOUND[6:]],
            "restored without spans",
        ),
        ([*SOUND[:3], cut(1), done(1), published("g", BLIND), *SOUND[6:]], "nobody saw it begin"),
        (
            [
                *SOUND[:5],
                published("g", {**SPANNING, "until": 2}),
                published("x"),
                step(2, 1, "x"),
                step(3, 2, "g"),
                end(),
            ],
            "a refit that is in no line",
        ),
    ],
)
def test_why_tokens_are_not_covered(file: Path, lines: list[Line], why: str) -> None:
    """The first of them says it; the count is of tokens."""
    found = examined(file, *lines)
    (remark,) = [remark for remark in found.noted if remark.name == "uncovered_tokens"]
    assert remark.detail.partition(", ")[2] == f"call 'c': {why}"
    assert found.coverage is not None
    assert remark.times == round((1 - found.coverage) * found.tokens)


# Lines and counts.


def test_the_first_lines_and_the_number(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of fifty lines five are shown, and that there are more."""
    write(file, start(), *(step(n, n - 1, "nobody") for n in range(1, 51)), end())
    status, out, _ = run(capsys, "doctor", str(file))
    assert status == 1
    assert "  50 in all, lines 2, 3, 4, 5, 6, ...: group 'nobody'" in out
    found = doctor.examine(file)
    assert found.broken[0].times == 50
    assert len(found.broken[0].lines) == FIRST_LINES


def test_lines_that_are_told_late_come_in_their_order() -> None:
    """The detail is that of the first line."""
    remarks = Remarks()
    for line in (9, 7, 8, 3, 7, 30, 20):
        remarks.add("name", line, f"of {line}")
    assert remarks.by_name["name"].lines == [3, 7, 8, 9, 20]
    assert (remarks.by_name["name"].detail, remarks.by_name["name"].times) == ("of 3", 7)


def test_names_that_never_end_take_no_memory(file: Path) -> None:
    """Violations and reasons of drops that are all different are summed in the end."""
    many = [violation(f"name {n}") for n in range(2 * MOST_NAMES)]
    found = examined(file, start(), *many, *(dropped(f"g{n}", reason=f"{n}") for n in range(200)))
    assert len(found.broken) <= MOST_NAMES + 1
    assert sum(remark.times for remark in found.broken) == 2 * MOST_NAMES
    assert OTHER in names(found)
    assert len(found.balance.dropped) <= 65


def long_trace(path: Path, num_steps: int, *more: Line) -> Path:
    """A trace with cuts that list calls, groups that are dropped and refits without a cut."""
    lines = [start()]
    for n in range(1, num_steps + 1):
        lines += [
            cut(n, {f"c{n}": 5, f"lost{n}": 1}, version=n, generated=40 * n),
            published(f"g{n}", call(f"c{n}", 20, n - 1, after=n - 1, until=n)),
            dropped(f"d{n}", call(f"d{n}", 5, n - 1, after=n - 1, until=n - 1)),
            step(n, n - 1, f"g{n}"),
            done(n),
            published(f"s{n}", tokens={str(n): 3}),
            dropped(f"s{n}", reason="late"),
        ]
    return write(path, *lines, *more)


@pytest.mark.parametrize("back", [(), ("g1", "d2", "s3")])
def test_memory_does_not_grow_with_the_trace(tmp_path: Path, back: tuple[str, ...]) -> None:
    """Five times the steps take no more, with groups that come back from before as well."""
    resume = [start(incarnation=1), *(published(name, restored=True) for name in back)]

    def peak(num_steps: int) -> int:
        path = long_trace(tmp_path / f"{num_steps}.jsonl", num_steps, *resume)
        tracemalloc.start()
        found = doctor.examine(path)
        size = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert found.steps == num_steps
        return size

    assert peak(1500) < 1.3 * peak(300)


def test_refits_are_remembered_for_a_while(file: Path) -> None:
    """Of many without a cut each is counted once, when it is forgotten or at the end."""
    lines = [start()]
    for n in range(1, 2 * REFITS_KEPT):
        lines += [step(n, n - 1), done(n)]
    (remark,) = [r for r in examined(file, *lines).noted if r.name == "refit_without_cut"]
    assert (remark.times, remark.lines) == (2 * REFITS_KEPT - 1, [3, 5, 7, 9, 11])
    far = [*SOUND[:5], cut(5000, version=1), done(5000, version=1), end()]
    (remark,) = [r for r in examined(file, *far).noted if r.name == "refit_unsettled"]
    assert remark.times == REFITS_KEPT


# The token ledger.


def tokens(account: Account) -> tuple[int, float | None]:
    """Tokens and mean age."""
    return account.tokens, account.mean_age


CLOSED = [
    start(),
    published("w", tokens={"0": 10}),
    step(1, 0, "w"),
    cut(1, {"c": 30, "run": 7, "never": 2}, generated=95),
    done(1),
    published("g", {**SPANNING, "trained": [[0, 80]]}),
    dropped("d", call("d", 20, 0, after=0, until=0)),
    published("later", call("l", 4, 1, after=1, until=1)),
    step(2, 1, "g"),
    published("q", call("run", 9, 0, after=0, until=1)),
    end(),
]
"""Up to the cut 10 (w) + 30 (c) + 7 (run) + 20 (d) + 2 (never) of 95 are accounted for."""


def test_the_token_ledger_closes(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Generated = trained + dropped + masked + waiting + running - made after + lost: 26 lost."""
    found = examined(file, *CLOSED)
    balance = found.balance
    assert tokens(balance.trained) == (90, 30 / 90)
    assert tokens(balance.masked) == (10, 0)
    assert {reason: tokens(a) for reason, a in balance.dropped.items()} == {"old": (20, 1.0)}
    assert tokens(balance.waiting) == (13, (7 * 2 + 6 * 1) / 13)
    assert balance.running == 2
    assert (balance.after, balance.undecided) == (60 + 4 + 2, 0)
    assert (balance.generated, balance.lost_lo, balance.lost_hi) == (95, 26, 26)
    parts = balance.accounted - balance.after + (balance.lost_lo or 0)
    assert balance.generated == parts
    _, out, _ = run(capsys, "doctor", str(file))
    rows = out.splitlines()
    assert "tokens generated, by the engines' counters up to their last cuts: 95" in rows
    assert "  dropped, old: 20, mean age 1.000" in rows
    assert "  lost (calls that nobody captured or published): 26" in rows


def replaced(lines: list[Line], number: int, *new: Line) -> list[Line]:
    """The lines with others in the place of one."""
    return [*lines[:number], *new, *lines[number + 1 :]]


@pytest.mark.parametrize(
    ("lines", "lost", "undecided"),
    [
        pytest.param(CLOSED, (26, 26), 0, id="as it is"),
        pytest.param(
            replaced(CLOSED, 3, {**CLOSED[3], "exact": False}), (0, 26), 62, id="an inexact cut"
        ),
        pytest.param(
            replaced(CLOSED, 6, dropped("d", call("d", 20, 0))), (26, 46), 20, id="no `after`"
        ),
        pytest.param(
            replaced(CLOSED, 6, dropped("d", call("d", 20, 0, after=0))),
            (26, 26),
            0,
            id="no `until`",
        ),
        pytest.param(
            replaced(CLOSED, 7, published("l", tokens={"1": 4})), (26, 26), 0, id="summed, after"
        ),
        pytest.param(
            replaced(CLOSED, 7, published("l", tokens={"0": 4})), (22, 22), 0, id="summed, before"
        ),
        pytest.param(
            [*CLOSED[:4], aborted(1), published("l", tokens={"0": 4}), end()],
            (42, 56),
            14,
            id="summed, and the refit was aborted",
        ),
    ],
)
def test_tokens_on_both_sides_of_the_last_cut(
    file: Path, lines: list[Line], lost: tuple[int, int], undecided: int
) -> None:
    """What the trace does not decide makes two bounds of the lost ones."""
    balance = examined(file, *lines).balance
    assert (balance.lost_lo, balance.lost_hi) == lost
    assert balance.undecided == undecided


@pytest.mark.parametrize(("exact", "lost", "undecided"), [(True, (0, 0), 0), (False, (0, 20), 20)])
def test_a_call_that_an_exact_cut_does_not_list_had_ended(
    file: Path, exact: bool, lost: tuple[int, int], undecided: int
) -> None:
    """Its end was seen behind the pause only: with counts that are not exact nobody knows."""
    ended = published("g", call("d", 20, 0, after=0, until=1))
    lines = [start(), step(1, 0), cut(1, generated=20, exact=exact), done(1), ended, end()]
    balance = examined(file, *lines).balance
    assert (balance.lost_lo, balance.lost_hi) == lost
    assert balance.undecided == undecided


def test_summed_tokens_behind_a_late_cut(file: Path) -> None:
    """They are of the version that its refit led to: made after it."""
    lines = [start(), step(1, 0), done(1), cut(1, generated=0)]
    balance = examined(file, *lines, published("s", tokens={"1": 4}), end()).balance
    assert (balance.after, balance.undecided, balance.lost_lo) == (4, 0, 0)


def test_summed_tokens_of_many_versions(file: Path) -> None:
    """Of those that no engine has any more nothing is kept; of the others all is."""
    lines = [start()]
    for n in range(1, 80):
        lines += [published(f"s{n}", tokens={str(n - 1): 5}), step(n, n - 1, f"s{n}")]
        lines += [cut(n, generated=5 * n), done(n)]
    new = published("new", tokens={"79": 3})
    balance = examined(file, *lines, new, end()).balance
    assert (balance.after, balance.undecided, balance.lost_lo) == (3, 0, 0)
    stayed = [new, cut(80, generated=398), aborted(80), end()]
    balance = examined(file, *lines, *stayed).balance
    assert (balance.after, balance.undecided) == (0, 3)
    assert (balance.lost_lo, balance.lost_hi) == (0, 3)


def test_summed_tokens_of_an_engine_that_lags_behind(file: Path) -> None:
    """One engine has the version of the start for good: it may have made them at any time."""
    lines = [start(engines={"e": 0, "f": 0}), cut(1, engine="f", version=0, generated=0)]
    lines += [done(1, engine="f", version=0), published("s", tokens={"0": 3})]
    for n in range(1, 80):
        lines += [published(f"s{n}", tokens={str(n): 0, str(n + 100): 1})]
        lines += [step(n, n - 1), cut(n, generated=0), done(n)]
    balance = examined(file, *lines, end()).balance
    assert balance.undecided == 3


def test_a_repeated_cut_replaces_the_first(file: Path) -> None:
    """Its counts and its counter are the ones that count."""
    first, second = cut(1, {"c": 80}, generated=90), cut(1, {"c": 30}, generated=40)
    lines = [*SOUND[:3], first, second, done(1), *SOUND[5:]]
    balance = examined(file, *lines).balance
    assert (balance.generated, balance.after, balance.lost_lo) == (40, 60, 0)


def test_no_less_than_nothing_is_lost(file: Path) -> None:
    """Where undecided tokens leave room for it, the bound is 0."""
    doubtful = published("g", call("d", 20, 0))
    lines = [start(), step(1, 0), cut(1, generated=0), done(1), doubtful, end()]
    found = examined(file, *lines)
    assert (found.balance.lost_lo, found.balance.lost_hi) == (0, 0)
    assert found.sound


def test_a_cut_that_comes_after_the_publish(file: Path) -> None:
    """The call is in the cut with 30 of 90 tokens, wherever the cut's line stands."""
    late = [*SOUND[:3], done(1), SOUND[5], cut(1, {"c": 30}, generated=40), *SOUND[6:]]
    on_time = [*SOUND[:3], cut(1, {"c": 30}, generated=40), done(1), *SOUND[5:]]
    for lines in (late, on_time):
        balance = examined(file, *lines).balance
        assert (balance.after, balance.running, balance.lost_lo, balance.lost_hi) == (60, 0, 0, 0)


def test_tokens_are_in_one_account_only(file: Path) -> None:
    """A group that is kept, trained again and dropped then is trained once."""
    kept = [
        start(),
        published("g", tokens={"0": 10}),
        step(1, 0, "g", kept=["g"]),
        step(2, 1, "g", kept=["g"]),
        dropped("g"),
        published("twice", tokens={"0": 4}),
        step(3, 2, batches=[["twice"], ["twice"]]),
    ]
    balance = examined(file, *kept).balance
    assert tokens(balance.trained) == (14, 8 / 14)
    assert tokens(balance.trained_again) == (14, (10 * 1 + 4 * 3) / 14)
    assert balance.dropped.keys() <= {"old"}
    assert sum(account.tokens for account in balance.dropped.values()) == 0
    waiting = examined(file, *kept[:4]).balance
    assert (waiting.waiting.tokens, waiting.trained.tokens) == (0, 10)


def test_groups_of_before_a_resume(file: Path) -> None:
    """What is published again waits on; what is not was lost at the resume."""
    again = start(incarnation=1, version=1, number=2)
    one = published("one", call("x", 10, 0, after=0, until=0))
    two = published("two", call("y", 5, 0, after=0, until=0))
    back = published("one", call("x", 10, 0, spans=[[0, 10, 0]]), restored=True)
    lines = [start(), one, two, step(1, 0), cut(1, generated=15), again]
    ended = published("ended", call("z", 3, 1, after=1))  # nobody saw its end: before the cut
    more = [ended, cut(2, version=1, generated=3), step(2, 1, "ended"), back, end()]
    balance = examined(file, *lines, *more).balance
    assert tokens(balance.discarded) == (5, 1.0)
    assert tokens(balance.waiting) == (10, 2.0)
    assert (balance.generated, balance.lost_lo, balance.lost_hi) == (18, 0, 0)
    kept = [start(), one, step(1, 0, "one", kept=["one"]), cut(1, generated=10), again]
    balance = examined(file, *kept, cut(2, version=1, generated=0), end()).balance
    assert (balance.discarded.tokens, balance.trained.tokens) == (0, 10)


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (SOUND, "not every engine's last cut carries its counter"),
        ([start(engines={}), step(1, 0)], "no engine is known"),
        ([*CLOSED, gap(1)], "lines are lost"),
        (
            [*CLOSED[:-1], cut(2, version=1, generated=90)],
            "an engine's counter fell: it was attached anew",
        ),
        ([*CLOSED[:2], *CLOSED[1:]], "a group was published twice"),
        (
            [*CLOSED[:-1], published("o", call("o", 1, 0, spans=[[0, 1, 0]]), restored=True)],
            "restored groups were not waiting in this trace",
        ),
        (
            [*CLOSED[:-1], start(incarnation=1), *[published("o", restored=True)] * 2],
            "a group was published twice",
        ),
    ],
)
def test_a_ledger_that_cannot_be_closed_says_why(
    file: Path, lines: list[Line], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lost is unknown then, and so is what was generated."""
    balance = examined(file, *lines).balance
    assert why in balance.open
    assert (balance.generated, balance.lost_lo, balance.lost_hi) == (None, None, None)
    _, out, _ = run(capsys, "doctor", str(file))
    assert f"  lost: unknown: {'; '.join(balance.open)}" in out.splitlines()


KEPT = [
    start(),
    published("k", tokens={"0": 30}),
    step(1, 0, "k", kept=["k"]),
    cut(1, generated=30),
    done(1),
]

BACK = published("k", tokens={"0": 30}, restored=True)


def resumed(version: int, *, incarnation: int = 1) -> list[Line]:
    """The run goes on at this version, and what waited there is published again."""
    return [start(incarnation=incarnation, version=version, number=version + 1), BACK]


IDLE = cut(1, version=1, generated=0)


def used(version: int) -> list[Line]:
    """A step that trains k, then a refit whose cut says that nothing was generated since."""
    refit = cut(9, version=version + 1, generated=0), done(9, version=version + 1)
    return [step(version + 1, version, "k"), *refit]


@pytest.mark.parametrize(
    ("lines", "age"),
    [
        pytest.param(KEPT + used(1)[:1], 1, id="no resume"),
        pytest.param(KEPT + resumed(1) + used(1), 1, id="kept"),
        pytest.param(
            [*KEPT, *resumed(1)[:1], IDLE, *resumed(1, incarnation=2), *used(1)],
            1,
            id="kept, and not restored by the first resume",
        ),
        pytest.param(
            [*KEPT, *resumed(1), IDLE, *resumed(1, incarnation=2), *used(1)],
            1,
            id="kept, two resumes",
        ),
        pytest.param(KEPT + resumed(0) + used(0), 0, id="kept, rolled back"),
        pytest.param(KEPT[:2] + used(0)[:1] + KEPT[3:] + resumed(0) + used(0), 0, id="rolled back"),
        pytest.param(
            KEPT[:2] + used(0)[:1] + KEPT[3:] + resumed(1) + used(1),
            1,
            id="used up, and restored all the same",
        ),
        pytest.param(
            [*KEPT, dropped("k"), *resumed(1), *used(1)], 1, id="kept, dropped, and restored"
        ),
    ],
)
def test_a_group_that_is_trained_again_after_a_resume(
    file: Path, lines: list[Line], age: int
) -> None:
    """Its 30 tokens were generated once and trained once; later times stand beside that."""
    found = examined(file, *lines, end())
    balance = found.balance
    assert tokens(balance.trained) == (30, 0)
    assert tokens(balance.trained_again) == (30, age)
    assert (balance.waiting.tokens, balance.discarded.tokens, balance.dropped) == (0, 0, {})
    assert (balance.generated, balance.lost_lo, balance.lost_hi) == (30, 0, 0)
    assert balance.open == []
    assert found.broken == []


@pytest.mark.parametrize("more", [[], [dropped("k", reason="late")], resumed(1, incarnation=2)[:1]])
@pytest.mark.parametrize("before", [KEPT, [*KEPT[:2], step(1, 0, "k"), *KEPT[3:]]])
def test_a_trained_group_that_comes_back_and_is_not_trained_again(
    file: Path, before: list[Line], more: list[Line]
) -> None:
    """Whether it waits, is dropped or is left behind, its tokens are trained."""
    lines = [*before, *resumed(1), cut(2, version=1, generated=0), *more, end()]
    if more and more[0]["event"] == "run_started":
        lines.append(cut(3, version=1, generated=0))
    balance = examined(file, *lines).balance
    assert tokens(balance.trained) == (30, 0)
    assert (balance.accounted, balance.trained_again.tokens) == (30, 0)
    assert (balance.lost_lo, balance.lost_hi, balance.open) == (0, 0, [])


def test_a_dropped_group_that_a_rollback_brings_back(file: Path) -> None:
    """Its drop is undone: its tokens go where the group goes in the end."""
    lines = [*KEPT[:2], step(1, 0), *KEPT[3:], dropped("k"), *resumed(0)]
    waits = [*lines, step(1, 0), cut(2, version=1, generated=0)]
    balance = examined(file, *waits, end()).balance
    assert (tokens(balance.waiting), balance.dropped, balance.lost_hi) == ((30, 1), {}, 0)
    trained = [*lines, *used(0)]
    balance = examined(file, *trained, end()).balance
    assert (tokens(balance.trained), balance.dropped, balance.lost_hi) == ((30, 0), {}, 0)
    assert balance.trained_again.tokens == 0
    balance = examined(file, *waits, dropped("k", reason="late"), end()).balance
    assert {reason: tokens(a) for reason, a in balance.dropped.items()} == {"late": (30, 1)}
    assert (balance.accounted, balance.lost_hi) == (30, 0)
    left = [*waits, *resumed(1, incarnation=2)[:1], cut(3, version=1, generated=0)]
    balance = examined(file, *left, end()).balance
    assert (tokens(balance.discarded), balance.dropped, balance.lost_hi) == ((30, 1), {}, 0)


def test_masked_tokens_of_a_group_that_comes_back(file: Path) -> None:
    """They are left out once as well: 10 of 30 tokens, whenever the others are trained."""
    masked = call("c", 30, 0, after=0, until=0, trained=[[0, 20]])
    back = published("k", masked | {"spans": [[0, 30, 0]]}, restored=True)
    lines = [start(), published("k", masked), *KEPT[2:], *resumed(1)[:1], back, *used(1)]
    balance = examined(file, *lines, end()).balance
    assert (tokens(balance.trained), tokens(balance.masked)) == ((20, 0), (10, 0))
    assert (tokens(balance.trained_again), balance.lost_hi) == ((20, 1), 0)


def test_another_group_of_a_name_is_not_the_one_of_before(file: Path) -> None:
    """Published anew after a resume, it has tokens of its own, and the first is gone for good."""
    anew = published("k", tokens={"1": 5})
    lines = [*KEPT[:2], step(1, 0), *KEPT[3:], *resumed(1)[:1], anew]
    more = [step(2, 1, "k"), cut(2, generated=5), done(2)]
    balance = examined(file, *lines, *more, end()).balance
    assert (tokens(balance.discarded), tokens(balance.trained)) == ((30, 1), (5, 0))
    assert balance.lost_hi == 0
    back = [anew | {"restored": True}, step(2, 1, "k"), cut(3, version=1, generated=0)]
    rolled_back = [*lines, *more, *resumed(1, incarnation=2)[:1], *back]
    balance = examined(file, *rolled_back, end()).balance
    assert (tokens(balance.discarded), tokens(balance.trained)) == ((30, 1), (5, 0))
    assert (tokens(balance.trained_again), balance.lost_hi) == ((5, 0), 0)
    kept = [*KEPT, *resumed(1)[:1], anew]
    balance = examined(file, *kept, *more, end()).balance
    assert (tokens(balance.trained), balance.trained_again.tokens) == ((35, 0), 0)
    assert (balance.discarded.tokens, balance.lost_hi) == (0, 0)


ROLLED_BACK = [*KEPT[:2], step(1, 0, "k"), *KEPT[3:], *resumed(0), *used(0)]


def test_a_pipe_is_read_once(tmp_path: Path) -> None:
    """What became of a group before a rollback cannot be looked up there: it is said, and not
    guessed."""
    text = write(tmp_path / "trace.jsonl", *ROLLED_BACK).read_text()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=(text,), daemon=True)
    writer.start()
    balance = doctor.examine(pipe).balance
    writer.join()
    assert balance.open == [NOT_FOLLOWED]
    assert (balance.lost_lo, balance.lost_hi) == (None, None)


def test_lines_of_after_the_first_look_do_not_count(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run may go on as its trace is read a second time."""

    def written(path: Path) -> bool:
        with path.open("a") as trace:
            trace.write(json.dumps(published("new", tokens={"0": 7})) + '\n{"event":"run_fin')
        return True

    monkeypatch.setattr("os.path.isfile", written)
    found = examined(file, *ROLLED_BACK)
    assert (found.balance.trained.tokens, found.balance.trained_again.tokens) == (30, 30)
    assert (found.lines, found.balance.waiting.tokens) == (len(ROLLED_BACK), 0)


def test_appended_tokens_are_in_no_account(file: Path) -> None:
    """No engine made them."""
    balance = examined(
        file, start(), published("g", tokens={"0": 5}, unknown=2), step(1, 0, "g")
    ).balance
    assert (balance.appended, balance.trained.tokens, balance.accounted) == (2, 5, 5)


def test_rolled_back_tokens_have_no_age(file: Path) -> None:
    """They are trained, and make no mean."""
    gone = published("g", call("c", 5, 2), tokens={"0": 5, "3": 5}, restored=True)
    lines = [start(), start(incarnation=1), gone, step(1, 0), step(2, 1, "g")]
    balance = examined(file, *lines).balance
    assert (balance.trained.tokens, balance.trained.without_age) == (15, 10)
    assert balance.trained.mean_age == 1
    assert balance.masked.tokens == 0
    half = published("g", call("c", 5, 2, trained=[[3, 5]]), restored=True)
    balance = examined(file, start(), start(incarnation=1), half, step(1, 0, "g")).balance
    assert (balance.trained.without_age, balance.masked.without_age) == (2, 3)


def test_what_an_engine_counts_comes_into_the_trace(tmp_path: Path) -> None:
    """`Cut.generated` is written as it is, with a late cut too; None leaves it out."""
    engine = FakeEngine("e")
    path = tmp_path / "rollout_trace.jsonl"
    with StalenessCallback(engines=[engine], trace=path, sinks=[]) as staleness:
        for generated in (0, 7, None):
            staleness.on_refit_paused()
            staleness.on_refit_done()
            engine.deliver(Cut(calls={}, generated=generated))
    cuts = [event for event in read(path) if isinstance(event, RefitCut)]
    assert [event.generated for event in cuts] == [0, 7, None]
    assert '"generated"' not in path.read_text().splitlines()[-2]


# Ways to measure that are off, as sequences of events.


def refitted(version: int, *more: Line, counts: dict[str, int] | None = None) -> list[Line]:
    """Steps up to a version, each followed by a refit; the last one's cut has these counts."""
    lines = [start()]
    for n in range(1, version + 1):
        lines += [step(n, n - 1), cut(n, (counts or {}) if n == version else {}), done(n)]
    return [*lines, *more]


CUT_AT_100 = refitted(
    2,
    published("g", call("c", 400, 1, after=1, until=2)),
    published("s", call("s", 7, 1, after=1, until=1)),
    step(3, 2, "g", "s"),
    counts={"c": 100},
)

MIXED = published(
    "g",
    call("a", 10, 3, after=3, until=3),
    call("b", 10, 3, after=3, until=3),
    call("c", 10, 5, after=5, until=5),
)

ATTEMPTS = (
    call("try", 0, 3, after=3, until=5),
    call("b", 10, 4, after=4, until=4),
    call("c", 200, 5, after=5, until=5),
)

SEQUENCES: dict[str, tuple[list[Line], float, float, int]] = {
    "begin_stamp": (CUT_AT_100, 1.0, 107 / 407, 1),
    "end_stamp": (CUT_AT_100, 7 / 407, 107 / 407, 1),
    "group_stamp": (
        refitted(5, MIXED, published("s", tokens={"5": 30}), step(6, 5, "g", "s")),
        1.0,
        40 / 60,
        1,
    ),
    "mean_of_groups": (
        refitted(
            4,
            published("old", tokens={"0": 10}),
            published("new", tokens={"4": 990}),
            step(5, 4, "old", "new"),
        ),
        2.0,
        0.04,
        2,
    ),
    "no_queue": (
        [
            *refitted(2, published("g", tokens={"0": 9, "2": 9})),
            *refitted(4)[7:],
            published("h", tokens={"4": 9}),
            step(5, 4, "g", "h"),
        ],
        18 / 27,
        2.0,
        1,
    ),
    "one_baseline": (
        [
            start(),
            published("g", tokens={"0": 9}),
            published("h", tokens={"0": 9}),
            step(1, 0, batches=[[], ["g"]]),
            step(2, 2, batches=[["h"]]),
        ],
        1.0,
        1.5,
        1,
    ),
    "in_refits": (
        [
            start(),
            step(1, 0, updates=4),
            cut(1, version=4),
            done(1, version=4),
            published("g", tokens={"0": 9}),
            step(2, 4, "g"),
        ],
        1.0,
        4.0,
        1,
    ),
    "with_dropped": (
        refitted(
            9,
            published("a", tokens={"8": 5}),
            published("b", tokens={"8": 5}),
            dropped("c", tokens={"0": 5}),
            step(10, 9, "a", "b"),
        ),
        11 / 3,
        1.0,
        5,
    ),
    "missing_as_zero": (
        refitted(8, published("g", tokens={"7": 3}, unknown=2), step(9, 8, "g")),
        (3 * 1 + 16) / 5,
        1.0,
        2,
    ),
    "empty_attempts": (
        refitted(
            5,
            published("g", *ATTEMPTS),
            published("h", *({**c, "call": c["call"] + "h"} for c in ATTEMPTS[:1])),
            step(6, 5, "g", "h"),
            counts={"try": 0},
        ),
        2.0,
        1.0,
        1,
    ),
    "first_pass": (
        [
            start(),
            published("g", tokens={"0": 9}),
            step(1, 0),
            step(2, 1, "g", kept=["g"]),
            step(3, 2, "g", kept=["g"]),
            step(4, 3, "g"),
        ],
        1.0,
        2.0,
        2,
    ),
    "kv_kept": (
        [*SOUND[:3], cut(1, {"c": 30, "z": 0, "o": 1}, kv="kept"), *SOUND[4:]],
        0.3,
        0.3,
        2,
    ),
}


@pytest.mark.parametrize("name", sorted(WHAT.keys() - {"prompts_counted"}))
def test_a_way_to_measure_that_is_off(
    name: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it reads stands next to the truth."""
    lines, reads, true, times = SEQUENCES[name]
    found = examined(file, *lines)
    (contrast,) = [contrast for contrast in found.contrasts if contrast.name == name]
    assert (contrast.reads, contrast.true) == pytest.approx((reads, true))
    assert contrast.times == times
    assert f" {times:,} " in contrast.what or "{}" not in WHAT[name]
    assert f"  {name}: {reads:.3f} instead of {true:.3f}: " in run(capsys, "doctor", str(file))[1]


@pytest.mark.parametrize(
    ("lines", "reads", "times"),
    [
        pytest.param(KEPT + resumed(1) + used(1), 0, 1, id="kept over the resume"),
        pytest.param(
            KEPT + resumed(1) + resumed(1, incarnation=2) + used(1), 0, 1, id="and over another"
        ),
        pytest.param(
            [*KEPT, step(2, 1), *resumed(1), *used(1)], 0, 1, id="trained before what is undone"
        ),
        pytest.param(
            [*KEPT[:2], step(1, 0), step(2, 1, "k", kept=["k"]), *resumed(1), *used(1)],
            None,
            0,
            id="trained in what is undone",
        ),
        pytest.param(
            [*KEPT, *resumed(1)[:1], published("k", tokens={"0": 30}), *used(1)],
            None,
            0,
            id="another group of its name",
        ),
    ],
)
def test_the_age_of_the_first_time_over_a_resume(
    file: Path, lines: list[Line], reads: float | None, times: int
) -> None:
    """It goes on with the group; a rollback of before that time takes it away."""
    found = {contrast.name: contrast for contrast in examined(file, *lines).contrasts}
    contrast = found.get("first_pass")
    if reads is None:
        assert contrast is None
    else:
        assert contrast is not None
        assert (contrast.reads, contrast.true, contrast.times) == (reads, 30 / 60, times)


def test_prompts_that_are_counted(file: Path) -> None:
    """2,000 prompt tokens at the begin's version beside 50 tokens of which 40 are fresh."""
    prompted = published("g", call("c", 50, 0, after=0, until=1), about={"prompt_tokens": 2000})
    lines = refitted(1, prompted, step(2, 1, "g"), counts={"c": 10})
    (contrast,) = [c for c in examined(file, *lines).contrasts if c.name == "prompts_counted"]
    assert (contrast.reads, contrast.true) == pytest.approx((2010 / 2050, 10 / 50))
    assert contrast.times == 1


def test_a_synchronous_run_has_no_contrast(file: Path) -> None:
    """All of them read 0 there, and so does the truth."""
    lines = [start()]
    for n in range(1, 5):
        lines += [published(f"g{n}", tokens={str(n - 1): 9}), step(n, n - 1, f"g{n}")]
        lines += [cut(n), done(n)]
    found = examined(file, *lines, end())
    assert found.contrasts == []
    assert (found.batch_age, names(found)) == (0, set())


def test_what_reads_the_same_is_no_contrast(file: Path) -> None:
    """Every token one update old: only the way without the queue reads another number."""
    lines = [start(), published("g1", tokens={"0": 9}), published("g2", tokens={"0": 5})]
    lines += [step(1, 0), cut(1), done(1), step(2, 1, "g1", "g2"), end()]
    assert {contrast.name for contrast in examined(file, *lines).contrasts} == {"no_queue"}


# The same fold.


def test_the_tokens_of_a_step_are_those_of_the_ledger(tmp_path: Path) -> None:
    """Group by group they add up to the numbers of every step of made-up runs."""
    for seed in range(4):
        path = tmp_path / f"{seed}.jsonl"
        write_trace(path, steps=20, seed=seed, blind=0.3, abort=0.1, updates=1 + seed % 2)
        ledger = Ledger()
        for event in read(path):
            groups = list(groups_of(event, ledger)) if isinstance(event, StepTrained) else []
            numbers = ledger.apply(event)
            if numbers is None:
                continue
            ages: dict[int, int] = {}
            for at, group in groups:
                for version, count in group.trained.items():
                    ages[at - version] = ages.get(at - version, 0) + count
            assert {age: n for age, n in sorted(ages.items()) if n} == numbers.tokens_by_age


def test_a_run_through_the_hooks_is_sound(tmp_path: Path) -> None:
    """With aborted refits and blind cuts there are bounds, and nothing is broken."""
    path = tmp_path / "rollout_trace.jsonl"
    write_trace(path, steps=40, blind=0.2, abort=0.2, seed=5)
    found = doctor.examine(path)
    assert found.broken == []
    assert found.steps == 40
    assert "refit_without_cut" in names(found)


# Machines, terminals, wrong files.


def test_json_is_one_object(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With what each name means, and the accounts."""
    status, out, _ = run(capsys, "doctor", str(write(file, *BREAKS["negative_age"][0])), "--json")
    assert (status, out.count("\n")) == (1, 1)
    said: dict[str, Any] = json.loads(out)
    assert said["sound"] is False
    (broken,) = said["broken"]
    entry = BROKEN["negative_age"]
    assert broken["name"] == "negative_age"
    assert (broken["lines"], broken["times"]) == ([3], 1)
    assert (broken["meaning"], broken["cause"], broken["way_out"]) == (
        entry.meaning,
        entry.cause,
        entry.way_out,
    )
    assert said["balance"]["trained"] == {"tokens": 5, "mean_age": -3.0}
    status, out, _ = run(capsys, "doctor", str(write(file, *SOUND)), "--json")
    assert (status, json.loads(out)["sound"]) == (0, True)


HOSTILE = "\x1b[31mred\x9b2J\u202e\x00\r\nforged: line\x7f"


def hostile() -> Iterator[Line]:
    """Every name of a trace is hostile."""
    yield start(run=HOSTILE, engines={HOSTILE: 0, "e": 0})
    yield published(HOSTILE, call(HOSTILE, 5, 7, engine=HOSTILE))
    yield step(1, 0, HOSTILE, "no" + HOSTILE)
    yield dropped("d" + HOSTILE, reason=HOSTILE, tokens={"0": 5})
    yield violation(HOSTILE, HOSTILE)
    yield cut(1, {HOSTILE: 3}, engine=HOSTILE)
    yield aborted(1, engine=HOSTILE)
    yield end(HOSTILE)


@pytest.mark.parametrize("option", [[], ["--json"]])
@pytest.mark.parametrize("command", ["doctor", "lens", "steps"])
def test_hostile_names_do_not_reach_the_terminal(
    command: str, option: list[str], file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No control character, no line that a name has made."""
    _, out, err = run(capsys, command, str(write(file, *hostile())), *option)
    for text in (out, err):
        odd = {c for c in text if unicodedata.category(c)[0] == "C" and c != "\n"}
        assert odd == set()
        assert not [row for row in text.splitlines() if row.startswith("forged")]
    if command == "doctor" and option:
        assert HOSTILE in json.loads(out)["run"]


@pytest.mark.parametrize("command", ["doctor", "lens", "steps"])
def test_a_hostile_field_does_not_reach_the_terminal(
    command: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor does one that is named in an error."""
    status, out, err = run(capsys, command, str(write(file, {**start(), HOSTILE: 1})))
    assert (status, out, len(err.splitlines())) == (2, "", 1)
    assert not {c for c in err if unicodedata.category(c)[0] == "C" and c != "\n"}


def test_an_unreadable_trace(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 2 and one line, also where what came before is broken."""
    write(file, *BREAKS["negative_age"][0], {"event": "nonsense", "time": 1.0})
    status, out, err = run(capsys, "doctor", str(file))
    assert (status, out, len(err.splitlines())) == (2, "", 1)
    assert run(capsys, "doctor", str(file.with_name("none")))[0] == 2
