"""Verified attention for the models of transformers, chosen by ``attn_implementation``."""

import math
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask
from transformers.models.gpt_neo.modeling_gpt_neo import (
    GPT_NEO_ATTENTION_CLASSES,
    GPTNeoSelfAttention,
)

from holdfast import config, sites
from holdfast.abft.attention.op import SECTIONS
from holdfast.abft.attention.section_heads import heads_attention
from holdfast.abft.attention.section_passes import Call
from holdfast.abft.attention.section_product import Section
from holdfast.abft.frequency import Executions, due
from holdfast.abft.gemm.modules import identifier
from holdfast.abft.gemm.op import matmul
from holdfast.errors import ConfigError
from holdfast.protection import is_protected

Result = tuple[torch.Tensor, torch.Tensor | None]
Module = torch.nn.Module

# Arguments that change the computation in ways that an implementation does not follow.
_REFUSED = {
    "holdfast": ("softcap", "position_bias", "output_attentions", "s_aux", "cache"),
    "holdfast_sections": ("softcap", "position_bias", "s_aux", "cache"),
    "holdfast_products": ("cache",),
}
_PRODUCTS = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.bmm)


def register_attention(frequencies: Mapping[str, float] | None = None) -> None:
    """Register three values of ``attn_implementation`` with transformers.

    - ``"holdfast"``: the attention of ``"sdpa"``, which ``holdfast.protect`` runs in verified fused
      kernels. Without a protection of the model it raises.
    - ``"holdfast_sections"``: the sections S_AS and S_CL of ATTNChecker, each checked once, at its
      end, in a planned share of the calls. On CPU; fp32 results have the bits of ``"eager"``.
    - ``"holdfast_products"``: the model's own ``"eager"`` attention with ``holdfast.matmul`` in the
      place of ``torch.matmul``: verified without ``protect``, on CPU, with the bits of ``"eager"``.

    GPT-Neo, whose attention is not a function that can be chosen, takes ``"holdfast_products"``.

    Args:
        frequencies: For ``"holdfast_sections"``: shares of calls, 0 to 1, of S_AS and S_CL, as from
            ``planner.plan_frequencies``. By default ``attention.…`` of the config file, else 1.

    Not covered: ``"holdfast_sections"`` checks no projection, which ``protect`` does.

    Raises:
        ConfigError: A section is unknown, or a share out of range.
    """
    given = frequencies or {}
    if unknown := given.keys() - set(SECTIONS):
        raise ConfigError(f"frequencies of {sorted(unknown)}: known are {', '.join(SECTIONS)}")
    names = SECTIONS[:2]
    shares = {name: config.value(f"attention.{name}", given.get(name), 1.0) for name in names}
    if wrong := {name: share for name, share in shares.items() if not 0 <= share <= 1}:
        raise ConfigError(f"frequencies {wrong}: give each a share of calls, 0 to 1")
    sections = partial(_sections, shares, WeakKeyDictionary())
    for name, attention, mask in (
        ("holdfast", _fused, sdpa_mask),
        ("holdfast_sections", sections, eager_mask),
        ("holdfast_products", _products, eager_mask),
    ):
        AttentionInterface.register(name, partial(_checked, name, attention))
        AttentionMaskInterface.register(name, mask)
        GPT_NEO_ATTENTION_CLASSES[name] = partial(_refuse_gpt_neo, name)
    GPT_NEO_ATTENTION_CLASSES["holdfast_products"] = _GPTNeoProducts


def _checked(
    name: str, attention: Callable[..., Result], module: Module, *args: Any, **settings: Any
) -> Result:
    """Call an attention function, or refuse what it cannot compute."""
    given = [each for each in _REFUSED[name] if settings.get(each) not in (None, False)]
    if given:
        raise ConfigError(
            f"attn_implementation={name!r} cannot follow {', '.join(given)} of "
            f"{type(module).__name__}: use 'eager' under holdfast.protect"
        )
    return attention(module, *args, **settings)


def _fused(module: Module, *args: Any, **settings: Any) -> Result:
    if not is_protected(module):
        raise ConfigError(
            f"attn_implementation='holdfast', and nothing protects {type(module).__name__}: call "
            "holdfast.protect(model), or use 'holdfast_products'"
        )
    found: Result = sdpa_attention_forward(module, *args, **settings)
    return found


class _Verified(TorchFunctionMode):
    """Computes the products of ``torch.matmul`` by ``holdfast.matmul``."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function not in _PRODUCTS:
            return function(*args, **(kwargs or {}))
        a, b = args
        found = matmul(a.reshape(-1, *a.shape[-2:]), b.reshape(-1, *b.shape[-2:]))
        return found.view(*a.shape[:-1], b.shape[-1])


def _products(module: Module, *args: Any, **settings: Any) -> Result:
    with _Verified():
        eager = sys.modules[type(module).__module__].eager_attention_forward
        found: Result = eager(module, *args, **settings)
    return found


class _GPTNeoProducts(GPTNeoSelfAttention):
    """The attention of GPT-Neo with verified products."""

    def forward(self, *args: Any, **settings: Any) -> Any:
        """Compute it as GPT-Neo does."""
        with _Verified():
            return super().forward(*args, **settings)


def _refuse_gpt_neo(name: str, *_: object) -> Module:
    raise ConfigError(
        f"GPT-Neo computes its own attention, which attn_implementation={name!r} cannot replace: "
        "use 'holdfast_products', or 'eager' under holdfast.protect"
    )


def _sections(
    shares: Mapping[str, float],
    calls: "WeakKeyDictionary[Module, Executions]",
    module: Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **_: Any,
) -> Result:
    if query.device.type != "cpu":
        raise ConfigError(
            f"attn_implementation='holdfast_sections' is for CPU, not {query.device.type}: use "
            "'holdfast' under holdfast.protect(model, attention='fused')"
        )
    key, value = (repeat_kv(each, query.shape[1] // each.shape[1]) for each in (key, value))
    number, count = identifier(module), calls.setdefault(module, Executions()).number()
    sites.module_names.setdefault(number, type(module).__name__)
    of_scores, of_context = (
        Section(name, number, due(count, share), "recompute") for name, share in shares.items()
    )
    heads, size = query.shape[1], query.shape[3]
    scale = 1.0 / math.sqrt(size) if scaling is None else scaling
    sections = of_scores, of_context, of_context  # there is no third one here
    dropped = dropout if module.training else 0.0
    differentiable = torch.is_grad_enabled()
    call = Call(heads, heads, size, scale, sections, dropped, differentiable=differentiable)
    context, probabilities = heads_attention(query, key, value, call, mask)
    return context.transpose(1, 2).contiguous(), probabilities
