"""What is published, trained or dropped as one: usually the rollouts of one prompt."""

from __future__ import annotations

from collections.abc import Iterable

from rl_staleness.engines import Capture, LiveCall
from rl_staleness.events import Call

__all__ = ["Group", "name_of", "names_of"]


class Group:
    """What is published, trained or dropped as one; its calls gather while it is open."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.capture = Capture()
        self._records: list[Call] = []

    @property
    def calls(self) -> list[LiveCall | Call]:
        """Its calls: those captured in this process, then those added."""
        return [*self.capture.calls, *self._records]

    def add(self, records: Iterable[Call]) -> None:
        """Add calls that were captured in another process."""
        self._records.extend(records)

    def __repr__(self) -> str:
        return f"Group({self.name!r}, {len(self.calls)} calls)"


def name_of(group: Group | str) -> str:
    """What a trace calls this group."""
    return group.name if isinstance(group, Group) else group


def names_of(groups: Iterable[Group | str] | None) -> tuple[str, ...]:
    """What a trace calls these groups, in their order; one alone will do."""
    if isinstance(groups, (str, Group)):
        groups = (groups,)
    return tuple(name_of(group) for group in groups or ())
