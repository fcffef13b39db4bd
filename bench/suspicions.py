"""Suspicions and false alarms of the rounding threshold on every distribution, coherent ones too.

    python -m bench.suspicions [--rows N]

Healthy products of every dtype, of more than fifty distributions, and K from 1 to 16,384 go through
the interception. A suspicion costs a recomputation; an event would be a false alarm. With no event
in n rows the rule of three bounds their rate by 3/n at 95 % confidence. *tightness* is the smallest
ratio of a row's threshold to its residual in one product, none where all residuals are zero.
"""

import argparse
import time
from math import inf, isfinite

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from bench.rows import record
from holdfast import events
from holdfast.abft.gemm.cpu import encode, verify
from holdfast.inject.statistics import rule_of_three
from holdfast.protection import Protection, protect
from holdfast_lab.distribution_families import FAMILIES
from holdfast_lab.distributions import COHERENT, RANDOM

EVERY = RANDOM | COHERENT | FAMILIES

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}
INNERS = [1, 2, 3, 7, 16, 64, 129, 256, 768, 1024, 3000, 4096, 16384]
COLUMNS = [1, 5, 48, 130]  # in turn
WORK = 2**28  # multiplications a product, at most


def product(
    protection: Protection,
    name: str,
    dtype: torch.dtype,
    inner: int,
    columns: int,
    rows: int,
    seed: int,
) -> tuple[int, int]:
    """Rows verified and rows suspected in one product."""
    make = EVERY[name]
    generator = torch.Generator().manual_seed(seed)
    a, b = make(rows, inner, columns, dtype, generator)
    before = counted(protection)
    torch.mm(a, b)
    after = counted(protection)
    return after[0] - before[0], after[1] - before[1]


def counted(protection: Protection) -> tuple[int, int]:
    """Rows and suspects so far."""
    sites = protection.report().sites
    return sum(site.rows for site in sites), sum(site.suspects for site in sites)


def least_ratio(name: str, dtype: torch.dtype) -> float:
    """Return the smallest ratio of threshold to residual of a product's rows."""
    a, b = EVERY[name](256, 512, 512, dtype, torch.Generator().manual_seed(0))
    residual, threshold = verify(a @ b, a, *encode(b), b=b)[:2]
    return float((threshold / residual.abs()).nan_to_num(inf, posinf=inf).min())


def measure(name: str, dtype: str, wanted: int) -> dict[str, object]:
    """At least `wanted` rows of one distribution in one dtype."""
    events.clear()
    rows = suspects = 0
    started_s, seed = time.perf_counter(), 0
    with protect(nn.Identity()) as protection:
        while rows < wanted:
            inner, columns = INNERS[seed % len(INNERS)], COLUMNS[seed % len(COLUMNS)]
            height = max(16, min(1024, WORK // (inner * columns)))
            done = product(protection, name, DTYPES[dtype], inner, columns, height, seed)
            rows, suspects, seed = rows + done[0], suspects + done[1], seed + 1
        dismissed = protection.report().false_alarms
        tightness = least_ratio(name, DTYPES[dtype])
    return {
        "distribution": name,
        "dtype": dtype,
        "rows": rows,
        "products": seed,
        "suspicions": suspects,
        "suspicion_rate": suspects / rows,
        "dismissed": dismissed,
        "tightness": round(tightness, 2) if isfinite(tightness) else None,
        "events": len([each for each in events.recent() if each.kind not in DOUBTS]),
        "doubts": len([each for each in events.recent() if each.kind in DOUBTS]),
        "seconds": round(time.perf_counter() - started_s, 1),
    }


DOUBTS = ("nonfinite_input", "extreme_input")  # operands that overflow: named, not taken for faults


def main() -> None:
    """Every distribution in every dtype; the table last."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=40_000, help="of each distribution and dtype")
    args = parser.parse_args()
    shown = ("distribution", "dtype", "rows", "suspicions", "tightness", "events", "doubts")
    table = Table(*shown)
    total = alarms = 0
    for name in EVERY:
        for dtype in DTYPES:
            row = measure(name, dtype, args.rows)
            record("suspicions", row)
            table.add_row(*(str(row[key]) for key in shown))
            total, alarms = total + int(row["rows"]), alarms + int(row["events"])
    Console().print(table)
    print(f"{alarms} false alarms in {total:,} rows: fewer than {rule_of_three(total):.1e} (95 %)")
    if alarms:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
