"""What verification costs attention on a CUDA device: our kernels, verified and not, and torch's.

    python -m bench.attention_cuda [--pairs N] [--dry-run]

The goal: verified, our kernels take at most 5 % longer than unverified. Correctness first: if a
result is wrong, clean rows are suspected, an injected fault is missed or a
CUDA graph gives anything else, nothing is timed. Both sides of a comparison are CUDA graphs of one
call, replayed in turn (A B A B …) and timed by events. ``--dry-run`` goes through all of it on a
tiny attention, also under Triton's interpreter, and neither reports nor records a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from bench.cuda import Run, captured, command, paired
from holdfast.abft.attention import cuda as fused
from holdfast.abft.attention.cuda import Place
from holdfast.abft.attention.reference import attention, attention_gradients

MASKS = ("full", "causal", "blocks")
GOAL = 1.05  # verified / unverified
BATCH, HEADS, KV_HEADS = 16, 16, 4
LENGTHS, WIDTHS = (512, 1024, 2048, 4096), (64, 128)
# Candidate and baseline of each comparison, of the forward pass and with the backward pass.
COMPARED = (("verified", "unverified"), ("verified", "sdpa"), ("unverified", "sdpa"))
KINDS = ("forward", "forward+backward")
NAMES = ("output", "grad_q", "grad_k", "grad_v")


@dataclass(frozen=True)
class Case:
    """One attention with as many keys as queries; ``mask`` is full, causal or blocks."""

    dtype: torch.dtype
    batch: int
    heads: int
    length: int
    width: int
    kv_heads: int
    mask: str = "full"

    def described(self) -> dict[str, Any]:
        """The case as columns of a row."""
        short = str(self.dtype).removeprefix("torch.")
        shape = {"batch": self.batch, "heads": self.heads, "kv_heads": self.kv_heads}
        sizes = {"length": self.length, "width": self.width}
        return {"dtype": short, **shape, **sizes, "mask": self.mask}

    def blocks(self, device: str) -> torch.Tensor | None:
        """Two sequences side by side, as a mask; None for the other masks."""
        if self.mask != "blocks":
            return None
        second = torch.arange(self.length, device=device) >= self.length // 2
        return second[:, None] == second[None, :]


class Problem:
    """The operands of a case, and every way to attend."""

    def __init__(self, case: Case, device: str) -> None:
        self.case = case
        generator = torch.Generator(device).manual_seed(case.length)
        self.q, self.k, self.v, self.grad = (
            torch.randn(
                (case.batch, heads, case.length, case.width), generator=generator, device=device
            ).to(case.dtype)
            for heads in (case.heads, case.kv_heads, case.kv_heads, case.heads)
        )
        self.mask, self.causal = case.blocks(device), case.mask == "causal"
        self.options: dict[str, Any] = {"mask": self.mask, "causal": self.causal}
        self.leaves = tuple(x.detach().requires_grad_() for x in (self.q, self.k, self.v))
        self.counts = torch.zeros(2, dtype=torch.int32, device=device)

    def attend(self, side: str) -> torch.Tensor:
        """The output, differentiable."""
        if side == "sdpa":
            q, k, v = self.leaves
            return functional.scaled_dot_product_attention(
                q, k, v, attn_mask=self.mask, is_causal=self.causal, enable_gqa=True
            )
        if side == "verified":
            return fused.fused_attention(*self.leaves, counts=self.counts, **self.options)[0]
        return fused.fused_attention(*self.leaves, unverified=True, **self.options)[0]

    def forward(self, side: str) -> tuple[torch.Tensor, ...]:
        """The output alone."""
        with torch.no_grad():
            return (self.attend(side),)

    def step(self, side: str) -> tuple[torch.Tensor, ...]:
        """The output and the gradients of q, k and v."""
        out = self.attend(side)
        return (out.detach(), *torch.autograd.grad(out, self.leaves, self.grad))

    def run_of(self, kind: str, side: str) -> Run:
        """One call of a side."""
        if kind == "forward":
            return lambda: self.forward(side)
        return lambda: self.step(side)

    def gate(self) -> None:
        """Stop unless all is right, silent on clean data, and finds and repairs a fault."""
        verified, sdpa = self.step("verified"), self.step("sdpa")
        group = self.case.heads // self.case.kv_heads  # query heads that read the first key head
        first = [x[:1, :group].double() for x in (self.grad, self.q)]
        first += [x[:1, :1].double() for x in (self.k, self.v)]
        options = self.mask, self.causal
        truth = (attention(*first[1:], *options)[0], *attention_gradients(*first, *options))
        unit = torch.finfo(self.case.dtype).eps
        for name, mine, theirs, true in zip(NAMES, verified, sdpa, truth, strict=True):
            error, torchs = (
                (x[:1, : true.shape[1]].double() - true).abs().max() for x in (mine, theirs)
            )
            allowed = 2 * torchs + 4 * unit * true.abs().max()
            self._demand(bool(error <= allowed), f"{name} is wrong by {error:.3g}")
        for name, mine, theirs in zip(NAMES, self.step("unverified"), verified, strict=True):
            off = (mine.double() - theirs.double()).abs().max()
            allowed = 2 * unit * theirs.double().abs().max()
            self._demand(bool(off <= allowed), f"verification changes the {name} by {off:.3g}")
        clean = self.counts.tolist()
        self._demand(clean == [0, 0], f"clean rows are suspected: {clean}")
        self._demand_repairs()
        self._demand_graph(verified)

    def _demand_repairs(self) -> None:
        """A fault in the forward kernel and in both backward ones is found and repaired."""
        # The first tiles, which every mask lets the first rows see.
        struck = torch.tensor(
            [[Place.ACCUMULATOR, 0, 0, 0, 1, 3e4, 1]], dtype=torch.float32, device=self.q.device
        )
        given = (self.q, self.k, self.v)
        expected, lse, _ = fused.attention_forward(*given, **self.options)
        out, _, verdict = fused.attention_forward(*given, faults=struck, **self.options)
        found = None if verdict is None else verdict.counts.tolist()
        repaired = found == [1, 1] and self._close(out, expected)
        self._demand(repaired, f"a fault in P V was missed: {found}")
        given = (self.grad, *given, expected, lse)
        wanted, _ = fused.attention_backward(*given, **self.options)
        gradients, verdicts = fused.attention_backward(
            *given, query_faults=struck, key_faults=struck, **self.options
        )
        found = None if verdicts is None else verdicts[0].counts.tolist()
        repaired = found == [2, 2] and all(map(self._close, gradients, wanted))
        self._demand(repaired, f"faults in dQ and dK were missed: {found}")

    def _close(self, left: torch.Tensor, right: torch.Tensor) -> bool:
        """To two roundings: a kernel with the hook for faults need not be compiled alike."""
        unit = torch.finfo(self.case.dtype).eps
        off = (left.double() - right.double()).abs().max()
        return bool(off <= 2 * unit * right.double().abs().max())

    def _demand_graph(self, expected: tuple[torch.Tensor, ...]) -> None:
        """A captured step gives the same bits, and counts nothing."""
        kept: list[tuple[torch.Tensor, ...]] = []
        replay = captured(lambda: kept.append(self.step("verified")))
        replay()
        same = all(map(torch.equal, kept[-1], expected))
        self._demand(same, "a CUDA graph gives other bits")
        clean = self.counts.tolist()
        self._demand(clean == [0, 0], f"a CUDA graph suspects clean rows: {clean}")

    def _demand(self, holds: bool, failure: str) -> None:
        if not holds:
            raise SystemExit(f"{self.case}: {failure}; nothing was timed")


def measure(case: Case, device: str, pairs: int) -> list[dict[str, Any]]:
    """Gate a case, then every comparison of it."""
    problem = Problem(case, device)
    problem.gate()
    rows = []
    for kind in KINDS:
        for candidate, baseline in COMPARED:
            row = paired(problem.run_of(kind, baseline), problem.run_of(kind, candidate), pairs)
            names = {"candidate": candidate, "baseline": baseline, "kind": kind}
            rows.append({**names, **case.described(), **row})
    return rows


def cases(dry: bool) -> list[Case]:
    """Both 16-bit dtypes at every length and head size; grouped heads with other masks in one."""
    if dry:
        return [Case(torch.float16, 1, 2, 40, 32, 1, "blocks")]
    plain = [
        Case(dtype, BATCH, HEADS, length, width, HEADS)
        for dtype in (torch.bfloat16, torch.float16)
        for width in WIDTHS
        for length in LENGTHS
    ]
    grouped = [
        Case(torch.bfloat16, BATCH, HEADS, LENGTHS[-1], width, KV_HEADS, mask)
        for width in WIDTHS
        for mask in MASKS
    ]
    return plain + grouped


def table(rows: Sequence[dict[str, Any]], measured: bool) -> str:
    """The rows as text, a comparison each."""
    heading = f"{'candidate / baseline':<24} {'pass':<18} {'operands':<10} {'L':>5} {'d':>4}"
    lines = [f"{heading} {'mask':<8} {'ratio':>7}  quartiles"]
    for row in rows:
        name = f"{row['candidate']} / {row['baseline']}"
        line = f"{name:<24} {row['kind']:<18} {row['dtype']:<10} "
        line += f"{row['length']:>5} {row['width']:>4} {row['mask']:<8} "
        if measured:
            low, high = row["ratio_quartiles"]
            line += f"{row['ratio']:>7.3f}  {low:.3f} … {high:.3f}"
        else:
            line += "not measured"
        lines.append(line)
    costs = [row for row in rows if (row["candidate"], row["baseline"]) == COMPARED[0]]
    if measured:
        met = sum(row["ratio"] <= GOAL for row in costs)
        lines.append(f"verified / unverified at most {GOAL}: {met} of {len(costs)}")
    return "\n".join(lines)


def measure_all(dry: bool, device: str, pairs: int) -> list[dict[str, Any]]:
    """Every case of the bench, or of its dry run."""
    return [row for case in cases(dry) for row in measure(case, device, pairs)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every case and print the table last."""
    command("attention_cuda", __doc__, measure_all, table, pairs=9, arguments=arguments)


if __name__ == "__main__":
    main()
