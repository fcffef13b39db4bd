"""What our verified fused attention costs against torch's own, which verifies nothing.

    python -m bench.attention_fused [--pairs N] [--dtype NAME] [--length L] [--causal]

Correctness first: no further from fp64 than twice torch's own error, no suspicion, and an injected
fault repaired bit for bit; else nothing is timed. Twelve heads of 64, batch 1.
"""

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn

from bench.paired import paired
from bench.rows import record
from holdfast import events, sites
from holdfast.abft.attention.reference import attention
from holdfast.abft.gemm.interception import interception
from holdfast.protection import protect

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LENGTHS = (128, 512, 2048)
HEADS, WIDTH = 12, 64
SAMPLE_S = 0.1  # a sample repeats the attention at least so long


class Attention:
    """Self-attention on the same data every time."""

    def __init__(self, length: int, dtype: torch.dtype, causal: bool) -> None:
        self.causal = causal
        generator = torch.Generator().manual_seed(0)
        shape = (1, HEADS, length, WIDTH)
        self.leaves = [
            torch.randn(shape, generator=generator).to(dtype).requires_grad_() for _ in range(3)
        ]
        self.upstream = torch.randn(shape, generator=generator).to(dtype)

    def forward(self) -> list[torch.Tensor]:
        """The output."""
        with torch.no_grad():
            return [F.scaled_dot_product_attention(*self.leaves, is_causal=self.causal)]

    def both(self) -> list[torch.Tensor]:
        """The output and its gradients."""
        output = F.scaled_dot_product_attention(*self.leaves, is_causal=self.causal)
        return [output.detach(), *torch.autograd.grad(output, self.leaves, self.upstream)]


def gate(work: Attention) -> None:
    """Right, silent, and a fault repaired; else nothing is timed."""
    plain = work.forward()[0]
    truth = attention(*(t.detach().double() for t in work.leaves), causal=work.causal)[0]
    events.clear()
    with protect(nn.Identity()) as protection:
        protection.reset_counters()
        calm = work.both()
        suspects = sum(site.suspects for site in protection.report().sites)
        quiet = not events.recent()
        sites.arm(_strike())
        repaired = work.both()
        sites.disarm()
    kinds = [event.kind for event in events.recent()]
    error, allowed = ((t.double() - truth).abs().max().item() for t in (calm[0], plain))
    same = all(torch.equal(a, b) for a, b in zip(calm, repaired, strict=True))
    if error > 2 * allowed or suspects or not quiet or not same or kinds != ["gemm_fault"]:
        raise SystemExit(
            f"error {error:.1e} against {allowed:.1e}, {suspects} suspects, {kinds}, "
            f"repaired {same}: nothing was timed"
        )


def _strike() -> sites.Hook:
    left = [1]

    def strike(stage: str, site: str, gemm: sites.Gemm, output: torch.Tensor | None) -> None:
        if stage == "scores" and output is not None and left:
            left.pop()
            output[0, 0] = torch.inf

    return strike


def measure(length: int, name: str, what: str, pairs: int, causal: bool) -> dict[str, object]:
    """Gate, then time; the row that is recorded."""
    work = Attention(length, DTYPES[name], causal)
    gate(work)
    run: Callable[[], list[torch.Tensor]] = getattr(work, what)
    once = float(paired(_nothing(run), _nothing(run), pairs=3)["baseline_s"])
    times = max(1, int(SAMPLE_S / once))
    with protect(nn.Identity()):

        def candidate() -> None:
            for _ in range(times):
                run()

        def baseline() -> None:
            interception().change_process_depth(-1)
            try:
                candidate()
            finally:
                interception().change_process_depth(1)

        row = paired(baseline, candidate, pairs=pairs)
    each = {
        "torch_ms": round(row["baseline_s"] / times * 1e3, 3),
        "ours_ms": round(row["candidate_s"] / times * 1e3, 3),
    }
    shape = {"heads": HEADS, "length": length, "width": WIDTH, "causal": causal}
    return {"what": what, "dtype": name, **shape, "calls_a_sample": times, **row, **each}


def _nothing(run: Callable[[], list[torch.Tensor]]) -> Callable[[], None]:
    def call() -> None:
        run()

    return call


def show(rows: list[dict[str, object]]) -> None:
    """The table, last."""
    columns = ("what", "dtype", "length", "ratio", "ratio_quartiles", "torch_ms", "ours_ms")
    table = Table(*columns)
    for row in rows:
        table.add_row(*(str(row[column]) for column in columns))
    Console(width=120).print(table)


def main() -> None:
    """Measure every length and dtype, forward and both passes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--dtype", choices=tuple(DTYPES), action="append", help="fp32 and bf16")
    parser.add_argument("--length", type=int, action="append", help=f"default: {LENGTHS}")
    parser.add_argument("--causal", action="store_true", help="query i sees keys 0 to i")
    args = parser.parse_args()
    rows = []
    for name in args.dtype or ("fp32", "bf16"):
        for length in args.length or LENGTHS:
            for what in ("forward", "both"):
                rows.append(measure(length, name, what, args.pairs, args.causal))
                record("attention_fused", rows[-1])
    show(rows)


if __name__ == "__main__":
    main()
