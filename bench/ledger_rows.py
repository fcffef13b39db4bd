"""The device's kernel on right and on struck rows, in Triton's interpreter or on a CUDA device.

    TRITON_INTERPRET=1 python -m bench.ledger_rows [--rows N] [--only fp64,bf16] [--again]

For every dtype, products of every distribution that healthy programs multiply, with A, B and C by
rows, by columns and neither, with edges such as K = 1 and N = 1, and with sums that later products
share: the number in the ledger after each is the largest ratio of a residual to its threshold.
With no ratio above 1 in n rows, the rule of three bounds the rate of false alarms by 3/n at 95 %
confidence. Elements that are changed by 2.2 thresholds must all be found, and so must NaN and INF,
which in an operand must be told from those of a fault (Triton's interpreter reads those of fp8 as
finite numbers).

Each dtype has a row of its own. A later call leaves out those that were recorded with the same
code, device and number of rows. Exit code: 1 if a right row exceeds its threshold or a fault is
missed.
"""

import argparse
import json
import math
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import chain, cycle, product
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.rows import RESULTS, record
from holdfast.abft.gemm.cpu import configured_core
from holdfast.abft.triton.tolerance import FLOAT8, Tolerance
from holdfast.inject.statistics import rule_of_three
from holdfast_lab.distributions import COHERENT, RANDOM
from holdfast_lab.provenance import provenance

TESTS = Path(__file__).parent.parent / "tests" / "abft" / "gemm"
DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
ROWS = 4099  # M of most products; no multiple of a tile
# K and N. They are small, as the interpreter takes the same time for every tile.
SIZES = ((64, 64), (1, 64), (64, 1), (33, 17), (1, 1), (63, 61), (65, 70))
LAYOUTS = tuple(product(("rows", "columns", "neither"), ("rows", "columns", "neither"), (0, 1)))
SHARED_EVERY = 4  # of the products one, with those of its gradients
STRIKE, STRUCK_ROWS = 2.2, 67
SMALL_GRADIENT = 1 / 64  # so that sums over all rows stay in the range of fp16

Sums = tuple[torch.Tensor, torch.Tensor]


class Case(NamedTuple):
    """A finished product C = A B and what its check is given."""

    c: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    scales: dict[str, torch.Tensor]


