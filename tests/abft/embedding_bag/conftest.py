"""The cases beside the tests can be imported; one thread is enough."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast import native

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> Iterator[None]:
    return


@pytest.fixture(params=[True, False], ids=["native", "torch"])
def _core(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.param:
        monkeypatch.setattr(native, "core", None)
    elif native.core is None:
        pytest.skip("there is no native core")
