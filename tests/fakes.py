"""Fakes, named as such: an engine that says what a test tells it to, and two sinks."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from rl_staleness.engines import Cut
from rl_staleness.staleness import StepStaleness


def noticed(error: Exception | None = None) -> Future[None]:
    """A future that is done, or failed."""
    future: Future[None] = Future()
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
    return future


class FakeEngine:
    """An engine of the protocol whose cuts and answers are set by the test."""

    def __init__(self, name: str = "engine", *, counts: dict[str, int] | None = None) -> None:
        self.name = name
        self.counts = counts
        """What it answers to a mark at once; None: nothing, until `deliver` is called."""
        self.heard: list[tuple[str, int, int | None]] = []
        self.answer: Callable[[], Future[None]] = noticed
        self.deliver: Callable[[Cut | None], None] = lambda cut: None

    def start(self, *, version: int, refit: int) -> Future[None]:
        self.heard.append(("start", refit, version))
        return self.answer()

    def mark(
        self, refit: int, *, version: int, mode: str, deliver: Callable[[Cut | None], None]
    ) -> Future[None]:
        self.heard.append(("mark", refit, version))
        self.deliver = deliver
        if self.counts is not None:
            deliver(Cut(calls=self.counts))
        return self.answer()

    def done(self, refit: int, *, version: int) -> Future[None]:
        self.heard.append(("done", refit, version))
        return self.answer()

    def aborted(self, refit: int) -> Future[None]:
        self.heard.append(("aborted", refit, None))
        return self.answer()

    def detach(self) -> None:
        self.heard.append(("detach", 0, None))


class RecordingSink:
    """Keeps every step that it is told."""

    def __init__(self) -> None:
        self.steps: list[StepStaleness] = []

    def __call__(self, step: StepStaleness) -> None:
        self.steps.append(step)


class RaisingSink:
    """Raises at every step."""

    def __call__(self, step: StepStaleness) -> None:
        raise ConnectionError("the server is away")
