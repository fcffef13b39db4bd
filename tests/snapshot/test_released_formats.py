"""Checkpoints that releases of holdfast have written, which this one and later ones must load.

In this folder ``python test_released_formats.py VERSION`` writes those of the present release into
``released/VERSION``; what is there already is never written again.
"""

import shutil
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from holdfast import Snapshots
from holdfast.cli.main import main
from holdfast.digest.tensors import state_digest

RELEASED = Path(__file__).parent / "released"
RUN, STEPS = "a released run", 3


def training() -> tuple[nn.Module, torch.optim.AdamW]:
    """A model with its optimizer, of weights that no generator has drawn."""
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2, dtype=torch.bfloat16))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape) / 7)
    return model, torch.optim.AdamW(model.parameters(), lr=0.25)


def trained(model: nn.Module, optimizer: torch.optim.AdamW) -> None:
    """Apply ``STEPS`` gradients that are exact in every dtype, so that all machines agree."""
    for step in range(1, STEPS + 1):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.5**step)
        optimizer.step()


def write(folder: Path) -> None:
    """Write the checkpoint of a trained model, with its export to safetensors."""
    model, optimizer = training()
    trained(model, optimizer)
    with tempfile.TemporaryDirectory() as run_dir:
        options = {"persist_dir": folder / "checkpoints", "persist_every": STEPS, "run_id": RUN}
        with Snapshots(model, optimizer, run_dir=run_dir, **options) as snapshots:  # type: ignore[arg-type]
            snapshots.begin(STEPS)
            snapshots.wait_committed()
            snapshots.persist()
            expected = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(expected, folder / "expected.pt")
        where = ["--run-dir", run_dir, "--persist-dir", str(folder / "checkpoints")]
        assert main(["snapshots", "export", *where, "--to", str(folder / "export")]) == 0


def released() -> list[Path]:
    """The folders of all releases, oldest first."""
    return sorted(RELEASED.iterdir())


@pytest.mark.processes
@pytest.mark.parametrize("release", released(), ids=lambda path: path.name)
def test_a_checkpoint_of_every_release_is_loaded_bit_for_bit(
    release: Path, run_dir: Path, tmp_path: Path
) -> None:
    kept = tmp_path / "checkpoints"
    shutil.copytree(release / "checkpoints", kept)
    expected = torch.load(release / "expected.pt", weights_only=True)
    model, optimizer = training()
    assert state_digest(model.state_dict()) != state_digest(expected["model"])
    with Snapshots(model, optimizer, run_dir=run_dir, persist_dir=kept, run_id=RUN) as snapshots:
        assert snapshots.restore() == STEPS
        found = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        assert state_digest(found) == state_digest(expected)


@pytest.mark.parametrize("release", released(), ids=lambda path: path.name)
def test_an_export_of_every_release_holds_the_same_weights(release: Path) -> None:
    expected = torch.load(release / "expected.pt", weights_only=True)["model"]
    (file,) = (release / "export").glob("*.safetensors")
    found = load_file(file)
    weights = {name: found[f"model.{name}"] for name in expected}
    assert state_digest(weights) == state_digest(expected)


if __name__ == "__main__":
    target = RELEASED / sys.argv[1]
    target.mkdir(parents=True)
    sys.argv, __file__ = ["train.py"], "/train.py"  # what a checkpoint names its run by
    write(target)
