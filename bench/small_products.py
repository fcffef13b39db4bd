"""What the checks cost small and narrow products, against the same products unverified.

    python -m bench.small_products [--pairs N] [--case PART_OF_A_NAME …]

Linear layers of 1 to 64 rows, the interaction of a served DLRM (27 x 64), attention written out at
128 tokens, and products whose addend masks elements. Training is forward and backward, with the
weights kept. Correctness first, as in ``bench.gemm``. Two modules on equal operands take turns: a
protected one, and one without hooks, while nothing is verified.
"""

import argparse
import math
from collections import deque
from collections.abc import Callable, Iterator

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional

from bench.gemm import DTYPES, SAMPLE_S, gate, seconds_of, unverified
from bench.paired import paired, several
from bench.rows import record
from holdfast.protection import protect

ROWS = (1, 4, 16, 64)
LAYERS = ((512, 512), (1024, 4096), (4096, 1024))  # inputs and outputs
BATCH, TOKENS, WIDTH = 64, 128, 64  # of attention: 8 sequences of 8 heads
KEYS = ("case", "dtype", "mode", "baseline_us", "candidate_us", "ratio", "ratio_quartiles")


class Interaction(nn.Module):
    """The products of all pairs of vectors."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the class."""
        return torch.bmm(x, x.transpose(1, 2))


class Attention(nn.Module):
    """Attention written out."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See the class."""
        scores = torch.matmul(q, k.transpose(-2, -1)) * (1 / math.sqrt(WIDTH))
        return torch.matmul(functional.softmax(scores, -1), v)


class Masked(nn.Module):
    """Scores whose addend is a mask."""

    def __init__(self, mask: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask)

    def forward(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """See the class."""
        return torch.baddbmm(self.mask, q, k.transpose(1, 2))


def cases() -> Iterator[tuple[str, Callable[[], nn.Module], list[int], int, dict[str, int]]]:
    """Name, module, shape of each input, how many those are, and the faults of the gate by mode."""
    one = {"inference": 1, "training": 3}
    for k, n in LAYERS:
        for m in ROWS:
            yield f"linear {m} x {k} x {n}", lambda k=k, n=n: nn.Linear(k, n), [m, k], 1, one
    yield "interaction", Interaction, [32, 27, 64], 1, one
    operand = [BATCH, TOKENS, WIDTH]
    yield "attention", Attention, operand, 3, {"inference": 2, "training": 6}
    later = torch.ones(TOKENS, TOKENS).triu(1).bool()
    causal = torch.zeros(BATCH, TOKENS, TOKENS).masked_fill(later, -torch.inf)
    # The product is computed, and struck, without its mask as well.
    masked = {"inference": 2, "training": 4}
    yield "masked, causal", lambda: Masked(causal), operand, 2, masked


class Run:
    """A case in one dtype and mode, on the same data every time."""

    def __init__(self, module: nn.Module, inputs: list[torch.Tensor], training: bool) -> None:
        self.module, self.training = module, training
        self.inputs = [each.clone().requires_grad_(training) for each in inputs]
        self.upstream = torch.ones_like(module(*self.inputs))

    def results(self) -> list[torch.Tensor]:
        """The output and, in training, the gradients of inputs and parameters."""
        if not self.training:
            with torch.inference_mode():
                return [self.module(*self.inputs)]
        output = self.module(*self.inputs)
        operands = [*self.inputs, *self.module.parameters()]
        return [output, *torch.autograd.grad(output, operands, self.upstream)]


def measure(candidate: Run, plain: Run, faults: int, pairs: int) -> dict[str, object]:
    """Gate, then time; the figures of a row."""
    gate(candidate.module, candidate.results, faults)
    times = max(1, int(SAMPLE_S / seconds_of(lambda: deque([candidate.results()], 0))))

    def bare() -> None:
        with unverified():
            deque((plain.results() for _ in range(times)), 0)

    with protect(candidate.module):
        row = paired(
            bare, lambda: deque((candidate.results() for _ in range(times)), 0), pairs=pairs
        )
    each = {f"{side}_us": row[f"{side}_s"] / times * 1e6 for side in ("baseline", "candidate")}
    return {"calls_a_sample": times, **row, **{key: round(us, 2) for key, us in each.items()}}


def main() -> None:
    """Measure every case, or those whose name contains what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=several, default=15)
    parser.add_argument("--case", action="append")
    args = parser.parse_args()
    names = [name for name, *_ in cases()]
    for part in args.case or []:
        if not any(part in name for name in names):
            parser.error(f"--case {part}: no case has this in its name: {', '.join(names)}")
    table = Table(*KEYS)
    for name, make, shape, count, faults in cases():
        for mode in ("inference", "training"):
            for dtype, kind in DTYPES.items():
                if not any(part in name for part in args.case or [""]):
                    continue
                torch.manual_seed(0)
                module = make().to(kind)
                inputs = [torch.randn(shape).to(kind) for _ in range(count)]
                runs = (Run(each, inputs, mode == "training") for each in (module, make().to(kind)))
                row = {"case": name, "dtype": dtype, "mode": mode}
                row |= measure(*runs, faults[mode], args.pairs)
                record("small_products", row)
                table.add_row(*(str(row[key]) for key in KEYS))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
