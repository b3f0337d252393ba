"""The W&B sink on the real client: neither the trainer's rows nor ours are lost or moved."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import itertools
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import msgspec
import pytest
from hypothesis import strategies as st

wandb = pytest.importorskip("wandb")

from rl_staleness import StalenessCallback  # noqa: E402
from rl_staleness.integrations import wandb as integration  # noqa: E402
from rl_staleness.integrations import wandb_files, wandb_rows  # noqa: E402
from rl_staleness.integrations.wandb import WandbSink, active_sink  # noqa: E402
from rl_staleness.integrations.wandb_rows import AXIS, HISTOGRAM  # noqa: E402
from rl_staleness.plot import plot  # noqa: E402
from rl_staleness.report import report  # noqa: E402
from rl_staleness.sinks import Sink  # noqa: E402
from rl_staleness.staleness import LOGGED, StepStaleness, Versions, measure  # noqa: E402
from tests.wandb_files import RunFile  # noqa: E402
from tests.wandb_stub import StubServer  # noqa: E402

STEPS = 12


def numbers(step: int, tokens_by_age: dict[int, int] | None = None) -> StepStaleness:
    """A step's numbers; the batch age is another one at every step."""
    at = 1000
    if tokens_by_age is None:
        tokens_by_age = {0: 100, 1: step}
    return measure(
        {at: {(at - age, at - age): count for age, count in tokens_by_age.items()}},
        {},
        arrived=sum(at * count for count in tokens_by_age.values()),
        refit_versions=Versions(),
        late_updates=0,
        complete=True,
        step=step,
        version=at,
        spanning_calls=0,
        violations=0,
        dropped_tokens=0,
        refit_seconds=0.5,
    )


@pytest.fixture(autouse=True)
def own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test touches the user's files or leaves a run open."""
    for name in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.chdir(tmp_path)
    yield
    if wandb.run is not None:
        wandb.run.finish()


def settings(**more: Any) -> Any:
    """For a quiet run; never shared between runs, `reinit` leaks through it."""
    return wandb.Settings(
        silent=True, console="off", x_disable_stats=True, x_disable_machine_info=True, **more
    )


def new_run(mode: str = "offline", *, reinit: str | None = None, **more: Any) -> Any:
    """A run in the current folder."""
    return wandb.init(
        project="p", mode=mode, dir=os.getcwd(), reinit=reinit, settings=settings(), **more
    )


def online(stub: StubServer, *, mode: str = "online", **more: Any) -> Any:
    """A run on the stub."""
    own = settings(base_url=stub.url, api_key="0" * 40)
    return wandb.init(project="p", entity="e", mode=mode, dir=os.getcwd(), settings=own, **more)


@pytest.fixture
def stub() -> Iterator[StubServer]:
    """A W&B server of the test's own."""
    server = StubServer()
    yield server
    if wandb.run is not None:  # while it answers
        wandb.run.finish()
    server.stop()


class Watched(WandbSink):
    """A sink whose thread can be waited for."""

    handled = 0

    def _take(self, run: Any, step: StepStaleness) -> None:
        try:
            super()._take(run, step)
        finally:
            self.handled += 1

    def settle(self) -> None:
        """Let the thread finish what it was given."""
        end = time.monotonic() + 20
        while self.handled < self._logged:
            assert time.monotonic() < end, "the sink's thread is stuck"
            time.sleep(0.001)


def close(sink: WandbSink, trace: str | None = None, timeout: float = 20.0) -> str | None:
    """Close the sink."""
    return sink.close(trace=trace, timeout=timeout)


def ends_in_time(call: Callable[[], str | None]) -> str | None:
    """What a call says that ends while its server does nothing, or long before its deadline."""
    said: list[str | None] = []
    thread = threading.Thread(target=lambda: said.append(call()), daemon=True)
    thread.start()
    thread.join(120)
    assert said, "it did not end"
    return said[0]


def points(rows: list[dict[str, Any]]) -> list[tuple[int, float]]:
    """Our rows: where on our axis, and the batch age there."""
    return [(row[AXIS], row["staleness/batch_age"]) for row in rows if AXIS in row]


def expected(steps: range = range(1, STEPS + 1)) -> list[tuple[int, float]]:
    """The same, as it has to be."""
    return [(step, numbers(step).batch_age or 0.0) for step in steps]


# The matrix: how trainers log. Each notes the rows that it expects to find, with their place.

Log = Callable[[Any, int], list[dict[str, Any]]]


