"""Small models: threads would only wait for each other; and nothing may be downloaded."""

import pytest


@pytest.fixture(autouse=True)
def _offline(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
