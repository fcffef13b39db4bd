"""Models of the stages in plain torch, so that the machine needs no other package."""

from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

from bench.gpu.stage import Machine


@dataclass(frozen=True)
class Shape:
    """A decoder: GPT-2's blocks, or Llama's where ``kv_heads`` is given.

    With ``products`` attention is computed by two products with a softmax between, as in BERT.
    """

    name: str
    layers: int
    width: int
    heads: int
    hidden: int
    vocabulary: int
    context: int
    kv_heads: int | None = None
    products: bool = False


GPT2_MEDIUM = Shape("gpt2-medium", 24, 1024, 16, 4096, 50304, 1024)
LLAMA_8B = Shape("llama-8b", 2, 4096, 32, 14336, 0, 2048, kv_heads=8)
BERT_BASE, BERT_LARGE = (
    Shape(name, layers, 64 * heads, heads, 256 * heads, 30522, 128, products=True)
    for name, layers, heads in (("bert-base", 12, 12), ("bert-large", 24, 16))
)
# Fewer layers where all would take too much memory, or too long to compile.
HALF, SIXTH = (replace(GPT2_MEDIUM, layers=layers) for layers in (12, 4))
TOY_GPT2 = Shape("gpt2-medium", 1, 32, 2, 64, 40, 16)
TOY_BERT = replace(TOY_GPT2, name="bert-base", products=True)
TOY_LLAMA = Shape("llama-8b", 1, 32, 4, 48, 0, 16, kv_heads=2)


class _Attention(nn.Module):
    """Attention of a shape without rotations, causal and by torch's fused kernel by default."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.kv_heads = shape.heads, shape.kv_heads or shape.heads
        self.head, self.products = shape.width // shape.heads, shape.products
        columns, bias = (self.heads + 2 * self.kv_heads) * self.head, shape.kv_heads is None
        self.qkv = nn.Linear(shape.width, columns, bias=bias)
        self.out = nn.Linear(shape.width, shape.width, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(x).unflatten(-1, (-1, self.head)).transpose(1, 2)
        q, k, v = parts.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        if self.products:
            mixed = (q @ k.mT * self.head**-0.5).softmax(-1) @ v
        else:
            grouped = self.heads != self.kv_heads
            mixed = functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=grouped
            )
        out: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class _Gelu(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.up = nn.Linear(shape.width, shape.hidden)
        self.down = nn.Linear(shape.hidden, shape.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(functional.gelu(self.up(x), approximate="tanh"))
        return out


class _SwiGlu(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(shape.width, shape.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return out


class _Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        llama = shape.kv_heads is not None
        norm = nn.RMSNorm if llama else nn.LayerNorm
        self.norms = nn.ModuleList(norm(shape.width) for _ in range(2))
        self.attention = _Attention(shape)
        self.mlp = _SwiGlu(shape) if llama else _Gelu(shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norms[0](x))
        out: torch.Tensor = x + self.mlp(self.norms[1](x))
        return out


class Decoder(nn.Module):
    """A decoder whose call returns its loss.

    GPT-2's is the cross-entropy of each token [batch, context] after those before it. Llama's
    blocks alone are given activations [batch, context, width], and their loss is a mean square.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.blocks = nn.ModuleList(_Block(shape) for _ in range(shape.layers))
        if shape.vocabulary:
            self.tokens = nn.Embedding(shape.vocabulary, shape.width)
            self.positions = nn.Embedding(shape.context, shape.width)
            self.norm = nn.LayerNorm(shape.width)
            self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """Compute the loss, a scalar."""
        x: torch.Tensor = given
        if self.shape.vocabulary:
            x = self.tokens(given) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        if not self.shape.vocabulary:
            return x.float().square().mean()
        logits = self.head(self.norm(x))[:, :-1].flatten(0, 1)
        return functional.cross_entropy(logits.float(), given[:, 1:].flatten())

    def batch(self, sequences: int, device: torch.device) -> torch.Tensor:
        """Draw an input, the same every time."""
        generator = torch.Generator(device).manual_seed(1)
        size = (sequences, self.shape.context)
        if self.shape.vocabulary:
            return torch.randint(self.shape.vocabulary, size, generator=generator, device=device)
        return torch.randn(*size, self.shape.width, generator=generator, device=device)


class Training:
    """A model with its optimizer. Each has code of its own, so that graphs are compiled for it."""

    def __init__(self, machine: Machine, shape: Shape, sequences: int, mode: str) -> None:
        torch.manual_seed(0)
        code = Decoder.forward.__code__.replace()
        own = FunctionType(code, Decoder.forward.__globals__, "forward")
        self.model = type("Decoder", (Decoder,), {"forward": own})(shape).to(machine.device)
        options: dict[str, Any] = {"mode": mode} if mode == "max-autotune" else {}
        self.run = self.model if mode == "eager" else torch.compile(self.model, **options)
        fused = not machine.rehearsed
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4, fused=fused)
        self.batch = self.model.batch(sequences, machine.device)
        self.machine = machine

    def step(self) -> float:
        """Train one step; return its loss, for which the host waits as a training loop does."""
        self.optimizer.zero_grad()
        with torch.autocast(self.machine.device.type, torch.bfloat16):
            loss = self.run(self.batch)
        loss.backward()
        clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return float(loss.detach())
