"""Whether a vLLM engine is paused, from what its front end asks of the engine's core.

The core's client is followed, since its answer is the pause; how it is called differs between
versions of vLLM. A pause that no known method of the client carried is taken from the front end's
own method, which returns when the core has answered, too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import wraps
from typing import Any, Literal, TypeAlias

__all__ = ["Cache", "PauseWatch"]

Cache: TypeAlias = Literal["kept", "recomputed"] | None
"""What becomes of the KV cache that running calls have; None: it is not known."""

_PAUSE_OF_CORE = {"pause_scheduler_async": 0, "pause_generation_async": 0, "sleep_async": 1}
"""Methods that pause, with the place of the mode among their arguments. vLLM 0.33 and later call
the second, before them the first."""

_RESUME_OF_CORE = ("resume_scheduler_async", "wake_up_async")
_PAUSE_OF_FRONT = {"pause_generation": 0, "sleep": 1}
_RESUME_OF_FRONT = ("resume_generation", "wake_up")


class _FrontPause:
    """A pause that the front end was asked for."""

    __slots__ = ("around", "seen")

    def __init__(self, around: _FrontPause | None) -> None:
        self.around = around
        """The same, as whoever wrapped the method after us was asked for it."""
        self.seen = False
        """A known method of the core's client carries it."""


_asked: ContextVar[_FrontPause | None] = ContextVar("rl_staleness_vllm_pause", default=None)


class PauseWatch:
    """What one front end has done to pause its engine.

    Args:
        told: told the mode of every pause when it is complete, before whoever asked for it knows.
    """

    def __init__(self, told: Callable[[str], object] | None) -> None:
        self.paused = False
        """A pause was complete, and this front end has not resumed the engine since."""
        self._told = told
        self._num_resumes = 0
        self._cache: Cache = None
        self._under_way: set[object] = set()

    @property
    def quiet(self) -> bool:
        """No pause is under way: until its end outputs of before may still be made."""
        return not self._under_way

    def take_cache(self) -> Cache:
        """What the last pause said of the KV cache; once."""
        cache, self._cache = self._cache, None
        return cache

    def wrappers(self, front: Any, core: Any) -> Iterator[tuple[Any, str, Any]]:
        """The methods to follow: owner, name, and what to put there."""
        for name, place in _PAUSE_OF_CORE.items():
            if hasattr(core, name):
                yield core, name, self._pausing(getattr(core, name), place)
        for name, place in _PAUSE_OF_FRONT.items():
            if inspect.iscoroutinefunction(getattr(front, name, None)):
                yield front, name, self._pausing_in_front(getattr(front, name), place)
        for owner, names in ((core, _RESUME_OF_CORE), (front, _RESUME_OF_FRONT)):
            for name in names:
                if hasattr(owner, name):
                    yield owner, name, self._resuming(getattr(owner, name))

    def _pausing(self, original: Any, place: int) -> Any:
        @wraps(original)
        async def pause(*args: Any, **kwargs: Any) -> Any:
            asked = _asked.get()
            while asked is not None:
                asked.seen = True
                self._under_way.discard(asked)
                asked = asked.around
            mine, resumes = object(), self._num_resumes
            self._under_way.add(mine)
            try:
                result = await original(*args, **kwargs)
            finally:
                self._under_way.discard(mine)
            self._complete(args, kwargs, place, resumes)
            return result

        return pause

    def _pausing_in_front(self, original: Any, place: int) -> Any:
        @wraps(original)
        async def pause(*args: Any, **kwargs: Any) -> Any:
            asked, resumes = _FrontPause(_asked.get()), self._num_resumes
            self._under_way.add(asked)
            before = _asked.set(asked)
            try:
                result = await original(*args, **kwargs)
            finally:
                _asked.reset(before)
                self._under_way.discard(asked)
            if not asked.seen:
                self._complete(args, kwargs, place, resumes)
            return result

        return pause

    def _complete(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], place: int, resumes: int
    ) -> None:
        if resumes != self._num_resumes:
            return  # it was taken back before it was complete
        self.paused, self._cache = True, None
        if kwargs.get("mode") == "keep" and "clear_cache" in kwargs:
            self._cache = "recomputed" if kwargs["clear_cache"] else "kept"
        if self._told is not None:
            mode = args[place] if len(args) > place else kwargs.get("mode")
            self._told(mode or "abort")

    def _resuming(self, original: Any) -> Any:
        @wraps(original)
        def resume(*args: Any, **kwargs: Any) -> Any:
            self.paused = False
            self._num_resumes += 1
            return original(*args, **kwargs)

        return resume
