"""The rounding error of our fused attention beside that of torch's own, on several distributions.

    python -m bench.attention_error

Both errors are against fp64, of the output and of the three gradients, as the root of the mean
square and as the largest of an element. Each row has the largest ratio over all shapes, with and
without a causal mask, and its shape. Nothing is timed.
"""

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn

from bench.rows import record
from holdfast.protection import protect

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WIDTHS, LENGTHS = (16, 32, 64, 128), (64, 300, 1024)
NAMES = ("output", "dQ", "dK", "dV")
DISTRIBUTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "N(0, 1)": torch.randn,
    "N(0, 64)": lambda *shape, **options: 8 * torch.randn(*shape, **options),
    "U(1, 2)": lambda *shape, **options: 1 + torch.rand(*shape, **options),
    "U(4, 8)": lambda *shape, **options: 4 + 4 * torch.rand(*shape, **options),
}
Ratios = dict[str, tuple[float, list[object]]]


def attended(operands: list[torch.Tensor], causal: bool) -> list[torch.Tensor]:
    """Return the output and the gradients of queries, keys and values."""
    *inputs, upstream = operands
    leaves = [each.clone().requires_grad_() for each in inputs]
    output = F.scaled_dot_product_attention(*leaves, is_causal=causal)
    return [output.detach(), *torch.autograd.grad(output, leaves, upstream)]


def errors(found: torch.Tensor, right: torch.Tensor) -> tuple[float, float]:
    """Return the root of the mean square and the largest of the errors."""
    error = found.double() - right
    return float(error.square().mean().sqrt()), float(error.abs().max())


def compare(
    operands: list[torch.Tensor], causal: bool, place: list[object], worst: list[Ratios]
) -> None:
    """Raise the largest ratios so far by those of one attention."""
    right = attended([each.double() for each in operands], causal)
    plain = attended(operands, causal)
    with protect(nn.Identity()):
        ours = attended(operands, causal)
    for name, *values in zip(NAMES, ours, plain, right, strict=True):
        pairs = zip(errors(values[0], values[2]), errors(values[1], values[2]), strict=True)
        for kind, (own, torchs) in zip(worst, pairs, strict=True):
            ratio = own / torchs if torchs else float(own > 0)
            kind[name] = max(kind.get(name, (0.0, place)), (ratio, place), key=lambda pair: pair[0])


def measure(distribution: str, dtype: str) -> list[dict[str, object]]:
    """Compare all shapes of one distribution; return a row for each result."""
    generator = torch.Generator().manual_seed(0)
    rms: Ratios = {}
    largest: Ratios = {}
    for width in WIDTHS:
        for length in LENGTHS:
            for causal in (False, True):
                shape = (1, 2, length, width)
                draw = DISTRIBUTIONS[distribution]
                inputs = [draw(shape, generator=generator).to(DTYPES[dtype]) for _ in range(3)]
                upstream = torch.randn(shape, generator=generator).to(DTYPES[dtype])
                place: list[object] = [*shape, causal]
                compare([*inputs, upstream], causal, place, [rms, largest])
    return [
        {
            "distribution": distribution,
            "dtype": dtype,
            "of": name,
            "rms_ratio": round(rms[name][0], 2),
            "largest_ratio": round(largest[name][0], 2),
            "shape_and_causal": rms[name][1],
        }
        for name in NAMES
    ]


def main() -> None:
    """Every distribution in every dtype; the table last."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    table = Table("distribution", "dtype", "of", "rms ratio", "largest ratio", "shape and causal")
    for distribution in DISTRIBUTIONS:
        for dtype in DTYPES:
            for row in measure(distribution, dtype):
                record("attention_error", row)
                table.add_row(*map(str, row.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
