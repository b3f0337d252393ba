"""What can be asked of a `Journal`, by whichever way a message comes.

Every answer is one JSON object with ``boot``, and ``error`` in one line where something is wrong.
The routes are listed in `rl_staleness.integrations.vllm_server`.
"""

from __future__ import annotations

import logging
import sys
from concurrent.futures import Future
from typing import Annotated, Any
from urllib.parse import parse_qs

import msgspec

from rl_staleness.events import LARGEST
from rl_staleness.integrations.vllm_journal import Conflict, Journal

__all__ = ["SCHEMA", "respond"]

SCHEMA = 1
"""Of the routes. A field more is no new schema."""

LONGEST_QUESTION = 64
"""Characters of what a client marks its message with, and gets back."""

_log = logging.getLogger(__name__)


class _NoRoute(LookupError):
    """Nothing is there."""


_Word = Annotated[str, msgspec.Meta(max_length=256)]
"""What is kept for long."""

_Number = Annotated[int, msgspec.Meta(le=LARGEST)]


class _Said(msgspec.Struct, forbid_unknown_fields=True):
    """What a trainer says; each route needs some of it."""

    run: _Word
    refit: _Number
    version: _Number = -1
    mode: _Word = "keep"
    age: float = 0.0
    first: _Number = 0


class _Ids(msgspec.Struct, forbid_unknown_fields=True):
    ids: list[str]


def respond(
    journal: Journal, method: str, route: str, *, query: str = "", body: bytes = b""
) -> tuple[int, bytes]:
    """Answer one message, on the engine's own thread.

    Args:
        route: what comes after ``/staleness/``.

    Returns:
        HTTP's status, and JSON.
    """
    asked = parse_qs(query)
    try:
        status, answer = 200, _answer(journal, method, route, asked, body)
    except _NoRoute as error:
        status, answer = 404, {"error": str(error)}
    except Conflict as error:
        status, answer = 409, {"error": str(error)}
    except (msgspec.DecodeError, ValueError) as error:
        status, answer = 400, {"error": str(error)}
    except Exception as error:  # noqa: BLE001  # told to whoever asked
        _log.warning("rl_staleness: %s", route, exc_info=True)
        status, answer = 500, {"error": f"{type(error).__name__}: {error}"}
    answer["question"] = asked.get("question", [""])[-1][:LONGEST_QUESTION]
    return status, msgspec.json.encode({"boot": journal.boot, **answer})


def _answer(
    journal: Journal, method: str, route: str, query: dict[str, list[str]], body: bytes
) -> dict[str, Any]:
    match method, route:
        case "GET", "":
            return {"what": "rl_staleness", "schema": SCHEMA, **_versions(), **journal.about()}
        case "GET", "cuts":
            refits = [int(each) for each in query.get("refit", [])]
            return {"cuts": journal.cuts(since=_number(query, "since", 0), refits=refits)}
        case "GET", "calls" if "id" not in query:
            since, limit = _number(query, "since", 0), _number(query, "limit", 1000)
            requests, place = journal.finished(since=since, limit=limit)
            return {"requests": requests, "next": place, "forgotten": journal.forgotten}
        case "GET", "calls":
            return _found(journal, query["id"])
        case "POST", "calls":
            return _found(journal, msgspec.json.decode(body, type=_Ids).ids)
        case "POST", "start" | "mark" | "done" | "aborted":
            return _take(journal, route, msgspec.json.decode(body, type=_Said))
        case _:
            raise _NoRoute(f"no such route: {method} {route}")


def _found(journal: Journal, ids: list[str]) -> dict[str, Any]:
    """The calls of some requests; each once, so that no answer is larger than what is kept."""
    if len(set(ids)) < len(ids):
        raise ValueError("ids: one is named twice")
    return {"found": journal.found(ids), "first": journal.first}


def _take(journal: Journal, route: str, said: _Said) -> dict[str, Any]:
    """Do what the trainer that drives the refits says."""
    if min(said.refit, said.first) < 0 or (said.version < 0 and route != "aborted"):
        raise ValueError("refit, version: they are counts, not negative")
    taken: Future[None] | None = None
    answer: dict[str, Any] = {}
    if route == "start":
        taken = journal.start(said.run, version=said.version, refit=said.refit)
    elif route == "mark":
        answer["known"] = journal.mark(
            said.run,
            said.refit,
            version=said.version,
            mode=said.mode,
            age=said.age,
            first=said.first,
        )
        answer["cuts"] = journal.cuts(refits=[said.refit])
    elif route == "done":
        taken = journal.done(said.run, said.refit, version=said.version)
    else:
        taken = journal.aborted(said.run, said.refit)
    if taken is not None and taken.done():
        taken.result()
    return answer


def _versions() -> dict[str, str]:
    return {"vllm": str(getattr(sys.modules.get("vllm"), "__version__", "unknown"))}


def _number(query: dict[str, list[str]], name: str, default: int) -> int:
    value = query.get(name, [str(default)])[-1]
    if not value.isdecimal():
        raise ValueError(f"{name}: {value!r} is no count")
    return int(value)
