"""vLLM in this process, 0.29 to 0.33: an AsyncLLM, or the synchronous LLM, as an engine.

Nothing is subclassed: a few bound methods of the running object are wrapped, and given back by
`VllmEngine.detach`. No request, output or refit waits for what happens here, and no exception of
this file reaches them.

    with StalenessCallback(engines=[VllmEngine(llm)]) as staleness:
        ...

A call begins when ``add_request`` is entered in a task that captures (its prompt may still have to
be tokenized), and ends when the front end has finished or aborted it. What is said of it:

tokens  What the front end processed: all that its client can have received. A client that stops
        reading closes its generator before it publishes, and says with a mask what it trains.
spans   What vLLM 0.32 and later report, as long as every label is known to have been set in a
        pause. Labels are ``str(version)``; a trainer that labels its weights itself, between the
        pause and `VllmEngine.done`, keeps its labels.
cuts    From a marker behind the last output of before the pause. When ``pause_generation`` returns,
        every output that was made before it lies in the front end's queue; the counts are taken
        where the front end reaches the marker, perhaps after the refit, but at exactly that place.
LoRA    A call keeps the adapter that it began with: it is in no cut, and vLLM's label, which is of
        the whole engine, is not believed. Its version is that of the refit during which
        ``add_lora`` loaded the adapter, or what ``lora_version`` says; else it is not known, as
        after an adapter was loaded in place of one that runs.

With several API servers each front end is an engine, with a name of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import logging
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from concurrent.futures import Future, InvalidStateError
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, partial, wraps
from typing import Any

from rl_staleness.engines import Capture, Cut, LiveCall, captured, capturing
from rl_staleness.events import LARGEST
from rl_staleness.integrations.vllm_labels import Labels, remember
from rl_staleness.integrations.vllm_markers import PendingCut, Place
from rl_staleness.integrations.vllm_pauses import Cache, PauseWatch

__all__ = ["Evidence", "VllmEngine"]

TESTED = ("0.29.", "0.30.", "0.31.", "0.32.", "0.33.")
"""The sources of these were read; 0.29, 0.32 and 0.33 are tested token by token."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """What one live call showed that an engine can say."""

    vllm: str
    """Version of vLLM."""
    tested: bool
    """This library knows that version."""
    calls: bool
    """A request is linked to its call, whose tokens are counted."""
    spans: bool
    """The engine says itself which weights sampled which tokens."""
    cuts: bool
    """A marker in the stream of outputs is reached, and the engine says whether it is paused."""
    labels: bool
    """The engine carries the label that was set."""
    problems: tuple[str, ...] = ()


class _Output:
    """The output of a call whose detokenizer keeps more than that in its list."""

    def __init__(self, detokenizer: Any) -> None:
        self._detokenizer = detokenizer

    def __len__(self) -> int:
        return int(self._detokenizer.num_output_tokens())


@dataclass(kw_only=True, slots=True)
class _Running(LiveCall):
    """A captured call, with what is needed of it until it ends."""

    adapter: Any = field(default=None, repr=False)
    """The LoRA request that it was submitted with."""
    state: Any = field(default=None, repr=False)
    """vLLM's own state of it, from when the front end knows it."""
    output: Sized = field(default=(), repr=False)
    """As long as the tokens that the front end has processed."""
    labelled: bool = True
    """No label of its tokens is in doubt."""


_submitted: ContextVar[Sequence[_Running]] = ContextVar("rl_staleness_vllm", default=())
"""The calls of the request that this task is just submitting, in the order of their indices."""


