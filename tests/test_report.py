"""The report, the picture and the comparison: right numbers, nothing from outside, any trace."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rl_staleness import Call, StalenessCallback, steps
from rl_staleness.cli import main
from rl_staleness.compare import COLUMNS
from rl_staleness.page import as_json, clean, plotly_js
from rl_staleness.plot import INCHES, PIXELS_PER_INCH, plot
from rl_staleness.report import report
from rl_staleness.staleness import StepStaleness
from rl_staleness.view import MOST, look_at
from tests.fakes import FakeEngine
from tests.traces import write_trace

pytest.importorskip("plotly", reason="the report is drawn with Plotly")

HOSTILE = (
    '</script><img src=x onerror="document.documentElement.dataset.owned=1">\'%{x}\u2028\x1b[31m'
)
SMALL: dict[str, Any] = {
    "engines": ("engine-0", "engine-1"),
    "slots": 4,
    "group_size": 2,
    "groups_per_step": 3,
}


def figures_of(page: str) -> dict[str, Any]:
    """The charts as the page holds them."""
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', page)
    assert found is not None
    figures: dict[str, Any] = json.loads(found[1])
    return figures


def traces_of(page: str, chart: str) -> dict[str, Any]:
    """The series of one chart by name."""
    return {trace.get("name", ""): trace for trace in figures_of(page)[chart]["data"]}


def words_of(page: str) -> str:
    """The text of the page, without tags, scripts and styles."""
    text = re.sub(r"<(script|style).*?</\1>", "", page, flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]*>", " ", text).split())


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 60 steps with drops, aborted refits, and calls that are not covered."""
    path = tmp_path_factory.mktemp("run") / "rollout_trace.jsonl"
    write_trace(path, steps=60, blind=0.03, abort=0.05, max_age=4.0, contradictions=2)
    return path


@pytest.fixture(scope="module")
def html(trace: Path) -> str:
    """Its report."""
    return report(trace)


@pytest.fixture(scope="module")
def long_trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 2,000 steps."""
    path = tmp_path_factory.mktemp("long") / "rollout_trace.jsonl"
    write_trace(path, steps=2000, mean_tokens=100, blind=0.002, max_age=4.0, **SMALL)
    return path


def test_the_made_up_run_has_what_the_pictures_have_to_show(trace: Path) -> None:
    """Ages that move, both parts of them, drops, uncovered tokens, violations, aborted refits."""
    numbers = list(steps(trace))
    assert len(numbers) == 60
    assert len({s.batch_age for s in numbers}) > 30
    assert all(sum(getattr(s, part) or 0 for s in numbers) > 5 for part in PARTS)
    assert any(s.dropped_tokens for s in numbers)
    assert any(s.coverage is not None and s.coverage < 1 for s in numbers)
    assert sum(s.violations for s in numbers) == 2
    assert sum(look_at(trace).aborted.values()) > 0


PARTS = ("age_in_flight", "age_in_queue")


@pytest.mark.parametrize(
    ("chart", "series", "name"),
    [
        ("age", "batch age (mean)", "batch_age"),
        ("age", "in flight", "age_in_flight"),
        ("age", "in queue", "age_in_queue"),
        ("age", "p50", "age_p50"),
        ("age", "p50 to p95 of token age", "age_p95"),
        ("age", "bounds of the mean", "age_lo"),
        ("age", "age_hi", "age_hi"),
        ("tokens", "trained", "tokens"),
    ],
)
def test_the_charts_hold_the_numbers_of_the_steps(
    trace: Path, html: str, chart: str, series: str, name: str
) -> None:
    """Every point is the number that `steps` recomputes, to the last digit, at its step."""
    drawn = traces_of(html, chart)[series]
    expected = [(s.step, getattr(s, name)) for s in steps(trace)]
    assert list(zip(drawn["x"], drawn["y"], strict=True)) == expected


def test_coverage_is_drawn_in_percent_with_a_cross_at_each_violation(
    trace: Path, html: str
) -> None:
    """A step whose coverage is not known has no point of the line, but its cross."""
    drawn = traces_of(html, "coverage")
    numbers = list(steps(trace))
    assert drawn["coverage"]["y"] == [
        None if s.coverage is None else 100 * s.coverage for s in numbers
    ]
    assert drawn["violations"]["x"] == [s.step for s in numbers if s.violations] == [30, 60]
    assert "step 30: 1 violation" in drawn["violations"]["text"]


def test_the_heat_map_holds_each_steps_shares_by_version_and_by_age(trace: Path, html: str) -> None:
    """Cells are shares of the step's tokens; a version that sampled none has an empty cell."""
    by_version, by_age, line = figures_of(html)["versions"]["data"]
    numbers = list(steps(trace))
    for drawn, name in ((by_version, "tokens_by_version"), (by_age, "tokens_by_age")):
        assert drawn["x"] == [step + 0.5 for step in range(61)]
        for column, step in enumerate(numbers):
            counts = getattr(step, name)
            cells = {
                drawn["y"][row] + 0.5: cells[column]
                for row, cells in enumerate(drawn["z"])
                if cells[column] is not None
            }
            total = sum(counts.values())
            assert cells == {value: count / total for value, count in counts.items()}
    assert line["y"] == [s.version for s in numbers]
    assert (by_version["visible"], by_age["visible"]) == (True, False)


