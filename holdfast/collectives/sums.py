"""Signed sums of the blocks of a reduction, and how far rounding can move them.

For a block, rank k of N puts in g_k with norm n_k = ‖g_k‖, and all get S = Σ g_k + Δ. In any order,
each of the N - 1 additions of an element rounds a partial sum by at most a share u of it, and the
norm of a block's partial sums is at most Σ n_k. So ‖Δ‖ ≤ (N - 1) u (1 + u)^(N-1) Σ n_k. The signs r
were drawn without knowledge of Δ, so that by Hoeffding's inequality |r·Δ| exceeds λ ‖Δ‖ with a
probability of at most 2 exp(-λ²/2), which is ``FALSE_ALARM``. A mean rounds at most twice more.
"""

import math
from functools import cache

import torch
from torch.nn import functional

from holdfast import native
from holdfast.digest import signed_sums
from holdfast.digest.tensors import tensor_digest

FALSE_ALARM = 1e-12
_SIGMAS = math.sqrt(2 * math.log(2 / FALSE_ALARM))
SUM, MEAN = 0, 1  # numbers of ``ReduceOp``


def block_of(dtype: torch.dtype) -> int:
    """Return the number of elements of a block: fewer where elements round coarsely."""
    return 1024 if dtype.itemsize == 2 else 4096


@cache
def signs(device: torch.device) -> torch.Tensor:
    """Return the signs of a block's elements, fp64, the same on all ranks."""
    drawn = torch.randint(0, 2, (4096,), generator=torch.Generator().manual_seed(1))
    return (2 * drawn - 1).double().to(device)


def block_sums(tensor: torch.Tensor, *, digested: bool = False) -> tuple[torch.Tensor, str]:
    """Compute of each block Σ r x and Σ x², fp64 [2, blocks], and a digest if it is wanted."""
    flat = tensor.detach().contiguous().view(-1)
    block, weights = block_of(flat.dtype), signs(flat.device)
    flat = flat.float() if flat.dtype == torch.float16 else flat  # the same values
    if signed_sums is None or flat.device.type != "cpu":
        rows = functional.pad(flat.double(), (0, -len(flat) % block)).view(-1, block)
        sums = torch.stack([rows @ weights[:block], rows.square().sum(1)])
        return sums, tensor_digest(flat) if digested else ""
    out = torch.empty(2, -(-flat.numel() // block), dtype=torch.float64)
    layout = flat.numel(), native.ELEMENTS.index(flat.dtype), block, weights.data_ptr()
    # One native pass reads each element once.
    return out, signed_sums(flat.data_ptr(), *layout, out.data_ptr(), digested).hex()


def threshold(norms: torch.Tensor, dtype: torch.dtype, ranks: int, operation: int) -> torch.Tensor:
    """Return how far rounding can move each block's signed sum, for Σ n_k of the ranks.

    The last two terms are for the rounding of signed sums, and for devices that flush to zero.
    """
    unit, block = torch.finfo(dtype).eps / 2, block_of(dtype)
    roundings = ranks - 1 + (2 if operation == MEAN else 0)
    bound: torch.Tensor = _SIGMAS * unit * roundings * (1 + unit) ** roundings * norms
    bound = bound + 2.0 * block**1.5 * torch.finfo(torch.float64).eps * norms
    bound = bound + _SIGMAS * ranks * math.sqrt(block) * torch.finfo(dtype).tiny
    return bound / (ranks if operation == MEAN else 1)


def wrong_blocks(
    total: torch.Tensor, result: torch.Tensor, dtype: torch.dtype, ranks: int, operation: int
) -> list[int]:
    """Return the blocks whose result is not the sum, from Σ r·g_k and Σ n_k [2, blocks].

    INF or NaN that is put in must come out. A result that may have overflowed is not judged.
    """
    sums, norms = total
    sums = sums / ranks if operation == MEAN else sums
    bound = threshold(norms, dtype, ranks, operation)
    known, finite = torch.isfinite(sums), torch.isfinite(result)
    overflows = known & ~finite & ~(norms < torch.finfo(dtype).max)
    wrong = torch.where(known & finite, (result - sums).abs() > bound, known != finite)
    return [int(block) for block in (wrong & ~overflows).nonzero()]
