"""MLflow's own pages, opened as a person opens them. Works with MLflow 3.17."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from rl_staleness.artifacts import PICTURE, REPORT
from tests.chromium import Browser, Page

__all__ = ["Pages"]

NO_ASSISTANT = """
localStorage["mlflow.assistant.fab.autoOpenedOnFirstLoad_v1"] = "true";
localStorage["mlflow.assistant.panelOpen_v1"] = "false";
"""
"""It would stand in the way of what is looked at."""

SIZE = (1600, 1000)
"""Of the window, in pixels; in a narrow one the compare page folds its list of files away."""

CARDS = "[...document.querySelectorAll('[data-testid=experiment-view-compare-runs-card]')]"


@dataclass(frozen=True)
class Pages:
    """The pages of one experiment."""

    browser: Browser
    server: str
    """Its address."""
    experiment: str
    """Its id, and those of the runs."""
    runs: Sequence[str]

    def charts(self, section: str, names: Sequence[str]) -> Page:
        """The chart view, searched for some charts of a section until all of them are drawn."""
        page = self._open(f"experiments/{self.experiment}/runs?compareRunsMode=CHART")
        page.click("document.querySelector('input[placeholder=\"Search metric charts\"]')")
        page.write(f"{section}/({'|'.join(names)})$")
        page.wait(
            f"{CARDS}.length === {len(names)} && {CARDS}.every(card => "
            f"card.querySelectorAll('.scatterlayer path.js-line').length >= {len(self.runs)})",
            what=f"{len(names)} charts of {len(self.runs)} lines",
        )
        return page

    def drawn(self, page: Page) -> dict[str, dict[str, list[tuple[float, float]]]]:
        """The points in the chart view: by the title of the chart, then by the name of the line."""
        found = page.value(
            f"""{CARDS}.map(card => [card.innerText.split("\\n")[0],
                card.querySelector(".js-plotly-plot").data
                    .filter(line => line.name && line.x && line.hoverinfo !== "skip")
                    .map(line => [line.name, [...line.x].map((x, at) => [x, line.y[at]])])])"""
        )
        return {
            title: {name: [(x, y) for x, y in points] for name, points in lines}
            for title, lines in found
        }

    def comparison(self) -> Page:
        """The compare page, with the picture that all runs have selected and shown."""
        runs, experiments = json.dumps(list(self.runs)), json.dumps([self.experiment])
        page = self._open(f"compare-runs?runs={runs}&experiments={experiments}")
        page.click(f"document.querySelector('[artifact-name=\"{PICTURE}\"]')")
        page.wait(
            "[...document.images].filter(i => i.src.startsWith('blob:') && i.naturalWidth > 1000)"
            f".length >= {len(self.runs)}",
            what=f"{PICTURE} of each run",
        )
        return page

    def compared(self, page: Page) -> dict[str, list[str]]:
        """The table of metrics of the compare page, as it stands there: texts by key."""
        texts = page.wait(
            """(() => {
                const grids = [...document.querySelectorAll(".ReactVirtualized__Grid")]
                    .map(grid => [...grid.firstChild.children].map(cell => cell.innerText.trim()));
                const at = grids.findIndex(texts => texts.includes("staleness/run_mean"));
                return at < 0 ? null : [grids[at], grids[at + 1]];
            })()"""
        )
        keys, values = texts
        size = len(self.runs)
        return {key: values[at * size : (at + 1) * size] for at, key in enumerate(keys)}

    def turn_to(self, page: Page, key: str) -> None:
        """Turn the mouse wheel over the metrics of the compare page until a key is among them."""
        place = page.wait(
            f"""(() => {{
                const grids = [...document.querySelectorAll(".ReactVirtualized__Grid")];
                const at = grids.findIndex(grid => grid.innerText.includes("{key}"));
                if (at < 0) return null;
                grids[at].scrollIntoView({{block: "start"}});
                const cells = [...grids[at].firstChild.children];
                const cell = cells.find(cell => cell.innerText.trim() === "{key}");
                const box = grids[at + 1].getBoundingClientRect();
                return [box.x + 99, box.y + 99, cell.offsetTop - 2 * cell.offsetHeight];
            }})()"""
        )
        for by in (place[2], 1, 1):  # the names follow one turn behind the values
            page.turn(place[0], place[1], by=by)
            page.settle()
        page.wait(
            f"""(() => {{
                const grids = [...document.querySelectorAll(".ReactVirtualized__Grid")];
                const at = grids.findIndex(grid => grid.innerText.includes("{key}"));
                const tops = grids.slice(at, at + 2).map(grid => grid.scrollTop);
                return tops[0] > 0 && Math.abs(tops[0] - tops[1]) < 3;
            }})()""",
            what=f"{key} beside its values",
        )

    def report(self, run: str) -> Page:
        """The artifact view of a run, with the report opened in its frame."""
        page = self._open(f"experiments/{self.experiment}/runs/{run}/artifacts/{REPORT}")
        page.wait("document.documentElement.dataset.drawn", what="the report", frames=True)
        return page

    def _open(self, path: str) -> Page:
        page = self.browser.open(f"{self.server}/#/{path}", first=NO_ASSISTANT)
        page.resize(*SIZE)
        return page
