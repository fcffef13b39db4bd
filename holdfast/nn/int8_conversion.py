"""Conversion of linear layers to 8-bit integers."""

import torch
from torch import nn

from holdfast.nn.stored import unsupported


def quantise_weight(
    weight: torch.Tensor, *, per_channel: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a weight [N, K] symmetrically; return ``rint(W / scale)`` and the scale [N] or [1].

    Raises:
        ValueError: The weight holds NaN or INF.
    """
    wide = weight.detach().float()
    if wide.is_meta:
        return wide.to(torch.int8), wide.new_empty(len(wide) if per_channel else 1)
    if not bool(wide.isfinite().all()):
        raise ValueError("the weight holds NaN or INF: load it again")
    largest = wide.abs().amax(1) if per_channel else wide.abs().max().reshape(1)
    scale = torch.where(largest > 0, largest / 127, torch.ones_like(largest))
    scale = scale.clamp_min(torch.finfo(torch.float32).tiny)
    return (wide / scale[:, None]).round().clamp_(-127, 127).to(torch.int8), scale


def quantisation(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scale and zero point of a quantised weight tensor of torch."""
    if weight.qscheme() in (torch.per_channel_affine, torch.per_channel_symmetric):
        if weight.q_per_channel_axis() != 0:
            raise TypeError("the weight has scales by input: only those by output are verified")
        return weight.q_per_channel_scales(), weight.q_per_channel_zero_points()
    return torch.tensor(weight.q_scale()), torch.tensor(weight.q_zero_point())


def fused_relu(module: nn.Module) -> bool:
    """Return whether a quantised layer of torch clamps its output at 0.

    Raises:
        TypeError: The module is not one of torch's quantised linear layers.
    """
    from torch.ao.nn import quantized
    from torch.ao.nn.intrinsic import quantized as fused

    plain = (quantized.Linear, quantized.dynamic.Linear)
    clamped = (fused.LinearReLU, fused.dynamic.LinearReLU)
    if type(module) not in (*plain, *clamped):
        wanted = "torch.ao.nn.quantized.Linear or its dynamic sibling, each plain or as LinearReLU"
        remedy = "from_float takes torch.nn.Linear; other modules stay as they are"
        raise unsupported("from_quantized", wanted, module, remedy)
    return type(module) in clamped
