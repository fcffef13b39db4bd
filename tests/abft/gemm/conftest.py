"""Without the native core nothing is intercepted: only the Triton passes can be tested."""

import pytest

from holdfast import native


@pytest.fixture(autouse=True)
def _native_core(request: pytest.FixtureRequest) -> None:
    if native.core is None and "triton" not in request.path.name:
        pytest.skip("the native core is not built")
