"""The examples run as a user runs them, measure what they should, and leave nothing behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path

import msgspec
import pytest

from rl_staleness import Call, Ledger, StepStaleness, read, steps
from rl_staleness.events import GroupPublished, StepTrained

ROOT = Path(__file__).parents[1]


def run(*command: str, folder: Path) -> str:
    """Run an example in a folder and return what it printed; none of its processes is left."""
    mark = uuid.uuid4().hex
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB_", "MLFLOW_"))}
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / command[0]), *command[1:]],
        cwd=folder,
        env={**environment, "PYTHONPATH": path, "RL_STALENESS_TEST": mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout
    deadline = time.monotonic() + 10
    while (left := processes(mark)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left == []
    return done.stdout


def processes(mark: str) -> list[str]:
    """Running processes that have inherited an environment with this mark."""
    found: list[str] = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (entry / "environ").read_bytes():
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue  # it ended, or is somebody else's
    return [line for line in found if line]


def rows(printed: str) -> list[list[str]]:
    """The rows of the demo's table, as words."""
    words = [line.split() for line in printed.splitlines()]
    return [row for row in words if row and row[0].isdigit()]


def lines(trace: Path, event: str) -> list[dict[str, object]]:
    """The events of one kind."""
    events = [json.loads(line) for line in trace.read_text().splitlines()]
    return [line for line in events if line["event"] == event]


def check_sound(numbers: list[StepStaleness], printed: str) -> None:
    """Every token is covered, nothing contradicts, and the demo says that both ways agree."""
    assert [step.coverage for step in numbers] == [1.0] * len(numbers)
    assert [step.violations for step in numbers] == [0] * len(numbers)
    assert f"recomputes {len(numbers)} steps from the trace: it agrees to the last" in printed
    assert "WARNING" not in printed
    assert "Error" not in printed


def cuts_against_spans(trace: Path) -> int:
    """The cuts that came from the actors say of every call what vLLM itself says."""
    ledger = Ledger()
    published: dict[str, tuple[Call, ...]] = {}
    num_compared = 0
    for event in read(trace):
        if isinstance(event, GroupPublished):
            published[event.group] = event.calls
        if isinstance(event, StepTrained):
            for call in (
                call for batch in event.batches or () for g in batch for call in published[g]
            ):
                assert call.spans is not None
                by_cuts = ledger.spans(msgspec.structs.replace(call, spans=None))
                assert by_cuts == ledger.spans(call), call
                num_compared += 1
        ledger.apply(event)
    return num_compared


@pytest.mark.engine
@pytest.mark.slow
def test_synchronous_demo_reads_zero(tmp_path: Path) -> None:
    """Nothing is older than the step that trains it, and the engine has exactly its weights."""
    pytest.importorskip("ray")
    printed = run("async_grpo.py", "--sync", "--steps", "5", "--engines", "1", folder=tmp_path)
    numbers = list(steps(tmp_path / "demo" / "rollout_trace.jsonl"))
    check_sound(numbers, printed)
    assert [step.batch_age for step in numbers] == [0.0] * 5
    assert [row[2] for row in rows(printed)] == ["0.00000"] * 5


@pytest.mark.engine
def test_asynchronous_demo_is_exact(tmp_path: Path) -> None:
    """Two engines, refitted at different moments in the middle of calls, every second step."""
    pytest.importorskip("ray")
    options = "--steps 12 --engines 2 --max-staleness 6 --refit-every 2 --updates-per-step 2"
    printed = run("async_grpo.py", *options.split(), "--output", "out", folder=tmp_path)
    trace = tmp_path / "out" / "rollout_trace.jsonl"
    numbers = list(steps(trace))
    check_sound(numbers, printed)
    assert [step.version for step in numbers] == list(range(0, 24, 2))
    assert all((step.batch_age or 0) > 0 for step in numbers)  # also of the first: two updates
    assert all((step.age_max or 0) <= 6 + 1 for step in numbers)
    assert sum(step.spanning_calls for step in numbers) > 0
    assert sum(step.age_in_queue or 0 for step in numbers) > 0
    assert [[float(row[3]), float(row[7])] for row in rows(printed)] == [
        [pytest.approx(step.batch_age, abs=5e-4), 1.0] for step in numbers
    ]
    rewards = [float(row[1]) for row in rows(printed)]
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.1
    refits = [(line["engine"], line["version"]) for line in lines(trace, "refit_done")]
    assert refits == [(f"engine-{i}", version) for version in range(4, 25, 4) for i in (0, 1)]
    assert len(lines(trace, "refit_cut")) == len(refits)
    assert cuts_against_spans(trace) > 100
    check_mlflow(tmp_path / "out", numbers, rewards, printed)
    check_wandb(tmp_path / "out", numbers, rewards, printed)
    report = (trace.parent / "staleness_report.html").read_text()
    assert "<h1>Staleness of max-staleness-6-20" in report
    assert "report: out/staleness_report.html\n" in printed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"], "nothing lies elsewhere"


