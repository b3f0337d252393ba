"""The block in which weights move, for ``with`` and for ``async with``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_staleness.callback import StalenessCallback

__all__ = ["Refit", "engine_names"]


class Refit:
    """Cuts as it begins; done as it ends, or aborted when it raises.

    Args:
        paused: the engines whose refit is neither done nor aborted.
        pause: what is said at the pause.
    """

    def __init__(
        self, callback: StalenessCallback, *, paused: Callable[[], frozenset[str]], **pause: Any
    ) -> None:
        self._callback = callback
        self._paused = paused
        self._engines = engine_names(pause["engines"])
        self._pause: dict[str, Any] = {**pause, "engines": self._engines}
        self._begun: frozenset[str] = frozenset()

    def __enter__(self) -> None:
        self._callback.on_refit_paused(**self._pause)
        self._begun = self._paused()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        left = self._left()
        if left == []:
            return
        if kind is None:
            self._callback.on_refit_done(engines=left)
        else:
            self._callback.on_refit_aborted(reason=kind.__name__, engines=left)

    async def __aenter__(self) -> None:
        try:
            await self._callback.aon_refit_paused(**self._pause)
        except BaseException as error:  # cancelled, or strict: the block will not run
            reason = type(error).__name__
            await self._callback.aon_refit_aborted(reason=reason, engines=self._engines)
            raise
        self._begun = self._paused()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        left = self._left()
        if left == []:
            return
        if kind is None:
            await self._callback.aon_refit_done(engines=left)
        else:
            await self._callback.aon_refit_aborted(reason=kind.__name__, engines=left)

    def _left(self) -> list[str] | None:
        """Of which engines nothing was said in the block; if no pause was taken, all of them."""
        begun = self._begun if self._engines is None else self._begun & set(self._engines)
        return sorted(begun & self._paused()) if begun else self._engines


def engine_names(engines: Iterable[str] | None) -> list[str] | None:
    """These engines, one alone will do; None: all."""
    if engines is None or isinstance(engines, str):
        return engines if engines is None else [engines]
    return list(engines)
