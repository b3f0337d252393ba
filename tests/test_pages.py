"""What a person sees in a browser: the report as a file, and the runs in MLflow's own pages."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rl_staleness import StalenessCallback, steps
from rl_staleness.report import report, sentence
from rl_staleness.view import look_at
from tests.chromium import LAPTOP, Browser, Page, browser, program
from tests.traces import write_trace

pytest.importorskip("plotly", reason="the report is drawn with Plotly")
if program() is None:
    pytest.skip("Chromium is not installed (apt-get install chromium)", allow_module_level=True)

STEPS = 40


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """One browser for all pages."""
    with browser() as running:
        yield running


# The report, as a file.


def usual(path: Path) -> None:
    write_trace(path, steps=STEPS, max_age=4.0, abort=0.05)


def not_covered(path: Path) -> None:
    write_trace(path, steps=STEPS, blind=0.5, max_age=4.0, contradictions=2)


def long(path: Path) -> None:
    few = {"slots": 4, "group_size": 2, "groups_per_step": 3}
    write_trace(path, steps=5000, mean_tokens=100, engines=("a", "b"), **few)


def one_step(path: Path) -> None:
    write_trace(path, steps=1)


def no_token(path: Path) -> None:
    with StalenessCallback(trace=path, sinks=[]) as staleness:
        staleness.on_step([])


def no_step(path: Path) -> None:
    with StalenessCallback(trace=path, sinks=[]) as staleness:
        staleness.on_drop("group", reason="none was ready")


def open_report(trace: Path, chromium: Browser) -> Page:
    file = trace.with_suffix(".html")
    file.write_text(report(trace))
    page = chromium.open(file.as_uri())
    page.wait("document.documentElement.dataset.drawn !== undefined", what="the charts")
    return page


@pytest.mark.parametrize("run", [usual, not_covered, long, one_step, no_token, no_step])
def test_the_report_opens_offline_on_a_small_laptop(
    run: Any, tmp_path: Path, chromium: Browser
) -> None:
    """It asks for nothing else, shows its sentence and its charts, and is not wider than it."""
    trace = tmp_path / "trace.jsonl"
    run(trace)
    page = open_report(trace, chromium)
    assert [url for url in page.requests if not url.startswith("data:")] == [
        trace.with_suffix(".html").as_uri()
    ]
    assert page.errors == []
    view = look_at(trace)
    assert page.value("document.querySelector('.sentence').innerText") == sentence(view)
    top = page.value("document.querySelector('.sentence').getBoundingClientRect().bottom")
    assert top < LAPTOP[1] / 4, "it is the first that is read"
    assert page.value("document.documentElement.scrollWidth") == LAPTOP[0]
    charts = page.value(
        """[...document.querySelectorAll(".chart")].map(chart => {
            const drawn = chart.querySelector(".main-svg"), box = chart.getBoundingClientRect();
            return [chart.id, drawn !== null, box.width <= innerWidth, box.height > 100];
        })"""
    )
    names = ["age", "versions", "tokens", "refits", "coverage", "ages"] if view.rows else []
    assert charts == [[name, True, True, True] for name in names]


def texts(page: Page, chart: str, parts: str) -> list[str]:
    """Texts that a chart shows, cut off at no edge of it."""
    found: list[list[Any]] = page.value(
        f"""(() => {{
            const chart = document.getElementById("{chart}"), box = chart.getBoundingClientRect();
            return [...chart.querySelectorAll("{parts}")].map(part => {{
                const place = part.getBoundingClientRect();
                const inside = place.left >= box.left - 1 && place.right <= box.right + 1
                    && place.top >= box.top - 1 && place.bottom <= box.bottom + 1;
                return [part.textContent.trim(), inside];
            }});
        }})()"""
    )
    assert all(inside for _, inside in found), found
    return [text for text, _ in found]


def overlap(page: Page, chart: str, one: str, other: str) -> bool:
    """Whether two parts of a chart lie over one another by more than a pixel."""
    found: bool = page.value(
        f"""(() => {{
            const boxes = which => [...document.querySelectorAll("#{chart} " + which)]
                .map(part => part.getBoundingClientRect());
            return boxes("{one}").some(a => boxes("{other}").some(b =>
                a.left < b.right - 1 && b.left < a.right - 1
                && a.top < b.bottom - 1 && b.top < a.bottom - 1));
        }})()"""
    )
    return found


def test_the_charts_name_what_they_show(tmp_path: Path, chromium: Browser) -> None:
    """Legends and titles of axes are read in a narrow frame too, and when it gets wide again."""
    not_covered(tmp_path / "trace.jsonl")
    page = open_report(tmp_path / "trace.jsonl", chromium)
    for width in (LAPTOP[0], 560, LAPTOP[0]):
        page.resize(width, LAPTOP[1])
        page.wait(f"Math.abs(document.querySelector('#age .main-svg').clientWidth - {width}) < 50")
        page.settle()
        assert texts(page, "age", ".legendtext") == [
            "in flight",
            "in queue",
            "p50 to p95 of token age",
            "bounds of the mean",
            "batch age (mean)",
            "refits",
        ]
        assert texts(page, "age", ".xtitle, .ytitle") == ["training step", "age in policy updates"]
        assert set(texts(page, "versions", ".ytitle, .legendtext")) == {
            "version that the step updated",
            "sampling version",
        }
        assert "violations" in texts(page, "coverage", ".legendtext")
        assert not overlap(page, "age", ".legend", ".nsewdrag"), "the curves are not covered"
        assert not overlap(page, "versions", ".legend", ".updatemenu-button")
        assert page.value("document.documentElement.scrollWidth") == width


def test_the_heat_map_turns_to_ages(tmp_path: Path, chromium: Browser) -> None:
    """The button changes what its y axis is."""
    usual(tmp_path / "trace.jsonl")
    page = open_report(tmp_path / "trace.jsonl", chromium)
    assert texts(page, "versions", ".ytitle") == ["sampling version"]
    page.click("[...document.querySelectorAll('#versions .updatemenu-button')][1]")
    page.wait("document.querySelector('#versions .ytitle').textContent === 'age in policy updates'")


def test_a_request_of_the_page_would_be_seen(tmp_path: Path, chromium: Browser) -> None:
    """What the test above relies on: the browser says what a page asks for, or is refused."""
    file = tmp_path / "page.html"
    file.write_text('<img src="http://127.0.0.1:9/asked.png"><body>here')
    page = chromium.open(file.as_uri())
    page.wait("document.readyState === 'complete'")
    assert "http://127.0.0.1:9/asked.png" in page.requests
    page.wait("document.body.innerText === 'here'")
    assert any("ERR_" in error for error in page.errors)


# MLflow's pages.


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, chromium: Browser) -> Iterator[Any]:
    """A real server with two runs that the library logged to, because they were active."""
    mlflow = pytest.importorskip("mlflow")
    from tests.mlflow_pages import Pages
    from tests.mlflow_places import Server

    logging.getLogger("mlflow").setLevel(logging.WARNING)
    folder = tmp_path_factory.mktemp("mlflow")
    server = Server(folder)
    server.start()
    before = mlflow.get_tracking_uri()
    try:
        mlflow.set_tracking_uri(server.uri)
        experiment = mlflow.set_experiment("async-grpo").experiment_id
        found = {}
        for name, age in (("patient", 4.0), ("hasty", 2.0)):
            trace = folder / name / "rollout_trace.jsonl"
            trace.parent.mkdir()
            with mlflow.start_run(run_name=name) as run:
                write_trace(trace, steps=STEPS, max_age=age, run=name)
            found[run.info.run_id] = trace
        yield Pages(chromium, server.uri, experiment, tuple(found)), found
    finally:
        mlflow.set_tracking_uri(before)
        server.kill()


def test_the_chart_view_draws_both_runs(runs: Any) -> None:
    """A chart a number, a line a run, a point a step: the numbers of the traces."""
    pages, traces = runs
    names = ["batch_age", "age_in_queue", "coverage"]
    page = pages.charts("staleness", names)
    expected = {
        f"staleness/{name}": {
            trace.parent.name: [(s.step, getattr(s, name)) for s in steps(trace)]
            for trace in traces.values()
        }
        for name in names
    }
    assert pages.drawn(page) == expected
    text = page.value("document.body.innerText")
    for run in ("patient", "hasty"):
        assert f"{run} (staleness/batch_age)" in text, "the legend"
    assert "staleness\n(3)" in text, "the section of the numbers"
    assert "Step" in text


def test_the_compare_page_shows_the_numbers_of_the_whole_runs(runs: Any) -> None:
    """Mean, p95 and maximum over all tokens, and both pictures from the root of the runs."""
    pages, traces = runs
    table = pages.compared(pages.comparison())
    views = [look_at(trace).whole for trace in traces.values()]
    assert [float(text) for text in table["staleness/run_mean"]] == [
        pytest.approx(view.batch_age, abs=5e-4) for view in views
    ]
    assert [int(text) for text in table["staleness/run_p95"]] == [view.age_p95 for view in views]
    assert [int(text) for text in table["staleness/run_max"]] == [
        max(view.tokens_by_age) for view in views
    ]
    last = [list(steps(trace))[-1] for trace in traces.values()]
    assert [float(text) for text in table["staleness/batch_age"]] == [
        pytest.approx(step.batch_age, abs=5e-4) for step in last
    ]


def test_the_artifact_view_shows_the_report(runs: Any) -> None:
    """In a frame of the run's page: the sentence and all charts; nothing is fetched elsewhere."""
    pages, traces = runs
    run, trace = next(iter(traces.items()))
    page = pages.report(run)
    sentences = page.wait(
        "document.querySelector('.sentence')?.innerText", what="the sentence", frames=True
    )
    assert sentences == sentence(look_at(trace))
    assert page.wait("document.documentElement.dataset.drawn", frames=True) == "6"
    root = "document.documentElement"
    wide = f"{root}.dataset.drawn && [{root}.scrollWidth, innerWidth]"
    width, room = page.wait(wide, frames=True)
    assert width <= room
    ours = (pages.server, "data:", "blob:", "about:")
    assert [url for url in page.requests if not url.startswith(ours)] == []
