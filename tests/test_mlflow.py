"""MLflow for real: what arrives in a run, and what happens when its server does as servers do."""

from __future__ import annotations

import gzip
import json
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rl_staleness import Call, StalenessCallback, steps
from rl_staleness.cli import main
from rl_staleness.plot import plot
from rl_staleness.report import report
from rl_staleness.sinks import Sink
from rl_staleness.staleness import LOGGED, StepStaleness, Versions, measure
from tests.fakes import FakeEngine
from tests.mlflow_places import Place, Proxy, Server, proxy_before

mlflow = pytest.importorskip("mlflow")
module = pytest.importorskip("rl_staleness.integrations.mlflow")
from rl_staleness.integrations import mlflow_outbox, mlflow_points  # noqa: E402

MlflowSink, active_run_sink = module.MlflowSink, module.active_run_sink

ROOT = Path(__file__).resolve().parent.parent
TRACE = "staleness/rollout_trace.jsonl.gz"
FILES = ["staleness.png", TRACE, "staleness_report.html"]
"""Report and picture at the root: MLflow's compare page looks nowhere else."""
SUMMARY = {"staleness/run_mean", "staleness/run_p95", "staleness/run_max"}


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MLflow's tables, made once: that takes long."""
    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    mlflow.MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def store(empty_database: Path, tmp_path: Path) -> Place:
    """A database of the test's own."""
    path = tmp_path / "runs.db"
    shutil.copyfile(empty_database, path)
    client = mlflow.MlflowClient(f"sqlite:///{path}")
    experiment = client.create_experiment("e", artifact_location=str(tmp_path / "artifacts"))
    return Place(f"sqlite:///{path}", experiment, client)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for the session: a start takes half a minute."""
    server = Server(tmp_path_factory.mktemp("server"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def served(server: Server) -> Place:
    """The server's runs, asked for directly."""
    client = mlflow.MlflowClient(server.uri)
    return Place(server.uri, "0", client)


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    """A proxy before the server, not listening yet."""
    with proxy_before(server) as proxy:
        yield proxy


