"""A trainer in a Ray actor that is torn down: nothing is lost that the trace has not."""

from __future__ import annotations

import os
import secrets
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # listen on the loopback interface only
ray = pytest.importorskip("ray")
mlflow = pytest.importorskip("mlflow")
wandb = pytest.importorskip("wandb")
pytest.importorskip("plotly", reason="the report is drawn with Plotly")

from rl_staleness import StalenessCallback, steps  # noqa: E402
from rl_staleness.cli import main  # noqa: E402
from tests.mlflow_places import Place  # noqa: E402
from tests.wandb_files import RunFile  # noqa: E402

STEPS = 40


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A Ray of this module's own."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # Ray keeps the first one
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        options: dict[str, Any] = {"include_dashboard": False, "_temp_dir": folder}
        ray.init(num_cpus=1, logging_level="ERROR", log_to_driver=False, **options)
        yield
        ray.shutdown()


class Trainer:
    """Trains with both sinks on, and never closes anything."""

    def __init__(self, folder: str, mlflow_run: str, uri: str) -> None:
        from rl_staleness.integrations.mlflow import MlflowSink
        from rl_staleness.integrations.wandb import WandbSink

        os.chdir(folder)
        settings = wandb.Settings(silent=True, console="off", x_disable_stats=True)
        self._run = wandb.init(project="p", mode="offline", dir=folder, settings=settings)
        sinks = [WandbSink(self._run), MlflowSink(mlflow_run, tracking_uri=uri)]
        self._staleness = StalenessCallback(sinks=sinks)

    def train(self) -> str:
        """Make all steps; where the W&B run is."""
        for step in range(1, STEPS + 1):
            self._staleness.on_step([])
            self._run.log({"loss": step})
        return str(self._run.sync_dir)


@pytest.mark.parametrize("how", ["killed", "no longer referred to"])
def test_an_actor_that_is_torn_down(
    how: str, cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No run is ended or made; a replay brings what was not sent, into both."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/runs.db")
    experiment = client.create_experiment("e", artifact_location=str(tmp_path / "artifacts"))
    store = Place(f"sqlite:///{tmp_path}/runs.db", experiment, client)
    run = store.new_run()
    trainer = ray.remote(Trainer).remote(str(tmp_path), run, store.uri)
    folder = ray.get(trainer.train.remote(), timeout=300)
    if how == "killed":
        ray.kill(trainer)
    del trainer
    trace = str(tmp_path / "rollout_trace.jsonl")
    assert [step.step for step in steps(trace)] == list(range(1, STEPS + 1))
    ended = time.monotonic() + 60
    before: list[int] | None = None
    while before != (before := store.steps(run)):  # the last request may be on its way
        assert time.monotonic() < ended
        time.sleep(1.5)
    assert store.runs() == {run}
    assert client.get_run(run).info.status == "RUNNING"
    assert main(["replay", trace, "--run", run, "--tracking-uri", store.uri]) == 0
    assert store.steps(run) == list(range(1, STEPS + 1))
    assert len(store.files(run)) == 3
    ours = [row for row in RunFile(folder, finished=False).rows if "staleness/step" in row]
    assert [row["staleness/step"] for row in ours] == list(range(1, len(ours) + 1))
