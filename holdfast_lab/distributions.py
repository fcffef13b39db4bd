"""Operands like those of healthy programs: random ones, and coherent ones that are hard to bound.

Each distribution is a function ``(m, k, n, dtype, generator) -> (a [m, k], b [k, n])`` on the CPU.
The same generator state gives the same bits. Operands are drawn in fp64 for fp64 and in fp32 for
all other dtypes, then rounded once.
"""

from collections.abc import Callable
from math import erf, log2, sqrt
from typing import Protocol

import torch

__all__ = [
    "COHERENT",
    "RANDOM",
    "Distribution",
    "Draw",
    "Operands",
    "independent",
    "normal",
    "operands_of",
    "uniform",
]

Operands = tuple[torch.Tensor, torch.Tensor]
Draw = Callable[[int, int, torch.dtype, torch.Generator], torch.Tensor]


class Distribution(Protocol):
    """Draws the operands of one product."""

    def __call__(
        self, m: int, k: int, n: int, dtype: torch.dtype, generator: torch.Generator
    ) -> Operands:
        """Draw A [m, k] and B [k, n] of ``dtype``."""


def independent(draw: Draw) -> Distribution:
    """Make a distribution that draws all elements of A and B independently and in the same way.

    Args:
        draw: Function ``(rows, columns, working dtype, generator)`` that returns a matrix of this
            size.
    """
    return operands_of(draw, draw)


def normal(mean: float) -> Distribution:
    """Return the normal distribution N(mean, 1) of elements."""
    return independent(lambda rows, columns, wide, g: _normal(rows, columns, wide, g) + mean)


def uniform(low: float) -> Distribution:
    """Return the uniform distribution U(low, 1) of elements."""
    return independent(
        lambda rows, columns, wide, g: _uniform(rows, columns, wide, g) * (1 - low) + low
    )