def events_of(path: Path, kind: str) -> list[dict[str, Any]]:
    lines = (json.loads(line) for line in path.read_text().splitlines())
    return [line for line in lines if line["event"] == kind]


def test_refits_stand_between_the_steps_with_their_pauses(trace: Path, html: str) -> None:
    """Engine-seconds by engine add up to what the refit_done lines say; aborted ones are marked."""
    drawn = traces_of(html, "refits")
    aborted = drawn.pop("aborted")
    expected: Counter[str] = Counter()
    for event in events_of(trace, "refit_done"):
        expected[event["engine"]] += event["pause_seconds"]
    assert {name: sum(bar["y"]) for name, bar in drawn.items()} == pytest.approx(expected)
    assert drawn["engine-0"]["x"] == [step + 0.5 for step in range(1, 61)]
    assert len(events_of(trace, "refit_aborted")) >= len(aborted["x"]) > 0
    assert "engine-" in aborted["text"][0] and "broadcast timed out" in aborted["text"][0]
    rug = traces_of(html, "age")["refits"]
    assert rug["x"] == drawn["engine-0"]["x"]
    assert re.match(r"3 refits to version 2<br>engine-0 paused \d+\.\d\d s<br>", rug["text"][1])


def test_dropped_tokens_are_drawn_by_reason_with_their_ages(trace: Path, html: str) -> None:
    """Bars add up to the dropped tokens of each step; ages are those at the drop."""
    drawn = traces_of(html, "tokens")
    bars = [trace["y"] for name, trace in drawn.items() if name.startswith("dropped: ")]
    numbers = list(steps(trace))
    assert set(drawn) == {"trained", "dropped: all rewards equal", "dropped: older than 4 updates"}
    assert [sum(heights) for heights in zip(*bars, strict=True)] == [
        s.dropped_tokens for s in numbers
    ]
    view = look_at(trace)
    trained, dropped = figures_of(html)["ages"]["data"]
    assert dropped["name"] == f"dropped ({view.dropped_tokens:,} tokens)"
    ages: Counter[int] = Counter()
    for step in numbers:
        ages.update(step.tokens_by_age)
    share = [100 * ages[age] / ages.total() for age in trained["x"]]
    assert trained["y"] == pytest.approx(share)
    assert sum(dropped["y"]) == pytest.approx(100)


def test_the_age_of_a_dropped_token_is_the_policys_version_then_minus_its_own(
    tmp_path: Path,
) -> None:
    """Published or not: 30 tokens of version 0 dropped when the policy has version 2 are 2 old."""
    path = tmp_path / "trace.jsonl"
    lines: list[dict[str, Any]] = [
        {
            "event": "run_started",
            "schema": 1,
            "run": "r",
            "incarnation": 0,
            "version": 0,
            "step": 1,
        },
        {"event": "group_published", "group": "waits", "tokens": {"0": 30}},
        {"event": "step_trained", "step": 1, "version": 0, "groups": [], "updates": 2},
        {"event": "group_dropped", "group": "waits", "reason": "old"},
        {
            "event": "group_dropped",
            "group": "never published",
            "reason": "filtered",
            "tokens": {"0": 5},
            "calls": [
                {
                    "call": "c",
                    "engine": "e",
                    "version": 0,
                    "after": 0,
                    "until": 0,
                    "tokens": 9,
                    "trained": [[2, 6]],
                }
            ],
        },
        {"event": "step_trained", "step": 2, "version": 2, "groups": []},
    ]
    path.write_text("".join(json.dumps({"time": 1.0, **line}) + "\n" for line in lines))
    (_, row) = look_at(path).rows
    assert row.before.dropped == {"old": 30, "filtered": 9}
    assert row.before.dropped_ages == {2: 39}
    assert row.numbers.dropped_tokens == 39


