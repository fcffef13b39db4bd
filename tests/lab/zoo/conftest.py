"""One thread, as rounding depends on the number; bounded waits; nothing is downloaded."""

import pytest

from holdfast import config


@pytest.fixture(autouse=True)
def _bounded(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(config.TIMEOUT_VARIABLE, "30")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
