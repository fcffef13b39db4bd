"""Attention in plain torch, with which tests compare the fused kernel and the sections."""

import math
from typing import Any

import torch


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    factors: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``softmax(scale · q kᵀ + mask) v`` and the logarithm of the softmax's denominator.

    The arguments are those of ``holdfast.abft.attention.cuda.fused_attention``, in any floating
    dtype; in fp64 this is the oracle. The results are differentiable. ``factors`` are what dropout
    multiplies the probabilities by: 0, or 1/(1 − p).
    """
    groups = q.shape[1] // k.shape[1] if k.shape[1] else 1
    k, v = (t.repeat_interleave(groups, 1) for t in (k, v))
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = _masked(q @ k.transpose(-2, -1) * scale, mask, causal)
    empty = (scores == -math.inf).all(-1, keepdim=True)
    scores = scores.masked_fill(empty, 0.0)
    probabilities = scores.softmax(-1).masked_fill(empty, 0.0)
    lse = scores.logsumexp(-1) if scores.shape[-1] else scores.new_zeros(scores.shape[:-1])
    if factors is not None:
        probabilities = probabilities * factors
    return probabilities @ v, lse.masked_fill(empty.squeeze(-1), 0.0)


def _masked(scores: torch.Tensor, mask: torch.Tensor | None, causal: bool) -> torch.Tensor:
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -math.inf)
    elif mask is not None:
        scores = scores + mask
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    return scores


def attention_gradients(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute gradients of ``(attention(q, k, v, …)[0] · grad).sum()`` by q, k and v."""
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    with torch.enable_grad():
        output, _ = attention(q, k, v, *options)
        of_q, of_k, of_v = torch.autograd.grad(output, (q, k, v), grad)
    return of_q, of_k, of_v