def test_the_header_says_what_the_run_looks_like(trace: Path, html: str) -> None:
    """Mean over tokens, first and last step, coverage, dropped share, violations."""
    numbers = list(steps(trace))
    aged = [(s.batch_age or 0) * sum(s.tokens_by_age.values()) for s in numbers]
    mean = sum(aged) / sum(sum(s.tokens_by_age.values()) for s in numbers)
    known = [s for s in numbers if s.coverage is not None]
    coverage = sum((s.coverage or 0) * s.tokens for s in known) / sum(s.tokens for s in known)
    view = look_at(trace)
    dropped = view.dropped_tokens / (view.dropped_tokens + sum(s.tokens for s in numbers))
    assert (
        f"The average trained token was {mean:.2f} policy updates old ({numbers[0].batch_age:.2f} "
        f"at the first step, {numbers[-1].batch_age:.2f} at the last); {coverage:.1%}".replace(
            "%", " %"
        )
        + " of the sampling versions are known exactly (so the average is between "
        f"{weighted(numbers, 'age_lo'):.2f} and {weighted(numbers, 'age_hi'):.2f}), "
        f"{100 * dropped:.1f} % of all tokens were dropped, 2 violations."
    ) in words_of(html)
    assert weighted(numbers, "age_lo") < mean <= weighted(numbers, "age_hi")
    assert "not known at 2 steps" in words_of(html)
    never = "unknown_group group &#x27;never published&#x27;: not published, or used up"
    assert f"{never} 2 30" in words_of(html)


def weighted(numbers: list[StepStaleness], name: str) -> float:
    known = [(getattr(s, name), s.tokens) for s in numbers if getattr(s, name) is not None]
    return float(sum(value * tokens for value, tokens in known) / sum(n for _, n in known))


def test_ten_violations_are_ten(tmp_path: Path) -> None:
    """The sentence says "no violations" for none only."""
    path = tmp_path / "t.jsonl"
    with StalenessCallback(trace=path) as staleness:
        for _ in range(10):
            staleness.on_step(["never published"])
    assert "dropped, 10 violations." in words_of(report(path))


def test_a_coverage_that_is_nearly_whole_is_not_called_whole(tmp_path: Path) -> None:
    """One uncertain token in a million is not 100 %."""
    with StalenessCallback(trace=tmp_path / "t.jsonl") as staleness:
        call = Call(call="c", engine="e", version=0, after=0, until=0, tokens=999_999)
        staleness.on_publish("g", calls=[call], unknown=1)
        staleness.on_step(["g"])
    assert ">99.9 % of the sampling versions" in words_of(report(tmp_path / "t.jsonl"))


# Long runs.


def test_a_long_run_is_drawn_in_stretches_whose_tokens_are_added_up(long_trace: Path) -> None:
    """Five steps a point: sums of tokens, never means of means; and the page says so."""
    page = report(long_trace)
    numbers = list(steps(long_trace))
    parts = [numbers[at : at + 5] for at in range(0, 2000, 5)]
    assert len(parts) == MOST
    drawn = traces_of(page, "age")["batch age (mean)"]
    assert drawn["x"] == [part[2].step for part in parts]
    assert drawn["y"] == pytest.approx([mean_age(part) for part in parts], rel=1e-12)
    unweighted = [sum(s.batch_age or 0 for s in part) / 5 for part in parts]
    assert drawn["y"] != pytest.approx(unweighted, rel=1e-3)
    p95 = traces_of(page, "age")["p50 to p95 of token age"]["y"]
    assert p95 == [quantile(part, 0.95) for part in parts]
    assert traces_of(page, "tokens")["trained"]["y"] == [sum(s.tokens for s in p) for p in parts]
    assert "tokens in 5 steps" in json.dumps(figures_of(page)["tokens"]["layout"])
    by_version, by_age, _ = figures_of(page)["versions"]["data"]
    assert (by_version["visible"], by_age["visible"]) == (False, True)
    for heat in (by_version, by_age):
        assert len(heat["z"]) <= MOST and all(len(row) == MOST for row in heat["z"])
        sums = [sum(cell or 0 for cell in column) for column in zip(*heat["z"], strict=True)]
        assert sums == pytest.approx([1.0] * MOST)
    assert words_of(page).count("One point is 5 steps, their tokens added up.") == 5


