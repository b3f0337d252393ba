"""A place in the stream of vLLM's outputs, and the cut that is counted there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rl_staleness.engines import Cut

__all__ = ["PendingCut", "Place"]


class PendingCut:
    """Joins what a cut takes: the counts at the marker, and that the engine was paused there."""

    __slots__ = ("_cut", "_deliver", "paused")

    def __init__(self, deliver: Callable[[Cut | None], None]) -> None:
        self._deliver: Callable[[Cut | None], None] | None = deliver
        self._cut: Cut | None = None
        self.paused = False
        """The engine said so."""

    def counted(self, cut: Cut) -> None:
        self._cut = cut
        if self.paused:
            self.finish(cut)

    def answered(self, *, paused: bool) -> None:
        self.paused = paused
        if self._cut is not None or not paused:
            self.finish(self._cut if paused else None)

    def finish(self, cut: Cut | None) -> None:
        """Deliver, the first time."""
        deliver, self._deliver = self._deliver, None
        if deliver is not None:
            deliver(cut)


class Place(list[Any]):
    """The outputs of a batch that has none: says when the output handler looks at them."""

    def __init__(self, reached: Callable[[], object]) -> None:
        super().__init__()
        self._reached: Callable[[], object] | None = reached

    def __len__(self) -> int:
        reached, self._reached = self._reached, None
        if reached is not None:
            reached()
        return 0
