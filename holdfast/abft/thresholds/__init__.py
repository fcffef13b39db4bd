"""Thresholds that separate rounding errors from faults in the residuals of checksums."""

from holdfast.abft.thresholds.aabft import AAbft
from holdfast.abft.thresholds.analytic import Analytic
from holdfast.abft.thresholds.norm import Norm
from holdfast.abft.thresholds.protocol import Product, Threshold
from holdfast.abft.thresholds.rounding import Rounding
from holdfast.abft.thresholds.sea import Sea
from holdfast.abft.thresholds.vabft import PRESETS, EMax, VAbft

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
