"""One HTML file that needs nothing else: text, tables and charts, with plotly.js inside.

Names in a trace are input from outside. They reach the page only through `escaped`, `label` and
`as_json`, and the page forbids everything that it does not need: nothing is fetched or sent, and no
script runs but the two whose hashes it names.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from rl_staleness.printable import printable
from rl_staleness.view import Stretch

__all__ = [
    "BOUNDS",
    "DROPPED",
    "IN_FLIGHT",
    "IN_QUEUE",
    "INK",
    "SERIES",
    "TRAINED",
    "MissingExtra",
    "as_json",
    "clean",
    "escaped",
    "label",
    "Figure",
    "line",
    "middles",
    "number",
    "plural",
    "share",
    "span_of",
    "layout",
    "page",
    "plotly_js",
    "table",
    "whole_ticks",
]

INK = "#1b1f24"
BOUNDS = "#a1458b"
IN_FLIGHT, IN_QUEUE, TRAINED, DROPPED = "#7cc0ec", "#f2b134", "#0072b2", "#d55e00"
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#1b1f24", "#8a8f98")
"""Colours that are told apart without red and green (Okabe and Ito)."""

Figure = dict[str, Any]

LONGEST_NAME = 60

_FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', Arial, sans-serif"

_STYLE = f"""
:root {{ color-scheme: light; }}
body {{ margin: 0 auto; padding: 14px 18px 40px; max-width: 1500px; background: #fff;
  color: {INK}; font: 14px/1.45 {_FONT}; }}
