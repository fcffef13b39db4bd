"""What the runs of the trainer share."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text to train on."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "a.txt").write_text("What a fault does not reach it cannot change. " * 100)
    return folder
