"""A Llama 3 of two layers in torchtitan's Trainer, with FSDP2 on one rank, on a CPU.

torchtitan knows accelerators only: this is the program of its tests, which answer in the place of
one, with a larger model.
"""

import sys
import tempfile
import warnings
from contextlib import nullcontext
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests" / "integrations"))
import torchtitan_program as program

from holdfast.digest.tensors import state_digest
from holdfast.protection import protect

program.WORDS, program.LENGTH, program.WIDTH, program.HEADS = 1024, 64, 128, 4
warnings.filterwarnings("ignore", "DTensor random|.*get_last_lr|'set_vital' is deprecated")


def train(steps: int, run_dir: Path | None) -> str:
    """Train, with the adapter if there is a run directory; return the digest of the result."""
    program.TorchtitanProgram.steps = steps
    with tempfile.TemporaryDirectory() as folder:
        run = program.TorchtitanProgram(Path(folder))
        if run_dir is not None:
            run.attach(run_dir)
        with protect(run.model) if run_dir is None else nullcontext():
            run.train()
        return state_digest(run.result()["state"])
