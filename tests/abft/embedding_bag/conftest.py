"""One thread is enough, with the native core or by plain torch."""

from collections.abc import Iterator

import pytest

from holdfast import native


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> Iterator[None]:
    return


@pytest.fixture(params=[True, False], ids=["native", "torch"])
def _core(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.param:
        monkeypatch.setattr(native, "core", None)
    elif native.core is None:
        pytest.skip("there is no native core")
