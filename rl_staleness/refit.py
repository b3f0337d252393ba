"""The block in which weights move, for ``with`` and for ``async with``."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_staleness.callback import StalenessCallback

__all__ = ["Refit", "engine_names"]


class Refit:
    """Cuts as it begins; done as it ends, or aborted when it raises."""

    def __init__(self, callback: StalenessCallback, **pause: Any) -> None:
        self._callback = callback
        self._engines = engine_names(pause["engines"])
        self._pause: dict[str, Any] = {**pause, "engines": self._engines}

    def __enter__(self) -> None:
        self._callback.on_refit_paused(**self._pause)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self._callback.on_refit_done(engines=self._engines)
        else:
            self._callback.on_refit_aborted(reason=kind.__name__, engines=self._engines)

    async def __aenter__(self) -> None:
        try:
            await self._callback.aon_refit_paused(**self._pause)
        except BaseException as error:  # cancelled, or strict: the block will not run
            reason = type(error).__name__
            await self._callback.aon_refit_aborted(reason=reason, engines=self._engines)
            raise

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            await self._callback.aon_refit_done(engines=self._engines)
        else:
            await self._callback.aon_refit_aborted(reason=kind.__name__, engines=self._engines)


def engine_names(engines: Iterable[str] | None) -> list[str] | None:
    """These engines, one alone will do; None: all."""
    if engines is None or isinstance(engines, str):
        return engines if engines is None else [engines]
    return list(engines)
