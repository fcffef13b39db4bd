"""Fused attention on CPU, verified without ``protect``, by an operator that compilers keep."""

import ctypes
import math
from typing import Any

import torch

from holdfast import native
from holdfast.abft.gemm.interception import interception
from holdfast.abft.gemm.op import SUPPORTED

_ours = torch.library.Library("holdfast", "FRAGMENT")
_core = None if native.core is None else ctypes.CDLL(native.core.__file__)
_GEMMS = {each: "dgemm_" if each is torch.float64 else "sgemm_" for each in SUPPORTED}
# Dtypes for whose tiles torch exports the GEMM that the native core multiplies them by.
FUSED = tuple(each for each in SUPPORTED if hasattr(_core, _GEMMS[each]))
# ``kept`` is what dropout keeps, and None without it. ``always`` verifies without ``protect`` too.
_OPTIONS = "Tensor? mask, bool causal, float scale, Tensor? kept, float dropout, bool always"


def _define(name: str, before: str, after: str, kernel: Any) -> None:
    def torchs(*args: Any) -> Any:
        *tensors, mask, causal, scale, _, _, _ = args
        interception()  # prepares the native core, which is not done yet if this is the first use
        return kernel(*tensors, 0.0, causal, attn_mask=mask, scale=scale)

    def run(*args: Any) -> Any:
        core, (*given, kept, dropout, always) = interception(), args
        core.change_thread_depth(int(always))  # so that the native core stands in for torch
        try:
            if kept is None:
                return torchs(*args)
            dropping = getattr(torch.ops.holdfast, name.replace("sdpa", "dropout_attention"))
            return dropping(*given, kept, dropout)
        finally:
            core.change_thread_depth(-int(always))

    _ours.define(f"{name}({before}, {_OPTIONS}) -> (Tensor, {after})")
    _ours.impl(name, run, "CPU")
    torch.library.register_fake(f"holdfast::{name}", torchs, lib=_ours)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, mask, causal, scale, kept, *rest = inputs
    ctx.save_for_backward(q, k, v, *output, mask, kept)
    ctx.options, ctx.rest = (causal, scale), rest


def _backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[Any, ...]:
    *tensors, mask, kept = ctx.saved_tensors
    if kept is not None and torch.is_grad_enabled():  # they may be differentiated again
        q, k, v = tensors[:3]
        found = _written_out(ctx, grad, q, k, v, mask, kept)
    else:
        options = mask, *ctx.options, kept, *ctx.rest
        found = torch.ops.holdfast.sdpa_backward(grad, *tensors, *options)
    return (*found, *(None,) * 6)


def _written_out(
    ctx: Any, grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    mask: torch.Tensor | None, kept: torch.Tensor,
) -> list[torch.Tensor | None]:  # fmt: skip
    """Compute the gradients by torch's operators, which can be differentiated again."""
    (causal, scale), (dropout, _) = ctx.options, ctx.rest
    if causal:
        later = q.new_full(kept.shape[-2:], -math.inf).triu(1)
        mask = later if mask is None else mask + later
    attend = torch.ops.aten._scaled_dot_product_attention_math
    output = attend(q, k, v, mask, dropout, False, kept, scale=scale, enable_gqa=True)[0]
    wanted = [each for each in (q, k, v) if each.requires_grad]
    found = iter(torch.autograd.grad(output, wanted, grad, create_graph=True))
    return [next(found) if each.requires_grad else None for each in (q, k, v)]


def _refuse(*_: Any) -> Any:
    raise RuntimeError("fused attention has no second derivative: use holdfast.matmul and softmax")


_Q_K_V, _aten = "Tensor q, Tensor k, Tensor v", torch.ops.aten
_define("sdpa", _Q_K_V, "Tensor", _aten._scaled_dot_product_flash_attention_for_cpu)
_backward_kernel = _aten._scaled_dot_product_flash_attention_for_cpu_backward
_like = f"Tensor grad, {_Q_K_V}, Tensor out, Tensor lse"
_define("sdpa_backward", _like, "Tensor, Tensor", _backward_kernel)
torch.library.register_autograd("holdfast::sdpa", _backward, setup_context=_save, lib=_ours)
torch.library.register_autograd("holdfast::sdpa_backward", _refuse, lib=_ours)


def fused_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool,
    scale: float, dropout: float,
) -> torch.Tensor:  # fmt: skip
    """Compute fused attention; drop what torch's function drops with the same random state.

    In a compiled graph other elements are dropped.
    """
    kept = None
    if dropout > 0 and torch.compiler.is_compiling():  # the compiler draws in its own way
        kept = torch.rand(*q.shape[:3], k.shape[2]) >= dropout
    elif dropout > 0:
        interception()  # prepares the native core
        kept = torch.ops.holdfast.dropout_kept(q, k, dropout)
    given = mask, causal, scale, kept, dropout, True
    output: torch.Tensor = torch.ops.holdfast.sdpa(q, k, v, *given)[0]
    return output
