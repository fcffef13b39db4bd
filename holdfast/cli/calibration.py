"""The work of ``holdfast calibrate``: measure a profile and store it, show it, or check it."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch

from holdfast.abft.thresholds.calibrate import calibrate, exceeded
from holdfast.abft.thresholds.measurement import DTYPES
from holdfast.abft.thresholds.profile import (
    Bucket,
    Profile,
    check_replaceable,
    load,
    profile_path,
    save,
)
from holdfast.abft.thresholds.settings import (
    calibrate_command,
    device_of,
    numeric_settings,
)
from holdfast.cli import calibration_plot, plots
from holdfast.cli.calibration_tables import as_document, print_profile
from holdfast.cli.progress import share_progress
from holdfast.cli.tables import say, write_json
from holdfast.errors import ConfigError

MOST_THREADS = 4096
QUICK_WARNING = (
    "measured on few rows: others may be above the model, as --check then says; measure without "
    "--quick before relying on it"
)


def run(args: argparse.Namespace) -> int:
    """Measure and store a profile, show one, or check one; return the exit code.

    It is 1 only if ``--check`` finds an error above the stored model. If the device computes wrong
    results, ``UncorrectableFault`` is raised and the stored profile is not replaced.
    """
    if args.profile is not None and args.profile.suffix != ".json":
        raise ConfigError(f"--profile {args.profile}: name a file that ends in .json")
    if args.json is not None and args.json == args.profile:
        raise ConfigError(f"--json and --profile are both {args.json}; name two files")
    with _settings(args):
        if args.show or args.check:
            return _show(args)
        return _measure(args)


@contextmanager
def _settings(args: argparse.Namespace) -> Iterator[None]:
    """Set torch's threads and precision as requested, and restore them afterwards."""
    if args.threads is not None and args.threads < 1:
        raise ConfigError(f"--threads {args.threads} must be at least 1")
    if args.threads is not None and args.threads > MOST_THREADS:
        raise ConfigError(f"--threads {args.threads} is too many: give at most {MOST_THREADS}")
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    try:
        if args.threads is not None:
            torch.set_num_threads(args.threads)
        if args.matmul_precision is not None:
            torch.set_float32_matmul_precision(args.matmul_precision)
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)


def _measure(args: argparse.Namespace) -> int:
    path = args.profile or profile_path(numeric_settings(device_of(args.device)))
    check_replaceable(path)
    effort = "quick" if args.quick else "full" if args.full else "default"
    profile = _with_progress(args, effort, tuple(args.dtype or DTYPES), args.seed)
    save(profile, path)
    print_profile(profile, path)
    if args.quick:
        print(QUICK_WARNING)
    if args.plot is not None or plots.available():
        _draw(args.plot or path.with_suffix(".png"), profile)
    else:
        print("no plot: matplotlib is not installed")
    write_json(args.json, as_document(profile, path))
    return 0


def _show(args: argparse.Namespace) -> int:
    profile = load(args.profile, args.device)
    path = args.profile or profile_path(profile.settings)
    print_profile(profile, path)
    document, fresh, broken = as_document(profile, path), None, False
    if args.check:
        fresh, above = _checked(args, profile, path)
        broken = bool(above)
        document["check"] = {
            "holds": not broken,
            "buckets": [asdict(bucket) for bucket in fresh.buckets],
            "above": [[bucket.dtype, bucket.inner] for bucket in above],
        }
    if args.plot is not None:
        _draw(args.plot, profile, fresh)
    write_json(args.json, document)
    return int(broken)


def _checked(
    args: argparse.Namespace, profile: Profile, path: Path
) -> tuple[Profile, list[Bucket]]:
    """Measure quickly on other operands; return that profile and its buckets above the old one."""
    kept = [name for name in profile.dtypes if name in DTYPES]
    unknown = [name for name in args.dtype or () if name not in kept]
    if unknown:
        raise ConfigError(
            f"{path} has no {', '.join(unknown)}, only {', '.join(kept)}; measure with: "
            f"{calibrate_command(profile.settings)}"
        )
    fresh = _with_progress(args, "quick", tuple(args.dtype or kept), profile.seed + 1)
    above = exceeded(profile, fresh)
    for bucket in above:
        limit = profile.fits[bucket.dtype].e_max(bucket.inner)
        print(
            f"{bucket.dtype} at K = {bucket.inner}: a relative checksum error of "
            f"{bucket.e_max:.3g}, above the kept model's {limit:.3g}"
        )
    rows = sum(bucket.rows for bucket in fresh.buckets)
    verdict = "DOES NOT HOLD" if above else "holds"
    print(f"check: the profile {verdict}; {rows} fresh rows, {len(above)} buckets above it")
    return fresh, above


def _draw(path: Path, profile: Profile, fresh: Profile | None = None) -> None:
    calibration_plot.draw(path, profile, fresh)
    say(f"plot: {path}")


def _with_progress(
    args: argparse.Namespace, effort: str, dtypes: tuple[str, ...], seed: int
) -> Profile:
    with share_progress("measuring") as show:
        return calibrate(args.device, effort=effort, dtypes=dtypes, seed=seed, on_progress=show)
