"""Without the native core nothing is intercepted: only the Triton passes can be tested."""

from collections.abc import Iterator

import pytest
import torch

from holdfast import native


@pytest.fixture(autouse=True)
def _native_core(request: pytest.FixtureRequest) -> None:
    if native.core is None and "triton" not in request.path.name:
        pytest.skip("the native core is not built")


@pytest.fixture
def unwritten_is_nan() -> Iterator[None]:
    """Fresh memory is filled with NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
