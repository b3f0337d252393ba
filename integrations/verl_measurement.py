"""verl's rows, labels and refits as the hooks of a callback take them."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from rl_staleness.callback import StalenessCallback
from rl_staleness.engines import Cut
from rl_staleness.events import LARGEST, Call
from rl_staleness.guard import Guard
from rl_staleness.integrations.verl_rows import Piece, inside

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ATTEMPTS", "STATE", "Measurement", "Row", "Saved"]

STATE = "rl_staleness.json"
"""What stands beside verl's own checkpoint, in its folder."""

ATTEMPTS = (
    "reading the attempts of rows (workers of your own: `recording` in"
    " rl_staleness.integrations.verl)"
)

_log = logging.getLogger(__name__)


class _Replica:
    """A server whose calls are over when it is refitted: keeps the numbers of its refits."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.refits: dict[int, int] = {}
        """The last refit that was done, by the version that it led to."""

    def start(self, *, version: int, refit: int) -> Future[None]:
        self.refits[version] = refit
        return _noticed()

    def mark(
        self, refit: int, *, version: int, mode: str, deliver: Callable[[Cut | None], None]
    ) -> Future[None]:
        deliver(Cut(calls={}))
        return _noticed()

    def done(self, refit: int, *, version: int) -> Future[None]:
        self.refits[version] = refit
        return _noticed()

    def aborted(self, refit: int) -> Future[None]:
        return _noticed()

    def detach(self) -> None:
        pass


def _noticed() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """What stands beside verl's own checkpoint."""

    version: int
    """Policy updates so far."""
    labels: dict[int, int]
    """Versions by label."""
    run: str | None = None


class Row(NamedTuple):
    """One output of an agent loop, as the trainer finds it in the queue."""

    key: str
    """``{uid}_{session}_{output}``."""
    tag: Mapping[str, Any]
    found: Mapping[str, Any] | None
    """Its `evidence`, if a worker of ours made it."""


