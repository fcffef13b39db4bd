"""Loops whose models are out of the ordinary: experts, adapters, checkpoints, compiled code."""

from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW
from torch.optim.lr_scheduler import LinearLR
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from holdfast import Guard, Snapshots, protect
from holdfast_lab.trainer.gpt import GPT, Block, loss
from holdfast_lab.zoo.loop import Form, Loop, draw_tokens
from holdfast_lab.zoo.loops_language import CONTEXT, SMALL, VOCABULARY


class _TokenLoop(Loop):
    """Trains a model of tokens with AdamW: the body that the loops of this file share.

    A shuffling ``DataLoader``, ``zero_grad`` first, clipping, and a schedule that advances in every
    step. ``objective`` is the loss of a batch.
    """

    form = Form.STEP
    epochs: ClassVar[int] = 3

    def make(self, model: nn.Module, trained: list[nn.Parameter] | None = None) -> None:
        """Set up the run of a model."""
        self.model = model
        rows = draw_tokens(20, CONTEXT + 1, below=VOCABULARY, seed=5)
        self.loader: DataLoader[torch.Tensor] = DataLoader(
            rows,  # type: ignore[arg-type]
            batch_size=4,
            shuffle=True,
        )
        self.optimizer = AdamW(trained or model.parameters(), lr=5e-3)
        self.optimizers = (self.optimizer,)
        self.scheduler = LinearLR(self.optimizer, total_iters=10)
        self.steps = self.epochs * len(self.loader)

    def parts(self) -> tuple[Any, ...]:
        """Return the schedule."""
        return (self.scheduler,)

    def objective(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the loss of a batch."""
        return loss(self.model, rows[:, :-1], rows[:, 1:])

    def forward_backward(self, rows: torch.Tensor) -> torch.Tensor:
        """Run one pass."""
        found = self.objective(rows)
        found.backward()
        return found

    def bare(self) -> None:
        """Train in epochs."""
        for _ in range(self.epochs):
            for rows in self.loader:
                self.optimizer.zero_grad(set_to_none=True)
                self.forward_backward(rows)
                clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.scheduler.step()

    def guarded(self) -> None:
        """Train with the steps in the Guard's hands."""
        self.protection = protect(self.model)
        self.snapshots = Snapshots(self.model, self.optimizer, scheduler=self.scheduler)
        with Guard(
            self.model, self.optimizer, snapshots=self.snapshots, clip_grad_norm=1.0
        ) as guard:
            for rows in guard.batches(self.loader, steps=self.steps):
                guard.step(self.forward_backward, rows)


class _Experts(nn.Module):
    """Experts of which each token asks the two that its router likes best."""

    def __init__(self, width: int, experts: int = 4, top: int = 2) -> None:
        super().__init__()
        self.top = top
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(experts)
        )
        self.balance = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the answers of the chosen experts, by the router's weights."""
        tokens = x.flatten(0, -2)
        probabilities = self.router(tokens).softmax(-1)
        weights, chosen = probabilities.topk(self.top, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        shares = functional.one_hot(chosen, len(self.experts)).float().mean((0, 1))
        self.balance = len(self.experts) * (shares * probabilities.mean(0)).sum()
        mixed = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            token, rank = (chosen == number).nonzero(as_tuple=True)
            if len(token):  # an expert that nobody asks has no gradient in this step
                answer = expert(tokens[token]) * weights[token, rank, None]
                mixed = mixed.index_add(0, token, answer)
        return mixed.view_as(x)


class Moe(_TokenLoop):
    """A mixture of experts."""

    name = "moe"
    like = "Mixtral-like: top-2 routing, experts without tokens, a loss that balances the load"
    repeated = "the pass, with its routing"
    remember = "nothing"

    def __init__(self) -> None:
        torch.manual_seed(17)
        model = GPT(SMALL)
        self.experts = _Experts(SMALL.width)
        model.blocks[0].mlp = self.experts
        self.make(model)

    def objective(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the loss of a batch and that of the balance."""
        return super().objective(rows) + 0.01 * self.experts.balance


class _Adapted(nn.Module):
    """A frozen linear layer plus a product of two small trained matrices."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        self.drop = nn.Dropout(0.1)
        nn.init.normal_(self.up.weight, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output with the adapter's."""
        found: torch.Tensor = self.base(x) + 2.0 * self.up(self.down(self.drop(x)))
        return found


class Lora(_TokenLoop):
    """Adapters of a frozen model."""

    name = "lora"
    like = "PEFT: LoRA adapters of the attention, everything else frozen"
    repeated = "the pass"
    remember = "nothing: frozen weights are in the snapshots too, and are compared at rest"

    def __init__(self) -> None:
        torch.manual_seed(19)
        model = GPT(SMALL).requires_grad_(False)
        for block in model.blocks:
            assert isinstance(block, Block)
            block.attn.qkv = _Adapted(block.attn.qkv)  # type: ignore[assignment]
            block.attn.proj = _Adapted(block.attn.proj)  # type: ignore[assignment]
        self.make(model, [p for p in model.parameters() if p.requires_grad])


class _Checkpointed(nn.Module):
    """A block whose activations are computed again in the backward pass."""

    def __init__(self, block: nn.Module, *, reentrant: bool) -> None:
        super().__init__()
        self.block, self.reentrant = block, reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output."""
        found: torch.Tensor = checkpoint(self.block, x, use_reentrant=self.reentrant)
        return found


class Checkpointed(_TokenLoop):
    """Activation checkpointing of the newer kind."""

    name = "checkpointed"
    like = "activation checkpointing (`use_reentrant=False`), with dropout"
    repeated = "the pass, with what it computes again"
    remember = "nothing"
    reentrant: ClassVar[bool] = False

    def __init__(self) -> None:
        torch.manual_seed(23)
        model = GPT(SMALL)
        model.blocks[0] = _Checkpointed(model.blocks[0], reentrant=self.reentrant)
        self.make(model)


class CheckpointedReentrant(Checkpointed):
    """Activation checkpointing of the older kind."""

    name = "checkpointed-reentrant"
    like = "activation checkpointing of the older kind (`use_reentrant=True`)"
    reentrant = True


class Compiled(_TokenLoop):
    """A compiled model."""

    name = "compiled"
    like = "`torch.compile` of the model, by Inductor"
    repeated = "the pass, in the same graph"
    remember = "nothing: `protect` may come before or after `torch.compile`"
    compiles = True

    def __init__(self) -> None:
        torch.manual_seed(29)
        model = GPT(SMALL)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        compiled: Any = torch.compile(model)
        self.make(compiled)
