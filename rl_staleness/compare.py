"""Runs side by side, whatever trained them: a table and an overlay, in policy updates.

Steps of different trainers hold different numbers of tokens, so the overlay has both: age over
steps, and age over the tokens that were trained so far.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from rl_staleness.charts import age_shares
from rl_staleness.destinations import Product, fetch, in_scratch, product_of
from rl_staleness.logged import is_from_trace, view_of
from rl_staleness.page import (
    SERIES,
    Figure,
    clean,
    escaped,
    label,
    layout,
    middles,
    number,
    page,
    share,
    span_of,
    table,
)
from rl_staleness.view import MOST, RunView, Stretch, look_at, stretches

__all__ = ["COLUMNS", "SourceError", "compared", "find_trace", "overlay", "text_table"]

NAMES = ("rollout_trace.jsonl", "rollout_trace.jsonl.gz")
"""What a directory is looked through for."""

LONGEST = 40
"""Characters of a run's name at most."""

_DASHES = ("solid", "dash", "dot", "dashdot")

COLUMNS = (
    "run",
    "steps",
    "updates",
    "tokens",
    "batch_age",
    "first",
    "last",
    "in_flight",
    "in_queue",
    "p50",
    "p95",
    "max",
    "coverage",
    "dropped",
    "violations",
    "refits",
    "pause_s",
)
"""Of the table; ages in policy updates, ``pause_s`` in engine-seconds."""


class SourceError(ValueError):
    """A source that cannot be compared; the message says why in one line."""


def find_trace(source: str) -> str | None:
    """The trace that a source names: a file, or a directory that holds one.

    Returns:
        None: it is a run of MLflow or W&B, by the form of its name.

    Raises:
        SourceError: it is nothing of these.
    """
    path = Path(source)
    if path.is_dir():
        for name in NAMES:
            if (path / name).is_file():
                return os.fspath(path / name)
    elif path.exists():
        return source
    if product_of(source) is not None:
        return None
    if path.is_dir():
        raise SourceError(f"{source}: the directory holds no {NAMES[0]} (or .gz), and no W&B run")
    raise SourceError(
        f"{source}: no such file or directory; a run of MLflow is named by its id of 32 digits, "
        "one of W&B by ENTITY/PROJECT/RUN or its folder"
    )


def compared(sources: Sequence[str], *, tracking_uri: str | None = None) -> dict[str, RunView]:
    """Collect every source, by a name that tells it from the others.

    Args:
        tracking_uri: of the MLflow runs; default MLflow's own.

    Raises:
        SourceError: as `find_trace`.
        DestinationError: a run cannot be fetched.
        TraceError: as `rl_staleness.trace.read`.
        OSError: a trace cannot be read.
    """
    traces = [find_trace(source) for source in sources]
    views = [
        _fetched(source, tracking_uri) if trace is None else look_at(trace)
        for source, trace in zip(sources, traces, strict=True)
    ]
    return dict(zip(_told_apart(sources), views, strict=True))


def _fetched(source: str, tracking_uri: str | None) -> RunView:
    """A run by its trace, or by what it logged."""
    product: Product | None = product_of(source)
    assert product is not None
    where = {"tracking_uri": tracking_uri} if product == "mlflow" else {}
    with in_scratch() as folder:
        found = fetch(product, run=source, folder=folder, **where)
        return look_at(found) if isinstance(found, str) else view_of(found, run=source)


def _told_apart(sources: Sequence[str]) -> list[str]:
    """Short names in the order of the sources; of a long path its end.

    >>> _told_apart(["a", "b", "a"])
    ['a', 'b', 'a (2)']
    """
    seen: Counter[str] = Counter()
    names: list[str] = []
    for source in sources:
        name = clean(source if len(source) <= LONGEST else f"…{source[1 - LONGEST :]}")
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return names


