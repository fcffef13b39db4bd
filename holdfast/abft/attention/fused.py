"""Fused attention on CPU, verified without ``protect``, by an operator that compilers keep."""

import ctypes
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


def _define(name: str, before: str, after: str, kernel: Any) -> None:
    def run(*args: Any) -> Any:
        core, (*tensors, mask, causal, scale) = interception(), args
        core.change_thread_depth(1)  # so that the native core's kernel stands in for torch's
        try:
            return kernel(*tensors, 0.0, causal, attn_mask=mask, scale=scale)
        finally:
            core.change_thread_depth(-1)

    _ours.define(f"{name}({before}, Tensor? mask, bool causal, float scale) -> (Tensor, {after})")
    _ours.impl(name, run, "CPU")
    torch.library.register_fake(f"holdfast::{name}", run, lib=_ours)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, mask, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output, mask)


def _backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[Any, ...]:
    found = torch.ops.holdfast.sdpa_backward(grad, *ctx.saved_tensors, *ctx.options)
    return (*found, None, None, None)


def _refuse(*_: Any) -> Any:
    raise RuntimeError("fused attention has no second derivative: use holdfast.matmul and softmax")


_Q_K_V, _aten = "Tensor q, Tensor k, Tensor v", torch.ops.aten
_define("sdpa", _Q_K_V, "Tensor", _aten._scaled_dot_product_flash_attention_for_cpu)
_backward_kernel = _aten._scaled_dot_product_flash_attention_for_cpu_backward
_like = f"Tensor grad, {_Q_K_V}, Tensor out, Tensor lse"
_define("sdpa_backward", _like, "Tensor, Tensor", _backward_kernel)
torch.library.register_autograd("holdfast::sdpa", _backward, setup_context=_save, lib=_ours)
torch.library.register_autograd("holdfast::sdpa_backward", _refuse, lib=_ours)
