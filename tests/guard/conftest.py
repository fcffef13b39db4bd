"""Bounded waits, one thread, and run directories whose SMP is stopped."""

import pytest

from holdfast import config


@pytest.fixture(autouse=True)
def _bounded(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(config.TIMEOUT_VARIABLE, "20")
