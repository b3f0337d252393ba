"""The charts of a run, as data and layout of Plotly. Nothing is drawn or written here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from rl_staleness.page import (
    BOUNDS,
    DROPPED,
    IN_FLIGHT,
    IN_QUEUE,
    INK,
    SERIES,
    TRAINED,
    Figure,
    label,
    layout,
    line,
    middles,
    number,
    plural,
    share,
    span_of,
    whole_ticks,
)
from rl_staleness.view import MOST, Mark, RunView, Stretch

__all__ = ["age", "age_shares", "ages", "coverage", "refits", "tokens"]

NAMED = 5
"""Engines and reasons that have a colour of their own; the others share one."""

_PATTERNS = ("/", "\\", "x", ".", "-", "|")


def age(parts: Sequence[Stretch], refits: Sequence[Mark]) -> Figure:
    def area(name: str, y: Sequence[float | None], colour: str) -> Figure:
        return line(
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
        line(parts, [p.age_p50 for p in parts], "p50", mode="lines", line=grey, showlegend=False),
        line(
            parts,
            tops,
            "p50 to p95 of token age",
            mode="lines",
            line=grey,
            fill="tonexty",
            fillcolor="rgba(60,68,77,0.16)",
        ),
        *_bounds(parts),
        line(
            parts,
            ages,
            "batch age (mean)",
            line={"color": INK, "width": 2.5},
            text=[_age_text(p) for p in parts],
            hoverinfo="text",
            hovertemplate="%{text}<extra></extra>",
        ),
    ]
    bounds = [p.age_lo for p in parts] + [p.age_hi for p in parts]
    known = [y for y in [*ages, *tops, *bounds] if y is not None]
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
    dashes = {"color": BOUNDS, "width": 1.5, "dash": "dot"}
    low = line(parts, [p.age_lo for p in parts], "bounds of the mean", mode="lines", line=dashes)
    high = line(
        parts, [p.age_hi for p in parts], "age_hi", mode="lines", line=dashes, showlegend=False
    )
    return [low, high]


def _age_text(part: Stretch) -> str:
    return (
        f"<b>{span_of(part)}</b>, updating version {part.version}<br>"
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
    words = plural(len(done), "refit")
    if versions:
        words += f" to version {versions[0]}"
        words += f" to {versions[-1]}" if len(versions) > 1 else ""
    if aborted:
        words += f", {aborted} aborted"
    for engine, seconds in list(mark.pause_seconds.items())[:NAMED]:
        words += f"<br>{label(engine)} paused {seconds:.2f} s"
    return words


def _named(totals: Mapping[str, float]) -> list[str]:
    """The names that matter most; at most one more than `NAMED`, so that "others" is never one."""
    ranked = sorted(totals, key=lambda name: (-totals[name], name))
    return sorted(ranked if len(ranked) <= NAMED + 1 else ranked[:NAMED])


def _bars(x: Sequence[float], y: Sequence[float], width: float, name: str, **more: Any) -> Figure:
    return {
        "type": "bar",
        "x": list(x),
        "y": list(y),
        "width": width,
        "name": label(name),
        **more,
    }


def tokens(parts: Sequence[Stretch]) -> Figure:
    width = parts[0].num_steps * (0.86 if len(parts) <= 150 else 1)
    x = middles(parts)
    totals: Counter[str] = Counter()
    for part in parts:
        totals.update(part.dropped)
    named = _named(totals)
    hover = {"text": [span_of(p) for p in parts], "textposition": "none"}
    hover["hovertemplate"] = "%{text}<br>%{y:,} tokens<extra>%{fullData.name}</extra>"
    series: list[tuple[str, list[int], Figure]] = [
        ("trained", [p.tokens for p in parts], {"color": TRAINED})
    ]
    for at, reason in enumerate(named):
        look = {"color": "#fff", "pattern": _pattern(at)}
        series.append((f"dropped: {reason}", [p.dropped.get(reason, 0) for p in parts], look))
    if len(named) < len(totals):
        rest = [sum(p.dropped.values()) - sum(p.dropped.get(r, 0) for r in named) for p in parts]
        series.append(
            (f"dropped: {len(totals) - len(named)} other reasons", rest, {"color": "#8a8f98"})
        )
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
    return {
        "shape": _PATTERNS[at],
        "fgcolor": colour,
        "fillmode": "overlay",
        "size": 5,
        "solidity": 0.6,
    }


def refits(found: Sequence[Mark]) -> Figure:
    pauses = [mark.pause_seconds for mark in found]
    totals: Counter[str] = Counter()
    for each in pauses:
        for engine, seconds in each.items():
            totals[engine] += seconds  # type: ignore[assignment]
    named = _named(totals)
    x = [mark.at for mark in found]
    width = min((b - a for a, b in pairwise(x)), default=1.0)
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
    data.append(
        _crosses([(m.at, m) for m in found if any(r.aborted is not None for r in m.refits)])
    )
    return {
        "data": data,
        "layout": layout(
            x="training step", y="engine-seconds", barmode="stack", yaxis={"rangemode": "tozero"}
        ),
    }


def _crosses(aborted: Sequence[tuple[float, Mark]]) -> Figure:
    texts: list[str] = []
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
        "marker": {
            "symbol": symbol,
            "size": 9 if len(x) <= 40 else 6,
            "color": DROPPED,
            "line": {"width": 0},
        },
        "text": list(texts),
        "hovertemplate": "%{text}<extra></extra>",
    }


def coverage(parts: Sequence[Stretch]) -> Figure:
    covered = [None if p.coverage is None else 100 * p.coverage for p in parts]
    odd = [(at, p) for at, p in enumerate(parts) if p.violations]
    x = middles(parts)
    return {
        "data": [
            line(
                parts,
                covered,
                "coverage",
                line={"color": TRAINED, "width": 2},
                text=[f"{span_of(p)}: {share(p.coverage)} of {p.tokens:,} tokens" for p in parts],
                hovertemplate="%{text}<extra></extra>",
                showlegend=True,
            ),
            _marker(
                [x[at] for at, _ in odd],
                [covered[at] or 0.0 for at, _ in odd],
                [f"{span_of(p)}: {plural(p.violations, 'violation')}" for _, p in odd],
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


def ages(view: RunView) -> Figure:
    dropped: Counter[int] = Counter()
    for interval in view.intervals:
        dropped.update(interval.dropped_ages)
    data: list[Figure] = []
    looks: tuple[dict[str, Any], ...] = (
        {"color": TRAINED},
        {"color": "#fff", "pattern": _pattern(0), "line": {"width": 1, "color": DROPPED}},
    )
    trained = view.whole.tokens_by_age if view.whole else {}
    for name, counts, look in zip(("trained", "dropped"), (trained, dropped), looks, strict=True):
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
            xaxis=whole_ticks(span),
        ),
    }
