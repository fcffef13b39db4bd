"""``holdfast calibrate``: measure this device's rounding errors, for the thresholds of checks."""

import argparse
from pathlib import Path

from holdfast.cli.parser import deferred

# The keys of DTYPES and the values of PRECISIONS in holdfast.abft.thresholds, which imports torch.
DTYPES = ("fp64", "fp32", "fp16", "bf16")
PRECISIONS = ("highest", "high", "medium")


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the verb ``calibrate`` to the command line."""
    parser = subparsers.add_parser(
        "calibrate",
        description="Measure the largest relative error of a row checksum (e_max) by dtype and K, "
        "and how the residual of random-sign checksums grows with K, under the present numeric "
        "settings, and store both in the user's cache folder, where protect(threshold='vabft') "
        "reads them. Exit code 1 if the device computes wrong results, or if --check finds an "
        "error above the stored model.",
    )
    add = parser.add_argument
    what = parser.add_mutually_exclusive_group()
    for name, text in (
        ("quick", "measure fewer K and products, which takes seconds"),
        ("full", "measure 100,000 rows as the paper does, which takes many minutes"),
        ("show", "print the stored profile and measure nothing"),
        ("check", "measure quickly and compare with the stored profile"),
    ):
        what.add_argument(f"--{name}", action="store_true", help=text)
    add("--device", metavar="D", default="cpu", help="cpu, cuda or cuda:INDEX (default cpu)")
    add("--dtype", action="append", choices=DTYPES, help="only this dtype; may be repeated")
    add("--threads", metavar="N", type=int, help="torch's threads on CPU (default: unchanged)")
    text = "torch's precision of fp32 products (default highest)"
    add("--matmul-precision", choices=PRECISIONS, help=text)
    add("--seed", metavar="N", type=int, default=0, help="random seed of operands (default 0)")
    text = "file of the profile (default: in the cache folder, by settings)"
    add("--profile", metavar="FILE", type=Path, help=text)
    text = "file of the plot (default: beside the profile, as .png)"
    add("--plot", metavar="FILE", type=Path, help=text)
    add("--json", metavar="FILE", type=Path, help="also write everything to FILE")
    parser.set_defaults(run=deferred("calibration"))
