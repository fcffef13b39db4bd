"""Launches of the Triton attention kernels."""

from typing import Any, NamedTuple

import torch
import triton

from holdfast.abft.attention.triton_encode import attention_encode_kernel
from holdfast.abft.attention.triton_forward import attention_forward_kernel
from holdfast.abft.attention.triton_grad_key_value import grad_key_value_kernel
from holdfast.abft.attention.triton_grad_query import grad_query_kernel
from holdfast.abft.attention.triton_tiles import ADDITIVE, BOOLEAN, LOG2_E, NO_MASK, TILE_VALUES
from holdfast.abft.attention.triton_types import TERMS, Encoding, Matrix, Tolerances, Verdict
from holdfast.abft.gemm.triton_layout import dot_dtype, on, signs_on
from holdfast.abft.gemm.triton_types import Precision, drift_growth

ATTEMPTS = 2  # a tile whose second computation is suspect too is for the host to judge
LARGEST_WIDTH = 256
SMALLEST_BLOCK = 16


class Plan(NamedTuple):
    """How an attention is cut into tiles: rows a program owns, rows it streams at a time."""

    rows: int
    stream: int
    warps: int
    stages: int


class Problem(NamedTuple):
    """One attention: operands, and how they are used.

    Attributes:
        mask: [batch, heads, Lq, Lk], broadcast, or None.
        verify: whether anything is checked.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None
    causal: bool
    scale: float
    precision: Precision
    verify: bool


# By bytes of a padded row of an operand: what fits the shared memory of a multiprocessor, and its
# registers, with the checks.
FORWARD_PLANS = {
    128: Plan(128, 64, 8, 3),
    256: Plan(128, 64, 8, 2),
    512: Plan(64, 32, 4, 2),
    1024: Plan(32, 16, 4, 2),
}
BACKWARD_PLANS = {
    128: Plan(128, 32, 8, 2),
    256: Plan(64, 32, 8, 2),
    512: Plan(32, 32, 4, 2),
    1024: Plan(16, 16, 4, 2),
}


def plan(plans: dict[int, Plan], width: int, length: int, dtype: torch.dtype) -> Plan:
    """The tiles for a head size, and for so many rows of the side that programs own."""
    size = max(128, padded(width) * dtype.itemsize)
    owned = plans[size]
    short = max(SMALLEST_BLOCK, triton.next_power_of_2(length))
    return owned._replace(rows=min(owned.rows, short))


def padded(width: int) -> int:
    """A head size as a block."""
    return max(SMALLEST_BLOCK, int(triton.next_power_of_2(width)))


def encode(matrix: torch.Tensor, stream: int) -> Encoding:
    """A matrix [batch, heads, L, d] in tiles of ``stream`` rows."""
    batch, heads, length, width = matrix.shape
    tiles = triton.cdiv(length, stream)
    terms = TERMS[matrix.dtype]
    encoding = Encoding(
        matrix.new_empty((batch, heads, tiles, terms, width)),
        matrix.new_empty((batch, heads, length), dtype=torch.float32),
        matrix.new_empty((batch, heads, tiles, TILE_VALUES.value), dtype=torch.float32),
    )
    drifting, repeating = drift_growth(width)
    with on(matrix):
        attention_encode_kernel[(batch * heads * tiles,)](
            Matrix.of(matrix),
            signs_on(max(length, width), matrix.device),
            encoding,
            heads,
            length,
            drifting,
            repeating,
            TERMS=terms,
            D=width,
            BLOCK_D=padded(width),
            STREAM=stream,
            num_warps=4,
        )
    return encoding


def verdict(like: torch.Tensor, counts: torch.Tensor) -> Verdict:
    """An unwritten verdict over the rows of a tensor [batch, heads, L, d]."""
    status, parts = (like.new_empty(like.shape[:3], dtype=torch.int32) for _ in range(2))
    return Verdict(status, parts, counts)


def forward(
    problem: Problem, out: torch.Tensor, lse: torch.Tensor, found: Verdict | None,
    faults: torch.Tensor | None,
) -> None:  # fmt: skip
    """Fill out [batch, heads, Lq, d] and lse [batch, heads, Lq]."""
    q, k, v = problem.q, problem.k, problem.v
    tiles = plan(FORWARD_PLANS, q.shape[3], q.shape[2], q.dtype)
    checks: Any = (None, None, None)
    if found is not None:
        signs = signs_on(max(k.shape[2], q.shape[3]), q.device)
        checks = (signs, encode(k, tiles.stream), encode(v, tiles.stream))
    with on(q):
        attention_forward_kernel[(q.shape[0] * q.shape[1] * triton.cdiv(q.shape[2], tiles.rows),)](
            *(Matrix.of(each) for each in (q, k, v)),
            _mask(problem),
            Matrix.of(out),
            lse,
            *checks,
            *(found or (None, None, None)),
            faults,
            *_sizes(problem),
            problem.scale * LOG2_E.value,
            1.0,
            _tolerances(problem, k.shape[2], tiles),
            **_constants(problem, tiles, faults),
        )


def backward(
    problem: Problem,
    grad: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    found: tuple[Verdict, Verdict] | None,
    faults: tuple[torch.Tensor | None, torch.Tensor | None],
) -> None:
    """Fill the gradients of q, k and v; the verdicts are over the rows of q, and of k and v."""
    q, k, v = problem.q, problem.k, problem.v
    grad_q, grad_k, grad_v = gradients
    delta = torch.empty_like(lse)
    by_query = plan(BACKWARD_PLANS, q.shape[3], q.shape[2], q.dtype)
    by_key = plan(BACKWARD_PLANS, q.shape[3], k.shape[2], q.dtype)
    keys: Any = (None, None, None)
    queries: Any = (None, None, None)
    verdicts: Any = ((None, None, None), (None, None, None))
    if found is not None:
        verdicts = found
        signs = signs_on(max(k.shape[2], q.shape[2], q.shape[3]), q.device)
        keys = (signs, encode(k, by_query.stream), encode(v, by_query.stream))
        queries = (signs, encode(q, by_key.stream), encode(grad, by_key.stream))
    with on(q):
        grad_query_kernel[(q.shape[0] * q.shape[1] * triton.cdiv(q.shape[2], by_query.rows),)](
            *(Matrix.of(each) for each in (q, k, v)),
            _mask(problem),
            *(Matrix.of(each) for each in (out, grad, grad_q)),
            lse,
            delta,
            *keys,
            *verdicts[0],
            faults[0],
            *_sizes(problem),
            problem.scale,
            1.0,
            _tolerances(problem, k.shape[2], by_query),
            **_constants(problem, by_query, faults[0]),
        )
        grad_key_value_kernel[(k.shape[0] * k.shape[1] * triton.cdiv(k.shape[2], by_key.rows),)](
            *(Matrix.of(each) for each in (q, k, v)),
            _mask(problem),
            *(Matrix.of(each) for each in (grad, grad_k, grad_v)),
            lse,
            delta,
            *queries,
            *verdicts[1],
            faults[1],
            *_sizes(problem),
            problem.scale,
            _tolerances(problem, q.shape[2] * q.shape[1] // k.shape[1], by_key),
            **_constants(problem, by_key, faults[1]),
        )


def _mask(problem: Problem) -> Matrix | None:
    return None if problem.mask is None else Matrix.of(problem.mask)


def _sizes(problem: Problem) -> tuple[int, int, int, int]:
    heads = problem.q.shape[1]
    return heads, heads // problem.k.shape[1], problem.q.shape[2], problem.k.shape[2]


def _tolerances(problem: Problem, length: int, tiles: Plan) -> Tolerances | None:
    if not problem.verify:
        return None
    width = problem.q.shape[3]
    return Tolerances.of(problem.q.dtype, width, length, tiles.stream, problem.precision)


def _constants(problem: Problem, tiles: Plan, faults: torch.Tensor | None) -> dict[str, Any]:
    exact = problem.q.dtype == torch.float32 and problem.precision == "ieee"
    kind = NO_MASK
    if problem.mask is not None:
        kind = BOOLEAN if problem.mask.dtype == torch.bool else ADDITIVE
    return {
        "VERIFY": problem.verify,
        "ATTEMPTS": ATTEMPTS if problem.verify else 1,
        "FAULTS": 0 if faults is None else len(faults),
        "CAUSAL": problem.causal,
        "MASK": kind.value,
        "PRECISION": problem.precision if problem.q.dtype == torch.float32 else "ieee",
        "TERMS": TERMS[problem.q.dtype],
        # Of 16-bit operands neither says anything.
        "PREDICTION": "ieee" if exact else "tf32x3",
        "OPERAND": dot_dtype(problem.q.dtype),
        "D": problem.q.shape[3],
        "BLOCK_D": padded(problem.q.shape[3]),
        "BLOCK_M": tiles.rows,
        "STREAM": tiles.stream,
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
    }
