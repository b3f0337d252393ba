"""An old trace put into a run: what the live sinks would have logged, once and only once."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rl_staleness import StalenessCallback
from rl_staleness.cli import main
from rl_staleness.compare import COLUMNS
from rl_staleness.events import StepTrained
from rl_staleness.replay import origin_of, timed_steps
from rl_staleness.resume import counted_steps
from rl_staleness.trace import read, steps
from tests.traces import write_trace

pytest.importorskip("plotly", reason="the report is drawn with Plotly")

ROOT = Path(__file__).resolve().parent.parent
AXIS = "staleness/step"
FILES = ["rollout_trace.jsonl.gz", "staleness.png", "staleness_report.html"]
SMALL: dict[str, Any] = {"slots": 4, "group_size": 2, "groups_per_step": 3}


@pytest.fixture(autouse=True)
def own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test touches the user's files."""
    monkeypatch.chdir(tmp_path)
    for name in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "WANDB_MODE", "WANDB_SERVICE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """A run of 12 steps, in which a step trained nothing and one was made again after a resume."""
    path = tmp_path / "old.jsonl"
    write_trace(path, steps=10, blind=0.05, run="old run's name", **SMALL)
    with StalenessCallback(trace=path, run="old run's name", step=10, sinks=[]) as resumed:
        for _ in range(3):
            resumed.on_step([])
    return str(path)


def times_of(trace: str) -> list[float]:
    return [event.time for event in read(trace) if isinstance(event, StepTrained)]


def run_command(*arguments: str, **environment: str) -> tuple[int, str, str]:
    """The command in a process of its own: W&B reads its variables once."""
    own = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run(
        [sys.executable, "-m", "rl_staleness.cli", *arguments],
        env=own,
        capture_output=True,
        text=True,
        timeout=300,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def said(*arguments: str, **environment: str) -> str:
    """What a command prints that ends well."""
    status, output, errors = run_command(*arguments, **environment)
    assert status == 0, errors
    return output


def table(output: str) -> list[dict[str, str]]:
    """The rows of a printed table, without the names of the runs."""
    _, *rows = output.splitlines()
    return [
        dict(zip(COLUMNS[1:], row.replace(" %", "%").split()[-len(COLUMNS) + 1 :], strict=True))
        for row in rows
    ]


# The trace.


def test_steps_have_the_times_of_their_events(trace: str) -> None:
    """And are those that `steps` computes."""
    assert [step for _, step in timed_steps(trace)] == list(steps(trace))
    assert [seconds for seconds, _ in timed_steps(trace)] == times_of(trace)
    assert [step.step for step in steps(trace)] == [*range(1, 11), 10, 11, 12]


def test_where_a_trace_comes_from(trace: str, tmp_path: Path) -> None:
    """An interrupted run has no status, whatever the incarnation before had."""
    origin = origin_of(trace)
    assert (origin.run, origin.status) == ("old run's name", "finished")
    lines = Path(trace).read_bytes().splitlines(keepends=True)
    torn = tmp_path / "torn.jsonl"
    torn.write_bytes(b"".join(lines[:-1]) + b'{"event":"run_fin')
    assert origin_of(torn) == origin._replace(status=None, ended=times_of(trace)[-1])


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["replay", "old.jsonl"], "rl-staleness: replay: say where, with --wandb, --mlflow or"),
        (["upload", "old.jsonl"], "rl-staleness: the following arguments are required: --run"),
        (["upload", "old.jsonl", "--run", "x"], "rl-staleness: --run: 'x' is no MLflow run id"),
        (["replay", "old.jsonl", "--wandb", "--mlflow"], "rl-staleness: argument --mlflow: not"),
        (
            ["upload", "old.jsonl", "--run", "a/b/c", "--tracking-uri", "u"],
            "rl-staleness: --tracking-uri: it is MLflow's",
        ),
        (["replay", "none.jsonl", "--wandb"], "none.jsonl: No such file or directory"),
        (["upload", "none.jsonl", "--run", "a/b/c"], "none.jsonl: No such file or directory"),
        (["upload", "none.jsonl", "--run", "0" * 32], "none.jsonl: No such file or directory"),
    ],
)
def test_wrong_use_is_one_line_and_exit_2(
    command: list[str], message: str, trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is asked of anybody."""
    assert main(command) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(message)
    assert printed.err.count("\n") == 1 and printed.out == ""


