"""Random legal histories of an asynchronous run, with the true version of every trained token.

A small simulated run, moved by hypothesis: engines that sample, calls that begin and end at any
moment, refits that pause, read, load, fail and report in the orders that occur, and a trainer that
publishes, drops, trains and restarts. The library sees the lines of the trace, the truth stays
here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from random import Random
from typing import Any, TypeVar

from hypothesis import strategies as st

Event = dict[str, Any]
T = TypeVar("T")


@dataclass
class Truth:
    """What one step really trained."""

    step: int
    tokens: list[tuple[int, int]] = field(default_factory=list)
    """(version just before the update that consumed it, version that sampled it), one a trained
    token.
    """
    split_known: bool = True
    """False where several updates shared the groups in a way that the trace does not say."""

    def mean_age(self) -> Fraction | None:
        """The mean over all trained tokens, None without one."""
        if not self.tokens:
            return None
        return Fraction(
            sum(consumed - sampled for consumed, sampled in self.tokens), len(self.tokens)
        )


@dataclass
class History:
    """The lines of a legal trace and the truth of its steps."""

    events: list[Event]
    truths: list[Truth]

    def __repr__(self) -> str:
        """The lines, as a failing example shows them."""
        return "\n".join(["", *map(json.dumps, self.events)])


@dataclass(eq=False)
class Refit:
    number: int
    version: int
    capture: str
    """"exact", "inexact" or "none"."""
    late_cut: bool
    counts: dict[str, int] | None = None
    cut_written: bool = False
    over: bool = False
    """The weights are there, or it has failed."""
    happened: bool = False
    line: str = ""
    """"done", "aborted" or "never": what is or will be written."""
    settled: bool = False
    """The line is written."""


@dataclass(eq=False)
class Engine:
    name: str
    version: int
    number: int
    """Of the newest refit whose pause has begun."""
    top: int
    """Newest version that it may hold."""
    native: bool
    """It reports spans itself."""
    paused: Refit | None = None
    refits: list[Refit] = field(default_factory=list)
    """Of this incarnation."""

    def open_refits(self) -> list[Refit]:
        """Refits that the trace has neither done nor aborted, since the newest one that is done."""
        found: list[Refit] = []
        for refit in self.refits:
            if refit.settled and refit.line == "done":
                found = []
            elif not refit.settled:
                found.append(refit)
        return found


@dataclass(eq=False)
class Call:
    name: str
    engine: Engine
    after: int
    pause: Refit | None
    """The refit in whose pause it began, before the new weights were there."""
    begun_on: int
    seen: list[Refit]
    """Refits that were open at some moment while it ran."""
    ambiguous_begin: bool
    """A refit that never reports may have given the engine the version that this call began on."""
    begun_counted: bool
    """It began after the count of that pause."""
    versions: list[int] = field(default_factory=list)
    ended: bool = False
    until: int = 0


@dataclass(eq=False)
class Group:
    name: str
    calls: list[Call] = field(default_factory=list)
    sums: list[int] = field(default_factory=list)
    """True versions of the tokens that are published as sums."""
    listed: dict[str, tuple[Event, list[int]]] = field(default_factory=dict)
    """Calls published one by one: the line's entry and the true versions."""
    owners: list[Call] = field(default_factory=list)
    deferred: set[str] = field(default_factory=set)
    """Calls whose loss mask is known only at the step."""
    unknown: int = 0


@cache
def _integers(low: int, high: int) -> st.SearchStrategy[int]:
    return st.integers(low, high)


