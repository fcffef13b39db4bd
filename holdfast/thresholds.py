"""Public names for the rounding-error thresholds of verified matrix products."""

from holdfast.abft.thresholds import (
    PRESETS,
    REGISTRY,
    AAbft,
    Analytic,
    EMax,
    Norm,
    Product,
    Rounding,
    Sea,
    Threshold,
    VAbft,
)
from holdfast.abft.thresholds.calibrate import apply as apply_profile
from holdfast.abft.thresholds.calibrate import calibrate
from holdfast.abft.thresholds.profile import load as load_profile
from holdfast.abft.thresholds.profile import save as save_profile

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
    "apply_profile",
    "calibrate",
    "load_profile",
    "save_profile",
]
