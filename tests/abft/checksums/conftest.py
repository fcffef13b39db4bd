"""One thread, which is all that these need."""

import pytest


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    return
