"""`StalenessCallback()` without arguments, in a process that has runs: the numbers are there."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_staleness import Call, StalenessCallback

mlflow = pytest.importorskip("mlflow")
wandb = pytest.importorskip("wandb")


def test_the_active_runs_get_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An active W&B run and an active MLflow run are found at the first step, and left alone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    mlflow.set_experiment("active")  # another test of this process may have chosen one elsewhere
    with wandb.init(project="p", dir=str(tmp_path)) as run, mlflow.start_run() as active:
        with StalenessCallback(close_timeout=60.0) as staleness:
            for step in range(3):
                call = Call(call="c", engine="e", version=0, tokens=10, after=0, until=0)
                staleness.on_publish(f"g{step}", calls=[call])
                staleness.on_step([f"g{step}"])
        run.log({"reward": 1.0})
        assert wandb.run is run
        assert mlflow.active_run().info.run_id == active.info.run_id
        assert run.summary["staleness/batch_age"] == 2.0
    history = mlflow.MlflowClient().get_metric_history(active.info.run_id, "staleness/batch_age")
    assert [(point.step, point.value) for point in history] == [(1, 0.0), (2, 1.0), (3, 2.0)]


def test_no_run_is_looked_for_when_sinks_are_given(tmp_path: Path) -> None:
    """sinks=[] logs nowhere, whatever is active."""
    with (
        wandb.init(project="p", dir=str(tmp_path), mode="offline") as run,
        StalenessCallback(trace=None, sinks=[]) as staleness,
    ):
        staleness.on_step([])
        assert "staleness/tokens" not in dict(run.summary)


def test_without_a_run_the_way_to_one_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One line, at the first step, that says where the numbers are and how to get charts."""
    with StalenessCallback(trace=tmp_path / "rollout_trace.jsonl") as staleness:
        for _ in range(3):
            staleness.on_step([])
    (line,) = [r.getMessage() for r in caplog.records if "run is active" in r.message]
    assert str(tmp_path / "rollout_trace.jsonl") in line
    assert "sinks=" in line
