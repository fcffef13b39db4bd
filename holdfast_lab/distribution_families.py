"""Operands of further shapes: activations, weights at their start, gradients, grids, sparse ones.

Together with those of ``distributions`` they are more than fifty, on which ``bench.suspicions``
counts false alarms and compares thresholds with the errors that occur.
"""

from collections.abc import Callable
from math import log, sqrt

import torch
from torch.nn import functional

from holdfast_lab.distributions import Distribution, Draw, independent, normal, operands_of

__all__ = ["FAMILIES"]


def _noise(rows: int, columns: int, wide: torch.dtype, g: torch.Generator) -> torch.Tensor:
    return torch.randn(rows, columns, dtype=wide, generator=g)


def _of_normal(function: Callable[[torch.Tensor], torch.Tensor]) -> Distribution:
    """Draw A as a function of normal elements, and B normal."""
    return operands_of(lambda *size_and_generator: function(_noise(*size_and_generator)))


def _sparse(share: float) -> Distribution:
    """Draw both operands normal, with only a share of their elements other than zero."""

    def draw(rows: int, columns: int, wide: torch.dtype, g: torch.Generator) -> torch.Tensor:
        kept = torch.rand(rows, columns, generator=g) < share
        return _noise(rows, columns, wide, g) * kept

    return independent(draw)


def _student(freedom: int) -> Distribution:
    """Draw A from Student's t with so many degrees of freedom."""

    def draw(rows: int, columns: int, wide: torch.dtype, g: torch.Generator) -> torch.Tensor:
        squares = torch.zeros(rows, columns, dtype=wide)
        for _ in range(freedom):
            squares += _noise(rows, columns, wide, g).square()
        return _noise(rows, columns, wide, g) / (squares / freedom).sqrt()

    return operands_of(draw)


def _grid(largest: int, scale: float) -> Draw:
    """Draw integers up to ``largest``, times a scale, as of quantised weights."""

    def draw(rows: int, columns: int, wide: torch.dtype, g: torch.Generator) -> torch.Tensor:
        whole = torch.randint(-largest, largest + 1, (rows, columns), generator=g)
        return whole.to(wide) * scale

    return draw


def _low_rank(rank: int, noise: float) -> Distribution:
    """Draw A of a low rank, and noise on it."""

    def draw(rows: int, columns: int, wide: torch.dtype, g: torch.Generator) -> torch.Tensor:
        whole = _noise(rows, rank, wide, g) @ _noise(rank, columns, wide, g)
        return whole / sqrt(rank) + noise * _noise(rows, columns, wide, g)

    return operands_of(draw)


def _scaled_channels(scales: Callable[[torch.Tensor], torch.Tensor]) -> Distribution:
    """Draw A with a scale for each channel, by the channel's place from 0 to 1."""

    def draw(rows: int, columns: int, wide: torch.dtype, g: torch.Generator) -> torch.Tensor:
        return _noise(rows, columns, wide, g) * scales(torch.linspace(0, 1, columns, dtype=wide))

    return operands_of(draw)


