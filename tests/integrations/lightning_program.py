"""A tiny training run by Lightning's Trainer."""

import logging
from pathlib import Path
from typing import Any

import torch
from contract import Program
from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers.logger import Logger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from holdfast.integrations.lightning import HoldfastCallback

for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)


class Net(LightningModule):
    """Two layers with dropout and a norm; logs its losses."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16)
        self.drop = nn.Dropout(0.2)
        self.down = nn.Linear(16, 4)

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        """The loss of one batch."""
        hidden = self.drop(self.norm(self.up(batch[0])))
        loss = nn.functional.cross_entropy(self.down(hidden).float(), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor]) -> None:
        """Log the loss of one batch."""
        output = self.down(self.norm(self.up(batch[0])))
        self.log("validation", nn.functional.cross_entropy(output.float(), batch[1]))

    def configure_optimizers(self) -> Any:
        """AdamW with a schedule that advances by step, and one by epoch."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        by_step = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        return [optimizer], [{"scheduler": by_step, "interval": "step"}]


class Lines(Logger):
    """Keeps what is logged in a file, by step; a step that is logged again replaces it."""

    name, version = "lines", 0

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[tuple[int, str], float] = {}

    @property
    @rank_zero_experiment
    def experiment(self) -> None:
        """Nothing."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Keep the values."""
        self.lines |= {(step or 0, name): value for name, value in metrics.items()}

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """Nothing."""


class LightningProgram(Program):
    """Three micro-batches a step, four steps an epoch; validation after the third step."""

    def __init__(self, folder: Path, loader: Any = None, **options: Any) -> None:
        seed_everything(5, verbose=False)
        self.model = Net()
        self.struck, self.weight = self.model.norm, self.model.up.weight
        draw = torch.Generator().manual_seed(3)
        self.rows = TensorDataset(
            torch.randn(48, 8, generator=draw), torch.randint(0, 4, (48,), generator=draw)
        )
        self.loader = loader or (lambda rows: DataLoader(rows, batch_size=4, shuffle=True))
        self.logger = Lines()
        self.stopping = EarlyStopping("validation", patience=9, check_finite=False)
        self.checkpoints = ModelCheckpoint(folder / "checkpoints", monitor="validation")
        common = {"accumulate_grad_batches": self.accumulation, "gradient_clip_val": 0.5}
        self.trainer = Trainer(
            max_epochs=2,
            val_check_interval=self.evaluated_at * self.accumulation,
            accelerator="cpu",
            devices=1,
            num_sanity_val_steps=0,
            logger=self.logger,
            log_every_n_steps=1,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[
                self.checkpoints,
                EarlyStopping("validation", patience=9, check_finite=False),
            ],
            **(common | options),
        )

    def prolong(self) -> tuple[int, int]:
        self.trainer.fit_loop.max_epochs = 3
        return (10, 1)

    def attach(self, run_dir: Path | None, **settings: Any) -> None:
        self.trainer.callbacks.insert(0, HoldfastCallback(run_dir, **settings))

    def train(self) -> None:
        self.trainer.fit(self.model, self.loader(self.rows), DataLoader(self.rows, batch_size=24))

    def steps_done(self) -> int:
        return self.trainer.global_step

    def result(self) -> dict[str, Any]:
        (optimizer,) = self.trainer.optimizers
        (schedule,) = self.trainer.lr_scheduler_configs
        last = {name: value for (step, name), value in self.logger.lines.items() if step == 7}
        return {
            "model": self.model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "schedule": schedule.scheduler.state_dict(),
            "logs": last,
            "best": self.checkpoints.best_model_score,
            "loops": repr(self.trainer.fit_loop.state_dict()),
            "random": torch.get_rng_state(),
        }

    def internals(self) -> list[tuple[object, str]]:
        fit = self.trainer.fit_loop
        return [
            *((fit, name) for name in ("_load_combined_loader_states", "_should_accumulate")),
            *((fit.epoch_loop, "_results"), (self.trainer, "_logger_connector")),
        ]
