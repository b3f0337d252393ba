"""Where the cuts of one engine list which call, for as long as somebody may ask.

Nothing of a call is kept longer than it runs or waits, and for ``orphan_after`` refits after that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Set
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
    published: bool = False
    """A group with it was trained or dropped; while one waits, that group says so."""
    since: int = -1
    """The refit after which that was, or from which on it is to be kept for other reasons."""

    @property
    def counts(self) -> Counts:
        """Its tokens at each refit whose cut lists it."""
        return dict(zip(self.refits, self.places, strict=True))

    @property
    def touched(self) -> int:
        """The refit at which anything was heard of it last."""
        refits = self.refits
        return refits[-1] if refits and refits[-1] > self.since else self.since


class Listings:
    """The calls of one engine that cuts list, or may still list.

    Args:
        waiting: names the calls of the groups that are published and may still be trained. It is
            asked when something could be forgotten, so that a publish has nothing to note.
    """

    def __init__(self, waiting: Callable[[], Set[str]]) -> None:
        self.listed: dict[str, Listing] = {}
        self._unlisted: dict[str, Listing] = {}
        """Calls whose groups left before any cut listed them."""
        self._touched: defaultdict[int, list[str]] = defaultdict(list)
        """Calls by the refit at which they were touched; each is in the list of its last too."""
        self._over: list[str] = []
        """Published ones that nobody touched for long; they go a few refits at a time."""
        self._cleared = 0
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
        listed, unlisted, alone = self.listed, self._unlisted, (refit,)
        self._touched[refit] += calls
        for call, count in calls.items():
            listing = listed.get(call)
            if listing is None:
                if call not in unlisted:
                    listed[call] = Listing(call, alone, (count,), count > 0)
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
                if listing.published:
                    self._unlisted[call] = listing

    def left(self, call: str, last: int) -> None:
        """A group with this call was trained or dropped after refit ``last``: what cuts say of it
        is kept for a while, since another group may be published with it, and a cut that lists it
        may come late."""
        listing = self.listed.get(call) or self._unlisted.get(call)
        if listing is None:
            listing = self._unlisted[call] = Listing(call)
        self.left_listed((listing,), last)

    def left_listed(self, listings: Iterable[Listing], last: int) -> None:
        """The same of calls whose listings are at hand."""
        touched = self._touched[last]
        for listing in listings:
            listing.published = True
            if listing.since != last:
                listing.since = last
                touched.append(listing.call)

    def forget(self, oldest: int, last: int) -> list[tuple[int, ...]]:
        """Forget the calls that were touched last at refit ``oldest`` or before, but for those of
        waiting groups. A published one may stay a little longer.

        Returns:
            The refits whose cuts listed each call that no group ever published.
        """
        alone: list[Listing] = []
        for number in [number for number in self._touched if number <= oldest]:
            for call in self._touched.pop(number):
                listing = self.listed.get(call) or self._unlisted.get(call)
                if listing is None or listing.touched != number:
                    continue
                if listing.published:
                    self._over.append(call)
                else:
                    alone.append(listing)
        orphans = self._drop(alone, last)
        if self._over and last - self._cleared >= AT_A_TIME:
            self._cleared = last
            over = (self.listed.get(call) or self._unlisted.get(call) for call in self._over)
            still = [each for each in over if each is not None and each.touched <= oldest]
            self._over = []
            self._drop(still, last)
        return orphans

    def _drop(self, listings: list[Listing], last: int) -> list[tuple[int, ...]]:
        """Forget those that no waiting group has; return the refits that listed them."""
        if not listings:
            return []
        waiting = self._waiting()
        dropped: list[tuple[int, ...]] = []
        for listing in listings:
            if listing.call in waiting:
                self._touch(listing, last)
                continue
            held = self.listed if listing.refits else self._unlisted
            if held.pop(listing.call, None) is not None:  # a repeated cut names it twice
                dropped.append(listing.refits)
        return dropped

    def _touch(self, listing: Listing, last: int) -> None:
        listing.since = last
        self._touched[last].append(listing.call)


def _note(listing: Listing, counts: Counts) -> None:
    listing.refits = tuple(sorted(counts))
    listing.places = tuple(counts[refit] for refit in listing.refits)
    listing.rising = all(map(lt, (0, *listing.places), listing.places))
