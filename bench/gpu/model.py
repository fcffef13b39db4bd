"""The stage that fits the cost model of checks to measured times, and compares both.

The model: a check takes the time of a launch and that of the bytes which it moves.
"""

import sys
from collections.abc import Collection, Iterable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from bench.gpu.costs import cost
from bench.gpu.models import GPT2_MEDIUM, LLAMA_8B, TOY_GPT2, TOY_LLAMA, Shape
from bench.gpu.stage import Machine, Row, demand
from bench.gpu.times import Times, check_s
from bench.gpu.timing import normal, seconds_of
from holdfast import native
from holdfast.cli.tables import print_table

TESTS = Path(__file__).parents[2] / "tests"
# M, K, N and whether A is transposed. Each product takes the device longer than the host.
PRODUCTS = (
    *((4096, 4096, 4096, False), (8192, 8192, 8192, False), (16384, 1024, 3072, False)),
    *((8192, 1024, 4096, False), (8192, 4096, 1024, False), (8192, 1024, 50304, False)),
    *((1024, 16384, 1024, True), (4096, 8192, 1024, True), (4096, 8192, 14336, True)),
)
TOY_PRODUCTS = ((64, 64, 64, False), (512, 64, 64, False), (64, 256, 32, True))
STEPS, TOY_STEPS = ((GPT2_MEDIUM, 8), (LLAMA_8B, 4)), ((TOY_GPT2, 2), (TOY_LLAMA, 2))
PAIRS = 3


class Rates(NamedTuple):
    """What the times of checks depend on."""

    bandwidth_bytes_s: float
    launch_s: float

    def seconds(self, moved: float) -> float:
        """Return the time of a launch that moves so many bytes."""
        return moved / self.bandwidth_bytes_s + self.launch_s


PLANNED = Rates(0.85 * 4.8e12, 2.5e-6)  # of an H200, before anything was measured


def fitted(measured: Iterable[tuple[float, float]]) -> Rates:
    """Fit pairs of bytes and seconds; the sum of squared relative errors is least."""
    moved, taken_s = torch.tensor(list(measured), dtype=torch.float64).unbind(1)
    terms = torch.stack([moved / taken_s, 1 / taken_s], 1)
    per_byte_s, launch_s = torch.linalg.lstsq(terms, torch.ones(len(terms), 1).double()).solution
    return Rates(1 / float(per_byte_s), float(launch_s))


def model(machine: Machine, done: Collection[str]) -> Iterator[Row]:
    """Time checks of products, fit the model, and predict them and the steps of two models."""
    found = [_product(machine, *each) for each in (TOY_PRODUCTS if machine.rehearsed else PRODUCTS)]
    rates = fitted((row["bytes"], 1e-6 * row["measured_us"]) for row in found)
    demand(
        machine.rehearsed or rates.bandwidth_bytes_s > 0,
        f"times of checks do not grow with the bytes that they move: {found}",
    )
    yield {"case": "rates", **rates._asdict(), "planned": PLANNED._asdict()}
    for row in found:
        row["planned_us"] = round(1e6 * PLANNED.seconds(row["bytes"]), 2)
        row["predicted_us"] = round(1e6 * rates.seconds(row["bytes"]), 2)
        row["error"] = round(abs(row["predicted_us"] / row["measured_us"] - 1), 4)
        yield row
    columns = ("case", "planned_us", "predicted_us", "measured_us")
    print_table(columns, [[str(row[name]) for name in columns] for row in found], right=columns[1:])
    columns = ("case", "planned_percent", "predicted_percent", "measured_percent")
    for shape, sequences in TOY_STEPS if machine.rehearsed else STEPS:
        row = _step(machine, rates, shape, sequences)
        print_table(columns, [[str(row[name]) for name in columns]], right=columns[1:])
        yield row


def _product(machine: Machine, rows: int, inner: int, columns: int, transposed: bool) -> Row:
    a = normal((inner, rows) if transposed else (rows, inner), torch.bfloat16, machine, 1)
    a = a.T if transposed else a
    b = normal((inner, columns), torch.bfloat16, machine, 2)
    sizes, layout = (1, rows, columns, inner, 2, 2), "columns" if transposed else "rows"
    moved = native.required().kernel_plan(*sizes, "rows", layout)["bytes"]
    taken_s = max(check_s(machine, Times(b, kept=True), a, seconds_of), 1e-8)  # noise on CPU
    case = f"check {rows} x {inner} x {columns}{' of A transposed' if transposed else ''}"
    return {"case": case, "bytes": moved, "measured_us": round(1e6 * taken_s, 2)}


def _step(machine: Machine, rates: Rates, shape: Shape, sequences: int) -> Row:
    """Compare what all checks of a step take by the model with what protection costs it."""
    tokens = sequences * shape.context
    moved = [each["bytes"] for each in _launches(shape, tokens)]
    measured = cost(machine, shape, sequences, "eager", PAIRS)
    planned, predicted = (
        round(100 * sum(map(by.seconds, moved)) / measured["baseline_s"], 2)
        for by in (PLANNED, rates)
    )
    return {
        "case": f"step {shape.name} {tokens} tokens",
        "checks": len(moved),
        "planned_percent": planned,
        "predicted_percent": predicted,
        "measured_percent": round(100 * (measured["ratio"] - 1), 2),
    }


def _launches(shape: Shape, tokens: int) -> list[dict[str, Any]]:
    """Return what the checks of a step's linear layers launch."""
    kv_heads = shape.kv_heads or shape.heads
    attention = (shape.width // shape.heads) * (shape.heads + 2 * kv_heads)
    layer = [(shape.width, attention), (shape.width, shape.width), (shape.hidden, shape.width)]
    layer += [(shape.width, shape.hidden)] * (1 if shape.kv_heads is None else 2)
    biased = [(each, "" if shape.kv_heads is None else "no bias") for each in layer * shape.layers]
    head = [((shape.width, shape.vocabulary), "no bias")] if shape.vocabulary else []
    launches = budget().launches
    return [launch for each, mode in biased + head for launch in launches(tokens, each, mode)]


def budget() -> ModuleType:
    """Import the tests of the budget, which know what each check launches."""
    for folder in (TESTS, TESTS / "abft" / "gemm"):
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
    return import_module("test_kernel_plan")