def mean_age(part: list[StepStaleness]) -> float:
    by_age: Counter[int] = Counter()
    for step in part:
        by_age.update(step.tokens_by_age)
    return sum(age * count for age, count in by_age.items()) / by_age.total()


def quantile(part: list[StepStaleness], share: float) -> int:
    ages = sorted(age for s in part for age, n in s.tokens_by_age.items() for _ in range(n))
    return ages[-(-int(len(ages) * share * 100) // 100) - 1]


def test_a_long_run_takes_a_bounded_size(long_trace: Path) -> None:
    """The charts are small beside plotly.js."""
    assert len(report(long_trace)) - len(plotly_js()) < 2_000_000


# Runs with little in them.


def test_an_empty_run_has_a_report_and_a_picture(tmp_path: Path) -> None:
    """No step yet: the page says so, and draws nothing."""
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"event":"run_started","time":1.0,"schema":1,"run":"r","incarnation":0,"version":0,"step":1}\n'
    )
    page = report(path)
    assert "No step has been trained yet." in words_of(page)
    assert "still open" in words_of(page)
    assert figures_of(page) == {}
    assert png_size(plot(path)) == picture_size()


def test_one_step_is_drawn_with_marks(tmp_path: Path) -> None:
    """A line needs two points; one step is shown all the same."""
    path = tmp_path / "trace.jsonl"
    write_trace(path, steps=1, **SMALL)
    page = report(path)
    drawn = traces_of(page, "age")["batch age (mean)"]
    assert (drawn["x"], drawn["y"]) == ([1], [0.0])
    assert "markers" in drawn["mode"]
    assert "was sampled by the policy that the step updated: batch age 0; 100 %" in words_of(page)
    assert png_size(plot(path)) == picture_size()


def test_a_run_without_tokens_is_drawn_without_ages(tmp_path: Path) -> None:
    """Steps that train nothing have no age: nothing is divided by 0, nothing is called 0."""
    path = tmp_path / "trace.jsonl"
    with StalenessCallback(trace=path, run="r") as staleness:
        for _ in range(3):
            staleness.on_step([])
    page = report(path)
    assert traces_of(page, "age")["batch age (mean)"]["y"] == [None] * 3
    assert traces_of(page, "coverage")["coverage"]["y"] == [None] * 3
    assert (
        "3 steps trained no token; coverage is not known, nothing was dropped, no violations."
    ) in words_of(page)
    assert png_size(plot(path)) == picture_size()


def test_steps_that_a_resume_made_again_are_shown_once(tmp_path: Path) -> None:
    """The run went back behind steps 2 and 3: what was made anew stands, and the page says so."""
    path = tmp_path / "trace.jsonl"
    for first, last in ((1, 3), (2, 4)):
        with StalenessCallback(trace=path, run="r", step=first, version=first - 1) as staleness:
            for _ in range(first, last + 1):
                staleness.on_step([])
    page = report(path)
    assert traces_of(page, "age")["batch age (mean)"]["x"] == [1, 2, 3, 4]
    assert "A resume went back behind 2 steps" in words_of(page)
    assert "resumed 1 time" in words_of(page)


def test_steps_that_the_run_skipped_leave_a_hole_in_the_heat_map(tmp_path: Path) -> None:
    """A column is as wide as its step, also beside a gap."""
    path = tmp_path / "trace.jsonl"
    with StalenessCallback(trace=path, run="r") as staleness:
        staleness.on_step([], step=1)
        staleness.on_step([], step=5)
    x = figures_of(report(path))["versions"]["data"][0]["x"]
    assert x == [0.5, 1.5, 4.5, 5.5]


def test_huge_numbers_of_a_trace_are_drawn(tmp_path: Path) -> None:
    """Versions, steps and times at the ends of what a trace may hold."""
    path = tmp_path / "trace.jsonl"
    lines: list[dict[str, Any]] = [
        {
            "event": "run_started",
            "schema": 1,
            "run": "r",
            "incarnation": 0,
            "version": 2**62,
            "step": 2**62,
        },
        {"event": "group_published", "group": "g", "tokens": {"0": 2**62, "1000000": 1}},
        {"event": "step_trained", "step": 2**62, "version": 2**62, "groups": ["g"]},
    ]
    path.write_text("".join(json.dumps({"time": 1e300, **line}) + "\n" for line in lines))
    page = report(path)
    assert len(figures_of(page)["versions"]["data"][0]["z"]) <= MOST
    assert len(page) - len(plotly_js()) < 1_000_000
    assert png_size(plot(path)) == picture_size()