def _probabilities(spread: float, masked: bool = False) -> Distribution:
    """Draw attention probabilities of logits with this standard deviation."""

    def draw(rows: int, columns: int, wide: torch.dtype, g: torch.Generator) -> torch.Tensor:
        logits = spread * _noise(rows, columns, wide, g)
        if masked:
            logits[:, (columns + 1) // 2 :] = -torch.inf
        return logits.softmax(-1)

    return operands_of(draw)


def _bags(rows: int, columns: int, wide: torch.dtype, g: torch.Generator) -> torch.Tensor:
    """Draw eight ones in each row, at most."""
    chosen = torch.randint(columns, (rows, 8), generator=g)
    return torch.zeros(rows, columns, dtype=wide).scatter_(1, chosen, 1)


def _waves(rows: int, columns: int, wide: torch.dtype, g: torch.Generator) -> torch.Tensor:
    """Draw a sine of another frequency and phase in each row."""
    frequency = torch.rand(rows, 1, dtype=wide, generator=g)
    phase = 6.3 * torch.rand(rows, 1, dtype=wide, generator=g)
    return torch.sin(torch.arange(columns, dtype=wide) * frequency + phase)


def _uniform_weights(
    rows: int, columns: int, wide: torch.dtype, g: torch.Generator
) -> torch.Tensor:
    return (2 * torch.rand(rows, columns, dtype=wide, generator=g) - 1) / sqrt(rows)


def _scaled_rows(rows: int, columns: int, wide: torch.dtype, g: torch.Generator) -> torch.Tensor:
    return _noise(rows, columns, wide, g) * torch.logspace(-8, 4, rows, base=2.0)[:, None].to(wide)


FAMILIES: dict[str, Distribution] = {
    "mean_tenth": normal(0.1),
    "shifted_3": _of_normal(lambda x: x + 3),
    "shifted_10": _of_normal(lambda x: x + 10),
    "nearly_constant": _of_normal(lambda x: 1 + 1e-4 * x),
    "lognormal_half": _of_normal(lambda x: (x / 2).exp()),
    "lognormal_1": _of_normal(torch.exp),
    "lognormal_2": _of_normal(lambda x: (2 * x).exp() / 128),  # for sums within fp16
    "laplace": _of_normal(lambda x: x.sign() * -(torch.special.log_ndtr(-x.abs()) + log(2))),
    "exponential": _of_normal(lambda x: -torch.special.log_ndtr(x)),
    "cubed": _of_normal(lambda x: x**3),
    "t2": _student(2),
    "t5": _student(5),
    "t10": _student(10),
    "sparse_half": _sparse(0.5),
    "sparse_tenth": _sparse(0.1),
    "sparse_hundredth": _sparse(0.01),
    "signs": _of_normal(torch.sign),
    "ternary": operands_of(_grid(1, 1.0)),
    "int8_grid": operands_of(_grid(127, 1 / 64)),
    "int4_weights": operands_of(_noise, _grid(7, 0.01)),
    "bf16_grid": _of_normal(lambda x: x.bfloat16().to(x.dtype)),
    "relu": _of_normal(torch.relu),
    "gelu": _of_normal(functional.gelu),
    "gated": _of_normal(lambda x: functional.silu(x) * x.roll(1, 0)),
    "saturated": _of_normal(lambda x: (5 * x).tanh()),
    "sigmoid": _of_normal(torch.sigmoid),
    "dropped_out": _of_normal(lambda x: x * (x.roll(1, 0) > -1.2816) / 0.9),
    "layer_norm": _of_normal(lambda x: functional.layer_norm(3 * x + 1, x.shape[-1:])),
    "rms_norm": _of_normal(lambda x: x * x.square().mean(-1, keepdim=True).add(1e-6).rsqrt()),
    "rank_1": _low_rank(1, 0.0),
    "rank_8": _low_rank(8, 1e-3),
    "random_walk": _of_normal(lambda x: x.cumsum(-1) / x.shape[-1] ** 0.5),
    "waves": operands_of(_waves),
    "alternating": _of_normal(lambda x: x.abs() * (1 - 2 * (torch.arange(x.shape[-1]) % 2))),
    "power_law_channels": _scaled_channels(lambda place: 1 / (1 + 100 * place)),
    "steep_channels": _scaled_channels(lambda place: torch.exp2(-12 * place)),
    "scaled_rows": operands_of(_scaled_rows),
    "tiny": _of_normal(lambda x: 1e-6 * x),
    "gradients": _of_normal(lambda x: 1e-3 * x**3),
    "kaiming": operands_of(_noise, _uniform_weights),
    "flat_probabilities": _probabilities(0.1),
    "steep_probabilities": _probabilities(20.0),
    "padded_probabilities": _probabilities(1.0, masked=True),
    "bags": operands_of(_bags),
}
