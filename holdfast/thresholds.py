"""The rounding-error thresholds of checked products, as a public module of the package."""

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
