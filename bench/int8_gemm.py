"""What exact row checks cost the int8 product, over FBGEMM's own pipeline on 28 DLRM shapes.

    python -m bench.int8_gemm [--pairs N] [--threads 1 2]

Correctness first: every variant must give the oracle's bits and raise no suspicion, and a flipped
weight must be healed. Baselines: FBGEMM's fused requantisation, and our own pass without checks;
each variant has a packed weight of its own, and three placements of all take turns. Activations
have seven bits on processors without VNNI. A sample repeats the product in Python: what a call
costs there, about half a microsecond, is in both.
"""

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench.paired import Placements, paired
from bench.rows import record
from holdfast import native
from holdfast.abft.int8_gemm.op import int8_linear
from holdfast.abft.int8_gemm.reference import int8_linear_reference
from holdfast.abft.int8_gemm.weights import Int8Weights
from holdfast_lab.study.dlrm.gemm_overhead import activations
from holdfast_lab.study.dlrm.gemm_shapes import SHAPES

SAMPLE_S = 0.002
PLACEMENTS = 3
CALL: dict[str, Any] = {"a_scale": 0.02, "a_zero_point": 3, "out_scale": 5.0, "out_zero_point": 100}
PAIRS = {
    "digits": ("fbgemm", "digits"),
    "mod127": ("fbgemm", "mod127"),
    "pass": ("fbgemm", "unchecked"),
    "checks": ("unchecked", "digits"),
}


class Layer:
    """A shape's operands, and its product by each variant."""

    def __init__(self, m: int, n: int, k: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.a = activations(m, k, generator)
        self.weight = torch.randint(-128, 128, (n, k), dtype=torch.int8, generator=generator)
        self.bias = torch.randn(n, generator=generator)
        self.scale = torch.tensor([0.01])
        self.out = torch.empty((m, n), dtype=torch.uint8)
        self.packed = {
            name: self.pack(name) for name in ("fbgemm", "unchecked", "digits", "mod127")
        }

    def pack(self, variant: str) -> Int8Weights:
        """A packed weight of its own."""
        encoding = "mod127" if variant == "mod127" else "digits"
        return Int8Weights(self.weight, self.scale, bias=self.bias, encoding=encoding)

    def call(self, variant: str) -> Callable[[], object]:
        """One product."""
        weights = self.packed[variant]
        scales = weights.scales(*CALL.values())
        a, out, gemm = self.a, self.out, weights.gemm
        if variant == "fbgemm":
            return lambda: gemm.multiply_unprotected(a, out, scales)
        verify = variant != "unchecked"
        return lambda: gemm.multiply(a, out, scales, verify)

    def gate(self) -> None:
        """The oracle's bits from every variant, and a fault healed; else nothing is timed."""
        expected = int8_linear_reference(
            self.a, self.weight, scale=self.scale, bias=self.bias, **CALL
        )
        for variant in self.packed:
            self.out.zero_()
            suspects = self.call(variant)()
            difference = (self.out.int() - expected.int()).abs()
            # FBGEMM adds the bias before it scales: where that is a tie it may round otherwise.
            allowed = 1 if variant == "fbgemm" else 0
            if suspects is not None or int(difference.max()) > allowed:
                raise SystemExit(f"{variant} is wrong or suspects clean rows; nothing was timed")
        weights = self.packed["digits"]
        weights.gemm.buffer[weights.gemm.address(1, 2)] ^= 64
        if not torch.equal(int8_linear(self.a, weights, **CALL), expected):
            raise SystemExit("a flipped weight was not healed; nothing was timed")


def measure(shape: tuple[int, int, int], pairs: int) -> dict[str, Any]:
    """Gate, then time; the row that is recorded."""
    layers = [Layer(*shape) for _ in range(PLACEMENTS)]
    for layer in layers:
        layer.gate()
    once = paired(layers[0].call("fbgemm"), layers[0].call("digits"), pairs=20)["baseline_s"]
    times = max(1, int(SAMPLE_S / max(once, 1e-6)))
    row: dict[str, Any] = dict(zip("mnk", shape, strict=True)) | {"calls_a_sample": times}
    row["placements"] = len(layers)
    for name, variants in PAIRS.items():
        turns = Placements([tuple(layer.call(variant) for variant in variants) for layer in layers])
        baseline, candidate = (_repeat(turns, which, times) for which in (0, 1))
        found = paired(baseline, candidate, pairs=pairs, before=turns.turn)
        row[name] = {key: found[key] for key in ("ratio", "ratio_quartiles", "pairs")}
        row[name]["baseline_us"] = round(found["baseline_s"] / times * 1e6, 2)
    return row | {"memory": memory(layers[0])}


def _repeat(
    turns: Placements[tuple[Callable[[], object], ...]], which: int, times: int
) -> Callable[[], None]:
    def run() -> None:
        call = turns.current[which]
        for _ in range(times):
            call()

    return run


def memory(layer: Layer) -> float:
    """Bytes of the checks over those of the packed weight."""
    weights = layer.packed["digits"]
    checks = (weights._digits, weights.weighted, weights.of_columns)
    return round(sum(t.numel() * t.element_size() for t in checks) / weights.gemm.buffer.numel(), 4)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Median and worst overhead of each comparison, %."""
    found = {}
    for name in PAIRS:
        overheads = [100 * (row[name]["ratio"] - 1) for row in rows]
        found[name] = {
            "median": round(statistics.median(overheads), 2),
            "worst": round(max(overheads), 2),
        }
    return found


def show(rows: list[dict[str, Any]], threads: int) -> None:
    """The table."""
    table = Table(
        "m, n, k", "FBGEMM µs", *(f"{name} %" for name in PAIRS), title=f"{threads} threads"
    )
    for row in rows:
        cells = [f"{100 * (row[name]['ratio'] - 1):+.1f}" for name in PAIRS]
        shape = f"{row['m']}, {row['n']}, {row['k']}"
        table.add_row(shape, str(row["digits"]["baseline_us"]), *cells)
    Console(width=110).print(table)


def main() -> None:
    """Every shape by one thread and by two."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=90)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    args = parser.parse_args()
    if native.core is None or not native.core.int8_available():
        raise SystemExit("FBGEMM is not in this build: there is nothing to compare with")
    for threads in args.threads:
        torch.set_num_threads(threads)
        rows = []
        for shape in SHAPES:
            rows.append(measure(shape, args.pairs))
            record("int8_gemm", {"kind": "shape", **rows[-1]})
        show(rows, threads)
        total = {"kind": "summary", "shapes": len(rows), "overhead_percent": summary(rows)}
        record("int8_gemm", total)


if __name__ == "__main__":
    main()