# Nothing from outside, nothing to the outside.


def outside_plotly(page: str) -> str:
    assert page.count(plotly_js()) == 1
    return page.replace(plotly_js(), "")


def test_the_page_needs_nothing_else(html: str) -> None:
    """No address outside plotly.js, no element that loads anything, and a policy against it."""
    own = outside_plotly(html)
    assert not re.search(r"https?:|//cdn|@import|url\(", own)
    assert not re.search(r"<(link|img|iframe|object|embed|base|form)\b", own)
    assert not re.search(r"<[^>]*\b(src|href|action|on\w+)=", own)
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', own)
    assert policy is not None
    assert policy[1].startswith("default-src 'none'; script-src 'sha256-")
    assert "connect-src" not in policy[1] and "unsafe-eval" not in policy[1]
    assert "'unsafe-inline'" not in policy[1].split("style-src")[0]


def test_plotly_is_told_to_send_nothing(html: str) -> None:
    """plotly.js has a button that uploads the chart, unless it is told not to."""
    own = outside_plotly(html)
    assert "showSendToCloud: false" in own and 'plotlyServerURL: ""' in own
    assert "modeBarButtons:" in own


def hostile_trace(path: Path) -> Path:
    """A run whose names are all an attack on the page."""
    with StalenessCallback(
        engines=[FakeEngine(HOSTILE, counts={HOSTILE: 1})], trace=path, run=HOSTILE
    ) as staleness:
        for _ in range(3):
            with staleness.group(HOSTILE) as group:
                pass
            staleness.on_publish(group, unknown=4)
            staleness.on_step([group, f"unknown {HOSTILE}"])
            staleness.on_refit_paused()
            staleness.on_refit_done()
            with staleness.group(f"2{HOSTILE}") as group:
                pass
            staleness.on_publish(group, unknown=4)
            staleness.on_drop(group, reason=HOSTILE)
            staleness.on_refit_paused()
            staleness.on_refit_aborted(reason=HOSTILE)
        staleness.close(HOSTILE)
    return path


def test_names_in_a_trace_cannot_become_elements_or_scripts(tmp_path: Path) -> None:
    """Every name is hostile: the page holds the elements of a page with harmless names."""
    page = report(hostile_trace(tmp_path / "trace.jsonl"))
    own = outside_plotly(page)
    assert own.count("onerror") >= 5, "the names are shown"
    assert "<img" not in own
    assert own.count("<script") == own.count("</script") == 3
    assert "\x1b" not in own and "\u2028" not in own
    names = [trace["name"] for trace in figures_of(page)["refits"]["data"]]
    assert names[0].startswith("&lt;/script&gt;&lt;img"), "plotly.js reads a little HTML itself"


def test_json_in_the_page_cannot_end_its_element() -> None:
    """Whatever a string holds, it is read back, and no tag begins in it."""
    text = as_json({"</script><!--&\u2028": 1})
    assert json.loads(text) == {"</script><!--&\u2028": 1}
    assert not set(text) & set("<>&\u2028")


