"""An AsyncLLM that another program owns, in an actor that nobody can edit: vLLM's own plugin point.

vLLM loads this in each of its processes (entry point ``vllm.general_plugins``, named
``rl_staleness``, which ``VLLM_PLUGINS`` must name too if it is set). It does nothing unless asked:

    RL_STALENESS_ATTACH=1                                # in the environment of the actor

    engine = VllmServerEngine(in_actor(handle), name="engine0")          # in the trainer

Then every AsyncLLM that a process builds is followed as a server's is: each pause is cut, each
request is captured, and its calls are found by the ``request_id`` that it was submitted with. A
request that is submitted in a capture of its owner's is left to that.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_staleness.integrations.vllm_http import Transport
    from rl_staleness.integrations.vllm_journal import Journal

__all__ = ["ASKED_BY", "attach", "in_actor"]

ASKED_BY = "RL_STALENESS_ATTACH"
"""Environment variable; ``1`` asks for it."""

INSIDE_SECONDS = 5.0
"""How long a message waits in the actor for the engine's loop."""

_log = logging.getLogger(__name__)


class _Followed:
    """The journals of this process, in the order in which their engines were built."""

    journals: list[Journal]

    def __init__(self) -> None:
        self.journals = []
        self.lock = threading.Lock()


_followed = _Followed()


def attach() -> None:
    """Follow what this process builds from now on, if that was asked for. It never raises."""
    if os.environ.get(ASKED_BY) != "1":
        return
    try:
        from vllm.v1.engine.async_llm import AsyncLLM

        original = AsyncLLM.__init__
        if getattr(original, "follows", False):
            return  # vLLM may load its plugins again

        @wraps(original)
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            _follow(self)

        init.follows = True  # type: ignore[attr-defined]
        AsyncLLM.__init__ = init
    except Exception:  # noqa: BLE001  # vLLM would not start
        _log.exception("rl_staleness: vLLM's engines are not followed")


def _follow(llm: Any) -> None:
    from rl_staleness.integrations.vllm_journal import Journal, refusal

    try:
        refused = refusal(llm)
        if refused is not None:
            _log.error("rl_staleness: %s", refused)
            return
        journal = Journal(llm)
        llm.add_request = _capturing(journal, llm.add_request)
        with _followed.lock:
            _followed.journals.append(journal)
    except Exception:  # noqa: BLE001  # its owner has it nevertheless
        _log.exception("rl_staleness: an engine is not followed")


def _capturing(journal: Journal, original: Callable[..., Any]) -> Callable[..., Any]:
    """Capture what nobody else captures."""
    from rl_staleness.engines import captured, capturing

    @wraps(original)
    async def add_request(request_id: str, *args: Any, **kwargs: Any) -> Any:
        if capturing() is not None:
            return await original(request_id, *args, **kwargs)
        request = journal.open(str(request_id))
        try:
            with captured(request.capture):
                return await original(request_id, *args, **kwargs)
        finally:
            journal.close(request)

    return add_request


def in_actor(handle: Any, *, index: int = 0, concurrency_group: str | None = None) -> Transport:
    """Reach the engine in a Ray actor.

    Args:
        handle: the actor's.
        index: of the engine among those that the actor built.
        concurrency_group: Ray's group for the messages, for an actor whose methods block.
    """
    from rl_staleness.integrations.vllm_http import Answer, ServerError, understood

    place = f"actor {handle!r}"
    remote = handle.__ray_call__.options(concurrency_group=concurrency_group, max_task_retries=0)

    class Actor:
        url = place

        def ask(self, method: str, path: str, body: bytes | None, *, seconds: float) -> Answer:
            try:
                reference = remote.remote(_serve, index, method, path, body or b"")
                status, said = reference.future().result(timeout=seconds)
            except ServerError:
                raise
            except Exception as error:  # whatever Ray raises, it is not reached
                raise ConnectionError(f"{type(error).__name__}: {error}") from error
            return understood(place, path, status, said, missing=f"set {ASKED_BY}=1 in its env")

        def close(self) -> None: ...

    return Actor()


def _serve(_: object, index: int, method: str, path: str, body: bytes) -> tuple[int, bytes]:
    """Answer a message in the actor, on the loop of its engine, whichever thread this is."""
    from rl_staleness.integrations.vllm_routes import respond

    with _followed.lock:
        journals = list(_followed.journals)
    if index >= len(journals):
        return 404, b""
    journal, answers = journals[index], list[tuple[int, bytes]]()
    route, _, query = path.strip("/").partition("?")
    work = partial(respond, journal, method, route, query=query, body=body)
    taken: Future[None] = journal.engine.submit(lambda: answers.append(work()))
    taken.result(timeout=INSIDE_SECONDS)
    return answers[0]
