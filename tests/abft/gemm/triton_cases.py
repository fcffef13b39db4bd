"""Operands and faults for the Triton passes."""

import math

import torch
from triton_device import DEVICE

from holdfast.abft.checksums.weights import signs
from holdfast.abft.thresholds.rounding import MEAN_NOISE
from holdfast.abft.triton.tolerance import Tolerance, drift_growth
from holdfast.inject.faults import flip_bit

FP8 = torch.float8_e4m3fn
DTYPES = [torch.float32, torch.float16, torch.bfloat16, FP8]
# Every dtype, and every layout in one of them: what reads a layout does not depend on the dtype.
LAID_OUT = [(dtype, "rows") for dtype in DTYPES]
LAID_OUT += [(torch.float16, layout) for layout in ("columns", "strided")]
OUTPUT = {dtype: dtype for dtype in DTYPES} | {FP8: torch.bfloat16}


def random(*shape: int, dtype: torch.dtype, seed: int = 0, layout: str = "rows") -> torch.Tensor:
    """Normal values; rows or columns are contiguous, or neither (every second element)."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator).to(dtype).to(DEVICE)
    if layout == "columns":
        return values.mT.contiguous().mT
    if layout == "strided":
        wide = values.new_empty((*shape[:-1], 2 * shape[-1]))
        wide[..., ::2] = values
        return wide[..., ::2]
    return values


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A B by torch, in the dtype that the passes give it."""
    if a.dtype == FP8:
        return (a.float() @ b.float()).to(torch.bfloat16)
    return a @ b


def exact(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.double() @ b.double()


def ratios(
    c: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    addend: torch.Tensor | None = None,
    beta: float = 1.0,
    alpha: float = 1.0,
    operand: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``|D| / T`` and T of every row of C = beta · addend + alpha · A B, fp64 [.., M].

    ``operand`` is the dtype that A had before it was scaled.
    """
    scale, output, walking, drift, floor = Tolerance.of(operand or a.dtype, c.dtype, *b.shape[-2:])
    added = torch.zeros(()) if addend is None else beta * addend.double()
    added = added.expand(c.shape)
    c, a, b = c.double(), a.double(), b.double()
    r = signs(b.shape[-1])
    residual = (c - added) @ r - alpha * (a @ (b @ r).unsqueeze(-1)).squeeze(-1)
    energy, rest = c.square().sum(-1), (c - added).square().sum(-1)
    walk = alpha**2 * (a.square() @ spread(b).unsqueeze(-1)).squeeze(-1)
    walk = walk + 2 * added.square().sum(-1)
    squared = output**2 * energy + walking**2 * walk + drift**2 * (rest - 4 * walk).clamp_min(0)
    threshold = scale * squared.sqrt() + floor
    return residual.abs() / threshold, threshold


def spread(b: torch.Tensor) -> torch.Tensor:
    """``z_k`` of rows that do not repeat, fp64 [.., K]."""
    rows = b.double()
    squares = rows.square().sum(-1)
    beyond_noise = (rows.sum(-1).square() - MEAN_NOISE * squares).clamp_min(0)
    return squares + drift_growth(b.shape[-2])[0] * beyond_noise / b.shape[-1]


def faults(element: torch.Tensor) -> dict[str, torch.Tensor]:
    """What may become of an element: flips of its upper bits, INF, NaN, near-INF, another value."""
    top = 8 * element.element_size() - 1
    values = {
        "inf": math.inf,
        "-inf": -math.inf,
        "nan": math.nan,
        "near inf": torch.finfo(element.dtype).max * 0.9,
        "moderate": float(element) + 1000.0,
    }
    flips = {f"bit {bit}": flip_bit(element, bit) for bit in range(top - 5, top)}
    return flips | {key: element.new_tensor(value) for key, value in values.items()}


def operands(
    dtype: torch.dtype, m: int, k: int, n: int, layout: str = "rows"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A, B and their product."""
    a, b = random(m, k, dtype=dtype, layout=layout), random(k, n, dtype=dtype, seed=1)
    return a, b, product(a, b)
