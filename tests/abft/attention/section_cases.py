"""Attention under test, the same in plain torch, and the faults put into its sections."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from struck import damages
from torch.nn import functional

from holdfast.abft.attention.section_softmax import row_bound
from holdfast.abft.gemm.reference import as_batch, verify_rows_reference
from holdfast.nn import Attention
from holdfast.sites import Gemm

FORWARD = ["S_AS.Q", "S_AS.K", "S_AS.AS", "S_CL.V", "S_CL.AP", "S_CL.CL", "S_O.O"]
PRODUCTS = [f"{matrix}/forward" for matrix in FORWARD] + [
    f"{matrix}/{role}" for matrix in FORWARD if matrix != "S_CL.AP" for role in ("grad_a", "grad_b")
]
BATCH, LENGTH, WIDTH, HEADS = 2, 9, 24, 3


def module(dtype: torch.dtype = torch.float32, **settings: object) -> Attention:
    """A small module with the same weights every time."""
    torch.manual_seed(1)
    made = Attention(WIDTH, HEADS, dtype=torch.float64, **settings)  # type: ignore[arg-type]
    return made.to(dtype)


def data(dtype: torch.dtype = torch.float32, seed: int = 2) -> torch.Tensor:
    """Inputs [BATCH, LENGTH, WIDTH], the same every time."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(BATCH, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    return x.to(dtype)


def results(
    attention: torch.nn.Module, *inputs: torch.Tensor, **masks: object
) -> list[torch.Tensor]:
    """The output, and the gradients of inputs and parameters for one upstream gradient."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    output = attention(*leaves, **masks)
    upstream = torch.linspace(-1, 1, output.numel(), dtype=torch.float64)
    operands = [*leaves, *attention.parameters()]
    grads = torch.autograd.grad(output, operands, upstream.view(output.shape).to(output.dtype))
    return [output.detach(), *grads]


class Plain(torch.nn.Module):
    """The same attention in plain torch, sharing a verified module's parameters."""

    def __init__(self, verified: Attention) -> None:
        super().__init__()
        self.settings = [verified]  # not a submodule
        for name, parameter in verified.named_parameters():
            self.register_parameter(name.replace(".", "_"), parameter)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None = None,
        value: torch.Tensor | None = None,
        blocked: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Masks as [.., queries, keys]: ``blocked`` bool, ``bias`` added."""
        key = query if key is None else key
        value = key if value is None else value
        verified = self.settings[0]
        heads, shared = verified.num_heads, verified.kv_heads
        q, k, v = (
            functional.linear(x, layer.weight, layer.bias).unflatten(-1, (n, -1)).transpose(1, 2)
            for x, layer, n in (
                (query, verified.q_proj, heads),
                (key, verified.k_proj, shared),
                (value, verified.v_proj, shared),
            )
        )
        if heads != shared:
            k, v = (t.repeat_interleave(heads // shared, 1) for t in (k, v))
        scores = torch.matmul(q, k.transpose(-2, -1)) * (1 / math.sqrt(verified.head_dim))
        if bias is not None:
            scores = scores + bias
        if blocked is not None:
            scores = scores.masked_fill(blocked, -math.inf)
        probabilities = torch.softmax(scores, -1)
        if blocked is not None:
            probabilities = probabilities.masked_fill(blocked.all(-1, keepdim=True), 0)
        context = torch.matmul(probabilities, v).transpose(1, 2).flatten(2)
        return functional.linear(context, verified.out_proj.weight, verified.out_proj.bias)


def error(result: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    """The largest deviation, each tensor's relative to its largest exact element, or to 1.

    Some gradients are exactly zero: that of K's bias, to which softmax is blind.
    """
    return max(
        float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp_min(1))
        for a, b in zip(result, exact, strict=True)
    )


Damage = Callable[[torch.Tensor], torch.Tensor]


def values(dtype: torch.dtype) -> dict[str, Damage]:
    """INF, NaN, near-INF of either sign, and a flip of each of the four uppermost exponent bits."""
    top = 8 * dtype.itemsize - 2
    return damages(dtype, range(top, top - 4, -1))


@dataclass
class Strike:
    """A hook that damages elements of one product, once.

    ``where`` is "0D", "1R" or "1C": one element, one row or one column of the middle matrix.
    """

    product: str
    damage: Damage
    where: str = "0D"
    done: int = 0
    index: list[int] = field(default_factory=list)
    certain: bool = False

    def __call__(self, stage: str, site: str, gemm: Gemm, output: torch.Tensor | None) -> None:
        if output is None or self.done or not site.endswith(self.product):
            return
        self.done += 1
        healthy = output.clone()
        matrix = as_batch(output)[len(as_batch(output)) // 2]
        row, column = (size // 2 for size in matrix.shape)
        rows = slice(None) if self.where == "1C" else slice(row, row + 1)
        columns = slice(None) if self.where == "1R" else slice(column, column + 1)
        matrix[rows, columns] = self.damage(matrix[rows, columns])
        self.index = [len(as_batch(output)) // 2, row, column]
        self.certain = _certain(site, gemm, healthy, output)


def _certain(site: str, gemm: Gemm, healthy: torch.Tensor, damaged: torch.Tensor) -> bool:
    """Whether some row moved by more than twice its threshold."""
    moved = (as_batch(damaged).double() - as_batch(healthy).double()).sum(-1).abs()
    if site.endswith("AP/forward"):
        return not bool((moved <= 2 * row_bound(healthy.shape[-1], healthy.dtype)).all())
    encoding = gemm.row_sum, gemm.statistics
    threshold = verify_rows_reference(healthy, gemm.a, *encoding, gemm.addend, 1.0, 1.0)[1]
    single = (as_batch(damaged) != as_batch(healthy)).sum(-1) <= 1
    return not bool((moved[single] <= 2 * threshold[single]).all())
