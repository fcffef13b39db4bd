"""A linear layer with 8-bit integer weights and activations, whose products are verified."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import nn

from holdfast import sites
from holdfast.abft.gemm.modules import identifier
from holdfast.abft.int8_gemm.op import OP, OUTPUTS, int8_linear
from holdfast.abft.int8_gemm.quantise import (
    quantise_on_device,
    quantise_on_host,
    report_refused,
)
from holdfast.abft.int8_gemm.suspects import scrub
from holdfast.abft.int8_gemm.weights import Int8Weights
from holdfast.digest.tensors import state_digest
from holdfast.errors import ConfigError
from holdfast.nn.int8_conversion import fused_relu, quantisation, quantise_weight
from holdfast.nn.stored import StoredModule, unsupported

State = dict[str, torch.Tensor]
_STATE = ("weight", "scale", "zero_point", "relu", "input_scale", "input_zero_point")


class Int8Linear(StoredModule):
    """Linear layer ``x Wᵀ + b`` in 8-bit integers, with every output row verified exactly.

    Activations are quantised to uint8: per tensor and call by their range (dynamic), or by
    ``input_scale`` and ``input_zero_point`` (static). For inference: the output has no gradient.

    Args:
        in_features, out_features, bias: As ``nn.Linear``; the weight is random until it is loaded.
        per_channel: Gives each output a weight scale of its own; otherwise all share one.
        encoding: Kind of weight checksum, ``digits`` or ``mod127``, see ``Int8Weights``.
        input_scale, input_zero_point: Static quantisation of the input; both or neither.

    ``verify = False`` multiplies without any check. The state dict holds weight, scale, zero point,
    bias if there is one, a flag for a fused ReLU, and the static quantisation (empty if dynamic).
    The buffers are the memory that products read: the packed weight and its checksums. On ``meta``,
    and after ``to_empty``, they are the tensors of the state dict, and wait to be loaded. Casts
    (``half``) leave them as they are; ``share_memory`` does not share them.

    Guarantees, errors and what is not covered are those of ``int8_linear``. Also not covered is the
    quantisation of the input. Scales, zero points and bias are checked only by ``scrub``, and so
    are, until a product is suspect, ``weighted_checks`` and ``column_sums``, which repair weights.

    Raises:
        ConfigError: There are more inputs or outputs than exact checks allow; states the limit.
        ValueError: The static quantisation is incomplete or out of range.
    """

    verify = True
    _weights: Int8Weights | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        per_channel: bool = True,
        encoding: str = "digits",
        input_scale: float | None = None,
        input_zero_point: int | None = None,
    ) -> None:
        super().__init__()
        if in_features < 1 or out_features < 1:
            raise ValueError(f"{in_features} inputs, {out_features} outputs: at least one of each")
        linear = nn.Linear(in_features, out_features, bias=bias)
        self._quantise(linear, per_channel, encoding, input_scale, input_zero_point)

    def _quantise(
        self,
        linear: nn.Module,
        per_channel: bool,
        encoding: str,
        input_scale: float | None,
        input_zero_point: int | None,
    ) -> None:
        if not isinstance(linear, nn.Linear):
            remedy = "from_quantized takes torch's quantised layers; other modules stay as they are"
            raise unsupported("from_float", "torch.nn.Linear", linear, remedy)
        self.encoding = encoding
        weight, scale = quantise_weight(linear.weight, per_channel=per_channel)
        if weight.is_meta:
            static = input_scale, input_zero_point
            _check_static(*static)
            self._await(_state_of(weight, scale, None, linear.bias, False, static))
        else:
            weights = Int8Weights(weight, scale, bias=linear.bias, encoding=encoding)
            self._become(weights, input_scale, input_zero_point)

    def _become(
        self, weights: Int8Weights, input_scale: float | None, input_zero_point: int | None
    ) -> None:
        _check_static(input_scale, input_zero_point)
        if input_scale is not None and input_zero_point is not None:
            weights.scales(input_scale, input_zero_point, 0.0, 0)  # raises if invalid
        self._buffers.clear()
        self._weights, self.encoding = weights, weights.encoding
        self.input_scale, self.input_zero_point = input_scale, input_zero_point
        self.in_features, self.out_features = weights.inner, weights.columns
        for name, part in weights.parts().items():
            self.register_buffer(name, part, persistent=False)
        self._connect()

    def _await(self, state: State) -> None:
        """Hold the tensors of a state dict that have no values yet."""
        self._buffers.clear()
        self._weights, self.input_scale, self.input_zero_point = None, None, None
        self.out_features, self.in_features = state["weight"].shape
        self._buffers.update(state)
        self._non_persistent_buffers_set.clear()

    def _connect(self) -> None:
        if self._weights is not None:
            self._weights.source = self._source

    @property
    def weights(self) -> Int8Weights:
        """The packed weight with its checksums.

        Raises:
            ConfigError: The layer has no values yet.
        """
        if self._weights is None:
            raise ConfigError(
                f"this Int8Linear has no values yet, on {self._device}: to_empty() gives it memory "
                "on a device and load_state_dict() its values (with assign=True both)"
            )
        return self._weights

    @property
    def _device(self) -> torch.device:
        return next(iter(self.buffers())).device

    @classmethod
    def of(
        cls,
        weights: Int8Weights,
        *,
        input_scale: float | None = None,
        input_zero_point: int | None = None,
    ) -> Self:
        """Make a layer from weights that are packed already."""
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made._become(weights, input_scale, input_zero_point)
        return made

    @classmethod
    def from_float(
        cls,
        linear: nn.Linear,
        *,
        per_channel: bool = True,
        encoding: str = "digits",
        input_scale: float | None = None,
        input_zero_point: int | None = None,
    ) -> Self:
        """Quantise an ``nn.Linear`` with ``scale = max |W| / 127``, per output or per weight.

        Raises:
            TypeError: It is not an ``nn.Linear``. ValueError: Its weight holds NaN or INF.
        """
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made._quantise(linear, per_channel, encoding, input_scale, input_zero_point)
        return made.train(linear.training)

    @classmethod
    def from_quantized(
        cls,
        module: nn.Module,
        *,
        encoding: str = "digits",
        input_scale: float | None = None,
        input_zero_point: int | None = None,
    ) -> Self:
        """Convert a quantised linear layer of torch, whose output becomes floating point.

        It may be static or dynamic: ``torch.ao.nn.quantized.Linear``, ``.dynamic.Linear``, or
        ``LinearReLU`` of ``torch.ao.nn.intrinsic.quantized``. For a static layer pass the scale and
        zero point of its input.

        Raises:
            TypeError: The module is none of these (another fused activation, for example), or its
                weight is not int8.
        """
        relu = fused_relu(module)
        weight, bias = module.weight(), module.bias()  # type: ignore[operator]
        if not weight.is_quantized or weight.dtype is not torch.qint8:
            raise TypeError(f"the weight is {weight.dtype}: only torch.qint8 is verified")
        weights = Int8Weights(
            weight.int_repr(), *quantisation(weight), bias=bias, relu=relu, encoding=encoding
        )
        return cls.of(weights, input_scale=input_scale, input_zero_point=input_zero_point)

    def forward(self, input: torch.Tensor, slot: torch.Tensor | None = None) -> torch.Tensor:
        """Compute [.., in_features] → [.., out_features] in the input's dtype.

        On CUDA with a ``slot`` (see ``int8_linear``) the host does not wait for the device; for an
        input that would be refused, the slot becomes the bits of INF and the output NaN or wrong.

        Raises:
            ValueError: The input's shape is wrong, or it holds NaN or INF. TypeError: Its dtype is.
        """
        self.check_eager()
        if input.dtype not in (*OUTPUTS, torch.float16):
            raise TypeError(f"input is {input.dtype}: give float32, bfloat16 or float16")
        if not input.dim() or input.shape[-1] != self.in_features:
            raise ValueError(f"input has shape {tuple(input.shape)}: give [.., {self.in_features}]")
        weights = self.weights
        rows = input.detach().reshape(-1, self.in_features).float()
        quantise = quantise_on_device if weights.deferred else quantise_on_host
        a, scale, zero_point, refused = quantise(rows, weights, self._static)
        module = identifier(self)
        sites.module_names.setdefault(module, type(self).__name__)
        dtype = input.dtype if input.dtype in OUTPUTS else torch.float32
        output = int8_linear(
            a.contiguous(),
            weights,
            a_scale=scale,
            a_zero_point=zero_point,
            dtype=dtype,
            verify=self.verify,
            site=(module, OP, 0, 0),
            slot=slot,
        )
        if refused is not None:
            report_refused(refused, slot)
        return output.to(input.dtype).reshape(*input.shape[:-1], self.out_features)

    def scrub(self) -> bool:
        """Compare the layer's stored data with their fingerprints; repair and record changes.

        The data are packed weight, checksums, scale, zero point, bias, and scales cached from the
        latest call; the checks of ``forward`` cover only packed weight and ``checks``. Call it when
        idle.

        Returns:
            True if any stored data had changed.

        Raises:
            UncorrectableFault: A change cannot be repaired (within a ``Guard``, its step fails).
        """
        module = identifier(self)
        sites.module_names.setdefault(module, type(self).__name__)
        return scrub(self.weights, (module, OP, 0, 0))

    @property
    def _static(self) -> tuple[float, int] | None:
        if self.input_scale is None or self.input_zero_point is None:
            return None
        return self.input_scale, self.input_zero_point

    def extra_repr(self) -> str:
        """List the settings, as torch prints them."""
        static = self.input_scale is not None
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"encoding={self.encoding!r}, {'static' if static else 'dynamic'}"
        )

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.update({prefix + name: value for name, value in self._state().items()})

    def _state(self) -> State:
        weights = self._weights
        if weights is None:
            return {name: each for name, each in self._buffers.items() if each is not None}
        static = self.input_scale, self.input_zero_point
        weight = weights.weight()  # also repairs the other data
        return _state_of(
            weight, weights.scale, weights.zero_point, weights.bias, weights.relu, static
        )

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, local: dict[str, Any], *rest: Any
    ) -> None:
        strict, missing, unexpected, errors = rest
        biased = "bias" in self._buffers
        names = (*_STATE, "bias") if biased else _STATE
        lacking = [prefix + name for name in names if prefix + name not in state_dict]
        known = {prefix + name for name in names}
        more = [key for key in state_dict if key.startswith(prefix) and key not in known]
        missing.extend(lacking)
        unexpected.extend(more)
        if (lacking and (strict or self._weights is None)) or (strict and more):
            return
        state = {name: state_dict[prefix + name] for name in names if prefix + name in state_dict}
        assign = local.get("assign_to_params_buffers", False) and "weight" in state
        device = state["weight"].device if assign else self._device
        try:
            self._load(state if not lacking else self._state() | state, device)
        except (TypeError, ValueError, NotImplementedError) as error:
            expected = (self.out_features, self.in_features)
            errors.append(f"{prefix}weight: {error}; expected {expected}")

    def _load(self, state: State, device: torch.device) -> None:
        """Take over the values of a state dict, on a device."""
        weight = state["weight"].to(device)
        if tuple(weight.shape) != (self.out_features, self.in_features):
            raise ValueError(f"weight has shape {tuple(weight.shape)}")
        if weight.is_meta:
            if not state["weight"].is_meta:
                warnings.warn(
                    "a layer on meta keeps no values: load_state_dict(assign=True) or to_empty()",
                    stacklevel=2,
                )
            self._await({name: each.to(device) for name, each in state.items()})
            return
        scale, zero_point = state["input_scale"].tolist(), state["input_zero_point"].tolist()
        weights = Int8Weights(
            weight,
            state["scale"],
            state["zero_point"],
            bias=state.get("bias"),
            relu=bool(state["relu"]),
            encoding=self.encoding,
        )
        self._become(weights, scale[0] if scale else None, zero_point[0] if zero_point else None)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Move the values as torch moves buffers; what was moved is compared with what it was."""
        probe = torch.empty(1, dtype=torch.int32, device=self._device)
        if fn(probe) is probe:
            return self
        state = self._state()
        # As integers, which torch does not cast.
        moved = {name: fn(_integers(each)).view(each.dtype) for name, each in state.items()}
        if self._weights is None or moved["weight"].is_meta or not _same(state, moved):
            self._await(moved)
        else:
            self._load(moved, moved["weight"].device)
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Return the state in which packed weights occur once; see ``StoredModule``."""
        state = super().__getstate__()
        return state if self._weights is None else state | {"_buffers": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self._weights is not None:
            self._become(self._weights, self.input_scale, self.input_zero_point)


def _check_static(input_scale: float | None, input_zero_point: int | None) -> None:
    if (input_scale is None) != (input_zero_point is None):
        raise ValueError(
            f"input_scale = {input_scale}, input_zero_point = {input_zero_point}: give both, or "
            "neither for dynamic quantisation"
        )


def _state_of(
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    bias: torch.Tensor | None,
    relu: bool,
    static: tuple[float | None, int | None],
) -> State:
    input_scale, input_zero_point = ([] if each is None else [each] for each in static)
    device = weight.device
    state = {
        "weight": weight,
        "scale": scale.clone(),
        "zero_point": scale.new_zeros(1, dtype=torch.int32)
        if zero_point is None
        else zero_point.clone(),
        "relu": torch.tensor(relu, device=device),
        "input_scale": torch.tensor(input_scale, dtype=torch.float64, device=device),
        "input_zero_point": torch.tensor(input_zero_point, dtype=torch.int64, device=device),
    }
    return state if bias is None else state | {"bias": bias.detach().float().clone()}


def _integers(tensor: torch.Tensor) -> torch.Tensor:
    """View floating-point elements as integers."""
    kinds = {torch.float32: torch.int32, torch.float64: torch.int64}
    return tensor.view(kinds.get(tensor.dtype, tensor.dtype))


def _same(left: State, right: State) -> bool:
    """Return whether two states have the same bits."""
    return state_digest(left) == state_digest(right)
