"""What the checks cost a linear layer, forward and backward, and where each microsecond goes.

    python -m bench.gemm [--pairs N] [--small]

Correctness first: the protected layer must give the same bits, raise no suspicion, and repair an
injected fault. Two regimes: ``kept``, several micro-batches between two updates of the weight, and
``updated``, a weight that changes every time, so that both of its checksums are made anew.
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from bench.paired import paired
from bench.rows import record
from holdfast import events, sites
from holdfast.abft.gemm.interception import interception
from holdfast.digest.tensors import tensors_digest
from holdfast.protection import CoverageReport, protect

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LARGE = [(512, 512, 512), (1024, 1024, 1024), (2048, 512, 2048), (2048, 2048, 512)]
LARGE += [(2048, 2048, 2048)]
SMALL = [(m, 512, 512) for m in (1, 4, 16, 64, 256)]
PARTS = ("encode", "verify", "product")
SAMPLE_S = 0.05  # a sample repeats the layer at least so long


@dataclass
class Layer:
    """A linear layer of m rows, k inputs and n outputs, on the same data every time."""

    m: int
    k: int
    n: int
    dtype: torch.dtype
    updated: bool

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.linear = nn.Linear(self.k, self.n, dtype=self.dtype)
        self.x = torch.randn(self.m, self.k, dtype=self.dtype, requires_grad=True)
        self.upstream = torch.randn(self.m, self.n, dtype=self.dtype)

    def gradients(self) -> list[torch.Tensor]:
        """Output and gradients."""
        output = self.linear(self.x)
        operands = [self.x, *self.linear.parameters()]
        return [output, *torch.autograd.grad(output, operands, self.upstream)]

    def run(self, times: int) -> None:
        """What is timed."""
        for _ in range(times):
            if self.updated:
                torch.autograd.graph.increment_version(self.linear.weight)
            self.gradients()


@contextmanager
def unverified() -> Iterator[None]:
    """The same hooks and dispatch, no checks."""
    interception().change_process_depth(-1)
    try:
        yield
    finally:
        interception().change_process_depth(1)


def gate(module: nn.Module, results: Callable[[], list[torch.Tensor]], faults: int) -> None:
    """Same bits, no suspicion, and a fault in each product repaired; else nothing is timed."""
    expected = tensors_digest(results())
    events.clear()
    with protect(module) as protection:
        protection.reset_counters()
        clean = tensors_digest(results())
        suspects = sum(site.suspects for site in protection.report().sites)
        sites.arm(_strike)
        repaired = tensors_digest(results())
        sites.disarm()
    kinds = [event.kind for event in events.recent()]
    if clean != expected or suspects or repaired != expected or kinds != ["gemm_fault"] * faults:
        raise SystemExit(f"{module}: wrong bits, {suspects} suspects or {kinds}; nothing was timed")


def _strike(stage: str, site: str, gemm: sites.Gemm, output: torch.Tensor | None) -> None:
    if stage == "output" and output is not None:
        output[0, 0] = torch.inf


def measure(layer: Layer, regime: str, pairs: int) -> dict[str, object]:
    """Gate, then time; the row that is recorded."""
    gate(layer.linear, layer.gradients, 3)
    times = max(1, int(SAMPLE_S / seconds_of(lambda: layer.run(1))))
    plain = Layer(layer.m, layer.k, layer.n, layer.dtype, layer.updated)
    with protect(layer.linear) as protection:

        def bare() -> None:
            with unverified():
                plain.run(times)

        protection.reset_counters()
        row = paired(bare, lambda: layer.run(times), pairs=pairs)
        parts = where(protection.report(), (pairs + 2) * times)
    shape = {"m": layer.m, "k": layer.k, "n": layer.n}
    dtype = next(name for name, each in DTYPES.items() if each == layer.dtype)
    each = {
        "baseline_us": round(row["baseline_s"] / times * 1e6, 1),
        "candidate_us": round(row["candidate_s"] / times * 1e6, 1),
    }
    return {"regime": regime, "dtype": dtype, **shape, "layers_a_sample": times, **row, **each} | {
        "us": parts
    }


def seconds_of(run: Callable[[], None]) -> float:
    """Of one run, the first two left out."""
    return float(paired(run, run, pairs=3)["baseline_s"])


def where(report: CoverageReport, times: int) -> dict[str, float]:
    """Microseconds of one layer's products and checks, by part."""
    parts: dict[str, float] = {}
    for site in report.sites:
        role = site.site.rsplit("/", 1)[1]
        for name in ("encode", "product", "verify"):
            parts[f"{role} {name}"] = round(getattr(site, f"{name}_s") / times * 1e6, 1)
    return parts


def show(rows: list[dict[str, object]]) -> None:
    """The table, last."""
    table = Table("regime", "dtype", "m, k, n", "ratio", "quartiles", "bare µs", "protected µs")
    for part in ("forward", "grad_a", "grad_b"):
        table.add_column(f"{part} µs:\nencode, verify, product")
    for row in rows:
        parts = row["us"]
        assert isinstance(parts, dict)
        table.add_row(
            *(str(row[key]) for key in ("regime", "dtype")),
            f"{row['m']}, {row['k']}, {row['n']}",
            *(str(row[key]) for key in ("ratio", "ratio_quartiles", "baseline_us", "candidate_us")),
            *(
                " ".join(str(parts[f"{role} {part}"]) for part in PARTS)
                for role in ("forward", "grad_a", "grad_b")
            ),
        )
    Console(width=160).print(table)


def main() -> None:
    """Measure every shape in both dtypes and regimes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--small", action="store_true", help="m = 1 … 256 as well")
    args = parser.parse_args()
    rows = []
    for shape in LARGE + (SMALL if args.small else []):
        for dtype in DTYPES.values():
            for regime in ("kept", "updated"):
                layer = Layer(*shape, dtype, regime == "updated")
                rows.append(measure(layer, regime, args.pairs))
                record("gemm", rows[-1])
    show(rows)


if __name__ == "__main__":
    main()
