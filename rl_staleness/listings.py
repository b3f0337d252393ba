"""Where the cuts of one engine list which call, for as long as somebody may ask.

Nothing of a call is kept longer than it runs or waits, and for ``orphan_after`` refits after that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Set
from itertools import chain
from operator import lt

import msgspec

__all__ = ["Counts", "Listing", "Listings"]

AT_A_TIME = 8
"""Refits after which published calls that are over are looked through."""

Counts = dict[int, int]
"""Tokens of one call at each refit whose cut lists it."""


class Listing(msgspec.Struct, gc=False):
    """A call that a cut lists, or that a group was published with and that may still be listed."""

    call: str
    refits: tuple[int, ...] = ()
    """Those whose cuts list it, in order; none: not so far."""
    places: tuple[int, ...] = ()
    """Its tokens at each of them."""
    rising: bool = True
    """It had a token at the first of them, and more at each of the others."""
    since: int = -1
    """The refit after which a group with it left, or after which it is kept for other reasons."""

    @property
    def counts(self) -> Counts:
        """Its tokens at each refit whose cut lists it."""
        return dict(zip(self.refits, self.places, strict=True))

    @property
    def touched(self) -> int:
        """The refit at which anything was heard of it last, if a cut lists it."""
        return max(self.refits[-1], self.since)


class Listings:
    """The calls of one engine that cuts list, or may still list.

    Args:
        waiting: names the engine's calls in groups that are published and may still be trained. It
            is asked when something could be forgotten, so that a publish has nothing to note.
    """

    def __init__(self, waiting: Callable[[], Set[str]]) -> None:
        self.listed: dict[str, Listing] = {}
        self._unlisted: dict[str, Listing] = {}
        """Calls whose groups left before any cut listed them."""
        self._unclaimed: set[str] = set()
        """Listed calls that no group has left with so far."""
        self._listed_at: defaultdict[int, list[str]] = defaultdict(list)
        """Calls by the refit whose cut lists them."""
        self._left_at: defaultdict[int, list[Listing]] = defaultdict(list)
        """Calls by the refit after which a group with them left; each stands here once, perhaps
        earlier than it left last."""
        self._tidied = 0
        self._waiting = waiting

    @property
    def size(self) -> int:
        """Entries held in memory."""
        return len(self.listed) + len(self._unlisted)

    def counts(self, call: str) -> Counts:
        """Where cuts list this call."""
        listing = self.listed.get(call)
        return {} if listing is None else listing.counts

    def oldest(self, limit: int) -> int:
        """The lowest refit, not above ``limit``, whose cut lists a call that is kept."""
        return min([limit, *(listing.refits[0] for listing in self.listed.values())])

    def take(self, refit: int, calls: dict[str, int]) -> None:
        """A cut lists these calls."""
        listed, unlisted, unclaimed = self.listed, self._unlisted, self._unclaimed
        alone = (refit,)
        self._listed_at[refit] += calls
        for call, count in calls.items():
            listing = listed.get(call)
            if listing is None:
                if call not in unlisted:
                    listed[call] = Listing(call, alone, (count,), count > 0)
                    unclaimed.add(call)
                    continue
                listing = listed[call] = unlisted.pop(call)  # this cut came late
            refits = listing.refits
            if refits and refits[-1] < refit:
                places = listing.places
                listing.refits = refits + alone
                listing.places = (*places, count)
                if count <= places[-1]:
                    listing.rising = False
            else:
                _note(listing, {**listing.counts, refit: count})

    def void(self, refit: int) -> None:
        """The cut of this refit counts no more."""
        for call in [call for call, listing in self.listed.items() if refit in listing.refits]:
            listing = self.listed[call]
            counts = listing.counts
            del counts[refit]
            listing.since = listing.touched
            _note(listing, counts)
            if not counts:
                del self.listed[call]
                if call in self._unclaimed:
                    self._unclaimed.remove(call)
                else:
                    self._unlisted[call] = listing

    def left(self, call: str, last: int) -> None:
        """A group with this call was trained or dropped after refit ``last``: what cuts say of it
        is kept for a while, since another group may be published with it, and a cut that lists it
        may come late."""
        listing = self.listed.get(call) or self._unlisted.get(call)
        if listing is None:
            listing = self._unlisted[call] = Listing(call)
            self._left_at[last].append(listing)
        self.left_listed([listing], last)

    def left_listed(self, listings: list[Listing], last: int) -> None:
        """The same of calls whose listings are at hand."""
        unclaimed, left = self._unclaimed, self._left_at[last]
        for listing in listings:
            listing.since = last
            if listing.call in unclaimed:
                unclaimed.remove(listing.call)
                left.append(listing)

    def forget(self, oldest: int, last: int) -> list[tuple[int, ...]]:
        """Forget the calls of which nothing was heard after refit ``oldest``, but for those of
        waiting groups. Published ones go a few refits at a time.

        Returns:
            The refits whose cuts listed each call that no group ever published.
        """
        alone: dict[str, Listing] = {}
        for number in [number for number in self._listed_at if number <= oldest]:
            for call in self._unclaimed.intersection(self._listed_at.pop(number)):
                if self.listed[call].touched == number:
                    alone[call] = self.listed[call]
        orphans: list[tuple[int, ...]] = []
        waiting = self._waiting() if alone else frozenset[str]()
        for call, listing in alone.items():
            if call in waiting:
                listing.since = last
                self._listed_at[last].append(call)
            else:
                orphans.append(listing.refits)
                self._unclaimed.remove(call)
                del self.listed[call]
        if last - self._tidied >= AT_A_TIME:
            self._tidied = last
            self._forget_published(oldest, last)
        return orphans

    def _forget_published(self, oldest: int, last: int) -> None:
        numbers = [number for number in self._left_at if number <= oldest]
        waiting = self._waiting() if numbers else frozenset[str]()
        for listing in chain.from_iterable([self._left_at.pop(number) for number in numbers]):
            refits, waits = listing.refits, listing.call in waiting
            if waits:
                listing.since = last
            elif refits:
                listing.since = listing.touched
            if waits or listing.since > oldest:
                self._left_at[listing.since].append(listing)
            else:
                del (self.listed if refits else self._unlisted)[listing.call]


def _note(listing: Listing, counts: Counts) -> None:
    listing.refits = tuple(sorted(counts))
    listing.places = tuple(counts[refit] for refit in listing.refits)
    listing.rising = all(map(lt, (0, *listing.places), listing.places))
