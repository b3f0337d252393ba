"""Fixtures that several tests share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.watermark import Served


@pytest.fixture(scope="module", autouse=True)
def wandb_anew() -> Iterator[None]:
    """W&B reads its settings once in a process: the next module has other ones."""
    yield
    if "wandb" in sys.modules:
        sys.modules["wandb"].teardown()


@pytest.fixture(scope="session")
def watermark_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the watermark model."""
    pytest.importorskip("vllm")
    from tests.watermark import write_model

    return write_model(tmp_path_factory.mktemp("watermark"))


@pytest.fixture(scope="session")
def served(watermark_model: Path) -> Iterator[Served]:
    """One engine for the whole session: a start takes half a minute."""
    from tests.watermark import Served

    served = Served(watermark_model)
    yield served
    served.stop()
