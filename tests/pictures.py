"""Makes the README's pictures: two real runs of the demo, looked at in a real browser.

`make pictures` takes a few minutes and needs Chromium. `python -m tests.pictures FOLDER` draws two
runs that the demo has left in a folder.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tempfile
from pathlib import Path

import mlflow
from PIL import Image

from rl_staleness.artifacts import REPORT
from rl_staleness.plot import plot
from rl_staleness.report import report
from tests.chromium import Browser, browser
from tests.mlflow_pages import Pages
from tests.mlflow_places import Server

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "examples" / "pictures"

CHARTS = ("batch_age", "age_in_flight", "age_in_queue", "age_p95", "coverage", "tokens")
"""Of `staleness/`, in MLflow's chart view."""

COLOURS = 128
"""Of a picture, so that it is small."""


def main(arguments: list[str]) -> int:
    if arguments:
        draw(Path(arguments[0]))
        return 0
    with tempfile.TemporaryDirectory(prefix="pictures-") as folder:
        demo = Path(folder) / "demo"
        for most in (4, 1):
            print(f"make demo ARGS='--max-staleness {most}'", flush=True)
            command = [sys.executable, "examples/async_grpo.py", "--output", str(demo)]
            command += ["--max-staleness", str(most)]
            subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        draw(demo)
    return 0


def draw(demo: Path) -> None:
    """Make all pictures of what the demo has left in a folder."""
    PICTURES.mkdir(exist_ok=True)
    trace = demo / "rollout_trace.jsonl"
    save("plot", plot(trace))
    with browser() as chromium:
        save("report", report_page(chromium, trace))
        server = Server(demo)  # of the database that the demo has made
        server.start()
        try:
            save_mlflow(chromium, server.uri)
        finally:
            server.kill()


def report_page(chromium: Browser, trace: Path) -> bytes:
    """The top of the report."""
    file = trace.with_name(REPORT)
    file.write_text(report(trace))
    page = chromium.open(file.as_uri())
    page.resize(1200, 768)
    page.wait("document.documentElement.dataset.drawn")
    page.wait("document.querySelector('#age .main-svg').clientWidth < 1200")
    end = "document.querySelector('#versions').getBoundingClientRect().bottom"
    return page.picture(height=round(page.value(end)) + 8)


def save_mlflow(chromium: Browser, server: str) -> None:
    """The chart view and the compare page."""
    client = mlflow.MlflowClient(server)
    experiment = client.get_experiment_by_name("async-grpo").experiment_id
    runs = client.search_runs([experiment], order_by=["attributes.start_time"])
    pages = Pages(chromium, server, experiment, [run.info.run_id for run in runs])
    charts = pages.charts("staleness", CHARTS)
    charts.click(
        "document.querySelector('[data-component-id=\"mlflow_header.toggle_sidebar_button\"]')"
    )
    charts.settle()
    save("mlflow_charts", charts.picture())
    comparison = pages.comparison()
    pages.turn_to(comparison, "staleness/run_mean")
    comparison.settle()
    save("mlflow_compare", comparison.picture())


def save(name: str, png: bytes) -> None:
    """Write a picture with few colours, which is enough for charts."""
    image = Image.open(io.BytesIO(png)).convert("RGB")
    small = image.quantize(COLOURS, dither=Image.Dither.NONE)
    path = PICTURES / f"{name}.png"
    small.save(path, optimize=True)
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size // 1000} kB", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
