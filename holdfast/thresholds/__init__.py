"""Rounding-error bounds for checksum residuals: what is still rounding, and what is a fault."""

from collections.abc import Callable

import torch

from holdfast.thresholds.analytic import analytic
from holdfast.thresholds.vabft import C_SIGMA, E_MAX, vabft

__all__ = ["C_SIGMA", "E_MAX", "REGISTRY", "analytic", "vabft"]

# Each takes (a [.., M, K], b [.., K, N], out dtype) and gives one threshold per row of C [.., M].
REGISTRY: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.dtype], torch.Tensor]] = {
    "analytic": analytic,
    "vabft": vabft,
}
