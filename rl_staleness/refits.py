"""The refits of one engine in the order of their numbers, and where their cuts list which call.

It holds what the trace says and answers questions about numbers; what follows for a call's tokens
is in ``spans.py``. A refit is done, aborted or open: then it may have happened or not. Numbers that
the trace skips belong to refits whose lines are lost; they are open too.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator, Set
from dataclasses import InitVar, dataclass, field, replace
from itertools import chain

from rl_staleness.events import LARGEST, Call, RefitAborted, RefitCut, RefitDone
from rl_staleness.listings import Listings

__all__ = ["Finding", "Refit", "Refits"]

Finding = tuple[str, str]
"""Name of a violation, and what contradicts what."""


@dataclass(slots=True)
class Refit:
    """One refit as far as the trace goes, or a run of settled ones that all went the same way."""

    number: int
    last: int
    """Highest number of the run."""
    version: int | None = None
    """What ``number`` leads to; None where no line says it."""
    stride: int = 0
    """Versions from one refit of the run to the next."""
    state: str = "open"
    """Then ``done`` or ``aborted``."""
    cut: bool = False
    counts_exact: bool = False
    """The counts of its cut are exact."""
    complete: bool = False
    """Its cut is exact and still lists all that it listed: who is not in it was not running."""

    @property
    def newest(self) -> int | None:
        """What the last refit of the run leads to."""
        return self.version_at(self.last)

    def version_at(self, number: int) -> int | None:
        """What refit ``number`` of the run leads to."""
        return None if self.version is None else self.version + (number - self.number) * self.stride

    def part(self, first: int, last: int) -> Refit:
        """The numbers of this run that lie from ``first`` to ``last``."""
        if first <= self.number and self.last <= last:
            return self
        first, last = max(first, self.number), min(last, self.last)
        return replace(self, number=first, last=last, version=self.version_at(first))


@dataclass(slots=True)
class Refits:
    """One engine's refits since the run, or its last resume, started."""

    start: int
    """Version that the engine started with."""
    base: int = 0
    """Last refit number from before; it and lower ones stand for the start."""
    limit: int | None = None
    """Version that the run went on from; None: it has not been resumed."""
    undone: bool = False
    """A part of the run was rolled back: refits from before may have led to other weights."""
    orphan_after: int = 64
    """Refits after which a listed call that nobody published is forgotten."""
    last: int = 0
    """Highest refit number so far."""
    orphans: int = 0
    """Listed calls that were forgotten before anybody published them."""
    _refits: dict[int, Refit] = field(default_factory=dict[int, Refit])
    _order: list[int] = field(default_factory=list[int])
    _pack_above: int = 128
    _tidied: int = 0
    """The last refit at which something could be forgotten."""
    calls: Listings = field(init=False)
    """Where its cuts list which call."""
    waiting: InitVar[Callable[[], Set[str]]] = frozenset
    """Names the calls of the groups that are published and may still be trained."""

    def __post_init__(self, waiting: Callable[[], Set[str]]) -> None:
        self.last = max(self.last, self.base)
        self.calls = Listings(waiting)

    @property
    def size(self) -> int:
        """Entries held in memory."""
        return len(self._refits) + self.calls.size

    # Lines of the trace, in their order.

    def cut(self, event: RefitCut) -> list[Finding]:
        """Take a cut; a repeated one replaces the first, that of an aborted refit is void."""
        refit = self._open(event.refit)
        if refit.cut and refit.state == "open":
            refit.version = None  # what the first one said is replaced too
        found = _lead(refit, event.version)
        self._unlist(refit)
        if refit.state != "aborted":
            refit.cut = True
            refit.counts_exact = refit.complete = event.exact is not False
            self.calls.take(refit.number, event.calls)
        self._forget()
        return found

    def done(self, event: RefitDone) -> list[Finding]:
        """The engine holds the version from here on."""
        refit = self._open(event.refit)
        found = _lead(refit, event.version)
        if refit.state == "aborted":
            found.append(("refit_done_and_aborted", f"refit {refit.number} was aborted before"))
        refit.state = "done"
        older, newer = self.beside(refit.number)
        if event.version < older or (newer is not None and event.version > newer):
            other = older if event.version < older else newer
            detail = f"refit {refit.number} leads to {event.version}, its neighbour to {other}"
            found.append(("engine_version_back", detail))
        if self.last - self._tidied > self.orphan_after // 8:
            self._forget()  # as cuts do, which are written beside the engine's loop
        return found

    def aborted(self, event: RefitAborted) -> list[Finding]:
        """The refit failed: its cut is void."""
        refit = self._open(event.refit)
        was_done = refit.state == "done"
        refit.state = "aborted"
        self._unlist(refit)
        self._forget()
        if was_done:
            return [("refit_done_and_aborted", f"refit {refit.number} was done before")]
        return []

    def left(self, call: Call) -> None:
        """A group with this call was trained or dropped: keep what cuts say of it for a while."""
        # One that no refit touched is listed where it was counted in its own first pause.
        if call.after is None or call.after != call.until or call.call in self.calls.listed:
            self.calls.left(call.call, self.last)

    # What is known.

    def exact(self, number: int) -> bool:
        """Whether the counts of this refit's cut are exact."""
        refit = self.find(number)
        return refit is not None and refit.counts_exact

    def sole_version(self, after: int, until: int) -> int | None:
        """The one version of a call that no refit touched, done or open; None if one may have."""
        if after != until and any(r.state != "aborted" for r in self.between(after, until)):
            return None
        refit = self.find(after)
        if refit is None:
            # A number from before a resume stands for the start only where it is the last one.
            known = after <= self.base if self.limit is None else after == self.base
            return self.start if known else None
        if refit.state == "aborted":
            oldest, newest = self.before(after, now=LARGEST)
            return oldest if oldest == newest else None
        return refit.version_at(after) if refit.state == "done" else None

    def find(self, number: int) -> Refit | None:
        """The refit with this number, or the run that holds it, if a line of the trace says so."""
        at = bisect_right(self._order, number) - 1
        if at < 0:
            return None
        run = self._refits[self._order[at]]
        return run if number <= run.last else None

    def between(self, begin: int, until: int) -> Iterator[Refit]:
        """The refits above ``begin`` up to ``until``; open ones where numbers are skipped."""
        reached = begin
        for at in range(max(bisect_right(self._order, begin) - 1, 0), len(self._order)):
            run = self._refits[self._order[at]]
            if run.number > until:
                break
            if run.last <= begin:
                continue
            part = run.part(begin + 1, until)
            if part.number > reached + 1:
                yield Refit(reached + 1, part.number - 1)
            yield part
            reached = part.last
        if reached < until != LARGEST:
            yield Refit(reached + 1, until)

    def before(self, number: int, *, now: int) -> tuple[int, int]:
        """Oldest and newest version that the engine may have had just before refit ``number``.

        Args:
            now: the newest version that an open refit of unknown version may lead to.
        """
        may: list[int] = []
        lost = False
        below = number
        for run in self._down_from(number):
            lost = lost or run.last + 1 < below
            below = run.number
            if run.state == "done" and run.newest is not None:
                sure = run.newest
                break
            if run.state == "open" and run.version is not None:
                may.append(run.version)
        else:
            lost = lost or self.base + 1 < below
            sure = self.start
        return min([sure, *may]), max([sure, *may, now if lost else sure])

    def beside(self, number: int) -> tuple[int, int | None]:
        """The versions that the done refits before and after this one lead to."""
        older = next((r.newest for r in self._down_from(number) if r.state == "done"), None)
        above = (self._refits[n] for n in self._order[bisect_right(self._order, number) :])
        newer = next((r.version for r in above if r.state == "done"), None)
        return self.start if older is None else older, newer

    def leading_to(self, version: int, *, below: int) -> int | None:
        """The last done refit below this number that leads to ``version``; the base: the start."""
        for run in self._down_from(below):
            if run.state != "done" or run.version is None:
                continue
            ahead = version - run.version
            if run.newest == version:
                return run.last
            if run.stride and not ahead % run.stride:
                number = run.number + ahead // run.stride
                if run.number <= number <= run.last:
                    return number
        return self.base if version == self.start else None

    def may_lead_to(self, version: int, *, until: int) -> int | None:
        """The first refit up to ``until`` that may have led to ``version``, if it happened."""
        sure = self.start
        for refit in self.between(self.base, until):
            if refit.state == "done" and refit.newest is not None:
                sure = refit.newest
            elif refit.state == "open":
                newer = self.beside(refit.last)[1]
                between = sure <= version and (newer is None or version <= newer)
                if refit.version == version or (refit.version is None and between):
                    return refit.number
        return None

    def _down_from(self, number: int) -> Iterator[Refit]:
        for at in range(bisect_left(self._order, number) - 1, -1, -1):
            yield self._refits[self._order[at]].part(0, number - 1)

    # What changes, and what is needed no more.

    def _open(self, number: int) -> Refit:
        """The refit with this number, made or taken out of the run that it was packed into."""
        self.last = max(self.last, number)
        run = self.find(number)
        if run is not None and run.number == run.last:
            return run
        parts = [Refit(number, number)]
        if run is not None:
            self._order.remove(run.number)
            below, above = run.part(0, number - 1), run.part(number + 1, LARGEST)
            parts = [p for p in (below, run.part(number, number), above) if p.number <= p.last]
        for part in parts:
            self._refits[part.number] = part
            insort(self._order, part.number)
        return self._refits[number]

    def _unlist(self, refit: Refit) -> None:
        if refit.cut:
            self.calls.void(refit.number)
        refit.cut = refit.counts_exact = refit.complete = False

    def _forget(self) -> None:
        """Forget calls that are needed no more, and pack refits that are settled."""
        self._tidied = self.last
        orphans = self.calls.forget(self.last - self.orphan_after, self.last)
        self.orphans += len(orphans)
        for number in set(chain.from_iterable(orphans)):
            self._refits[number].complete = False
        if len(self._order) > self._pack_above:
            self._pack()
            self._pack_above = max(4 * self.orphan_after + 64, 2 * len(self._order))

    def _pack(self) -> None:
        """Join settled refits that went the same way, so that a long history takes no room."""
        limit = self.calls.oldest(self.last - self.orphan_after)
        packed: list[Refit] = []
        for number in self._order:
            refit = self._refits[number]
            if packed and refit.last < limit and _goes_on(packed[-1], refit):
                run = packed[-1]
                if run.state == "aborted":
                    packed[-1] = Refit(run.number, refit.last, state="aborted")
                    continue
                stride = (refit.version or 0) - (run.newest or 0)
                packed[-1] = replace(run, last=refit.last, stride=stride)
            else:
                packed.append(refit)
        self._order = [refit.number for refit in packed]
        self._refits = {refit.number: refit for refit in packed}


def _lead(refit: Refit, version: int) -> list[Finding]:
    """Note which version a refit leads to; the later line wins."""
    before, refit.version = refit.version, version
    if before is None or before == version:
        return []
    return [("refit_version", f"refit {refit.number} leads to {version}, and to {before}")]


def _goes_on(run: Refit, refit: Refit) -> bool:
    """Whether a settled refit goes on with a run."""
    if refit.number != run.last + 1 or refit.state == "open" or run.state != refit.state:
        return False
    if run.state == "aborted":
        return True
    step = (refit.version or 0) - (run.newest or 0)
    even = (run.last == run.number or step == run.stride) and (
        refit.last == refit.number or step == refit.stride
    )
    return run.complete == refit.complete and step >= 0 and even
