"""Where the cuts of one engine list which call, for as long as somebody may ask.

Nothing of a call is kept longer than it runs or waits, and for ``orphan_after`` refits after that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import KeysView
from operator import lt

import msgspec

__all__ = ["Counts", "Listing", "Listings"]

Counts = dict[int, int]
"""Tokens of one call at each refit whose cut lists it."""


class Listing(msgspec.Struct, gc=False):
    """A call that a cut lists, or that is published and may still be listed."""

    touched: int
    """The refit at which it was listed or published last."""
    refits: tuple[int, ...] = ()
    """Those whose cuts list it, in order; none: not so far."""
    places: tuple[int, ...] = ()
    """Its tokens at each of them."""
    rising: bool = True
    """It had a token at the first of them, and more at each of the others."""
    groups: tuple[str, ...] = ()
    """Those that it was published with; none: not yet."""

    @property
    def counts(self) -> Counts:
        """Its tokens at each refit whose cut lists it."""
        return dict(zip(self.refits, self.places, strict=True))


class Listings:
    """The calls of one engine that cuts list, or may still list.

    Args:
        waiting: names of the groups that are published and may still be trained.
    """

    def __init__(self, waiting: KeysView[str]) -> None:
        self.listed: dict[str, Listing] = {}
        self._unlisted: dict[str, Listing] = {}
        """Published calls that no cut lists so far."""
        self._touched: defaultdict[int, list[str]] = defaultdict(list)
        """Calls by the refit at which they were touched; each is in the list of its last too."""
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
                    listed[call] = Listing(refit, alone, (count,), count > 0)
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
            if listing.touched < refit:
                listing.touched = refit

    def void(self, refit: int) -> None:
        """The cut of this refit counts no more."""
        for call in [call for call, listing in self.listed.items() if refit in listing.refits]:
            listing = self.listed[call]
            counts = listing.counts
            del counts[refit]
            _note(listing, counts)
            if not counts:
                del self.listed[call]
                if listing.groups:
                    self._unlisted[call] = listing

    def need(self, call: str, groups: tuple[str], last: int) -> None:
        """A group is published with this call after refit ``last``: it is needed while the group
        waits, and for a while after that, since another group may be published with it."""
        listing = self.listed.get(call) or self._unlisted.get(call)
        if listing is None:
            listing = self._unlisted[call] = Listing(-1)
        if listing.groups:
            still = [g for g in listing.groups if g not in groups and g in self._waiting]
            groups = (*still, *groups)  # type: ignore[assignment]
        listing.groups = groups
        if listing.touched != last:
            self._touch(call, listing, last)

    def forget(self, oldest: int, last: int) -> list[tuple[int, ...]]:
        """Forget the calls that were touched last at refit ``oldest`` or before.

        Returns:
            The refits whose cuts listed each call that no group ever published.
        """
        orphans: list[tuple[int, ...]] = []
        waiting, listed, unlisted = self._waiting, self.listed, self._unlisted
        for number in [number for number in self._touched if number <= oldest]:
            for call in self._touched.pop(number):
                listing = listed.get(call) or unlisted.get(call)
                if listing is None or listing.touched != number:
                    continue
                if listing.groups and not waiting.isdisjoint(listing.groups):
                    self._touch(call, listing, last)
                    continue
                if not listing.groups:
                    orphans.append(listing.refits)
                if listing.refits:
                    del listed[call]
                else:
                    del unlisted[call]
        return orphans

    def _touch(self, call: str, listing: Listing, last: int) -> None:
        listing.touched = last
        self._touched[last].append(call)


def _note(listing: Listing, counts: Counts) -> None:
    listing.refits = tuple(sorted(counts))
    listing.places = tuple(counts[refit] for refit in listing.refits)
    listing.rising = all(map(lt, (0, *listing.places), listing.places))
