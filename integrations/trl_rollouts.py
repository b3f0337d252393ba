"""Which calls made the tokens of TRL's training rows: noted in the process that generates them.

TRL's rollout process keeps of a response its tokens and their log-probabilities, and rebuilds from
them the rows that are trained. Here each log-probability is a float that also knows of which call,
and which token of it, it is. TRL carries them along as they are, over any number of turns, so that
a finished row says by itself where its tokens are from:

    row      prompt | turn 1 | tool | turn 2 |        log-probs   0 0 0 | a0 a1 a2 | 0 0 | b0 b1
    mask     0 0 0    1 1 1    0 0    1 1             Origin      a: [0, 3)   b: [0, 2)

Nothing here imports TRL. Two methods of the one loop that runs in the process are replaced on that
object, ``_post`` and ``_score_group``; a loop of the user's own is followed just as well, as long
as it hands on the log-probabilities that it gets.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from rl_staleness.events import Call, Mask

__all__ = ["Origin", "RecordedLoop", "Rewards", "Turn", "origin_of"]

COMPLETIONS = "/v1/completions"

_log = logging.getLogger(__name__)


class Turn(NamedTuple):
    """One response of the server."""

    request: str
    """The ``id`` of the response."""
    model: str
    """The model that made it, as the response says: with LoRA, the adapter."""
    tokens: int
    begun: float
    """Before it was asked for, in seconds on the clock that all processes of a machine share."""
    ended: float


class Origin(NamedTuple):
    """Where the trained tokens of one row are from."""

    parts: tuple[tuple[Turn, Mask, Call | None], ...]
    """Each turn, which of its tokens are trained, and the call as the server saw it."""
    unknown: int
    """Trained tokens that are of no turn."""


class Rewards(dict[str, Any]):
    """A row's rewards, as TRL has them, and where its tokens are from."""

    origin: Origin | None = None
    group: str | None = None
    """What the trace calls this row, from when the trainer has it."""

    def __reduce__(self) -> Any:
        return _rewards, (dict(self), self.origin)


def _rewards(values: Mapping[str, Any], origin: Origin | None) -> Rewards:
    rewards = Rewards(values)
    rewards.origin = origin
    return rewards


class Sampled(float):
    """A log-probability that knows its token."""

    __slots__ = ("offset", "turn")

    turn: Turn
    offset: int


class RecordedLoop:
    """Makes the loop that TRL's rollout process runs, and follows it.

    It takes the place of the loop's class, of which TRL asks no more than to be called.

    Args:
        make: the class.
        server: url of a server with the middleware; None asks no server.
    """

    def __init__(self, make: Callable[..., Any], *, server: str | None) -> None:
        self._make = make
        self.server = server

    def __call__(self, **arguments: Any) -> Any:
        """Make the loop."""
        loop = self._make(**arguments)
        _Follower(loop, self.server).attach()
        return loop


class _Follower:
    """Stands around two methods of a loop."""

    def __init__(self, loop: Any, server: str | None) -> None:
        self._loop = loop
        self._engine: Any = None
        if server is not None:
            http = import_module("rl_staleness.integrations.vllm_http")
            self._engine = http.VllmServerEngine(server)
        self._complained = False

    def attach(self) -> None:
        """From now on, rows know their origin."""
        self._post, self._score = self._loop._post, self._loop._score_group
        self._loop._post, self._loop._score_group = self.post, self.score_group

    async def post(self, path: str, *rest: Any, **more: Any) -> Any:
        """Ask the server, and mark the log-probabilities of what it answers."""
        begun = time.monotonic()
        answer = await self._post(path, *rest, **more)
        if path == COMPLETIONS:
            try:
                mark(answer, begun=begun, ended=time.monotonic())
            except Exception as error:  # noqa: BLE001  # rollouts go on without
                self._lose(error)
        return answer

    async def score_group(self, group: Any, *rest: Any, **more: Any) -> Any:
        """Score a group, and tell its rows where they are from."""
        samples = await self._score(group, *rest, **more)
        try:
            await self._tell(group, samples)
        except Exception as error:  # noqa: BLE001  # they are trained without
            self._lose(error)
        return samples

    async def _tell(self, group: Any, samples: Sequence[Any]) -> None:
        rows = [row for rows in group.completions_sequences for row in rows]
        origins = [origin_of(row.old_log_probs, row.completion_mask) for row in rows]
        calls: dict[str, Call] = {}
        if self._engine is not None:
            requests = [turn.request for origin in origins for turn, *_ in origin.parts]
            for call in await self._engine.acalls(requests):
                calls[_request_of(call)] = call
        for sample, origin in zip(samples, origins, strict=True):
            parts = tuple((turn, mask, calls.get(turn.request)) for turn, mask, _ in origin.parts)
            sample.metrics = _rewards(sample.metrics, Origin(parts, origin.unknown))

    def _lose(self, error: Exception) -> None:
        if not self._complained:
            self._complained = True
            _log.warning(
                "rl_staleness: TRL's rollouts cannot be followed any more, of their tokens only"
                " bounds are known: %s: %s",
                type(error).__name__,
                error,
            )


def mark(answer: dict[str, Any], *, begun: float, ended: float) -> None:
    """Give every log-probability of a response its token."""
    for choice in answer["choices"]:
        logprobs = choice["logprobs"]
        turn = Turn(answer["id"], answer["model"], len(choice["token_ids"]), begun, ended)
        marked: list[float | None] = []
        for offset, value in enumerate(logprobs["token_logprobs"]):
            if value is not None:
                value = Sampled(value)
                value.turn, value.offset = turn, offset
            marked.append(value)
        logprobs["token_logprobs"] = marked


def origin_of(logprobs: Sequence[float], mask: Sequence[int]) -> Origin:
    """Read where the trained tokens of a row are from.

    >>> answer = {"id": "a", "model": "m", "choices": [{"token_ids": [5, 6], "logprobs": None}]}
    >>> answer["choices"][0]["logprobs"] = {"token_logprobs": [-0.5, -1.5]}
    >>> mark(answer, begun=0.0, ended=1.0)
    >>> row = [0.0, *answer["choices"][0]["logprobs"]["token_logprobs"], 0.0]
    >>> origin = origin_of(row, [0, 1, 1, 1])
    >>> origin.parts[0][1], origin.unknown
    (((0, 2),), 1)
    """
    ranges: dict[Turn, list[list[int]]] = {}
    unknown = 0
    for value, trained in zip(logprobs, mask, strict=True):
        if not trained:
            continue
        if not isinstance(value, Sampled):
            unknown += 1
            continue
        of_turn = ranges.setdefault(value.turn, [])
        if of_turn and of_turn[-1][1] == value.offset:
            of_turn[-1][1] += 1
        else:
            of_turn.append([value.offset, value.offset + 1])
    parts = tuple(
        (turn, tuple((start, stop) for start, stop in of_turn), None)
        for turn, of_turn in ranges.items()
    )
    return Origin(parts, unknown)


def _request_of(call: Call) -> str:
    """The id of the response that a call is of: one prompt, one choice.

    >>> _request_of(Call(call="cmpl-1a-0/0", engine="e", version=0, tokens=1))
    'cmpl-1a'
    """
    return call.call.rpartition("/")[0].removesuffix("-0")
