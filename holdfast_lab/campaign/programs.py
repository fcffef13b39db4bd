"""The programs into which faults are injected: each operator as a user's model calls it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from holdfast import sites
from holdfast.digest.tensors import tensors_digest
from holdfast.protection import protect
from holdfast.sites import Gemm
from holdfast_lab.campaign.plan import Shape
from holdfast_lab.distributions import Distribution

BATCH = 3
BETA, ALPHA = 0.5, 2.0

Compute = Callable[[], list[torch.Tensor]]


@dataclass(frozen=True)
class Program:
    """A model with its inputs, whose ``run`` always computes the same.

    ``role`` is the product that gets the fault, one of ``sites.ROLES``. ``run`` returns everything
    that the fault can reach.
    """

    model: nn.Module
    role: str
    run: Compute

    def digest(self) -> str:
        """Run the program and return the digest of its results."""
        return tensors_digest(self.run())

    def product(self) -> tuple[Gemm, torch.Tensor]:
        """Return the product that gets the fault, as interception sees it, and its clean result."""
        seen: list[tuple[Gemm, torch.Tensor]] = []

        def keep(stage: str, site: str, gemm: Gemm, output: torch.Tensor | None) -> None:
            if stage == "output" and site.endswith(f"/{self.role}"):
                assert output is not None
                seen.append((gemm, output.detach().clone()))

        with protect(self.model, verify=False), sites.injecting(keep):
            self.run()
        assert len(seen) == 1, f"{len(seen)} products of role {self.role}"
        return seen[0]


class _Call(nn.Module):
    """A module that calls a function, so that the matmul in it is named after a module."""

    def __init__(self, compute: Compute) -> None:
        super().__init__()
        self._compute = compute

    def forward(self) -> list[torch.Tensor]:
        return self._compute()


def make_program(
    operator: str,
    shape: Shape,
    dtype: torch.dtype,
    distribution: Distribution,
    generator: torch.Generator,
) -> Program:
    """Make the program of an operator with new operands; for its shape see ``plan.Cell``."""
    if operator.startswith("linear"):
        return _linear(operator, shape, dtype, distribution, generator)
    m, k, n = shape
    batches = BATCH if operator in ("bmm", "baddbmm") else 1
    drawn = [distribution(m, k, n, dtype, generator) for _ in range(batches)]
    a, b = (torch.stack(matrices) for matrices in zip(*drawn, strict=True))
    addend = torch.randn(batches, m, n, generator=generator).to(dtype)
    if batches == 1:
        a, b, addend = a[0], b[0], addend[0]
    model = _Call(_functional(operator, addend, a, b))
    return Program(model, "forward", model)


def _functional(operator: str, addend: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Compute:
    if operator in ("mm", "bmm"):
        product = torch.mm if operator == "mm" else torch.bmm
        return lambda: [product(a, b)]
    fused = torch.addmm if operator == "addmm" else torch.baddbmm
    return lambda: [fused(addend, a, b, beta=BETA, alpha=ALPHA)]


_LINEAR_ROLES = {
    "linear": "forward",
    "linear_grad_input": "grad_a",
    "linear_grad_weight": "grad_b",
}


def _linear(
    operator: str,
    shape: Shape,
    dtype: torch.dtype,
    distribution: Distribution,
    generator: torch.Generator,
) -> Program:
    m, k, n = shape
    x, b = distribution(m, k, n, dtype, generator)
    upstream, _ = distribution(m, n, 1, dtype, generator)
    layer = nn.utils.skip_init(nn.Linear, k, n, dtype=dtype)
    with torch.no_grad():
        layer.weight.copy_(b.T)
        layer.bias.copy_(torch.randn(n, generator=generator))
    x.requires_grad_()
    role = _LINEAR_ROLES[operator]

    def run() -> list[torch.Tensor]:
        output = layer(x)
        if role == "forward":
            return [output.detach()]
        return list(torch.autograd.grad(output, (x, layer.weight, layer.bias), upstream))

    return Program(layer, role, run)