class Measurement:
    """Translates what verl's trainer does into the hooks of a callback.

    Args:
        callback: its engines are made here: the servers.
        by_row: a sample is split into several mini-batches, so rows are trained one by one.
        late_masks: ``response_mask`` changes after the rollout.
        labels: versions by label, from the checkpoint.
        run: the run's identity, for the checkpoint.
        strict: let what goes wrong here raise, too.
    """

    def __init__(
        self,
        callback: StalenessCallback,
        *,
        servers: Iterable[str] = (),
        by_row: bool = False,
        late_masks: bool = False,
        labels: Mapping[int, int] | None = None,
        run: str | None = None,
        strict: bool = False,
    ) -> None:
        self.callback = callback
        self.process = uuid.uuid4().hex
        self.labels = dict(labels or {})
        self.late_masks = late_masks
        self.guard = Guard(strict=strict, timeout=0.0)
        self._run = run
        self._by_row = by_row
        self._replicas = {name: _Replica(name) for name in dict.fromkeys(servers)}
        self._pieces: dict[str, dict[str, list[Piece]]] = {}
        self._groups: dict[str, None] = {}
        self._batches: list[list[str]] | None = []
        self._updates = 0
        callback.attach(*self._replicas.values())

    # Refits.

    @contextmanager
    def refit(self, servers: Iterable[str], label: int | None) -> Generator[None]:
        """Weights are sent to servers; their requests are aborted first, or none are running."""
        names = list(servers)
        self.callback.on_refit_paused(engines=names, mode="abort")
        try:
            yield
        except BaseException as error:
            self.callback.on_refit_aborted(reason=type(error).__name__, engines=names)
            raise
        if label is not None:
            self.labels[label] = self.callback.version
        self.callback.on_refit_done(engines=names)

    # Rows.

    def unit(self, key: str) -> str:
        """The group that a row belongs to."""
        return key if self._by_row else key.split("_")[0]

    def publish(self, rows: Iterable[Row]) -> None:
        """The sampler chose these rows."""
        for group, members in self._grouped(rows).items():
            content = [self._calls(row) for row in members]
            self.callback.on_publish(
                group,
                calls=[call for calls, _ in content for call in calls],
                unknown=sum(unknown for _, unknown in content),
                restored=any(self._is_restored(row) for row in members),
            )
            self._groups[group] = None

    def drop(self, rows: Iterable[Row], *, reason: Callable[[str], str]) -> None:
        """These rows will not be trained; `reason` says why by prompt."""
        for group, members in self._grouped(rows).items():
            calls = [call for row in members for call in self._calls(row)[0]]
            self.callback.on_drop(group, reason=reason(members[0].key.split("_")[0]), calls=calls)
            for row in members:
                self._pieces.pop(row.key, None)

    def _grouped(self, rows: Iterable[Row]) -> dict[str, list[Row]]:
        groups: dict[str, list[Row]] = {}
        for row in rows:
            if not row.tag.get("is_padding"):
                groups.setdefault(self.unit(row.key), []).append(row)
        return groups

    def _is_restored(self, row: Row) -> bool:
        return row.found is not None and row.found["process"] != self.process

    def _calls(self, row: Row) -> tuple[list[Call], int]:
        if row.found is None:
            self.guard.note(ATTEMPTS)
            return self._bounded(row), 0
        pieces = self._pieces.setdefault(row.key, {}) if self.late_masks else {}
        calls: list[Call] = []
        for number, (server, label, tokens, trained) in enumerate(row.found["calls"]):
            name = f"{row.key}.{number}"
            pieces[name] = [(start, stop, place) for start, stop, place in trained]
            call = self._call(name, server, label, tokens, is_restored=self._is_restored(row))
            ranges = tuple((start, stop) for start, stop, _ in trained)
            if tokens and ranges != ((0, tokens),):
                call = msgspec.structs.replace(call, trained=ranges)
            calls.append(call)
        return calls, row.found["unknown"]

    def _call(
        self, name: str, server: str, label: int | None, tokens: int, *, is_restored: bool
    ) -> Call:
        """A call that lies in one version, by the table of labels."""
        version = None if label is None else self.labels.get(label)
        if version is None:
            self.guard.note("finding which version a label stands for", KeyError(label))
            return _between(name, server, tokens, oldest=0, newest=LARGEST)
        replica = self._replicas.get(server)
        refit = None if replica is None else replica.refits.get(version)
        if is_restored or refit is None:
            return _between(name, server, tokens, oldest=version, newest=version)
        return Call(
            call=name, engine=server, version=version, tokens=tokens, after=refit, until=refit
        )

    def _bounded(self, row: Row) -> list[Call]:
        """A row of which only its tags are known: the labels of its first and last attempt."""
        oldest = self.labels.get(row.tag.get("min_global_steps", -1))
        newest = self.labels.get(row.tag.get("max_global_steps", -1))
        tokens = row.tag.get("trained", row.tag.get("response_len", 0))
        return [
            _between(
                f"{row.key}.0",
                "unknown",
                tokens,
                oldest=0 if oldest is None else oldest,
                newest=LARGEST if newest is None else newest,
            )
        ]

    # Steps.

    def update(
        self, keys: Sequence[str], *, is_padding: Sequence[bool], cut: list[list[str]] | None
    ) -> None:
        """The actor was updated on a sample whose rows are these, in this order.

        Args:
            cut: the rows of each update, None where the split is not known.
        """
        padding = {key for key, is_one in zip(keys, is_padding, strict=True) if is_one}
        if cut is None or self._batches is None:
            self._batches = None
            return
        entries = [
            list(dict.fromkeys(self.unit(key) for key in rows if key not in padding))
            for rows in cut
        ]
        if not self._by_row and len({tuple(entry) for entry in entries}) > 1:
            self._batches = None  # the rows of a prompt are in several updates
        else:
            self._batches += entries

    def count(self, updates: int) -> None:
        """The actor made so many policy updates on a sample."""
        self._updates += updates

    def step(self, number: int, *, masks: Mapping[str, Sequence[int]] | None = None) -> None:
        """A global step is over.

        Args:
            masks: final ``response_mask`` by row.
        """
        groups, batches, updates = list(self._groups), self._batches, self._updates
        self._groups, self._batches, self._updates = {}, [], 0
        trained: dict[str, dict[str, list[tuple[int, int]]]] = {}
        for key, mask in (masks or {}).items():
            for call, pieces in self._pieces.pop(key, {}).items():
                trained.setdefault(self.unit(key), {})[call] = inside(pieces, mask)
        self._pieces.clear()
        if not updates:
            for group in groups:
                self.callback.on_drop(group, reason="no policy update (critic warm-up)")
            self.callback.on_step((), step=number, updates=0)
        elif batches is not None and len(batches) == updates:
            self.callback.on_step(batches=batches, step=number, trained=trained or None)
        else:
            self.callback.on_step(groups, step=number, updates=updates, trained=trained or None)

    # Checkpoints.

    def save(self, folder: Path) -> None:
        """Write what a resumed run needs beside verl's own checkpoint."""
        labels = dict(sorted(self.labels.items())[-1000:])
        saved = Saved(run=self._run, version=self.callback.version, labels=labels)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / STATE).write_bytes(msgspec.json.encode(saved))

    def close(self, status: str) -> None:
        """The run is over."""
        self.callback.close(status)
        failures = "; ".join(f"{what}: {n} times" for what, n in self.guard.failures.items())
        if failures:
            _log.warning("rl_staleness: failed: %s", failures)


def _between(name: str, server: str, tokens: int, *, oldest: int, newest: int) -> Call:
    span = (0, tokens, oldest) if newest == oldest else (0, tokens, oldest, max(oldest, newest))
    spans = (span,) if tokens else None
    return Call(call=name, engine=server, version=oldest, tokens=tokens, spans=spans)
