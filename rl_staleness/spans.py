"""From the evidence of a trace to the versions of a call's tokens (DESIGN.md, section 3).

Every token gets the set of versions that may have sampled it, kept as the oldest and the newest of
the set. Nothing here walks over single tokens, and nothing here decides what the numbers mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import accumulate, pairwise

from rl_staleness.events import LARGEST, Call
from rl_staleness.listings import Counts
from rl_staleness.ranges import Segment, covered_by, move, overlapping, split, widen
from rl_staleness.refits import Finding, Refit, Refits

__all__ = ["NEVER", "restored_spans", "ruled_spans", "spans_of"]

NEVER = -1
"""Stands for the version of tokens that came from weights which this run never had: a part of it
that was rolled back has updated others."""


def spans_of(
    call: Call, refits: Refits, *, now: int, lost: bool = False
) -> tuple[list[Segment], list[Finding]]:
    """Find the versions of a call's tokens, and the facts about it that cannot all be true.

    Args:
        refits: those of the call's engine.
        now: version of the step that trains the call; what is not known is not newer than that.
        lost: lines about this engine are missing, so that only the engine's own spans are sure.

    A call of 90 tokens, begun on version 0 and found with 30 at the cut of a refit to 1:
    ``[(0, 30, 0, 0), (30, 90, 1, 1)]``.
    """
    counts = refits.calls.counts(call.call)
    segments, found = ruled_spans(call, counts, refits, now=now)
    from_before = call.after is not None and call.after <= refits.base
    until = LARGEST if call.until is None else call.until
    if counts and max(counts) > until:
        detail = f"until refit {until}, but the cut of refit {max(counts)} lists it"
        found.append(("until_contradicts_cut", detail))
    if call.after is not None and call.after > until:
        found.append(("after_beyond_until", f"after refit {call.after}, until refit {until}"))
    if call.spans:
        _compare(call, counts, refits, segments, found)
    if lost:
        found = []
        oldest = min((s[2] for s in segments), default=call.version)
        segments = _doubtful(call, oldest, max([now, call.version, *(s[3] for s in segments)]))
    segments, found = _as_the_engine_says(call, segments, found)
    if from_before and refits.limit is not None and call.spans:
        known = partial(_is_explained, refits=refits, counts=counts, until=until, now=now)
        segments = _in_this_run(segments, refits.limit, found, known, places=counts.values())
    return segments, found


def ruled_spans(
    call: Call, counts: Counts, refits: Refits, *, now: int
) -> tuple[list[Segment], list[Finding]]:
    """Find what refits and cuts alone say: one segment before and after each count, at most."""
    begin, oldest, newest, found = _begin(call, counts, refits, now)
    segments = [(0, call.tokens, oldest, newest)] if call.tokens else []
    until = LARGEST if call.until is None else call.until
    if begin is not None and begin < until and (begin < refits.last or until != LARGEST):
        segments = _follow(call, counts, refits, segments, (begin, until), now, found)
    return segments, found


def restored_spans(call: Call, *, now: int, limit: int) -> tuple[list[Segment], list[Finding]]:
    """Find the versions of a call that was made before the run's last resume.

    Only its spans speak: refits of before are gone, numbers of today mean others. Tokens that no
    span holds may be of any version from the call's stamp to ``now``.

    Args:
        limit: the version that the run went on from; what is newer was rolled back (`NEVER`).
    """
    segments, found = _as_the_engine_says(call, _doubtful(call, call.version, now), [])
    return _in_this_run(segments, limit, found), found


def _in_this_run(
    segments: list[Segment],
    limit: int,
    found: list[Finding],
    known: Callable[[Segment], bool] = lambda _: False,
    *,
    places: Iterable[int] = (),
) -> list[Segment]:
    """Give up what is newer than what the run went on from, unless it is known how it came to be.

    Args:
        places: where the answer to that may change.
    """
    parts = segments
    for place in places:
        parts = split(parts, place)
    beyond = [part for part in parts if part[2] > limit and not known(part)]
    if not beyond:
        return segments
    newest = max(part[2] for part in beyond)
    found.append(("beyond_resume", f"version {newest}, but the run went on from {limit}"))
    return [(part[0], part[1], NEVER, NEVER) if part in beyond else part for part in parts]


def _is_explained(
    segment: Segment, *, refits: Refits, counts: Counts, until: int, now: int
) -> bool:
    """Whether a refit of this run led to the version of these tokens of a call from before, or may
    have: its line names the version, and nobody says that it failed."""
    start, _, version, _ = segment
    last = min([until, *(number - 1 for number, count in counts.items() if count > start)])
    if refits.leading_to(version, below=last + 1) is not None:
        return True
    return version <= now and any(
        refit.state == "open" and refit.version == version
        for refit in refits.between(refits.base, last)
    )


def _from_before(
    after: int, stamp: int, refits: Refits, limit: int
) -> tuple[int, int, list[Finding]]:
    """Versions that a call may have begun on before the run was resumed at version ``limit``.

    Refits of before may have moved it on, to what the policy had by then at most.
    """
    found: list[Finding] = []
    if stamp != refits.start and (after == refits.base or stamp > limit):
        detail = f"stamp {stamp}, but the run went on from {limit}, its engine from {refits.start}"
        found.append(("stamp", detail))
    if after < refits.base and refits.undone:
        detail = f"after refit {after}; refits up to {refits.base} are of a part that was undone"
        found.append(("beyond_resume", detail))
    if stamp > limit or (after < refits.base and refits.undone):
        return NEVER, NEVER, found
    return min(stamp, refits.start), max(refits.start, limit), found


def _doubtful(call: Call, oldest: int, now: int) -> list[Segment]:
    """Say of all tokens of a call that nobody knows."""
    return [(0, call.tokens, oldest, max(oldest, now))] if call.tokens else []


def _as_the_engine_says(
    call: Call, segments: list[Segment], found: list[Finding]
) -> tuple[list[Segment], list[Finding]]:
    if not call.spans:
        return segments, found
    twice = overlapping((s[0], min(s[1], call.tokens), *s[2:]) for s in call.spans)
    if twice is not None:
        found.append(("spans_overlap", f"{list(twice[0])} and {list(twice[1])}"))
    return covered_by(call.spans, segments), found


def _begin(
    call: Call, counts: Counts, refits: Refits, now: int
) -> tuple[int | None, int, int, list[Finding]]:
    """Say after which refit the call began (None: it is all as stamped) and on which versions."""
    first = min(counts) if counts else None
    stamp = call.version
    if call.after is not None:
        oldest, newest, found = _begin_after(call.after, stamp, refits, now)
        if first is None or first > call.after:
            known = refits.find(call.after) is not None
            begin = call.after if known else max(call.after, refits.base)
            return begin, oldest, newest, found
        if first < call.after or counts[first]:
            detail = f"after refit {call.after}, but the cut of refit {first} lists it"
            found.append(("after_contradicts_cut", detail))
        return first - 1, *refits.before(first, now=now), found
    number = refits.leading_to(stamp, below=LARGEST if first is None else first)
    if number is not None:
        return number, stamp, stamp, []
    contradiction = [("stamp", f"no refit of the engine explains stamp {stamp}")]
    if first is None:
        until = LARGEST if call.until is None else call.until
        number = refits.may_lead_to(stamp, until=until)
        return number, stamp, stamp, [] if number is not None else contradiction
    oldest, newest = refits.before(first, now=now)
    refit = refits.find(first)
    begun_in_pause = counts[first] == 0 and refit is not None and stamp == refit.version
    explained = begun_in_pause or oldest <= stamp <= newest
    if not explained:
        explained = refits.may_lead_to(stamp, until=first - 1) is not None
    found = [] if explained else contradiction
    return first - 1, min(oldest, stamp), max(newest, stamp), found


def _begin_after(
    after: int, stamp: int, refits: Refits, now: int
) -> tuple[int, int, list[Finding]]:
    """Versions that a call may have begun on whose engine had refit ``after`` behind it."""
    refit = refits.find(after)
    if refit is None and after <= refits.base:
        oldest = newest = refits.start
        right = stamp == refits.start
        if refits.limit is not None and (after < refits.base or not right):
            return _from_before(after, stamp, refits, refits.limit)
    else:
        oldest, newest = refits.before(after, now=now)
        version = None if refit is None else refit.version_at(after)
        right = oldest <= stamp <= newest
        if refit is None or refit.state == "open":
            right = right or (stamp == version if version is not None else stamp > newest)
            led = stamp if version is None else version
            led = led if led > newest else max(led, now)
            oldest, newest = min(oldest, led), max(newest, led)
        elif refit.state == "done" and version is not None:
            right = right or stamp == version
            oldest = newest = version
    if right:
        return oldest, newest, []
    detail = f"stamp {stamp} is not the version before or after refit {after}"
    return oldest, newest, [("stamp", detail)]


def _follow(
    call: Call,
    counts: Counts,
    refits: Refits,
    segments: list[Segment],
    reach: tuple[int, int],
    now: int,
    found: list[Finding],
) -> list[Segment]:
    """Move the call's tokens on at each refit above the first and up to the last of ``reach``."""
    exact = [(number, counts[number]) for number in sorted(counts) if refits.exact(number)]
    ceilings = list(accumulate((count for _, count in reversed(exact)), min))[::-1]
    floor = passed = 0
    for refit in refits.between(*reach):
        place = _place(refit, call, counts, found)
        if place is None:
            if refit.complete and refit.last >= max(counts, default=0):
                break  # it had ended
            continue
        while passed < len(exact) and exact[passed][0] <= refit.last:
            passed += 1
        stop = min(place[1], call.tokens, *ceilings[passed : passed + 1])
        first = floor = min(max(place[0], floor), stop)
        oldest, newest = refit.version, refit.newest
        if oldest is None or newest is None:  # lost with its lines: anything up to now
            oldest = newest = max([now, *(segment[2] for segment in segments[:1])])
        if refit.state == "done":
            segments = widen(segments, first, stop, oldest, newest)
            segments = move(segments, stop, newest, newest)
        else:
            segments = widen(segments, first, call.tokens, oldest, newest)
    if any(a[1] > b[1] for a, b in pairwise(exact)):
        found.append(("cut_counts_fall", f"tokens {[count for _, count in exact]}"))
    return segments