def text_table(views: dict[str, RunView]) -> list[str]:
    """The table for a terminal: a header and a row each."""
    rows = [list(COLUMNS), *(_row(name, view) for name, view in views.items())]
    widths = [max(len(row[at]) for row in rows) for at in range(len(COLUMNS))]
    return [
        "  ".join(
            cell.rjust(width) if at else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def overlay(views: dict[str, RunView]) -> str:
    """The runs in one HTML file: the table, and their ages over steps and over tokens.

    Raises:
        MissingExtra: Plotly is not installed.
    """
    figures = {
        "steps": _ages(views, over_tokens=False),
        "trained": _ages(views, over_tokens=True),
        "ages": _spread(views),
    }
    header = [title.replace("_", " ") for title in COLUMNS]
    rows: list[list[str]] = []
    for name, view in views.items():
        run = f"{escaped(name)}<br><small>{escaped(view.run)}</small>"
        rows.append([run, *_row("", view)[1:]])
    body = f"""<h1>Staleness of {len(views)} runs</h1>
<p class="sentence">{_sentence(views)}</p>
<p class="small">Ages are token-weighted and in policy updates (optimizer steps), whatever a run's
framework counts; dropped is the share of all tokens, pause is in engine-seconds.</p>
{table(header, rows)}
{_section("steps", "Batch age over steps", views)}
{_section("trained", "Batch age over trained tokens", views)}
{_section("ages", "Token ages of the whole run", views)}"""
    return page(title=f"Staleness of {len(views)} runs", body=body, figures=figures)


def _row(name: str, view: RunView) -> list[str]:
    whole = view.whole
    known_all = is_from_trace(view)
    refits = f"{sum(view.refits.values()):,}" if known_all else "-"
    updates = f"{view.updates:,}" if known_all else "-"
    if whole is None:
        return [name, "0", "0", "0", *["-"] * 10, str(view.violations), refits, "-"]
    known = [r.numbers.batch_age for r in view.rows if r.numbers.batch_age is not None]
    dropped = view.dropped_tokens
    tokens = dropped + whole.tokens
    pauses = [r.pause_seconds for i in view.intervals for r in i.refits]
    seconds = [pause for pause in pauses if pause is not None]
    return [
        name,
        f"{whole.num_steps:,}",
        updates,
        f"{whole.tokens:,}",
        _exact(whole.batch_age),
        _exact(known[0] if known else None),
        _exact(known[-1] if known else None),
        _exact(whole.age_in_flight),
        _exact(whole.age_in_queue),
        number(whole.age_p50),
        number(whole.age_p95),
        number(max((m for r in view.rows if (m := r.numbers.age_max) is not None), default=None)),
        share(whole.known_coverage) + ("*" if whole.num_incomplete else ""),
        share(dropped / tokens if tokens else None),
        f"{view.violations:,}",
        refits,
        f"{sum(seconds):,.1f}" if seconds else "-",
    ]


def _sentence(views: dict[str, RunView]) -> str:
    """Which run trained on the oldest tokens, and which on the newest; HTML."""
    ages = {n: v.whole.batch_age for n, v in views.items() if v.whole is not None}
    known = {name: age for name, age in ages.items() if age is not None}
    if not known:
        return "No run has trained a token."
    low, high = min(known, key=lambda n: known[n]), max(known, key=lambda n: known[n])
    if low == high:
        return f"{escaped(low)}: {number(known[low])} policy updates on average."
    return (
        f"The average trained token was between {number(known[low])} policy updates old "
        f"({escaped(low)}) and {number(known[high])} ({escaped(high)})."
    )


def _exact(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _section(name: str, title: str, views: dict[str, RunView]) -> str:
    sizes = {stretches(view.rows, MOST)[0].num_steps for view in views.values() if view.rows}
    most = max(sizes, default=1)
    many = f'<p class="small">One point is up to {most} steps, their tokens added up.</p>'
    many = many if most > 1 and name != "ages" else ""
    height = 300 if name != "ages" else 260
    return (
        f"<section><h2>{title}</h2>{many}"
        f'<div id="{name}" class="chart" style="height:{height}px"></div></section>'
    )


def _look(at: int) -> dict[str, Any]:
    """A colour, and a dash that tells runs apart without it."""
    colour = SERIES[at % len(SERIES)]
    return {"color": colour, "width": 2, "dash": _DASHES[at % len(_DASHES)]}


def _ages(views: dict[str, RunView], *, over_tokens: bool) -> Figure:
    data: list[Figure] = []
    for at, (name, view) in enumerate(views.items()):
        parts = stretches(view.rows, MOST) if view.rows else []
        trained = list(accumulate(part.tokens for part in parts))
        x = trained if over_tokens else middles(parts)
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers" if len(parts) <= 40 else "lines",
                "name": label(name),
                "x": x,
                "y": [part.batch_age for part in parts],
                "line": _look(at),
                "marker": {"size": 5},
                "text": [_text(part, end) for part, end in zip(parts, trained, strict=True)],
                "hovertemplate": "%{text}<extra>%{fullData.name}</extra>",
            }
        )
    what = "trained tokens so far" if over_tokens else "training step"
    axis = {"rangemode": "tozero"}
    return {
        "data": data,
        "layout": layout(x=what, y="policy updates", yaxis=axis, showlegend=True),
    }


def _text(part: Stretch, trained: int) -> str:
    return f"{span_of(part)}, {trained:,} tokens<br>batch age {number(part.batch_age)} updates"


def _spread(views: dict[str, RunView]) -> Figure:
    data: list[Figure] = []
    for at, (name, view) in enumerate(views.items()):
        ages, shares, _ = age_shares(view.whole.tokens_by_age if view.whole else {})
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": label(name),
                "x": ages,
                "y": [100 * each for each in accumulate(shares)],
                "line": {**_look(at), "shape": "hv"},
                "marker": {"size": 5},
                "hovertemplate": "%{y:.1f} % are not older than %{x}"
                "<extra>%{fullData.name}</extra>",
            }
        )
    return {
        "data": data,
        "layout": layout(
            x="token age in policy updates",
            y="% of tokens, not older",
            xaxis={"tickformat": "d"},
            yaxis={"range": [-4, 106]},
            showlegend=True,
        ),
    }