def check_mlflow(
    folder: Path, numbers: list[StepStaleness], rewards: list[float], printed: str
) -> None:
    """The run in the database that the demo names: each value of each step, and the trainer's."""
    mlflow = pytest.importorskip("mlflow")
    assert f"--backend-store-uri sqlite:///{folder.name}/mlflow.db\n" in printed
    client = mlflow.MlflowClient(f"sqlite:///{folder}/mlflow.db")
    [ours] = [e for e in client.search_experiments() if e.name == "async-grpo"]
    [found] = client.search_runs([ours.experiment_id])
    assert found.info.status == "FINISHED"

    def history(key: str) -> dict[int, float]:
        return {p.step: p.value for p in client.get_metric_history(found.info.run_id, key)}

    for key in numbers[0].metrics():
        expected = {step.step: step.metrics()[key] for step in numbers}
        assert history(key) == {at: float(x) for at, x in expected.items() if x is not None}, key
    assert list(history("train/reward").values()) == pytest.approx(rewards, abs=5e-4)
    assert [s.step for s in numbers] == sorted(history("train/reward"))


def check_wandb(
    folder: Path, numbers: list[StepStaleness], rewards: list[float], printed: str
) -> None:
    """The offline run that the demo names: a row a step, and what the trainer logs beside it."""
    pytest.importorskip("wandb")
    from tests.wandb_files import RunFile

    [files] = (folder / "wandb").glob("offline-run-*")
    assert f"wandb sync {files.relative_to(folder.parent)}   (" in printed
    every = RunFile(files).rows
    rows = [row for row in every if "staleness/step" in row]
    assert [row["staleness/step"] for row in rows] == [step.step for step in numbers]
    for row, step in zip(rows, numbers, strict=True):
        expected = {key: value for key, value in step.metrics().items() if value is not None}
        assert {key: row[key] for key in expected} == expected
    # In the same rows, unless the sink's thread came too late for one.
    theirs = [row["train/reward"] for row in every if "train/reward" in row]
    assert theirs == pytest.approx(rewards, abs=5e-4)


@pytest.mark.engine
def test_own_trainer_is_exact(tmp_path: Path) -> None:
    """Every hook is where it belongs."""
    pytest.importorskip("ray")  # as a sign of the environment that the examples are for
    printed = run("own_trainer.py", folder=tmp_path)
    numbers = list(steps(tmp_path / "rollout_trace.jsonl"))
    assert [step.coverage for step in numbers] == [1.0] * 20
    assert [step.violations for step in numbers] == [0] * 20
    assert numbers[0].batch_age == 0
    assert all((step.batch_age or 0) > 0 for step in numbers[3:])
    rows = [line.split(":")[0] for line in printed.splitlines() if line.startswith("step ")]
    assert rows == [f"step {number}" for number in range(1, 21)]
    assert "Traceback" not in printed


def test_runs_are_started_only_of_what_is_installed(tmp_path: Path) -> None:
    """Without MLflow and W&B the demo has its trace and its report, and no word about them."""
    code = f"""
import pathlib, sys
sys.modules["mlflow"] = sys.modules["wandb"] = None
sys.path.insert(0, {str(ROOT / "examples")!r})
from tracking import active_runs
with active_runs(pathlib.Path.cwd(), name="n", options={{}}) as runs:
    print(runs)
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[]\n", "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("script", ["async_grpo.py", "own_trainer.py"])
def test_missing_package_is_named(script: str, tmp_path: Path) -> None:
    """Whoever has not installed what an example needs reads what and how, no traceback."""
    code = f"""
import runpy, sys
sys.modules["torch"] = None
sys.path.insert(0, {str(ROOT / "examples")!r})
runpy.run_path({str(ROOT / "examples" / script)!r}, run_name="__main__")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert done.stderr.startswith("torch is not installed: `make demo` ")
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
