"""``holdfast calibrate``: measures how this device rounds, and keeps it for the thresholds."""

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
    PRECISIONS,
    calibrate_command,
    device_of,
    numeric_settings,
)
from holdfast.cli import calibration_plot, plots
from holdfast.cli.calibration_tables import as_document, print_profile
from holdfast.cli.progress import share_progress
from holdfast.cli.tables import write_json
from holdfast.errors import ConfigError

QUICK_WARNING = (
    "measured on few rows: others may be above the model, as --check then says; measure without "
    "--quick before relying on it"
)


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the verb ``calibrate`` to the command line."""
    parser = subparsers.add_parser(
        "calibrate",
        help="measure how this device rounds",
        description="Measure the largest relative error of a row checksum (e_max) by dtype and K, "
        "and how the residual of random-sign checksums grows with K, under the present numeric "
        "settings, and keep both in the user's cache folder. Exit code 1 if the device computes "
        "wrong, or if --check finds an error above the kept model.",
    )
    add = parser.add_argument
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--quick", action="store_true", help="seconds, fewer K and products")
    what.add_argument("--full", action="store_true", help="the paper's 100,000 rows, many minutes")
    what.add_argument("--show", action="store_true", help="print the kept profile, measure nothing")
    what.add_argument("--check", action="store_true", help="measure quickly against the kept one")
    add("--device", metavar="D", default="cpu", help="cpu, cuda or cuda:INDEX (default cpu)")
    add("--dtype", action="append", choices=DTYPES, help="only this one; may be repeated")
    add("--threads", metavar="N", type=int, help="of torch on CPU (default: as torch finds it)")
    precisions = tuple(PRECISIONS.values())
    add("--matmul-precision", choices=precisions, help="of fp32 products (default highest)")
    add("--seed", metavar="N", type=int, default=0, help="of the operands (default 0)")
    add("--profile", metavar="FILE", type=Path, help="default: by settings, in the cache folder")
    add("--plot", metavar="FILE", type=Path, help="default: beside the profile, as .png")
    add("--json", metavar="FILE", type=Path, help="also write everything to FILE")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and keep, show, or check; 1 only if ``--check`` finds an error above the model.

    Raises:
        ConfigError: an argument is unusable, or the kept profile is refused; nothing was measured.
        UncorrectableFault: the device computes wrong; an older profile stays as it is.
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
    """Set torch's threads and precision as asked for, and put them back afterwards."""
    if args.threads is not None and args.threads < 1:
        raise ConfigError(f"--threads {args.threads} must be at least 1")
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
    """Measure quickly on other operands; return that, and the buckets above the profile."""
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
    print(f"plot: {path}")


def _with_progress(
    args: argparse.Namespace, effort: str, dtypes: tuple[str, ...], seed: int
) -> Profile:
    with share_progress("measuring") as show:
        return calibrate(args.device, effort=effort, dtypes=dtypes, seed=seed, on_progress=show)