def laid_out(values: torch.Tensor, layout: str) -> torch.Tensor:
    """Copy a matrix so that its rows or its columns are contiguous, or neither."""
    if layout == "columns":
        return values.T.contiguous().T
    wide = values.new_zeros((values.shape[0], (2 if layout == "neither" else 1) * values.shape[1]))
    wide[:, :: wide.shape[1] // values.shape[1]] = values
    return wide[:, :: wide.shape[1] // values.shape[1]]


def finished(a: torch.Tensor, b: torch.Tensor, scales: dict[str, torch.Tensor]) -> torch.Tensor:
    """Multiply as torch does; fp8 operands with their scales, into bf16."""
    if a.dtype not in FLOAT8:
        return a @ b
    wide = a.float(), b.float()
    if scales:
        wide = scales["row_scale"] * wide[0], wide[1] * scales["column_scale"]
    return (wide[0] @ wide[1]).bfloat16()


def case(dtype: torch.dtype, name: str, index: int, rows: int, device: str) -> Case:
    """Draw the product of a number: with it distributions, sizes and layouts change in turn."""
    from gemm_distributions import DISTRIBUTIONS

    inner, columns = SIZES[index % len(SIZES)]
    of_a, of_b, transposed = LAYOUTS[index % len(LAYOUTS)]
    generator = torch.Generator().manual_seed(index)
    changed = dtype in FLOAT8 and name not in RANDOM | COHERENT  # by arithmetic that fp8 lacks
    drawn = torch.float32 if changed else dtype
    a, b = DISTRIBUTIONS[name](rows, inner, columns, drawn, generator)
    scales = {}
    if dtype in FLOAT8:
        largest = torch.finfo(dtype).max  # beyond it conversion has given NaN or INF
        a, b = (x.float().nan_to_num(largest, largest, -largest).to(dtype) for x in (a, b))
        if index % 2:
            scales["row_scale"] = torch.randn(rows, 1, generator=generator).exp().to(device)
            scales["column_scale"] = torch.randn(1, columns, generator=generator).exp().to(device)
    a, b = laid_out(a, of_a).to(device), laid_out(b, of_b).to(device)
    c = finished(a, b, scales)
    return Case(c.T.contiguous().T if transposed else c, a, b, scales)


def judged(case: Case, encoding: Sums | None = None, **sharing: Any) -> tuple[float, Any]:
    """Return the largest ratio in a product, and the sums that it shares."""
    core = configured_core()
    slot = torch.zeros(1, dtype=torch.int32, device=case.c.device)
    tolerance = Tolerance.of(case.a.dtype, case.c.dtype, case.a.shape[1], case.c.shape[1])
    if encoding is None:
        encoding = core.kernel_encode(case.b, case.scales.get("column_scale"))
    scale = case.scales.get("row_scale")
    given = case.c, slot, case.a, encoding, None, 1.0, 1.0, tolerance
    shared = core.kernel_judge(*given, row_scale=scale, **sharing)
    return float(slot.view(torch.float32)), shared


def shared(forward: Case) -> Iterator[tuple[Case, dict[str, Any]]]:
    """Yield Y = X Wᵀ and both gradients, with what each check takes over from those before."""
    core, (c, x, b, scales) = configured_core(), forward
    given: dict[str, Any] = {"encode_a": True}
    yield forward, given
    generator = torch.Generator().manual_seed(len(x))
    grad = torch.randn(c.shape, generator=generator).mul(SMALL_GRADIENT).to(c.dtype).to(c.device)
    of_x = given["shared"][0]
    across = {"encoding": core.kernel_encode(b.T), "across": (of_x[0][0], of_x[1][0])}
    yield Case(grad @ b.T, grad, b.T, scales), across
    known = {"encoding": of_x, "known": across["shared"][1]}
    yield Case(grad.T @ x, grad.T, x, scales), known


def cases(dtype: torch.dtype, rows: int, device: str) -> Iterator[tuple[str, Case, dict[str, Any]]]:
    """Yield every distribution's name with a right product, first those of a few rows."""
    from gemm_distributions import DISTRIBUTIONS

    few = [("n01", index, height) for index in range(len(LAYOUTS)) for height in (1, 65)]
    many = ((name, index, rows) for index, name in enumerate(cycle(DISTRIBUTIONS)))
    for name, index, height in chain(few, many):
        forward = case(dtype, name, index, height, device)
        share = index % SHARED_EVERY == 0 and dtype not in FLOAT8
        for each, given in shared(forward) if share else [(forward, {})]:
            yield name, each, given


def clean(dtype: torch.dtype, rows: int, device: str) -> dict[str, Any]:
    """Judge right products until there are enough rows."""
    worst: dict[str, float] = {}
    alarms = count = products = 0
    for name, each, given in cases(dtype, min(rows, ROWS), device):
        found, given["shared"] = judged(each, **given)
        count += len(each.c)
        products += 1
        alarms += not found < 1
        worst[name] = max(worst.get(name, 0.0), round(found, 3))
        if count >= rows:
            break
    bound = None if alarms else rule_of_three(count)
    row = {"rows": count, "products": products, "alarms": alarms}
    return {**row, "false_alarm_bound_95": bound, "worst_ratio": worst}


def struck(dtype: torch.dtype, device: str) -> dict[str, Any]:
    """Judge products of every layout with one wrong element, and with operands that are not finite.

    Faults are NaN, INF and 2.2 thresholds in the smallest element of a row, where rounding it
    changes the fault least.
    """
    strikes = missed = confused = 0
    readable = dtype not in FLOAT8 or device == "cuda"
    for index in range(2 * len(LAYOUTS)):
        right = case(dtype, "n01", index, STRUCK_ROWS, device)
        share = index % SHARED_EVERY == 0 and dtype not in FLOAT8
        for each, given in shared(right) if share else [(right, {})]:
            _, given["shared"] = judged(each, **given)
            rest = {name: x for name, x in given.items() if name != "shared"}
            for faulty in faults(each):
                strikes += 1
                found, _ = judged(each._replace(c=faulty), **rest)
                missed += found < 1  # NaN is a fault
        if readable:
            a = right.a.clone()
            a[0, -1] = torch.nan
            found, _ = judged(right._replace(a=a, c=finished(a, right.b, right.scales)))
            confused += found != math.inf
    return {"strikes": strikes, "missed": missed, "confused": confused if readable else None}


def faults(right: Case) -> Iterator[torch.Tensor]:
    """Yield C with one element wrong."""
    given = right.a, right.b, None, 1.0, 1.0
    thresholds = configured_core().device_thresholds(right.c, *given, **right.scales)[0]
    rows = len(right.c)
    for row, sign in product({0, rows // 2, rows - 1}, (-1, 1)):
        faulty = right.c.clone()
        faulty[row, right.c[row].abs().argmin()] += sign * STRIKE * float(thresholds[row])
        yield faulty
    for value in (math.nan, math.inf, -math.inf):
        faulty = right.c.clone()
        faulty[rows // 3, -1] = value
        yield faulty


def launching(device: str) -> AbstractContextManager[object]:
    """Let the native core launch the kernel on a device, or in the interpreter."""
    if device == "cuda":
        from holdfast.abft.gemm.ahead_of_time import prepare

        prepare(torch.device("cuda", torch.cuda.current_device()))
        return nullcontext()
    from interpreted_driver import interpreting

    return interpreting()


def recorded(rows: int, device: str) -> set[str]:
    """Return the dtypes of which this code has judged as many rows on this kind of device."""
    path = RESULTS / "ledger_rows.jsonl"
    found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    code = provenance("bench.ledger_rows").items()
    return {
        row["dtype"]
        for row in found
        if code <= row.items() and row["rows"] >= rows and row["device"] == device
    }


def measure(names: list[str], rows: int, device: str) -> int:
    """Record a row for each dtype; return the number of results that are wrong."""
    sys.path.insert(0, str(TESTS))
    warnings.simplefilter("ignore", RuntimeWarning)  # of NumPy, of what faults lead to
    wrong = 0
    with launching(device):
        for name in names:
            started_s = time.perf_counter()
            row = {**clean(DTYPES[name], rows, device), **struck(DTYPES[name], device)}
            seconds = round(time.perf_counter() - started_s)
            record("ledger_rows", {"device": device, "dtype": name, **row, "seconds": seconds})
            wrong += row["alarms"] + row["missed"] + (row["confused"] or 0)
    return wrong


def main() -> int:
    """Judge a million rows, as many of each dtype."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=170_000, help="of each dtype")
    parser.add_argument("--only", metavar="LIST", default=",".join(DTYPES), help="names of dtypes")
    parser.add_argument("--again", action="store_true", help="also what is recorded")
    args = parser.parse_args()
    names = args.only.split(",")
    if unknown := set(names) - set(DTYPES):
        parser.error(f"--only: {', '.join(sorted(unknown))}: give some of {', '.join(DTYPES)}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    known = set() if args.again else recorded(args.rows, device)
    wrong = measure([name for name in names if name not in known], args.rows, device)
    if wrong:
        print(f"{wrong} results are wrong", file=sys.stderr)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
