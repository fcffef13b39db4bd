"""Verified products on a GPU, in Triton: encode B, verify C, or verify in the accumulator.

No call waits for the device, and all can be captured in a CUDA graph after one call outside it
(which compiles the kernels and puts the signs on the device). With ``TRITON_INTERPRET=1`` set
before Triton is imported the same kernels run on CPU tensors, slowly.

Not covered: addends, alpha and beta; fp64, integer and complex operands; autograd.
"""

import torch

from holdfast.abft.gemm.reference import as_batch
from holdfast.abft.gemm.triton_types import (
    FLOAT8,
    Checksums,
    Mode,
    Precision,
    RowStatus,
    Tolerance,
    Verdict,
)

try:
    import triton  # noqa: F401
except ImportError as error:
    raise ImportError(
        "holdfast.abft.gemm.triton needs Triton 3.6 or newer (Linux): pip install "
        "'torch-holdfast[triton]'; without it products on CUDA are not verified"
    ) from error

from holdfast.abft.gemm import triton_check as check
from holdfast.abft.gemm import triton_launch as launch
from holdfast.abft.gemm.triton_layout import product_plan

__all__ = [
    "Checksums",
    "RowStatus",
    "Tolerance",
    "Verdict",
    "encode",
    "matmul",
    "matmul_online",
    "online_block",
    "verify",
]

ATTEMPTS = 2  # a tile whose second computation is suspect too is for the host to judge