def _working(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _normal(rows: int, columns: int, wide: torch.dtype, g: torch.Generator) -> torch.Tensor:
    return torch.randn(rows, columns, dtype=wide, generator=g)


def _uniform(rows: int, columns: int, wide: torch.dtype, g: torch.Generator) -> torch.Tensor:
    return torch.rand(rows, columns, dtype=wide, generator=g)


def _truncated(rows: int, columns: int, wide: torch.dtype, g: torch.Generator) -> torch.Tensor:
    """Draw N(0, 1) truncated to [−1, 1], by inversion."""
    centred = (2 * _uniform(rows, columns, wide, g) - 1) * erf(sqrt(0.5))
    return (centred.erfinv() * sqrt(2)).clamp_(-1, 1)


def _student_t3(rows: int, columns: int, wide: torch.dtype, g: torch.Generator) -> torch.Tensor:
    """Draw Student's t: a normal over the root of a third of a χ² with three degrees of freedom."""
    freedom = torch.randn(3, rows, columns, dtype=wide, generator=g)
    return _normal(rows, columns, wide, g) / freedom.square().mean(0).sqrt()


def operands_of(left: Draw, right: Draw = _normal) -> Distribution:
    """Make a distribution that draws A by ``left``, then B by ``right``."""

    def operands(
        m: int, k: int, n: int, dtype: torch.dtype, generator: torch.Generator
    ) -> Operands:
        wide = _working(dtype)
        return left(m, k, wide, generator).to(dtype), right(k, n, wide, generator).to(dtype)

    return operands


def _constant(value: float) -> Draw:
    return lambda rows, columns, wide, g: torch.full((rows, columns), value, dtype=wide)


def _repeated_row(rows: int, columns: int, wide: torch.dtype, g: torch.Generator) -> torch.Tensor:
    return _normal(1, columns, wide, g).repeat(rows, 1)


def _repeated_column(
    rows: int, columns: int, wide: torch.dtype, g: torch.Generator
) -> torch.Tensor:
    return _normal(rows, 1, wide, g).repeat(1, columns)


def _outlier(factor: float) -> Distribution:
    """Draw one channel of A ``factor`` times larger than the others.

    All of A is 2⁻⁷ times smaller where fp16 would overflow otherwise.
    """

    def operands(
        m: int, k: int, n: int, dtype: torch.dtype, generator: torch.Generator
    ) -> Operands:
        wide = _working(dtype)
        a = _normal(m, k, wide, generator)
        a[:, k // 3] *= factor
        if factor > torch.finfo(dtype).max / 16:
            a *= 2.0**-7
        return a.to(dtype), _normal(k, n, wide, generator).to(dtype)

    return operands


def _softmax(rows: int, columns: int, wide: torch.dtype, g: torch.Generator) -> torch.Tensor:
    """Draw sharp attention probabilities, from logits of standard deviation 4."""
    return (4 * _normal(rows, columns, wide, g)).softmax(-1)


def _causal_softmax(rows: int, columns: int, wide: torch.dtype, g: torch.Generator) -> torch.Tensor:
    future = torch.ones(rows, columns, dtype=torch.bool).triu(1)
    return _normal(rows, columns, wide, g).masked_fill(future, -torch.inf).softmax(-1)


def _one_hot(rows: int, columns: int, wide: torch.dtype, g: torch.Generator) -> torch.Tensor:
    chosen = torch.randint(columns, (rows, 1), generator=g)
    return torch.zeros(rows, columns, dtype=wide).scatter_(1, chosen, 1)


def _padding(rows: int, columns: int, wide: torch.dtype, g: torch.Generator) -> torch.Tensor:
    """Draw activations with padding: zeros in half of the rows and a quarter of the channels."""
    a = _normal(rows, columns, wide, g)
    a[(rows + 1) // 2 :] = 0
    a[:, columns - columns // 4 :] = 0
    return a


def _correlated_signs(
    m: int, k: int, n: int, dtype: torch.dtype, generator: torch.Generator
) -> Operands:
    """Draw operands in which channel k of A and row k of B share a sign: no two products cancel."""
    wide = _working(dtype)
    sign = _normal(1, k, wide, generator).sign()
    a = _normal(m, k, wide, generator).abs() * sign
    b = _normal(k, n, wide, generator).abs() * sign.T
    return a.to(dtype), b.to(dtype)


def _cancelling(m: int, k: int, n: int, dtype: torch.dtype, generator: torch.Generator) -> Operands:
    """Draw opposite pairs of rows of B: partial sums are large and complete sums nearly 0."""
    wide = _working(dtype)
    row = _normal(1, n, wide, generator)
    alternating = 1 - 2 * (torch.arange(k, dtype=wide).unsqueeze(1) % 2)
    return torch.ones(m, k, dtype=dtype), (row * alternating).to(dtype)


def _scaled_uniform(
    scale_a: Callable[[torch.dtype], float], scale_b: Callable[[torch.dtype], float]
) -> Distribution:
    """Make a distribution of U(0, 1) times a scale for each operand that depends on the dtype."""

    def operands(
        m: int, k: int, n: int, dtype: torch.dtype, generator: torch.Generator
    ) -> Operands:
        a = _uniform(m, k, torch.float64, generator) * scale_a(dtype)
        b = _uniform(k, n, torch.float64, generator) * scale_b(dtype)
        return a.to(dtype), b.to(dtype)

    return operands


def _smallest_normal(dtype: torch.dtype) -> float:
    return float(torch.finfo(dtype).smallest_normal)


def _huge_range(m: int, k: int, n: int, dtype: torch.dtype, generator: torch.Generator) -> Operands:
    """Draw magnitudes spread evenly over the binades from 2⁴ down to where products underflow."""
    low = log2(_smallest_normal(dtype)) * (1.0 if dtype == torch.float16 else 0.4)

    def draw(rows: int, columns: int, wide: torch.dtype, g: torch.Generator) -> torch.Tensor:
        magnitude = torch.exp2(_uniform(rows, columns, wide, g) * (4 - low) + low)
        return magnitude * _normal(rows, columns, wide, g).sign()

    return independent(draw)(m, k, n, dtype, generator)


# The six distributions of independent elements on which thresholds are compared.
RANDOM: dict[str, Distribution] = {
    "n01": normal(0.0),
    "n11": normal(1.0),
    "u11": uniform(-1.0),
    "u01": uniform(0.0),
    "truncated": independent(_truncated),
    "t3": independent(_student_t3),
}

# Distributions with which the rounding errors of a row are not independent, or products underflow.
COHERENT: dict[str, Distribution] = {
    "zero": operands_of(_constant(0.0)),
    "constant": operands_of(_constant(1.0), _constant(0.1)),
    "repeated_rows": operands_of(_repeated_row),
    "repeated_columns": operands_of(_normal, _repeated_column),
    "outlier_1e3": _outlier(1e3),
    "outlier_1e5": _outlier(1e5),
    "softmax": operands_of(_softmax),
    "causal_softmax": operands_of(_causal_softmax),
    "one_hot": operands_of(_one_hot),
    "padding": operands_of(_padding),
    "correlated_signs": _correlated_signs,
    "cancelling": _cancelling,
    "subnormal": _scaled_uniform(_smallest_normal, lambda dtype: 1.0),
    "underflow": _scaled_uniform(
        lambda dtype: sqrt(_smallest_normal(dtype)) / 3,
        lambda dtype: sqrt(_smallest_normal(dtype)) / 3,
    ),
    "huge_range": _huge_range,
}
