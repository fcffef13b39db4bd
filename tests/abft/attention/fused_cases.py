"""Attention problems for the fused kernel, and runs of it, of torch's own and of the oracle."""

import math
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
    """The same of the oracle in fp64."""
    q, k, v, grad = (t.double() for t in operands)
    mask = case.additive(operands[0].dtype)
    rest = (None if mask is None else mask.double(), case.causal, case.scale)
    return [*attention(q, k, v, *rest), *attention_gradients(grad, q, k, v, *rest)]


def check_twice(
    found: list[torch.Tensor], reference: list[torch.Tensor], true: list[torch.Tensor]
) -> None:
    """The 2× rule: no error above twice torch's own, beyond a few units of the largest value.

    With a few keys the gradient of q is a difference that cancels: its terms are of order 1.
    """
    least = 1.0 if reference[3].shape[2] < 4 else 0.0
    for name, mine, theirs, truth in zip(NAMES, found, reference, true, strict=True):
        assert mine.shape == theirs.shape == truth.shape, name
        assert mine.dtype == theirs.dtype, name
        if truth.numel() == 0:
            continue
        few = 8 * torch.finfo(mine.dtype).eps * max(truth.abs().max().item(), least)
        error = (mine.double() - truth).abs().max().item()
        allowed = 2 * (theirs.double() - truth).abs().max().item() + few
        assert error <= allowed, f"{name}: {error:.2e} > {allowed:.2e}"
