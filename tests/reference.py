"""A slow reference of the arithmetic: one Python set of possible versions for every single token.

It reads the events of a trace as plain dicts and returns the numbers of every step as exact
fractions. It shares no code with the library and holds nothing that is clever: where the library
keeps spans, this keeps a list with one set a token.

    >>> run = {"event": "run_started", "version": 7, "step": 0}
    >>> group = {"event": "group_published", "group": "g", "tokens": {"5": 2, "6": 1}}
    >>> step = {"event": "step_trained", "step": 0, "version": 7, "groups": ["g"]}
    >>> steps([run, group, step])[0]["batch_age"]
    Fraction(5, 3)

Choices where the contract leaves room are marked "Choice:".
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise
from typing import Any

Event = dict[str, Any]
Step = dict[str, Any]


@dataclass
class Refit:
    """What the trace says about one refit of one engine."""

    version: int
    """Version that it leads to: of the newest of its lines."""
    state: str = "pending"
    """"pending", "done" or "aborted"."""
    cut: dict[str, int] | None = None
    """Tokens by call at the pause, None without a cut."""
    exact: bool = True
    missing: bool = False
    """Its number must have been used and the trace has no line of it."""

    def lists(self, call: str) -> bool:
        """Whether its cut lists the call; that of a refit that failed is void and None."""
        return self.cut is not None and call in self.cut


@dataclass
class Engine:
    """One engine in one incarnation."""

    start: int
    number_before: int = 0
    """Newest refit number of the incarnations before: it stands for the start."""
    refits: dict[int, Refit] = field(default_factory=dict)
    gap: bool = False

    def numbered(self, *numbers: int | None, step_version: int) -> dict[int, Refit]:
        """The refits from 1 up to the newest that the trace or one of these numbers names.

        Choice: numbers go up by one, so that one without a line is a refit that may have happened,
        without a cut, to some version up to the step's.
        """
        last = max([*self.refits, *[n for n in numbers if n is not None]], default=0)
        return {
            n: self.refits.get(n) or Refit(step_version, missing=True)
            for n in range(self.number_before + 1, last + 1)
        }

    def versions_after(self, number: int, refits: dict[int, Refit]) -> set[int]:
        """Versions that the engine may have had once every refit up to `number` was over."""
        possible: set[int] = set()
        for n in sorted(refits, reverse=True):
            refit = refits[n]
            if n > number or refit.state == "aborted":
                continue
            possible.add(refit.version)
            if refit.state == "done":
                return possible
        return possible | {self.start}


@dataclass
class Place:
    """Where a refit may have caught a call: before one of the tokens first..last."""

    version: int
    certain: bool
    """Whether the refit is known to have happened."""
    first: int
    last: int
    exact: int | None = None
    """The count of an exact cut that lists the call."""


class Book:
    """All that the events so far have said."""

    def __init__(self) -> None:
        self.engines: dict[str, Engine] = {}
        self.start_version = 0
        self.gap_for_new_engines = False
        self.waiting: dict[str, Event] = {}
        self.refit_versions: set[int] = set()
        self.policy = 0
        self.next_step = 0
        self.lost = False
        self.found: set[tuple[str, Any]] = set()
        self.known_violations: set[tuple[str, Any]] = set()
        self.dropped_tokens = 0
        self.refit_seconds = Fraction(0)

    # What each line does.

    def apply(self, event: Event) -> Step | None:
        """Take one event; the numbers of the step where it is one."""
        kind = event["event"]
        if kind == "run_started":
            self.run_started(event)
        elif kind in ("refit_cut", "refit_done", "refit_aborted"):
            self.refit(kind, event)
        elif kind == "group_published":
            self.published(event)
        elif kind == "group_dropped":
            group = self.waiting.pop(event["group"], event)
            self.dropped_tokens += group_size(group)
        elif kind == "violation":
            self.violation(event["name"], object())
        elif kind == "gap":
            self.lost = True
            self.gap_for_new_engines = True
            for engine in self.engines.values():
                engine.gap = True
        elif kind == "step_trained":
            return self.step(event)
        return None

    def run_started(self, event: Event) -> None:
        numbers = {
            name: max([engine.number_before, *engine.refits])
            for name, engine in self.engines.items()
        }
        self.policy = event["version"]
        self.next_step = event["step"]
        self.engines = {}
        self.waiting = {}
        self.lost = False
        self.gap_for_new_engines = False
        self.start_version = event["version"]
        # Choice: versions of a part that was rolled back are not those of this incarnation.
        self.refit_versions = {v for v in self.refit_versions if v <= event["version"]}
        named: dict[str, int] = event.get("engines") or {}
        for name in {*numbers, *named}:
            start = named.get(name, self.start_version)
            self.engines[name] = Engine(start, numbers.get(name, 0))

    def engine(self, name: str) -> Engine:
        """The engine of that name; one that `run_started` does not name starts with its version."""
        if name not in self.engines:
            self.engines[name] = Engine(self.start_version, gap=self.gap_for_new_engines)
        return self.engines[name]

    def violation(self, name: str, subject: Any) -> None:
        """Count one a name and subject, none that lost lines may explain."""
        if not self.lost and (name, subject) not in self.known_violations:
            self.known_violations.add((name, subject))
            self.found.add((name, subject))

    def refit(self, kind: str, event: Event) -> None:
        engine = self.engine(event["engine"])
        number, version = event["refit"], event["version"]
        refit = engine.refits.get(number)
        subject = (event["engine"], number)
        if kind == "refit_done":
            certain = [
                r.version for n, r in engine.refits.items() if n < number and r.state == "done"
            ]
            if version < max([engine.start, *certain]):
                self.violation("engine version goes back", subject)
            if version > self.policy:
                self.violation("engine version beyond the policy's", subject)
        if refit is None:
            refit = engine.refits[number] = Refit(version)
        elif refit.version != version and not (kind == "refit_cut" and refit.state == "pending"):
            self.violation("done with another version than cut", subject)
        refit.version = version
        if kind == "refit_cut":
            # A repeated cut replaces the first; that of a refit that has failed is void.
            if refit.state != "aborted":
                refit.cut = dict(event.get("calls") or {})
                refit.exact = event.get("exact") is not False
            return
        if refit.state != "pending" and refit.state != kind.removeprefix("refit_"):
            self.violation("done and aborted", subject)
        refit.state = kind.removeprefix("refit_")
        if refit.state == "aborted":
            refit.cut = None
        if kind == "refit_done":
            self.refit_versions.add(version)
            engine.gap = False
            self.lost = False
            # Choice: the sum over all refits since the previous step, engine by engine.
            self.refit_seconds += Fraction(event.get("pause_seconds") or 0)

    def published(self, event: Event) -> None:
        group = event["group"]
        if group in self.waiting:
            self.violation("published again", group)
        names = [call["call"] for call in event.get("calls") or []]
        if len(set(names)) != len(names):
            self.violation("call named twice", group)
        self.waiting[group] = event

    # The versions of a call, token by token.

    def call_versions(self, call: Event, restored: bool, step_version: int) -> list[set[int]]:
        """The set of versions that may have sampled each token of the call."""
        if restored:
            # Choice: the rules know nothing of an incarnation before; where a restored call has no
            # span its stamp and the step's version are the bounds.
            ruled = [{call["version"], step_version} for _ in range(call["tokens"])]
        else:
            ruled = self.ruled_versions(call, step_version)
        spans = call.get("spans") or []
        tokens: list[set[int]] = []
        exact = self.exact_counts(call)
        for t in range(call["tokens"]):
            reported = [set(span[2:]) for span in spans if span[0] <= t < span[1]]
            if len(reported) > 1:
                self.violation("overlapping spans", (call["engine"], call["call"]))
            if reported:
                possible = set().union(*reported)
                if not restored and (t in exact or t + 1 in exact) and possible - ruled[t]:
                    self.violation("span contradicts cut", (call["engine"], call["call"]))
                tokens.append(possible)
            else:
                tokens.append(ruled[t])
        if self.engine(call["engine"]).gap and tokens:
            # Choice: "the oldest version of the call" is the oldest that the rules give any of
            # its tokens, and in a call with spans for some tokens the others are without spans.
            oldest = min(version for possible in ruled for version in possible)
            for t in range(call["tokens"]):
                if not any(span[0] <= t < span[1] for span in spans):
                    tokens[t] = {oldest, step_version}
        return tokens

    def exact_counts(self, call: Event) -> list[int]:
        """The counts of this call in exact cuts, in the order of the refits."""
        refits = self.engine(call["engine"]).refits
        cuts = [refits[n].cut for n in sorted(refits) if refits[n].exact]
        return [cut[call["call"]] for cut in cuts if cut is not None and call["call"] in cut]

    def ruled_versions(self, call: Event, step_version: int) -> list[set[int]]:
        """Rules 2 to 4: the sets where the engine itself reports no span."""
        name, size, stamp = call["call"], call["tokens"], call["version"]
        engine = self.engine(call["engine"])
        subject = (call["engine"], name)
        refits = engine.numbered(call.get("after"), call.get("until"), step_version=step_version)
        listing = [n for n in sorted(refits) if refits[n].lists(name)]
        first_listing = listing[0] if listing else None
        counts = self.exact_counts(call)
        if counts != sorted(counts):
            self.violation("counts fall", subject)

        # Rule 2: where it began.
        after = call.get("after")
        if after is not None:
            begins, start = self.begin_by_after(engine, refits, call, first_listing, step_version)
        else:
            leading = [
                n
                for n in sorted(refits)
                if refits[n].state == "done" and refits[n].version == stamp
            ]
            if engine.start == stamp:
                leading = [0, *leading]
            if first_listing is not None:
                leading = [n for n in leading if n < first_listing]
            if leading:
                begins, start = leading[-1], {stamp}
            else:
                # Choice: a refit that is not done yet explains a stamp too, and so does the refit
                # in whose cut the call is
                # first listed with 0 (begun in that pause, stamped with what was to come).
                explained = False
                for n, r in refits.items():
                    if first_listing is None or n < first_listing:
                        before = engine.versions_after(n - 1, refits)
                        explained |= r.state == "pending" and r.version == stamp
                        explained |= r.missing and stamp > min(before)
                    elif n == first_listing and r.cut is not None:
                        explained |= r.cut[name] == 0 and r.version == stamp
                if not explained:
                    self.violation("stamp that no refit explains", subject)
                if first_listing is None:
                    return [{stamp} for _ in range(size)]
                begins, start = (
                    first_listing - 1,
                    engine.versions_after(first_listing - 1, refits) | {stamp},
                )

        # Rules 3 and 4: the refits that may have caught it.
        places: list[Place] = []
        until = call.get("until")
        for n in sorted(refits):
            refit = refits[n]
            if n <= begins or refit.state == "aborted":
                continue
            if until is not None and n > until:
                break
            place = Place(refit.version, refit.state == "done", 0, size)
            if refit.lists(name):
                assert refit.cut is not None
                place.first = min(refit.cut[name], size)
                if refit.exact:
                    place.last = place.exact = place.first
            elif refit.cut is not None and refit.exact:
                if after is not None or any(earlier < n for earlier in listing):
                    break
                if first_listing is not None and n < first_listing:
                    # Not begun: everything up to here happened before its first token.
                    places = []
                    start = engine.versions_after(n, refits)
                    continue
            places.append(place)
        for earlier, later in pairwise(places):
            later.first = max(later.first, earlier.first)
        for i, place in enumerate(places):
            for later in places[i + 1 :]:
                if later.exact is not None:
                    place.last = min(place.last, later.exact)
            # Choice: where exact counts fall (a violation) the later refit comes where the earlier
            # one did.
            place.last = max(place.last, place.first)

        tokens: list[set[int]] = []
        for t in range(size):
            possible: set[int] = set()
            if all(place.last > t for place in places if place.certain):
                possible |= start
            for i, place in enumerate(places):
                moved_on = any(later.last <= t for later in places[i + 1 :] if later.certain)
                if place.first <= t and not moved_on:
                    possible.add(place.version)
            tokens.append(possible)
        return tokens

    def begin_by_after(
        self,
        engine: Engine,
        refits: dict[int, Refit],
        call: Event,
        first_listing: int | None,
        step_version: int,
    ) -> tuple[int, set[int]]:
        """Rule 2 with `after`: the number of the refit after which the call began, and the versions
        it may begin on.
        """
        after, stamp = call["after"], call["version"]
        subject = (call["engine"], call["call"])
        if after <= engine.number_before:
            after = 0
        refit = refits.get(after)
        before = engine.versions_after(after - 1, refits)
        start = engine.versions_after(after, refits)
        stamps = before | start
        if refit is not None and refit.state == "pending":
            newer = stamp if refit.missing else refit.version
            start = before | {newer if newer > max(before) else step_version}
        unseen = any(r.missing for n, r in refits.items() if n <= after)
        if stamp not in stamps and not (unseen and stamp > min(before)):
            self.violation("stamp that the engine contradicts", subject)
        if first_listing is not None and first_listing <= after:
            # The cut beats `after`: the call had begun before that pause.
            cut = refits[first_listing].cut
            assert cut is not None
            if first_listing < after or cut[call["call"]] > 0:
                self.violation("after contradicts cut", subject)
            return first_listing - 1, engine.versions_after(first_listing - 1, refits)
        return after, start

    # The numbers of a step.

    def step(self, event: Event) -> Step:
        version = event["version"]
        if event["step"] != self.next_step:
            self.violation("step number", object())
        if version != self.policy:
            self.violation("step version", object())
        if event.get("batches") is not None:
            entries = [(version + i, g) for i, batch in enumerate(event["batches"]) for g in batch]
            updates, spread = len(event["batches"]), 0
        else:
            entries = [(version, group) for group in event["groups"]]
            updates = 1 if event.get("updates") is None else event["updates"]
            spread = max(updates - 1, 0)

        ages: list[
            int
        ] = []  # one for each trained token that has a version: consuming minus oldest
        lows: list[int] = []  # the same minus newest
        refits: list[int] = []
        in_flight: list[int] = []
        in_queue: list[int] = []
        by_version: dict[int, int] = {}
        covered = unknown = unknown_ages = spanning = 0
        missing = False
        for consumed, name in entries:
            group = self.waiting.get(name)
            if group is None:
                self.violation("unknown group", (event["step"], name))
                missing = True
                continue
            masks = (event.get("trained") or {}).get(name) or {}
            tokens: list[set[int]] = []
            for key, count in (group.get("tokens") or {}).items():
                tokens += [{int(key)}] * count
                if count and int(key) > consumed:
                    self.violation("negative age", name)
            for call in group.get("calls") or []:
                restored = bool(group.get("restored"))
                versions = self.call_versions(call, restored, version)
                kept = masked(versions, masks.get(call["call"], call.get("trained")))
                tokens += kept
                # Choice: a call spans where its tokens count under more than one version; once for
                # each entry.
                spanning += len({min(possible) for possible in kept}) > 1
                if any(min(possible) > consumed for possible in kept):
                    self.violation("negative age", (call["engine"], call["call"]))
            unknown += group.get("unknown") or 0
            unknown_ages += consumed * (group.get("unknown") or 0)
            v_end = max((min(possible) for possible in tokens), default=0)
            for possible in tokens:
                oldest, newest = min(possible), max(possible)
                ages.append(consumed - oldest)
                lows.append(consumed - newest)
                refits.append(len([w for w in self.refit_versions if oldest < w <= consumed]))
                in_flight.append(v_end - oldest)
                in_queue.append(consumed - v_end)
                by_version[oldest] = by_version.get(oldest, 0) + 1
                covered += len(possible) == 1

        total = len(ages) + unknown
        # Choice: where only unknown tokens are trained the means over tokens with a version are
        # null, the bounds are not.
        result: Step = {
            "step": event["step"],
            "version": version,
            "batch_age": mean(ages, len(ages)),
            "age_max": max(ages, default=None),
            "age_p50": percentile(ages, 50),
            "age_p95": percentile(ages, 95),
            "age_in_flight": mean(in_flight, len(ages)),
            "age_in_queue": mean(in_queue, len(ages)),
            "batch_age_refits": mean(refits, len(ages)),
            "coverage": None if missing or not total else Fraction(covered, total),
            "age_lo": mean(lows, total),
            "age_hi": mean([*ages, unknown_ages, spread * total], total),
            "tokens": total,
            "tokens_by_version": by_version,
            "spanning_calls": spanning,
            "violations": len(self.found),
            "dropped_tokens": self.dropped_tokens,
            "refit_seconds": self.refit_seconds,
        }
        for _, name in entries:
            if name not in (event.get("kept") or []):
                self.waiting.pop(name, None)
        self.policy = version + updates
        self.next_step = event["step"] + 1
        self.found = set()
        self.lost = False
        self.dropped_tokens = 0
        self.refit_seconds = Fraction(0)
        return result


def masked(tokens: list[set[int]], mask: list[list[int]] | None) -> list[set[int]]:
    """The tokens inside the mask; all of them without one, none where the mask is empty."""
    if mask is None:
        return tokens
    return [
        possible
        for t, possible in enumerate(tokens)
        if any(start <= t < stop for start, stop in mask)
    ]


def group_size(group: Event) -> int:
    """Choice: what a dropped group would have brought to the loss, its unknown tokens with it."""
    size: int = group.get("unknown") or 0
    size += sum((group.get("tokens") or {}).values())
    for call in group.get("calls") or []:
        size += len(masked([set()] * call["tokens"], call.get("trained")))
    return size


def mean(values: list[int], count: int) -> Fraction | None:
    """The sum over the count, None over nothing."""
    return Fraction(sum(values), count) if count else None


def percentile(ages: list[int], share: int) -> int | None:
    """The smallest age that at least `share` percent of the tokens have or stay below."""
    for age in sorted(set(ages)):
        if 100 * len([a for a in ages if a <= age]) >= share * len(ages):
            return age
    return None


def steps(events: list[Event]) -> list[Step]:
    """The numbers of every `step_trained` among the events."""
    book = Book()
    results = [book.apply(event) for event in events]
    return [result for result in results if result is not None]
