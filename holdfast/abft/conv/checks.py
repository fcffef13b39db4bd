"""Checks of convolutions by signed sums, in fp32 while nothing is suspect (README.md)."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from holdfast.abft.checksums.weights import signs
from holdfast.abft.conv.problem import Convolution, ImageMap
from holdfast.abft.thresholds import rounding
from holdfast.abft.thresholds.chains import UNBOUNDED
from holdfast.abft.thresholds.protocol import ACCUMULATION

ALIGNED = 16  # channels that a kernel computes at once: fewer cost as much


@dataclass(frozen=True)
class Check:
    """Residuals of signed sums, their thresholds, and the squares that each sum adds up."""

    residual: torch.Tensor
    threshold: torch.Tensor
    squares: torch.Tensor
    count: int

    @property
    def suspects(self) -> torch.Tensor:
        """Sums over their threshold, or without a finite one; bool."""
        return ~((self.residual <= self.threshold) & self.threshold.isfinite())

    @property
    def line(self) -> float:
        """Median of threshold / rms of an element."""
        rms = (self.squares / self.count).sqrt()
        return float((self.threshold / rms).nanmedian())


def check_images(mapped: ImageMap, result: torch.Tensor, dtype: torch.dtype) -> Check:
    """Compare ``L(Σ σₙ xₙ)`` with ``Σ σₙ (yₙ − bias)``, over images or over output channels.

    Sums are computed in ``dtype``. In fp64 energies are exact, else they are estimated.
    """
    few = max(mapped.groups, ALIGNED) * len(result) < result.shape[1]
    sums = (_sums_over_channels if few else _sums_over_images)(mapped, result.detach(), dtype)
    largest, repeats = 1.0, None
    if dtype is torch.float64:
        largest = float(mapped.weight.detach().abs().max())
        repeats = _equal_weights(mapped).view(sums.energy.shape[1], -1).any(1)
    model = _Model(
        mapped.inner + 1,
        sums.terms,
        result.dtype,
        largest=largest,
        # Where 16 bits have no kernel of their own, taps are added in them.
        stored=mapped.weight[0, 0].numel() if mapped.outer == 1 else 1,
        repeats=repeats,
    )
    threshold = model.threshold(sums.energy, sums.squares, sums.actual)
    return Check((sums.predicted - sums.actual).abs_(), threshold, sums.squares, sums.terms)


class _Sums(NamedTuple):
    """Both sides of a check: the number of terms of a sum, their Σ w²x² and Σ y² + bias²."""

    terms: int
    predicted: torch.Tensor
    actual: torch.Tensor
    energy: torch.Tensor
    squares: torch.Tensor


def _sums_over_images(mapped: ImageMap, result: torch.Tensor, dtype: torch.dtype) -> _Sums:
    images, weight, count = mapped.images.detach(), mapped.weight.detach().to(dtype), len(result)
    mixed, actual = _over_images(images.to(dtype)), _over_images(result.to(dtype))
    predicted = mapped.apply(mixed, weight)
    if dtype is torch.float64:
        energy = mapped.apply(_over_images(images.to(dtype).square(), plain=True), weight.square())
        squares = _over_images(result.to(dtype).square(), plain=True)
    else:
        split: torch.Tensor = mixed.unflatten(1, (mapped.groups, -1))
        window = _window(mapped, split.square().sum(2)).repeat_interleave(
            result.shape[1] // mapped.groups, 1
        )
        energy, squares = window * _beside(_norms(mapped, weight), window), actual.square()
        squares = _smoothed(squares)
    if mapped.bias is not None:
        bias = mapped.bias.detach().to(dtype)
        predicted = predicted + _beside(bias * signs(count, dtype).sum(), predicted)
        squares = squares + _beside(bias.square() * count, squares)
    return _Sums(count, predicted, actual, energy, squares)


def _sums_over_channels(mapped: ImageMap, result: torch.Tensor, dtype: torch.dtype) -> _Sums:
    images, weight = mapped.images.detach().to(dtype), mapped.weight.detach().to(dtype)
    split = result.to(dtype).unflatten(1, (mapped.groups, -1))
    signed, actual = signs(split.shape[2], dtype), _over_channels(split)
    predicted = mapped.apply(images, _over_outputs(weight, mapped, signed))
    if dtype is torch.float64:
        squared = _over_outputs(weight.square(), mapped, torch.ones_like(signed))
        energy = mapped.apply(images.square(), squared)
        squares = _over_channels(split.square(), plain=True)
    else:
        mixed = _over_channels(images.unflatten(1, (mapped.groups, -1)))
        window, squares = _window(mapped, mixed.square()), _smoothed(actual.square())
        energy = window * _beside(_norms(mapped, weight).view(mapped.groups, -1).sum(1), window)
    if mapped.bias is not None:
        bias = mapped.bias.detach().to(dtype).view(mapped.groups, -1)
        predicted = predicted + _beside(bias @ signed, predicted)
        squares = squares + _beside(bias.square().sum(1), squares)
    return _Sums(len(signed), predicted, actual, energy, squares)


def check_weight(
    convolution: Convolution, gradient: torch.Tensor, result: torch.Tensor, dtype: torch.dtype
) -> Check:
    """Compare ``⟨gw_o, s ⊗ t⟩`` with ``⟨gy_o, conv(Σ s_c x_c, t)⟩``; transposed, gy is x."""
    left, right = gradient.detach().to(dtype), convolution.images.detach().to(dtype)
    if convolution.transposed:
        left, right = right, left
    groups, (channels, taps) = convolution.groups, (result.shape[1], result[0, 0].numel())
    s, t = signs(channels, dtype), signs(taps, dtype)
    kernel = t.view(1, 1, *result.shape[2:]).expand(groups, 1, *result.shape[2:])
    split = right.unflatten(1, (groups, channels))
    probe, repeats = _probe(convolution, _over_channels(split), kernel, left), None
    if dtype is torch.float64:
        squares_of_right = _over_channels(split.square(), plain=True)
        energies = _probe(convolution, squares_of_right, torch.ones_like(kernel), left)
        energy, repeats = _inner_products(left.square(), energies), _repeats(left)
    else:
        mean = probe.transpose(0, 1).flatten(1).square().mean(1)
        energy = _estimated_energies(left) * mean.repeat_interleave(left.shape[1] // groups)
    actual = result.detach().to(dtype).flatten(1) @ (s.view(-1, 1) * t).flatten()
    if dtype is torch.float64:
        squares = result.detach().to(dtype).flatten(1).square().sum(1)
    else:
        squares = actual.square() + actual.square().mean()
    inner, spread = len(left) * math.prod(left.shape[2:]), _spread(channels) * _spread(taps)
    model = _Model(inner, channels * taps, result.dtype, spread=spread, repeats=repeats)
    threshold = model.threshold(energy, squares, actual)
    residual = (_inner_products(left, probe) - actual).abs_()
    return Check(residual, threshold, squares, channels * taps)


def check_bias(gradient: torch.Tensor, result: torch.Tensor, dtype: torch.dtype) -> Check:
    """Compare the gradient of a bias with sums of its own."""
    left, repeats = gradient.detach().to(dtype), None
    ones = torch.ones_like(left[:1, :1]).expand(len(left), -1, *left.shape[2:])
    if dtype is torch.float64:
        energy, repeats = _inner_products(left.square(), ones), _repeats(left)
    else:
        energy = _estimated_energies(left)
    predicted, actual = _inner_products(left, ones).double(), result.detach().double()
    model = _Model(gradient.numel() // gradient.shape[1], 1, result.dtype, repeats=repeats)
    threshold = model.threshold(energy.double(), actual.square(), actual)
    return Check((predicted - actual).abs(), threshold, actual.square(), 1)


@dataclass(frozen=True)
class _Model:
    """The threshold of sums of ``count`` elements, each of ``inner`` products in one chain.

    ``spread`` bounds how much of coherent errors a sum with these signs adds up, ``largest`` by how
    much a weight enlarges what underflows; ``stored`` counts roundings to 16 bits, and ``repeats``
    marks channels whose products may be equal, so that their roundings have one direction.
    """

    inner: int
    count: int
    dtype: torch.dtype
    spread: float = 0.0
    largest: float = 1.0
    stored: int = 1
    repeats: torch.Tensor | None = None

    def threshold(
        self, energy: torch.Tensor, squares: torch.Tensor, total: torch.Tensor
    ) -> torch.Tensor:
        """Compute T from Σ w²x² and Σ y² over the elements of a sum, and the sum itself."""
        accumulator = ACCUMULATION[self.dtype]
        out, acc = torch.finfo(self.dtype), torch.finfo(accumulator)
        growth = rounding.growth(self.inner, UNBOUNDED)
        model = (rounding.ACCUMULATION_SIGMAS / 2) ** 2 / 6
        output = 0.0 if out.eps == acc.eps else rounding.OUTPUT_SIGMAS * out.eps / 2 / acc.eps
        summed = self.count / 2 + rounding.CHECK_STEPS
        walk = model * (1 + (self.spread or _spread(self.count))) * (growth.walk + summed)
        drift = model * (growth.drift + summed)
        partial = (walk + (self.stored - 1) * output**2) * energy
        partial.add_(squares, alpha=drift + output**2).addcmul_(total, total, value=drift)
        if self.repeats is not None and bool(self.repeats.any()):
            repeated = self.repeats * (model * (growth.repeated - growth.drift))
            partial += _beside(repeated, energy) * (squares + total.square())
        floor = rounding.OUTPUT_SIGMAS * math.sqrt(self.count)
        floor *= rounding.underflow(self.inner, self.dtype, accumulator, self.largest)
        return partial.sqrt_().mul_(acc.eps).add_(floor)


def _spread(count: int) -> float:
    """Return (Σ σ)² / n, at least 1: what equal errors add up to, over what random ones do."""
    return max(1.0, float(signs(count).sum()) ** 2 / count)


def _repeats(left: torch.Tensor) -> torch.Tensor:
    """Mark the channels of [N, C, …] in which neighbours are equal and not zero, bool [C]."""
    flat = left.flatten(2).transpose(0, 1).flatten(1)
    return ((flat[:, 1:] == flat[:, :-1]) & (flat[:, 1:] != 0)).any(1)


def _equal_weights(mapped: ImageMap) -> torch.Tensor:
    """Mark the output channels whose weights are all equal, bool [C]."""
    weight = mapped.weight.detach()
    if mapped.outer == 1:
        weight = weight.unflatten(0, (mapped.groups, -1)).transpose(1, 2).flatten(0, 1)
    others = list(range(1, weight.dim()))
    same: torch.Tensor = weight.amax(others) == weight.amin(others)
    return same


def _over_outputs(weight: torch.Tensor, mapped: ImageMap, signed: torch.Tensor) -> torch.Tensor:
    """Sum a weight over the output channels of each group; one of them is left in each."""
    if mapped.outer == 1:
        return (weight * signed.view(1, -1, *[1] * (weight.dim() - 2))).sum(1, keepdim=True)
    split = weight.reshape(mapped.groups, len(signed), -1)
    return (signed.view(1, 1, -1) @ split).view(mapped.groups, *weight.shape[1:])


def _over_images(images: torch.Tensor, *, plain: bool = False) -> torch.Tensor:
    """Compute Σ σₙ xₙ of images in any dense layout, or their plain sum, [1, C, …]."""
    last = images.dim() > 3 and images.stride(1) == 1 and not images.is_contiguous()
    ordered = images.movedim(1, -1) if last else images
    factors = torch.ones(len(images)).to(images) if plain else signs(len(images), images.dtype)
    mixed = torch.mv(ordered.reshape(len(images), -1).t(), factors).view(1, *ordered.shape[1:])
    return mixed.movedim(-1, 1) if last else mixed


def _over_channels(split: torch.Tensor, *, plain: bool = False) -> torch.Tensor:
    """Sum [N, groups, channels, …] over channels, with signs or plainly, [N, groups, …]."""
    factors = torch.ones(split.shape[2]).to(split) if plain else signs(split.shape[2], split.dtype)
    summed = factors.view(1, 1, 1, -1) @ split.flatten(3)
    return summed.view(*split.shape[:2], *split.shape[3:])


def _smoothed(squares: torch.Tensor) -> torch.Tensor:
    """Add to squares of signed sums, which vary, their mean over positions."""
    return squares + squares.mean(list(range(2, squares.dim())), keepdim=True)


def _window(mapped: ImageMap, squares: torch.Tensor) -> torch.Tensor:
    """Sum squares [N, groups, …] over the window of each output, and smooth the sums."""
    weight = mapped.weight.new_ones(mapped.groups, 1, *mapped.weight.shape[2:], dtype=squares.dtype)
    return _smoothed(mapped.apply(squares, weight))


def _norms(mapped: ImageMap, weight: torch.Tensor) -> torch.Tensor:
    """Return Σ w² / K of the weights of each output channel, [C]; estimated if they lie apart."""
    if mapped.outer == 0:
        norms: torch.Tensor = torch.linalg.vector_norm(weight.flatten(1), dim=1)
        return norms.square() / mapped.inner
    split = weight.reshape(mapped.groups, -1, weight[0].numel())
    mixed = (signs(split.shape[1], weight.dtype).view(1, 1, -1) @ split).view(
        -1, weight[0, 0].numel()
    )
    squares = mixed.square().sum(1)
    return (squares + squares.mean()) / mapped.inner


def _estimated_energies(left: torch.Tensor) -> torch.Tensor:
    """Estimate Σ x² of each channel by its images' signed sum, [C]."""
    energies = _over_images(left).flatten(2).square().sum(2).flatten()
    return energies + energies.mean()


def _probe(
    convolution: Convolution, mixed: torch.Tensor, kernel: torch.Tensor, like: torch.Tensor
) -> torch.Tensor:
    """Convolve one channel a group, as the forward pass does, to the positions of ``like``."""
    geometry = convolution.stride, convolution.padding, convolution.dilation
    none = [0] * len(convolution.stride)
    probe: torch.Tensor = torch.ops.aten.convolution.default(
        mixed, kernel, None, *geometry, False, none, convolution.groups
    )
    for dim, size in enumerate(like.shape[2:], 2):
        probe = probe.narrow(dim, 0, size)
    return probe


def _inner_products(left: torch.Tensor, probe: torch.Tensor) -> torch.Tensor:
    """Sum the products of each channel of [N, C, …] and its group's probe [N, groups, …], [C]."""
    split: torch.Tensor = left.unflatten(1, (probe.shape[1], -1)).flatten(3)
    return (split @ probe.flatten(2).unsqueeze(-1)).sum(0).flatten()


def _beside(channels: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """View values of channels so that they are broadcast to [N, C, …], or to [C]."""
    if like.dim() == 1:
        return channels
    return channels.view(1, -1, *[1] * (like.dim() - 2))
