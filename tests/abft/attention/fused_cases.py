"""Attention problems for the fused kernel, and runs of it, of torch's own and of the oracle."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import holdfast
from holdfast import native
from holdfast.abft.attention.reference import attention, attention_gradients

NATIVE = pytest.mark.skipif(native.core is None, reason="only the native core fuses attention")
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
NAMES = ("output", "logsumexp", "grad_q", "grad_k", "grad_v")

forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def scaled(index: tuple[object, ...], factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that multiplies a part of a tensor, and leaves its argument as it is."""

    def change(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x[index] *= factor
        return x

    return change


# What coherent data is made of random data [.., length, width].
COHERENT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "random": lambda x: x,
    "zeros": torch.zeros_like,
    "ones": torch.ones_like,
    "tenths": lambda x: torch.full_like(x, 0.1),
    "constant rows": lambda x: x[..., :1, :].expand_as(x).contiguous(),
    "constant columns": lambda x: x[..., :1].expand_as(x).contiguous(),
    "positive": torch.abs,
    "around five": lambda x: x * 0.01 + 5,
    "sorted": lambda x: x.sort(-2).values,
    "padded": scaled((..., slice(20, None), slice(None)), 0.0),
    "outlier channel": scaled((..., 3), 1e5),
    "small, with an outlier channel": lambda x: scaled((..., 3), 1e5)(x * 2e-3),
    "outlier row": scaled((..., 5, slice(None)), 1e5),
    "one-hot": lambda x: x * 30,
    "tiny": lambda x: x * 1e-20,
    "subnormal": lambda x: x * 1e-40,
    "large": lambda x: x * 1e8,
}
OVERFLOWS_FP16 = {"outlier channel", "outlier row", "large"}


@dataclass(frozen=True)
class Case:
    """Shapes, mask and scale of one attention."""

    batch: int = 1
    heads: int = 2
    kv_heads: int = 2
    queries: int = 16
    keys: int = 16
    width: int = 8
    causal: bool = False
    mask: str = ""  # "", full, keys, rows, heads, empty_rows, bool
    scale: float | None = None

    def operands(self, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
        """q, k, v and the gradient of the output."""
        generator = torch.Generator().manual_seed(seed)
        long = (self.batch, self.heads, self.queries, self.width)
        short = (self.batch, self.kv_heads, self.keys, self.width)
        shapes = (long, short, short, long)
        return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]

    def additive(self, dtype: torch.dtype) -> torch.Tensor | None:
        """The mask as torch's kernel takes it."""
        generator = torch.Generator().manual_seed(1)
        if self.mask == "full":
            return torch.randn(self.queries, self.keys, generator=generator).to(dtype)
        if self.mask == "heads":
            shape = (self.batch, self.heads, self.queries, self.keys)
            return torch.randn(shape, generator=generator).to(dtype)
        if self.mask == "rows":
            return torch.randn(self.batch, 1, self.queries, 1, generator=generator).to(dtype)
        if self.mask == "keys":
            mask = torch.zeros(self.batch, 1, 1, self.keys, dtype=dtype)
            mask[..., (self.keys + 1) // 2 :] = -math.inf
            return mask
        if self.mask == "empty_rows":
            mask = torch.zeros(self.queries, self.keys, dtype=dtype)
            mask[::3] = -math.inf
            return mask
        return None


def ours(
    case: Case, operands: list[torch.Tensor], mask: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """Output, logarithm and gradients of the protected kernel."""
    with holdfast.protect(nn.Identity()):
        return torchs(case, operands, mask)


def torchs(
    case: Case, operands: list[torch.Tensor], mask: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """The same of whichever kernel is in place."""
    q, k, v, grad = operands
    mask = case.additive(q.dtype) if mask is None else mask
    options = {"attn_mask": mask, "scale": case.scale}
    out, lse = forward(q, k, v, 0.0, case.causal, **options)
    return [out, lse, *backward(grad, q, k, v, out, lse, 0.0, case.causal, **options)]


def exact(case: Case, operands: list[torch.Tensor]) -> list[torch.Tensor]:
    q, k, v, grad = (t.double() for t in operands)
    mask = case.additive(operands[0].dtype)
    rest = (None if mask is None else mask.double(), case.causal, case.scale)
    return [*attention(q, k, v, *rest), *attention_gradients(grad, q, k, v, *rest)]


def largest_terms(case: Case, operands: list[torch.Tensor]) -> list[float]:
    """The largest sum of absolute terms in each result, which its rounding errors are relative to.

    The result may be far smaller: the gradient of q is 0 in a row that sees one key.
    """
    q, k, v, grad = (t.double() for t in operands)
    mask = case.additive(operands[0].dtype)
    rest = (None if mask is None else mask.double(), case.causal, case.scale)
    eye = torch.eye(case.keys, dtype=torch.float64).expand(*k.shape[:2], -1, -1)
    shares, lse = attention(q, k, eye, *rest)

    def of_groups(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(1, (case.kv_heads, -1)).sum(2)

    q, k, v, grad = (t.abs() for t in (q, k, v, grad))
    k, v = (t.repeat_interleave(case.heads // case.kv_heads, 1) for t in (k, v))
    scale = case.width**-0.5 if case.scale is None else abs(case.scale)
    output = shares @ v
    scores = shares * (grad @ v.mT + (grad * output).sum(-1, keepdim=True)) * scale
    terms = [output, lse.abs() + scale * (q @ k.mT).amax(-1), scores @ k]
    terms += [of_groups(scores.mT @ q), of_groups(shares.mT @ grad)]
    return [term.max().item() if term.numel() else 0.0 for term in terms]


def check_twice(case: Case, operands: list[torch.Tensor]) -> None:
    """The 2× rule: no error above twice torch's own, beyond four units of the largest terms."""
    found, reference, true = ours(case, operands), torchs(case, operands), exact(case, operands)
    terms = largest_terms(case, operands)
    for name, mine, theirs, truth, term in zip(NAMES, found, reference, true, terms, strict=True):
        assert mine.shape == theirs.shape == truth.shape, name
        assert mine.dtype == theirs.dtype, name
        if truth.numel() == 0:
            continue
        error = (mine.double() - truth).abs().max().item()
        unit = torch.finfo(mine.dtype).eps * term
        allowed = 2 * (theirs.double() - truth).abs().max().item() + 4 * unit
        assert error <= allowed, f"{name}: {error:.2e} > {allowed:.2e}"
