"""The heat map of a run: which versions each step's tokens were sampled from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from rl_staleness.page import DROPPED, Figure, layout, line, whole_ticks
from rl_staleness.view import MOST, Stretch

__all__ = ["cells", "is_long", "versions"]

_BLUES = [[0, "#dcebf7"], [0.15, "#9fc9e8"], [0.4, "#4c93cb"], [0.7, "#165c9e"], [1, "#08254a"]]


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


def is_long(parts: Sequence[Stretch]) -> bool:
    """Whether a run has so many versions that only ages, not versions, can be told apart."""
    versions = [version for part in parts for version in part.tokens_by_version]
    return max(versions, default=0) - min(versions, default=0) >= 150


def versions(parts: Sequence[Stretch]) -> Figure:
    """Steps by sampling version, or by age; the buttons change between the two."""
    by_version = _heat(parts, [p.tokens_by_version for p in parts], "sampled by version")
    by_age = _heat(parts, [p.tokens_by_age for p in parts], "age")
    trained = line(
        parts,
        [p.version for p in parts],
        "version that the step updated",
        mode="lines",
        line={"color": DROPPED, "width": 1.5},
        showlegend=True,
    )
    long = is_long(parts)
    for trace, visible in zip((by_version, by_age, trained), _SHOWN[long], strict=True):
        trace["visible"] = visible
    axes = [
        {"title": {"text": title, "standoff": 8}, **whole_ticks(heat["y"][-1] - heat["y"][0])}
        for title, heat in (("sampling version", by_version), ("age in policy updates", by_age))
    ]
    return {
        "data": [by_version, by_age, trained],
        "layout": layout(
            x="training step",
            y="",
            yaxis=axes[long],
            updatemenus=[_buttons(axes, active=int(long))],
            legend={"x": 0.01, "y": 0.97, "bgcolor": "rgba(255,255,255,0.7)"},  # where no cell is
        ),
    }


_SHOWN = ((True, False, True), (False, True, False))
"""Which of the three traces are shown by version, and which by age."""


def _buttons(axes: Sequence[Figure], *, active: int) -> Figure:
    views = [
        {
            "label": ("by version", "by age")[at],
            "method": "update",
            "args": [
                {"visible": list(_SHOWN[at])},
                {
                    "yaxis.title.text": axis["title"]["text"],
                    "yaxis.dtick": axis.get("dtick"),
                    "yaxis.autorange": True,
                },
            ],
        }
        for at, axis in enumerate(axes)
    ]
    return {
        "type": "buttons",
        "direction": "right",
        "active": active,
        "buttons": views,
        "x": 1,
        "xanchor": "right",
        "y": 1.02,
        "yanchor": "bottom",
        "pad": {"t": 0, "b": 0, "r": 0},
        "font": {"size": 12},
    }


_COLOUR_BAR = {
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
}


def _heat(parts: Sequence[Stretch], counts: Sequence[Mapping[int, int]], what: str) -> Figure:
    x, y, z = cells(parts, counts)
    return {
        "type": "heatmap",
        "x": x,
        "y": y,
        "z": z,
        "zmin": 0,
        "zmax": max((cell for row in z for cell in row if cell), default=1),
        "colorscale": _BLUES,
        "colorbar": _COLOUR_BAR,
        "hoverongaps": False,
        "hovertemplate": f"step %{{x:.0f}}<br>{what} %{{y:.0f}}<br>"
        "%{z:.1%} of the tokens<extra></extra>",
    }
