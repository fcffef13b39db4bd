"""Train a small model by Lightning. Kill it and start it again: it goes on where it was."""

import sys

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from holdfast.integrations.lightning import HoldfastCallback


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 4))

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main(run_dir: str) -> float:
    seed_everything(0, verbose=False)
    rows = TensorDataset(torch.randn(256, 8), torch.randint(0, 4, (256,)))
    trainer = Trainer(
        max_epochs=3,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[HoldfastCallback(run_dir, audit=0.05)],
    )
    trainer.fit(Net(), DataLoader(rows, batch_size=16, shuffle=True))
    return float(trainer.callback_metrics["loss"])


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m examples.lightning RUN_DIR")
    print(f"loss {main(sys.argv[1]):.4f}")
