"""Multi-head attention whose matrix products are verified in three groups (sections)."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Self

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from holdfast import config, sites
from holdfast.abft.attention.op import (
    SECTIONS,
    Call,
    Operands,
    Projection,
    Projections,
    attention,
    cast,
)
from holdfast.abft.attention.section_cache import Growing
from holdfast.abft.attention.section_product import Section
from holdfast.abft.attention.section_shapes import Rotary, rotary
from holdfast.abft.frequency import Executions, due
from holdfast.abft.gemm.modules import identifier
from holdfast.abft.gemm.op import SUPPORTED
from holdfast.abft.policy import CORRECTIONS
from holdfast.nn.cache import Cache
from holdfast.nn.eager import EagerModule
from holdfast.nn.masks import Positions, alibi, combine, padding_mask, scores_mask, structural

EAGER = (
    "holdfast.nn.Attention runs eagerly, section by section, inside compiled code: compile without "
    "fullgraph=True, or leave the module out"
)


class Attention(EagerModule):
    """Multi-head attention whose six GEMMs, and the twelve of their gradients, are verified.

    ``O = softmax(scale · Q Kᵀ + mask) V Wo + bo`` per head of d = embed_dim / num_heads elements,
    with ``scale = d^(−1/2)``.

    Args:
        embed_dim: Size E of queries and output.
        num_heads: Number H of query heads.
        kv_heads: Heads of keys and values: H by default, 1 is multi-query, others grouped-query.
        kdim, vdim: Sizes of the key and value inputs; E by default.
        bias: Gives the projections a bias.
        dropout: Probability of dropping an attention probability in training.
        causal: Prevents queries from attending to later keys.
        window: If set, a query attends only to keys less than ``window`` positions away.
        rope: Base of a rotary position embedding (10000.0 is usual), half-split order.
        alibi: Adds minus slope times distance (ALiBi) to the scores.
        correction: Treatment of a fault. ``recompute`` repeats the GEMM, bit for bit.
            ``checksum`` corrects elements from row and column checksums, within the threshold,
            and recomputes only what these cannot locate. ``detect`` changes nothing and raises.
        frequencies: Shares of calls, 0 to 1, in which the sections S_AS (scores), S_CL (context)
            and S_O (output) are checked, evenly spread; the backward pass follows its forward
            pass. By default ``attention.…`` of the config file, else 1.

    Guarantees: those of ``abft.attention.op.attention``. On healthy hardware, results are
    those of the same products unprotected. Under ``torch.compile`` the module runs in eager mode,
    with a graph break (with ``fullgraph=True``, a Dynamo error). Not covered: layout copies, masks,
    rotary embedding, softmax arithmetic except that rows sum to one; CUDA.

    Raises:
        ValueError: A size, a share or ``correction`` is invalid. TypeError: A dtype is.
        UncorrectableFault: Raised by a later call whose fault cannot be corrected.

    Source: ATTNChecker, sections 4.2 to 4.5.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        kv_heads: int | None = None,
        kdim: int | None = None,
        vdim: int | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        causal: bool = False,
        window: int | None = None,
        rope: float | None = None,
        alibi: bool = False,
        correction: str = "recompute",
        frequencies: Sequence[float] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.kv_heads = num_heads if kv_heads is None else kv_heads
        self.dropout, self.causal, self.window = dropout, causal, window
        self.rope, self.alibi = rope, alibi
        self.correction = correction
        self.frequencies = tuple(_in_force() if frequencies is None else frequencies)
        self._check_settings()
        self.head_dim = embed_dim // num_heads
        narrow = self.kv_heads * self.head_dim
        make = partial(NonDynamicallyQuantizableLinear, bias=bias, device=device, dtype=dtype)
        self.q_proj = make(embed_dim, embed_dim)
        self.k_proj = make(embed_dim if kdim is None else kdim, narrow)
        self.v_proj = make(embed_dim if vdim is None else vdim, narrow)
        self.out_proj = make(embed_dim, embed_dim)
        self._calls = Executions()

    def _check_settings(self) -> None:
        heads, shared = self.num_heads, self.kv_heads
        if min(heads, shared, self.embed_dim) < 1:
            raise ValueError(
                f"embed_dim = {self.embed_dim}, num_heads = {heads}, kv_heads = {shared}: all "
                "must be at least 1"
            )
        if self.embed_dim % heads or heads % shared:
            raise ValueError(
                f"embed_dim = {self.embed_dim} must be a multiple of num_heads = {heads}, and "
                f"that of kv_heads = {shared}: change one"
            )
        if self.rope is not None and (self.embed_dim // heads % 2 or not self.rope > 0):
            raise ValueError(
                f"rope = {self.rope} turns pairs of elements: give a positive base and heads of "
                f"an even size, not {self.embed_dim // heads}"
            )
        if self.window is not None and self.window < 1:
            raise ValueError(f"window = {self.window} must be at least 1, the query's own position")
        if not 0.0 <= self.dropout <= 1.0:
            raise ValueError(f"dropout = {self.dropout} must be between 0 and 1")
        if self.correction not in CORRECTIONS:
            raise ValueError(f"correction = {self.correction!r}: give one of {CORRECTIONS}")
        if len(self.frequencies) != len(SECTIONS):
            raise ValueError(f"frequencies = {self.frequencies}: give one for each of {SECTIONS}")
        for frequency in self.frequencies:
            due(0, frequency)

    @classmethod
    def from_torch(
        cls,
        module: nn.MultiheadAttention,
        *,
        correction: str = "recompute",
        frequencies: Sequence[float] | None = None,
    ) -> Self:
        """Make an ``Attention`` with a copy of the weights of torch's module.

        Its inputs are [batch, length, size] even if ``module.batch_first`` is False, and it returns
        the output without the attention weights.

        Raises:
            TypeError: ``module`` is not an ``nn.MultiheadAttention``. ValueError: It uses
                ``add_bias_kv`` or ``add_zero_attn``, which are not supported.
        """
        if not isinstance(module, nn.MultiheadAttention):
            raise TypeError(f"from_torch takes nn.MultiheadAttention, not {type(module).__name__}")
        if module.bias_k is not None or module.add_zero_attn:
            raise ValueError("add_bias_kv and add_zero_attn are not supported: build it without")
        weight = module.out_proj.weight
        made = cls(
            module.embed_dim,
            module.num_heads,
            kdim=module.kdim,
            vdim=module.vdim,
            bias=module.in_proj_bias is not None,
            dropout=module.dropout,
            correction=correction,
            frequencies=frequencies,
            device=weight.device,
            dtype=weight.dtype,
        )
        made.load_state_dict(_state_of(module))
        return made.train(module.training)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None = None,
        value: torch.Tensor | None = None,
        *,
        mask: torch.Tensor | None = None,
        key_padding_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
    ) -> torch.Tensor:
        """Compute attention of L queries to S keys and values; returns [batch, L, E].

        Args:
            query: [batch, L, E].
            key: [batch, S, ..]; the queries by default.
            value: [batch, S, ..]; the keys by default.
            mask: bool, True where a key may not be attended to, or of the queries' dtype and
                added to the scores; [L, keys], [batch · num_heads, L, keys], or four dimensions
                that broadcast to [batch, num_heads, L, keys].
            key_padding_mask: bool, True where a key is padding, or additive; [batch, keys].
            cache: Keys and values of earlier positions, to which this call appends its own. Not for
                use under activation checkpointing, which would append them again in backward.

        Returns:
            The output; at a query that may attend to no key, the bias of ``out_proj``.

        Raises:
            ValueError, TypeError: An input has a wrong shape or dtype; states the right one.
            UncorrectableFault: A fault cannot be corrected, or ``correction`` is ``detect``.
        """
        self.check_eager()
        if torch.compiler.is_compiling():
            torch._dynamo.graph_break(msg=EAGER)
        key = query if key is None else key
        value = key if value is None else value
        self._check_operands(query, key, value, cache)
        operands, projections = self._cast(query, key, value)
        dtype, batch = operands[0].dtype, query.shape[0]
        first = 0 if cache is None else len(cache)
        at = Positions(first, query.shape[1], first + key.shape[1])
        bias, blocked = combine(
            [
                structural(at, self.causal, self.window),
                padding_mask(_to(key_padding_mask, dtype), batch, at.keys, dtype),
                scores_mask(_to(mask, dtype), batch, self.num_heads, at, dtype),
                alibi(at, self.num_heads, dtype) if self.alibi else None,
            ]
        )
        past = None if cache is None else cache.past
        growing = None if cache is None else cache.growing()
        call = self._call(at, (*operands, *self.parameters(), bias), growing)
        output, keys, values = attention(
            *operands, projections, call, bias=bias, blocked=blocked, past=past
        )
        if cache is not None and growing is not None:
            cache.replace(keys, values, growing)
        return output

    def _call(
        self, at: Positions, operands: Sequence[torch.Tensor | None], growing: Growing | None
    ) -> Call:
        count = self._calls.number()
        module = identifier(self)
        sites.module_names.setdefault(module, type(self).__name__)
        score, context, output = (
            Section(name, module, due(count, share), self.correction)
            for name, share in zip(SECTIONS, self.frequencies, strict=True)
        )
        turn: Rotary | None = None
        if self.rope is not None:
            dtype = operands[0].dtype if operands[0] is not None else torch.float32
            turn = rotary(at.first, at.queries, self.head_dim, self.rope, dtype)
        differentiable = torch.is_grad_enabled() and any(
            operand is not None and operand.requires_grad for operand in operands
        )
        return Call(
            self.num_heads,
            self.kv_heads,
            self.head_dim,
            1.0 / math.sqrt(self.head_dim),
            (score, context, output),
            self.dropout if self.training else 0.0,
            turn,
            turn,
            differentiable,
            growing,
        )

    def _cast(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[Operands, Projections]:
        """Convert operands and weights to the dtype that autocast computes in."""
        query_layer, key_layer, value_layer, output_layer = (
            Projection(layer.weight, layer.bias)
            for layer in (self.q_proj, self.k_proj, self.v_proj, self.out_proj)
        )
        projections = query_layer, key_layer, value_layer, output_layer
        kind = query.device.type
        if not torch.is_autocast_enabled(kind) or query.dtype is torch.float64:
            return (query, key, value), projections
        return cast((query, key, value), projections, torch.get_autocast_dtype(kind))

    def _check_operands(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cache: Cache | None
    ) -> None:
        layers = (self.q_proj, self.k_proj, self.v_proj)
        names = ("query", "key", "value")
        for name, x, layer in zip(names, (query, key, value), layers, strict=True):
            if x.dim() != 3 or x.shape[-1] != layer.in_features:
                raise ValueError(
                    f"{name} has shape {tuple(x.shape)}: give [batch, length, {layer.in_features}]"
                )
            autocast = torch.is_autocast_enabled(x.device.type)
            if x.dtype not in SUPPORTED or (x.dtype != layer.weight.dtype and not autocast):
                raise TypeError(
                    f"{name} is {x.dtype} and the weights are {layer.weight.dtype}: convert one; "
                    f"verified are {', '.join(str(dtype) for dtype in SUPPORTED)}"
                )
        if query.shape[0] != key.shape[0] or key.shape[:2] != value.shape[:2]:
            raise ValueError(
                f"query {tuple(query.shape)}, key {tuple(key.shape)} and value "
                f"{tuple(value.shape)} must agree in batch, key and value also in length"
            )
        # A call repeated by checkpointing runs within autograd's graph task, unlike the first one.
        if cache is not None and torch._C._current_graph_task_id() != -1:
            raise ValueError(
                "cache in a call that is computed again in backward (activation checkpointing): "
                "its positions would be added twice; leave out the cache or the checkpointing"
            )
        positional = self.causal or self.window or self.rope or self.alibi or cache is not None
        if positional and key.shape[1] != query.shape[1]:
            raise ValueError(
                f"{query.shape[1]} queries and {key.shape[1]} keys: causal, window, rope, alibi "
                "and a cache speak of positions in one sequence and need as many of both"
            )
        past = None if cache is None else cache.past
        if past is not None and past[0].shape[0] != query.shape[0] * self.kv_heads:
            raise ValueError(
                f"the cache holds {past[0].shape[0] // self.kv_heads} sequences and the batch has "
                f"{query.shape[0]}: use a new Cache for a new batch"
            )

    def extra_repr(self) -> str:
        """List the settings, as torch prints them."""
        return (
            f"{self.embed_dim}, {self.num_heads}, kv_heads={self.kv_heads}, "
            f"correction={self.correction!r}, frequencies={self.frequencies}"
        )


def _in_force() -> list[float]:
    """Return the frequencies of the three sections that the config file sets, else 1."""
    return [config.value(f"attention.{name}", None, 1.0) for name in SECTIONS]


def _to(tensor: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Convert a tensor to autocast's dtype; leave bool masks and unsupported dtypes as is."""
    if tensor is None or not tensor.is_floating_point() or tensor.dtype == dtype:
        return tensor
    return tensor.to(dtype) if torch.is_autocast_enabled(tensor.device.type) else tensor


def _state_of(module: nn.MultiheadAttention) -> dict[str, torch.Tensor]:
    """Return the parameters of torch's module under the names that ``Attention`` uses."""
    names = ("q_proj", "k_proj", "v_proj")
    separate = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    packed = module.in_proj_weight
    weights = separate if packed is None else packed.chunk(3)
    state = {f"{name}.weight": weight for name, weight in zip(names, weights, strict=True)}
    if module.in_proj_bias is not None:
        biases = module.in_proj_bias.chunk(3)
        state |= {f"{name}.bias": bias for name, bias in zip(names, biases, strict=True)}
    for name, parameter in module.out_proj.named_parameters():
        state[f"out_proj.{name}"] = parameter
    return {name: tensor.detach() for name, tensor in state.items()}
