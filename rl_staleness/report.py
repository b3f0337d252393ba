"""The report of a run: one HTML file that says how old the tokens were that were trained on.

Plotly is imported only when it draws. The pictures hold the numbers of `rl_staleness.trace.steps`;
a run too long to draw step by step is drawn in stretches of steps, and says so.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timezone

from rl_staleness import charts, heat
from rl_staleness.page import (
    Figure,
    escaped,
    number,
    page,
    plotly_js,
    plural,
    share,
    table,
    whole_ticks,
)
from rl_staleness.view import MOST, RunView, Stretch, look_at, marks, stretches

__all__ = ["draw", "report", "sentence", "title"]

LISTED = 50
"""Rows of a table at most."""


def report(trace: str | os.PathLike[str]) -> str:
    """Draw a trace: the text of an HTML file that opens anywhere, without a network.

    Raises:
        TraceError: as `rl_staleness.trace.read`.
        OSError: the trace cannot be read.
        MissingExtra: Plotly is not installed.
    """
    plotly_js()  # what is missing is said before a long trace is read
    return draw(look_at(trace))


def draw(view: RunView) -> str:
    """Draw a run that was collected already."""
    parts = [_header(view)]
    figures: dict[str, Figure] = {}
    if view.rows:
        steps, refits = stretches(view.rows, MOST), marks(view, MOST)
        figures = {
            "age": charts.age(steps, refits),
            "versions": heat.versions(steps),
            "tokens": charts.tokens(steps),
            "refits": charts.refits(refits),
            "coverage": charts.coverage(steps),
            "ages": charts.ages(view),
        }
        span = [steps[0].first - 1, steps[-1].last + 1]
        for name, figure in figures.items():
            figure["linked"] = name != "ages"
            if figure["linked"]:
                figure["layout"]["xaxis"] |= {
                    "range": span,
                    **whole_ticks(span[1] - span[0]),
                }
        parts.append(_charts(view, steps))
    parts.append(_tables(view))
    parts.append(_WORDS)
    return page(title=title(view), body="\n".join(parts), figures=figures)


def title(view: RunView) -> str:
    """The name of the run, not yet escaped; of one that it was given by default, the beginning."""
    made_up = re.fullmatch("[0-9a-f]{32}", view.run)
    return f"Staleness of run {view.run[:8]}" if made_up else f"Staleness of {view.run}"


def sentence(view: RunView) -> str:
    """What the run looks like, in one sentence of plain text."""
    whole = view.whole
    if whole is None:
        return "No step has been trained yet."
    if whole.batch_age is None:
        trained = plural(whole.tokens, "token") if whole.tokens else "no token"
        age = f"{plural(whole.num_steps, 'step')} trained {trained}, none of a known version"
        age = age if whole.tokens else age.partition(",")[0]
    elif set(whole.tokens_by_age) == {0} and whole.age_hi == 0:
        age = "Every trained token was sampled by the policy that the step updated: batch age 0"
    else:
        first, last = _first_and_last(view)
        age = (
            f"The average trained token was {number(whole.batch_age)} policy updates old "
            f"({number(first)} at the first step, {number(last)} at the last)"
        )
    known = f"{share(whole.known_coverage)} of the sampling versions are known exactly"
    if whole.age_lo != whole.age_hi:
        known += f" (so the average is between {number(whole.age_lo)} and {number(whole.age_hi)})"
    known = known if whole.known_coverage is not None else "coverage is not known"
    dropped = f"{share(_dropped_share(view))} of all tokens were dropped"
    dropped = dropped if view.dropped_tokens else "nothing was dropped"
    violations = plural(view.violations, "violation") if view.violations else "no violations"
    return f"{age}; {known}, {dropped}, {violations}."


def _first_and_last(view: RunView) -> tuple[float, float]:
    known = [row.numbers.batch_age for row in view.rows if row.numbers.batch_age is not None]
    return known[0], known[-1]


def _dropped_share(view: RunView) -> float | None:
    whole = view.whole
    tokens = view.dropped_tokens + (whole.tokens if whole else 0)
    return view.dropped_tokens / tokens if tokens else None


def _header(view: RunView) -> str:
    tiles = "".join(f"<div><dt>{title}</dt><dd>{value}</dd></div>" for title, value in _tiles(view))
    warnings = "".join(f'<p class="small warning">{line}</p>' for line in _warnings(view))
    return (
        f"<header><h1>{escaped(title(view))}</h1>"
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
        coverage += f" <small>not known at {plural(whole.num_incomplete, 'step')}</small>"
    return [
        ("batch age (first → last)", age),
        ("in flight + in queue", f"{parts} <small>updates</small>"),
        ("p50 / p95 of token age", f"{middle} <small>updates, oldest {largest}</small>"),
        ("coverage", coverage),
        ("violations", f"{view.violations:,}"),
        ("dropped tokens", share(_dropped_share(view))),
    ]


def _about(view: RunView) -> str:
    seconds = max(0.0, view.ended - view.started)
    words = [plural(len(view.rows), "step"), plural(view.updates, "policy update")]
    words.append(plural(view.whole.tokens if view.whole else 0, "trained token"))
    words.append(plural(sum(view.refits.values()), "refit"))
    words.append(f"{_clock(seconds)} from {_date(view.started)}")
    if view.incarnations > 1:
        words.append(f"resumed {plural(view.incarnations - 1, 'time')}")
    words.append("still open" if view.status is None else f"status: {escaped(view.status)}")
    return " · ".join(words)


def _warnings(view: RunView) -> list[str]:
    lines: list[str] = []
    if view.undone:
        made = plural(view.undone, "step")
        lines.append(f"A resume went back behind {made}; what was made anew is shown.")
    if view.lost_lines:
        lines.append(f"{plural(view.lost_lines, 'line')} of the trace could not be written.")
    return lines


def _date(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    except (OverflowError, ValueError, OSError):
        return "an unknown time"


def _clock(seconds: float) -> str:
    """Seconds as a person says them.

    >>> _clock(59.6), _clock(3700)
    ('1 min', '1 h 1 min')
    """
    minutes, rest = divmod(round(min(seconds, 1e12)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes} min" if hours else f"{minutes} min" if minutes else f"{rest} s"


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
            "The share of each step's tokens that each version sampled. By version, tokens below "
            "the line are older than the policy that was trained on them; by age, 0 is its own "
            "version.",
        ),
        (
            "tokens",
            210,
            "Trained and dropped tokens",
            f"Dropped tokens stand at the step before which their groups were dropped.{late}",
        ),
        (
            "refits",
            200,
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


def _tables(view: RunView) -> str:
    ages = (
        _chart(
            "ages",
            260,
            "Token ages",
            "Of the whole run; of dropped tokens, the age when they were dropped.",
        )
        if view.rows
        else ""
    )
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
    return _section("Dropped", table(("reason", "tokens", "of all tokens"), rows) + _listed(ranked))


def _engines(view: RunView) -> str:
    pauses: dict[str, list[float]] = {}
    for interval in view.intervals:
        for refit in interval.refits:
            if refit.pause_seconds is not None:
                pauses.setdefault(refit.engine, []).append(refit.pause_seconds)
    engines = sorted({*view.refits, *view.aborted})
    if not engines:
        return ""
    rows: list[Sequence[str]] = []
    for engine in engines[:LISTED]:
        seconds = pauses.get(engine, [])
        rows.append(
            (
                escaped(engine),
                f"{view.refits[engine]:,}",
                f"{view.aborted[engine]:,}",
                f"{view.without_cut[engine]:,}",
                f"{sum(seconds):,.1f} s" if seconds else "-",
                f"{max(seconds):,.2f} s" if seconds else "-",
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
<dt>Token age</dt><dd>The version (number of policy updates) that the policy had just before the
update that consumed the token, minus the version that sampled it. Synchronous training: always
0.</dd>
<dt>Batch age</dt><dd>The mean token age over a step's trained tokens, every token weighing one. In
flight is what was gained until the newest trained token of its group was sampled, in queue is the
rest.</dd>
<dt>Coverage</dt><dd>The share of trained tokens whose version is known exactly. The others count
under the oldest version that may have sampled them; the bounds say what the mean can be.</dd>
<dt>Age of a dropped token</dt><dd>The policy's version when its group was dropped, minus the
version that sampled it.</dd></dl></section>"""
