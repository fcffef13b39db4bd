"""The function ``holdfast.matmul``, which verifies its product and its gradients."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.autograd.function import FunctionCtx

from holdfast import native, sites
from holdfast.abft.gemm.cpu import encode, verify_gemm
from holdfast.abft.gemm.interception import interception
from holdfast.abft.gemm.raw import raw
from holdfast.abft.gemm.reference import folded, suspect_rows
from holdfast.abft.gemm.suspects import SuspectProduct, resolve
from holdfast.abft.registry import Implementation, Operator, needs_native
from holdfast.sites import Gemm

__all__ = ["matmul"]

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Multiply as ``torch.matmul`` does, with this product and its gradients' verified.

    Each product is checked by signed row checksums, ``C r = A (B r)``, against the ``rounding``
    threshold or that of ``protect(threshold=…)``; a suspect row is computed again by the same
    kernel and, if it differs, replaced bit for bit.

    Args:
        a: Operand as for ``torch.matmul``, on CPU, fp64, fp32, fp16 or bf16; 1-D operands are
            treated as matrices of one row or column.
        b: Operand likewise.

    Returns:
        The same tensor, bit for bit, as ``torch.matmul`` on healthy hardware (1-D operands
        excepted: their products go through the matrix kernels).

    Guarantees: a change of one output row's sum by more than its threshold plus its own rounding
    is found; see ``docs/fault_model.md``. Not covered: errors that cancel within a row, faults
    already present in ``a`` or ``b``.

    Raises:
        TypeError: An operand is not a tensor of a supported dtype.
        ConfigError: No implementation is enabled for the operands' device.
        UncorrectableFault: The fault persists in recomputation (a ``Guard`` collects it).
    """
    if a.device.type not in DEVICES:
        MATMUL.select(a.device.type)  # raises if there is none
    a, b = autocast(a), autocast(b)
    for name, operand in (("a", a), ("b", b)):
        if operand.dtype not in SUPPORTED:
            raise TypeError(
                f"matmul: {name} is {operand.dtype}; verified are "
                f"{', '.join(str(d) for d in SUPPORTED)}: convert it, or use torch.matmul"
            )
    left = a.unsqueeze(0) if a.dim() == 1 else a
    right = b.unsqueeze(-1) if b.dim() == 1 else b
    product = _traced(left, right) if torch.compiler.is_compiling() else _product(left, right)
    if a.dim() == 1:
        product = product.squeeze(-2)
    return product.squeeze(-1) if b.dim() == 1 else product


torch.jit.ignore(matmul)  # TorchScript calls it in Python
SUPPORTED = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def autocast(operand: torch.Tensor) -> torch.Tensor:
    """Convert an operand to autocast's dtype, so that backward uses that dtype as well."""
    device = operand.device.type
    if operand.dtype is torch.float64 or not torch.is_autocast_enabled(device):
        return operand
    return operand.to(torch.get_autocast_dtype(device))


class _Matmul(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        multiply = MATMUL.select(a.device.type, a.dtype)
        with torch.autocast(a.device.type, enabled=False):
            return multiply(a, b)

    @staticmethod
    def setup_context(
        ctx: FunctionCtx, inputs: tuple[torch.Tensor, torch.Tensor], output: torch.Tensor
    ) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def jvp(
        ctx: FunctionCtx, a_dot: torch.Tensor | None, b_dot: torch.Tensor | None
    ) -> torch.Tensor:
        a, b = ctx.saved_tensors  # type: ignore[attr-defined]
        along_a = _product(a_dot, b) if a_dot is not None else 0
        along_b = _product(a, b_dot) if b_dot is not None else 0
        return torch.as_tensor(along_a + along_b)

    @staticmethod
    def backward(
        ctx: FunctionCtx, grad: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        a, b = ctx.saved_tensors  # type: ignore[attr-defined]
        wants_a, wants_b = ctx.needs_input_grad  # type: ignore[attr-defined]
        # b first, as torch does for mm and bmm: sites are named by this order.
        grad_b = _grad_b(_product, a, b, grad) if wants_b else None
        grad_a = _product(grad, b.mT).sum_to_size(a.shape) if wants_a else None
        return grad_a, grad_b


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return _Matmul.apply(a, b)  # type: ignore[no-any-return]


def _grad_b(product: Product, a: torch.Tensor, b: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    if b.dim() == 2:  # one product over all rows, as torch folds the batch; no [batch, K, N]
        a, grad = a.reshape(-1, a.shape[-1]), grad.reshape(-1, grad.shape[-1])
    return product(a.mT, grad).sum_to_size(b.shape)


_FORWARD, _GRAD_A, _GRAD_B = range(3)


def _traced(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Multiply in a compiled graph, by one op that is opaque to the compiler."""
    product: torch.Tensor = torch.ops.holdfast.matmul(a, b, _FORWARD)
    return product


def _native(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    core = interception()
    core.change_thread_depth(1)
    try:
        return torch.matmul(a, b)
    finally:
        core.change_thread_depth(-1)


def matmul_reference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Multiply and verify in plain torch; operands have two dimensions or more."""
    left, right = folded(a, b)
    if not (left.numel() and right.numel()):
        return torch.matmul(a, b)
    site = (0, "mm" if left.dim() == 2 else "bmm", 0, _FORWARD)
    gemm = Gemm(None, left, right, 1.0, 1.0, *encode(right))
    sites.visit("checksum", site, gemm, None)
    sites.visit("operand", site, gemm, None)
    shape = (*left.shape[:-1], right.shape[-1])
    with raw():
        whole = torch.matmul(a, b)
        output = whole.reshape(shape)
        sites.visit("output", site, gemm, output)
        rows = verify_gemm(gemm, output)
        if suspect_rows(rows).any():
            rerun = lambda: torch.matmul(a, b).reshape(shape)  # noqa: E731
            resolve(SuspectProduct(site, gemm, output, rows, False, rerun))
    return output.reshape(whole.shape)


def _triton() -> Product:
    """Load the Triton implementation, which is not enabled yet."""
    from holdfast.abft.gemm import cuda

    return cuda.verified_matmul


DEVICES = ("cpu",)
MATMUL: Operator[Product] = Operator(
    "matmul",
    [
        Implementation("native", lambda: _native, DEVICES, SUPPORTED, needs_native),
        Implementation("reference", lambda: matmul_reference, DEVICES, SUPPORTED),
        Implementation("triton", _triton, ("cuda",), SUPPORTED[1:], enabled=False),
    ],
)

if native.core is None:
    torch.library.define("holdfast::matmul", "(Tensor a, Tensor b, int role) -> Tensor")
    torch.library.impl("holdfast::matmul", "cpu", lambda a, b, role: matmul_reference(a, b))


@torch.library.register_fake("holdfast::matmul")
def _fake(a: torch.Tensor, b: torch.Tensor, role: int) -> torch.Tensor:
    if native.core is not None:  # not installed yet if this is the first use
        interception()
    return torch.matmul(a, b)


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    a, b = ctx.saved_tensors
    wants_a, wants_b, _ = ctx.needs_input_grad
    matmul = torch.ops.holdfast.matmul
    grad_a = matmul(grad, b.mT, _GRAD_A).sum_to_size(a.shape) if wants_a else None
    grad_b = _grad_b(partial(matmul, role=_GRAD_B), a, b, grad) if wants_b else None
    return grad_a, grad_b, None


torch.library.register_autograd("holdfast::matmul", _backward, setup_context=_save)
