"""The report of a run: one HTML file that says how old the tokens were that were trained on.

Plotly is imported only when it draws. The pictures hold the numbers of `rl_staleness.trace.steps`;
a run too long to draw step by step is drawn in stretches of steps, and says so.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from rl_staleness.page import (
    DROPPED,
    IN_FLIGHT,
    IN_QUEUE,
    INK,
    SERIES,
    TRAINED,
    escaped,
    label,
    layout,
    page,
    table,
)
from rl_staleness.view import Mark, RunView, Stretch, look_at, marks, stretches

__all__ = ["age_shares", "cells", "draw", "number", "report", "sentence", "share"]

Figure = dict[str, Any]

MOST = 400
"""Points of a line, bars, and columns and rows of a heat map at most: what a laptop can show."""
NAMED = 5
"""Engines and reasons that have a colour of their own; the others share one."""
LISTED = 50
"""Rows of a table at most."""

_BLUES = [[0, "#dcebf7"], [0.15, "#9fc9e8"], [0.4, "#4c93cb"], [0.7, "#165c9e"], [1, "#08254a"]]
_PATTERNS = ("/", "\\", "x", ".", "-", "|")


def report(trace: str | os.PathLike[str]) -> str:
    """Draw a trace: the text of an HTML file that opens anywhere, without a network.

    Raises:
        TraceError: as `rl_staleness.trace.read`.
        OSError: the trace cannot be read.
        MissingExtra: Plotly is not installed.
    """
    return draw(look_at(trace))


def draw(view: RunView) -> str:
    """Draw a run that was collected already."""
    parts = [_header(view)]
    figures: dict[str, Figure] = {}
    if view.rows:
        steps, refits = stretches(view.rows, MOST), marks(view, MOST)
        figures = {
            "age": _age(steps, refits),
            "versions": _versions(steps),
            "tokens": _tokens(steps),
            "refits": _refits(refits),
            "coverage": _coverage(steps),
            "ages": _ages(view),
        }
        span = [steps[0].first - 1, steps[-1].last + 1]
        for name, figure in figures.items():
            figure["linked"] = name != "ages"
            if figure["linked"]:
                figure["layout"]["xaxis"] |= {"range": span, **_whole_ticks(span[1] - span[0])}
        parts.append(_charts(view, steps))
    parts.append(_tables(view))
    parts.append(_WORDS)
    return page(title=f"Staleness of {view.run}", body="\n".join(parts), figures=figures)


# Words.


def sentence(view: RunView) -> str:
    """What the run looks like, in one sentence of plain text."""
    whole = view.whole
    if whole is None:
        return "No step has been trained yet."
    if whole.batch_age is None:
        return f"{_plural(whole.num_steps, 'step')} trained no token whose version is known."
    first, last = _first_and_last(view)
    known = f"{share(whole.known_coverage)} of the sampling versions are known exactly"
    return (
        f"The average trained token was {number(whole.batch_age)} policy updates old "
        f"({number(first)} at the first step, {number(last)} at the last); {known}, "
        f"{share(_dropped_share(view))} of all tokens were dropped, "
        f"{_plural(view.violations, 'violation').replace('0 ', 'no ', 1)}."
    )


def number(value: float | None) -> str:
    """A number of updates."""
    return "–" if value is None else f"{value:.2f}" if isinstance(value, float) else f"{value:,}"


def share(value: float | None) -> str:
    """A share in percent that says 0 and 100 only where it is exactly that.

    >>> share(1.0), share(0.99999), share(0.0), share(0.00001), share(0.5)
    ('100 %', '>99.9 %', '0 %', '<0.1 %', '50.0 %')
    """
    if value is None:
        return "–"
    if value in (0, 1):
        return f"{value:.0%}".replace("%", " %")
    text = f"{100 * value:.1f} %"
    return {"100.0 %": ">99.9 %", "0.0 %": "<0.1 %"}.get(text, text)


def _plural(count: int, what: str) -> str:
    return f"{count:,} {what}" + ("" if count == 1 else "s")


def _first_and_last(view: RunView) -> tuple[float, float]:
    known = [row.numbers.batch_age for row in view.rows if row.numbers.batch_age is not None]
    return known[0], known[-1]


def _dropped_share(view: RunView) -> float | None:
    whole = view.whole
    tokens = view.dropped_tokens + (whole.tokens if whole else 0)
    return view.dropped_tokens / tokens if tokens else None


def _header(view: RunView) -> str:
    tiles = "".join(
        f"<div><dt>{title}</dt><dd>{value}</dd></div>" for title, value in _tiles(view)
    )
    warnings = "".join(f'<p class="small warning">{line}</p>' for line in _warnings(view))
    return (
        f"<header><h1>Staleness of {escaped(view.run)}</h1>"
        f'<p class="sentence">{sentence(view)}</p>'
        f'<p class="small">{_about(view)}</p>{warnings}<dl class="tiles">{tiles}</dl></header>'
    )


def _tiles(view: RunView) -> list[tuple[str, str]]:
    whole = view.whole
    if whole is None:
        return []
    age = f"{number(whole.batch_age)} <small>updates</small>"
    if whole.batch_age is not None:
        first, last = _first_and_last(view)
        age += f" <small>({number(first)} → {number(last)})</small>"
    parts = f"{number(whole.age_in_flight)} + {number(whole.age_in_queue)}"
    middle = f"{number(whole.age_p50)} / {number(whole.age_p95)}"
    largest = number(max(whole.tokens_by_age, default=None))
    coverage = share(whole.known_coverage)
    if whole.num_incomplete:
        coverage += f" <small>not known at {_plural(whole.num_incomplete, 'step')}</small>"
    return [
        ("batch age, mean (first → last)", age),
        ("in flight + in queue", f"{parts} <small>updates</small>"),
        ("p50 / p95 of token age", f"{middle} <small>updates, oldest {largest}</small>"),
        ("coverage", coverage),
        ("violations", f"{view.violations:,}"),
        ("dropped tokens", share(_dropped_share(view))),
    ]


def _about(view: RunView) -> str:
    seconds = max(0.0, view.ended - view.started)
    words = [_plural(len(view.rows), "step"), _plural(view.updates, "policy update")]
    words.append(_plural(view.whole.tokens if view.whole else 0, "trained token"))
    words.append(_plural(sum(view.refits.values()), "refit"))
    words.append(f"{_clock(seconds)} from {_date(view.started)}")
    if view.incarnations > 1:
        words.append(f"resumed {_plural(view.incarnations - 1, 'time')}")
    words.append("still open" if view.status is None else f"status: {escaped(view.status)}")
    return " · ".join(words)


def _warnings(view: RunView) -> list[str]:
    lines = []
    if view.undone:
        made = _plural(view.undone, "step")
        lines.append(f"A resume went back behind {made}; what was made anew is shown.")
    if view.lost_lines:
        lines.append(f"{_plural(view.lost_lines, 'line')} of the trace could not be written.")
    return lines


def _date(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    except (OverflowError, ValueError, OSError):
        return "an unknown time"


def _clock(seconds: float) -> str:
    """Seconds as a person says them.

    >>> _clock(59.6), _clock(3700)
    ('1 min', '1 h 2 min')
    """
    minutes, rest = divmod(round(min(seconds, 1e12)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes} min" if hours else f"{minutes} min" if minutes else f"{rest} s"


# Charts.


def _charts(view: RunView, steps: Sequence[Stretch]) -> str:
    after = sum(view.after.dropped.values())
    late = f" {after:,} more were dropped after the last step." if after else ""
    size = steps[0].num_steps
    many = f" One point is {size} steps, their tokens added up." if size > 1 else ""
    charts = (
        (
            "age",
            330,
            "Batch age",
            "How many policy updates lay between sampling a token and training on it, averaged "
            "over the step's tokens, and where they were gained.",
        ),
        (
            "versions",
            370,
            "Which versions the batch was sampled from",
            "The share of each step's tokens that each version sampled; tokens below the line are "
            "older than the policy that was trained on them.",
        ),
        (
            "tokens",
            210,
            "Trained and dropped tokens",
            f"Dropped tokens stand at the step before which their groups were dropped.{late}",
        ),
        (
            "refits",
            180,
            "Refits and how long they paused generation",
            "Summed over engines: two engines paused for 3 s are 6 engine-seconds.",
        ),
        (
            "coverage",
            170,
            "Coverage and violations",
            "The share of trained tokens whose sampling version is known exactly; a cross is a "
            "step with facts that cannot all be true.",
        ),
    )
    return "\n".join(
        _chart(name, height, title, caption + many) for name, height, title, caption in charts
    )


def _chart(name: str, height: int, title: str, caption: str) -> str:
    return (
        f'<section><h2>{title}</h2><p class="small">{caption}</p>'
        f'<div id="{name}" class="chart" style="height:{height}px"></div></section>'
    )


def _whole_ticks(span: float) -> dict[str, Any]:
    return {"tickformat": "d", **({"dtick": 1} if span <= 16 else {})}


def _x(parts: Sequence[Stretch]) -> list[float]:
    return [p.first if p.first == p.last else (p.first + p.last) / 2 for p in parts]


def _steps(part: Stretch) -> str:
    return f"step {part.first}" if part.first == part.last else f"steps {part.first}–{part.last}"


def _line(parts: Sequence[Stretch], y: Sequence[float | None], name: str, **more: Any) -> Figure:
    mode = "lines+markers" if len(parts) <= 40 else "lines"
    return {
        "type": "scatter",
        "mode": mode,
        "marker": {"size": 5},
        "x": _x(parts),
        "y": list(y),
        "name": name,
        "hoverinfo": "skip",
        **more,
    }


def _age(parts: Sequence[Stretch], refits: Sequence[Mark]) -> Figure:
    def area(name: str, y: Sequence[float | None], colour: str) -> Figure:
        return _line(
            parts,
            y,
            name,
            mode="lines",
            stackgroup="age",
            fillcolor=colour,
            line={"width": 0, "color": colour},
        )

    ages = [p.batch_age for p in parts]
    tops = [p.age_p95 for p in parts]
    grey = {"width": 1, "color": "#5b636c"}
    data = [
        area("in flight", [p.age_in_flight for p in parts], IN_FLIGHT),
        area("in queue", [p.age_in_queue for p in parts], IN_QUEUE),
        _line(
            parts, [p.age_p50 for p in parts], "p50", mode="lines", line=grey, showlegend=False
        ),
        _line(
            parts,
            tops,
            "p50 to p95 of token age",
            mode="lines",
            line=grey,
            fill="tonexty",
            fillcolor="rgba(60,68,77,0.16)",
        ),
        *_bounds(parts),
        _line(
            parts,
            ages,
            "batch age (mean)",
            line={"color": INK, "width": 2.5},
            text=[_age_text(p) for p in parts],
            hoverinfo="text",
            hovertemplate="%{text}<extra></extra>",
        ),
    ]
    known = [y for y in [*ages, *tops] if y is not None]
    high, low = max([1.0, *known]), min([0.0, *known])
    rug = low - 0.05 * (high - low)
    data.append(_rug(refits, rug))
    return {
        "data": data,
        "layout": layout(
            x="training step",
            y="age in policy updates",
            yaxis={"range": [low - 0.09 * (high - low), high + 0.06 * (high - low)]},
        ),
    }


def _bounds(parts: Sequence[Stretch]) -> list[Figure]:
    """The least and the most that the mean can be, where they differ."""
    if all(p.age_lo == p.age_hi for p in parts):
        return []
    dashes = {"color": "#a1458b", "width": 1.5, "dash": "dot"}
    low = _line(
        parts, [p.age_lo for p in parts], "bounds of the mean", mode="lines", line=dashes
    )
    high = _line(
        parts, [p.age_hi for p in parts], "age_hi", mode="lines", line=dashes, showlegend=False
    )
    return [low, high]


def _age_text(part: Stretch) -> str:
    return (
        f"<b>{_steps(part)}</b>, updating version {part.version}<br>"
        f"batch age {number(part.batch_age)} updates = {number(part.age_in_flight)} in flight"
        f" + {number(part.age_in_queue)} in queue<br>"
        f"half of the tokens ≤ {number(part.age_p50)}, 95 % ≤ {number(part.age_p95)}<br>"
        f"between {number(part.age_lo)} and {number(part.age_hi)}, coverage "
        f"{share(part.coverage)}, {part.tokens:,} tokens"
    )


def _rug(refits: Sequence[Mark], y: float) -> Figure:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": "refits",
        "x": [mark.at for mark in refits],
        "y": [y] * len(refits),
        "marker": {
            "symbol": "line-ns-open",
            "size": 8,
            "color": "#3d444d",
            "line": {"width": 1},
        },
        "text": [_mark_text(mark) for mark in refits],
        "hovertemplate": "%{text}<extra></extra>",
    }


def _mark_text(mark: Mark) -> str:
    done = [refit for refit in mark.refits if refit.aborted is None]
    aborted = len(mark.refits) - len(done)
    versions = sorted({refit.version for refit in done})
    words = _plural(len(done), "refit")
    if versions:
        words += f" to version {versions[0]}"
        words += f"–{versions[-1]}" if len(versions) > 1 else ""
    if aborted:
        words += f", {aborted} aborted"
    for engine, seconds in list(mark.pause_seconds.items())[:NAMED]:
        words += f"<br>{label(engine)} paused {seconds:.2f} s"
    return words


def cells(
    parts: Sequence[Stretch], counts: Sequence[Mapping[int, int]]
) -> tuple[list[float], list[float], list[list[float | None]]]:
    """The shares of each stretch's tokens, as edges of columns and rows, and rows of cells.

    More than `MOST` different values are put together in rows of several; a cell without a token
    is None. Steps that the run skipped are a column of their own.
    """
    low = min((min(each) for each in counts if each), default=0)
    high = max((max(each) for each in counts if each), default=0)
    size = -(-(high - low + 1) // MOST)
    rows = -(-(high - low + 1) // size)
    columns: list[dict[int, float]] = []
    edges = [parts[0].first - 0.5]
    for part, each in zip(parts, counts, strict=True):
        if part.first - 0.5 > edges[-1]:
            edges.append(part.first - 0.5)
            columns.append({})
        edges.append(part.last + 0.5)
        total = sum(each.values())
        sums: Counter[int] = Counter()
        for value, count in each.items():
            sums[(value - low) // size] += count
        columns.append({row: count / total for row, count in sums.items() if count})
    z = [[column.get(row) for column in columns] for row in range(rows)]
    return edges, [low - 0.5 + size * row for row in range(rows + 1)], z


def _versions(parts: Sequence[Stretch]) -> Figure:
    by_version = _heat(parts, [p.tokens_by_version for p in parts], "sampled by version")
    by_age = _heat(parts, [p.tokens_by_age for p in parts], "age")
    trained = _line(
        parts,
        [p.version for p in parts],
        "version that the step updated",
        mode="lines",
        line={"color": DROPPED, "width": 1.5},
        showlegend=True,
    )
    long = parts[0].num_steps > 1 or len(by_version["z"]) > 150
    shown = (not long, long, not long)
    for trace, visible in zip((by_version, by_age, trained), shown, strict=True):
        trace["visible"] = visible
    highest = max((c for t in (by_version, by_age) for row in t["z"] for c in row if c), default=1)
    titles = ("sampling version", "age in policy updates")
    views = [
        {
            "label": words,
            "method": "update",
            "args": [
                {"visible": list(visible)},
                {"yaxis.title.text": titles[at], "yaxis.autorange": True},
            ],
        }
        for at, (words, visible) in enumerate(
            (("by version", (True, False, True)), ("by age", (False, True, False)))
        )
    ]
    return {
        "data": [by_version, by_age, trained],
        "layout": layout(
            x="training step",
            y=titles[long],
            yaxis={"tickformat": "d"},
            coloraxis={
                "colorscale": _BLUES,
                "cmin": 0,
                "cmax": highest,
                "colorbar": {
                    "orientation": "h",
                    "x": 0,
                    "xanchor": "left",
                    "y": 1.0,
                    "yanchor": "bottom",
                    "len": 0.28,
                    "thickness": 9,
                    "tickformat": ".0%",
                    "ticklabelposition": "outside top",
                    "nticks": 5,
                },
            },
            updatemenus=[
                {
                    "type": "buttons",
                    "direction": "right",
                    "active": int(long),
                    "buttons": views,
                    "x": 1,
                    "xanchor": "right",
                    "y": 1.02,
                    "yanchor": "bottom",
                    "pad": {"t": 0, "b": 0, "r": 0},
                    "font": {"size": 12},
                }
            ],
            legend={"orientation": "h", "x": 0.33, "y": 1, "yanchor": "bottom"},
        ),
    }


def _heat(parts: Sequence[Stretch], counts: Sequence[Mapping[int, int]], what: str) -> Figure:
    x, y, z = cells(parts, counts)
    return {
        "type": "heatmap",
        "x": x,
        "y": y,
        "z": z,
        "coloraxis": "coloraxis",
        "hoverongaps": False,
        "hovertemplate": f"step %{{x:.0f}}<br>{what} %{{y:.0f}}<br>"
        "%{z:.1%} of the tokens<extra></extra>",
    }


def _named(totals: Mapping[str, float]) -> list[str]:
    """The names that matter most; at most one more than `NAMED`, so that "others" is never one."""
    ranked = sorted(totals, key=lambda name: (-totals[name], name))
    return ranked if len(ranked) <= NAMED + 1 else ranked[:NAMED]


def _bars(x: Sequence[float], y: Sequence[float], width: float, name: str, **more: Any) -> Figure:
    return {
        "type": "bar",
        "x": list(x),
        "y": list(y),
        "width": width,
        "name": label(name),
        **more,
    }


def _tokens(parts: Sequence[Stretch]) -> Figure:
    width = parts[0].num_steps * (0.86 if len(parts) <= 150 else 1)
    x = _x(parts)
    totals: Counter[str] = Counter()
    for part in parts:
        totals.update(part.dropped)
    named = _named(totals)
    hover = {"text": [_steps(p) for p in parts], "textposition": "none"}
    hover["hovertemplate"] = "%{text}<br>%{y:,} tokens<extra>%{fullData.name}</extra>"
    series = [("trained", [p.tokens for p in parts], {"color": TRAINED})]
    for at, reason in enumerate(named):
        look = {"color": "#fff", "pattern": _pattern(at)}
        series.append(
            (f"dropped: {reason}", [p.dropped.get(reason, 0) for p in parts], look)
        )
    if len(named) < len(totals):
        rest = [sum(p.dropped.values()) - sum(p.dropped.get(r, 0) for r in named) for p in parts]
        series.append((f"dropped: {len(totals) - len(named)} other reasons", rest, {"color": "#8a8f98"}))
    return {
        "data": [
            _bars(x, y, width, name, marker={"line": {"width": 0}, **look}, **hover)
            for name, y, look in series
        ],
        "layout": layout(
            x="training step",
            y="tokens" if parts[0].num_steps == 1 else f"tokens in {parts[0].num_steps} steps",
            barmode="stack",
        ),
    }


def _pattern(at: int) -> dict[str, Any]:
    colour = (DROPPED, "#8c3a00")[at % 2]
    return {"shape": _PATTERNS[at], "fgcolor": colour, "fillmode": "overlay", "size": 5, "solidity": 0.6}


def _refits(found: Sequence[Mark]) -> Figure:
    pauses = [mark.pause_seconds for mark in found]
    totals: Counter[str] = Counter()
    for each in pauses:
        for engine, seconds in each.items():
            totals[engine] += seconds  # type: ignore[assignment]
    named = _named(totals)
    x = [mark.at for mark in found]
    width = min((b - a for a, b in zip(x, x[1:], strict=False)), default=1.0)
    width *= 0.5 if len(x) <= 150 else 1
    series = [(engine, [each.get(engine, 0.0) for each in pauses]) for engine in named]
    if len(named) < len(totals):
        rest = [sum(each.values()) - sum(each.get(e, 0.0) for e in named) for each in pauses]
        series.append((f"{len(totals) - len(named)} other engines", rest))
    data = [
        _bars(
            x,
            y,
            width,
            engine,
            marker={"color": SERIES[at % len(SERIES)], "line": {"width": 0}},
            hovertemplate="%{y:.2f} s<extra>%{fullData.name}</extra>",
        )
        for at, (engine, y) in enumerate(series)
    ]
    data.append(_crosses([(m.at, m) for m in found if any(r.aborted is not None for r in m.refits)]))
    return {
        "data": data,
        "layout": layout(
            x="training step", y="engine-seconds", barmode="stack", yaxis={"rangemode": "tozero"}
        ),
    }


def _crosses(aborted: Sequence[tuple[float, Mark]]) -> Figure:
    texts = []
    for _, mark in aborted:
        reasons = [f"{label(r.engine)}: {label(r.aborted)}" for r in mark.refits if r.aborted]
        texts.append("aborted<br>" + "<br>".join(reasons[:NAMED]))
    return _marker([at for at, _ in aborted], [0.0] * len(aborted), texts, "aborted", symbol="x")


def _marker(
    x: Sequence[float], y: Sequence[float], texts: Sequence[str], name: str, *, symbol: str
) -> Figure:
    return {
        "type": "scatter",
        "mode": "markers",
        "x": list(x),
        "y": list(y),
        "name": name,
        "showlegend": bool(x),
        "cliponaxis": False,
        "marker": {"symbol": symbol, "size": 9, "color": DROPPED, "line": {"width": 0}},
        "text": list(texts),
        "hovertemplate": "%{text}<extra></extra>",
    }


def _coverage(parts: Sequence[Stretch]) -> Figure:
    covered = [None if p.coverage is None else 100 * p.coverage for p in parts]
    odd = [(at, p) for at, p in enumerate(parts) if p.violations]
    x = _x(parts)
    return {
        "data": [
            _line(
                parts,
                covered,
                "coverage",
                line={"color": TRAINED, "width": 2},
                text=[f"{_steps(p)}: {share(p.coverage)} of {p.tokens:,} tokens" for p in parts],
                hovertemplate="%{text}<extra></extra>",
                showlegend=True,
            ),
            _marker(
                [x[at] for at, _ in odd],
                [covered[at] or 0.0 for at, _ in odd],
                [f"{_steps(p)}: {_plural(p.violations, 'violation')}" for _, p in odd],
                "violations",
                symbol="x",
            ),
        ],
        "layout": layout(
            x="training step",
            y="% of tokens",
            yaxis={"range": [-4, 106], "tickvals": [0, 25, 50, 75, 100]},
        ),
    }


def age_shares(counts: Mapping[int, int]) -> tuple[list[int], list[float], int]:
    """Ages, the share of the tokens that have each, and how many ages one entry stands for."""
    if not counts:
        return [], [], 1
    low, high = min(counts), max(counts)
    size = -(-(high - low + 1) // MOST)
    sums: Counter[int] = Counter()
    for age, count in counts.items():
        sums[low + (age - low) // size * size] += count
    total = sum(sums.values())
    return sorted(sums), [sums[age] / total for age in sorted(sums)], size


def _ages(view: RunView) -> Figure:
    dropped: Counter[int] = Counter()
    for interval in view.intervals:
        dropped.update(interval.dropped_ages)
    data = []
    looks: tuple[dict[str, Any], ...] = (
        {"color": TRAINED},
        {"color": "#fff", "pattern": _pattern(0), "line": {"width": 1, "color": DROPPED}},
    )
    trained = view.whole.tokens_by_age if view.whole else {}
    for name, counts, look in zip(
        ("trained", "dropped"), (trained, dropped), looks, strict=True
    ):
        ages, shares, _ = age_shares(counts)
        data.append(
            {
                "type": "bar",
                "x": ages,
                "y": [100 * each for each in shares],
                "name": f"{name} ({sum(counts.values()):,} tokens)",
                "marker": look,
                "hovertemplate": f"age %{{x}}: %{{y:.1f}} % of the {name} tokens<extra></extra>",
            }
        )
    span = max([*trained, *dropped, 0]) - min([*trained, *dropped, 0])
    return {
        "data": data,
        "layout": layout(
            x="age in policy updates",
            y="% of tokens",
            barmode="group",
            bargap=0.15,
            xaxis=_whole_ticks(span),
        ),
    }


# Tables.


def _tables(view: RunView) -> str:
    ages = _chart("ages", 260, "Token ages", "Of the whole run; of dropped tokens, the age when they were dropped.") if view.rows else ""
    tables = f"<div>{_violations(view)}{_reasons(view)}{_engines(view)}</div>"
    return f'<div class="columns">{ages}{tables}</div>'


def _section(title: str, content: str) -> str:
    return f"<section><h2>{title}</h2>{content}</section>"


def _listed(names: Sequence[str]) -> str:
    more = len(names) - LISTED
    return f'<p class="small">and {more:,} more</p>' if more > 0 else ""


def _reasons(view: RunView) -> str:
    totals: Counter[str] = Counter()
    for interval in view.intervals:
        totals.update(interval.dropped)
    if not totals:
        return ""
    tokens = view.dropped_tokens + (view.whole.tokens if view.whole else 0)
    ranked = sorted(totals, key=lambda reason: (-totals[reason], reason))
    rows = [
        (escaped(reason), f"{totals[reason]:,}", share(totals[reason] / tokens if tokens else None))
        for reason in ranked[:LISTED]
    ]
    return _section(
        "Dropped", table(("reason", "tokens", "of all tokens"), rows) + _listed(ranked)
    )


def _engines(view: RunView) -> str:
    pauses: dict[str, list[float]] = {}
    for interval in view.intervals:
        for refit in interval.refits:
            if refit.pause_seconds is not None:
                pauses.setdefault(refit.engine, []).append(refit.pause_seconds)
    engines = sorted({*view.refits, *view.aborted})
    if not engines:
        return ""
    rows = []
    for engine in engines[:LISTED]:
        seconds = pauses.get(engine, [])
        rows.append(
            (
                escaped(engine),
                f"{view.refits[engine]:,}",
                f"{view.aborted[engine]:,}",
                f"{view.without_cut[engine]:,}",
                f"{sum(seconds):,.1f} s" if seconds else "–",
                f"{max(seconds):,.2f} s" if seconds else "–",
            )
        )
    header = ("engine", "refits", "aborted", "without exact cut", "paused in all", "longest pause")
    return _section("Engines", table(header, rows) + _listed(engines))


def _violations(view: RunView) -> str:
    if not view.found:
        return _section("Violations", "<p>None: all facts of the trace can be true.</p>")
    names = sorted(view.found, key=lambda name: (-view.found[name].times, name))
    rows = [
        (escaped(name), escaped(found.detail), f"{found.times:,}", f"{found.step:,}")
        for name, found in ((name, view.found[name]) for name in names[:LISTED])
    ]
    header = ("violation", "the first of them", "times", "at step")
    return _section("Violations", table(header, rows, text=2) + _listed(names))


_WORDS = """<section><h2>Words</h2><dl class="words small">
<dt>Token age</dt><dd>The version (number of policy updates) that the policy had just before the update
that consumed the token, minus the version that sampled it. Synchronous training: always 0.</dd>
<dt>Batch age</dt><dd>The mean token age over a step's trained tokens, every token weighing one. In
flight is what was gained until the newest trained token of its group was sampled, in queue is the rest.</dd>
<dt>Coverage</dt><dd>The share of trained tokens whose version is known exactly. The others count under
the oldest version that may have sampled them; the bounds say what the mean can be.</dd>
<dt>Age of a dropped token</dt><dd>The policy's version when its group was dropped, minus the version
that sampled it.</dd></dl></section>"""
