"""Interception of ``scaled_dot_product_attention`` on CUDA, for which our Triton kernels then run.

Torch chooses one of its kernels inside ``aten::scaled_dot_product_attention``. While installed, our
implementation of that operator stands before the choice, in eager mode and where graphs are traced.
It calls ``holdfast::attention`` and ``holdfast::attention_backward``, which compilers keep as they
are. What our kernels do not support is left to torch's and counted as not verified.
"""

import math
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from holdfast import native
from holdfast.abft import counters
from holdfast.abft.attention.cuda import attention_backward, attention_forward
from holdfast.abft.attention.operand_checks import broadcast, check_operands
from holdfast.abft.attention.problem import Options
from holdfast.abft.gemm import compiled
from holdfast.abft.gemm.graph_sites import GRAD_QKV
from holdfast.abft.gemm.other_devices import listed_elsewhere
from holdfast.sites import SiteTuple

KEY = "CUDA"  # dispatch key of the operator that is intercepted
# Site of calls while a graph is traced; the passes over the graph name them.
TRACED: SiteTuple = (0, "sdpa", 0, 0)

_SITE = "int module, str op, int ordinal, int role"
_Q_K_V = "Tensor q, Tensor k, Tensor v"
_OPTIONS = f"Tensor? mask, bool causal, float scale, {_SITE}"
_ours = torch.library.Library("holdfast", "FRAGMENT")
_ours.define(f"attention({_Q_K_V}, {_OPTIONS}) -> (Tensor, Tensor)")
_ours.define(
    f"attention_backward(Tensor grad, {_Q_K_V}, Tensor out, Tensor lse, {_OPTIONS})"
    " -> (Tensor, Tensor, Tensor)"
)
_sdpa: Any = torch.ops.aten.scaled_dot_product_attention.default
_lock = threading.Lock()
_users = 0  # calls of install whose undoing was not called yet
_library: torch.library.Library | None = None


def install() -> Callable[[], None]:
    """Let our kernels compute attention on CUDA, for all threads; return what ends it again.

    Graphs that were compiled before are compiled again. Graphs compiled meanwhile keep our kernels,
    which check nothing while nothing is protected.
    """
    global _users, _library
    with _lock:
        _users += 1
        if _library is None:
            if compiled.graphs_compiled():
                torch.compiler.reset()
            _library = torch.library.Library("aten", "IMPL")
            for key in (KEY, f"Autograd{KEY}"):  # in inference mode tensors have the first alone
                _library.impl("scaled_dot_product_attention", _attention, key)
    return _uninstall


def _uninstall() -> None:
    global _users, _library
    with _lock:
        _users -= 1
        if not _users and _library is not None:
            _library._destroy()
            _library = None


def ledger_slot(tensor: torch.Tensor, site: SiteTuple) -> torch.Tensor:
    """Return the slot of a site in the ledger of a tensor's device, int32 [1]."""
    slot: torch.Tensor = native.required().ledger_slot(tensor, *site)
    return slot


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Compute ``scaled_dot_product_attention`` by our kernels, or by torch's and count why."""
    traced = isinstance(query, FakeTensor | FunctionalTensor)
    site = TRACED if traced else native.required().current_site("sdpa")
    reason = _obstacle(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    if not reason:
        scale = 1 / math.sqrt(query.shape[3]) if scale is None else scale
        result: torch.Tensor = _Attention.apply(
            query, key, value, attn_mask, is_causal, scale, site
        )
        return result
    if not traced:
        counters.left_out(site, reason)
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    given = (query, key, value, attn_mask, dropout_p, is_causal)
    with nullcontext() if traced else listed_elsewhere():
        torchs: torch.Tensor = _sdpa._op_dk(composite, *given, scale=scale, enable_gqa=enable_gqa)
        return torchs


def _obstacle(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    causal: bool,
    grouped: bool,
) -> str:
    """Return why a call is left to torch's kernels; empty if it is not."""
    if dropout > 0:
        return "dropout within fused attention"
    if torch._C._are_functorch_transforms_active():
        return "within a transform of torch.func"
    if any(is_traceable_wrapper_subclass(each) for each in (q, k, v)):
        return "attention of a tensor subclass"
    if mask is not None and causal:
        return "a mask and is_causal"
    if not grouped and q.shape[1:2] != k.shape[1:2]:
        return "heads that differ without enable_gqa"
    try:
        check_operands(q, k, v)
        if mask is not None:
            broadcast(mask, q, k)
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        causal: bool,
        scale: float,
        site: SiteTuple,
    ) -> torch.Tensor:
        out, lse = torch.ops.holdfast.attention(q, k, v, mask, causal, scale, *site)
        ctx.save_for_backward(q, k, v, out, lse, mask)  # type: ignore[arg-type]
        ctx.rest = causal, scale, site  # type: ignore[attr-defined]
        result: torch.Tensor = out
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        *tensors, mask = ctx.saved_tensors
        causal, scale, (module, _, ordinal, _) = ctx.rest
        site = module, "sdpa_backward", ordinal, GRAD_QKV
        gradients = torch.ops.holdfast.attention_backward(
            grad, *tensors, mask, causal, scale, *site
        )
        return (*gradients, None, None, None, None)


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return attention_forward(q, k, v, **_options(q, *rest))[:2]


def _backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
    lse: torch.Tensor, *rest: Any,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    return attention_backward(grad, q, k, v, out, lse, **_options(q, *rest))[0]


def _options(
    q: torch.Tensor, mask: torch.Tensor | None, causal: bool, scale: float, *site: Any
) -> Options:
    """Return the options of a call of the kernels, and count it if it is to be verified."""
    exact = q.dtype != torch.float32 or torch.get_float32_matmul_precision() == "highest"
    precision = Options(precision="ieee" if exact else "tf32")
    call = Options(mask=mask, causal=causal, scale=scale) | precision
    if not native.required().verifying():
        return call | Options(unverified=True)
    counters.verified(site, q.shape[0] * q.shape[1] * q.shape[2], 0, 0.0)
    counts = counters.on_device(site, q.device)
    return call | Options(counts=counts, slot=ledger_slot(q, site))


def _fake_forward(q: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


def _fake_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, ...]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


_ours.impl("attention", _forward, "CompositeExplicitAutograd")
_ours.impl("attention_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("holdfast::attention", _fake_forward, lib=_ours)
torch.library.register_fake("holdfast::attention_backward", _fake_backward, lib=_ours)
