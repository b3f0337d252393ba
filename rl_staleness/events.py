"""The lines of a trace: typed, frozen, checked at the border. No arithmetic.

A trace holds the evidence, never the conclusion. Every line is one JSON object whose tag ``event``
names one of the structs below. Versions count policy updates (0 = the weights that the run started
from), counts are whole and not negative, ranges of tokens are half open.

    >>> decode(b'{"event":"refit_done","time":1.5,"engine":"e","refit":1,"version":2}').version
    2
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec

__all__ = [
    "Call",
    "Event",
    "Gap",
    "GroupDropped",
    "GroupPublished",
    "RefitAborted",
    "RefitCut",
    "RefitDone",
    "RunFinished",
    "RunStarted",
    "StepTrained",
    "TraceError",
    "ViolationFound",
    "decode",
    "encode",
]

SCHEMA = 1
"""The newest trace format that this library reads, and the one that it writes."""

LARGEST = 2**63 - 1
"""No version, count or number of a trace is larger, so that every reader can hold it."""

JOINED = "joined"
"""Mode of the refit by which an engine joins a run that goes on: there was no call to count."""

Whole = Annotated[int, msgspec.Meta(ge=0, le=LARGEST)]
Mask = tuple[tuple[Whole, Whole], ...]
Spans = tuple[Annotated[tuple[Whole, ...], msgspec.Meta(min_length=3, max_length=4)], ...]


class TraceError(ValueError):
    """A line that is not of the trace format; the message is ``FIELD: reason``."""


class _Line(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
    tag_field="event",
    gc=False,
):
    time: float
    """Unix seconds at which the line was made."""


class RunStarted(_Line, frozen=True, tag="run_started"):
    """A process begins, or goes on with, the run: engines, cuts and waiting groups start afresh."""

    schema: Whole
    run: str
    incarnation: Whole
    """0, and one more at each resume."""
    version: Whole
    """What the policy has at this start."""
    step: Whole
    """Number of the next training step."""
    engines: dict[str, Whole] = {}
    """Version of each engine; one that is not named starts with ``version``."""
    about: dict[str, Any] | None = None
    torn: Whole | None = None
    """Bytes of a torn last line that were cut off when the trace was opened again."""

    def __post_init__(self) -> None:
        if not 1 <= self.schema <= SCHEMA:
            raise ValueError(f"schema: {self.schema} is not one of 1 to {SCHEMA}")


class RefitCut(_Line, frozen=True, tag="refit_cut"):
    """Generation is paused for a refit: tokens so far of each call that has begun and not ended."""

    engine: str
    refit: Whole
    version: Whole
    """The version that the engine is being moved to."""
    calls: dict[str, Whole] = {}
    exact: bool | None = None
    """False (default true): a call may have had more tokens than its count says."""
    kv: Literal["kept", "recomputed"] | None = None
    mode: str | None = None
    snapshot_seconds: float | None = None
    generated: Whole | None = None
    """Output tokens of all calls that the engine has made since it was attached, up to the pause:
    its own counter, calls that nobody captured included. It never falls while one process of the
    run follows the engine. None: the engine does not count."""


class RefitDone(_Line, frozen=True, tag="refit_done"):
    """The engine holds ``version`` and generates with it from its resume on."""

    engine: str
    refit: Whole
    version: Whole
    pause_seconds: float | None = None


class RefitAborted(_Line, frozen=True, tag="refit_aborted"):
    """The refit failed: the engine keeps the version from before, the cut is void."""

    engine: str
    refit: Whole
    version: Whole
    reason: str


class Call(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
    gc=False,
):
    """One completion of one request, as it was when its group was published."""

    call: str
    engine: str
    version: Whole
    """The version that it was stamped with."""
    tokens: Whole
    """Generated tokens; prompt and tool tokens never count."""
    after: Whole | None = None
    """The last refit of its engine whose pause began before the call did, 0 if none."""
    until: Whole | None = None
    """The last refit of its engine whose pause began before the call ended."""
    spans: Spans | None = None
    """``[start, stop, version]`` or ``[start, stop, oldest, newest]``, as the engine said."""
    trained: Mask | None = None
    """``[start, stop]`` of the tokens that reach the loss; None: all of them."""


class GroupPublished(_Line, frozen=True, tag="group_published"):
    """A finished group becomes available for training."""

    group: str
    tokens: dict[Whole, Whole] = {}
    """Trained tokens by version, of the calls that no refit touched and whose mask is final."""
    calls: tuple[Call, ...] = ()
    unknown: Whole | None = None
    """Trained tokens that no call made, such as an end token appended by the trainer."""
    restored: bool | None = None
    about: dict[str, Any] | None = None
    """Numbers that a reader may want, never text; `rl_staleness.lens` says which it reads."""

    def __post_init__(self) -> None:
        for call in self.calls:  # nearly always there is nothing to check, and they are many
            if call.spans is not None or call.trained is not None:
                _check_calls(self.calls)
                break


class GroupDropped(_Line, frozen=True, tag="group_dropped"):
    """A group will not be trained."""

    group: str
    reason: str
    tokens: dict[Whole, Whole] = {}
    calls: tuple[Call, ...] = ()

    def __post_init__(self) -> None:
        _check_calls(self.calls)


class StepTrained(_Line, frozen=True, tag="step_trained"):
    """One training step: the groups that it consumed, and the version that it updated."""

    step: Whole
    version: Whole
    groups: tuple[str, ...] | None = None
    updates: Whole | None = None
    """Policy updates that the step made; default: the number of batches, else 1."""
    batches: tuple[tuple[str, ...], ...] | None = None
    """Groups of each update in order: entry ``i`` is consumed at ``version + i``."""
    trained: dict[str, dict[str, Mask]] | None = None
    """The loss mask by group and call, where it is known only now."""
    kept: tuple[str, ...] | None = None
    """Groups that may be trained again; the others are forgotten."""

    def __post_init__(self) -> None:
        if (self.groups is None) == (self.batches is None):
            raise ValueError("groups: a step has either `groups` or `batches`")
        if self.batches is not None and self.updates not in (None, len(self.batches)):
            raise ValueError(f"updates: {self.updates} is not the {len(self.batches)} of `batches`")
        for group, masks in (self.trained or {}).items():
            for call, mask in masks.items():
                _check_mask(mask, f"trained: {call!r} of {group!r}")

    @property
    def consumed(self) -> tuple[tuple[str, ...], ...]:
        """The groups of each entry, in order; one entry where the split is not known."""
        return self.batches if self.batches is not None else (self.groups or (),)

    @property
    def num_updates(self) -> int:
        """Policy updates that the step made."""
        if self.batches is not None:
            return len(self.batches)
        return 1 if self.updates is None else self.updates


class ViolationFound(_Line, frozen=True, tag="violation"):
    """A contradiction found online that the rest of the trace would not show."""

    name: str
    detail: str


class Gap(_Line, frozen=True, tag="gap"):
    """Lines are missing here."""

    lost: Whole


class RunFinished(_Line, frozen=True, tag="run_finished"):
    """The run closed its trace."""

    status: str


Event = (
    RunStarted
    | RefitCut
    | RefitDone
    | RefitAborted
    | GroupPublished
    | GroupDropped
    | StepTrained
    | ViolationFound
    | Gap
    | RunFinished
)


LONGEST_MESSAGE = 300
"""Characters: a name that is an error can be as long as its line."""

_OUR_FIELD = re.compile(r"[a-z]+(\[\d+\])?(\.[a-z]+)?")


class _Schema(msgspec.Struct):
    schema: int = 0


_schema = msgspec.json.Decoder(_Schema)
_decoder: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)
_encoder = msgspec.json.Encoder()


def decode(line: bytes) -> Event:
    """Read one line.

    Raises:
        TraceError: it is not of the trace format; the message names the field and the reason.
    """
    try:
        return _decoder.decode(line)
    except msgspec.ValidationError as error:
        raise TraceError(_short(_newer_schema(line) or _named(str(error)))) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TraceError(_short(f"line: {str(error) or 'nested too deeply'}")) from error


def encode(event: Event) -> bytes:
    """Write one line, without its newline.

    Raises:
        TraceError: a value is of a type that the format does not know.
    """
    try:
        return _encoder.encode(event)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise TraceError(f"{type(event).__struct_config__.tag}: {error}") from error


def _short(message: str) -> str:
    """A message with its start, the field, and its end, the reason."""
    if len(message) <= LONGEST_MESSAGE:
        return message
    half = LONGEST_MESSAGE // 2
    return f"{message[: half - 1]}…{message[-half:]}"


def _check_calls(calls: tuple[Call, ...]) -> None:
    for number, call in enumerate(calls):
        for span in call.spans or ():
            if span[0] > span[1]:
                raise ValueError(f"calls[{number}].spans: {list(span)} starts after its stop")
            if len(span) == 4 and span[2] > span[3]:
                raise ValueError(f"calls[{number}].spans: {list(span)} is older than its oldest")
        _check_mask(call.trained or (), f"calls[{number}].trained")


def _check_mask(mask: Sequence[tuple[int, int]], field: str) -> None:
    for start, stop in mask:
        if start > stop:
            raise ValueError(f"{field}: [{start}, {stop}] starts after its stop")


def _newer_schema(line: bytes) -> str | None:
    """Say that the schema is newer, whatever field of it was not understood."""
    try:
        schema = _schema.decode(line).schema
    except (msgspec.DecodeError, RecursionError):
        return None
    newest = f"{SCHEMA}, the newest that this version reads"
    return f"schema: {schema} is newer than {newest}" if schema > SCHEMA else None


def _named(message: str) -> str:
    """Turn msgspec's ``reason - at `$.field` `` into ``field: reason``."""
    reason, _, place = message.rpartition(" - at ")
    if not place or not reason:
        reason, place = message, ""
    for start in ("Object missing required field `", "Object contains unknown field `"):
        if reason.startswith(start):
            field = reason[len(start) : -1]
            outer = place.strip("`").removeprefix("$").removeprefix(".")
            kind = "missing" if "missing" in start else "unknown field"
            return f"{f'{outer}.{field}' if outer else field}: {kind}"
    path = (
        place.replace("`", "").removeprefix("$").removeprefix(".").replace("key in $.", "key of ")
    )
    first, colon, rest = reason.partition(": ")
    if colon and _OUR_FIELD.fullmatch(first):  # raised by a check of ours
        outer = path if not path or path.endswith(first) else f"{path}.{first}"
        return f"{outer or first}: {rest}"
    return f"{path or 'line'}: {reason}"
