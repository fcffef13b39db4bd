"""The GPT-2 of ``bench.integrations_transformers`` in Lightning's Trainer."""

import logging
import warnings
from contextlib import nullcontext
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader

from bench.integrations_transformers import Rows, gpt2
from holdfast.digest.tensors import state_digest
from holdfast.integrations.lightning import HoldfastCallback
from holdfast.protection import protect

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", ".* does not have many workers")


class _Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = gpt2()

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = self.net(**batch).loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def train(steps: int, run_dir: Path | None) -> str:
    """Train, with the adapter if there is a run directory; return the digest of the result."""
    module = _Module()
    trainer = Trainer(
        max_steps=steps,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[] if run_dir is None else [HoldfastCallback(run_dir)],
    )
    with protect(module) if run_dir is None else nullcontext():
        trainer.fit(module, DataLoader(Rows(), batch_size=4, shuffle=True))
    return state_digest([module.state_dict(), trainer.optimizers[0].state_dict()])