class World:
    """The simulated run."""

    def __init__(
        self, integer: Callable[[int, int], int], complete: bool = False, about: Event | None = None
    ) -> None:
        self.integer = integer
        """Draws a whole number from the first to the second, both included."""
        self.complete = complete
        """Every refit has an exact cut and reports at once, every call says `after`: nothing is
        left open.
        """
        self.about = about
        self.restarts = True
        self.tidy = False
        """Nobody waits long for its group to be published."""
        self.events: list[Event] = []
        self.truths: list[Truth] = []
        self.names = 0
        self.incarnation = 0
        self.numbers: dict[str, int] = {}
        self.policy = self.integer(0, 5)
        self.next_step = self.integer(0, 2)
        self.start({})

    # Choices.

    def chance(self, one_in: int) -> bool:
        return self.integer(0, one_in - 1) == one_in - 1

    def pick(self, values: Sequence[T]) -> T:
        return values[self.integer(0, len(values) - 1)]

    def subset(self, values: Sequence[T]) -> list[T]:
        return [value for value in values if self.integer(0, 1)]

    def name(self, prefix: str) -> str:
        self.names += 1
        return f"{prefix}{self.names}"

    def write(self, event: str, **fields: Any) -> None:
        self.events.append({"event": event, "time": 1000.0 + len(self.events) / 4, **fields})

    # The run.

    def start(self, floors: dict[str, int]) -> None:
        """Begin an incarnation; waiting groups of the one before are gone."""
        self.engines: list[Engine] = []
        named: dict[str, int] = {}
        for name in ["a", "b"][: self.integer(1, 2)]:
            version = self.policy
            if self.integer(0, 2):
                version = named[name] = self.integer(0, self.policy)
            self.engines.append(
                Engine(name, version, self.numbers.get(name, 0), version, native=self.chance(4))
            )
        self.building: list[Group] = []
        self.waiting: dict[str, Group] = {}
        self.late: list[tuple[Engine, Refit]] = []
        self.masked_once: set[str] = set()
        fields: Event = {"engines": named} if named or self.chance(2) else {}
        if self.about:
            fields["about"] = self.about
        self.write(
            "run_started",
            schema=1,
            run="r",
            incarnation=self.incarnation,
            version=self.policy,
            step=self.next_step,
            **fields,
        )

    def begin(self) -> None:
        engine = self.pick(self.engines)
        groups = [group for group in self.building if len(group.calls) < 4]
        if groups and not self.chance(3):
            group = self.pick(groups)
        else:
            group = Group(self.name("g"))
            self.building.append(group)
        refit = engine.paused if engine.paused is not None and not engine.paused.over else None
        open_refits = engine.open_refits()
        group.calls.append(
            Call(
                self.name("c"),
                engine,
                engine.number,
                refit,
                engine.version,
                list(open_refits),
                any(r.over and r.happened and r.line == "never" for r in open_refits),
                refit is not None and refit.counts is not None,
            )
        )

    def running(self, engine: Engine | None = None) -> list[Call]:
        return [
            call
            for group in self.building
            for call in group.calls
            if not call.ended and (engine is None or call.engine is engine)
        ]

    def generate(self) -> None:
        for call in self.running():
            engine, refit = call.engine, call.engine.paused
            # The engine drains for a moment after the pause began, until it is read.
            drains = refit is None or (
                refit.counts is None and not refit.over and call.after < refit.number
            )
            if not drains:
                continue
            call.versions += [engine.version] * self.integer(0, 4)

    def end(self) -> None:
        call = self.pick(self.running())
        call.ended = True
        call.until = call.engine.number

    def pause(self) -> None:
        engine = self.pick([e for e in self.engines if e.paused is None and e.top < self.policy])
        for refit in engine.refits:
            self.settle(engine, refit)
        engine.number += 1
        if self.tidy and engine.number % 20 == 0:
            self.publish_all()
        version = self.policy
        if self.integer(0, 2):
            version = self.integer(engine.top + 1, min(engine.top + 2, self.policy))
        capture = (
            "exact" if self.complete else self.pick(["exact", "exact", "exact", "none", "inexact"])
        )
        refit = Refit(
            engine.number, version, capture, late_cut=not self.complete and self.chance(5)
        )
        engine.refits.append(refit)
        engine.paused = refit
        for call in self.running(engine):
            call.seen.append(refit)

    def count(self) -> None:
        self.count_on(self.pick(self.countable()))

    def count_on(self, engine: Engine) -> None:
        """The snapshot of a pause: tokens so far of the calls that have begun and not ended."""
        refit = engine.paused
        assert refit is not None
        refit.counts = {}
        ended = [
            call
            for group in self.building
            for call in group.calls
            if call.ended and call.engine is engine and call.until == refit.number > call.after
        ]
        for call in self.running(engine):
            size = len(call.versions)
            if refit.capture == "exact":
                refit.counts[call.name] = size
            elif self.integer(0, 3):
                refit.counts[call.name] = self.integer(0, size)
        if refit.capture == "inexact":
            for call in self.subset(ended):
                refit.counts[call.name] = self.integer(0, len(call.versions))
        if not self.complete and self.chance(12):
            refit.counts, refit.capture = {}, "none"
            self.write("gap", lost=1)
        elif refit.late_cut:
            self.late.append((engine, refit))
        else:
            self.write_cut(engine, refit)

    def countable(self) -> list[Engine]:
        return [
            e
            for e in self.engines
            if e.paused is not None
            and not e.paused.over
            and e.paused.counts is None
            and e.paused.capture != "none"
        ]

    def loadable(self) -> list[Engine]:
        return [
            e
            for e in self.engines
            if e.paused is not None
            and not e.paused.over
            and (e.paused.counts is not None or e.paused.capture == "none")
        ]

    def write_cut(self, engine: Engine, refit: Refit) -> None:
        if not self.complete and refit.counts and self.chance(12):
            # A first answer that a second one replaces.
            self.write(
                "refit_cut",
                engine=engine.name,
                refit=refit.number,
                version=refit.version,
                calls={name: self.integer(0, 9) for name in self.subset(list(refit.counts))},
            )
        fields: Event = {}
        if refit.capture == "inexact":
            fields["exact"] = False
        elif self.chance(4):
            fields["exact"] = True
        if refit.counts or self.chance(2):
            fields["calls"] = refit.counts
        self.write(
            "refit_cut", engine=engine.name, refit=refit.number, version=refit.version, **fields
        )
        refit.cut_written = True

    def load(self) -> None:
        """The push of the weights ends: well, with an exception, or without a word."""
        engine = self.pick(self.loadable())
        refit = engine.paused
        assert refit is not None
        kinds = ["done", "done", "done", "aborted"]
        if not self.complete and refit.cut_written:
            kinds += ["never"]
        refit.over = True
        refit.line = self.pick(kinds)
        refit.happened = refit.line == "done" or (refit.line == "never" and self.chance(2))
        if refit.happened:
            engine.version = refit.version
        if refit.line != "aborted":
            engine.top = refit.version
        if self.complete or not self.chance(3):
            self.settle(engine, refit)

    def settle(self, engine: Engine, refit: Refit) -> None:
        """Write the line that ends a refit, where there is one and it is not written."""
        if refit.settled or not refit.over or refit.line == "never":
            return
        fields: Event = {"reason": "a push failed"} if refit.line == "aborted" else {}
        if refit.line == "done" and self.chance(2):
            fields["pause_seconds"] = self.pick([None, 0.5, 0.25])
        self.write(
            f"refit_{refit.line}",
            engine=engine.name,
            refit=refit.number,
            version=refit.version,
            **fields,
        )
        refit.settled = True

    def resume(self) -> None:
        engine = self.pick([e for e in self.engines if e.paused is not None and e.paused.over])
        engine.paused = None

    def flush(self) -> None:
        """Write a line that is late."""
        settles = [(e, r) for e in self.engines for r in e.refits if r.over and not r.settled]
        settles = [(e, r) for e, r in settles if r.line != "never"]
        choice = self.integer(0, len(self.late) + len(settles) - 1)
        if choice < len(self.late):
            self.write_cut(*self.late.pop(choice))
        else:
            self.settle(*settles[choice - len(self.late)])

    def flushable(self) -> bool:
        return bool(self.late) or any(
            r.over and not r.settled and r.line != "never" for e in self.engines for r in e.refits
        )

    # Groups.

    def finished(self) -> list[Group]:
        return [g for g in self.building if g.calls and all(call.ended for call in g.calls)]

    def mask(self, size: int) -> list[list[int]]:
        """A random loss mask, half-open intervals that do not touch."""
        edges = sorted({self.integer(0, size) for _ in range(self.pick([0, 2, 4]))})
        return [list(pair) for pair in zip(edges[::2], edges[1::2], strict=False)]

    def compose(self, group: Group) -> Event:
        """What a finished group's line says: sums where they are exact, other calls one by one."""
        sums: dict[str, int] = {}
        entries: list[Event] = []
        for call in group.calls:
            size = len(call.versions)
            mask = self.mask(size) if self.chance(3) else None
            deferred = self.chance(6)
            aborted = all(r.settled and r.line == "aborted" for r in call.seen)
            if aborted and not deferred and not call.ambiguous_begin and not self.chance(4):
                tokens = inside(call.versions, mask)
                group.sums += tokens
                for version in tokens:
                    sums[str(version)] = sums.get(str(version), 0) + 1
                continue
            entry = self.entry(call)
            if mask is not None:
                entry["trained"] = mask
            if deferred:
                group.deferred.add(call.name)
            entries.append(entry)
            group.listed[call.name] = (entry, call.versions)
            group.owners.append(call)
        fields: Event = {}
        if sums or self.chance(2):
            fields["tokens"] = sums
        if entries or self.chance(2):
            fields["calls"] = entries
        if not self.complete and self.chance(6):
            group.unknown = fields["unknown"] = self.integer(0, 2)
        return fields

    def entry(self, call: Call) -> Event:
        """A call of which the trace holds each part."""
        refit = call.pause
        with_after = self.complete or call.ambiguous_begin or not self.chance(3)
        stamp = call.begun_on
        if refit is not None and refit.happened:
            # Begun in the pause: it may be stamped with what was to come.
            unlisted = refit.line == "done" and call.name not in (refit.counts or {})
            if (with_after or unlisted) and self.chance(2):
                stamp = refit.version
        entry: Event = {
            "call": call.name,
            "engine": call.engine.name,
            "version": stamp,
            "tokens": len(call.versions),
        }
        if with_after:
            entry["after"] = call.after
        if self.chance(2):
            # A client may see the end later than the engine.
            entry["until"] = self.pick([call.until, call.engine.number])
        elif self.chance(3):
            entry["until"] = None
        if call.engine.native and not self.chance(4):
            entry["spans"] = spans(call.versions)
            if entry["spans"] and self.chance(4):
                del entry["spans"][self.integer(0, len(entry["spans"]) - 1)]
        return entry

    def publish(self) -> None:
        group = self.pick(self.finished())
        self.building.remove(group)
        fields = self.compose(group)
        self.write("group_published", group=group.name, **fields)
        self.waiting[group.name] = group

    def drop(self) -> None:
        unpublished = self.finished()
        groups = [*self.waiting.values(), *unpublished]
        group = self.pick(groups)
        fields: Event = {}
        if group in unpublished:
            self.building.remove(group)
            fields = self.compose(group)
            fields.pop("unknown", None)
        else:
            del self.waiting[group.name]
        self.write("group_dropped", group=group.name, reason="too old", **fields)

    # Training.

    def step(self) -> None:
        if self.complete:
            # `until` may name a refit whose pause has begun: its cut is part of the evidence.
            for engine in self.countable():
                self.count_on(engine)
        groups = self.subset(list(self.waiting.values()))
        if not groups and self.waiting and not self.chance(8):
            groups = [self.pick(list(self.waiting.values()))]
        version = self.policy
        fields: Event = {}
        shape = self.pick(["groups", "groups", "batches", "updates"])
        if shape == "batches":
            updates = self.integer(1, 3)
            batches: list[list[str]] = [[] for _ in range(updates)]
            for group in groups:
                for i in sorted({self.integer(0, updates - 1), self.integer(0, updates - 1)}):
                    batches[i].append(group.name)
            fields["batches"] = batches
            if self.chance(2):
                fields["updates"] = updates
            entries = [(version + i, n) for i, batch in enumerate(batches) for n in batch]
        else:
            updates = 1
            if shape == "updates":
                updates = fields["updates"] = self.integer(0, 3)
            elif self.chance(3):
                fields["updates"] = self.pick([1, None])
            fields["groups"] = [group.name for group in groups]
            entries = [(version + self.integer(0, max(updates - 1, 0)), g.name) for g in groups]
        for group in groups:
            for call in group.owners:
                self.make_visible(call, group.listed[call.name][0])

        truth = Truth(self.next_step, split_known=shape == "batches" or updates < 2)
        masks: dict[str, dict[str, list[list[int]]]] = {}
        for group in groups:
            for call_name in sorted(group.deferred):
                if call_name in self.masked_once or not self.chance(3):
                    entry, versions = group.listed[call_name]
                    masks.setdefault(group.name, {})[call_name] = self.mask(len(versions))
                    self.masked_once.add(call_name)
        for consumed, name in entries:
            group = self.waiting[name]
            tokens = list(group.sums)
            for call_name, (entry, versions) in group.listed.items():
                default = entry.get("trained")
                tokens += inside(versions, masks.get(name, {}).get(call_name, default))
            tokens += [self.integer(0, version) for _ in range(group.unknown)]
            truth.tokens += [(consumed, token) for token in tokens]
        if masks or self.chance(6):
            fields["trained"] = masks
        kept = [group.name for group in groups if self.chance(4)]
        if kept or self.chance(6):
            fields["kept"] = kept
        self.write("step_trained", step=self.next_step, version=version, **fields)
        self.truths.append(truth)
        for group in groups:
            if group.name not in kept:
                del self.waiting[group.name]
        self.next_step += 1
        self.policy += updates

    def make_visible(self, call: Call, entry: Event) -> None:
        """A refit that happened has a line before a step trains what was sampled after it.

        A hook reports a refit before generation resumes, or late; the late line still comes before
        such a step. Only where the call itself names the refit, or a later one, it may be missing,
        and then not if it alone explains the call's stamp.
        """
        for refit in call.engine.refits:
            if not refit.happened or refit.cut_written or refit.settled:
                continue
            named = max(entry.get("after") or 0, entry.get("until") or 0) >= refit.number
            alone = entry.get("after") is None and entry["version"] == refit.version
            if not named or alone:
                self.settle(call.engine, refit)

    def restart(self) -> None:
        """The process dies and comes back, with the groups that waited in its checkpoint."""
        self.incarnation += 1
        for engine in self.engines:
            # Numbers go on from those that the trace holds.
            written = [r.number for r in engine.refits if r.cut_written or r.settled]
            self.numbers[engine.name] = max([self.numbers.get(engine.name, 0), *written])
        restored = self.subset(list(self.waiting.values()))
        newest = max(
            (
                v
                for g in restored
                for vs in [g.sums, *[v for _, v in g.listed.values()]]
                for v in vs
            ),
            default=0,
        )
        if self.chance(2):
            self.policy = self.integer(min(newest, self.policy), self.policy)
            self.next_step = self.integer(0, self.next_step)
        self.start({})
        for group in restored:
            group.owners = []
            fields: Event = {"tokens": {}, "calls": []}
            for version in group.sums:
                key = str(version)
                fields["tokens"][key] = fields["tokens"].get(key, 0) + 1
            for name, (old, versions) in group.listed.items():
                says = ("call", "engine", "version", "tokens", "trained")
                entry: Event = {key: old[key] for key in says if key in old}
                entry["spans"] = spans(versions)
                if not self.complete:
                    for i, (start, stop, version) in enumerate(entry["spans"]):
                        if self.chance(4):
                            oldest = self.integer(0, version)
                            entry["spans"][i] = [
                                start,
                                stop,
                                oldest,
                                self.integer(version, self.policy),
                            ]
                fields["calls"].append(entry)
                group.listed[name] = (entry, versions)
            if group.unknown:
                fields["unknown"] = group.unknown
            self.write("group_published", group=group.name, restored=True, **fields)
            self.waiting[group.name] = group

    def move(self) -> None:
        """One thing happens."""
        moves: list[Callable[[], None]] = [self.generate, self.generate, self.generate, self.begin]
        if len(self.running()) < 3:
            moves += [self.begin, self.begin]
        if any(call.versions for call in self.running()):
            moves += [self.end]
        if self.finished():
            moves += [self.publish, self.publish]
        pausable = any(e.paused is None and e.top < self.policy for e in self.engines)
        if self.waiting or (not pausable and self.chance(2)):
            moves += [self.step]
        if pausable:
            moves += [self.pause, self.pause]
        if self.countable():
            moves += [self.count, self.count]
        if self.loadable():
            moves += [self.load, self.load]
        if any(e.paused is not None and e.paused.over for e in self.engines):
            moves += [self.resume, self.resume]
        if self.flushable():
            moves += [self.flush]
        if (self.waiting or self.finished()) and self.chance(6):
            moves += [self.drop]
        if self.restarts and self.chance(6 if self.waiting else 20):
            moves += [self.restart]
        self.pick(moves)()

    def finish(self) -> None:
        """End what runs, publish it and train it, with the refits as they are."""
        self.publish_all()
        self.step()

    def publish_all(self) -> None:
        """End what runs and publish it."""
        while self.running():
            self.end()
        while self.finished():
            self.publish()


