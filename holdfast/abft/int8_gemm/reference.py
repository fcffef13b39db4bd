"""The oracle: a quantised linear layer in 64-bit integers, with no packing and no checks."""

import torch


def int8_linear_reference(
    a: torch.Tensor,
    weight: torch.Tensor,
    *,
    a_scale: float,
    a_zero_point: int = 0,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    relu: bool = False,
    out_scale: float | None = None,
    out_zero_point: int = 0,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """``(A − za)(W − zw)ᵀ · a_scale · scale + bias``, exact up to its conversion to fp32.

    Args:
        a: uint8 [M, K]; weight: int8 [N, K]; scale, zero_point: [1] or [N], of the weight.
        out_scale: quantises the output to uint8; dtype: of the output else.
    """
    zero = torch.zeros(1, dtype=torch.long) if zero_point is None else zero_point.long()
    exact = (a.long() - a_zero_point) @ (weight.long() - zero[:, None]).T
    inverse = 1.0 / torch.tensor(1.0 if out_scale is None else out_scale)
    factor = scale.float() * torch.tensor(a_scale, dtype=torch.float32) * inverse
    added = torch.zeros(1) if bias is None else bias.float() * inverse
    y = exact.float() * factor + added
    if relu:
        y = y.clamp_min(0.0)
    if out_scale is None:
        return y.to(dtype)
    return (y.round() + out_zero_point).clamp(0, 255).to(torch.uint8)
