"""Models of V-ABFT's error bound ``e_max`` over K, fitted to measured errors (section 3.6)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from holdfast.abft.thresholds.vabft import EMax

MARGIN = 1.2
# Ratio by which the √K model must on average be tighter than the constant one to be preferred.
PREFERENCE = 1.1

Model = Literal["constant", "sqrt"]
MODELS: tuple[Model, ...] = get_args(Model)


@dataclass(frozen=True)
class Fit:
    """A model of ``e_max``, at least 20 % above the measurement at any K.

    Args:
        e_max: Relative error by K, including the margin.
        margin: Smallest ratio of model to measurement over all K, 1.2 by construction.
        excess: Geometric mean of that ratio, 1.2 if the model fits every point.
    """

    model: Model
    e_max: EMax
    margin: float
    excess: float


def fit(measured: Mapping[int, float], model: Model) -> Fit:
    """Fit a model by least squares on the logarithm, then lift it over every measurement.

    The fitted curve is scaled until it is 20 % above the measurement that comes closest to it, the
    safety margin of the paper. ``measured`` is the largest relative error by K; zeros, where the
    few measured rows showed no rounding, are left out.

    Raises:
        ValueError: All measurements are zero, or one is not finite.
    """
    known = {inner: value for inner, value in measured.items() if value != 0}
    if not known or not all(0 < value < math.inf for value in known.values()):
        raise ValueError(f"e_max must be finite, and positive at some K, not {dict(measured)}")
    roots = np.sqrt(np.array(list(known), dtype=np.float64))
    values = np.array(list(known.values()), dtype=np.float64)
    share = _best_share(roots, values) if model == "sqrt" else 0.0
    shape = share * roots + (1 - share)
    scale = MARGIN * float((values / shape).max())
    ratios = scale * shape / values
    return Fit(
        model=model,
        e_max=EMax(scale * (1 - share), growth=scale * share),
        margin=float(ratios.min()),
        excess=float(np.exp(np.log(ratios).mean())),
    )


def best_fit(measured: Mapping[int, float]) -> Fit:
    """Fit both models; prefer the constant, unless the √K model is tighter by over a tenth."""
    constant, sqrt = fit(measured, "constant"), fit(measured, "sqrt")
    return sqrt if constant.excess > PREFERENCE * sqrt.excess else constant


def _best_share(roots: np.ndarray, values: np.ndarray) -> float:
    """Find the share in ``share √K + (1 − share)`` that minimises the squared log residuals.

    For a given share the best scale is the mean log residual, so only the share is searched.
    """
    shares = np.concatenate([[0.0], np.geomspace(1e-6, 1.0, 2000)])
    shapes = shares[:, None] * roots + (1 - shares[:, None])
    return float(shares[np.log(values / shapes).var(axis=1).argmin()])
