"""The MLflow run and the offline W&B run that the demo logs to, each where it is installed.

They are started as anybody starts them, and `StalenessCallback()` finds them by itself. Both stay
in a folder; neither needs a network or an account.
"""

# Both are typed in part:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

os.environ.update(  # read by both when they are imported
    DO_NOT_TRACK="true",
    MLFLOW_DISABLE_TELEMETRY="true",
    MLFLOW_LOGGING_LEVEL="WARNING",
    WANDB_ERROR_REPORTING="false",
    WANDB_MODE="offline",
)


@dataclass(frozen=True)
class ActiveRun:
    """A run that is active in this process."""

    log: Callable[[int, Mapping[str, float]], None]
    """Logs a step's numbers."""
    how_to_open: str
    """For a person: what it is, and a command."""


@contextmanager
def active_runs(
    folder: Path, *, name: str, options: Mapping[str, object]
) -> Generator[list[ActiveRun]]:
    """Start what is installed, and end it."""
    starts = {"mlflow": _mlflow_run, "wandb": _wandb_run}
    with ExitStack() as stack:
        yield [
            stack.enter_context(start(folder, name, options))
            for library, start in starts.items()
            if find_spec(library) is not None
        ]


@contextmanager
def _mlflow_run(folder: Path, name: str, options: Mapping[str, object]) -> Generator[ActiveRun]:
    import mlflow

    def log(step: int, numbers: Mapping[str, float]) -> None:
        mlflow.log_metrics(dict(numbers), step=step)

    place = f"sqlite:///{folder / 'mlflow.db'}"
    mlflow.set_tracking_uri(place)
    if mlflow.get_experiment_by_name("async-grpo") is None:
        mlflow.create_experiment("async-grpo", (folder / "mlartifacts").as_uri())
    mlflow.set_experiment("async-grpo")
    with mlflow.start_run(run_name=name):
        mlflow.log_params(dict(options))
        store = f"sqlite:///{_near(folder / 'mlflow.db')}"
        server = _command("mlflow", "server", "--host", "127.0.0.1", "--backend-store-uri", store)
        yield ActiveRun(log, f"MLflow: {server}\n        and open http://127.0.0.1:5000")


@contextmanager
def _wandb_run(folder: Path, name: str, options: Mapping[str, object]) -> Generator[ActiveRun]:
    import wandb

    def log(step: int, numbers: Mapping[str, float]) -> None:
        run.log(dict(numbers))

    settings = wandb.Settings(silent=True, console="off", x_disable_stats=True, disable_git=True)
    with wandb.init(
        project="async-grpo",
        name=name,
        config=dict(options),
        dir=folder,
        mode="offline",
        settings=settings,
    ) as run:
        files = _near(Path(run.dir).parent)
        leet, sync = _command("wandb", "leet", files), _command("wandb", "sync", files)
        how = f"W&B:    {leet}   (in this terminal)\n        {sync}   (to an account)"
        yield ActiveRun(log, how)


def _command(program: str, *arguments: str) -> str:
    """A command line that finds a program of this environment, activated or not."""
    beside = Path(sys.executable).with_name(program)
    return shlex.join([_near(beside) if beside.exists() else program, *arguments])


def _near(path: Path) -> str:
    """A path as it is shortest from here."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
