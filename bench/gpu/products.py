"""Stages about single products: the bare device, the checks against fp64, and clean rows."""

from collections.abc import Collection, Iterator
from functools import partial
from itertools import cycle, product

import torch
from torch import nn

from bench.gpu.stage import Machine, Row, demand
from bench.gpu.strike import Added, thresholds
from bench.gpu.timing import copy_bytes_s, normal, seconds_of
from holdfast.abft.gemm.interception import interception
from holdfast.abft.gemm.self_test import failure
from holdfast.abft.triton.tolerance import Precision
from holdfast.inject.statistics import rule_of_three
from holdfast.sites import Gemm, injecting
from holdfast_lab.distributions import COHERENT, RANDOM

# M, K and N.
SHAPES = (
    *((4096, 4096, 4096), (8192, 1024, 4096), (1024, 16384, 1024), (1024, 65536, 1024)),
    *((1, 4096, 4096), (257, 1000, 130), (67, 130, 95), (4096, 64, 50304)),
)
TOY_SHAPES = ((64, 32, 48), (1, 64, 17), (33, 130, 95))
# Dtype, whether products of fp32 operands round them to TF32, and how this is named.
KINDS = (
    *(("bf16", torch.bfloat16, False), ("fp16", torch.float16, False)),
    *(("fp32", torch.float32, False), ("tf32", torch.float32, True)),
)
STRIKE = 2.2  # thresholds: the residual of a right row and this are above one threshold together
AGREEMENT = 0.05  # relative difference of |D| / T between the checks and fp64
CLEAN_SHAPES = ((16384, 1024, 1024), (16384, 4096, 256), (16384, 64, 64))
LONG = (1024, 65536, 1024)  # its sums leave the range of fp16
CLEAN_ROWS, TOY_ROWS = 10_000_000, 2_000


def bare(machine: Machine, done: Collection[str]) -> Iterator[Row]:
    """Versions, the speed of two bare products, and of a copy, in bytes read and written."""
    yield {"case": "versions", "cuda": torch.version.cuda, "triton": _triton_version()}
    for size in (32,) if machine.rehearsed else (4096, 8192):
        a, b = (normal((size, size), torch.bfloat16, machine, seed) for seed in (1, 2))
        truth, c = a.double() @ b.double(), a @ b
        error = (c.double() - truth).abs().max() / truth.abs().max()
        demand(bool(error < 2**-7), f"a bare product of {size} rows is wrong by {error:.3g}")
        took_s = seconds_of(partial(torch.matmul, a, b))
        yield {"case": f"product {size}", "teraflop_s": 2e-12 * size**3 / took_s}
    yield {"case": "copy", "bytes_s": copy_bytes_s(machine)}


def against_fp64(machine: Machine, done: Collection[str]) -> Iterator[Row]:
    """Compare checks with fp64 on right and on struck products, which all must be found."""
    wrong = failure(machine.device, machine.backend)
    demand(not wrong, f"the known-answer test says: {wrong}")
    yield {"case": "known answers"}
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        for name, dtype, rounds in KINDS:
            torch.backends.cuda.matmul.allow_tf32 = rounds
            with machine.protected(nn.Identity()):
                row = {"case": name, **_struck(machine, dtype, name)}
            yield row
            demand(not row["missed"], f"{row['missed']} of {row['strikes']} {name} faults missed")
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _struck(machine: Machine, dtype: torch.dtype, name: str) -> Row:
    precision: Precision = "tf32" if name == "tf32" and not machine.rehearsed else "ieee"
    row: Row = {"products": 0, "strikes": 0, "missed": 0, "worst_clean": 0.0, "disagreement": 0.0}
    shapes = TOY_SHAPES if machine.rehearsed else SHAPES
    for (rows, inner, columns), transposed in product(shapes, (False, True)):
        a = normal((inner, rows) if transposed else (rows, inner), dtype, machine, 1)
        a = a.T if transposed else a
        b = normal((inner, columns), dtype, machine, 2)
        clean = _ratio(machine, machine.backend, a, b)
        what = f"{name} {rows} x {inner} x {columns}{' of A transposed' if transposed else ''}"
        demand(clean < 1, f"a right product, {what}, exceeds its threshold {clean:.3g} times")
        row["products"] += 1
        row["worst_clean"] = max(row["worst_clean"], clean)
        for place, sign in product({0, rows // 2, rows - 1}, (-1, 1)):
            amount = partial(_share, sign * STRIKE, place, precision)
            strike = Added(amount, row=place, column=columns // 3)
            ratio, truth = (
                _ratio(machine, backend, a, b, strike) for backend in (machine.backend, "aten")
            )
            row["strikes"] += 1
            if not ratio > 1:
                row["missed"] += 1
                continue
            off = abs(ratio / truth - 1)
            demand(off < AGREEMENT, f"|D| / T of {what} is {ratio:.4g}, and {truth:.4g} in fp64")
            row["disagreement"] = max(row["disagreement"], off)
    return row


def _share(
    factor: float, row: int, precision: Precision, gemm: Gemm, c: torch.Tensor
) -> torch.Tensor:
    return factor * thresholds(gemm, c, precision)[row]


def _ratio(
    machine: Machine, backend: str, a: torch.Tensor, b: torch.Tensor, strike: Added | None = None
) -> float:
    """Return what a backend finds in one product; the device's own is in force afterwards."""
    core = interception()
    core.intercept_device(machine.key, backend)
    try:
        if strike is None:
            torch.mm(a, b)
        else:
            with injecting(strike):
                torch.mm(a, b)
    finally:
        core.intercept_device(machine.key, machine.backend)
    return machine.largest_ratio()


def clean_rows(machine: Machine, done: Collection[str]) -> Iterator[Row]:
    """Judge right products of every distribution that healthy programs multiply."""
    settings = torch.backends.cuda.matmul
    names = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
    before = [getattr(settings, name) for name in names]
    try:
        for allowed in (False, True):
            for name in names:
                setattr(settings, name, allowed)
            with machine.protected(nn.Identity()):
                row = _clean(machine)
            yield {"case": f"reduced precision {'on' if allowed else 'off'}", **row}
            demand(not row["alarms"], f"{row['alarms']} right products exceed their thresholds")
    finally:
        for name, value in zip(names, before, strict=True):
            setattr(settings, name, value)


def _clean(machine: Machine) -> Row:
    rows = alarms = 0
    worst: dict[str, float] = {}
    dtypes, distributions = (torch.bfloat16, torch.float16, torch.float32), RANDOM | COHERENT
    shapes = TOY_SHAPES if machine.rehearsed else (*CLEAN_SHAPES, LONG)
    kinds = cycle(product(shapes, dtypes, distributions.items()))
    for seed, (shape, dtype, (name, draw)) in enumerate(kinds):
        if rows >= (TOY_ROWS if machine.rehearsed else CLEAN_ROWS):
            break
        if shape == LONG and dtype == torch.float16:
            continue
        m, k, n = shape
        generator = torch.Generator(machine.device).manual_seed(seed)
        with torch.device(machine.device):
            a, b = draw(m, k, n, dtype, generator)
        torch.mm(a, b)
        ratio = machine.largest_ratio()
        rows += m
        alarms += not ratio < 1
        worst[name] = max(worst.get(name, 0.0), round(ratio, 4))
    bound = None if alarms else rule_of_three(rows)
    return {"rows": rows, "alarms": alarms, "false_alarm_bound_95": bound, "worst_ratio": worst}


def _triton_version() -> str | None:
    try:
        import triton
    except ImportError:
        return None
    return str(triton.__version__)