def inside(versions: list[int], mask: list[list[int]] | None) -> list[int]:
    """The tokens inside a loss mask; all of them without one."""
    if mask is None:
        return list(versions)
    return [v for t, v in enumerate(versions) if any(start <= t < stop for start, stop in mask)]


def spans(versions: list[int]) -> list[list[int]]:
    """`[start, stop, version]` for each run of equal versions: [0, 0, 2] gives [[0, 2, 0], [2, 3,
    2]].
    """
    found: list[list[int]] = []
    for t, version in enumerate(versions):
        if found and found[-1][2] == version:
            found[-1][1] = t + 1
        else:
            found.append([t, t + 1, version])
    return found


@st.composite
def histories(draw: Any, complete: bool = False, max_moves: int = 150) -> History:
    """A legal history; `complete` leaves no evidence out, so that every age is exact."""
    world = World(lambda low, high: draw(_integers(low, high)), complete)
    for _ in range(max_moves - world.integer(0, max_moves - 40)):
        world.move()
    world.finish()
    return History(world.events, world.truths)


def long_history(
    seed: int, moves: int, complete: bool = False, tidy: bool = False, **about: int
) -> History:
    """A legal history of one long incarnation, which hypothesis would be too slow to draw."""
    world = World(Random(seed).randint, complete, about)
    world.restarts, world.tidy = False, tidy
    for _ in range(moves):
        world.move()
    world.finish()
    return History(world.events, world.truths)
