"""The picture of a run: one PNG for pages that show images only. Matplotlib is imported late."""

from __future__ import annotations

import io
import math
import os
import warnings
from collections.abc import Sequence
from textwrap import fill
from typing import Any

from rl_staleness.heat import cells, is_long
from rl_staleness.page import (
    BOUNDS,
    DROPPED,
    IN_FLIGHT,
    IN_QUEUE,
    INK,
    TRAINED,
    MissingExtra,
    clean,
    middles,
)
from rl_staleness.report import sentence, title
from rl_staleness.view import MOST, RunView, Stretch, look_at, marks, stretches

__all__ = ["INCHES", "PIXELS_PER_INCH", "picture", "plot"]

INCHES = (12.0, 9.0)
PIXELS_PER_INCH = 100

_NAN = float("nan")


def plot(trace: str | os.PathLike[str]) -> bytes:
    """Draw a trace: the bytes of a PNG.

    Raises:
        TraceError: as `rl_staleness.trace.read`.
        OSError: the trace cannot be read.
        MissingExtra: Matplotlib is not installed.
    """
    _figure()  # what is missing is said before a long trace is read
    return picture(look_at(trace))


def picture(view: RunView) -> bytes:
    """Draw a run that was collected already."""
    figure = _figure()
    steps = stretches(view.rows, MOST)
    axes = figure.subplots(
        4, 1, sharex=True, gridspec_kw={"height_ratios": [3, 2.6, 1.5, 1.0]}, squeeze=True
    )
    if steps:
        _age(axes[0], steps, [mark.at for mark in marks(view, MOST)])
        _versions(figure, axes[1], steps)
        _tokens(axes[2], steps)
        _coverage(axes[3], steps)
        axes[3].set_xlim(*_ends(steps))
    axes[3].set_xlabel("training step" + _resolution(steps))
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.xaxis.get_major_locator().set_params(integer=True)
    words = f"{clean(title(view))}\n{fill(sentence(view), 140)}"
    figure.suptitle(words, x=0.01, ha="left", fontsize=11, parse_math=False)
    return _saved(figure)


def _figure() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra(
            "the picture needs matplotlib: pip install 'rl-staleness[report]'"
        ) from error
    return Figure(figsize=INCHES, dpi=PIXELS_PER_INCH, layout="constrained")


def _saved(figure: Any) -> bytes:
    file = io.BytesIO()
    with warnings.catch_warnings():  # a name in a script that the font does not have
        warnings.filterwarnings("ignore", message="Glyph ", category=UserWarning)
        figure.savefig(file, format="png")
    return file.getvalue()


def _resolution(steps: Sequence[Stretch]) -> str:
    if not steps or steps[0].num_steps == 1:
        return ""
    return f" (one point is {steps[0].num_steps} steps, their tokens added up)"


def _floats(values: Sequence[float | None]) -> list[float]:
    """Numbers as Matplotlib takes them all: whole ones may be too large for NumPy's integers."""
    return [_NAN if value is None else float(value) for value in values]


def _ends(steps: Sequence[Stretch]) -> tuple[float, float]:
    """Of the axis of steps: one more on both sides, or as many as floats of their size tell."""
    first, last = float(steps[0].first), float(steps[-1].last)
    room = max(1.0, 16 * math.ulp(last))
    return first - room, last + room


def _age(axis: Any, steps: Sequence[Stretch], refits: Sequence[float]) -> None:
    x = _floats(middles(steps))
    flight = _floats([step.age_in_flight for step in steps])
    age = _floats([step.batch_age for step in steps])
    p50, p95 = (_floats([getattr(s, name) for s in steps]) for name in ("age_p50", "age_p95"))
    zero = [0.0] * len(x)
    axis.fill_between(x, zero, flight, color=IN_FLIGHT, linewidth=0, label="in flight")
    axis.fill_between(x, flight, age, color=IN_QUEUE, linewidth=0, label="in queue")
    axis.fill_between(x, p50, p95, color="#3c444d", alpha=0.16, linewidth=0, label="p50 to p95")
    low, high = (_floats([getattr(s, name) for s in steps]) for name in ("age_lo", "age_hi"))
    if low != high:
        dots = {"color": BOUNDS, "linewidth": 1.3, "linestyle": ":"}
        axis.plot(x, low, label="bounds of the mean", **dots)
        axis.plot(x, high, **dots)
    marker = "o" if len(x) <= 40 else None
    axis.plot(x, age, color=INK, linewidth=2, marker=marker, markersize=4, label="batch age")
    if refits:
        place = axis.get_xaxis_transform()
        axis.plot(
            refits,
            [0.015] * len(refits),
            "|",
            color="#3d444d",
            markersize=6,
            transform=place,
            label="refits",
        )
    if not any(value for value in (*p95, *age, *high) if value == value):
        axis.set_ylim(-0.05, 1.05)  # an axis around nothing but 0 would show noise
    axis.set_ylabel("age in policy updates")
    axis.legend(ncols=6, frameon=False, loc="lower left", bbox_to_anchor=(0, 1), borderpad=0)


def _versions(figure: Any, axis: Any, steps: Sequence[Stretch]) -> None:
    long = is_long(steps)
    x, y, z = cells(steps, [s.tokens_by_age if long else s.tokens_by_version for s in steps])
    shares = [_floats(row) for row in z]
    mesh = axis.pcolormesh(
        _floats(x), _floats(y), shares, cmap="Blues", vmin=-0.15, rasterized=True
    )
    mesh.set_clim(-0.15, max((c for row in z for c in row if c), default=1.0))
    bar = figure.colorbar(mesh, ax=axis, pad=0.01, aspect=14)
    bar.ax.set_ylim(0, None)
    bar.set_label("share of tokens")
    if long:
        axis.set_ylabel("token age\nin policy updates")
    else:
        trained = _floats([step.version for step in steps])
        axis.plot(_floats(middles(steps)), trained, color=DROPPED, linewidth=1)
        axis.set_ylabel("sampled by version\n(line: trained)")


def _tokens(axis: Any, steps: Sequence[Stretch]) -> None:
    x = _floats(middles(steps))
    width = _floats([step.last - step.first + 1 for step in steps])
    trained = _floats([step.tokens for step in steps])
    dropped = _floats([sum(step.dropped.values()) for step in steps])
    axis.bar(x, trained, width, color=TRAINED, label="trained")
    if any(dropped):
        look = {"color": "#fff", "hatch": "////", "edgecolor": DROPPED, "linewidth": 0}
        axis.bar(x, dropped, width, bottom=trained, label="dropped", **look)
    axis.set_ylabel("tokens")
    axis.legend(ncols=2, frameon=False, loc="lower left", bbox_to_anchor=(0, 1), borderpad=0)


def _coverage(axis: Any, steps: Sequence[Stretch]) -> None:
    x = _floats(middles(steps))
    covered = _floats([None if s.coverage is None else 100 * s.coverage for s in steps])
    axis.plot(x, covered, color=TRAINED, marker="o" if len(x) == 1 else None)
    odd = [at for at, step in zip(x, steps, strict=True) if step.violations]
    if odd:
        axis.plot(odd, [0] * len(odd), "x", color=DROPPED, label="violations", clip_on=False)
        axis.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), borderpad=0)
    axis.set_ylim(-4, 106)
    axis.set_ylabel("coverage, %")
