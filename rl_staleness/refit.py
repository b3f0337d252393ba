"""The block in which weights move, for ``with`` and for ``async with``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING

from rl_staleness.guard import Guard
from rl_staleness.pauses import Begun

if TYPE_CHECKING:
    from rl_staleness.callback import StalenessCallback

__all__ = ["Refit", "engine_names"]


class Refit:
    """Cuts as it begins; done as it ends, or aborted when it raises.

    Args:
        engines: those that it is for; None: all.
        pause: begins the refit of each of them.
        left: those of which nothing was said since then.
    """

    def __init__(
        self,
        callback: StalenessCallback,
        *,
        engines: list[str] | None,
        guard: Guard,
        pause: Callable[[], Begun],
        left: Callable[[Begun | None, list[str] | None], list[str]],
    ) -> None:
        self._callback = callback
        self._engines = engines
        self._guard = guard
        self._pause = pause
        self._left = left
        self._begun: Begun | None = None

    def __enter__(self) -> None:
        try:
            with self._guard("on_refit_paused"):
                self._begun = self._pause()
                self._guard.wait(self._begun.answers)
        except BaseException as error:  # interrupted, or strict: the block will not run
            self.__exit__(type(error), error, None)
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        left = self._left(self._begun, self._engines)
        if left and kind is None:
            self._callback.on_refit_done(engines=left)
        elif left and kind is not None:
            self._callback.on_refit_aborted(reason=kind.__name__, engines=left)

    async def __aenter__(self) -> None:
        try:
            with self._guard("on_refit_paused"):
                self._begun = self._pause()
                await self._guard.wait_async(self._begun.answers)
        except BaseException as error:  # cancelled, or strict: the block will not run
            await self.__aexit__(type(error), error, None)
            raise

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        left = self._left(self._begun, self._engines)
        if left and kind is None:
            await self._callback.aon_refit_done(engines=left)
        elif left and kind is not None:
            await self._callback.aon_refit_aborted(reason=kind.__name__, engines=left)


def engine_names(engines: Iterable[str] | None) -> list[str] | None:
    """These engines, one alone will do; None: all."""
    if engines is None or isinstance(engines, str):
        return engines if engines is None else [engines]
    return list(engines)
