"""What a product costs whose data make many rows suspect: at most one more product.

    python -m bench.suspect_rows [--pairs N]

Smooth, periodic, low-rank and Hilbert operands, on which rounding errors add up. A is the product
without protection, B the protected one, whose suspect rows a second kernel confirms. Correctness
first: the same bits, no event. The goal is 2.2 times the product's time.
"""

import argparse
import math
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from bench.paired import paired
from bench.rows import record
from holdfast import events
from holdfast.abft.gemm.raw import raw
from holdfast.protection import protect

GOAL = 2.2
Operands = tuple[torch.Tensor, torch.Tensor]


def smooth(rows: int, inner: int, columns: int) -> Operands:
    """Sines of rising frequency times cosines."""
    t = torch.linspace(0, 1, inner)
    left = torch.outer(torch.arange(1, rows + 1).float(), t)
    right = torch.outer(t, torch.arange(1, columns + 1).float())
    return (2 * math.pi * left).sin(), (2 * math.pi * right).cos()


def periodic(rows: int, inner: int, columns: int) -> Operands:
    """Two columns, and two rows, that repeat."""
    generator = torch.Generator().manual_seed(1)
    a = torch.rand(rows, 2, generator=generator).repeat(1, inner // 2)
    return a, torch.rand(2, columns, generator=generator).repeat(inner // 2, 1)


def low_rank(rows: int, inner: int, columns: int) -> Operands:
    """Products of rank 3."""
    generator = torch.Generator().manual_seed(2)
    shapes = (rows, 3), (3, inner), (inner, 3), (3, columns)
    parts = [torch.rand(shape, generator=generator) for shape in shapes]
    return parts[0] @ parts[1], parts[2] @ parts[3]


def hilbert(rows: int, inner: int, columns: int) -> Operands:
    """Hilbert's matrix times slowly falling columns."""
    i, j, k = torch.arange(rows), torch.arange(inner), torch.arange(columns)
    return 1 / (i.unsqueeze(1) + j + 1), 1 / (j.unsqueeze(1) + k + 1)


KINDS: dict[str, Callable[[int, int, int], Operands]] = {
    "smooth": smooth,
    "periodic": periodic,
    "low rank": low_rank,
    "hilbert": hilbert,
}
SHAPES = ((512, 512, 512), (512, 4096, 512), (2048, 1024, 256))
DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16}


def measure(name: str, shape: tuple[int, int, int], dtype: str, pairs: int) -> dict[str, object]:
    """Time one product against itself under protection."""
    a, b = (operand.to(DTYPES[dtype]) for operand in KINDS[name](*shape))
    clean = a @ b

    def plain() -> None:
        with raw():
            torch.mm(a, b)

    def checked() -> None:
        torch.mm(a, b)

    events.clear()
    with protect(nn.Identity()) as protection:
        same = torch.equal(torch.mm(a, b), clean)
        rows = sum(site.suspects for site in protection.report().sites)
        if not same or events.recent():
            raise SystemExit(f"{name} {dtype}: same bits {same}, {events.recent()}: not timed")
        timed = paired(plain, checked, pairs=pairs)
    return {"kind": name, "dtype": dtype, "shape": list(shape), "suspect_rows": rows, **timed}


def main() -> None:
    """Every kind, shape and dtype; the table last."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=20)
    args = parser.parse_args()
    table = Table("kind", "dtype", "shape", "suspect rows", "ratio", "quartiles")
    worst = 0.0
    for name in KINDS:
        for shape in SHAPES:
            for dtype in DTYPES:
                row = measure(name, shape, dtype, args.pairs)
                record("suspect_rows", row)
                keys = ("kind", "dtype", "shape", "suspect_rows", "ratio", "ratio_quartiles")
                table.add_row(*(str(row[key]) for key in keys))
                worst = max(worst, float(str(row["ratio"])) if row["suspect_rows"] else 0.0)
    Console().print(table)
    print(f"worst ratio of a product with suspect rows: {worst:.2f} (goal {GOAL})")


if __name__ == "__main__":
    main()
