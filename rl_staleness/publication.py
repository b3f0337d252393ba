"""What is written of a group when it is published or dropped. Functions without state.

Calls that no refit of their engine touched are summed by version, which keeps traces small; the
others are written one by one, since only later evidence may say where they were cut.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec

from rl_staleness.engines import LiveCall
from rl_staleness.events import LARGEST, Call, Mask

__all__ = ["Content", "InDoubt", "Masks", "about_of", "content_of", "mask_of", "written"]

Masks = Mapping[str, Sequence[Sequence[int]]]
"""Trained ``[start, stop)`` ranges by call name."""

SoleVersion = Callable[[str, int, int], int | None]
"""(engine, after, until) to the version of a whole call, None where a refit may have touched it."""

Listed = Callable[[str], Container[str]]
"""An engine to the names of its calls that a cut lists."""

VersionDuring = Callable[[Call], int]
"""A call to a version that its engine had while it ran."""

InDoubt = Callable[[str, int | None, int | None], tuple[bool, bool]]
"""(engine, after, until) to whether those numbers, and the spans of such a call, may be too old."""


_CALL = attrgetter("call")

_Kind = tuple[str, int, int | None, int | None]

_KIND: Callable[[LiveCall | Call], _Kind] = attrgetter("engine", "version", "after", "until")


class Content(NamedTuple):
    """A group's tokens as a trace holds them."""

    tokens: dict[int, int]
    calls: tuple[Call, ...]
    num_summed: dict[int, int] = {}  # noqa: RUF012  # never written to
    """Calls that were summed up, by version: what a mean over calls needs beside their tokens."""


def content_of(
    calls: Iterable[LiveCall | Call],
    *,
    masks: Masks,
    sum_up: bool,
    sole_version: SoleVersion,
    listed_on: Listed,
    in_doubt: InDoubt,
    policy_version: int,
    version_during: VersionDuring,
) -> Content:
    """Sum up the calls that are settled and list the others.

    Args:
        masks: final loss masks of the calls that have one; other calls are trained whole.
        sum_up: False if masks may still change, or the calls are from before a resume.
        listed_on: what a cut lists is not summed up, or nobody would know that it was published.
        policy_version: nothing that was generated so far can be newer.
        version_during: as `written`.
    """
    calls = tuple(calls)
    if len(set(map(_CALL, calls))) < len(calls):
        sum_up = False  # a name that stands twice is a violation, not to be hidden in a sum
    tokens: dict[int, int] = {}
    num_summed: dict[int, int] = {}
    listed: list[Call] = []
    settled: dict[_Kind, Container[str] | None] = {}  # with names that are not, all the same
    for call in calls:
        if sum_up and not masks:
            kind = _KIND(call)
            if kind not in settled:
                is_settled = _is_settled(kind, sole_version, in_doubt)
                settled[kind] = listed_on(call.engine) if is_settled else None
            names = settled[kind]
            if names is not None and call.call not in names and _has_only_tokens(call):
                if call.tokens:
                    tokens[call.version] = tokens.get(call.version, 0) + call.tokens
                    num_summed[call.version] = num_summed.get(call.version, 0) + 1
                continue
        record = written(
            call,
            masks=masks,
            in_doubt=in_doubt,
            policy_version=policy_version,
            version_during=version_during,
        )
        listed.append(record)
    return Content(tokens, tuple(listed), num_summed)


def about_of(content: Content, said: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What a trainer said of a group, and how many calls were summed up; None: nothing."""
    if not content.num_summed:
        return dict(said) if said else None
    return {"summed_calls": content.num_summed, **(said or {})}


def mask_of(ranges: Sequence[Sequence[int]]) -> Mask:
    """Freeze a loss mask: ``[start, stop)`` ranges, in tokens of the call."""
    return tuple((start, stop) for start, stop in ranges)


def _bounds(record: Call) -> tuple[tuple[int, ...], ...] | None:
    """What a call's spans leave open; that an engine does not know a version is never in doubt."""
    return tuple(span for span in record.spans or () if len(span) == 4) or None


def _is_settled(kind: _Kind, sole_version: SoleVersion, in_doubt: InDoubt) -> bool:
    """Whether the stamp of such calls is all that will ever be known of their versions."""
    engine, version, after, until = kind
    if after is None or until is None or any(in_doubt(engine, after, until)):
        return False
    return sole_version(engine, after, until) == version


def _has_only_tokens(call: LiveCall | Call) -> bool:
    """Whether nothing has to be written down of this call beside its version and its tokens."""
    number, spans = call.tokens, call.spans
    if type(number) is not int or number < 0:
        return False  # not to be hidden in a sum
    if type(call) is Call and call.trained is not None:
        return False
    return spans is None or tuple(spans) == ((0, number, call.version),)


def written(
    call: LiveCall | Call,
    *,
    masks: Masks,
    in_doubt: InDoubt,
    policy_version: int,
    version_during: VersionDuring,
) -> Call:
    """A call as it is written: with its mask, and with nothing in doubt or newer than the policy.

    Args:
        version_during: of the engine. A call that began before that had heard of the run has
            bounds, and no stamp of its own that could contradict anything.
    """
    record = call.record() if isinstance(call, LiveCall) else call
    mask = masks.get(record.call)
    if mask is not None:
        record = msgspec.structs.replace(record, trained=mask_of(mask))
    is_open = any(span[-1] == LARGEST for span in record.spans or ())
    if is_open:
        clipped = tuple(
            (*span[:-1], max(span[-2], policy_version)) if span[-1] == LARGEST else span
            for span in record.spans or ()
        )
        record = msgspec.structs.replace(record, spans=clipped)
    if record.after is None and (is_open or not record.tokens):
        record = msgspec.structs.replace(record, version=version_during(record))
    numbers, spans = in_doubt(record.engine, record.after, record.until)
    if numbers:
        record = msgspec.structs.replace(record, after=None, until=None)
    if numbers or spans:
        record = msgspec.structs.replace(record, spans=_bounds(record))
    return record
