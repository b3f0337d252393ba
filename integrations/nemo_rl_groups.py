"""What a group of NeMo RL consists of: its rows, and the calls they were assembled from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rl_staleness.events import Call, GroupDropped, GroupPublished, RunStarted, StepTrained
from rl_staleness.ledger import Ledger
from rl_staleness.trace import read

__all__ = [
    "Content",
    "Link",
    "bounded",
    "contents_before",
    "group_of",
    "groups_of",
    "links_of",
    "num_generated",
]


class Link(NamedTuple):
    """A call that a row was assembled from."""

    row: int
    call: str
    label: int
    """The trainer's label of the weights that it began on."""
    delta: int
    """Tokens that it added to the row: carried ones, then generated ones."""


@dataclass(slots=True)
class Content:
    """What is published of a group."""

    calls: list[Call] = field(default_factory=list[Call])
    masks: dict[str, list[tuple[int, int]]] = field(
        default_factory=dict[str, "list[tuple[int, int]]"]
    )
    unknown: int = 0
    rows: dict[str, list[str]] = field(default_factory=dict[str, "list[str]"])
    """Names of the calls of each row."""

    def add(self, row: str, call: Call) -> None:
        """Take in a call of a row."""
        self.calls.append(call)
        self.rows.setdefault(row, []).append(call.call)


def links_of(receipts: Sequence[Any], lengths: Sequence[int]) -> list[Link]:
    """The calls of each row in order: its terminal call and that one's ancestors.

    A row that was rejected is a placeholder of one token, and has none.

    Args:
        receipts: Gym's, one a row.
        lengths: of the rows, in tokens.

    Raises:
        ValueError: a receipt does not explain its row.
    """
    links: list[Link] = []
    for row, (receipt, length) in enumerate(zip(receipts, lengths, strict=True)):
        if length <= 1:
            continue
        records = {record["model_call_id"]: record for record in receipt["manifest"]}
        chain: list[Link] = []
        at = receipt["terminal_model_call_id"]
        while at is not None:
            record = records.pop(at, None)
            if record is None:
                raise ValueError(f"row {row}: the receipt has no call {at!r}, or has it twice")
            chain.append(Link(row, at, record["weight_version"], record["delta_len"]))
            at = record["parent_call_id"]
        made = sum(link.delta for link in chain)
        if made != length:
            raise ValueError(f"row {row}: its calls made {made} tokens of {length}")
        links += reversed(chain)
    return links


def num_generated(links: Sequence[Link], masks: Sequence[Any]) -> dict[str, int]:
    """Generated tokens of each call, from the token masks of the rows.

    >>> num_generated([Link(0, "a", 0, 3), Link(0, "b", 0, 2)], [[0, 1, 1, 0, 1]])
    {'a': 2, 'b': 1}
    """
    begin = [0] * len(masks)
    counts: dict[str, int] = {}
    for link in links:
        start = begin[link.row]
        begin[link.row] = start + link.delta
        counts[link.call] = sum(value != 0 for value in masks[link.row][start : begin[link.row]])
    return counts


def bounded(name: str, tokens: int, oldest: int, newest: int, *, engine: str) -> Call:
    """A call of which only bounds are known; it counts under the version that it began on."""
    span = (0, tokens, oldest) if newest <= oldest else (0, tokens, oldest, newest)
    return Call(call=name, engine=engine, version=oldest, tokens=tokens, spans=(span,))


def group_of(sample: str) -> str:
    """The group of a row, which is named ``GROUP_gN``.

    >>> group_of("0f_g1_g12")
    '0f_g1'
    """
    return sample.rpartition("_g")[0]


def groups_of(meta: Any) -> list[str]:
    """The groups of selected rows."""
    return list(dict.fromkeys(map(group_of, meta.sample_ids)))


def contents_before(trace: str, groups: set[str], *, engine: str) -> dict[str, Content]:
    """What a trace says of groups that a checkpoint brought back, when each of them last waited.

    A checkpoint may be older than the end of its trace: some were trained since.

    Args:
        engine: names one for the calls that the trace has summed up.
    """
    ledger = Ledger()
    contents: dict[str, Content] = {}

    def note() -> None:
        for group in ledger.waiting():
            if group.group in groups:
                contents[group.group] = _content_before(group, ledger, engine)

    for event in read(trace):
        if isinstance(event, (StepTrained, GroupDropped, RunStarted)):
            note()
        ledger.apply(event)
    note()
    return contents


def _content_before(group: GroupPublished, ledger: Ledger, engine: str) -> Content:
    content = Content(unknown=group.unknown or 0)
    for version, tokens in group.tokens.items():
        content.calls.append(
            Call(
                call=f"{group.group}/{version}",
                engine=engine,
                version=version,
                tokens=tokens,
                spans=((0, tokens, version),),
            )
        )
    for call in group.calls:
        spans = tuple(
            (start, stop, oldest) if oldest == newest else (start, stop, oldest, newest)
            for start, stop, oldest, newest in ledger.spans(call)
        )
        known = Call(
            call=call.call,
            engine=call.engine,
            version=call.version,
            tokens=call.tokens,
            spans=spans or None,
            trained=call.trained,
        )
        content.calls.append(known)
    return content