def encode(b: torch.Tensor, *, block: int | None = None, weighted: bool = False) -> Checksums:
    """Signed row checksums and row statistics of B, in one pass over it.

    ``Σ_j r_j b_kj`` with the random signs r of ``checksums.weights``; and ``Σ_j b_kj²`` and
    ``Σ_j b_kj``, joined to the spread ``z_k`` that ``Tolerance`` takes.

    Args:
        b: [K, N] or [batch, K, N], any strides; fp32, fp16, bf16 or fp8.
        block: columns summed together: None for whole rows (``verify``), ``online_block`` of the
            product for ``matmul_online``.
        weighted: also the checksums that locate an element, for ``verify(mode="checksum")``; a
            second pass.

    Guarantees: the same bits whatever the device's scheduling. Not covered: what was wrong in B
    before it was encoded.

    Raises:
        TypeError: b's dtype. ValueError: its device or shape, or a block that is no power of two
            from 16 up, or weighted checksums of blocks.

    Source: Huang and Abraham; the signs are ours.
    """
    check.encoding(b, block, weighted)
    batch = as_batch(b)
    size, inner, columns = batch.shape
    width = block or max(columns, 1)
    exact = b.dtype == torch.float32 and block is None
    dtype = torch.float64 if exact else torch.float32
    sums = b.new_empty((size, -(-columns // width), 2, inner), dtype=dtype)
    if sums.numel():
        launch.encode(batch, sums, width)
    return Checksums(sums, launch.weigh(batch) if weighted else None, columns, width)


def verify(
    c: torch.Tensor,
    a: torch.Tensor,
    checksums: Checksums,
    b: torch.Tensor | None = None,
    *,
    mode: Mode = "recompute",
    precision: Precision | None = None,
    tolerance: Tolerance | None = None,
    counts: torch.Tensor | None = None,
) -> Verdict:
    """Verify the rows of ``C = A B``, whoever computed it, reading C and A once.

    ``D_i = Σ_j r_j c_ij − Σ_k a_ik (Σ_j r_j b_kj)``; a row is suspect where |D_i| exceeds its
    rounding tolerance or is NaN. Suspect rows of C are repaired in place:

    - ``recompute``: computed again by this module's own kernel; a piece of the row that differs by
      more than the rounding of both is replaced, else the row keeps its bits.
    - ``checksum``: its one wrong element is located and rebuilt from the others (EEC), if every
      weighted checksum then agrees; else the row keeps its bits.
    - ``detect``: left.

    Args:
        c: [M, N] or [batch, M, N], fp32, fp16 or bf16; a: [.., M, K]; any strides.
        checksums: of B, by ``encode(b)``, for ``checksum`` with ``weighted=True``.
        b: [.., K, N], needed to recompute.
        precision: how C was multiplied where operands are fp32, by default as torch is set.
        tolerance: by default ``Tolerance.of`` the dtypes and sizes.
        counts: int32 [2] on the device, to add to; by default a new one.

    Guarantees: a change of one element by more than ``T_i`` plus the row's own rounding is
    suspected. No host synchronisation. Not covered: errors that cancel under the signs, faults in
    A before the product, and in B before encoding.

    Raises:
        TypeError: dtypes. ValueError: shapes, devices, or a mode without what it needs.

    Source: Huang and Abraham; ATTNChecker, section 4.2 (EEC).
    """
    check.verification(c, a, checksums, b, mode)
    used = precision or _torch_precision()
    if tolerance is None:
        tolerance = Tolerance.of(a.dtype, c.dtype, a.shape[-1], c.shape[-1], used)
    product, left = as_batch(c), as_batch(a)
    rows = checksums.sums.new_empty((3, *product.shape[:2]))
    status = c.new_empty(product.shape[:2], dtype=torch.int32)
    verdict = Verdict(status, _counts(counts, c), rows)
    if not c.numel():
        status.zero_()
        rows.zero_()
        return verdict
    launch.verify(product, left, checksums, verdict, tolerance, correct=mode == "checksum")
    if b is not None and mode == "recompute":
        launch.recompute(product, left, as_batch(b), verdict, tolerance, used)
    return verdict


def matmul_online(
    a: torch.Tensor,
    b: torch.Tensor,
    checksums: Checksums | None = None,
    *,
    mode: Mode = "recompute",
    out_dtype: torch.dtype | None = None,
    precision: Precision = "ieee",
    tolerance: Tolerance | None = None,
    counts: torch.Tensor | None = None,
    faults: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Verdict]:
    """``A B`` that is verified tile by tile in its fp32 accumulator, before it is rounded.

    The maths is in ``triton_online``. A tile with a suspect row is computed again at once, by the
    same instructions, and stored as it is then: bit for bit what ``matmul`` gives on healthy
    hardware.

    Args:
        a: [M, K]; b: [K, N]; fp32, fp16, bf16 or fp8 (both the same), any strides; a layout that
            the copy engine cannot read is copied first.
        checksums: ``encode(b, block=…)``, for a B that is used more than once.
        mode: ``recompute`` or ``detect``.
        out_dtype: of C; by default that of the operands, bf16 for fp8.
        precision: of fp32 operands in the matrix units: ``ieee`` uses none.
        tolerance, counts: as for ``verify``.
        faults: fp32 [F, 4], for tests: (row, column, value, attempts): each replaces an element of
            the accumulator in that many attempts. None costs nothing: the code is left out.

    Returns:
        C [M, N], contiguous, and the verdict, whose status is [blocks, M].

    Guarantees: a change of one accumulator element by more than T plus rounding, T being that of
    fp32 sums even where C is bf16, is found and in mode ``recompute`` repaired. A row that stays
    suspect is SUSPECT. No host synchronisation. Not covered: a fault after the accumulator is
    verified, in the rounding or the store; A damaged in shared memory or before; B before encoding.

    Raises:
        TypeError: dtypes. ValueError: shapes, devices, blocks or mode.

    Source: V-ABFT, "online" verification; the estimate of the walk is ours.
    """
    check.product("matmul_online", a, b)
    if checksums is None:
        checksums = encode(b, block=online_block(a.shape[0], b.shape[1], b.dtype))
    check.online(a, b, checksums, mode)
    if faults is not None:
        check.faults(faults, a.device)
    if tolerance is None:
        tolerance = Tolerance.of(a.dtype, None, a.shape[1], checksums.block, precision)
    status = a.new_empty((checksums.sums.shape[1], a.shape[0]), dtype=torch.int32)
    verdict = Verdict(status, _counts(counts, a), None)
    attempts = ATTEMPTS if mode == "recompute" else 1
    online = launch.Online(checksums, verdict, tolerance, attempts, faults)
    return _multiply(a, b, checksums.block, out_dtype, precision, online), verdict


def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    block: int | None = None,
    out_dtype: torch.dtype | None = None,
    precision: Precision = "ieee",
) -> torch.Tensor:
    """The kernel of ``matmul_online`` without its verification: the baseline of its cost.

    Args:
        a, b, out_dtype, precision: as for ``matmul_online``; block: columns of a tile.

    Guarantees: none; nothing is verified.

    Raises:
        TypeError, ValueError: as ``matmul_online``.
    """
    check.product("matmul", a, b)
    width = block or online_block(a.shape[0], b.shape[1], b.dtype)
    return _multiply(a, b, width, out_dtype, precision, None)


def online_block(rows: int, columns: int, dtype: torch.dtype) -> int:
    """Columns of a tile of ``matmul_online`` for C [rows, columns], and so of its encoding."""
    return product_plan(rows, columns, dtype, "ieee").block_n


def _multiply(
    a: torch.Tensor,
    b: torch.Tensor,
    block: int,
    out_dtype: torch.dtype | None,
    precision: Precision,
    online: launch.Online | None,
) -> torch.Tensor:
    dtype = out_dtype or (torch.bfloat16 if a.dtype in FLOAT8 else a.dtype)
    check.output("matmul", dtype)
    c = a.new_empty((a.shape[0], b.shape[1]), dtype=dtype)
    if c.numel() and a.numel():
        launch.multiply(a, b, c, block, precision, online)
    else:
        c.zero_()
        if online is not None:
            online.verdict.status.zero_()
    return c


def _counts(given: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    if given is None:
        return like.new_zeros(2, dtype=torch.int32)
    check.counts(given, like.device)
    return given


def _torch_precision() -> Precision:
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
