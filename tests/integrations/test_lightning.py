"""Lightning's Trainer: the contract of every adapter, mixed precision, loaders, refusals."""

import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from contract import AdapterContract, Striker, kinds, outcome
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import MixedPrecision
from lightning_program import LightningProgram, Net
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import holdfast.integrations.lightning
from holdfast import Guard, protect
from holdfast.digest.tensors import state_digest
from holdfast.errors import ConfigError
from holdfast.integrations.lightning import CONNECTOR, HoldfastCallback

pytestmark = pytest.mark.processes


class TestLightning(AdapterContract):
    program = LightningProgram
    adapter = holdfast.integrations.lightning


def test_the_attributes_of_the_logger_connector_exist(tmp_path: Path) -> None:
    connector = LightningProgram(tmp_path).trainer._logger_connector
    assert [name for name in CONNECTOR if not hasattr(connector, name)] == []


class Rows(IterableDataset[Any]):
    """Rows of a data set that says no length."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter([self.rows[n] for n in torch.randperm(len(self.rows))])


LOADERS = {
    "stateful": lambda rows: StatefulDataLoader(rows, batch_size=4, shuffle=True),
    "stateful iterable": lambda rows: StatefulDataLoader(Rows(rows), batch_size=4),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_a_loader_is_resumed_where_it_stood(kind: str, run_dir: Path, tmp_path: Path) -> None:
    def program(name: str) -> LightningProgram:
        return LightningProgram(tmp_path / name, LOADERS[kind])

    def interrupt(place: tuple[int, int]) -> None:
        if place == (6, 1):
            raise RuntimeError("interrupted")

    bare = outcome(program("bare"))
    with pytest.raises(RuntimeError, match="interrupted"):
        outcome(program("first"), interrupt, run_dir=run_dir)
    again = program("again")
    assert outcome(again, run_dir=run_dir) == bare
    assert again.resumed in (5, 6)


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_faults_are_repaired_in_mixed_precision(
    precision: Any, run_dir: Path, tmp_path: Path
) -> None:
    def program(name: str) -> LightningProgram:
        return LightningProgram(tmp_path / name, plugins=[MixedPrecision(precision, "cpu")])

    bare = outcome(program("bare"))
    faults = {(2, 1): math.inf, (5, 0): 1.3}
    assert outcome(program("struck"), Striker(faults)) != bare
    run = program("guarded")
    assert outcome(run, Striker(faults), run_dir=run_dir, audit=1.0) == bare
    assert kinds("rerun") == [("rerun", 2), ("rerun", 5)]
    scaler = run.trainer.precision_plugin.scaler
    assert (scaler is None) == (precision == "bf16-mixed")


def test_a_trainer_that_only_validates_has_no_guard(run_dir: Path, tmp_path: Path) -> None:
    program = LightningProgram(tmp_path)
    program.attach(run_dir)
    program.trainer.validate(program.model, DataLoader(program.rows, 24), verbose=False)
    assert program.trainer.callbacks[0].guard is None
    assert not run_dir.exists()


def test_a_trainer_of_pytorch_lightning_is_refused() -> None:
    class Other(SimpleNamespace):
        __module__ = "pytorch_lightning.trainer.trainer"

    trainer = Other(strategy=SimpleNamespace(handles_gradient_accumulation=False))
    with pytest.raises(ConfigError, match=r"Trainer of pytorch_lightning: use lightning\.pytorch"):
        HoldfastCallback().setup(trainer, Net(), "fit")


class Manual(Net):
    automatic_optimization = False


class Silent(Net):
    def training_step(self, batch: Any) -> None:
        """Return nothing."""


@pytest.mark.parametrize(
    ("model", "said"),
    [(Manual(), "manual optimization"), (Silent(), "training_step returned None")],
)
def test_what_cannot_be_guarded_is_refused(
    model: LightningModule, said: str, run_dir: Path, tmp_path: Path
) -> None:
    program = LightningProgram(tmp_path, gradient_clip_val=None, accumulate_grad_batches=1)
    program.model = model
    program.attach(run_dir)
    with pytest.raises(ConfigError, match=said):
        program.train()
    assert "advance" not in vars(program.trainer.fit_loop.epoch_loop)


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.integrations.adapter.version", lambda package: "3.0.1")
    with pytest.raises(ConfigError, match=r"lightning 3.0.1 is installed, .* tested with 2.6"):
        holdfast.integrations.lightning.require("lightning", "2.6")


def test_fabric_needs_no_adapter() -> None:
    def train(*, guarded: bool, fault: float | None = None) -> str:
        torch.manual_seed(3)
        fabric = Fabric(accelerator="cpu", devices=1)
        net = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Dropout(0.1), nn.Linear(16, 4))
        model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
        passes = iter(range(1000))
        net[1].register_forward_hook(
            lambda _, __, out: out * fault if next(passes) == 5 and fault else None
        )

        def forward_backward(parts: list[torch.Tensor]) -> torch.Tensor:
            total = torch.zeros(())
            for number, part in enumerate(parts):
                last = number == len(parts) - 1
                with fabric.no_backward_sync(model, enabled=not last):
                    loss = model(part).square().mean() / len(parts)
                    fabric.backward(loss)
                total = total + loss.detach()
            return total

        guard = Guard(model, optimizer.optimizer, clip_grad_norm=0.5, audit=1.0)
        draw = torch.Generator().manual_seed(1)
        with protect(net):
            for _ in range(5):
                parts = [torch.randn(4, 8, generator=draw) for _ in range(2)]
                if guarded:
                    guard.step(forward_backward, parts)
                else:
                    forward_backward(parts)
                    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                    optimizer.step()
                    optimizer.zero_grad()
        return state_digest([net.state_dict(), optimizer.state_dict()])

    bare = train(guarded=False)
    assert train(guarded=False, fault=1.01) != bare
    assert train(guarded=True) == train(guarded=True, fault=1.01) == bare
