"""Where the generated tokens of a run went: trained, dropped, waiting, lost, each with its age.

    generated = trained + masked + dropped + waiting + discarded + running - after + lost

What engines generated is known from their own counters, which cuts carry (``generated``), up to
the last cut of each; what was made after that is in the accounts and in `Balance.after`.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

__all__ = ["Account", "Balance"]


class Account(msgspec.Struct):
    """Tokens that went one way."""

    tokens: int = 0
    age: int = 0
    """Sum over the tokens, in policy updates."""
    without_age: int = 0
    """Tokens of weights that this run never had: a rollback took them away."""

    @property
    def mean_age(self) -> float | None:
        """In policy updates, over the tokens that have an age; None: there are none."""
        aged = self.tokens - self.without_age
        return self.age / aged if aged else None

    def add(self, tokens: Mapping[int, int], at: int, without_age: int = 0) -> None:
        """Add tokens by version, as old as they are at version ``at``, and some without age."""
        self.tokens += without_age
        self.without_age += without_age
        for version, count in tokens.items():
            self.tokens += count
            self.age += (at - version) * count


class Balance(msgspec.Struct, kw_only=True):
    """The token ledger of a run. Ages are taken when a token leaves, or as the trace ends."""

    generated: int | None
    """By the engines' counters, up to the last cut of each; None: they do not all count."""
    trained: Account
    """Tokens that reached the loss, each counted once."""
    trained_again: Account
    """Tokens that reached it once more, in a later batch or step, or after a rollback."""
    masked: Account
    """Tokens of trained groups that the loss mask leaves out."""
    dropped: dict[str, Account]
    waiting: Account
    """Tokens of groups that wait as the trace ends and were never trained."""
    discarded: Account
    """Tokens of untrained groups that waited at a resume and were not published again after it."""
    running: int
    """Tokens so far of the calls in the last cuts that no group was published with. Their age is
    not known: nothing says on which version they began."""
    after: int
    """Tokens above that were made after the last cut of their engine."""
    undecided: int
    """Tokens above of which the trace does not say on which side of that cut they were made."""
    appended: int
    """Trained tokens that no call made; in no other number."""
    lost_lo: int | None
    """Generated and in no account (calls that nobody captured or published): at least. Below 0
    only where more tokens are in the accounts than were generated."""
    lost_hi: int | None
    """At most. None: see `open`."""
    open: list[str]
    """Why the ledger cannot be closed."""

    @property
    def accounted(self) -> int:
        """Tokens in the accounts, `appended` and `trained_again` left out."""
        accounts = (self.trained, self.masked, self.waiting, self.discarded, *self.dropped.values())
        return sum(account.tokens for account in accounts) + self.running