@pytest.mark.parametrize("product", ["mlflow", "wandb"])
def test_a_product_that_is_not_installed_is_named_with_the_way_to_get_it(
    product: str,
    trace: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One line, exit 2."""
    monkeypatch.setitem(sys.modules, product, None)
    assert main(["replay", trace, f"--{product}"]) == 2
    printed = capsys.readouterr()
    assert f"pip install 'rl-staleness[{product}]'" in printed.err
    assert printed.err.count("\n") == 1 and printed.out == ""


# MLflow.

mlflow = pytest.importorskip("mlflow")


@pytest.fixture(scope="module")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MLflow's tables, made once: that takes long."""
    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    mlflow.MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def store(empty_database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A database of the test's own, MLflow's own one for the test."""
    from tests.mlflow_places import Place

    shutil.copyfile(empty_database, tmp_path / "runs.db")
    uri = f"sqlite:///{tmp_path}/runs.db"
    client = mlflow.MlflowClient(uri)
    experiment = client.create_experiment("e", artifact_location=str(tmp_path / "artifacts"))
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", experiment)
    mlflow.set_tracking_uri(uri)
    yield Place(uri, experiment, client)
    mlflow.set_tracking_uri(None)


def points_of(store: Any, run: str) -> Counter[tuple[str, int, float, int]]:
    """All that a run has of the fifteen and the summary: key, step, value, milliseconds."""
    return Counter(
        (key, point.step, point.value, point.timestamp)
        for key in store.client.get_run(run).data.metrics
        for point in store.client.get_metric_history(run, key)
    )


def without_times(points: Counter[tuple[str, int, float, int]]) -> Counter[Any]:
    return Counter(point[:3] for point in points.elements())


def mlflow_live(store: Any, trace: str) -> str:
    """A run to which a sink logged the trace's steps when they were made."""
    from rl_staleness.integrations.mlflow import MlflowSink

    run: str = store.new_run()
    now = [0.0]
    sink = MlflowSink(run, tracking_uri=store.uri, clock=lambda: now[0])
    past = Counter[int]()
    for now[0], step, undone in counted_steps(trace):
        if step is None:  # a process that died, and one that goes on from before its last step
            assert sink.close(trace=None, timeout=60) is None
            sink = MlflowSink(run, tracking_uri=store.uri, clock=lambda: now[0])
            sink.resume(past := past - undone)
        else:
            past.update(step.tokens_by_age)
            sink.log(step)
    assert sink.close(trace=trace, timeout=60) is None
    return run


def test_mlflow_replay_is_what_the_sink_would_have_logged(
    store: Any, trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Point by point, the summary too, at the times of the steps; tags say where it came from."""
    before = store.runs()
    assert main(["replay", trace, "--mlflow"]) == 0
    (run,) = store.runs() - before
    assert capsys.readouterr().out == (
        f"MLflow run {run}: 13 steps brought; trace, report and picture attached\n"
    )
    replayed = points_of(store, run)
    assert replayed == points_of(store, mlflow_live(store, trace))
    tokens = [p for p in replayed if p[0] == "staleness/tokens"]
    expected = zip(steps(trace), times_of(trace), strict=True)
    assert sorted((step, ms) for _, step, _, ms in tokens) == sorted(
        (step.step, int(seconds * 1000)) for step, seconds in expected
    )
    assert store.files(run) == sorted([f"staleness/{FILES[0]}", *FILES[1:]])
    content = store.content(run, f"staleness/{FILES[0]}", tmp_path)
    assert gzip.decompress(content) == Path(trace).read_bytes()
    found = store.client.get_run(run)
    origin = origin_of(trace)
    assert found.data.tags["staleness.run"] == "old run's name"
    assert found.data.tags["staleness.unit"] == "policy updates"
    assert found.info.status == "FINISHED"
    assert found.info.start_time == int(origin.started * 1000)
    assert found.info.end_time == int(origin.ended * 1000)


@pytest.mark.parametrize("target", ["made", "given"])
def test_mlflow_replay_twice_changes_nothing(
    target: str, store: Any, trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not of the run that it made, nor of one that the sink had logged to."""
    given = ["--run", mlflow_live(store, trace)] if target == "given" else []
    assert main(["replay", trace, "--mlflow", *given]) == 0
    runs = store.runs()
    (run,) = runs
    points, info = points_of(store, run), store.client.get_run(run).info
    changed = [path.stat().st_mtime_ns for path in sorted(Path("artifacts").rglob("*"))]
    capsys.readouterr()
    assert main(["replay", trace, "--mlflow", *given]) == 0
    line = f"MLflow run {run}: all steps and files were there; nothing is changed\n"
    assert capsys.readouterr().out == line
    assert (store.runs(), points_of(store, run)) == (runs, points)
    assert store.client.get_run(run).info.end_time == info.end_time
    assert [p.stat().st_mtime_ns for p in sorted(Path("artifacts").rglob("*"))] == changed


def test_mlflow_an_interrupted_replay_is_completed_by_the_next(
    store: Any, trace: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also in the middle of a step's numbers."""
    from rl_staleness.integrations import mlflow_runs

    monkeypatch.setattr(mlflow_runs, "BATCH", 50)
    send, sent = mlflow_runs.refused_of, []

    def send_twice(*arguments: Any, **more: Any) -> Any:
        sent.append(arguments)
        if len(sent) > 2:
            raise KeyboardInterrupt
        return send(*arguments, **more)

    monkeypatch.setattr(mlflow_runs, "refused_of", send_twice)
    assert main(["replay", trace, "--mlflow"]) == 130
    (run,) = store.runs()
    assert 0 < points_of(store, run).total() < 100
    monkeypatch.setattr(mlflow_runs, "refused_of", send)
    assert main(["replay", trace, "--mlflow"]) == 0
    assert store.runs() == {run}
    assert points_of(store, run) == points_of(store, mlflow_live(store, trace))
    assert len(store.files(run)) == 3


def test_mlflow_steps_that_the_sink_could_not_deliver_are_brought(
    store: Any, trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Into the run itself, beside those that are there."""
    from rl_staleness.integrations.mlflow import MlflowSink

    run = store.new_run()
    sink = MlflowSink(run, tracking_uri=store.uri)
    for step in list(steps(trace))[:4]:
        sink.log(step)
    assert sink.close(trace=None, timeout=60) is None
    assert main(["replay", trace, "--run", run]) == 0
    assert "9 steps brought; trace, report and picture attached" in capsys.readouterr().out
    live = points_of(store, mlflow_live(store, trace))
    assert without_times(points_of(store, run)) == without_times(live)
    assert store.client.get_run(run).info.status == "RUNNING"


def test_mlflow_upload_after_a_crash(
    store: Any, trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A torn last line is left out; a second time changes nothing."""
    run = store.new_run()
    whole = Path(trace).read_bytes()
    Path(trace).write_bytes(whole + b'{"event":"step_tr')
    uri = ["--tracking-uri", store.uri]
    assert main(["upload", trace, "--run", run, *uri]) == 0
    assert capsys.readouterr().out.endswith("trace, report and picture attached\n")
    assert store.files(run) == sorted([f"staleness/{FILES[0]}", *FILES[1:]])
    assert gzip.decompress(store.content(run, f"staleness/{FILES[0]}", tmp_path)) == whole
    assert main(["upload", trace, "--run", run, "--mlflow", *uri]) == 0
    assert capsys.readouterr().out.endswith("its files were there; nothing is changed\n")
    assert points_of(store, run) == Counter()


def test_mlflow_a_trace_of_another_run_is_not_hidden(
    store: Any, trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line that names both runs; what the run had is what it has. A run's longer trace goes."""
    run, whole = store.new_run(), Path(trace).read_bytes()
    Path(trace).write_bytes(b"".join(whole.splitlines(keepends=True)[:-1]))
    assert main(["upload", trace, "--run", run, "--tracking-uri", store.uri]) == 0
    Path(trace).write_bytes(whole)
    assert main(["upload", trace, "--run", run, "--tracking-uri", store.uri]) == 0
    other = str(tmp_path / "other.jsonl")
    with StalenessCallback(trace=other, sinks=[], run="other") as staleness:
        staleness.on_step([])
    capsys.readouterr()
    for command in ("upload", "replay"):
        assert main([command, other, "--run", run, "--tracking-uri", store.uri]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"{run}: it has the trace of run ") and said.count("\n") == 1
        assert "this one is of other;" in said
    assert gzip.decompress(store.content(run, f"staleness/{FILES[0]}", tmp_path)) == whole


def test_mlflow_runs_that_are_not_there(
    store: Any, trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line that names the run; no database is made."""
    for command in (["upload", trace, "--run"], ["replay", trace, "--run"], ["compare", trace]):
        assert main([*command, "f" * 32]) == 2
        line = capsys.readouterr().err
        assert line.startswith(f"MLflow run {'f' * 32}: ") and line.count("\n") == 1
    nowhere = f"sqlite:///{tmp_path}/none.db"
    assert main(["upload", trace, "--run", "f" * 32, "--tracking-uri", nowhere]) == 2
    assert "there is no database" in capsys.readouterr().err
    assert not (tmp_path / "none.db").exists()
    dead = "http://127.0.0.1:9"
    assert main(["upload", trace, "--run", "f" * 32, "--tracking-uri", dead]) == 2
    line = capsys.readouterr().err
    assert line.startswith(f"MLflow run {'f' * 32}: ") and line.count("\n") == 1


def test_mlflow_a_run_that_was_deleted_takes_nothing(
    store: Any, trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is said."""
    run = store.new_run()
    store.client.delete_run(run)
    assert main(["replay", trace, "--run", run]) == 2
    line = capsys.readouterr().err
    assert line.startswith(f"MLflow run {run}: ") and "must be in the 'active' state" in line
    assert line.count("\n") == 1
    assert store.files(run) == []


def test_mlflow_runs_are_compared(
    store: Any, trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """By their trace; without it by their metrics, which do not know ages token by token."""
    run = mlflow_live(store, trace)
    bare = store.new_run()
    assert main(["replay", trace, "--run", bare]) == 0
    shutil.rmtree(Path("artifacts", bare))
    capsys.readouterr()
    assert main(["compare", trace, run, bare, "--tracking-uri", store.uri]) == 0
    expected, by_trace, by_metrics = table(capsys.readouterr().out)
    assert by_trace == expected
    unknown = {"updates", "p50", "p95", "refits", "pause_s"}
    assert {key for key, value in by_metrics.items() if value == "-"} == unknown
    same = by_metrics.keys() - unknown - {"violations"}
    assert {k: by_metrics[k] for k in same} == {k: expected[k] for k in same}
    assert "<small>" in Path("staleness_compare.html").read_text()


def test_mlflow_a_run_without_numbers_is_not_compared(
    store: Any, trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is named."""
    run = store.new_run()
    assert main(["compare", trace, run]) == 2
    assert "it has no trace and no staleness metrics" in capsys.readouterr().err


# W&B.

wandb = pytest.importorskip("wandb")


@pytest.fixture
def stub() -> Iterator[Any]:
    """A W&B server of the test's own."""
    from tests.wandb_stub import StubServer

    server = StubServer()
    yield server
    server.stop()


def at(stub: Any) -> dict[str, str]:
    """The variables of a process that uses the stub."""
    return {"WANDB_BASE_URL": stub.url, "WANDB_API_KEY": "0" * 40}


def wandb_live(trace: str, **more: Any) -> Any:
    """A finished run to which a sink logged the trace's steps while they were made."""
    from rl_staleness.integrations.wandb import WandbSink
    from tests.wandb_files import RunFile

    options = {"silent": True, "console": "off", "x_disable_stats": True}
    settings = wandb.Settings(x_disable_machine_info=True, **options, **more)
    run = wandb.init(project="p", mode="offline", dir=os.getcwd(), settings=settings)
    sink = WandbSink(run)
    for step in steps(trace):
        sink.log(step)
        run.log({"loss": step.step})
    assert sink.close(trace=trace, timeout=60) is None
    run.finish()
    return RunFile(run.sync_dir)


def ours(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Our rows, with our keys alone, in order of the steps."""
    found = [{k: v for k, v in row.items() if k.startswith("staleness/")} for row in rows]
    return sorted(
        (row for row in found if row), key=lambda row: (row[AXIS], json.dumps(row, sort_keys=True))
    )


def folders() -> list[Path]:
    return sorted(Path("wandb").glob("offline-run-*"))


def test_wandb_replay_is_what_the_sink_would_have_logged(trace: str) -> None:
    """Row by row, at the times of the steps; offline, and a second time changes nothing."""
    from tests.wandb_files import RunFile

    live = wandb_live(trace)
    shutil.rmtree("wandb")
    offline = {"WANDB_MODE": "offline"}
    line = said("replay", trace, "--wandb", **offline)
    (folder,) = folders()
    assert "13 steps brought; trace, report and picture attached; it is in" in line
    replayed = RunFile(folder)
    assert ours(replayed.rows) == ours(live.rows)
    assert [row["_timestamp"] for row in replayed.rows] == times_of(trace)
    assert [row["_step"] for row in replayed.rows] == list(range(13))
    keys = {metric.name: metric.step_metric for metric in replayed.of("metric")}
    assert keys == {metric.name: metric.step_metric for metric in live.of("metric")}
    assert replayed.summary["staleness/step"] == 12
    noted = replayed.config["rl_staleness_replay"]
    assert noted["replay_of"] == "old run's name"
    (artifact,) = replayed.of("artifact")
    files = {entry.path: Path(entry.local_path) for entry in artifact.manifest.contents}
    assert sorted(files) == FILES
    assert gzip.decompress(files[FILES[0]].read_bytes()) == Path(trace).read_bytes()
    content = replayed.path.read_bytes()
    assert said("replay", trace, "--wandb", **offline).endswith(
        ": all steps and files were there; nothing is changed\n"
    )
    assert folders() == [folder]
    assert replayed.path.read_bytes() == content


DIES = """
import os, sys
from rl_staleness.integrations import wandb_runs
row_of, rows = wandb_runs.row_of, []
def dies(*arguments):
    rows.append(arguments)
    if len(rows) > 5:
        {how}
    return row_of(*arguments)
wandb_runs.row_of = dies
from rl_staleness.cli import main
sys.exit(main(sys.argv[1:]))
"""
INTERRUPTED, KILLED = "raise KeyboardInterrupt", "os.kill(os.getpid(), 9)"


def interrupt(how: str, *arguments: str, **environment: str) -> int:
    """A command that ends after five rows."""
    own = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, "-c", textwrap.dedent(DIES.format(how=how)), *arguments]
    return subprocess.run(command, env=own, capture_output=True, timeout=120).returncode


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(INTERRUPTED, id="interrupted", marks=pytest.mark.slow),
        pytest.param(KILLED, id="killed"),
    ],
)
def test_wandb_an_interrupted_replay_is_completed_by_the_next(
    how: str, trace: str, stub: Any
) -> None:
    """Offline in a second folder of the run, and `wandb sync` makes one run of both."""
    from tests.wandb_files import RunFile

    offline = {"WANDB_MODE": "offline"}
    status = interrupt(how, "replay", trace, "--wandb", **offline)
    assert status == (130 if how == INTERRUPTED else -signal.SIGKILL)
    line = said("replay", trace, "--wandb", **offline)
    first, second = folders()
    assert ("remove" in line) == (how == KILLED)  # nothing of it had reached the disk
    rows = [*RunFile(first, finished=False).rows, *RunFile(second).rows]
    live = ours(wandb_live(trace).rows)
    assert ours(rows) == live
    assert "nothing is changed" in said("replay", trace, "--wandb", **offline)
    program = Path(sys.executable).with_name("wandb")
    own = {**os.environ, **at(stub)}
    parts = [first, second] if how == INTERRUPTED else [second]
    command = [program, "sync", "--yes", "--entity", "e", "--project", "p", *parts]
    subprocess.run(command, env=own, check=True, capture_output=True, timeout=120)
    (run,) = stub.history
    assert ours(flat(stub.rows(run))) == live


def flat(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows as they stand in files: the parts of a nested value have dots in their keys."""
    return [
        {
            inner: value
            for key, outer in row.items()
            for inner, value in (
                {f"{key}.{part}": each for part, each in outer.items()}
                if isinstance(outer, dict)
                else {key: outer}
            ).items()
        }
        for row in rows
    ]


def test_wandb_replay_online_once_and_only_once(trace: str, stub: Any) -> None:
    """An interrupted one is completed, a second one changes nothing."""
    variables = {**at(stub), "WANDB_PROJECT": "p", "WANDB_ENTITY": "e"}
    assert interrupt(INTERRUPTED, "replay", trace, "--wandb", **variables) == 130
    (run,) = stub.history
    assert len(stub.rows(run)) == 5
    line = said("replay", trace, "--wandb", **variables)
    assert line.startswith(f"W&B run e/p/{run}: 8 steps brought; trace, report and picture")
    rows = stub.rows(run)
    assert ours(flat(rows)) == ours(wandb_live(trace).rows)
    assert [row["_timestamp"] for row in rows] == times_of(trace)
    (artifact,) = stub.artifacts
    assert artifact["artifactCollectionName"] == f"staleness-trace-{run}"
    received = len(stub.received)
    line = said("replay", trace, "--run", f"e/p/{run}", **at(stub))
    assert line == (f"W&B run e/p/{run}: all steps and files were there; nothing is changed\n")
    assert (len(stub.received), len(stub.artifacts)) == (received, 1)


def test_wandb_replay_into_a_run_on_the_disk(trace: str) -> None:
    """What the sink could not log is brought beside it; the run's own folder is left alone."""
    from tests.wandb_files import RunFile

    short = "short.jsonl"
    lines = Path(trace).read_bytes().splitlines(keepends=True)
    trained = [n for n, line in enumerate(lines) if line.startswith(b'{"event":"step_tr')]
    Path(short).write_bytes(b"".join(lines[: trained[3] + 1]))
    live = wandb_live(short)
    folder = live.path.parent
    content = live.path.read_bytes()
    line = said("replay", trace, "--run", str(folder))
    assert "9 steps brought; trace, report and picture attached; it is in" in line
    first, second = folders()
    assert first.resolve() == folder.resolve()
    assert live.path.read_bytes() == content
    added = RunFile(second)
    assert added.of("run")[0].run_id == live.of("run")[0].run_id
    assert added.of("run")[0].project == "p"
    whole = ours(wandb_live(trace).rows)
    assert ours([*live.rows, *added.rows]) == whole
    assert min(row["_step"] for row in added.rows) > max(row["_step"] for row in live.rows)
    assert "nothing is changed" in said("replay", trace, "--run", str(folder))


def test_wandb_upload_after_a_crash(trace: str, stub: Any) -> None:
    """To a run on the server, and to one on the disk; a second time changes nothing."""
    from tests.wandb_files import RunFile

    stub.history["r"] = {0: {"_step": 0, "loss": 1.0}}
    stub.states["r"] = "crashed"
    whole = Path(trace).read_bytes()
    Path(trace).write_bytes(whole + b'{"event":"step_tr')
    for once in (True, False):
        line = said("upload", trace, "--run", "e/p/r", **at(stub))
        assert line.startswith("W&B run e/p/r: trace, report and") == once
        assert ("nothing is changed" in line) != once
    (artifact,) = stub.artifacts
    digest = json.loads(artifact["metadata"])["sha256"]
    assert stub.rows("r") == [{"_step": 0, "loss": 1.0}]
    empty = "empty.jsonl"
    Path(empty).write_bytes(whole.splitlines(keepends=True)[0])
    live = wandb_live(empty)
    for once in (True, False):
        line = said("upload", trace, "--run", str(live.path.parent))
        assert ("nothing is changed" in line) != once
    (artifact,) = RunFile(folders()[-1]).of("artifact")
    assert json.loads(artifact.metadata)["sha256"] == digest


def test_wandb_a_trace_of_another_run_is_not_hidden(trace: str) -> None:
    """In a run on the disk; nothing is added to it."""
    live = wandb_live(trace)
    before = folders()
    with StalenessCallback(trace="other.jsonl", sinks=[], run="other"):
        pass
    status, _, line = run_command("upload", "other.jsonl", "--run", str(live.path.parent))
    assert (status, "this one is of other;" in line) == (2, True)
    assert folders() == before


def test_wandb_a_run_that_still_runs_is_left_alone(trace: str, stub: Any) -> None:
    """Its own sink attaches the trace."""
    stub.history["r"], stub.states["r"] = {}, "running"
    status, _, line = run_command("upload", trace, "--run", "e/p/r", **at(stub))
    assert (status, line) == (
        2,
        "W&B run e/p/r is still running; its own sink attaches the trace\n",
    )


def test_wandb_runs_that_cannot_be_reached(trace: str, stub: Any) -> None:
    """One line that names the run."""
    for command in (["upload", trace, "--run"], ["replay", trace, "--run"], ["compare", trace]):
        status, _, line = run_command(*command, "e/p/none", **at(stub))
        assert (status, line.count("\n")) == (2, 1)
        assert line.startswith("W&B run e/p/none: ") and "Could not find run" in line
    url = stub.url
    stub.stop()
    variables = {"WANDB_BASE_URL": url, "WANDB_API_KEY": "0" * 40}
    status, _, line = run_command("compare", trace, "e/p/r", **variables)
    assert (status, line.count("\n")) == (2, 1)
    assert line.startswith("W&B run e/p/r: ")


def test_wandb_runs_are_compared(trace: str, stub: Any) -> None:
    """On the disk by their trace, or without it by their rows; on the server the same."""
    folder = wandb_live(trace).path.parent
    packed = next(folder.glob("staleness-*"))
    said("replay", trace, "--wandb", **at(stub), WANDB_PROJECT="p", WANDB_ENTITY="e")
    (run,) = stub.history
    by_trace = table(said("compare", trace, str(folder)))
    shutil.rmtree(packed)
    by_rows = table(said("compare", str(folder), f"e/p/{run}", **at(stub)))
    assert by_trace[0] == by_trace[1]
    assert by_rows[0] == by_rows[1]
    unknown = {"updates", "refits", "pause_s"}
    assert {key for key, value in by_rows[0].items() if value == "-"} == unknown
    same = by_rows[0].keys() - unknown - {"violations"}
    assert {k: by_rows[0][k] for k in same} == {k: by_trace[0][k] for k in same}


def test_wandb_the_trace_that_is_attached_to_a_run_is_compared(trace: str, stub: Any) -> None:
    """It says more than the rows."""
    stub.history["r"] = {0: {"_step": 0, "loss": 1.0}}
    stub.file = gzip.compress(Path(trace).read_bytes())
    expected, fetched = table(said("compare", trace, "e/p/r", **at(stub)))
    assert fetched == expected
