"""Data with known rounding, a bound that holds for it, faults, and a mode that forbids syncs."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
KINDS = ["inf", "-inf", "nan", "near", "-near", "moderate", "-moderate"]
EXTREME = KINDS[:5]
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
LAMBDA = 8.0  # Hoeffding: P(noise > bound) < 2 exp(-32), per checksum


def healthy(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """fp64 normal data; rounding it to another dtype is the only noise of its checksums."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def bound(
    dtype: torch.dtype, dim: int, accumulate: torch.dtype = torch.float64
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Rounding to dtype, bounded by Hoeffding, and the worst case of pairwise summation, twice."""

    def threshold(matrix: torch.Tensor) -> torch.Tensor:
        n = matrix.shape[dim]
        summation = 4 * torch.finfo(accumulate).eps * math.sqrt(n) * math.log2(2 * n)
        rounding = LAMBDA * torch.finfo(dtype).eps / 2
        return (rounding + summation) * matrix.double().norm(dim=dim)

    return threshold


def value_of(kind: str, dtype: torch.dtype) -> float:
    """A wrong value of this kind; near-INF is half the largest number, moderate is 100."""
    size = {
        "inf": math.inf,
        "nan": math.nan,
        "near": torch.finfo(dtype).max * 0.6,
        "moderate": 100.0,
    }[kind.removeprefix("-")]
    return -size if kind.startswith("-") else size


def flip(values: torch.Tensor, bit: torch.Tensor) -> torch.Tensor:
    """Each value with one of its bits inverted."""
    integer = INTEGERS[values.dtype.itemsize]
    return (values.view(integer) ^ (1 << bit).to(integer)).view(values.dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal to the last bit, NaN and the sign of zero included."""
    integer = INTEGERS[a.dtype.itemsize]
    return a.shape == b.shape and torch.equal(
        a.contiguous().view(integer), b.contiguous().view(integer)
    )


class NoHostSync(TorchDispatchMode):
    """Fails on any op whose result the host must wait for, or whose shape depends on data."""

    FORBIDDEN = (
        "_local_scalar_dense",
        "item",
        "is_nonzero",
        "nonzero",
        "nonzero_static",
        "masked_select",
        "equal",
        "unique",
        "_unique2",
        "unique_consecutive",
        "bincount",
        "repeat_interleave",
    )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func._schema.name.removeprefix("aten::")
        boolean_index = name == "index" and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        assert name not in self.FORBIDDEN, f"aten::{name} makes the host wait"
        assert not boolean_index, "a boolean index has a shape that depends on data"
        return func(*args, **(kwargs or {}))