def strings_of(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for each in (*value, *value.values()):
            yield from strings_of(each)
    elif isinstance(value, list):
        for each in value:
            yield from strings_of(each)


def test_no_text_of_a_chart_holds_elements_of_names(tmp_path: Path) -> None:
    """Texts and labels of charts are read as a little HTML: names are escaped in all of them."""
    texts = list(strings_of(figures_of(report(hostile_trace(tmp_path / "trace.jsonl")))))
    assert sum("onerror" in text for text in texts) >= 6
    assert not [text for text in texts if "<img" in text]


def test_names_are_not_put_where_plotly_expands_templates(tmp_path: Path) -> None:
    """``%{x}`` in a name stays what it is."""
    figures = figures_of(report(hostile_trace(tmp_path / "trace.jsonl")))
    templates = [t.get("hovertemplate", "") for f in figures.values() for t in f["data"]]
    assert not [template for template in templates if "onerror" in template]


@pytest.mark.parametrize("name", ["\x1b[2J", "a\u202eb", "a\nb", "x" * 500, "", "\ud7ff", "$x^2$"])
def test_a_clean_name_is_one_short_line(name: str) -> None:
    """Control characters, direction marks and length are taken away, no more."""
    shown = clean(name)
    assert shown.isprintable() and len(shown) <= 60


def test_plotly_knows_every_property_that_is_used(html: str) -> None:
    """Plotly's own validators take each chart."""
    from plotly.graph_objects import Figure

    for name, figure in figures_of(html).items():
        drawn = Figure(data=figure["data"], layout=figure["layout"])
        assert len(drawn.data) == len(figure["data"]), name


# The picture.


def png_size(png: bytes) -> tuple[int, int]:
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", png[16:24])
    return width, height


def picture_size() -> tuple[int, int]:
    return tuple(int(inches * PIXELS_PER_INCH) for inches in INCHES)  # type: ignore[return-value]


def test_the_picture_has_its_size_and_its_colours(trace: Path) -> None:
    """A PNG of 1200 by 900 with both parts of the age, trained and dropped tokens in it."""
    pytest.importorskip("matplotlib")
    from rl_staleness.page import DROPPED, IN_FLIGHT, IN_QUEUE, TRAINED

    png = plot(trace)
    assert png_size(png) == picture_size() == (1200, 900)
    colours = colours_of(png)
    for colour in (IN_FLIGHT, IN_QUEUE, TRAINED, DROPPED):
        assert colours[colour] > 50, colour


def colours_of(png: bytes) -> Counter[str]:
    import io

    image = pytest.importorskip("PIL.Image").open(io.BytesIO(png)).convert("RGB")
    counts = image.getcolors(maxcolors=1 << 24)
    return Counter({"#{:02x}{:02x}{:02x}".format(*rgb): count for count, rgb in counts})


def test_the_picture_of_hostile_names_is_drawn_without_a_word(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """Names with dollar signs are no formulas, and glyphs that are missing are no warning."""
    path = tmp_path / "trace.jsonl"
    with StalenessCallback(trace=path, run="$\\frac{1$ 组") as staleness:
        staleness.on_step([])
    assert png_size(plot(path)) == picture_size()
    assert not recwarn.list


# Side by side.


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Three runs: a file, a directory, and a directory with a compressed trace."""
    for at, name in enumerate(("a", "b", "c")):
        (tmp_path / name).mkdir()
        path = tmp_path / name / "rollout_trace.jsonl"
        write_trace(path, steps=12, seed=at, updates=at + 1, run=f"run-{name}", **SMALL)
    packed = tmp_path / "c" / "rollout_trace.jsonl"
    (tmp_path / "c" / "rollout_trace.jsonl.gz").write_bytes(gzip.compress(packed.read_bytes()))
    packed.unlink()
    return tmp_path


def test_the_comparison_prints_a_table_and_writes_an_overlay(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Table values are those of the steps; the overlay has each run on steps and on tokens."""
    monkeypatch.chdir(runs)
    assert main(["compare", "a/rollout_trace.jsonl", "b", "c", "-o", "o.html"]) == 0
    printed = capsys.readouterr()
    assert printed.err == f"wrote {runs / 'o.html'}\n"
    header, *lines = printed.out.splitlines()
    assert tuple(header.split()) == COLUMNS
    page = (runs / "o.html").read_text()
    files = ("a/rollout_trace.jsonl", "b/rollout_trace.jsonl", "c/rollout_trace.jsonl.gz")
    for at, (line, file) in enumerate(zip(lines, files, strict=True)):
        numbers = list(steps(file))
        row = dict(zip(COLUMNS, line.replace(" %", "%").split(), strict=True))
        assert row["steps"] == "12" and row["updates"] == str(12 * (at + 1))
        assert row["tokens"] == f"{sum(s.tokens for s in numbers):,}"
        assert row["batch_age"] == f"{mean_age(numbers):.3f}"
        assert row["last"] == f"{numbers[-1].batch_age:.3f}"
        assert row["p95"] == str(quantile(numbers, 0.95))
        assert row["max"] == str(max(s.age_max or 0 for s in numbers))
        assert row["coverage"] == "100%" and row["violations"] == "0"
        over_steps, over_tokens = (figures_of(page)[c]["data"][at] for c in ("steps", "trained"))
        assert over_steps["y"] == over_tokens["y"] == [s.batch_age for s in numbers]
        assert over_steps["x"] == [s.step for s in numbers]
        total = 0
        assert over_tokens["x"] == [total := total + s.tokens for s in numbers]
    looks = {(d["line"]["color"], d["line"]["dash"]) for d in figures_of(page)["steps"]["data"]}
    assert len(looks) == 3
    assert "policy updates" in json.dumps(figures_of(page)["steps"]["layout"])


def test_the_same_run_twice_is_two_lines(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names tell the sources apart."""
    source = str(runs / "a")
    assert main(["compare", source, source, "-o", str(runs / "o.html")]) == 0
    first, second = capsys.readouterr().out.splitlines()[1:]
    assert first.split()[1:] == second.replace(" (2)", "").split()[1:]
    assert " (2)" in second


def test_the_overlay_of_hostile_names_holds_no_elements_of_theirs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names of runs and of files are input from outside."""
    folder = tmp_path / "<img src=x onerror=1>"
    folder.mkdir()
    hostile_trace(folder / "rollout_trace.jsonl")
    hostile_trace(tmp_path / "rollout_trace.jsonl")
    output = tmp_path / "o.html"
    assert main(["compare", str(folder), str(tmp_path), "-o", str(output)]) == 0
    assert "<img" not in outside_plotly(output.read_text())
    assert "\x1b" not in capsys.readouterr().out


# The commands.


def test_report_and_plot_write_the_file_that_is_named(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit 0; where the file is stands on stderr."""
    assert main(["report", str(trace), "-o", str(tmp_path / "r.html")]) == 0
    assert main(["plot", str(trace), "--output", str(tmp_path / "p.png")]) == 0
    assert capsys.readouterr().err == f"wrote {tmp_path / 'r.html'}\nwrote {tmp_path / 'p.png'}\n"
    assert (tmp_path / "r.html").read_text() == report(trace)
    assert png_size((tmp_path / "p.png").read_bytes()) == picture_size()


def test_only_a_page_or_a_picture_is_written_over(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The trace, most of all, is all that a run has left."""
    text, content = tmp_path / "notes.txt", trace.read_bytes()
    text.write_text("mine")
    for there in (trace, text):
        for command in (
            ["report", str(trace)],
            ["plot", str(trace)],
            ["compare", *[str(trace)] * 2],
        ):
            assert main([*command, "-o", str(there)]) == 2
            said = capsys.readouterr()
            told = f"rl-staleness: -o: {there} is there, and is no page or picture of ours; "
            assert (said.out, said.err) == ("", f"{told}name another file\n")
    assert (trace.read_bytes(), text.read_text()) == (content, "mine")
    for name in ("r.html", "p.png", "empty"):
        (tmp_path / name).touch()
        for command in ("report", "plot", "report"):
            assert main([command, str(trace), "-o", str(tmp_path / name)]) == 0


def test_the_files_have_names_of_their_own(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without -o they are written where one is."""
    monkeypatch.chdir(tmp_path)
    for command in (["report", str(trace)], ["plot", str(trace)], ["compare", *[str(trace)] * 2]):
        assert main(command) == 0
    names = ["staleness.png", "staleness_compare.html", "staleness_report.html"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["report"], "rl-staleness: the following arguments are required: TRACE"),
        (["report", "missing.jsonl"], "missing.jsonl: No such file or directory"),
        (["plot", "missing.jsonl"], "missing.jsonl: No such file or directory"),
        (["plot", "bad.jsonl"], "bad.jsonl:1: line: "),
        (["report", "late.jsonl"], "late.jsonl:1: event: there is no run_started before it"),
        (["report", "good.jsonl", "-o", "no/folder/r.html"], "no/folder/r.html: No such file"),
        (["compare"], "rl-staleness: the following arguments are required: RUN"),
        (["compare", "good.jsonl"], "rl-staleness: compare: one run cannot be compared"),
        (["compare", "good.jsonl", "empty"], "empty: the directory holds no rollout_trace.jsonl"),
        (["compare", "good.jsonl", "project/run1"], "project/run1: no such file or directory; a"),
        (["compare", "good.jsonl", "0123456789abcdef"], "0123456789abcdef: no such file or"),
        (["compare", "good.jsonl", "bad.jsonl"], "bad.jsonl:1: line: "),
    ],
)
def test_bad_input_is_one_line_and_exit_2(
    command: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """No traceback, nothing on stdout, no file left behind."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.jsonl").write_text("no json\n")
    (tmp_path / "late.jsonl").write_text('{"event":"run_finished","time":1.0,"status":"ok"}\n')
    write_trace(tmp_path / "good.jsonl", steps=1, **SMALL)
    before = sorted(tmp_path.rglob("*"))
    assert main(command) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(said)
    assert printed.err.count("\n") == 1 and printed.out == ""
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("command", "missing"),
    [("report", "plotly"), ("plot", "matplotlib"), ("compare", "plotly")],
)
def test_what_is_not_installed_is_named_with_the_way_to_get_it(
    command: str,
    missing: str,
    trace: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One line with the pip line, exit 2; the table of a comparison is printed all the same."""
    for name in list(sys.modules):
        if name.partition(".")[0] == missing:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.chdir(tmp_path)
    assert main([command, str(trace), str(trace)][: 3 if command == "compare" else 2]) == 2
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1 and printed.err.startswith("rl-staleness: ")
    assert f"needs {missing}: pip install 'rl-staleness[report]'" in printed.err
    assert len(printed.out.splitlines()) == (3 if command == "compare" else 0)
    assert not list(tmp_path.iterdir())
    if command != "compare":
        assert main([command, "missing.jsonl"]) == 2
        assert f"needs {missing}" in capsys.readouterr().err, "it is said before a trace is read"


# In a browser.


@pytest.fixture(scope="module")
def browser() -> Callable[..., str]:
    """Runs headless Chromium on a file and returns what it prints."""
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
    if program is None:
        pytest.skip("Chromium is not installed (apt-get install chromium)")

    def run(page: Path, *options: str) -> str:
        profile = page.parent / "profile"
        shutil.rmtree(profile, ignore_errors=True)
        quiet = (
            "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run "
            "--disable-background-networking --disable-component-update --disable-sync "
            "--hide-scrollbars --window-size=1366,768 --virtual-time-budget=30000"
        )
        result = subprocess.run(
            [program, *quiet.split(), f"--user-data-dir={profile}", *options, page.as_uri()],
            capture_output=True,
            text=True,
            timeout=180,
        )
        assert result.returncode == 0, result.stderr[-2000:]
        return result.stdout

    return run


def drawn_of(dom: str) -> str:
    """The page as the browser holds it, without its scripts."""
    return re.sub(r"<script.*?</script>", "", dom, flags=re.DOTALL)


def test_a_browser_draws_every_chart_of_the_file(
    html: str, tmp_path: Path, browser: Callable[..., str]
) -> None:
    """Six charts with all their series, and the sentence; the policy stops no script of ours."""
    file = tmp_path / "report.html"
    file.write_text(html)
    dom = drawn_of(browser(file, "--dump-dom"))
    assert re.search(r'<html[^>]* data-drawn="6"', dom)
    assert "The average trained token was" in words_of(dom)
    figures = figures_of(html)
    for name, kind in (("age", "scatter"), ("tokens", "bars"), ("ages", "bars")):
        start = dom.index(f'id="{name}"')
        end = dom.find("<section", start)
        drawn = dom[start : end if end > 0 else None]
        assert len(re.findall(rf'class="trace {kind}', drawn)) == len(figures[name]["data"]), name
    versions = dom[dom.index('id="versions"') : dom.index('id="tokens"')]
    assert versions.count('class="hm"') == 1 and "data:image/png" in versions
    assert "modebar" in dom and "Share chart" not in dom


def test_a_browser_runs_nothing_that_stands_in_names(
    tmp_path: Path, browser: Callable[..., str]
) -> None:
    """A name that closes the script and adds an element with a handler is text."""
    file = tmp_path / "report.html"
    file.write_text(report(hostile_trace(tmp_path / "trace.jsonl")))
    dom = browser(file, "--dump-dom")
    assert re.search(r'<html[^>]* data-drawn="6"', dom)
    assert "data-owned" not in dom.split(">")[1] and not re.search(r"<html[^>]*owned", dom)
    assert "<img" not in drawn_of(dom).replace("<image", "")


def test_the_report_is_drawn_inside_a_sandboxed_frame(
    html: str, tmp_path: Path, browser: Callable[..., str]
) -> None:
    """As artifact views show it: the frame has an origin of its own and may run scripts only."""
    from rl_staleness.page import IN_FLIGHT, IN_QUEUE

    (tmp_path / "report.html").write_text(html)
    frame = tmp_path / "frame.html"
    frame.write_text(
        '<body style="margin:0;background:#222"><iframe sandbox="allow-scripts" '
        'src="report.html" width="1000" height="760"></iframe>'
    )
    picture = tmp_path / "frame.png"
    browser(frame, f"--screenshot={picture}")
    colours = colours_of(picture.read_bytes())
    assert colours["#ffffff"] > 300_000, "the page keeps its own background"
    assert colours[IN_FLIGHT] > 5_000 and colours[IN_QUEUE] > 1_000


def test_dark_text_on_white(html: str) -> None:
    """The page does not follow a dark theme half way."""
    assert "color-scheme: light" in html and "background: #fff" in html
    for figure in figures_of(html).values():
        assert figure["layout"]["font"]["color"] == "#1b1f24"
