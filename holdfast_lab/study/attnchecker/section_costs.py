"""The costs of checking each section of attention on this machine, timed in pairs."""

from collections.abc import Callable
from statistics import median

import torch
from torch import nn

from holdfast.abft.gemm.op import matmul
from holdfast.planner.attention import SECTIONS, AttentionSize, CheckCosts
from holdfast_lab.study.registry import Progress
from holdfast_lab.study.timing import seconds

_WARMUP = 2

Operands = dict[str, tuple[torch.Tensor, torch.Tensor]]


def operands(size: AttentionSize, generator: torch.Generator) -> Operands:
    """Draw N(0, 1) fp32 operands of attention's six products, in their shapes."""

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    heads = size.batch * size.heads
    x, context = drawn(size.tokens, size.width), drawn(size.tokens, size.query_width)
    query, key = (drawn(heads, size.length, size.head_size) for _ in range(2))
    probabilities = drawn(heads, size.length, size.length).softmax(-1)
    return {
        "Q": (x, drawn(size.width, size.query_width)),
        "K": (x, drawn(size.width, size.kv_width)),
        "AS": (query, key.mT),
        "V": (x, drawn(size.width, size.kv_width)),
        "CL": (probabilities, drawn(heads, size.length, size.head_size)),
        "O": (context, drawn(size.query_width, size.width)),
    }


def work(pairs: int) -> float:
    """Return the amount of progress that ``measured_costs`` reports."""
    return float(pairs * (len(SECTIONS) + 1))


def measured_costs(
    size: AttentionSize, pairs: int, generator: torch.Generator, progress: Progress
) -> CheckCosts:
    """Measure the seconds that verification adds to each section, as medians of A B A B … pairs.

    Every product is verified by itself (``holdfast.matmul``), and no checksum is passed on to the
    next. The step is forward and backward of one encoder layer of these sizes.
    """
    found = operands(size, generator)
    sections, attention = {}, 0.0
    with torch.no_grad():
        for name, gemms in SECTIONS.items():
            chosen = [found[gemm] for gemm in gemms]
            plain, extra = _paired(chosen, pairs, progress)
            sections[name] = max(0.0, extra)
            attention += plain
    return CheckCosts(sections, attention, _step_s(size, pairs, progress))


def _paired(
    products: list[tuple[torch.Tensor, torch.Tensor]], pairs: int, progress: Progress
) -> tuple[float, float]:
    """Return the median seconds of the plain products and the extra seconds of verified ones."""

    def run(multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> float:
        return seconds(lambda: [multiply(a, b) for a, b in products])

    for _ in range(_WARMUP):
        run(torch.matmul), run(matmul)
    plain, extra = [], []
    for _ in range(pairs):
        before = run(torch.matmul)
        extra.append(run(matmul) - before)
        plain.append(before)
        progress.advance(1)
    return median(plain), median(extra)


def _step_s(size: AttentionSize, pairs: int, progress: Progress) -> float:
    with torch.random.fork_rng(devices=[]):
        layer = nn.TransformerEncoderLayer(
            size.width, size.heads, 4 * size.width, dropout=0.0, batch_first=True
        )
        x = torch.randn(size.batch, size.length, size.width, requires_grad=True)

    def step() -> None:
        layer.zero_grad()
        layer(x).square().mean().backward()

    for _ in range(_WARMUP):
        step()
    times = []
    for _ in range(pairs):
        times.append(seconds(step))
        progress.advance(1)
    return median(times)