def hf(run: Any, k: int) -> list[dict[str, Any]]:
    run.log({"train/loss": k, "train/global_step": k})
    return [{"train/loss": k, "train/global_step": k}]


def hf5(run: Any, k: int) -> list[dict[str, Any]]:
    return hf(run, k) if k % 5 == 0 else []


def hf3(run: Any, k: int) -> list[dict[str, Any]]:
    rows = [{f"train/{part}": k, "train/global_step": k} for part in ("loss", "eval", "time")]
    for row in rows:
        run.log(row)
    return rows


def ex(run: Any, k: int) -> list[dict[str, Any]]:
    run.log({"loss": k}, step=k)
    return [{"loss": k, "_step": k}]


def ex5(run: Any, k: int) -> list[dict[str, Any]]:
    return ex(run, k) if k % 5 == 0 else []


def nemo(run: Any, k: int) -> list[dict[str, Any]]:
    run.log({"loss": k}, step=k, commit=False)
    run.log({"time": k}, step=k, commit=False)
    run.log({"last": k}, step=k, commit=True)
    return [{"loss": k, "time": k, "last": k, "_step": k}]


def areal(run: Any, k: int) -> list[dict[str, Any]]:
    rows = []
    for n in (2 * k, 2 * k + 1):
        run.log({"loss": n}, step=n)
        rows.append({"loss": n, "_step": n})
    return rows