h1 {{ font-size: 19px; margin: 0 0 4px; overflow-wrap: anywhere; }}
h2 {{ font-size: 15px; margin: 22px 0 1px; }}
p {{ margin: 2px 0 6px; }}
.sentence {{ font-size: 16px; max-width: 75em; }}
.small {{ font-size: 12.5px; color: #4a5159; max-width: 95em; overflow-wrap: anywhere; }}
.warning {{ border-left: 4px solid {DROPPED}; padding-left: 8px; }}
.tiles {{ display: flex; flex-wrap: wrap; gap: 8px; margin: 8px 0 0; }}
.tiles div {{ flex: 1 1 auto; border: 1px solid #d5d9de; border-radius: 6px; padding: 5px 10px; }}
.tiles dt {{ font-size: 12px; color: #4a5159; }}
.tiles dd {{ margin: 0; font-size: 18px; font-variant-numeric: tabular-nums; }}
.tiles dd small {{ font-size: 12px; color: #4a5159; }}
.chart {{ width: 100%; }}
.columns {{ display: flex; flex-wrap: wrap; gap: 0 28px; }}
.columns > * {{ flex: 1 1 400px; min-width: 0; }}
table {{ border-collapse: collapse; margin: 6px 0; font-size: 13px; max-width: 100%; }}
th, td {{ text-align: right; padding: 3px 12px 3px 0; border-bottom: 1px solid #e3e6ea;
  font-variant-numeric: tabular-nums; vertical-align: top; }}
td.text, th.text {{ text-align: left; overflow-wrap: break-word; max-width: 34em;
  min-width: 6em; }}
th {{ font-weight: 600; }}
.scroll {{ overflow-x: auto; }}
dl.words dt {{ font-weight: 600; margin-top: 4px; }} dl.words dd {{ margin: 0 0 0 1em; }}
"""

_DRAW = """
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const config = { responsive: true, displaylogo: false, typesetMath: false, showTips: false,
    showSendToCloud: false, plotlyServerURL: "", displayModeBar: "hover",
    modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]] };
  const linked = [];
  let following = false;
  const follow = (from, change) => {
    if (following) return;
    const low = change["xaxis.range[0]"], high = change["xaxis.range[1]"];
    const range = change["xaxis.range"] || (low === undefined ? null : [low, high]);
    if (!range) return;
    following = true;
    const others = linked.filter(div => div !== from);
    Promise.all(others.map(div => Plotly.relayout(div, { "xaxis.range": range.slice() })))
      .finally(() => { following = false; });
  };
  const drawn = Object.entries(figures).map(([id, figure]) => {
    const div = document.getElementById(id);
    if (figure.linked) linked.push(div);
    return Plotly.newPlot(div, figure.data, figure.layout, config)
      .then(() => { div.on("plotly_relayout", change => figure.linked && follow(div, change)); });
  });
  Promise.all(drawn).then(() => { document.documentElement.dataset.drawn = drawn.length; });
})();
"""


class MissingExtra(ImportError):
    """What draws is not installed; the message says how to get it."""


def plotly_js() -> str:
    """The script that draws the charts.

    Raises:
        MissingExtra: Plotly is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs  # pyright: ignore[reportMissingTypeStubs]
    except ImportError as error:
        raise MissingExtra("the report needs plotly: pip install 'rl-staleness[report]'") from error
    return str(get_plotlyjs())


def clean(name: str) -> str:
    """A name as one short line, without characters that steer a terminal or a page.

    >>> clean("a" + chr(27) + "[31m" + chr(0x202E) + "b" + chr(10) + "c")
    'a?[31m?b c'
    """
    return printable(name, longest=LONGEST_NAME)


def escaped(name: str) -> str:
    """A name as text of the page."""
    return html.escape(clean(name))


def label(name: str) -> str:
    """A name as text of a chart, where plotly.js reads a little HTML."""
    return html.escape(clean(name), quote=False)


def as_json(value: object) -> str:
    """JSON that can stand inside a ``<script>`` element: it cannot end it."""
    text = msgspec.json.encode(value).decode()
    return re.sub("[<>&\u2028\u2029]", lambda found: f"\\u{ord(found[0]):04x}", text)


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, text: int = 1) -> str:
    """A table of cells that are HTML already; the first ``text`` columns hold text."""

    def line(cells: Sequence[str], tag: str) -> str:
        return "".join(
            f'<{tag} class="text">{cell}</{tag}>' if at < text else f"<{tag}>{cell}</{tag}>"
            for at, cell in enumerate(cells)
        )

    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{line(header, "th")}</tr>{body}</table></div>'


def number(value: float | None) -> str:
    """A number of updates."""
    return "-" if value is None else f"{value:.2f}" if isinstance(value, float) else f"{value:,}"


def share(value: float | None) -> str:
    """A share in percent that says 0 and 100 only where it is exactly that.

    >>> share(1.0), share(0.99999), share(0.0), share(0.00001), share(0.5)
    ('100 %', '>99.9 %', '0 %', '<0.1 %', '50.0 %')
    """
    if value is None:
        return "-"
    if value in (0, 1):
        return f"{value:.0%}".replace("%", " %")
    text = f"{100 * value:.1f} %"
    return {"100.0 %": ">99.9 %", "0.0 %": "<0.1 %"}.get(text, text)


def plural(count: int, what: str) -> str:
    return f"{count:,} {what}" + ("" if count == 1 else "s")


def middles(parts: Sequence[Stretch]) -> list[float]:
    return [p.first if p.first == p.last else (p.first + p.last) / 2 for p in parts]


def span_of(part: Stretch) -> str:
    return f"step {part.first}" if part.first == part.last else f"steps {part.first} to {part.last}"


def line(parts: Sequence[Stretch], y: Sequence[float | None], name: str, **more: Any) -> Figure:
    mode = "lines+markers" if len(parts) <= 40 else "lines"
    return {
        "type": "scatter",
        "mode": mode,
        "marker": {"size": 5},
        "x": middles(parts),
        "y": list(y),
        "name": name,
        "hoverinfo": "skip",
        **more,
    }


def whole_ticks(span: float) -> Figure:
    """Ticks at whole numbers only, on an axis that is so long."""
    return {"tickformat": "d", **({"dtick": 1} if span <= 16 else {})}


def layout(*, x: str, y: str, **more: Any) -> dict[str, Any]:
    """What all charts have in common, with the titles of both axes."""
    grid = {"gridcolor": "#e8ebee", "zerolinecolor": "#c3c8ce", "automargin": False}
    axes = {
        "xaxis": {**grid, "title": {"text": x, "standoff": 6}, **more.pop("xaxis", {})},
        "yaxis": {**grid, "title": {"text": y, "standoff": 8}, **more.pop("yaxis", {})},
    }
    return {
        "font": {"family": _FONT, "size": 12.5, "color": INK},
        "paper_bgcolor": "#fff",
        "plot_bgcolor": "#fff",
        "margin": {"l": 62, "r": 12, "t": 28, "b": 40},
        "hoverlabel": {"align": "left", "bgcolor": "#fff", "font": {"color": INK}},
        "hovermode": "closest",
        "legend": {
            "orientation": "h",
            "traceorder": "normal",
            "x": 0,
            "y": 1,
            "yref": "container",  # tied to the axes it would stay behind when a window gets wider
            "yanchor": "top",
        },
        **axes,
        **more,
    }


def page(*, title: str, body: str, figures: Mapping[str, Mapping[str, Any]]) -> str:
    """Put a page together.

    Args:
        title: a name, not yet escaped.
        body: HTML, with a ``<div id=...>`` for each figure.
        figures: by id: ``data`` and ``layout`` of Plotly, and ``linked``, whether its x axis
            follows the others that are.
    """
    scripts = (plotly_js(), _DRAW)
    hashes = " ".join(f"'sha256-{_hash(script)}'" for script in scripts)
    policy = (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escaped(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
{body}
<noscript><p class="warning">The charts need JavaScript; the numbers above do not.</p></noscript>
<script type="application/json" id="figures">{as_json(figures)}</script>
<script>{scripts[0]}</script>
<script>{scripts[1]}</script>
</body>
</html>
"""


def _hash(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
