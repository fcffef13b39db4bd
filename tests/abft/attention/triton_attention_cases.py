"""Attention problems and faults for the Triton kernels."""

from dataclasses import dataclass
from typing import Any

import torch
from fused_cases import Case
from triton_device import DEVICE

from holdfast.abft.attention import cuda as fused
from holdfast.abft.attention.cuda import Place
from holdfast.abft.attention.reference import attention, attention_gradients

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Keys, or queries, that a kernel streams at a time: head sizes to 64 in 16 bits, to 32 in fp32.
FORWARD_STREAM, BACKWARD_STREAM = 64, 32


@dataclass(frozen=True)
class Run:
    """All that one attention gave: results, and the verdicts of its three kernels."""

    out: torch.Tensor
    lse: torch.Tensor
    gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    verdicts: tuple[fused.Verdict, ...]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Output, logarithm, and the gradients of q, k and v."""
        return [self.out, self.lse, *self.gradients]

    @property
    def counts(self) -> list[list[int]]:
        """Suspect and corrected rows of the forward kernel and of both backward ones together."""
        return [self.verdicts[0].counts.tolist(), self.verdicts[1].counts.tolist()]


def operands(case: Case, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    return [tensor.to(DEVICE) for tensor in case.operands(dtype, seed)]


def mask_of(case: Case, dtype: torch.dtype) -> torch.Tensor | None:
    """The case's mask, on the device; ``bool`` is a random one."""
    if case.mask == "bool":
        generator = torch.Generator().manual_seed(1)
        return (torch.rand(case.queries, case.keys, generator=generator) < 0.7).to(DEVICE)
    mask = case.additive(dtype)
    return None if mask is None else mask.to(DEVICE)


def forward(
    case: Case, given: list[torch.Tensor], **options: Any
) -> tuple[torch.Tensor, torch.Tensor, fused.Verdict | None]:
    return fused.attention_forward(*given[:3], **_options(case, given), **options)


def backward(
    case: Case, given: list[torch.Tensor], out: torch.Tensor, lse: torch.Tensor, **options: Any
) -> tuple[fused.Gradients, tuple[fused.Verdict, fused.Verdict] | None]:
    q, k, v, grad = given
    return fused.attention_backward(grad, q, k, v, out, lse, **_options(case, given), **options)


def _options(case: Case, given: list[torch.Tensor]) -> dict[str, Any]:
    return {"causal": case.causal, "mask": mask_of(case, given[0].dtype), "scale": case.scale}


def run(case: Case, given: list[torch.Tensor], *, unverified: bool = False) -> Run:
    out, lse, verdict = forward(case, given, unverified=unverified)
    gradients, verdicts = backward(case, given, out, lse, unverified=unverified)
    known = () if verdict is None or verdicts is None else (verdict, *verdicts)
    return Run(out, lse, gradients, known)


def exact(case: Case, given: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """What ``run`` gives, by the reference in another dtype."""
    mask = mask_of(case, given[0].dtype)
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(dtype)
    q, k, v, grad = (tensor.to(dtype) for tensor in given)
    rest = (mask, case.causal, case.scale)
    return [*attention(q, k, v, *rest), *attention_gradients(grad, q, k, v, *rest)]


def fault(
    place: Place,
    *,
    stream: int = FORWARD_STREAM,
    matrix: int = 0,
    row: int,
    column: int = 0,
    value: float,
    attempts: int = 1,
) -> tuple[float, ...]:
    """A fault in the tile that streams by a column; in the first, if the column is of its rows."""
    streamed = place in (Place.SCORES, Place.PROBABILITIES, Place.GRAD_PROBABILITIES)
    tile = column // stream if streamed else 0
    return (place, matrix, tile, row, column, value, attempts)


def faults(*rows: tuple[float, ...]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float32, device=DEVICE)
