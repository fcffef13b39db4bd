"""A byte-level GPT of plain PyTorch modules, its optimizer and its learning-rate schedule."""

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from holdfast.errors import ConfigError

_INIT_STD = 0.02
_FINAL_FRACTION = 0.1


@dataclass(frozen=True)
class GPTConfig:
    """The size of a GPT.

    Args:
        layers: Number of blocks.
        heads: Number of attention heads of a block; divides ``width``.
        width: Size of the residual stream.
        context: Length of the longest sequence, in tokens.
        vocabulary: Number of different tokens; 256 for bytes.
        dropout: Probability of dropping an activation, 0 ≤ p < 1.

    Raises:
        ConfigError: A size is not a positive integer, or the sizes do not fit together.
    """

    layers: int = 4
    heads: int = 4
    width: int = 256
    context: int = 128
    vocabulary: int = 256
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "width", "context", "vocabulary"):
            size = getattr(self, name)
            if not isinstance(size, int) or size < 1:
                raise ConfigError(f"{name} = {size!r} must be a positive integer")
        if self.width % self.heads:
            raise ConfigError(
                f"width = {self.width} is not divisible by heads = {self.heads}; change one"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(f"dropout = {self.dropout!r} must be at least 0 and less than 1")


class Attention(nn.Module):
    """Causal self-attention as two batched matmuls: Q·Kᵀ and A·V."""

    mask: torch.Tensor

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.proj = nn.Linear(config.width, config.width)
        self.dropout = nn.Dropout(config.dropout)
        future = torch.ones(config.context, config.context, dtype=torch.bool).triu(1)
        self.register_buffer("mask", future, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute attention over x [B, T, width]; each position sees itself and earlier ones."""
        batch, length, width = x.shape
        heads = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(width // self.heads)
        scores = scores.masked_fill(self.mask[:length, :length], -math.inf)
        attention = self.dropout(functional.softmax(scores, dim=-1))
        mixed = torch.matmul(attention, value).transpose(1, 2).reshape(batch, length, width)
        output: torch.Tensor = self.dropout(self.proj(mixed))
        return output


class MLP(nn.Module):
    """The position-wise network: width → 4·width → width with GELU between."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the network to each position of x [B, T, width]."""
        output: torch.Tensor = self.dropout(self.down(functional.gelu(self.up(x))))
        return output


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.width)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.width)
        self.mlp = MLP(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add attention and MLP to the residual stream x [B, T, width]."""
        x = x + self.attn(self.ln_1(x))
        output: torch.Tensor = x + self.mlp(self.ln_2(x))
        return output


class GPT(nn.Module):
    """A GPT-2 style language model whose head shares the embedding's weight.

    Weights are drawn from the global generator, which has to be seeded before: N(0, 0.02²), and
    residual projections smaller by √(2·layers).
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.ln_f = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.head.weight = self.embed.weight
        self._initialise()

    def _initialise(self) -> None:
        residual_std = _INIT_STD / math.sqrt(2 * self.config.layers)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() >= 2:
                residual = name.endswith(("proj.weight", "down.weight"))
                nn.init.normal_(parameter, std=residual_std if residual else _INIT_STD)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Compute the logits [B, T, vocabulary] of int64 tokens [B, T].

        Raises:
            ValueError: The sequence is longer than the context.
        """
        length = tokens.shape[1]
        if length > self.config.context:
            raise ValueError(
                f"sequence of {length} tokens exceeds the context of {self.config.context}; cut it"
            )
        places = torch.arange(length, device=tokens.device)
        x = self.dropout(self.embed(tokens) + self.positions(places))
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.ln_f(x))
        return logits


def loss(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Compute the mean cross entropy, in nats per token, of targets [B, T] given inputs [B, T]."""
    logits = model(inputs)
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_optimizer(model: nn.Module, lr: float, weight_decay: float) -> AdamW:
    """Make an AdamW optimizer that decays matrices and embeddings but not biases and norms.

    Raises:
        ConfigError: ``lr`` is not positive or ``weight_decay`` is negative.
    """
    if not 0 < lr < math.inf:
        raise ConfigError(f"lr = {lr!r} must be a positive number")
    if not 0 <= weight_decay < math.inf:
        raise ConfigError(f"weight_decay = {weight_decay!r} must be 0 or a positive number")
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=lr, betas=(0.9, 0.95))


class WarmupCosine(LRScheduler):
    """Learning-rate schedule: linear warm-up to the base rate, then a cosine down to a tenth of it.

    The rate is a closed form of the step, so that a restored schedule continues bit for bit.
    ``state_dict()`` holds plain values only.
    """

    def __init__(self, optimizer: Optimizer, warmup_steps: int, steps: int) -> None:
        self.warmup_steps = warmup_steps
        self.steps = steps
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        """Return the learning rate of each parameter group at the current step."""
        return [base * self._fraction(self.last_epoch) for base in self.base_lrs]

    def _fraction(self, step: int) -> float:
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        progress = min(1.0, (step - self.warmup_steps) / (self.steps - self.warmup_steps))
        return _FINAL_FRACTION + (1 - _FINAL_FRACTION) * (1 + math.cos(math.pi * progress)) / 2


def make_schedule(optimizer: Optimizer, warmup_steps: int, steps: int) -> WarmupCosine:
    """Make the learning-rate schedule of a run of ``steps`` steps.

    Raises:
        ConfigError: The warm-up is negative or not shorter than the run.
    """
    if not 0 <= warmup_steps < steps:
        raise ConfigError(
            f"warmup_steps = {warmup_steps} must be at least 0 and less than steps = {steps}"
        )
    return WarmupCosine(optimizer, warmup_steps, steps)
