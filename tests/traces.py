"""Traces of made-up asynchronous runs, written through the hooks that a trainer calls.

Engines generate while the trainer updates; calls run across refits; groups wait in a queue, and
those that waited too long are dropped. No engine is real: a call is a number of tokens still to
make, and time is what the simulation says.
"""

from __future__ import annotations

import argparse
import itertools
import random
import types
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from rl_staleness import Group, StalenessCallback
from rl_staleness.engines import LiveCall

__all__ = ["write_trace"]

STARTED = 1_790_000_000.0
"""Unix seconds at which every run starts."""


class Clock:
    """Seconds that pass only when told."""

    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class Slot:
    """One place of an engine's batch: the call that runs in it."""

    def __init__(self, call: LiveCall, group: Pending, length: int) -> None:
        self.call = call
        self.group = group
        self.length = length


class Pending:
    """A group that is being generated."""

    def __init__(self, name: str, size: int) -> None:
        self.group = Group(name)
        self.unassigned = size
        self.running = size


class AsyncRun:
    """The simulation: engines that always have work, and a queue.

    Args:
        blind: share of calls whose begin nobody saw, and of refits without a cut.
        filtered: share of groups that are dropped instead of published.
        abort: share of refits that fail on an engine.
    """

    def __init__(
        self,
        staleness: StalenessCallback,
        *,
        engines: tuple[str, ...],
        slots: int,
        group_size: int,
        mean_tokens: float,
        blind: float,
        filtered: float,
        abort: float,
        chance: random.Random,
        clock: Clock,
    ) -> None:
        self.staleness = staleness
        self.queue: list[Group] = []
        """Published groups, the oldest first."""
        self._names = itertools.count(1)
        self._group_size = group_size
        self._mean = mean_tokens
        self._blind = blind
        self._filtered = filtered
        self._abort = abort
        self._chance = chance
        self._clock = clock
        self._pending = self._next_group()
        self._refit = dict.fromkeys(engines, 0)
        self._versions = dict.fromkeys(engines, staleness.version)
        self._slots = {name: [self._begin(name) for _ in range(slots)] for name in engines}

    def generate(self, tokens: int) -> None:
        """Every slot makes so many tokens, a new call taking the place of one that ends."""
        self._clock.now += tokens / 50
        for name, slots in self._slots.items():
            for at, slot in enumerate(slots):
                budget = max(1, round(tokens * self._chance.uniform(0.8, 1.2)))
                while slot.call.tokens + budget >= slot.length:
                    budget -= slot.length - slot.call.tokens
                    self._end(slot)
                    slot = slots[at] = self._begin(name)
                slot.call.tokens += budget

    def refit(self) -> None:
        """Move every engine to the policy's version, one after the other."""
        for name in self._slots:
            seen = self._chance.random() >= self._blind
            counts = {slot.call.call: slot.call.tokens for slot in self._slots[name]}
            self.staleness.on_refit_paused(engines=[name], cuts={name: counts} if seen else None)
            self._refit[name] += 1
            self._clock.now += 0.4 + self._chance.expovariate(2.0)
            if self._chance.random() < self._abort:
                self.staleness.on_refit_aborted(reason="broadcast timed out", engines=[name])
            else:
                self.staleness.on_refit_done(engines=[name])
                self._versions[name] = self.staleness.version

    def _next_group(self) -> Pending:
        return Pending(f"prompt-{next(self._names)}", self._group_size)

    def _begin(self, engine: str) -> Slot:
        if not self._pending.unassigned:
            self._pending = self._next_group()
        group = self._pending
        group.unassigned -= 1
        after = None if self._chance.random() < self._blind else self._refit[engine]
        number = self._group_size - group.unassigned
        call = LiveCall(
            call=f"{group.group.name}/{number}",
            engine=engine,
            version=self._versions[engine],
            after=after,
        )
        length = max(1, round(self._chance.lognormvariate(0, 0.6) * self._mean))
        return Slot(call, group, length)

    def _end(self, slot: Slot) -> None:
        slot.call.tokens = slot.length
        slot.call.until = None if slot.call.after is None else self._refit[slot.call.engine]
        slot.call.ended = True
        group = slot.group
        group.group.capture.calls.append(slot.call)
        group.running -= 1
        if group.running:
            return
        if self._chance.random() < self._filtered:
            self.staleness.on_drop(group.group, reason="all rewards equal")
        else:
            self.staleness.on_publish(group.group)
            self.queue.append(group.group)


def write_trace(
    path: Path | None,
    *,
    steps: int,
    seed: int = 0,
    run: str = "async-grpo",
    engines: tuple[str, ...] = ("engine-0", "engine-1", "engine-2"),
    slots: int = 16,
    group_size: int = 4,
    groups_per_step: int = 6,
    mean_tokens: float = 200.0,
    tokens_per_phase: int = 120,
    max_age: float | None = 5.0,
    refit_every: int = 1,
    updates: int = 1,
    blind: float = 0.0,
    filtered: float = 0.03,
    abort: float = 0.01,
    contradictions: int = 0,
) -> StalenessCallback:
    """Run and write one trace.

    Args:
        path: None measures without a trace.
        groups_per_step: what a step trains; a step waits until there are as many.
        max_age: batch age in updates beyond which a waiting group is dropped.
        refit_every: steps between refits.
        updates: policy updates a step.
        contradictions: steps, evenly spread, that train a group which was never published.

    Returns:
        The closed callback.
    """
    chance, clock = random.Random(seed), Clock(STARTED)
    staleness = StalenessCallback(trace=path, run=run, clock=clock)
    every = steps // contradictions if contradictions else 0
    with (
        mock.patch("rl_staleness.pauses.time", types.SimpleNamespace(monotonic=clock)),
        staleness,
    ):
        async_run = AsyncRun(
            staleness,
            engines=engines,
            slots=slots,
            group_size=group_size,
            mean_tokens=mean_tokens,
            blind=blind,
            filtered=filtered,
            abort=abort,
            chance=chance,
            clock=clock,
        )
        for step in range(1, steps + 1):
            while len(async_run.queue) < groups_per_step:
                async_run.generate(tokens_per_phase)
                _drop_old(async_run, max_age)
            taken = async_run.queue[:groups_per_step]
            del async_run.queue[:groups_per_step]
            clock.now += chance.uniform(2.0, 4.0)
            odd = ["never published"] if every and step % every == 0 else []
            staleness.on_step([*taken, *odd], updates=updates if updates != 1 else None)
            if step % refit_every == 0:
                async_run.refit()
            async_run.generate(tokens_per_phase)
            _drop_old(async_run, max_age)
    return staleness


def _drop_old(run: AsyncRun, max_age: float | None) -> None:
    if max_age is None:
        return
    kept = []
    for group in run.queue:
        if (run.staleness.age(group).batch_age or 0) > max_age:
            run.staleness.on_drop(group, reason=f"older than {max_age:g} updates")
        else:
            kept.append(group)
    run.queue = kept


def _options() -> Iterator[tuple[str, object]]:
    parser = argparse.ArgumentParser(description="Write the trace of a made-up asynchronous run.")
    parser.add_argument("path", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--refit-every", type=int, default=1)
    parser.add_argument("--updates", type=int, default=1)
    parser.add_argument("--blind", type=float, default=0.0)
    parser.add_argument("--contradictions", type=int, default=0)
    parser.add_argument("--max-age", type=float, default=5.0)
    yield from vars(parser.parse_args()).items()


if __name__ == "__main__":
    write_trace(**dict(_options()))  # type: ignore[arg-type]
