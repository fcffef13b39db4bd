"""The examples of training loops run."""

import math
from importlib import import_module
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

ONE_RANK = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}


@pytest.mark.parametrize("name", ["lightning", "accelerate", "ddp", "fsdp2"])
def test_an_example_runs(
    name: str, run_dir: Path, one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name in ("lightning", "accelerate"):
        pytest.importorskip(name, reason=f"{name} is not installed (extra 'integrations')")
    if name in ("ddp", "fsdp2"):
        for key, value in ONE_RANK.items():
            monkeypatch.setenv(key, value)
    loss = import_module(f"examples.{name}.__main__").main(str(run_dir))
    assert math.isfinite(loss)
    assert loss < 1.6