def roll4(run: Any, k: int) -> list[dict[str, Any]]:
    if k % 4:
        return []
    run.log({"reward": k}, step=k // 4)
    return [{"reward": k, "_step": k // 4}]


def tok(run: Any, k: int) -> list[dict[str, Any]]:
    run.log({"loss": k}, step=4096 * k)
    return [{"loss": k, "_step": 4096 * k}]


PATTERNS = (hf, hf5, hf3, ex, ex5, nemo, areal, roll4, tok)
GLOBBED = (hf, hf5, hf3)


def define_glob(run: Any, axis: str) -> None:
    """What Hugging Face and Lightning do."""
    run.define_metric(axis)
    run.define_metric("*", step_metric=axis, step_sync=True)


def holds(row: dict[str, Any], part: dict[str, Any]) -> bool:
    return part.items() <= row.items()


@pytest.mark.parametrize("pace", ["settled", "hasty"])
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda p: p.__name__)
def test_no_row_is_lost_or_moved(pattern: Log, before: bool, pace: str) -> None:
    """However a trainer logs: its rows are where they would be without us, ours are all there."""
    run = new_run()
    if pattern in GLOBBED:
        define_glob(run, "train/global_step")
    sink = Watched()
    theirs = []
    for k in range(1, STEPS + 1):
        if before:
            sink.log(numbers(k))
        if pace == "settled":
            sink.settle()
        theirs += pattern(run, k)
        if not before:
            sink.log(numbers(k))
    assert close(sink) is None
    run.finish()
    file = RunFile(run.sync_dir)
    assert sorted(points(file.rows)) == expected()
    if pattern in GLOBBED and pace == "settled":  # nothing had to wait for the end
        assert points(file.rows) == expected()
    assert [row for row in theirs if sum(holds(r, row) for r in file.rows) != 1] == []
    assert file.summary["staleness/batch_age"] == expected()[-1][1]
    assert file.summary[AXIS] == STEPS


def test_the_summary_is_of_the_newest_step() -> None:
    """Also where the newest has its row and older ones get theirs at the end."""
    run = new_run()
    sink = Watched()
    for k in range(1, 12):
        sink.log(numbers(k))
        sink.settle()
        ex5(run, k)
    assert close(sink) is None
    run.finish()
    file = RunFile(run.sync_dir)
    assert points(file.rows)[-1][0] < 11
    assert (file.summary[AXIS], file.summary["staleness/batch_age"]) == expected(range(11, 12))[0]


@pytest.mark.parametrize("axis", ["train/global_step", "trainer/global_step"])
def test_a_glob_of_the_trainer_gets_hold_of_no_row(axis: str) -> None:
    """Hugging Face's and Lightning's "*" puts its axis into no row of ours, in 40 repeats."""
    run = new_run()
    define_glob(run, axis)
    run.log({"loss": 1, axis: 1})
    sink = Watched()
    sink.log(numbers(1))
    sink.settle()
    for repeat in range(40):
        run.log({})
        run.log({"loss": repeat, axis: repeat})
        sink.log(numbers(repeat + 2))
        sink.settle()
    assert close(sink) is None
    run.finish()
    rows = RunFile(run.sync_dir).rows
    foreign = [row for row in rows if AXIS in row and axis in row and "loss" not in row]
    assert foreign == []


def test_keys_are_declared_by_their_exact_names() -> None:
    """One definition a key, none of them a glob; the axis is hidden."""
    run = new_run()
    sink = WandbSink()
    for k in (1, 2):
        sink.log(numbers(k))
    close(sink)
    run.finish()
    metrics = RunFile(run.sync_dir).of("metric")
    ours = [*(f"staleness/{name}" for name in LOGGED), HISTOGRAM]
    parts = [f"{HISTOGRAM}.{part}" for part in ("_type", "values", "bins")]
    assert [m.name for m in metrics if m.step_metric == AXIS] == ours + parts
    assert [(m.name, m.options.hidden) for m in metrics if not m.step_metric] == [(AXIS, True)]
    assert [m.glob_name for m in metrics if m.glob_name] == []


def test_definitions_are_in_the_config_under_one_key() -> None:
    """A reader of the run sees what the numbers mean, also where an older version noted others."""
    run = new_run(config={"rl_staleness": {"unit": "steps"}, "lr": 1})
    sink = WandbSink()
    sink.log(numbers(1))
    close(sink)
    assert run.config["rl_staleness"]["unit"] == "policy updates"
    assert run.config["lr"] == 1


def test_a_row_holds_every_number_and_a_histogram() -> None:
    """The fifteen scalars are the floats of the step, the bins of the histogram are ages."""
    run = new_run()
    sink = WandbSink()
    step = numbers(3, {0: 30, 2: 10})
    sink.log(step)
    close(sink)
    run.finish()
    (row,) = RunFile(run.sync_dir).rows
    assert {k: v for k, v in row.items() if k.startswith("staleness/age_histogram")} == {
        f"{HISTOGRAM}._type": "histogram",
        f"{HISTOGRAM}.values": [30, 0, 10],
        f"{HISTOGRAM}.bins": [0, 1, 2, 3],
    }
    scalars = {k: row[k] for k in row if k.startswith("staleness/") and HISTOGRAM not in k}
    assert scalars == {**step.metrics(), AXIS: 3}
    assert len(scalars) == 16


def test_a_step_without_tokens_leaves_out_what_it_does_not_have() -> None:
    """No null, no zero: the key is not there; the counts are."""
    run = new_run()
    sink = WandbSink()
    sink.log(numbers(1, {}))
    assert close(sink) is None
    run.finish()
    (row,) = RunFile(run.sync_dir).rows
    assert "staleness/batch_age" not in row
    assert f"{HISTOGRAM}.values" not in row
    assert row["staleness/tokens"] == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_left_out_and_told(value: float) -> None:
    """W&B would store it; the row's other numbers are there."""
    run = new_run()
    sink = WandbSink()
    sink.log(msgspec.structs.replace(numbers(1), refit_seconds=value))
    assert close(sink) == "1 values are left out because they are not finite"
    run.finish()
    (row,) = RunFile(run.sync_dir).rows
    assert "staleness/refit_seconds" not in row
    assert points([row]) == expected(range(1, 2))


@hypothesis.settings(deadline=None)
@hypothesis.given(
    st.dictionaries(
        st.integers(-600, 600) | st.integers(-(2**62), 2**62),
        st.integers(1, 2**40),
        min_size=1,
        max_size=20,
    )
)
def test_bins(tokens_by_age: dict[int, int]) -> None:
    """Every token is in the bin of its age; the edges are whole numbers, at most 512 bins."""
    counts, edges = wandb_rows.bins_of(tokens_by_age)
    assert len(counts) <= wandb_rows.BINS
    assert len(edges) == len(counts) + 1
    bins = list(itertools.pairwise(edges))
    widths = {stop - start for start, stop in bins}
    assert len(widths) == 1
    for count, (start, stop) in zip(counts, bins, strict=True):
        assert count == sum(n for age, n in tokens_by_age.items() if start <= age < stop)
    assert sum(counts) == sum(tokens_by_age.values())
    if max(tokens_by_age) - min(tokens_by_age) < wandb_rows.BINS:
        assert widths == {1}
    wandb.Histogram(np_histogram=(counts, edges))


# Which run.


def test_the_sink_is_one() -> None:
    """It has what the callback asks for."""
    assert isinstance(WandbSink(), Sink)


@pytest.mark.parametrize("found", [None, types.ModuleType("wandb")], ids=["absent", "a folder"])
def test_without_wandb_it_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, found: types.ModuleType | None
) -> None:
    """Asked for and not installed; a folder wandb/ of old runs is not the package."""
    monkeypatch.setitem(sys.modules, "wandb", found)
    with pytest.raises(ImportError, match=r"pip install 'rl-staleness\[wandb\]'"):
        WandbSink()
    assert active_sink() is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"run": "e/p/abc"}, "^run: 'e/p/abc'"),
        ({"alert_above": float("nan")}, "^alert_above: nan"),
        ({"alert_coverage_below": float("inf")}, "^alert_coverage_below: inf"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    """What cannot be used is refused at construction, by name."""
    with pytest.raises(ValueError, match=message):
        WandbSink(**arguments)


def test_without_a_run_nothing_is_made_and_close_says_what_to_do() -> None:
    """The library creates no run."""
    assert active_sink() is None
    sink = WandbSink()
    for k in (1, 2):
        sink.log(numbers(k))
    assert close(sink) == (
        "W&B did not take 2 of 2 steps; no run was active: call wandb.init() first, or pass run="
    )
    assert wandb.run is None
    assert not Path("wandb").exists()


def test_without_a_run_and_without_steps_there_is_nothing_to_say(tmp_path: Path) -> None:
    """An empty training is no complaint."""
    assert close(WandbSink(), trace=str(tmp_path / "trace")) is None


def test_the_run_is_only_a_guest_house() -> None:
    """It is neither finished nor renamed, and goes on after `close`."""
    run = new_run(name="theirs", tags=["a"], notes="n")
    sink = active_sink()
    assert sink is not None
    sink.log(numbers(1))
    assert close(sink) is None
    assert close(sink) is None
    assert wandb.run is run
    assert (run.name, run.tags, run.notes) == ("theirs", ("a",), "n")
    run.log({"loss": 1.0})
    run.finish()
    assert any(row.get("loss") == 1 for row in RunFile(run.sync_dir).rows)
    with pytest.raises(RuntimeError, match="step 2 after close"):
        sink.log(numbers(2))


def test_a_run_that_starts_late_gets_the_steps_before_it() -> None:
    """The sink looks again at every step."""
    sink = WandbSink()
    for k in (1, 2):
        sink.log(numbers(k))
    run = new_run()
    for k in (3, 4):
        sink.log(numbers(k))
    assert close(sink) is None
    run.finish()
    assert sorted(points(RunFile(run.sync_dir).rows)) == expected(range(1, 5))


def test_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the bound the oldest are left out, counted; the inbox of a stuck thread takes none."""
    monkeypatch.setattr(integration, "KEPT", 3)
    sink = Watched()
    for k in range(1, 6):
        sink.log(numbers(k))
        sink.settle()
    run = new_run()
    assert close(sink) == "W&B did not take 2 of 5 steps"
    run.finish()
    assert points(RunFile(run.sync_dir).rows) == expected(range(3, 6))
    sink, goes_on = WandbSink(), threading.Event()
    monkeypatch.setattr(sink, "_take", lambda *_: goes_on.wait(20))
    for k in range(1, 8):
        sink.log(numbers(k))
    assert sink._inbox.qsize() == 3
    goes_on.set()


@pytest.mark.parametrize("reinit", ["finish_previous", "return_previous", "create_new"])
def test_another_run_gets_the_steps_from_then_on(reinit: str) -> None:
    """What `wandb.init` does while a run is active decides which run the next step goes to."""
    first = new_run()
    sink = Watched()
    for k in (1, 2):
        sink.log(numbers(k))
        sink.settle()
        first.log({"loss": k})
    second = new_run(reinit=reinit)
    for k in (3, 4):
        sink.log(numbers(k))
        sink.settle()
        (first if reinit == "create_new" else second).log({"loss": k})
    assert close(sink) is None
    second.finish()
    first.finish()
    in_first = [1, 2] if reinit == "finish_previous" else [1, 2, 3, 4]
    in_second = {"finish_previous": [3, 4], "return_previous": in_first, "create_new": []}[reinit]
    for run, steps in ((first, in_first), (second, in_second)):
        rows = RunFile(run.sync_dir).rows
        assert points(rows) == [(k, numbers(k).batch_age) for k in steps]


def test_a_run_that_is_passed_is_the_one() -> None:
    """`create_new` leaves wandb.run empty; another active run is not touched."""
    active = new_run()
    given_run = new_run(reinit="create_new")
    sink = WandbSink(given_run)
    for k in (1, 2, 3):
        sink.log(numbers(k))
    assert close(sink) is None
    given_run.finish()
    active.finish()
    assert points(RunFile(given_run.sync_dir).rows) == expected(range(1, 4))
    assert RunFile(active.sync_dir).rows == []


def test_a_disabled_run_is_no_complaint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user wants nothing, nothing is missing, nothing is written."""
    traced()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run = new_run(mode="disabled")
    sink = WandbSink(run)
    for k in range(1, 4):
        sink.log(numbers(k))
    assert close(sink, trace=str(tmp_path / "trace")) is None
    assert list(tmp_path.glob("**/staleness-*")) == []


def test_a_run_that_is_finished_before_us(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """No exception reaches anybody, nothing hangs; what is missing is counted, logged once."""
    traced()
    run = new_run()
    sink = Watched()
    sink.log(numbers(1))
    sink.settle()
    run.finish()
    with caplog.at_level(logging.ERROR):
        for k in (2, 3):
            sink.log(numbers(k))
        line = ends_in_time(lambda: close(sink, trace=str(tmp_path / "trace"), timeout=3600))
    assert line is not None
    assert line.startswith("W&B did not take 2 of 3 steps and the trace; ")
    assert [r.message for r in caplog.records].count(
        "rl_staleness: giving a step to W&B failed; training goes on, this is logged once"
    ) == 1
    assert points(RunFile(run.sync_dir).rows) == expected(range(1, 2))


def test_the_steps_of_a_finished_run_can_be_given_to_another() -> None:
    """What a run missed is in the trace; a sink of a new run takes the same numbers."""
    with StalenessCallback() as staleness:
        for _ in range(3):
            staleness.on_step([])
    from rl_staleness.trace import steps

    run = new_run()
    sink = WandbSink(run)
    for step in steps(Path("rollout_trace.jsonl")):
        sink.log(step)
    assert close(sink) is None
    run.finish()
    assert sorted(row[AXIS] for row in RunFile(run.sync_dir).rows) == [1, 2, 3]


def test_a_fork_goes_on_with_the_run() -> None:
    """A thread does not survive a fork; the sink starts another."""
    run = new_run()
    sink = Watched()
    sink.log(numbers(1))
    sink.settle()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            sink.log(numbers(2))
            status = 0 if close(sink) is None else 2
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    run.finish()
    assert sorted(points(RunFile(run.sync_dir).rows)) == expected(range(1, 3))


# The artifact.


FILES = ["rollout_trace.jsonl.gz", "staleness.png", "staleness_report.html"]


def traced(path: str = "trace") -> Path:
    """A trace of one empty step."""
    with StalenessCallback(trace=path, sinks=[]) as staleness:
        staleness.on_step([])
    return Path(path)


def record(steps: int = 3) -> tuple[Path, Any]:
    """A trace that the callback wrote, with the sink beside it, and the run; it is closed."""
    run = new_run()
    with StalenessCallback(sinks=[WandbSink()]) as staleness:
        for k in range(1, steps + 1):
            with staleness.group() as group:
                pass
            staleness.on_publish(group)
            staleness.on_step([group])
            run.log({"loss": k})
    return Path("rollout_trace.jsonl"), run


def test_the_trace_is_an_artifact_of_the_run() -> None:
    """Packed, under the run's name, with what a reader wants to know before he fetches it."""
    trace, run = record()
    run.finish()
    (artifact,) = RunFile(run.sync_dir).of("artifact")
    assert artifact.name == f"staleness-trace-{run.id}"
    assert artifact.type == "staleness-trace"
    assert sorted(artifact.aliases) == ["final", "latest"]
    assert json.loads(artifact.metadata) == {
        "schema": 1,
        "rows": len(trace.read_bytes().splitlines()),
        "first_step": 1,
        "last_step": 3,
        "sha256": hashlib.sha256(trace.read_bytes()).hexdigest(),
    }
    files = {entry.path: Path(entry.local_path) for entry in artifact.manifest.contents}
    assert sorted(files) == FILES
    assert all(path.is_relative_to(run.sync_dir) for path in files.values())
    assert gzip.decompress(files[FILES[0]].read_bytes()) == trace.read_bytes()
    assert files["staleness_report.html"].read_text() == report(trace)
    assert files["staleness.png"].read_bytes() == plot(trace)


def test_at_a_checkpoint_the_whole_lines_are_attached() -> None:
    """Another version of the artifact, under the number of the last step."""
    trace, run = record()
    whole = trace.read_bytes()
    trace.write_bytes(whole + b'{"event":"step_tr')
    sink = WandbSink(run)
    sink.attach(str(trace))
    end = time.monotonic() + 240  # it draws, beside whatever else this machine does
    while sink._files._is_working:
        assert time.monotonic() < end
        time.sleep(0.01)
    run.finish()
    artifact = RunFile(run.sync_dir).of("artifact")[-1]
    assert sorted(artifact.aliases) == ["latest", "step-3"]
    files = {entry.path: Path(entry.local_path) for entry in artifact.manifest.contents}
    assert sorted(files) == FILES
    assert gzip.decompress(files[FILES[0]].read_bytes()) == whole


def test_the_trace_is_attached_without_what_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line names what is missing and the way to get it."""
    for library in ("plotly", "matplotlib"):
        (tmp_path / "absent").mkdir(exist_ok=True)
        (tmp_path / "absent" / f"{library}.py").write_text("raise ImportError('not here')")
    monkeypatch.syspath_prepend(str(tmp_path / "absent"))
    trace, run = record()
    sink = WandbSink(run)
    sink.log(numbers(1))
    assert close(sink, trace=str(trace)) == (
        "staleness_report.html is not attached"
        " (the report needs plotly: pip install 'rl-staleness[report]');"
        " staleness.png is not attached"
        " (the picture needs matplotlib: pip install 'rl-staleness[report]')"
    )
    run.finish()
    artifact = RunFile(run.sync_dir).of("artifact")[-1]
    assert [entry.path for entry in artifact.manifest.contents] == FILES[:1]


FULL = """
import resource, sys
from tests.test_wandb import *
run = new_run()
sink = WandbSink()
sink.log(numbers(1))
run.log({"loss": 1})
resource.setrlimit(resource.RLIMIT_FSIZE, (64, resource.RLIM_INFINITY))
line = close(sink, trace=sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
run.finish()
print(json.dumps([run.sync_dir, line]))
"""


def test_a_full_disk_costs_the_files_alone() -> None:
    """A process whose files may have 64 bytes: no exception, and the line says why."""
    folder, line = json.loads(output_of(script(FULL, str(traced()))))
    assert line.startswith("W&B did not take the trace; OSError: [Errno 27] File too large")
    assert points(RunFile(folder).rows) == expected(range(1, 2))
    assert list(Path(folder).glob("staleness-*")) == []


def test_the_files_say_the_same_by_wandbs_own_reader() -> None:
    """`wandb leet inspect` and the reader of these tests agree on rows and artifact."""
    _, run = record()
    run.finish()
    file = RunFile(run.sync_dir)
    program = Path(sys.executable).with_name("wandb")
    output = subprocess.run(
        [program, "leet", "inspect", "--json", file.path],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    records = [json.loads(line) for line in output.splitlines()]
    theirs = [r["history"]["item"] for r in records if r["type"] == "history"]
    assert theirs == file.rows
    assert sorted(row[AXIS] for row in theirs if AXIS in row) == [1, 2, 3]
    (artifact,) = [r["artifact"] for r in records if r["type"] == "artifact"]
    assert artifact["name"] == f"staleness-trace-{run.id}"


def test_an_artifact_needs_no_folder_of_the_run(tmp_path: Path) -> None:
    """Where the run's folder cannot be written the packed trace is put elsewhere."""
    run = types.SimpleNamespace(sync_dir="/proc/run")
    folder = Path(wandb_files._folder(run))
    (folder / "file").write_text("")
    (folder / "file").unlink()
    folder.rmdir()


def test_home_and_folder_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B falls back to a temporary folder; nothing of ours wants a staging area in HOME."""
    for name in ("HOME", "WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, "/proc/home")
    run = wandb.init(project="p", mode="offline", dir="/proc/runs", settings=settings())
    traced()
    sink = WandbSink()
    sink.log(numbers(1))
    assert close(sink, trace="trace") is None
    run.finish()
    file = RunFile(run.sync_dir)
    assert points(file.rows) == expected(range(1, 2))
    assert [a.name for a in file.of("artifact")] == [f"staleness-trace-{run.id}"]


def test_a_trace_that_is_gone_is_told(tmp_path: Path) -> None:
    """The numbers are there, the line names the rest."""
    run = new_run()
    sink = WandbSink()
    sink.log(numbers(1))
    line = close(sink, trace=str(tmp_path / "gone.jsonl"))
    assert line is not None
    assert line.startswith("W&B did not take the trace; FileNotFoundError: ")
    run.finish()
    assert points(RunFile(run.sync_dir).rows) == expected(range(1, 2))


# Alerts.


def test_alerts_once_a_crossing() -> None:
    """Opt-in; not again before the value was back; a step without the value is no news."""
    run = new_run()
    sink = WandbSink(alert_above=1.5, alert_coverage_below=0.5)
    ages = [{1: 1}, {2: 1}, {}, {3: 1}, {1: 1}, {2: 1}]
    for k, tokens_by_age in enumerate(ages, 1):
        coverage = 0.25 if k > 4 else 0.75
        sink.log(msgspec.structs.replace(numbers(k, tokens_by_age), coverage=coverage))
    assert close(sink) is None
    run.finish()
    assert [(a.title, a.text) for a in RunFile(run.sync_dir).of("alert")] == [
        ("Batch age above 1.5", "Batch age is 2, above 1.5."),
        ("Coverage below 0.5", "Coverage is 0.25, below 0.5."),
        ("Batch age above 1.5", "Batch age is 2, above 1.5."),
    ]


def test_no_alert_unless_asked_for() -> None:
    """With a dead server an alert makes `finish` ignore its limit in time."""
    run = new_run()
    sink = WandbSink()
    sink.log(numbers(1, {1000: 1}))
    close(sink)
    run.finish()
    assert RunFile(run.sync_dir).of("alert") == []


# Online.


def test_online(stub: StubServer, tmp_path: Path) -> None:
    """What the server gets: rows and the artifact with what it says of the trace."""
    traced()
    run = online(stub)
    sink = WandbSink()
    for k in range(1, STEPS + 1):
        sink.log(numbers(k))
        hf(run, k)
    for _ in range(2):
        assert close(sink, trace=str(tmp_path / "trace")) is None
    run.finish()
    assert sorted(points(stub.rows(run.id))) == expected()
    (artifact,) = stub.artifacts
    assert artifact["artifactCollectionName"] == f"staleness-trace-{run.id}"
    assert sorted(a["alias"] for a in artifact["aliases"]) == ["final", "latest"]
    assert json.loads(artifact["metadata"])["rows"] == 3


def test_the_server_goes_away_and_comes_back(stub: StubServer, tmp_path: Path) -> None:
    """Nobody waits, `close` keeps its limit; when the server is back every row gets there."""
    traced()
    run = online(stub)
    sink = Watched()
    for k in range(1, STEPS + 1):
        if k == 4:
            stub.stop()
        sink.log(numbers(k))
        sink.settle()
        hf(run, k)
    line = close(sink, trace=str(tmp_path / "trace"), timeout=1.0)
    assert line == "W&B did not take the trace; no answer within 1 s"
    stub.start()
    run.finish()
    assert sorted(points(stub.rows(run.id))) == expected()
    assert [row["train/loss"] for row in stub.rows(run.id) if "train/loss" in row] == [
        *range(1, STEPS + 1)
    ]


@pytest.mark.parametrize("status", [401, 404, 500])
def test_a_server_that_refuses(stub: StubServer, tmp_path: Path, status: int) -> None:
    """A token that expired, a run that was deleted: the training sees nothing of it."""
    traced()
    run = online(stub)
    sink = Watched()
    sink.log(numbers(1))
    sink.settle()
    stub.refuse = status
    for k in (2, 3):
        sink.log(numbers(k))
        hf(run, k)
    line = ends_in_time(lambda: close(sink, trace=str(tmp_path / "trace"), timeout=2.0))
    assert line is not None
    assert line.startswith("W&B did not take the trace")
    stub.refuse = None


def test_a_run_that_failed_keeps_its_counter(stub: StubServer) -> None:
    """By default: where an exception ends it, a trainer that names its steps may resume it."""
    theirs = []
    for first in (1, 11):
        run = online(stub, id="failed", resume="allow")
        sink = Watched()
        try:
            for k in range(first, first + 7):
                sink.log(numbers(k))
                sink.settle()
                theirs += ex5(run, k)
            raise RuntimeError("out of memory")
        except RuntimeError:
            line = close(sink)
        run.finish()
        assert line is not None
        assert line.endswith("the run's counter was kept")
    rows = stub.rows("failed")
    assert [row for row in theirs if sum(holds(r, row) for r in rows) != 1] == []


@pytest.mark.parametrize("pattern", [hf, ex, ex5, nemo, roll4, tok], ids=lambda p: p.__name__)
def test_a_resumed_run_goes_on(stub: StubServer, pattern: Log) -> None:
    """The counter of a resumed run is not that of its process; no row falls below it."""
    theirs = []
    for first in (1, 11):
        run = online(stub, id="resumed", resume="allow")
        sink = Watched(keep_counter=True)
        for k in range(first, first + 10):
            sink.log(numbers(k))
            sink.settle()
            theirs += pattern(run, k)
        line = close(sink)
        run.finish()
        if pattern in (ex5, roll4):
            assert line is not None
            assert line.endswith(" of 10 steps; the run's counter was kept")
        else:
            assert line is None
    rows = stub.rows("resumed")
    assert [row for row in theirs if sum(holds(r, row) for r in rows) != 1] == []
    if pattern not in (ex5, roll4):
        assert sorted(points(rows)) == expected(range(1, 21))


WRITER = """
import sys
from tests.test_wandb import *
url, who = sys.argv[1], int(sys.argv[2])
own = settings(base_url=url, api_key="0" * 40, x_primary=who == 0, x_update_finish_state=who == 0)
run = wandb.init(project="p", entity="e", id="shared", mode="shared", settings=own)
sink = WandbSink()
for k in range(1, STEPS + 1):
    if who == 0:
        sink.log(numbers(k))
    run.log({f"loss{who}": k})
assert who == 1 or close(sink) is None
run.finish()
"""


def script(code: str, *arguments: str) -> subprocess.Popen[str]:
    """Another process that runs the code, with a W&B of its own."""
    own = {k: v for k, v in os.environ.items() if k != "WANDB_SERVICE"}
    own["PYTHONPATH"] = str(Path(__file__).parent.parent)
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        env=own,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
    )


def output_of(process: subprocess.Popen[str]) -> str:
    """What it printed, if it ended well."""
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return output


def test_two_processes_share_a_run(stub: StubServer) -> None:
    """In shared mode there is no counter to look at, and none that could be moved."""
    writers = [script(WRITER, stub.url, str(who)) for who in (0, 1)]
    for writer in writers:
        output_of(writer)
    rows = [row for run, row in stub.received if run == "shared"]
    assert sorted(points(rows)) == expected()
    for who in (0, 1):
        assert sorted(r[f"loss{who}"] for r in rows if f"loss{who}" in r) == [*range(1, STEPS + 1)]


# The process ends as it should not.


def core_of(pid: int) -> int:
    """The process in which W&B does its work for another."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (folder / "cmdline").read_text()
            if "wandb-core" in command and f"--pid\0{pid}\0" in command:
                return int(folder.name)
    raise AssertionError("there is none")


DIES = """
import sys
from tests.test_wandb import *
run = new_run()
staleness = StalenessCallback(sinks=[WandbSink()])
for k in range(1, 201):
    staleness.on_step([])
    run.log({"loss": k})
print(run.sync_dir, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_process_that_is_killed(how: signal.Signals) -> None:
    """The trace has every step; W&B has what it wrote by then, on the right place."""
    process = script(DIES)
    assert process.stdout is not None and process.stdin is not None
    folder = process.stdout.readline().strip()
    process.send_signal(how)
    assert process.wait(timeout=30) == -how
    from rl_staleness.trace import steps

    assert [step.step for step in steps(Path("rollout_trace.jsonl"))] == list(range(1, 201))
    rows = RunFile(folder, finished=False).rows
    ours = [row[AXIS] for row in rows if AXIS in row]
    assert ours == list(range(1, len(ours) + 1))


STOPPED = """
import signal, sys
from tests.test_wandb import *
run = new_run()
sink = Watched()
sink.log(numbers(1))
sink.settle()
core = core_of(os.getpid())
os.kill(core, signal.SIGSTOP)
try:
    for k in range(2, 5000):
        sink.log(numbers(k))
    line = sink.close(trace=None, timeout=1.0)
finally:
    os.kill(core, signal.SIGCONT)
print(json.dumps(line))
"""


def test_a_client_that_hangs() -> None:
    """W&B's process is stopped: the training does not wait for it, `close` not beyond its limit."""
    line = json.loads(output_of(script(STOPPED)))
    assert line.startswith("W&B did not take ")
    assert line.endswith(" of 4999 steps; no answer within 1 s")
