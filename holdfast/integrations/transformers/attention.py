"""Verified attention for the models of transformers, chosen by ``attn_implementation``."""

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
from transformers.models.gpt_neo import modeling_gpt_neo

from holdfast import config, sites
from holdfast.abft.attention.op import SECTIONS, Call, attention
from holdfast.abft.attention.section_product import Section
from holdfast.abft.frequency import Executions, due
from holdfast.abft.gemm.modules import identifier
from holdfast.abft.gemm.op import matmul
from holdfast.integrations.adapter import refuse
from holdfast.protection import is_protected

Module = torch.nn.Module

# Arguments that change the computation in ways that an implementation does not follow.
_REFUSED = ("softcap", "position_bias", "output_attentions", "s_aux", "cache")
_PRODUCTS = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.bmm)


def register_attention(frequencies: Mapping[str, float] | None = None) -> None:
    """Register three values of ``attn_implementation`` with transformers.

    ``"holdfast"`` is the attention of ``"sdpa"``, which ``holdfast.protect`` verifies.
    ``"holdfast_sections"`` checks the sections S_AS and S_CL of ATTNChecker, each at its end;
    ``"holdfast_products"`` is the model's ``"eager"`` attention with ``holdfast.matmul``; both are
    for CPU, also without ``protect``.

    Args:
        frequencies: Shares of calls, 0 to 1, of S_AS and S_CL, as from ``plan_frequencies`` of the
            planner. By default ``attention.…`` of the config file, else 1.

    Guarantees: ``"holdfast"`` has the bits of ``"sdpa"`` under ``protect``, ``"holdfast_products"``
    those of ``"eager"``, and so has ``"holdfast_sections"`` in fp32.

    Not covered: ``"holdfast_sections"`` checks no projection, which ``protect`` does.

    Raises:
        ConfigError: A section is unknown, or a share out of range; in a model's call: nothing
            protects ``"holdfast"``, or an argument cannot be followed.
    """
    given, names = frequencies or {}, SECTIONS[:2]
    shares = {name: config.value(f"attention.{name}", given.get(name), 1.0) for name in names}
    unknown, wrong = given.keys() - set(SECTIONS), [s for s in shares.values() if not 0 <= s <= 1]
    refuse(unknown, f"frequencies of {sorted(unknown)}: known are {', '.join(SECTIONS)}")
    refuse(wrong, f"frequencies {shares}: give each a share of calls, 0 to 1")
    for name, function, mask in (
        ("holdfast", sdpa_attention_forward, sdpa_mask),
        ("holdfast_sections", partial(_sections, shares, WeakKeyDictionary()), eager_mask),
        ("holdfast_products", _products, eager_mask),
    ):
        AttentionInterface.register(name, partial(_checked, name, function))
        AttentionMaskInterface.register(name, mask)
        modeling_gpt_neo.GPT_NEO_ATTENTION_CLASSES[name] = partial(_GPTNeo, name)


def _checked(
    name: str, function: Callable[..., Any], module: Module, *args: Any, **settings: Any
) -> Any:
    """Call an attention function, or refuse what it cannot compute."""
    refused = ("cache",) if name == "holdfast_products" else _REFUSED
    given = [each for each in refused if settings.get(each) not in (None, False)]
    kind, choice = type(module).__name__, f"attn_implementation={name!r}"
    refuse(given, f"{choice} cannot follow {', '.join(given)} of {kind}: use 'eager' under protect")
    unprotected = name == "holdfast" and not is_protected(module)
    refuse(unprotected, f"{choice}, and nothing protects {kind}: call holdfast.protect(model)")
    elsewhere = name == "holdfast_sections" and args[0].device.type != "cpu"
    refuse(elsewhere, f"{choice} is for CPU: use 'holdfast'")
    return function(module, *args, **settings)


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


def _products(module: Module, *args: Any, **settings: Any) -> Any:
    eager = sys.modules[type(module).__module__].eager_attention_forward
    with _Verified():
        return eager(module, *args, **settings)


def _sections(
    shares: Mapping[str, float],
    calls: "WeakKeyDictionary[Module, Executions]",
    module: Module,
    *inputs: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    query, key, value, mask = inputs
    heads, size = query.shape[1], query.shape[3]
    key, value = (repeat_kv(each, heads // each.shape[1]) for each in (key, value))
    number, count = identifier(module), calls.setdefault(module, Executions()).number()
    sites.module_names.setdefault(number, type(module).__name__)
    scores, context = (
        Section(name, number, due(count, share), "recompute") for name, share in shares.items()
    )
    call = Call(
        *(1, 1, size),  # each head is a batch of its own
        scale=size**-0.5 if scaling is None else scaling,
        sections=(scores, context, context),  # the third one is of a projection
        dropout=dropout if module.training else 0.0,
        differentiable=torch.is_grad_enabled(),
    )
    if mask is not None:
        mask = mask.expand(-1, heads, -1, -1).flatten(0, 1)[:, None]
    apart = query.flatten(0, 1), key.mT.flatten(0, 1).mT, value.flatten(0, 1)
    found = attention(*apart, None, call, bias=mask)[0]
    return found.unflatten(0, (-1, heads)).transpose(1, 2).contiguous(), None


class _GPTNeo(modeling_gpt_neo.GPTNeoSelfAttention):
    """The attention of GPT-Neo, which is not a function that can be chosen."""

    def __init__(self, name: str, *args: Any) -> None:
        super().__init__(*args)
        self._name = name

    def _attn(self, query: Any, key: Any, value: Any, attention_mask: Any = None) -> Any:
        if self._name == "holdfast_products":
            with _Verified():
                return super()._attn(query, key, value, attention_mask)
        rows, columns = query.shape[-2], key.shape[-2]
        mask = self.bias[:, :, columns - rows : columns, :columns]  # causal, and local
        if self._name == "holdfast_sections":
            lowest = torch.finfo(query.dtype).min
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, lowest)
            mask = mask if attention_mask is None else mask + attention_mask
        elif attention_mask is not None:
            mask = mask & attention_mask
        dropout = self.attn_dropout.p if self.training else 0.0
        context, weights = AttentionInterface()[self._name](
            self, query, key, value, mask, dropout=dropout, scaling=1.0
        )
        return context.transpose(1, 2), weights
