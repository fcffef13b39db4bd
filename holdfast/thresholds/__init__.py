"""Rounding-error bounds for checksum residuals: what is still rounding, and what is a fault."""

from holdfast.thresholds.aabft import AAbft
from holdfast.thresholds.analytic import Analytic
from holdfast.thresholds.norm import Norm
from holdfast.thresholds.protocol import Product, Threshold
from holdfast.thresholds.rounding import Rounding
from holdfast.thresholds.sea import Sea
from holdfast.thresholds.vabft import PRESETS, EMax, VAbft

__all__ = [
    "PRESETS",
    "REGISTRY",
    "AAbft",
    "Analytic",
    "EMax",
    "Norm",
    "Product",
    "Rounding",
    "Sea",
    "Threshold",
    "VAbft",
]

_MEMBERS: tuple[Threshold, ...] = (Analytic(), Norm(), Sea(), AAbft(), VAbft(), Rounding())

# Every threshold by its name, with its default parameters.
REGISTRY: dict[str, Threshold] = {member.name: member for member in _MEMBERS}