class VllmEngine:
    """One vLLM front end, with the engine cores behind it, as the callback sees it.

    Args:
        llm: a running ``AsyncLLM``; or an ``LLM``, which is refitted between calls only.
        name: unique in the run.
        lora_version: the policy version of a LoRA request's adapter, or None if it is not known.
        on_pause: told the mode of every pause, on the engine's own thread, when the engine has
            answered it and before whoever asked for it knows. Who marks there needs no caller's
            help, and cannot be late.
    """

    def __init__(
        self,
        llm: Any,
        *,
        name: str = "engine",
        lora_version: Callable[[Any], int | None] | None = None,
        on_pause: Callable[[str], object] | None = None,
    ) -> None:
        if not name:
            raise ValueError("name: an engine needs one that can stand in a trace")
        self._name = name
        self._llm: Any = llm
        self._front: Any = getattr(llm, "llm_engine", llm)
        self._core: Any = getattr(self._front, "engine_core", None)
        self._processor: Any = getattr(self._front, "output_processor", None)
        self._blocks = not inspect.iscoroutinefunction(getattr(self._front, "add_request", None))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lora_version = lora_version
        self._adapters: dict[
            int, tuple[int, int | None]
        ] = {}  # (refit, version) that loaded it, by id

        self._started = False
        self._version = 0
        self._refit = 0
        self._open = False  # that refit is neither done nor aborted
        self._version_ahead: int | None = 0
        self._labels = Labels()

        self._boot = secrets.token_hex(3)
        self._num_calls = 0
        self._running: dict[str, _Running] = {}
        self._by_request: dict[str, _Running] = {}
        self._outputs: dict[str, Sized] = {}  # of running calls that a cut may list
        self._lists_are_outputs = True
        self._begun_late: list[str] = []  # since the last mark
        self._ended_tokens = 0  # of all requests, since it was attached
        self._is_aborting = False

        self._marker_reached = False
        self._pauses = PauseWatch(None if on_pause is None else partial(self._guarded, on_pause))
        self._complaints: set[str] = set()
        self._wrapped: list[tuple[Any, str, Any, Any]] = []
        self._missing = self._attach()

    @property
    def name(self) -> str:
        """Unique in the run."""
        return self._name

    # What the callback says, from any thread.

    def start(self, *, version: int, refit: int) -> Future[None]:
        """The run starts: label the weights, now or with the first request."""
        self._version, self._refit, self._open = version, refit, False
        self._labels.due = self._started = True

        def work() -> None:
            self._doubt_labels()  # of calls that a run before has begun
            for running in self._running.values():
                running.version = version  # what generates now; how long it has, nobody knows
            self._label_first()

        return self.submit(work)

    def mark(
        self, refit: int, *, version: int | None, mode: str, deliver: Callable[[Cut | None], None]
    ) -> Future[None]:
        """Generation is paused: put the marker, and go on. `announce` may say the version later.

        It counts in every mode: in ``abort`` and ``wait`` there are calls too that had begun and
        that the engine did not know when it aborted, or waited for, its requests.
        """
        self._refit, self._version_ahead, self._open = refit, version, True
        self._begun_late.clear()
        self._marker_reached = False
        self._labels.of_trainer, self._labels.believed = None, False
        pending = PendingCut(deliver)
        return self.submit(partial(self._take_cut, refit, pending), partial(pending.finish, None))

    def announce(self, refit: int, *, version: int) -> None:
        """Say, on the engine's own thread, which version a marked refit moves the engine to."""
        if self._open and self._refit == refit:
            self._version_ahead = version
            loaded = [number for number, of in self._adapters.items() if of == (refit, None)]
            self._adapters.update(dict.fromkeys(loaded, (refit, version)))

    def done(self, refit: int, *, version: int) -> Future[None]:
        """The weights are in: label them, before generation resumes."""
        missed, self._refit = refit != self._refit, refit
        self._version, self._open = version, False
        self._labels.believed = False
        label = self._labels.of_trainer or str(version)

        def work() -> None:
            if missed:
                self._forget_numbers()
            self._label(refit, label)

        return self.submit(work)

    def aborted(self, refit: int) -> Future[None]:
        """The refit failed: weights and label are those from before."""
        self._open = False
        self._labels.believed, self._labels.of_trainer = False, None
        self._adapters = {k: loaded for k, loaded in self._adapters.items() if loaded[0] != refit}
        return self.submit(partial(self._label, refit, self._labels.current or str(self._version)))

    def detach(self) -> None:
        """Give vLLM its methods back; do nothing the second time."""
        for owner, attribute, ours, before in reversed(self._wrapped):
            if _own(owner, attribute) is not ours:
                continue  # somebody wrapped it after us, and ours goes on to the original
            if before is None:
                delattr(owner, attribute)
            else:
                setattr(owner, attribute, before)
        self._wrapped.clear()
        for kept in ("_llm", "_front", "_core", "_processor"):
            setattr(self, kept, None)  # nothing of ours keeps the engine alive

    async def selftest(self, *, timeout: float = 30.0) -> Evidence:
        """Run a live call of a few tokens through the capture, and say what it showed.

        It never raises; what kept it from showing more is among the problems.

        Args:
            timeout: seconds after which an engine, a paused one for instance, did not answer.
        """
        problems = [f"it has no {name}" for name in self._missing]
        counts: list[tuple[int, int]] = []
        received, paused, label = 0, None, None
        with captured() as capture:
            try:
                received = await asyncio.wait_for(self._probe(capture, counts), timeout)
                paused = False if self._blocks else await self._answer("is_scheduler_paused")
                label = await self._answer("get_weight_version")
            except Exception as error:  # noqa: BLE001  # it is what the answer says
                problems.append(f"{type(error).__name__}: {error}")
        call = capture.calls[0] if len(capture.calls) == 1 else None
        linked = call is not None and call.ended and 0 < call.tokens == received
        if not linked:
            problems.append(f"{received} tokens were received, captured was {capture.calls}")
        version = str(getattr(sys.modules.get("vllm"), "__version__", "unknown"))
        return Evidence(
            vllm=version,
            tested=version.startswith(TESTED),
            calls=linked,
            spans=linked and call is not None and call.after is not None and bool(call.spans),
            cuts=linked
            and paused is False
            and bool(counts or self._blocks)
            and all(seen <= count <= received for seen, count in counts),
            labels=label is not None and label == self._labels.current,
            problems=tuple(problems),
        )

    async def _probe(self, capture: Capture, counts: list[tuple[int, int]]) -> int:
        """Generate a few tokens; note what markers count beside what had been received by then."""
        params = _vllm("sampling_params").SamplingParams(max_tokens=16, ignore_eos=True)
        prompt = {"prompt_token_ids": [0]}
        if self._blocks:
            return len(self._llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids)

        def reached(seen: int) -> None:
            running = self._running.get(capture.calls[0].call)
            if running is not None:
                counts.append((seen, len(running.output)))

        received = 0
        async for output in self._llm.generate(prompt, params, f"rl-staleness-{self._boot}"):
            received = len(output.outputs[0].token_ids)
            if capture.calls:
                self._put_marker(partial(reached, received))
        return received

    async def _answer(self, method: str) -> Any:
        if self._blocks:
            return getattr(self._core, method)()
        return await self._core.call_utility_async(method)

    # Calls, on the engine's own thread.

    def _begin(self, capture: Capture, args: Sequence[Any], kwargs: Any) -> list[_Running]:
        """A request is being submitted: make its calls."""
        if not self._wrapped:  # it was detached
            return []
        if not self._blocks and self._loop is None:
            self._loop = asyncio.get_running_loop()
        if self._labels.due:
            self._label_first()
        request = args[0] if args else kwargs["request_id"]
        prompt = args[1] if len(args) > 1 else kwargs["prompt"]
        params = getattr(prompt, "sampling_params", None) or _argument(args, kwargs, 2, "params")
        adapter = _argument(args, kwargs, 4, "lora_request")
        version, after = (self._version, self._refit) if self._started else (0, None)
        begun: list[_Running] = []
        for _ in range(getattr(params, "n", 0)):  # a pooling request has no n, and no tokens
            self._num_calls += 1
            name = f"{request}/{self._boot}{self._num_calls}"
            running = _Running(call=name, engine=self._name, version=version, after=after)
            self._running[name] = running
            self._outputs[name] = ()
            if self._open:
                self._begun_late.append(name)
            if adapter is not None or after is None:
                self._bind(running, adapter)
            capture.calls.append(running)
            begun.append(running)
        return begun

    def _bind(self, running: _Running, adapter: Any) -> None:
        """Say of a whole call what is known as it begins: no cut will say more of it."""
        running.adapter = adapter
        self._outputs.pop(running.call, None)
        version = None if adapter is None else self._guarded(self._version_of, adapter)
        running.spans = ((0, LARGEST, *((0, LARGEST) if version is None else (version,))),)

    def _version_of(self, adapter: Any) -> int | None:
        if self._lora_version is not None:
            version = self._lora_version(adapter)
            return None if version is None else int(version)
        return self._adapters.get(adapter.lora_int_id, (0, None))[1]

    def _aborting(self, original: Any) -> Any:
        @wraps(original)
        def abort_requests(*args: Any, **kwargs: Any) -> Any:
            if self._is_aborting:  # it calls itself for the requests of a parent
                return original(*args, **kwargs)
            states = self._processor.request_states
            strangers = {name: states[name] for name in states.keys() - self._by_request.keys()}
            self._is_aborting = True
            try:
                aborted = original(*args, **kwargs)
            finally:
                self._is_aborting = False
            self._guarded(self._note_aborted, aborted, strangers)
            return aborted

        return abort_requests

    def _note_aborted(self, request_ids: Iterable[str], strangers: Mapping[str, Any]) -> None:
        for request_id in request_ids:
            running = self._by_request.get(request_id)
            if running is not None:
                self._end(running)
            elif request_id in strangers:
                self._ended_tokens += _num_output_tokens(strangers[request_id])

    def _end(self, running: _Running) -> None:
        """A call was finished or aborted, or could not be submitted: its record is final."""
        if self._running.pop(running.call, None) is None:
            return
        self._outputs.pop(running.call, None)
        tokens = 0
        if running.state is not None:
            self._by_request.pop(running.state.request_id, None)
            tokens = running.state.detokenizer.num_output_tokens()
            if tokens != len(running.output):
                self._lists_are_outputs = False
                self._complain("its lists of tokens are not its outputs: the last cuts are wrong")
        running.tokens = tokens
        self._ended_tokens += tokens
        if running.after is not None:
            running.until = self._refit
        if self._open and self._marker_reached:
            running.labelled = False  # generation went on before the new version was told
        if running.spans is None:
            running.spans = self._labels.spans(running.state, tokens) if running.labelled else None
        else:
            running.spans = ((0, tokens, *running.spans[0][2:]),) if tokens else None
        running.state = running.adapter = None  # whoever keeps the call does not keep them
        running.output = ()
        running.ended = True

    # Cuts, on the engine's own thread.

    def _take_cut(self, refit: int, pending: PendingCut) -> None:
        """Have the calls counted at the marker, and ask whether the engine is paused."""
        kv = self._pauses.take_cache()
        if self._blocks or self._own_loop() is None:
            # A synchronous engine is refitted between calls; the other one had no call so far.
            pending.finish(None if self._running or self._missing else Cut(calls={}))
        elif self._known_to_be_paused():
            self._labels.believed = not self._labels.failed
            pending.paused = True
            self._count_at_marker(refit, pending, kv, exact=True)
        else:
            # Our outputs of before may be on their way until the engine answers us; its answer is
            # then good for as long as the refit is open.
            answered = partial(self._heard_of_pause, refit, pending, kv)
            self._ask("is_scheduler_paused", then=answered)

    def _heard_of_pause(self, refit: int, pending: PendingCut, kv: Cache, answer: object) -> None:
        """The engine answered whether it is paused."""
        paused = answer is True
        still = self._open and self._refit == refit
        if still:
            self._labels.believed = paused and not self._labels.failed
        if not paused:
            error = answer if isinstance(answer, BaseException) else None
            self._complain("it did not say that it is paused: the refit has no cut", error)
            self._doubt_labels()
        elif still:
            self._count_at_marker(refit, pending, kv, exact=self._pauses.quiet)
        else:
            pending.finish(None)
        pending.answered(paused=paused)

    def _count_at_marker(self, refit: int, pending: PendingCut, kv: Cache, *, exact: bool) -> None:
        reached = partial(self._reached, refit, pending, kv, exact=exact)
        if not self._put_marker(reached):
            pending.counted(self._count(refit, kv, exact=False))

    def _reached(self, refit: int, pending: PendingCut, kv: Cache, *, exact: bool) -> None:
        self._marker_reached = True
        pending.counted(self._count(refit, kv, exact=exact))

    def _known_to_be_paused(self) -> bool:
        """The engine told this front end that it is paused, and no other can have resumed it."""
        alone = getattr(self._front, "_client_count", 1) == 1
        return alone and self._pauses.paused and self._pauses.quiet

    def _put_marker(self, reached: Callable[[], object]) -> bool:
        """Have ``reached`` called behind the outputs that wait for the front end now, if it can."""
        if getattr(self._front, "output_handler", None) is None:
            reached()  # there were none
            return True
        queue = getattr(self._core, "outputs_queue", None)
        if queue is None:
            return False
        batch = _vllm("v1.engine").EngineCoreOutputs
        # Loggers know the engines that this client manages; 0 need not be one of them.
        ranks = getattr(self._core, "engine_ranks_managed", None) or [0]
        outputs = Place(partial(self._guarded, reached))
        queue.put_nowait(batch(engine_index=ranks[0], outputs=outputs))
        return True

    def _count(self, refit: int, kv: Cache, *, exact: bool) -> Cut:
        """Count the calls that had begun before the pause, and that the refit can move on."""
        begin = time.perf_counter()
        counts = dict(zip(self._outputs, map(len, self._outputs.values()), strict=True))
        for name in self._begun_since(refit):
            if counts.get(name) == 0:
                del counts[name]
        generated = self._ended_tokens + sum(counts.values()) + self._tokens_beside(counts)
        spent = time.perf_counter() - begin
        return Cut(calls=counts, exact=exact, kv=kv, snapshot_seconds=spent, generated=generated)

    def _tokens_beside(self, counts: Mapping[str, int]) -> int:
        """Tokens so far of running requests that no cut lists: not captured, or with an adapter."""
        states = self._processor.request_states
        if len(states) == len(self._by_request) and len(self._running) == len(self._outputs):
            return 0
        listed = {name for name, running in self._by_request.items() if running.call in counts}
        return sum(map(_num_output_tokens, (states[name] for name in states.keys() - listed)))

    def _begun_since(self, refit: int) -> list[str]:
        """Calls that began after the pause of a refit; those of the last one are at hand."""
        if refit == self._refit:
            return self._begun_late
        return [name for name, running in self._running.items() if (running.after or 0) >= refit]

    def _forget_numbers(self) -> None:
        """A pause was not announced here: what runs may have been stamped before it or after."""
        for running in self._running.values():
            running.labelled = False
            if running.adapter is None:
                running.after = None
        self._outputs.clear()

    # Labels, on the engine's own thread.

    def _label_first(self) -> None:
        """Label the weights that the run starts with, once there is a loop to do it on."""
        if self._labels.due and (self._blocks or self._own_loop() is not None):
            self._labels.due = False
            label = self._labels.of_trainer or str(self._version)
            self._label(self._refit, label, in_pause=False)

    def _label(self, refit: int, label: str, *, in_pause: bool = True) -> None:
        """Send the label, and believe spans again when it is known to have been set in a pause.

        The core takes messages in the order in which they were sent, and this one is sent when
        this returns, or to several cores by what the loop does next: before that which resumes
        generation, whether or not anybody waits.
        """
        labels = self._labels
        if self._missing or labels.failed:
            return
        labels.learn(label, self._version)
        labels.current = label
        if self._blocks:
            self._core.set_weight_version(label)
            labels.believed = True
            return
        if self._own_loop() is None:
            labels.due = True
            return

        theirs = label == labels.of_trainer
        if in_pause and not self._known_to_be_paused():
            then = partial(self._heard_of_place, refit if theirs else None)
            self._ask("is_scheduler_paused", then=then)
        elif theirs:
            self._settle_label(refit, None)
        if not theirs:
            self._ask("set_weight_version", label, then=partial(self._settle_label, refit))

    def _heard_of_place(self, refit: int | None, answer: object) -> None:
        """The engine answered whether it was paused where it got the label."""
        if answer is not True:
            self._complain("it was not paused when a refit was done: spans are not used")
            self._doubt_labels()
        if refit is not None:
            self._settle_label(refit, None)

    def _settle_label(self, refit: int, answer: object) -> None:
        """The engine has the label of a refit, or says why not."""
        if isinstance(answer, BaseException):
            self._labels.failed = True
            self._complain("it did not take a label: its spans are not used", answer)
        if self._refit == refit and not self._open:
            self._labels.believed = not self._labels.failed

    def _doubt_labels(self) -> None:
        """Generation went on while weights or label changed: what runs now has no spans."""
        for running in self._running.values():
            running.labelled = False

    def _note_label(self, _: object, *args: Any, **kwargs: Any) -> None:
        """The trainer labels the weights; that label stays if it comes before the run starts, or
        within a refit."""
        (label,) = (*args, *kwargs.values())
        if self._open or not self._started:
            self._labels.of_trainer = label
        else:
            self._labels.learn(label, None)
            self._labels.current = label
            self._complain("a label was set outside of a refit: spans do not use it")

    def _note_adapter(self, _: object, *args: Any, **kwargs: Any) -> None:
        """An adapter was loaded; within a refit that says its version.

        An id that is loaded already is left as it is by vLLM, unless it is to be loaded in place:
        then what runs with it moves on as well, nobody knows where.
        """
        (adapter,) = (*args, *kwargs.values())
        number = adapter.lora_int_id
        if number in self._adapters and not getattr(adapter, "load_inplace", False):
            return
        self._adapters.pop(number, None)
        for running in self._running.values():
            if running.adapter is not None and running.adapter.lora_int_id == number:
                running.spans = ((0, LARGEST, 0, LARGEST),)
        loaded = (self._refit, self._version_ahead) if self._open else (self._refit, None)
        remember(self._adapters, number, loaded)

    def _note_removed(self, _: object, *args: Any, **kwargs: Any) -> None:
        """An adapter was unloaded: its id may come again with other weights."""
        (number,) = (*args, *kwargs.values())
        self._adapters.pop(number, None)

    # The running vLLM.

    def _attach(self) -> list[str]:
        """Wrap what calls are followed with; return the names of what this vLLM lacks."""
        front, processor = self._front, self._processor
        needed: dict[str, Any] = {
            "add_request": front,
            "engine_core": front,
            "request_states": processor,
            "_finish_request": processor,
            "abort_requests": processor,
        }
        missing = [name for name, owner in needed.items() if not hasattr(owner, name)]
        if missing:
            self._complain(f"this version cannot be followed, it has no {', '.join(missing)}")
            return missing
        self._wrap(front, "add_request", self._capturing(front.add_request))
        self._wrap(processor, "add_request", self._linking(processor.add_request))
        self._wrap(processor, "_finish_request", self._finishing(processor._finish_request))
        self._wrap(processor, "abort_requests", self._aborting(processor.abort_requests))
        for owner, name, ours in self._pauses.wrappers(front, self._core):
            self._wrap(owner, name, ours)
        self._ended_tokens = -sum(map(_num_output_tokens, processor.request_states.values()))
        self._watch(front, "add_lora", self._note_adapter)
        self._watch(front, "remove_lora", self._note_removed)
        self._watch(front, "update_weight_version", self._note_label)
        self._watch(front, "set_weight_version", self._note_label)
        return []

    def _wrap(self, owner: Any, attribute: str, ours: Any) -> None:
        self._wrapped.append((owner, attribute, ours, _own(owner, attribute)))
        setattr(owner, attribute, ours)

    def _watch(self, owner: Any, attribute: str, note: Callable[..., None]) -> None:
        """Call ``note`` with what a method returned and was called with, where it succeeded."""
        original = getattr(owner, attribute, None)
        if original is None:
            return

        @wraps(original)
        def watched(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self._guarded(note, result, *args, **kwargs)
            return result

        @wraps(original)
        async def watched_coroutine(*args: Any, **kwargs: Any) -> Any:
            result = await original(*args, **kwargs)
            self._guarded(note, result, *args, **kwargs)
            return result

        waits = inspect.iscoroutinefunction(original)
        self._wrap(owner, attribute, watched_coroutine if waits else watched)

    def _linking(self, original: Any) -> Any:
        """Know a call's state from when the front end has one: its task has just submitted it."""

        @wraps(original)
        def add_request(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            submitted = _submitted.get()
            if not submitted:
                return result
            try:
                request = args[0] if args else kwargs["request"]
                state = self._processor.request_states.get(request.request_id)
                if state is None or state.request_index >= len(submitted):
                    return result
                running = submitted[int(state.request_index)]
                if running.state is None and not running.ended:  # else input that streams
                    running.state = state
                    self._by_request[state.request_id] = running
                    if running.adapter is None and state.lora_request is not None:
                        self._bind(running, state.lora_request)  # the engine's default
                    # The list itself, which grows in place, is all that a cut has to look at.
                    output: Sized | None = getattr(state.detokenizer, "token_ids", None)
                    if output is None or len(output) or not self._lists_are_outputs:
                        output = _Output(state.detokenizer)
                    running.output = output
                    if running.call in self._outputs:
                        self._outputs[running.call] = output
            except Exception as error:  # noqa: BLE001  # see `_guarded`
                self._complain_of(error)
            return result

        return add_request

    def _finishing(self, original: Any) -> Any:
        @wraps(original)
        def finish_request(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            try:
                state = args[0] if args else kwargs["req_state"]
                running = self._by_request.get(state.request_id)
                if running is None:
                    self._ended_tokens += _num_output_tokens(state)
                else:
                    self._end(running)
            except Exception as error:  # noqa: BLE001  # see `_guarded`
                self._complain_of(error)
            return result

        return finish_request

    def _capturing(self, original: Any) -> Any:
        """Make of ``add_request`` one that makes the calls of what it submits."""

        def begin(args: Any, kwargs: Any) -> list[_Running]:
            begun: list[_Running] = []
            capture = capturing()
            if capture is not None:
                begun = self._guarded(self._begin, capture, args, kwargs) or begun
            if begun or _submitted.get():
                # It is left as it is afterwards: input that streams is submitted by tasks of its
                # own, and whatever this task submits next sets it anew.
                _submitted.set(begun)
            return begun

        @wraps(original)
        async def add_request(*args: Any, **kwargs: Any) -> Any:
            begun = begin(args, kwargs)
            try:
                return await original(*args, **kwargs)
            except BaseException:
                for running in begun:
                    self._guarded(self._end, running)
                raise

        @wraps(original)
        def add_request_blocking(*args: Any, **kwargs: Any) -> Any:
            begun = begin(args, kwargs)
            try:
                return original(*args, **kwargs)
            except BaseException:
                for running in begun:
                    self._guarded(self._end, running)
                raise

        return add_request_blocking if self._blocks else add_request

    def _own_loop(self) -> asyncio.AbstractEventLoop | None:
        handler: asyncio.Task[None] | None = getattr(self._front, "output_handler", None)
        return self._loop if handler is None or self._missing else handler.get_loop()

    def submit(
        self, work: Callable[[], None], failed: Callable[[], object] = lambda: None
    ) -> Future[None]:
        """Do work on the engine's own loop, at once where this is it, else as the next thing there.

        Whatever the caller does next reaches that loop later, so that nobody has to wait for more.
        """
        loop = self._own_loop()
        if loop is None or loop is _current_loop():
            try:
                work()
            except Exception as error:  # noqa: BLE001  # whoever waits hears of it
                return _settled(Future(), error, partial(self._guarded, failed))
            return _TAKEN
        taken: Future[None] = Future()

        def do() -> None:
            try:
                work()
            except Exception as error:  # noqa: BLE001  # whoever waits hears of it
                _settled(taken, error, partial(self._guarded, failed))
            else:
                _settled(taken)

        try:
            loop.call_soon_threadsafe(do)
        except RuntimeError as error:  # it is closed
            _settled(taken, error, partial(self._guarded, failed))
        if not loop.is_running():
            _settled(taken)  # whoever waited would keep it from running
        return taken

    def _ask(self, method: str, *args: Any, then: Callable[[Any], None]) -> None:
        """Send a message to the engine's core now, and have ``then`` called with what it answers.

        A task would send it when the loop comes round, and what its caller sends until then would
        overtake it; and a task would hear of the answer after those who wait for a later one. So
        the steps of the client's coroutine are taken by hand.
        """
        # Not the client's method of that name: that may start tasks to send.
        steps = self._core.call_utility_async(method, *args).__await__()

        def step(_: object = None) -> None:
            try:
                waits_for = next(steps)
            except StopIteration as stop:
                self._guarded(then, stop.value)
            except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001  # the answer
                self._guarded(then, error)
            else:
                waits_for.add_done_callback(step)

        step()

    def _guarded(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Keep what goes wrong here from vLLM, and from who called it."""
        try:
            return work(*args, **kwargs)
        except Exception as error:  # noqa: BLE001  # the guard of this file
            self._complain_of(error)
            return None

    def _complain_of(self, error: Exception) -> None:
        self._complain(f"{type(error).__name__}: what it says of calls is incomplete", error)

    def _complain(self, what: str, error: BaseException | None = None) -> None:
        """Log, the first time."""
        if what not in self._complaints:
            self._complaints.add(what)
            _log.warning("rl_staleness: engine %r: %s", self._name, what, exc_info=error)


@cache
def _vllm(module: str) -> Any:
    """A module of vLLM, which is there when its engine is."""
    return importlib.import_module(f"vllm.{module}")


def _argument(args: Sequence[Any], kwargs: Mapping[str, Any], place: int, name: str) -> Any:
    return args[place] if len(args) > place else kwargs.get(name)


def _own(owner: Any, attribute: str) -> Any:
    """What an object has itself, not from its class."""
    return owner.__dict__.get(attribute)


def _num_output_tokens(state: Any) -> int:
    detokenizer = state.detokenizer
    return 0 if detokenizer is None else int(detokenizer.num_output_tokens())  # it pools


def _settled(
    taken: Future[None],
    error: Exception | None = None,
    failed: Callable[[], object] = lambda: None,
) -> Future[None]:
    """Say to who waits how it went, if anybody still does."""
    if error is not None:
        failed()
    with contextlib.suppress(InvalidStateError):
        taken.set_result(None) if error is None else taken.set_exception(error)
    return taken


_TAKEN = _settled(Future())
"""What was done at once."""


def _current_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