def _place(
    refit: Refit, call: Call, counts: Counts, found: list[Finding]
) -> tuple[int, int] | None:
    """First and last place that a refit may have in a call; None: it does not touch it."""
    if refit.state == "aborted":
        return None
    count = counts.get(refit.number)
    if count is not None:
        return count, count if refit.counts_exact else call.tokens
    if not refit.complete:
        return 0, call.tokens
    later = any(number > refit.number for number in counts)
    if call.after is not None or any(number < refit.number for number in counts):
        if later:
            detail = f"not in the exact cut of refit {refit.number}, but in a later one"
            found.append(("absent_from_cut", detail))
        return None
    return (0, 0) if later else (0, call.tokens)


def _compare(
    call: Call, counts: Counts, refits: Refits, segments: list[Segment], found: list[Finding]
) -> None:
    """Hold the engine's spans against the cuts, at the tokens on both sides of an exact count."""
    places = {p for n, count in counts.items() if refits.exact(n) for p in (count - 1, count)}
    for place in sorted(places):
        for start, stop, oldest, newest in segments:
            if not start <= place < stop:
                continue
            for span in call.spans or ():
                if (
                    len(span) == 3
                    and span[0] <= place < span[1]
                    and not oldest <= span[2] <= newest
                ):
                    detail = f"token {place}: span says {span[2]}, cuts say {oldest} to {newest}"
                    found.append(("span_contradicts_cut", detail))
