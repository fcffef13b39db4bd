"""The verified ``matmul``."""

import torch
from torch.autograd.function import FunctionCtx

from holdfast.ops.gemm.backend import backend

__all__ = ["matmul"]


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``torch.matmul`` whose result, and whose gradients' products, are verified.

    Each product is checked by signed row checksums, ``C r = A (B r)``, against the ``rounding``
    threshold; a suspect row is computed again by the same kernel and, if it differs, replaced bit
    for bit.

    Args:
        a, b: what ``torch.matmul`` takes, on CPU, fp64, fp32, fp16 or bf16; 1-D operands are
            treated as matrices of one row or column.

    Returns:
        The same tensor, bit for bit, as ``torch.matmul`` on healthy hardware (1-D operands
        excepted: their products go through the matrix kernels).

    Guarantees: a change of one output row's sum by more than its threshold plus its own rounding
    is found; see ``docs/fault_model.md``. Not covered: errors that cancel within a row, faults
    already present in ``a`` or ``b``.

    Raises:
        TypeError: an operand is not a floating tensor of a supported dtype.
        UncorrectableFault: the fault persists in recomputation (deferred under a ``Guard``).
    """
    for name, operand in (("a", a), ("b", b)):
        if operand.dtype not in SUPPORTED:
            raise TypeError(
                f"matmul: {name} is {operand.dtype}; verified are "
                f"{', '.join(str(d) for d in SUPPORTED)}: convert it, or use torch.matmul"
            )
    left = a.unsqueeze(0) if a.dim() == 1 else a
    right = b.unsqueeze(-1) if b.dim() == 1 else b
    product: torch.Tensor = _Matmul.apply(left, right)
    if a.dim() == 1:
        product = product.squeeze(-2)
    return product.squeeze(-1) if b.dim() == 1 else product


SUPPORTED = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        with backend().verifying():
            return torch.matmul(a, b)

    @staticmethod
    def backward(
        ctx: FunctionCtx, grad: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        a, b = ctx.saved_tensors  # type: ignore[attr-defined]
        wants_a, wants_b = ctx.needs_input_grad  # type: ignore[attr-defined]
        grad_a = _Matmul.apply(grad, b.mT).sum_to_size(a.shape) if wants_a else None
        grad_b = _Matmul.apply(a.mT, grad).sum_to_size(b.shape) if wants_b else None
        return grad_a, grad_b
