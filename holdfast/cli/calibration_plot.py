"""The plot of a calibration: measured errors and fitted models, by dtype and K."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from holdfast.abft.thresholds.fits import MARGIN, MODELS, fit
from holdfast.abft.thresholds.measurement import unit_roundoff
from holdfast.abft.thresholds.profile import Profile
from holdfast.cli.plots import drawn

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DISTRIBUTIONS = {"n01": "N(0, 1)", "n11": "|N(1, 1)|", "u01": "U(0, 1)"}
LABELS = {"constant": "constant", "sqrt": "α√K + β"}


def draw(path: Path, profile: Profile, fresh: Profile | None = None) -> None:
    """Draw a profile with a column for each dtype, and the errors of a fresh check."""
    count, settings = len(profile.dtypes), profile.settings
    with drawn(path, (3.6 * count + 0.6, 7)) as figure:
        axes = figure.subplots(2, count, squeeze=False, sharex=True)
        for index, dtype in enumerate(profile.dtypes):
            _draw_errors(axes[0, index], profile, dtype, fresh)
            _draw_growth(axes[1, index], profile, dtype)
        axes[0, 0].set_ylabel("largest |E| / |checksum|, in u")
        axes[1, 0].set_ylabel("rms of the signed residual, in u ‖C_i‖")
        title = f"{settings['processor']}, torch {settings['torch']}, {profile.created_utc}"
        figure.suptitle(title)


def _draw_errors(axes: "Axes", profile: Profile, dtype: str, fresh: Profile | None) -> None:
    unit, measured = unit_roundoff(dtype), profile.measured(dtype)
    inners = np.geomspace(min(measured), max(measured), 200)
    errors = [value / unit for value in measured.values()]
    axes.plot(list(measured), errors, "ko", ms=4, label="measured")
    for model in MODELS:
        used = model == profile.fits[dtype].model
        curve = np.array([fit(measured, model).e_max(inner) for inner in inners]) / unit
        axes.plot(inners, curve, "C0" if used else "C7--", label=LABELS[model])
        if used:
            axes.fill_between(inners, curve / MARGIN, curve, color="C0", alpha=0.2, label="margin")
    if fresh is not None and dtype in fresh.dtypes:
        again = fresh.measured(dtype)
        axes.plot(list(again), [value / unit for value in again.values()], "C3x", label="check")
    axes.set_xscale("log", base=2)
    axes.set(title=dtype, ylim=(0, None))
    axes.legend(fontsize="small", loc="lower left")


def _draw_growth(axes: "Axes", profile: Profile, dtype: str) -> None:
    buckets = [bucket for bucket in profile.buckets if bucket.dtype == dtype]
    inners = [bucket.inner for bucket in buckets]
    for name, label in DISTRIBUTIONS.items():
        rms = [bucket.growth[name].rms for bucket in buckets]
        axes.plot(inners, rms, "o-", ms=3, label=label)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="K", ylim=(0, None))
    axes.legend(fontsize="small")
