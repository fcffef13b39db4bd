"""The two passes around a product, native where the core is loaded: encode B, verify C."""

import torch

from holdfast import native
from holdfast.abft.gemm.reference import as_batch, encode_rows_reference, verify_rows_reference
from holdfast.abft.thresholds import rounding
from holdfast.abft.thresholds.chains import longest_chain
from holdfast.abft.thresholds.extreme import EXTREME

if native.core is not None:
    native.core.configure(
        output_sigmas=rounding.OUTPUT_SIGMAS,
        accumulation_sigmas=rounding.ACCUMULATION_SIGMAS,
        panels=[longest_chain(dtype) for dtype in native.ELEMENTS],
        narrow=rounding.NARROW,
        check_steps=rounding.CHECK_STEPS,
        mean_noise=rounding.MEAN_NOISE,
        extreme=EXTREME,
    )


def encode(b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Row checksums and statistics of b; native where it can be (see the reference)."""
    if native.core is None:
        return encode_rows_reference(b)
    row_sum, statistics = torch.ops.holdfast.encode_rows(b)
    return row_sum, statistics


def verify(
    c: torch.Tensor,
    a: torch.Tensor,
    row_sum: torch.Tensor,
    statistics: torch.Tensor,
    addend: torch.Tensor | None = None,
    beta: float = 1.0,
    alpha: float = 1.0,
    b: torch.Tensor | None = None,
) -> torch.Tensor:
    """Residual, threshold and energy of each row, fp64 [3, batch, M] (see the reference)."""
    run = verify_rows_reference if native.core is None else torch.ops.holdfast.verify_rows
    return run(c, a, row_sum, statistics, addend, beta, alpha, b)


if native.core is not None:

    @torch.library.register_fake("holdfast::encode_rows")
    def _(b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        batch = as_batch(b)
        return (
            batch.new_empty(batch.shape[:2], dtype=torch.float64),
            batch.new_empty((batch.shape[0], batch.shape[1] + 2), dtype=torch.float64),
        )

    @torch.library.register_fake("holdfast::verify_rows")
    def _(
        c: torch.Tensor,
        a: torch.Tensor,
        row_sum: torch.Tensor,
        statistics: torch.Tensor,
        addend: torch.Tensor | None,
        beta: float,
        alpha: float,
        b: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return c.new_empty((3, *as_batch(c).shape[:2]), dtype=torch.float64)
