"""Nothing of this library may harm the training that it measures: the one broad guard."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
from collections import Counter
from collections.abc import Iterator, Sequence

from rl_staleness.pauses import Answer

__all__ = ["Guard"]

_log = logging.getLogger(__name__)


class _Guarded:
    """A block that nothing gets out of."""

    def __init__(self, guard: Guard, what: str) -> None:
        self._guard = guard
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self._guard.note(self._what, error)
        return not self._guard.strict


class Guard:
    """Logs each kind of failure once with its traceback, counts all of them, goes on.

    Args:
        strict: raise instead.
        timeout: seconds to wait for an engine to take notice.
    """

    def __init__(self, *, strict: bool, timeout: float) -> None:
        self.failures: Counter[str] = Counter()
        """How often what went wrong."""
        self.strict = strict
        self.silent: set[str] = set()
        """Engines that did not answer in time, and have not answered since."""
        self._timeout = min(timeout, threading.TIMEOUT_MAX)

    def __call__(self, what: str) -> _Guarded:
        """Let nothing out of the block, unless `strict`."""
        return _Guarded(self, what)

    def note(self, what: str, error: BaseException | None = None) -> None:
        """Count a failure; the first of its kind is logged."""
        self.failures[what] += 1
        if self.failures[what] == 1:
            _log.error(
                "rl_staleness: %s failed; training goes on, this is logged once",
                what,
                exc_info=error,
            )

    def wait(self, answers: Sequence[Answer]) -> None:
        """Wait for engines to take notice, blocking, up to the limit in time."""
        for answers_in, seconds in self._patience(answers):
            concurrent.futures.wait([a.noticed for a in answers_in], timeout=seconds)
        self._look_at(answers)

    async def wait_async(self, answers: Sequence[Answer]) -> None:
        """Wait for engines to take notice, without blocking the loop, up to the limit in time."""
        for answers_in, seconds in self._patience(answers):
            waiting = [asyncio.wrap_future(a.noticed) for a in answers_in]
            for future in waiting:  # what they raise is looked at below, or when it comes
                future.add_done_callback(lambda f: f.cancelled() or f.exception())
            await asyncio.wait(waiting, timeout=seconds)
        self._look_at(answers)

    def _patience(self, answers: Sequence[Answer]) -> Iterator[tuple[list[Answer], float]]:
        """Whom to wait for, and how long: an engine that was silent last time hardly at all."""
        for silent, seconds in ((False, self._timeout), (True, self._timeout / 50)):
            due = [
                a for a in answers if (a.engine in self.silent) == silent and not a.noticed.done()
            ]
            if due:
                yield due, seconds

    def watch(self, answers: Sequence[Answer]) -> None:
        """Do not wait; notice failures when they come."""
        for answer in answers:
            answer.noticed.add_done_callback(lambda _, a=answer: self._failure(a))  # type: ignore[misc]

    def _look_at(self, answers: Sequence[Answer]) -> None:
        errors = [error for answer in answers if (error := self._failure(answer)) is not None]
        if errors and self.strict:
            raise errors[0]

    def _failure(self, answer: Answer) -> BaseException | None:
        error: BaseException | None
        if not answer.noticed.done():
            self.silent.add(answer.engine)
            error = TimeoutError(f"engine {answer.engine!r}: no answer in {self._timeout} s")
        else:
            self.silent.discard(answer.engine)
            cancelled = answer.noticed.cancelled()
            error = TimeoutError("cancelled") if cancelled else answer.noticed.exception()
        if error is not None:
            self.note(f"telling engine {answer.engine!r} of {answer.what}", error)
        return error
