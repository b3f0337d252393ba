"""Methods that are replaced on single objects, with the way back. Knows nothing of NeMo RL."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

from rl_staleness.guard import Guard

__all__ = ["Then", "Wraps", "arguments_of", "mismatches"]

Then = Callable[[dict[str, Any], Any], object]
"""What follows a method: (its arguments by name, its result)."""


class Wraps:
    """What was replaced on objects, so that each gets back what it had.

    Args:
        guard: keeps what goes wrong in ours from the method.
    """

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._replaced: list[tuple[Any, str, Any, Any]] = []

    def replace(self, owner: Any, name: str, ours: Any) -> None:
        """Put ours there."""
        self._replaced.append((owner, name, ours, _own(owner, name)))
        setattr(owner, name, ours)

    def before(self, owner: Any, name: str, then: Then) -> None:
        """Have a method preceded by ours."""
        original = getattr(owner, name)

        @wraps(original)
        def ours(*args: Any, **kwargs: Any) -> Any:
            with self._guard(name):
                then(arguments_of(original, args, kwargs), None)
            return original(*args, **kwargs)

        self.replace(owner, name, ours)

    def after(self, owner: Any, name: str, then: Then) -> None:
        """Have a method followed by ours, once it succeeded."""
        original = getattr(owner, name)

        @wraps(original)
        def ours(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            with self._guard(name):
                then(arguments_of(original, args, kwargs), result)
            return result

        self.replace(owner, name, ours)

    def after_awaited(self, owner: Any, name: str, then: Then) -> None:
        """The same for a coroutine; ours may be one, too. If not, nothing comes in between."""
        original = getattr(owner, name)

        @wraps(original)
        async def ours(*args: Any, **kwargs: Any) -> Any:
            result = await original(*args, **kwargs)
            with self._guard(name):
                waiting = then(arguments_of(original, args, kwargs), result)
                if inspect.isawaitable(waiting):
                    await waiting
            return result

        self.replace(owner, name, ours)

    def restore(self) -> None:
        """Give every object back what it had; a second time does nothing."""
        for owner, name, ours, before in reversed(self._replaced):
            if _own(owner, name) is not ours:
                continue  # somebody wrapped it after us, and ours goes on to the original
            if before is None:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
        self._replaced.clear()


def _own(owner: Any, name: str) -> Any:
    """What an object has itself, not from its class."""
    return owner.__dict__.get(name)


def arguments_of(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name: their places differ between versions."""
    return inspect.signature(function).bind(*args, **kwargs).arguments


def mismatches(
    root: Any, wanted: Mapping[str, Sequence[str]], *, optional: bool = False
) -> list[str]:
    """What is not there, or has no parameter of a name that is read.

    Args:
        wanted: dotted paths from the root, with the names of parameters.
        optional: what is not there at all is none.

    >>> from pathlib import PurePath
    >>> mismatches(PurePath(), {"joinpath": (), "nothing": (), "relative_to": ("sub",)})
    ['it has no nothing', "relative_to has no parameter 'sub'"]
    """
    problems: list[str] = []
    for path, names in wanted.items():
        found = root
        for part in path.split("."):
            found = getattr(found, part, None)
        if found is None:
            problems += [] if optional else [f"it has no {path}"]
        elif names:
            has = inspect.signature(found).parameters
            problems += [f"{path} has no parameter {name!r}" for name in names if name not in has]
    return problems
