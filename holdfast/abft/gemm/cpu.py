"""Encoding of B before a product and verification of C after it, on CPU.

Each pass is an operator of ``abft.registry`` with a native implementation (the C++ kernels) and a
reference in plain torch, which gives the same results up to the order of fp64 sums.
"""

from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from holdfast import native
from holdfast.abft.gemm.reference import (
    as_batch,
    encode_rows_reference,
    suspect_rows,
    verify_rows_reference,
)
from holdfast.abft.registry import native_or_reference
from holdfast.abft.thresholds import rounding
from holdfast.abft.thresholds.chains import longest_chain
from holdfast.abft.thresholds.extreme import EXTREME
from holdfast.sites import Gemm

Encoding = tuple[torch.Tensor, torch.Tensor]  # row checksums and statistics of B


@cache
def configured_core() -> ModuleType:
    """Return the native core with the constants of the rounding threshold set.

    Raises:
        ConfigError: The native core is not loaded.
    """
    core = native.required()
    # The first use may be a trace with fake tensors; the chains are measured on real ones.
    with _disable_current_modes():
        panels = [longest_chain(dtype) for dtype in native.ELEMENTS]
    core.configure(
        output_sigmas=rounding.OUTPUT_SIGMAS,
        accumulation_sigmas=rounding.ACCUMULATION_SIGMAS,
        panels=panels,
        narrow=rounding.NARROW,
        check_steps=rounding.CHECK_STEPS,
        mean_noise=rounding.MEAN_NOISE,
        extreme=EXTREME,
    )
    return core


def verify_gemm(gemm: Gemm, output: torch.Tensor) -> torch.Tensor:
    """Verify the output of a product whose B is encoded; returns what ``verify`` does."""
    return verify(output, *_problem(gemm))


def encoding_of_weight(b: torch.Tensor) -> tuple[Encoding, bool, bool]:
    """Encode b, or return the cached encoding of a watched weight.

    Returns:
        The encoding, True if it was cached, and True if the cached one was damaged and was computed
        again.
    """
    if native.core is None:
        return encode(b), False, False
    row_sum, statistics, kept, damaged = configured_core().known_encoding(b)
    return (row_sum, statistics), kept, damaged


def _problem(gemm: Gemm) -> tuple[Any, ...]:
    known = gemm.row_sum, gemm.statistics, gemm.addend, gemm.beta, gemm.alpha, gemm.b
    return gemm.a, *known


def _encode_native(b: torch.Tensor) -> Encoding:
    configured_core()
    row_sum, statistics = torch.ops.holdfast.encode_rows(b)
    return row_sum, statistics


def _verify_native(*problem: Any, **options: Any) -> torch.Tensor:
    configured_core()
    rows: torch.Tensor = torch.ops.holdfast.verify_rows(*problem, **options)
    return rows


def _count_native(
    gemm: Gemm, output: torch.Tensor, *, encode_a: bool = False
) -> tuple[int, Encoding | None]:
    counted: tuple[int, Encoding | None]
    counted = configured_core().count_suspects(output, *_problem(gemm), encode_a)
    return counted


def _count_reference(
    gemm: Gemm, output: torch.Tensor, *, encode_a: bool = False
) -> tuple[int, Encoding | None]:
    """Count the suspect rows of a product, as the interception of this process does.

    With ``encode_a`` the same pass over A also encodes A, as the right operand of a later product.
    """
    suspects = int(suspect_rows(verify_gemm(gemm, output)).sum())
    return suspects, encode(gemm.a) if encode_a else None


def _line_native(gemm: Gemm, output: torch.Tensor) -> float:
    line: float = configured_core().detection_line(output, *_problem(gemm))
    return line


def _line_reference(gemm: Gemm, output: torch.Tensor) -> float:
    """Compute threshold / rms of the product's first row, with all that ``verify`` allows for."""
    known = gemm.addend, gemm.beta, gemm.alpha, gemm.b
    rows = verify_rows_reference(
        output, gemm.a, gemm.row_sum, gemm.statistics, *known, in_force=True
    )
    _, threshold, energy = rows[:, 0, 0]
    rms = float(energy / output.shape[-1]) ** 0.5
    return float(threshold) / rms if 0 < rms < float("inf") else 0.0


encode = native_or_reference("gemm.encode", _encode_native, encode_rows_reference)
verify = native_or_reference("gemm.verify", _verify_native, verify_rows_reference)
detection_line = native_or_reference("gemm.detection_line", _line_native, _line_reference)
count_suspects = native_or_reference("gemm.count_suspects", _count_native, _count_reference)


if native.core is not None:

    @torch.library.register_fake("holdfast::encode_rows")
    def _(b: torch.Tensor) -> Encoding:
        batch = as_batch(b)
        return (
            batch.new_empty(batch.shape[:2], dtype=torch.float64),
            batch.new_empty((batch.shape[0], batch.shape[1] + 2), dtype=torch.float64),
        )

    @torch.library.register_fake("holdfast::verify_rows")
    def _(c: torch.Tensor, *problem: object) -> torch.Tensor:
        return c.new_empty((3, *as_batch(c).shape[:2]), dtype=torch.float64)
