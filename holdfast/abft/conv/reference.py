"""Convolutions and their gradients in fp64, with bounds that no healthy kernel exceeds."""

from typing import NamedTuple

import torch

from holdfast.abft.conv.problem import Convolution, ImageMap
from holdfast.abft.thresholds.analytic import element_bound


class Exact(NamedTuple):
    """Values in fp64, and a bound on a kernel's error."""

    values: torch.Tensor
    bound: torch.Tensor


def exact_images(mapped: ImageMap, dtype: torch.dtype) -> Exact:
    """Compute y of ``L(x, w) + bias``, in fp64; the bound holds for a kernel of ``dtype``."""
    images, weight = mapped.images.detach().double(), mapped.weight.detach().double()
    values = mapped.apply(images, weight)
    magnitude = mapped.apply(images.abs(), weight.abs())
    if mapped.bias is not None:
        bias = mapped.bias.detach().double().view(1, -1, *[1] * (values.dim() - 2))
        values, magnitude = values + bias, magnitude + bias.abs()
    stored = weight[0, 0].numel()
    return _exact(values, magnitude, mapped.inner + 1, dtype, stored, images, weight)


def exact_weight(convolution: Convolution, gradient: torch.Tensor, dtype: torch.dtype) -> Exact:
    """Compute the gradient of the weight."""
    images, gradient = convolution.images.detach().double(), gradient.detach().double()
    values = convolution.grad_weight(gradient, images)
    magnitude = convolution.grad_weight(gradient.abs(), images.abs())
    inner = max(images.numel() // images.shape[1], gradient.numel() // gradient.shape[1])
    return _exact(values, magnitude, inner, dtype, len(images), images, gradient)


def exact_bias(gradient: torch.Tensor, dtype: torch.dtype) -> Exact:
    """Compute the gradient of the bias."""
    wide, over = gradient.detach().double(), [0, *range(2, gradient.dim())]
    return _exact(wide.sum(over), wide.abs().sum(over), wide[:, 0].numel(), dtype, 1)


def _exact(
    values: torch.Tensor,
    magnitude: torch.Tensor,
    inner: int,
    dtype: torch.dtype,
    stored: int,
    *factors: torch.Tensor,
) -> Exact:
    """Bound the error, of a kernel too that flushes subnormal factors to zero.

    Such as have no code for 16 bits round to them ``stored`` times: for each tap, or each image.
    """
    largest = max([1.0, *(float(each.nan_to_num(0, 0, 0).abs().max()) for each in factors)])
    bound = element_bound(magnitude, inner, dtype, largest)
    bound += stored * torch.finfo(dtype).eps * magnitude
    return Exact(values, bound.masked_fill(magnitude > torch.finfo(dtype).max / 2, torch.inf))
