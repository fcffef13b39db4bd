"""One thread, as the products are small, and study_runs importable whatever the import mode."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    return
