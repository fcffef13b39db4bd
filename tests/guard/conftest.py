"""Bounded waits, one thread, and run directories whose SMP is stopped."""

from collections.abc import Iterator

import pytest
import torch

from holdfast import config

PATIENCE_S = 20.0


@pytest.fixture(autouse=True)
def _bounded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(config.TIMEOUT_VARIABLE, str(PATIENCE_S))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
