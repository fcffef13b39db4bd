"""Loops with special optimizers: sparse tables, Muon with AdamW, a loss scale, L-BFGS."""

from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_
from torch.optim import LBFGS, SGD, Adagrad, AdamW, Muon, SparseAdam
from torch.optim.lr_scheduler import MultiStepLR
from torch.utils.data import DataLoader, TensorDataset

from holdfast import Guard, Optimizers, Snapshots, protect
from holdfast_lab.trainer.gpt import GPT, loss
from holdfast_lab.zoo.loop import Form, Loop, draw, draw_tokens
from holdfast_lab.zoo.loops_language import CONTEXT, SMALL, VOCABULARY


class _Dlrm(nn.Module):
    """Sparse tables, two small networks, and the products of all pairs of embeddings."""

    def __init__(self, tables: int = 3, rows: int = 20, width: int = 8) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(rows, width, mode="sum", sparse=True) for _ in range(tables)
        )
        self.bottom = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, width), nn.ReLU())
        pairs = tables * (tables + 1) // 2
        self.top = nn.Sequential(nn.Linear(width + pairs, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        """Return a logit for each row of dense [B, 5] and sparse [B, tables, bag]."""
        x = self.bottom(dense)
        bags = [table(sparse[:, n]) for n, table in enumerate(self.tables)]
        features = torch.stack([x, *bags], 1)
        products = features @ features.mT
        row, column = torch.tril_indices(len(bags) + 1, len(bags) + 1, -1)
        found: torch.Tensor = self.top(torch.cat([x, products[:, row, column]], 1)).squeeze(1)
        return found


class Dlrm(Loop):
    """A recommendation model with sparse gradients."""

    name = "dlrm"
    like = "DLRM: `EmbeddingBag(sparse=True)` by SparseAdam, the dense part by Adagrad"
    form = Form.STEP
    repeated = "the pass"
    remember = (
        "`Optimizers(…)` for both; without clipping, as sparse gradients have no clip in torch"
    )

    epochs = 3

    def __init__(self) -> None:
        torch.manual_seed(61)
        self.model = _Dlrm()
        dense, clicks = draw(24, 5, seed=61), draw_tokens(24, below=2, seed=62).float()
        sparse = draw_tokens(24, 3, 2, below=20, seed=63)
        self.loader = DataLoader(TensorDataset(dense, sparse, clicks), batch_size=6, shuffle=True)
        self.sparse = SparseAdam(self.model.tables.parameters(), lr=1e-2)
        others = [*self.model.bottom.parameters(), *self.model.top.parameters()]
        self.dense = Adagrad(others, lr=5e-2)
        self.optimizers = (self.sparse, self.dense)
        self.steps = self.epochs * len(self.loader)

    def forward_backward(self, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Run one pass."""
        dense, sparse, clicks = batch
        found = functional.binary_cross_entropy_with_logits(self.model(dense, sparse), clicks)
        found.backward()
        return found

    def bare(self) -> None:
        """Train in epochs."""
        for _ in range(self.epochs):
            for batch in self.loader:
                self.sparse.zero_grad()
                self.dense.zero_grad()
                self.forward_backward(batch)
                self.sparse.step()
                self.dense.step()

    def guarded(self) -> None:
        """Train with the steps in the Guard's hands."""
        self.protection = protect(self.model)
        both = Optimizers(self.sparse, self.dense)
        self.snapshots = Snapshots(self.model, both)
        with Guard(self.model, both, snapshots=self.snapshots) as guard:
            for batch in guard.batches(self.loader, steps=self.steps):
                guard.step(self.forward_backward, batch)


class MuonAdamW(Loop):
    """Two optimizers whose settings the loop writes by hand in each step."""

    name = "muon"
    like = "modded-nanogpt: Muon for matrices, AdamW for the rest, rate and momentum set by hand"
    form = Form.STEP
    repeated = "the pass"
    remember = "`Optimizers(…)`; set rates before `guard.step`: they belong to the step"

    steps = 14

    def __init__(self) -> None:
        torch.manual_seed(67)
        self.model = GPT(SMALL)
        matrices = [p for p in self.model.blocks.parameters() if p.ndim == 2]
        known = set(map(id, matrices))
        others = [p for p in self.model.parameters() if id(p) not in known]
        self.muon = Muon(matrices, lr=2e-2, momentum=0.95, weight_decay=0.0)
        self.adam = AdamW(others, lr=3e-3, betas=(0.8, 0.95))
        self.optimizers = (self.muon, self.adam)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["initial_lr"] = group["lr"]
        self.batches = [
            draw_tokens(4, CONTEXT + 1, below=VOCABULARY, seed=step) for step in range(self.steps)
        ]

    def set_rates(self, step: int) -> None:
        """Set the learning rates and Muon's momentum for a step."""
        share = min(1.0, 2 * (1 - step / self.steps))
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * share
        for group in self.muon.param_groups:
            group["momentum"] = 0.85 + 0.1 * min(step / 10, 1.0)

    def forward_backward(self, rows: torch.Tensor) -> torch.Tensor:
        """Run one pass."""
        found = loss(self.model, rows[:, :-1], rows[:, 1:])
        found.backward()
        return found

    def bare(self) -> None:
        """Train."""
        for step, rows in enumerate(self.batches):
            self.forward_backward(rows)
            self.set_rates(step)
            for optimizer in self.optimizers:
                optimizer.step()
            self.model.zero_grad(set_to_none=True)

    def guarded(self) -> None:
        """Train with the steps in the Guard's hands."""
        self.protection = protect(self.model)
        both = Optimizers(*self.optimizers)
        self.snapshots = Snapshots(self.model, both)
        with Guard(self.model, both, snapshots=self.snapshots) as guard:
            for rows in guard.batches(self.batches, steps=self.steps):
                self.set_rates(guard.steps_done)
                guard.step(self.forward_backward, rows)


class Scaled(Loop):
    """Mixed precision by the recipe of torch."""

    name = "gradscaler"
    like = (
        "torch's recipe for fp16: `autocast`, `GradScaler` with overflows, clipping after unscale"
    )
    form = Form.STEP
    repeated = "the pass, at the same scale"
    remember = "`Snapshots(scaler=…)`, which the Guard then takes"

    steps = 30

    def __init__(self) -> None:
        torch.manual_seed(71)
        self.model: nn.Module = nn.Sequential(
            nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32), nn.Dropout(0.1), nn.Linear(32, 4)
        )
        self.optimizer = SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.optimizers = (self.optimizer,)
        self.scheduler = MultiStepLR(self.optimizer, [10, 20])
        self.scaler = GradScaler("cpu", init_scale=2.0**17, growth_interval=3)
        self.batches = [
            (draw(6, 8, seed=n), draw_tokens(6, below=4, seed=n)) for n in range(self.steps)
        ]

    def parts(self) -> tuple[Any, ...]:
        """Return the schedule and the scaler."""
        return self.scheduler, self.scaler

    def forward_backward(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Run one pass."""
        inputs, labels = batch
        with torch.autocast("cpu", torch.float16):
            found = functional.cross_entropy(self.model(inputs), labels)
        self.scaler.scale(found).backward()
        return found

    def bare(self) -> None:
        """Train as the recipe does."""
        for batch in self.batches:
            self.optimizer.zero_grad()
            self.forward_backward(batch)
            self.scaler.unscale_(self.optimizer)
            clip_grad_norm_(self.model.parameters(), 1.0)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()

    def guarded(self) -> None:
        """Train with the steps in the Guard's hands."""
        self.protection = protect(self.model)
        self.snapshots = Snapshots(
            self.model, self.optimizer, scheduler=self.scheduler, scaler=self.scaler
        )
        with Guard(
            self.model, self.optimizer, snapshots=self.snapshots, clip_grad_norm=1.0
        ) as guard:
            for batch in guard.batches(self.batches, steps=self.steps):
                guard.step(self.forward_backward, batch)


class Lbfgs(Loop):
    """An optimizer that runs passes of its own."""

    name = "lbfgs"
    like = "PyTorch's sine waves: L-BFGS, whose `step(closure)` runs passes of its own"
    form = Form.REFUSED
    repeated = "nothing"
    remember = "an optimizer whose `step()` takes nothing: AdamW, SGD, Muon, Adafactor"

    def __init__(self) -> None:
        torch.manual_seed(73)
        self.model: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.optimizer = LBFGS(self.model.parameters(), lr=0.5, max_iter=4)
        self.optimizers = (self.optimizer,)
        self.inputs = draw(12, 4, seed=73)
        self.targets = self.inputs.sin().sum(1, keepdim=True)

    def closure(self) -> torch.Tensor:
        """Run one pass."""
        self.optimizer.zero_grad()
        found = functional.mse_loss(self.model(self.inputs), self.targets)
        found.backward()
        return found

    def bare(self) -> None:
        """Train."""
        for _ in range(5):
            self.optimizer.step(self.closure)

    def guarded(self) -> None:
        """Try to train with a Guard, which refuses."""
        self.protection = protect(self.model)
        self.snapshots = Snapshots(self.model, self.optimizer)
        with Guard(self.model, self.optimizer, snapshots=self.snapshots) as guard:
            for _ in range(guard.steps_done, 5):
                guard.step(lambda _: self.closure(), None)
