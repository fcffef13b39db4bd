"""What verification costs a GEMM on a CUDA device: our kernel, our kernel verified, and cuBLAS.

    python -m bench.gemm_cuda [--pairs N] [--dry-run]

Correctness first: if a product is wrong, a clean one is suspected or an injected fault is missed,
nothing is timed. Both sides of a comparison are CUDA graphs of one call, replayed in turn
(A B A B …) and timed by events. ``--dry-run`` goes through all of it on tiny products, also under
Triton's interpreter, and neither reports nor records a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bench.cuda import Run, command, paired
from holdfast.abft.gemm import cuda as passes
from holdfast.abft.triton.tolerance import Precision

SIZES, DRY_SIZES = (512, 1024, 2048, 4096, 8192), (64,)
# Candidate and baseline of each comparison.
COMPARED = (
    ("own", "cublas"),
    ("online", "own"),
    ("online", "cublas"),
    ("online+encode", "own"),
)


@dataclass(frozen=True)
class Case:
    """One square product."""

    dtype: torch.dtype
    precision: Precision
    size: int

    @property
    def name(self) -> str:
        """The dtype, and for fp32 how it is multiplied."""
        short = str(self.dtype).removeprefix("torch.")
        return f"{short} {self.precision}" if self.dtype == torch.float32 else short


class Product:
    """The operands of a case, B's checksums, and every way to multiply them."""

    def __init__(self, case: Case, device: str) -> None:
        self.case = case
        generator = torch.Generator(device).manual_seed(case.size)
        shape = (case.size, case.size)
        self.a, self.b = (
            torch.randn(shape, generator=generator, device=device).to(case.dtype) for _ in range(2)
        )
        self.block = passes.online_block(*shape, case.dtype)
        self.blocks = passes.encode(self.b, block=self.block)

    def cublas(self) -> torch.Tensor:
        """torch's product."""
        return torch.mm(self.a, self.b)

    def own(self) -> torch.Tensor:
        """Our kernel, unverified."""
        return passes.matmul(self.a, self.b, block=self.block, precision=self.case.precision)

    def online(
        self, checksums: passes.Checksums | None = None, faults: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, passes.Verdict]:
        """Our kernel, verified in its accumulator; by default the checksums of B are kept."""
        return passes.matmul_online(
            self.a,
            self.b,
            checksums or self.blocks,
            precision=self.case.precision,
            faults=faults,
        )

    def sides(self) -> dict[str, Run]:
        """What ``COMPARED`` compares, by name."""
        return {
            "cublas": self.cublas,
            "own": self.own,
            "online": self.online,
            "online+encode": lambda: self.online(passes.encode(self.b, block=self.block)),
        }

    def gate(self) -> None:
        """Stop unless all ways give the right product, silently, and find and repair a fault."""
        cublas, own, (online, verdict) = self.cublas(), self.own(), self.online()
        truth = self.a.double() @ self.b.double()
        error, torchs = ((c.double() - truth).abs().max() for c in (own, cublas))
        allowed = 2 * torchs + self.relative_error() * truth.abs().max()
        self._demand(bool(error <= allowed), f"our product is wrong by {error:.3g}")
        self._demand(torch.equal(own, online), "verification changes the product")
        clean = verdict.counts.tolist()
        self._demand(clean == [0, 0], f"clean rows are suspected: {clean}")
        last = self.case.size - 1
        fault = torch.tensor([[last, 1, 3e4, 1]], device=self.a.device)
        repaired, verdict = self.online(faults=fault)
        found = verdict.counts.tolist()
        self._demand(found == [1, 1] and torch.equal(repaired, own), f"online missed it: {found}")

    def relative_error(self) -> float:
        """What our kernel may be off by beside torch's own error, of the largest element."""
        if self.case.precision == "ieee":
            return torch.finfo(self.case.dtype).eps
        # Matrix units cut off where cuBLAS's fp32 kernels round.
        tolerance = passes.Tolerance.of(self.case.dtype, None, self.case.size, 1, "tf32x3")
        return tolerance.scale * tolerance.walk

    def _demand(self, holds: bool, failure: str) -> None:
        if not holds:
            raise SystemExit(f"{self.case.name} {self.case.size}: {failure}; nothing was timed")


def measure_products(case: Case, device: str, pairs: int) -> list[dict[str, Any]]:
    """Gate a case, then every comparison of it."""
    product = Product(case, device)
    product.gate()
    sides = product.sides()
    rows = []
    for candidate, baseline in COMPARED:
        row = paired(sides[baseline], sides[candidate], pairs)
        rows.append({"candidate": candidate, "baseline": baseline, **described(case), **row})
    return rows


def measure_encoder(case: Case, layout: str, device: str, pairs: int) -> dict[str, Any]:
    """Bandwidth of the encoder, which reads B, against that of a copy, which also writes it."""
    product = Product(case, device)
    b, block = product.b.mT if layout == "columns" else product.b, product.block
    copy = torch.empty_like(b)
    row = paired(lambda: copy.copy_(b), lambda: passes.encode(b, block=block), pairs)
    size = b.numel() * b.element_size()
    bandwidth = {
        "encoder_gb_per_s": round(size / row["candidate_s"] / 1e9, 1),
        "copy_gb_per_s": round(2 * size / row["baseline_s"] / 1e9, 1),
        "share_of_copy_bandwidth": round(1 / (2 * row["ratio"]), 4),
    }
    name = f"encode {layout}"
    return {"candidate": name, "baseline": "copy", **described(case), **bandwidth, **row}


def described(case: Case) -> dict[str, Any]:
    """The case as columns of a row."""
    return {"dtype": case.name, "size": case.size}


def cases(sizes: Sequence[int]) -> list[Case]:
    """Every dtype at every size."""
    kinds: list[tuple[torch.dtype, Precision]] = [
        (torch.bfloat16, "ieee"),
        (torch.float16, "ieee"),
        (torch.float32, "ieee"),
        (torch.float32, "tf32x3"),
    ]
    return [Case(dtype, precision, size) for dtype, precision in kinds for size in sizes]


def table(rows: Sequence[dict[str, Any]], measured: bool) -> str:
    """The rows as text, a comparison each."""
    lines = [f"{'candidate / baseline':<30} {'operands':<16} {'size':>5} {'ratio':>7}  quartiles"]
    for row in rows:
        name = f"{row['candidate']} / {row['baseline']}"
        line = f"{name:<30} {row['dtype']:<16} {row['size']:>5} "
        if measured:
            low, high = row["ratio_quartiles"]
            line += f"{row['ratio']:>7.3f}  {low:.3f} … {high:.3f}"
            if "encoder_gb_per_s" in row:
                line += f"  {row['share_of_copy_bandwidth']:.0%} of a copy's bandwidth"
        else:
            line += "not measured"
        lines.append(line)
    return "\n".join(lines)


def measure(dry: bool, device: str, pairs: int) -> list[dict[str, Any]]:
    """Every case of the bench, or of its dry run."""
    sizes = DRY_SIZES if dry else SIZES
    rows = []
    for case in cases(sizes):
        rows += measure_products(case, device, pairs)
        if case.size in sizes[-2:] and case.precision == "ieee":
            rows += [measure_encoder(case, layout, device, pairs) for layout in ("rows", "columns")]
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every case and print the table last."""
    command("gemm_cuda", __doc__, measure, table, pairs=15, arguments=arguments)


if __name__ == "__main__":
    main()
