"""What the picture of a run says beyond its size: axes, bounds, names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rl_staleness import Call, StalenessCallback
from rl_staleness.events import LARGEST
from rl_staleness.plot import plot
from rl_staleness.report import title
from rl_staleness.view import RunView, look_at
from tests.lines import Line, call, cut, done, dropped, published, run, start, step, write
from tests.traces import write_trace

pytest.importorskip("matplotlib", reason="the picture is drawn with Matplotlib")


@pytest.fixture
def figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Draws the trace at a path and returns Matplotlib's figure."""

    def draw(trace: Path) -> Any:
        drawn: list[Any] = []
        monkeypatch.setattr("rl_staleness.plot._saved", lambda figure: drawn.append(figure) or b"")
        plot(trace)
        return drawn[0]

    return draw


def lines(axis: Any) -> dict[str, list[float]]:
    return {line.get_label(): list(line.get_ydata()) for line in axis.lines}


def test_the_bounds_are_drawn_where_versions_are_not_known(tmp_path: Path, figure: Any) -> None:
    """The least and the most that the mean can be, step by step; none in a run that is covered."""
    write_trace(tmp_path / "blind.jsonl", steps=20, blind=0.5)
    write_trace(tmp_path / "seen.jsonl", steps=20)
    drawn = lines(figure(tmp_path / "blind.jsonl").axes[0])
    rows = look_at(tmp_path / "blind.jsonl").rows
    assert drawn["bounds of the mean"] == [row.numbers.age_lo for row in rows]
    assert [row.numbers.age_hi for row in rows] in list(drawn.values())
    assert "bounds of the mean" not in lines(figure(tmp_path / "seen.jsonl").axes[0])


def test_an_age_of_0_stands_on_the_axis(tmp_path: Path, figure: Any) -> None:
    """Synchronous training is a line at 0 below an empty axis, not noise around it."""
    path = tmp_path / "trace.jsonl"
    with StalenessCallback(trace=path, sinks=[]) as staleness:
        for step in range(3):
            call = Call(call="c", engine="e", version=step, after=step, until=step, tokens=9)
            staleness.on_publish(f"g{step}", calls=[call])
            staleness.on_step([f"g{step}"])
            staleness.on_refit_paused(engines=["e"], cuts={"e": {}})
            staleness.on_refit_done(engines=["e"])
    axes = figure(path).axes
    assert lines(axes[0])["batch age"] == [0, 0, 0]
    assert axes[0].get_ylim() == (-0.05, 1.05)
    assert axes[2].get_legend_handles_labels()[1] == ["trained"], "nothing was dropped"


@pytest.mark.parametrize(
    ("run", "shown"),
    [
        ("0123456789abcdef0123456789abcdef", "Staleness of run 01234567"),
        ("max-staleness-4", "Staleness of max-staleness-4"),
        ("0123456789abcdef", "Staleness of 0123456789abcdef"),
    ],
)
def test_a_name_that_nobody_gave_is_short(run: str, shown: str) -> None:
    """What a run is called by default fills half a line and tells nobody anything."""
    assert title(RunView(run=run)) == shown


HUGE: dict[str, list[Line]] = {
    "tokens of a step": [
        start(),
        published("g", tokens={"0": LARGEST}),
        published("h", tokens={"0": LARGEST}),
        step(1, 0, "g", "h"),
    ],
    "tokens of a call": [
        start(),
        cut(1, {"c": 1, "d": LARGEST}),
        published("g", call("c", LARGEST, 0), call("d", LARGEST, 0)),
        step(1, 0, "g"),
        done(1),
    ],
    "unknown tokens": [
        start(),
        published("g", tokens={"0": 5}, unknown=LARGEST),
        step(1, 0, "g"),
    ],
    "tokens of many steps": [
        start(),
        *(published(f"g{n}", tokens={"0": LARGEST}) for n in range(900)),
        *(step(n + 1, n, f"g{n}") for n in range(900)),
    ],
    "dropped tokens": [
        start(),
        published("g", tokens={"0": 5}),
        dropped("h", tokens={"0": LARGEST}),
        dropped("i", tokens={"0": LARGEST}),
        step(1, 0, "g"),
    ],
    "versions": [
        start(version=LARGEST - 2),
        published("g", tokens={str(LARGEST - 2): 5}),
        step(1, LARGEST - 2, "g"),
        published("h", tokens={str(LARGEST - 1): 5}),
        step(2, LARGEST - 1, "h"),
    ],
    "ages": [
        start(),
        published("g", tokens={"0": 5}),
        step(1, 0, "g", updates=LARGEST),
        published("h", tokens={"0": LARGEST, str(LARGEST): LARGEST}),
        step(2, LARGEST, "h", updates=LARGEST),
    ],
    "negative ages": [
        start(),
        published("g", tokens={"0": LARGEST, str(LARGEST): LARGEST}),
        step(1, 0, "g"),
    ],
    "numbers of steps": [
        start(number=LARGEST - 1),
        published("g", tokens={"0": 5}),
        step(LARGEST - 1, 0, "g"),
        published("h", tokens={"0": 5}),
        step(LARGEST, 1, "h"),
    ],
    "a gap of steps": [
        start(),
        published("g", tokens={"0": 5}),
        step(1, 0, "g"),
        published("h", tokens={"0": 5}),
        step(LARGEST, 1, "h"),
    ],
}
"""What a trace may hold and an integer of the C language may not, once it is added up."""


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("trace", HUGE.values(), ids=HUGE.keys())
def test_numbers_of_any_size_are_drawn(
    trace: list[Line], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit 0, a picture, and not a word of warning."""
    path, out = write(tmp_path / "trace.jsonl", *trace), tmp_path / "out.png"
    assert run(capsys, "plot", str(path), "-o", str(out)) == (0, "", f"wrote {out}\n")
    assert out.read_bytes().startswith(b"\x89PNG")


def test_huge_numbers_stand_where_they_belong(tmp_path: Path, figure: Any) -> None:
    """Tokens, versions and steps are those of the trace, as floats tell them."""
    axes = figure(write(tmp_path / "tokens.jsonl", *HUGE["tokens of a step"])).axes
    assert [bar.get_height() for bar in axes[2].patches] == [2.0**64]
    axes = figure(write(tmp_path / "dropped.jsonl", *HUGE["dropped tokens"])).axes
    bars = [(bar.get_y(), bar.get_height()) for bar in axes[2].patches]
    assert bars == [(0, 5), (5, 2.0**64)]
    axes = figure(write(tmp_path / "versions.jsonl", *HUGE["versions"])).axes
    assert [list(line.get_ydata()) for line in axes[1].lines] == [[2.0**63] * 2]
    axes = figure(write(tmp_path / "steps.jsonl", *HUGE["numbers of steps"])).axes
    low, high = axes[3].get_xlim()
    assert low < 2.0**63 < high
    axes = figure(write(tmp_path / "few.jsonl", *HUGE["ages"])).axes
    assert axes[3].get_xlim() == (0, 3)
