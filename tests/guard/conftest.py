"""Bounded waits, one thread, and run directories whose SMP is stopped."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from holdfast import config
from holdfast.snapshot import launch

sys.path.insert(0, str(Path(__file__).parent))  # for guard_cases, whatever the import mode

PATIENCE_S = 20.0


@pytest.fixture(autouse=True)
def _bounded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(config.TIMEOUT_VARIABLE, str(PATIENCE_S))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "run"
    yield path
    launch.stop_smp(path)