@pytest.fixture
def trainer(store: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """A process whose MLflow looks at the test's database, in a folder of its own."""
    folder = tmp_path / "cwd"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    mlflow.set_tracking_uri(store.uri)
    yield store
    while mlflow.active_run() is not None:
        mlflow.end_run()
    mlflow.set_tracking_uri(None)
    assert os.listdir(folder) == []


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses that suit a test."""
    monkeypatch.setattr(mlflow_outbox, "INTERVAL_SECONDS", 0.05)
    monkeypatch.setattr(mlflow_outbox, "FIRST_PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(mlflow_outbox, "LONGEST_PAUSE_SECONDS", 0.4)


def numbers(step: int, ages: dict[int, int] | None = None) -> StepStaleness:
    """A step that trained tokens of these ages, one token of age 1 by default."""
    ages = {1: 1} if ages is None else ages
    by_version = {(step - age, step - age): count for age, count in ages.items()}
    return measure(
        {step: by_version},
        {},
        arrived=sum(version * count for (version, _), count in by_version.items()),
        refit_versions=Versions(),
        late_updates=0,
        complete=True,
        step=step,
        version=step,
        violations=0,
        dropped_tokens=0,
        refit_seconds=0.1,
        spanning_calls=0,
    )


def train(staleness: StalenessCallback, num_steps: int) -> None:
    """Steps of two calls, one of them cut by the refit before it; every fifth trains nothing."""
    for step in range(1, num_steps + 1):
        version = staleness.version
        calls = [
            Call(call="a", engine="e", version=version, tokens=70 + step, after=version),
            Call(call="b", engine="e", version=max(version - 1, 0), tokens=50, after=version),
        ]
        staleness.on_publish(f"g{step}", calls=calls)
        staleness.on_step([f"g{step}"] if step % 5 else [])
        with staleness.refit():
            pass


def trace_of(path: Path, num_steps: int = 2) -> Path:
    """A whole trace in a file."""
    with StalenessCallback(trace=path, engines=[FakeEngine("e", counts={})], sinks=[]) as run:
        train(run, num_steps)
    return path


class OddStep:
    """A step with numbers that no step should have."""

    def __init__(self, step: int, **values: Any) -> None:
        self.step = step
        self.tokens_by_age = {0: 1}
        self._values = values

    def metrics(self) -> dict[str, Any]:
        return {f"staleness/{name}": value for name, value in self._values.items()}


def wait_for(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    """Wait until it holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it does not come to that"
        time.sleep(0.05)


def ends_in_time(close: Callable[[], str | None]) -> str | None:
    """What a call says that ends while its server does nothing, or long before its deadline."""
    said: list[str | None] = []
    thread = threading.Thread(target=lambda: said.append(close()), daemon=True)
    thread.start()
    thread.join(120)
    assert said, "it did not end"
    return said[0]


def script(code: str, *arguments: str) -> list[str]:
    """A command that runs code with what it needs imported."""
    prelude = """
        import os, sys, time
        from rl_staleness.integrations.mlflow import MlflowSink
        from tests.test_mlflow import numbers
    """
    return [sys.executable, "-c", textwrap.dedent(prelude) + textwrap.dedent(code), *arguments]


def start(code: str, *arguments: str) -> subprocess.Popen[str]:
    """Run code in a process of its own."""
    return subprocess.Popen(
        script(code, *arguments),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_to_end(code: str, *arguments: str, limit: float) -> str:
    """What code prints that runs in a process of its own, and ends well and in time."""
    process = start(code, *arguments)
    try:
        output, errors = process.communicate(timeout=limit)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    return output


# What arrives.


@pytest.mark.parametrize("kind", ["store", "served"])
def test_the_run_shows_what_the_trace_says(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Every number of every step is there, equal to the last bit, and the trace is attached."""
    place: Place = request.getfixturevalue(kind)
    run = place.new_run()
    trace = tmp_path / "rollout_trace.jsonl"
    sink = MlflowSink(run, tracking_uri=place.uri)
    engine = FakeEngine("e", counts={})
    with StalenessCallback(trace=trace, engines=[engine], sinks=[sink]) as staleness:
        train(staleness, 12)
    assert staleness.missing() == {}
    expected: dict[str, dict[int, float]] = {}
    for step in steps(trace):
        for key, value in step.metrics().items():
            expected.setdefault(key, {})[step.step] = float(value)
    histories = place.histories(run)
    assert {key: histories[key] for key in histories.keys() - SUMMARY} == expected
    assert expected.keys() == {f"staleness/{name}" for name in LOGGED}
    assert [sorted(histories[key]) for key in SUMMARY] == [list(range(1, 13))] * 3
    assert place.files(run) == FILES
    copies = {name: place.content(run, name, tmp_path) for name in FILES}
    assert gzip.decompress(copies[TRACE]) == trace.read_bytes()
    assert copies["staleness_report.html"].decode() == report(trace)
    assert copies["staleness.png"] == plot(trace)
    tags = place.client.get_run(run).data.tags
    assert {key: tags.get(key) for key in mlflow_points.DEFINITIONS} == mlflow_points.DEFINITIONS
    assert place.client.get_run(run).data.params == {}
    assert place.client.get_run(run).info.status == "RUNNING"


def test_the_summary_is_over_tokens_and_not_over_steps(store: Place) -> None:
    """A step of one token of age 9 hardly moves the mean of 99 tokens of age 0 and 1."""
    run = store.new_run()
    sink = MlflowSink(run, tracking_uri=store.uri)
    sink.log(numbers(1, {}))
    sink.log(numbers(2, {0: 90, 1: 9}))
    sink.log(numbers(3, {9: 1}))
    assert sink.close(trace=None, timeout=30) is None
    histories = store.histories(run)
    assert {key: histories[key] for key in SUMMARY} == {
        "staleness/run_mean": {2: 9 / 99, 3: 18 / 100},
        "staleness/run_p95": {2: 1.0, 3: 1.0},
        "staleness/run_max": {2: 1.0, 3: 9.0},
    }
    assert sorted(histories["staleness/tokens"]) == [1, 2, 3]
    assert sorted(histories["staleness/batch_age"]) == [2, 3]


def test_points_have_the_time_at_which_they_were_logged(store: Place) -> None:
    """Not that at which they were sent."""
    run = store.new_run()
    sink = MlflowSink(run, tracking_uri=store.uri, clock=lambda: 1234.5678)
    sink.log(numbers(1))
    assert sink.close(trace=None, timeout=30) is None
    points = store.client.get_metric_history(run, "staleness/batch_age")
    assert [point.timestamp for point in points] == [1234567]


def test_values_that_no_chart_can_show_are_left_out_and_counted(store: Place) -> None:
    """NaN, infinity, text and what no float can hold; the rest of the step arrives."""
    run = store.new_run()
    sink = MlflowSink(run, tracking_uri=store.uri)
    sink.log(OddStep(1, a=float("nan"), b=float("inf"), c="high", d=10**400, e=None, good=3))
    assert sink.close(trace=None, timeout=30) == "5 values were not finite"
    assert store.histories(run).keys() - SUMMARY == {"staleness/good"}


@pytest.mark.parametrize("kind", ["store", "served"])
def test_a_refused_key_costs_itself_alone(
    kind: str, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    """MLflow refuses a batch with one bad key; the others arrive, and it is named."""
    place: Place = request.getfixturevalue(kind)
    run = place.new_run()
    sink = MlflowSink(run, tracking_uri=place.uri)
    for step in range(1, 4):
        sink.log(OddStep(step, **{"good": step, "b@d": 1}))
        wait_for(lambda: not sink._writer._outboxes[mlflow_points.Run(place.uri, run)].points)
    assert sink.close(trace=None, timeout=30) == f"run {run}: 3 values of staleness/b@d refused"
    assert place.histories(run)["staleness/good"] == {1: 1.0, 2: 2.0, 3: 3.0}
    assert caplog.text.count("MLflow refuses staleness/b@d") == 1


# Which run.


def test_a_run_that_is_named_comes_before_the_active_one(trainer: Place) -> None:
    """Nothing goes to the active run, and it stays active."""
    run = trainer.new_run()
    with mlflow.start_run(experiment_id=trainer.experiment) as active:
        sink = MlflowSink(run)
        sink.log(numbers(1))
        assert sink.close(trace=None, timeout=30) is None
        assert mlflow.active_run().info.run_id == active.info.run_id
    assert trainer.steps(run) == [1]
    assert trainer.histories(active.info.run_id) == {}


def test_a_run_that_starts_late_gets_the_steps_before_it(trainer: Place) -> None:
    """The order of callbacks does not matter, and nobody else's run is made or ended."""
    sink = MlflowSink()
    sink.log(numbers(1, {4: 1}))
    with mlflow.start_run(experiment_id=trainer.experiment) as active:
        sink.log(numbers(2, {0: 3}))
    assert sink.close(trace=None, timeout=30) is None
    run = active.info.run_id
    assert trainer.steps(run) == [1, 2]
    assert trainer.histories(run)["staleness/run_mean"] == {1: 4.0, 2: 1.0}
    assert trainer.runs() == {run}


def test_the_next_run_gets_its_own_steps_and_its_own_summary(trainer: Place) -> None:
    """As in a sweep with one callback."""
    sink = MlflowSink()
    runs = []
    for step in (1, 2):
        with mlflow.start_run(experiment_id=trainer.experiment) as active:
            sink.log(numbers(step, {step: 1}))
        runs.append(active.info.run_id)
    assert sink.close(trace=None, timeout=30) is None
    assert [trainer.histories(run)["staleness/run_mean"] for run in runs] == [{1: 1.0}, {2: 2.0}]


def test_without_a_run_it_says_so_and_creates_none(trainer: Place) -> None:
    """The line names the way out."""
    sink = MlflowSink()
    sink.log(numbers(1))
    sink.log(numbers(2))
    line = sink.close(trace=None, timeout=30)
    assert line is not None and "of steps 1 to 2 not sent: no run was active" in line
    assert "takes a run_id" in line
    assert trainer.runs() == set()


def test_the_uri_is_that_of_the_moment_when_the_run_was_found(
    trainer: Place, tmp_path: Path
) -> None:
    """A trainer that turns MLflow elsewhere later does not turn us."""
    run = trainer.new_run()
    sink = MlflowSink(run)
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/other.db")
    sink.log(numbers(1))
    assert sink.close(trace=None, timeout=30) is None
    assert trainer.steps(run) == [1]
    assert not (tmp_path / "other.db").exists()


def test_no_database_is_made_where_there_is_none(tmp_path: Path) -> None:
    """A wrong address leaves no file behind."""
    sink = MlflowSink("0" * 32, tracking_uri=f"sqlite:///{tmp_path}/none.db")
    sink.log(numbers(1))
    line = sink.close(trace=None, timeout=2)
    assert line is not None and "there is no database" in line
    assert os.listdir(tmp_path) == []


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_leaves_steps_without_a_run_to_its_parent(trainer: Place) -> None:
    """Those of before the fork; where a run starts, it starts for one of them."""
    sink = MlflowSink()
    sink.log(numbers(1))
    child = multiprocessing.get_context("fork").Process(
        target=lambda: os._exit(0 if sink.close(trace=None, timeout=30) is None else 1)
    )
    child.start()
    child.join(60)
    child.kill()
    child.join()
    assert child.exitcode == 0
    assert sink.close(trace=None, timeout=30) is not None


def test_a_run_that_the_trainer_has_ended_takes_late_points(trainer: Place) -> None:
    """And stays as it was ended."""
    with mlflow.start_run(experiment_id=trainer.experiment) as active:
        sink = MlflowSink()
        sink.log(numbers(1))
    sink.log(numbers(2))
    assert sink.close(trace=None, timeout=30) is None
    run = active.info.run_id
    assert trainer.steps(run) == [1, 2]
    assert trainer.client.get_run(run).info.status == "FINISHED"
    assert trainer.runs() == {run}


def test_discovery_loads_and_creates_nothing() -> None:
    """In a process that does not use MLflow it is not there afterwards."""
    code = """
        from rl_staleness.integrations.mlflow import active_run_sink
        import sys
        assert active_run_sink() is None
        assert "mlflow" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, check=True)


def test_discovery_finds_the_run_of_this_thread_alone(trainer: Place) -> None:
    """Without one there is no sink, and no run either."""
    assert active_run_sink() is None
    found = []
    with mlflow.start_run(experiment_id=trainer.experiment) as active:
        thread = threading.Thread(target=lambda: found.append(active_run_sink()))
        thread.start()
        thread.join()
        sink = active_run_sink()
    assert found == [None]
    assert sink is not None
    sink.log(numbers(1))
    assert sink.close(trace=None, timeout=30) is None
    assert trainer.steps(active.info.run_id) == [1]
    assert trainer.runs() == {active.info.run_id}


def test_without_mlflow_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """At construction."""
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'rl-staleness\[mlflow\]'"):
        MlflowSink()


@pytest.mark.parametrize("arguments", [{"run_id": ""}, {"run_id": 7}, {"tracking_uri": ""}])
def test_a_wrong_argument_is_named(arguments: dict[str, Any]) -> None:
    """With its value."""
    ((name, value),) = arguments.items()
    with pytest.raises(ValueError, match=f"{name}: {value!r}"):
        MlflowSink(**arguments)


# Threads and processes.


def test_threads_make_no_runs(trainer: Place) -> None:
    """A thread in which no run is active logs to the run that the sink knows."""
    with mlflow.start_run(experiment_id=trainer.experiment) as active:
        sink = MlflowSink()
        threads = [
            threading.Thread(target=lambda step=step: sink.log(numbers(step)))
            for step in range(1, 9)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sink.close(trace=None, timeout=30) is None
    run = active.info.run_id
    assert trainer.steps(run) == list(range(1, 9))
    assert trainer.runs() == {run}


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("kind", ["store", "served"])
def test_a_forked_process_goes_on_with_the_run(kind: str, request: pytest.FixtureRequest) -> None:
    """With a thread of its own; what waited in the parent is the parent's."""
    place: Place = request.getfixturevalue(kind)
    before = place.runs()
    run = place.new_run()
    sink = MlflowSink(run, tracking_uri=place.uri)
    sink.log(numbers(1))
    wait_for(lambda: not sink._writer._outboxes[mlflow_points.Run(place.uri, run)].points)

    def child() -> None:
        sink.log(numbers(2))
        waiting = [len(outbox.points) for outbox in sink._writer._outboxes.values()]
        line = sink.close(trace=None, timeout=30)
        os._exit(0 if line is None and waiting == [18] else 1)

    with sink._lock:
        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
    process.join(60)
    process.kill()
    process.join()
    assert process.exitcode == 0
    sink.log(numbers(3))
    assert sink.close(trace=None, timeout=30) is None
    assert place.steps(run) == [1, 2, 3]
    assert place.runs() - before == {run}


def test_a_spawned_process_goes_on_with_the_run(trainer: Place) -> None:
    """A sink that travels takes the run along that was active where it came from."""
    with mlflow.start_run(experiment_id=trainer.experiment) as active:
        sink = MlflowSink()
        travelling = pickle.dumps(sink).hex()
        code = """
            import pickle
            sink = pickle.loads(bytes.fromhex(sys.argv[1]))
            sink.log(numbers(1))
            assert sink.close(trace=None, timeout=60) is None
        """
        run_to_end(code, travelling, limit=120)
        sink.log(numbers(2))
        assert sink.close(trace=None, timeout=30) is None
    run = active.info.run_id
    assert trainer.steps(run) == [1, 2]
    assert trainer.runs() == {run}


@pytest.mark.parametrize("with_signal", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_process_leaves_what_it_logged_a_second_before(
    with_signal: signal.Signals, store: Place
) -> None:
    """And the run as it was."""
    run = store.new_run()
    code = """
        sink = MlflowSink(sys.argv[1], tracking_uri=sys.argv[2])
        for step in range(1, 101):
            sink.log(numbers(step))
        time.sleep(600)
    """
    process = start(code, run, store.uri)
    wait_for(lambda: len(store.steps(run)) == 100, 120)
    process.send_signal(with_signal)
    process.communicate(timeout=30)
    assert process.returncode == -with_signal
    assert store.runs() == {run}
    assert store.client.get_run(run).info.status == "RUNNING"


@pytest.mark.parametrize("closed", [True, False])
def test_a_dead_server_does_not_delay_the_end_of_the_process(closed: bool, proxy: Proxy) -> None:
    """Nothing is joined that waits for it, whether the sink was closed or forgotten."""
    code = """
        sink = MlflowSink("0" * 32, tracking_uri=sys.argv[1])
        sink.log(numbers(1))
        if sys.argv[2] == "True":
            print(sink.close(trace=None, timeout=1))
    """
    output = run_to_end(code, proxy.uri, str(closed), limit=120)  # MLflow's retries take 246 s
    assert ["not delivered" in text for text in output.splitlines()] == [True] * closed


# What servers do.


def test_a_server_that_is_away_dies_and_comes_back_gets_every_step(
    served: Place, proxy: Proxy, quick: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Each outage is logged once."""
    run = served.new_run()
    sink = MlflowSink(run, tracking_uri=proxy.uri)
    for step in range(1, 11):
        sink.log(numbers(step))
    time.sleep(0.5)
    assert served.steps(run) == []
    proxy.start()
    wait_for(lambda: served.steps(run) == list(range(1, 11)))
    proxy.stop()
    for step in range(11, 21):
        sink.log(numbers(step))
        time.sleep(0.05)
    proxy.start()
    assert sink.close(trace=None, timeout=30) is None
    assert served.steps(run) == list(range(1, 21))
    assert {len(history) for history in served.histories(run).values()} == {20}
    assert caplog.text.count("takes no points") == 2


def test_a_server_that_comes_back_while_we_close_gets_every_step(
    served: Place, proxy: Proxy, tmp_path: Path
) -> None:
    """And the trace."""
    run = served.new_run()
    trace = trace_of(tmp_path / "trace.jsonl")
    sink = MlflowSink(run, tracking_uri=proxy.uri)
    sink.log(numbers(1))
    threading.Timer(2.0, proxy.start).start()
    assert sink.close(trace=str(trace), timeout=60) is None
    assert served.steps(run) == [1]
    assert served.files(run) == FILES


def test_close_does_not_wait_for_the_end_of_a_pause(
    served: Place, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that is back gets everything, however long it was away."""
    monkeypatch.setattr(mlflow_outbox, "LONGEST_PAUSE_SECONDS", 600.0)
    monkeypatch.setattr(mlflow_outbox, "FIRST_PAUSE_SECONDS", 600.0)
    run = served.new_run()
    sink = MlflowSink(run, tracking_uri=proxy.uri)
    outbox = mlflow_points.Run(proxy.uri, run)
    sink.log(numbers(1))
    wait_for(lambda: sink._writer._outboxes[outbox].error is not None)
    proxy.start()
    assert sink.close(trace=None, timeout=30) is None
    assert served.steps(run) == [1]


@pytest.mark.parametrize("how", ["away", "hanging", "failing"])
def test_close_ends_in_time_and_says_what_is_missing(
    how: str, proxy: Proxy, tmp_path: Path
) -> None:
    """Whatever the server does."""
    trace = trace_of(tmp_path / "trace.jsonl")
    if how != "away":
        proxy.start()
    if how == "hanging":
        proxy.hang.set()
    proxy.answer = 500
    sink = MlflowSink("0" * 32, tracking_uri=proxy.uri)
    for step in range(1, 101):
        sink.log(numbers(step))
    line = ends_in_time(lambda: sink.close(trace=str(trace), timeout=1.5))
    assert line is not None and "\n" not in line
    assert "1800 values of steps 1 to 100 not delivered" in line
    assert "the trace not attached" in line


def test_what_was_stored_but_not_confirmed_is_there_once(
    served: Place, proxy: Proxy, quick: None
) -> None:
    """A batch whose answer is lost is sent again, and does no harm."""
    run = served.new_run()
    proxy.start()
    proxy.forgets = True
    sink = MlflowSink(run, tracking_uri=proxy.uri)
    for step in range(1, 4):
        sink.log(numbers(step))
    wait_for(lambda: len(proxy.batches) >= 3)
    proxy.forgets = False
    assert sink.close(trace=None, timeout=30) is None
    assert {key: sorted(h) for key, h in served.histories(run).items()} == {
        key: [1, 2, 3] for key in served.histories(run)
    }


def test_batches_are_as_large_as_mlflow_takes_them(served: Place, proxy: Proxy) -> None:
    """A backlog goes out in few requests."""
    run = served.new_run()
    sink = MlflowSink(run, tracking_uri=proxy.uri)
    for step in range(1, 201):
        sink.log(numbers(step))
    proxy.start()
    assert sink.close(trace=None, timeout=60) is None
    sizes = [len(json.loads(batch)["metrics"]) for batch in proxy.batches]
    assert sum(sizes) == 200 * 18
    assert max(sizes) == 996  # the first one may have been tried while steps still came
    assert len(sizes) <= 5
    assert served.steps(run) == list(range(1, 201))


def test_a_full_queue_drops_the_oldest_and_counts_them(
    store: Place, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest are kept."""
    monkeypatch.setattr(mlflow_outbox, "CAPACITY", 36)
    sink = MlflowSink("0" * 32, tracking_uri=proxy.uri)
    for step in range(1, 6):
        sink.log(numbers(step))
    line = sink.close(trace=None, timeout=0.5)
    assert line is not None
    assert "54 older values dropped, 36 values of steps 4 to 5 not delivered" in line


@pytest.mark.parametrize("kind", ["store", "served"])
def test_a_run_that_was_deleted_costs_no_time_at_close(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """It is said, with the reason."""
    place: Place = request.getfixturevalue(kind)
    run = place.new_run()
    trace = trace_of(tmp_path / "trace.jsonl")
    sink = MlflowSink(run, tracking_uri=place.uri)
    sink.log(numbers(1))
    wait_for(lambda: place.steps(run) == [1])
    place.client.delete_run(run)
    sink.log(numbers(2))
    line = ends_in_time(lambda: sink.close(trace=str(trace), timeout=3600))
    assert line is not None and "18 values of steps 2 to 2 not delivered" in line
    assert "must be in the 'active' state" in line
    assert "not attached" in line


def test_a_run_that_never_was_is_named(served: Place) -> None:
    """A wrong id is said at the end with the reason, and makes no run."""
    before = served.runs()
    sink = MlflowSink("0" * 32, tracking_uri=served.uri)
    sink.log(numbers(1))
    line = sink.close(trace=None, timeout=30)
    assert line is not None and "RESOURCE_DOES_NOT_EXIST" in line
    assert served.runs() == before


def test_a_token_that_expired_and_is_renewed_costs_nothing(
    served: Place, proxy: Proxy, quick: None
) -> None:
    """What was refused waits."""
    run = served.new_run()
    proxy.start()
    sink = MlflowSink(run, tracking_uri=proxy.uri)
    sink.log(numbers(1))
    wait_for(lambda: served.steps(run) == [1])
    proxy.answer = 401
    sink.log(numbers(2))
    wait_for(lambda: len(proxy.batches) >= 3)
    proxy.answer = None
    wait_for(lambda: served.steps(run) == [1, 2])
    assert sink.close(trace=None, timeout=30) is None


def test_a_token_that_expired_for_good_costs_no_time_at_close(proxy: Proxy) -> None:
    """It is tried once more, and said."""
    proxy.start()
    proxy.answer = 401
    sink = MlflowSink("0" * 32, tracking_uri=proxy.uri)
    sink.log(numbers(1))
    line = ends_in_time(lambda: sink.close(trace=None, timeout=3600))
    assert line is not None and "401" in line


def test_passwords_are_in_no_line(proxy: Proxy, caplog: pytest.LogCaptureFixture) -> None:
    """An address may hold one."""
    sink = MlflowSink("0" * 32, tracking_uri=proxy.uri.replace("//", "//me:secret@"))
    sink.log(numbers(1))
    line = sink.close(trace=None, timeout=1)
    assert line is not None and "API request" in line
    assert "Traceback" in caplog.text
    assert "secret" not in line + caplog.text


# The artifacts.


def test_an_artifact_place_that_cannot_be_written_costs_the_artifact_alone(
    store: Place, tmp_path: Path
) -> None:
    """The numbers arrive."""
    trace = trace_of(tmp_path / "trace.jsonl")
    (tmp_path / "artifacts").write_text("a file where the folder should be")
    run = store.new_run()
    sink = MlflowSink(run, tracking_uri=store.uri)
    sink.log(numbers(1))
    line = sink.close(trace=str(trace), timeout=30)
    assert line is not None and line.startswith(f"run {run}: rollout_trace.jsonl.gz, ")
    assert store.steps(run) == [1]


def test_a_home_that_cannot_be_written_costs_nothing(
    store: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither MLflow nor what draws gets hold of another folder of the user's."""
    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, "/proc/home")
    run = store.new_run()
    trace = trace_of(tmp_path / "trace.jsonl")
    code = """
        sink = MlflowSink(sys.argv[1], tracking_uri=sys.argv[2])
        sink.log(numbers(1))
        print(sink.close(trace=sys.argv[3], timeout=120))
    """
    assert run_to_end(code, run, store.uri, str(trace), limit=240) == "None\n"
    assert store.steps(run) == [1]
    assert store.files(run) == FILES


def test_a_read_only_folder_for_temporary_files_costs_the_files_alone(
    store: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line names the folder."""
    monkeypatch.setattr("tempfile.tempdir", "/proc/none")
    run = store.new_run()
    trace = trace_of(tmp_path / "trace.jsonl")
    sink = MlflowSink(run, tracking_uri=store.uri)
    sink.log(numbers(1))
    line = sink.close(trace=str(trace), timeout=30)
    assert line is not None and line.startswith(f"run {run}: the trace not attached (")
    assert "/proc/none" in line
    assert store.steps(run) == [1]


def test_a_full_disk_costs_the_files_alone(served: Place, tmp_path: Path) -> None:
    """A process whose files may have 64 bytes: the numbers arrive, the line says why no file."""
    run = served.new_run()
    trace = trace_of(tmp_path / "trace.jsonl")
    code = """
        import resource
        sink = MlflowSink(sys.argv[1], tracking_uri=sys.argv[2])
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, resource.RLIM_INFINITY))
        sink.log(numbers(1))
        line = sink.close(trace=sys.argv[3], timeout=60)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        print(line)
    """
    line = run_to_end(code, run, served.uri, str(trace), limit=120)
    assert line.startswith(f"run {run}: rollout_trace.jsonl.gz, staleness_report.html, ")
    assert "not attached (OSError: [Errno 27] File too large" in line
    assert served.steps(run) == [1]
    assert served.files(run) == []


def test_a_server_that_cannot_store_artifacts_is_left_at_the_deadline(
    served: Place, proxy: Proxy, tmp_path: Path
) -> None:
    """MLflow's own retries would take four minutes."""
    trace = trace_of(tmp_path / "trace.jsonl")
    run = served.new_run()
    proxy.start()
    proxy.only, proxy.answer = "/mlflow-artifacts/", 500
    sink = MlflowSink(run, tracking_uri=proxy.uri)
    sink.log(numbers(1))
    line = ends_in_time(lambda: sink.close(trace=str(trace), timeout=8))
    assert line is not None and "the trace not attached (out of time)" in line
    assert served.steps(run) == [1]


def test_each_drawing_fails_alone(
    store: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not installed is named with the way to get it; the rest is attached."""
    absent = tmp_path / "absent"
    absent.mkdir()
    (absent / "plotly.py").write_text("raise ImportError('not here')")
    monkeypatch.syspath_prepend(str(absent))
    run = store.new_run()
    trace = trace_of(tmp_path / "trace.jsonl")
    line = MlflowSink(run, tracking_uri=store.uri).close(trace=str(trace), timeout=60)
    assert line == (
        f"run {run}: staleness_report.html not attached"
        " (the report needs plotly: pip install 'rl-staleness[report]')"
    )
    assert store.files(run) == ["staleness.png", TRACE]


def test_a_trace_that_cannot_be_drawn_is_attached(store: Place, tmp_path: Path) -> None:
    """It is the evidence, whatever is wrong with it."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"event":"run_finished","time":1.0,"status":"ok"}\n')
    run = store.new_run()
    line = MlflowSink(run, tracking_uri=store.uri).close(trace=str(trace), timeout=60)
    assert line is not None
    assert line.count("there is no run_started before it") == 2
    assert store.files(run) == [TRACE]
    assert gzip.decompress(store.content(run, TRACE, tmp_path)) == trace.read_bytes()


def test_drawing_that_takes_too_long_costs_the_drawings_alone(
    store: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trace goes first; the line says what happened."""
    slow = tmp_path / "slow"
    slow.mkdir()
    (slow / "plotly.py").write_text("import time; time.sleep(3600)")
    monkeypatch.syspath_prepend(str(slow))
    run = store.new_run()
    trace = trace_of(tmp_path / "trace.jsonl")
    sink = MlflowSink(run, tracking_uri=store.uri)
    line = ends_in_time(lambda: sink.close(trace=str(trace), timeout=4))
    assert line is not None and store.files(run) == [TRACE]
    assert "staleness.png" in line or "the trace" in line


def test_at_a_checkpoint_the_whole_lines_are_attached(store: Place, tmp_path: Path) -> None:
    """While the trace is written; what comes later takes its place."""
    run = store.new_run()
    trace = trace_of(tmp_path / "trace.jsonl")
    whole = trace.read_bytes()
    sink = MlflowSink(run, tracking_uri=store.uri)
    trace.write_bytes(whole + b'{"event":"step_tr')
    sink.attach(str(trace))
    wait_for(lambda: store.files(run) == FILES)
    assert gzip.decompress(store.content(run, TRACE, tmp_path)) == whole
    more = trace_of(tmp_path / "more.jsonl", 4)
    assert sink.close(trace=str(more), timeout=60) is None
    assert store.files(run) == FILES
    assert gzip.decompress(store.content(run, TRACE, tmp_path)) == more.read_bytes()
    assert store.content(run, "staleness_report.html", tmp_path).decode() == report(more)


def test_numbers_do_not_wait_for_files(
    served: Place, proxy: Proxy, tmp_path: Path, quick: None
) -> None:
    """A server that never answers an upload takes points all the same."""
    run = served.new_run()
    proxy.start()
    proxy.only = "/mlflow-artifacts/"
    proxy.hang.set()
    sink = MlflowSink(run, tracking_uri=proxy.uri)
    sink.attach(str(trace_of(tmp_path / "trace.jsonl")))
    sink.log(numbers(1))
    wait_for(lambda: served.steps(run) == [1])
    line = ends_in_time(lambda: sink.close(trace=str(tmp_path / "trace.jsonl"), timeout=1))
    assert line == f"run {run}: the trace not attached (out of time)"


def test_a_resumed_run_goes_on_with_its_summary(store: Place, tmp_path: Path) -> None:
    """It is over all tokens of the trace, whichever process trained them."""
    run = store.new_run()
    trace = tmp_path / "trace.jsonl"
    for _ in range(2):
        sink = MlflowSink(run, tracking_uri=store.uri)
        engine = FakeEngine("e", counts={})
        with StalenessCallback(trace=trace, run="r", engines=[engine], sinks=[sink]) as staleness:
            first = staleness.step
            for step in range(first, first + 3):
                version = max(staleness.version - 2, 0)
                calls = [Call(call="a", engine="e", version=version, tokens=7 * step, after=0)]
                staleness.on_publish(f"g{step}", calls=calls)
                staleness.on_step([f"g{step}"])
    ages: Counter[int] = Counter()
    means = {}
    for numbers_of_step in steps(trace):
        ages.update(numbers_of_step.tokens_by_age)
        mean = sum(age * count for age, count in ages.items()) / ages.total()
        means[numbers_of_step.step] = mean
    assert store.histories(run)["staleness/run_mean"] == means
    assert len(means) == 6 and len({*means.values()}) > 3


def test_a_run_that_is_found_late_knows_what_was_trained_before(trainer: Place) -> None:
    """The summary is of the training, whichever steps the run has."""
    with StalenessCallback(trace=None) as staleness:
        for step in range(1, 4):
            call = Call(call="a", engine="e", version=0, tokens=10, after=0, until=0)
            staleness.on_publish(f"g{step}", calls=[call])
            if step == 3:
                mlflow.start_run(experiment_id=trainer.experiment)
            staleness.on_step([f"g{step}"])
    (run,) = trainer.runs()
    assert trainer.histories(run)["staleness/batch_age"] == {3: 2.0}
    assert trainer.histories(run)["staleness/run_mean"] == {3: 1.0}


# The commands, by way of a server; what they do is in test_replay.py.


def test_the_commands_reach_runs_of_a_server(
    served: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps and files are brought, a second time changes nothing, and the trace comes back."""
    run = served.new_run()
    trace = str(trace_of(tmp_path / "trace.jsonl", 7))
    uri = ["--tracking-uri", served.uri]
    assert main(["replay", trace, "--run", run, *uri]) == 0
    line = f"MLflow run {run}: 7 steps brought; trace, report and picture attached\n"
    assert capsys.readouterr().out == line
    expected = {step.step: float(step.tokens) for step in steps(trace)}
    assert served.histories(run)["staleness/tokens"] == expected
    assert served.files(run) == FILES
    assert main(["replay", trace, "--run", run, *uri]) == 0
    assert capsys.readouterr().out.endswith("nothing is changed\n")
    assert main(["upload", trace, "--run", run, *uri]) == 0
    assert capsys.readouterr().out.endswith("nothing is changed\n")
    overlay = ["-o", str(tmp_path / "overlay.html")]
    assert main(["compare", trace, run, *uri, *overlay]) == 0
    _, *rows = capsys.readouterr().out.splitlines()
    assert rows[0].split()[1:] == rows[1].split()[1:]


# The end.


def test_a_closed_sink_takes_nothing_and_does_no_harm(
    store: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """It says so once; a second close does nothing."""
    run = store.new_run()
    sink = MlflowSink(run, tracking_uri=store.uri)
    assert isinstance(sink, Sink)
    sink.log(numbers(1))
    assert sink.close(trace=None, timeout=30) is None
    sink.log(numbers(2))
    sink.log(numbers(3))
    assert sink.close(trace=None, timeout=30) is None
    assert store.steps(run) == [1]
    assert caplog.text.count("after close()") == 1


@pytest.mark.slow
def test_a_real_server_that_is_killed_and_started_again_gets_every_step(
    server: Server, served: Place, quick: None
) -> None:
    """On the same port, with the same database."""
    run = served.new_run()
    sink = MlflowSink(run, tracking_uri=server.uri)
    sink.log(numbers(1))
    wait_for(lambda: served.steps(run) == [1])
    server.kill()
    sink.log(numbers(2))
    time.sleep(1)
    server.start()
    assert sink.close(trace=None, timeout=60) is None
    assert served.steps(run) == [1, 2]
