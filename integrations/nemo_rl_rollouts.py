"""Groups of NeMo RL's single controller, from the replay buffer's commit to their removal."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import wraps
from typing import Any

from rl_staleness.callback import StalenessCallback
from rl_staleness.events import Call
from rl_staleness.guard import Guard
from rl_staleness.integrations.nemo_rl_groups import (
    Content,
    Link,
    bounded,
    contents_before,
    links_of,
    num_generated,
)
from rl_staleness.integrations.nemo_rl_seats import Kept, Reply
from rl_staleness.integrations.nemo_rl_turns import Turns
from rl_staleness.integrations.nemo_rl_workers import Worker, noticed
from rl_staleness.integrations.nemo_rl_wraps import Wraps, arguments_of
from rl_staleness.pauses import Answer

__all__ = ["Rollouts"]


class Rollouts:
    """Publishes and drops groups. Everything happens on the controller's loop.

    Args:
        controller: the single controller.
        engine: names one for calls of which nobody says where they ran: all get the same weights.
        labels: policy updates by the trainer's label of weights.
        timeout: seconds that the data plane has to answer.
    """

    def __init__(
        self,
        controller: Any,
        staleness: StalenessCallback,
        *,
        workers: Sequence[Worker],
        engine: str,
        labels: Mapping[int, int],
        guard: Guard,
        timeout: float,
    ) -> None:
        self.rows: dict[str, dict[str, list[str]]] = {}
        """By group that waits: names of the calls of each row."""
        self._controller = controller
        self._buffer = controller._buffer
        self._staleness = staleness
        self._workers = workers
        self._engine = engine
        self._labels = labels
        self._guard = guard
        self._timeout = timeout
        self._turns = Turns()
        self._asked: dict[str, tuple[Any, list[tuple[Worker, Future[Reply]]]]] = {}
        """By group that is being finalized: its request, and the answers about its calls."""

    def wrap(self, wraps: Wraps) -> None:
        """Hold the buffer, and where groups are finalized for it."""
        buffer = self._buffer
        wraps.replace(buffer, "commit", self._turning(buffer.commit))
        for name in ("remove", "remove_group"):
            wraps.replace(buffer, name, self._removing(getattr(buffer, name), name))
        if hasattr(buffer, "seal_group"):
            wraps.replace(buffer, "seal_group", self._turning(buffer.seal_group))
        manager = getattr(self._controller, "_rollout_manager", None)
        if self._workers and hasattr(manager, "run_rollout"):
            self._turns.wrap(wraps, manager, self._controller._gen.worker_group)
        if hasattr(buffer, "load_state_dict"):
            wraps.after_awaited(buffer, "load_state_dict", self._restored)
        if hasattr(buffer, "commit_finalized"):
            wraps.replace(buffer, "commit_finalized", self._committing(buffer.commit_finalized))
        finalize = getattr(self._controller, "_finalize_with_actor", None)
        if finalize is not None:
            wraps.replace(self._controller, "_finalize_with_actor", self._finalizing(finalize))

    def drop(self, groups: Iterable[str], *, reason: str) -> None:
        """Those of the groups that wait will not be trained."""
        for group in groups:
            if self.rows.pop(group, None) is not None:
                self._staleness.on_drop(group, reason=reason)

    def version_of(self, label: int) -> int:
        """Policy updates of the weights with this label; before the attachment both are one."""
        return self._labels.get(label, label)

    async def column(self, meta: Any, name: str) -> list[Any]:
        """A column of the data plane, a row an entry, as plain lists and numbers."""
        answer = self._controller._call_dp(
            "get_samples",
            sample_ids=list(meta.sample_ids),
            partition_id=meta.partition_id,
            select_fields=[name],
        )
        rows = (await asyncio.wait_for(answer, self._timeout))[name]
        return [rows[row].tolist() for row in range(len(meta.sample_ids))]

    # With receipts: Gym's token capture.

    def _finalizing(self, original: Any) -> Any:
        """Ask the workers for the calls of a group while its rows are assembled."""

        @wraps(original)
        async def ours(request: Any) -> Any:
            with self._guard("asking for the calls of a group"):
                ids = _calls_in(request.receipts)
                asked = [(worker, worker.calls(ids)) for worker in self._workers]
                self._asked[request.group_id] = (request, asked)
            try:
                return await original(request)
            finally:
                self._asked.pop(request.group_id, None)

        return ours

    def _committing(self, original: Any) -> Any:
        """What is known of a group is gathered before it is ready, and published as it is."""

        @wraps(original)
        async def ours(*args: Any, **kwargs: Any) -> Any:
            group, content = "", None
            with self._guard("commit_finalized"):
                given = arguments_of(original, args, kwargs)
                group, meta = str(given["group_id"]), given["meta"]
                content = await self._finalized(group, meta, label=given["group_min_wv"])
            result = await original(*args, **kwargs)
            if content is not None:
                with self._guard("commit_finalized"):
                    self._publish(group, content)
            return result

        return ours

    async def _finalized(self, group: str, meta: Any, *, label: int) -> Content:
        try:
            request, asked = self._asked[group]
            links = links_of(request.receipts, meta.sequence_lengths)
        except Exception as error:  # noqa: BLE001  # its rows still say how much was generated
            self._guard.note("reading the receipts of a group", error)
            return await self._uncertain(meta, label)
        found = await self._found(asked)
        lost = any(link.call not in found for link in links)
        generated = num_generated(links, await self.column(meta, "token_mask")) if lost else {}
        content = Content()
        for link in links:
            row = meta.sample_ids[link.row]
            if link.call in found:
                self._add_kept(content, row, found[link.call])
            elif generated[link.call]:
                self._add_bounded(content, row, link, generated[link.call])
        return content

    async def _found(self, asked: Sequence[tuple[Worker, Future[Reply]]]) -> dict[str, Kept]:
        answers = [Answer(w.name, "the calls of a group", noticed(reply)) for w, reply in asked]
        await self._guard.wait_async(answers)
        found: dict[str, Kept] = {}
        for _, reply in asked:
            if reply.done() and reply.exception() is None:
                found.update(reply.result().kept)
        return found

    def _add_kept(self, content: Content, row: str, kept: Kept) -> None:
        call = kept.call
        if kept.before is not None and kept.before[0]:
            tokens, label = kept.before
            oldest, name = self.version_of(label), f"{call.call}/before"
            content.add(row, bounded(name, tokens, oldest, call.version, engine=call.engine))
        content.add(row, call)
        if kept.generated is not None and kept.generated < call.tokens:
            content.masks[call.call] = [(0, kept.generated)]
        elif kept.generated is not None:
            content.unknown += kept.generated - call.tokens

    def _add_bounded(self, content: Content, row: str, link: Link, tokens: int) -> None:
        oldest = self.version_of(link.label)
        content.add(row, self._bounded(link.call, tokens, oldest))

    # Without: turns that the controller sent by itself.

    def _turning(self, original: Any) -> Any:
        """The same for a group whose rollouts were run here."""

        @wraps(original)
        async def ours(*args: Any, **kwargs: Any) -> Any:
            group, content = "", None
            with self._guard(original.__name__):
                given = arguments_of(original, args, kwargs)
                group = given["group_id"]
                label = given.get("start_weight_version")
                if label is None:
                    label = self._buffer.start_weight_list[self._buffer._group_ids.index(group)]
                content = await self._turned(group, given["record"], label)
            result = await original(*args, **kwargs)
            if content is not None:
                with self._guard(original.__name__):
                    self._publish(group, content)
            return result

        return ours

    async def _turned(self, group: str, record: Any, label: int) -> Content:
        turns = [
            [
                len(message["token_ids"])
                for message in completion.message_log[len(record.prompt) :]
                if message["role"] == "assistant"
            ]
            for completion in record.completions
        ]
        ids = self._turns.take(record)
        names = [name for sent in ids for name in sent]
        asked = [(worker, worker.calls(names)) for worker in self._workers if names]
        found = await self._found(asked)
        calls = [[found[name].call for name in sent if name in found] for sent in ids]
        is_linked = [[call.tokens for call in sent] for sent in calls] == turns
        content, oldest = Content(), self.version_of(label)
        for number, lengths in enumerate(turns):
            row = f"{group}_g{number}"
            for turn, tokens in enumerate(lengths):
                if is_linked:
                    content.add(row, calls[number][turn])
                elif tokens:  # they count under the version that their group began on
                    content.add(row, self._bounded(f"{row}/{turn}", tokens, oldest))
        return content

    async def _uncertain(self, meta: Any, label: int) -> Content:
        """A group of which only its rows are there."""
        oldest, content = self.version_of(label), Content()
        for sample, mask in zip(
            meta.sample_ids, await self.column(meta, "token_mask"), strict=True
        ):
            tokens = sum(value != 0 for value in mask)
            if tokens:
                content.add(sample, self._bounded(sample, tokens, oldest))
        return content

    def _bounded(self, name: str, tokens: int, oldest: int) -> Call:
        return bounded(name, tokens, oldest, self._staleness.version, engine=self._engine)

    def _publish(self, group: str, content: Content, *, restored: bool = False) -> None:
        self.rows[group] = content.rows
        self._staleness.on_publish(
            group,
            calls=content.calls,
            trained=content.masks or None,
            unknown=content.unknown,
            restored=restored,
        )

    def _removing(self, original: Any, name: str) -> Any:
        """Groups that leave the buffer for good; those that a sampler takes out are trained."""

        @wraps(original)
        async def ours(*args: Any, **kwargs: Any) -> Any:
            gone: list[str] = []
            with self._guard(name):
                given = arguments_of(original, args, kwargs)
                if name == "remove_group":
                    gone = [given["group_id"]]
                elif given["remove_in_dp"]:
                    gone = [self._buffer._group_ids[i] for i in given["idxs"]]
            result = await original(*args, **kwargs)
            with self._guard(name):
                self.drop(gone, reason="evicted" if name == "remove" else "removed")
            return result

        return ours

    async def _restored(self, *_: object) -> None:
        """Publish again what a checkpoint brought back, as the trace of before knows it."""
        buffer, trace = self._buffer, self._staleness.trace
        ready = zip(buffer._group_ids, buffer.ready_list, strict=True)
        wanted = [group for group, is_ready in ready if is_ready and group not in self.rows]
        known: dict[str, Content] = {}
        if wanted and trace is not None:
            known = await asyncio.to_thread(
                contents_before, trace, set(wanted), engine=self._engine
            )
        for group in wanted:
            with self._guard("restoring a group"):
                content = known.get(group)
                if content is None:
                    place = buffer._group_ids.index(group)
                    begin = buffer.start_weight_list[place]
                    content = await self._uncertain(buffer.meta_list[place], begin)
                self._publish(group, content, restored=True)


def _calls_in(receipts: Iterable[Any]) -> list[str]:
    """Ids of all calls that receipts name: also of those that were made and not kept."""
    names: list[str] = []
    for receipt in receipts:
        manifest: list[Any] = [] if receipt is None else receipt["manifest"]
        names += [str(record["model_call_id"]) for record in manifest]
    return names
