"""The output of ``holdfast calibrate``: tables for the terminal and a document for ``--json``."""

from dataclasses import asdict
from pathlib import Path

from holdfast.abft.thresholds.fits import MODELS, Fit, fit
from holdfast.abft.thresholds.measurement import unit_roundoff
from holdfast.abft.thresholds.profile import Bucket, Profile
from holdfast.abft.thresholds.settings import UNSET
from holdfast.cli.progress import sparkline
from holdfast.cli.tables import print_table, say

MODEL_COLUMNS = ("dtype", "rows", "over K", "largest", "constant", "√K", "used", "margin", "excess")


def print_profile(profile: Profile, path: Path) -> None:
    """Print the settings, the measured errors and the models that were fitted to them."""
    named = ("device", "processor", "torch")
    rest = {
        name: value
        for name, value in profile.settings.items()
        if name not in named and value != UNSET
    }
    say(f"{profile.settings['processor']}, torch {profile.settings['torch']}")
    print(", ".join(f"{name} {value}" for name, value in rest.items()))
    say(f"measured {profile.created_utc} in {profile.seconds:.0f} s ({profile.effort})")
    _print_buckets(profile)
    _print_models(profile)
    say(f"profile: {path}")


def as_document(profile: Profile, path: Path) -> dict[str, object]:
    """Return the profile, the models fitted to it and the path of its file as plain values."""
    fits = {
        dtype: {model: asdict(fit(profile.measured(dtype), model)) for model in MODELS}
        | {"used": profile.fits[dtype].model}
        for dtype in profile.dtypes
    }
    return {"file": str(path), **asdict(profile), "fits": fits}


def _print_buckets(profile: Profile) -> None:
    cells = {(bucket.dtype, bucket.inner): bucket for bucket in profile.buckets}
    inners = sorted({bucket.inner for bucket in profile.buckets})
    columns = ["K", *profile.dtypes]
    rows = [[inner, *(_cell(cells[dtype, inner]) for dtype in profile.dtypes)] for inner in inners]
    title = "largest relative checksum error / u · rms of the random-sign residual / (u ‖C_i‖)"
    print_table(columns, rows, title=title, right=columns)
    for bucket in profile.buckets:
        if not bucket.e_max:
            print(
                f"0.00 of {bucket.dtype} at K = {bucket.inner}: in each of {bucket.rows} rows both "
                f"checksums were rounded to the same {bucket.dtype} number"
            )


def _cell(bucket: Bucket) -> str:
    rms = max(part.rms for part in bucket.growth.values())
    return f"{bucket.e_max / unit_roundoff(bucket.dtype):.2f} · {rms:.2f}"


def _print_models(profile: Profile) -> None:
    rows = [_model_row(profile, dtype) for dtype in profile.dtypes]
    title = "e_max: the models are at least `margin`, on average `excess` times the measured errors"
    print_table(MODEL_COLUMNS, rows, title=title, right=("rows", "margin", "excess"))


def _model_row(profile: Profile, dtype: str) -> list[str]:
    measured, used = profile.measured(dtype), profile.fits[dtype]
    rows = sum(bucket.rows for bucket in profile.buckets if bucket.dtype == dtype)
    return [
        dtype,
        str(rows),
        sparkline(measured),
        f"{max(measured.values()):.2e}",
        *(_formula(fit(measured, model)) for model in MODELS),
        used.model,
        f"{used.margin:.2f}",
        f"{used.excess:.2f}",
    ]


def _formula(fitted: Fit) -> str:
    constant, growth = fitted.e_max.constant, fitted.e_max.growth
    return f"{growth:.2e}·√K + {constant:.2e}" if growth else f"{constant:.2e}"
