"""A linear layer with 8-bit integer weights and activations, whose products are verified."""

import math
from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import nn

from holdfast import sites
from holdfast.abft.gemm.modules import identifier
from holdfast.abft.int8_gemm.op import OP, OUTPUTS, int8_linear
from holdfast.abft.int8_gemm.operands import vanishes
from holdfast.abft.int8_gemm.suspects import scrub
from holdfast.abft.int8_gemm.weights import Int8Weights

LARGEST = 255
_STATE = ("weight", "scale", "zero_point", "relu", "input_scale", "input_zero_point")


class Int8Linear(nn.Module):
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

    Guarantees, errors and what is not covered are those of ``int8_linear``. Also not covered is the
    quantisation of the input. Scales, zero points and bias are checked only by ``scrub``.

    Raises:
        ConfigError: There are more inputs or outputs than exact checks allow; states the limit.
        ValueError: The static quantisation is incomplete or out of range.
    """

    verify = True

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
        weight, scale = quantise_weight(linear.weight, per_channel=per_channel)
        self._become(
            Int8Weights(weight, scale, bias=linear.bias, encoding=encoding),
            input_scale,
            input_zero_point,
        )

    def _become(
        self, weights: Int8Weights, input_scale: float | None, input_zero_point: int | None
    ) -> None:
        if (input_scale is None) != (input_zero_point is None):
            raise ValueError(
                f"input_scale = {input_scale}, input_zero_point = {input_zero_point}: give both, "
                "or neither for dynamic quantisation"
            )
        self.weights = weights
        self.input_scale, self.input_zero_point = input_scale, input_zero_point
        if input_scale is not None and input_zero_point is not None:
            weights.scales(input_scale, input_zero_point, 0.0, 0)  # raises if invalid

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
        if not isinstance(linear, nn.Linear):
            raise TypeError(f"from_float takes nn.Linear, not {type(linear).__name__}")
        weight, scale = quantise_weight(linear.weight, per_channel=per_channel)
        weights = Int8Weights(weight, scale, bias=linear.bias, encoding=encoding)
        static = {"input_scale": input_scale, "input_zero_point": input_zero_point}
        return cls.of(weights, **static).train(linear.training)  # type: ignore[arg-type]

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
        relu = _fused_relu(module)
        weight, bias = module.weight(), module.bias()  # type: ignore[operator]
        if not weight.is_quantized or weight.dtype is not torch.qint8:
            raise TypeError(f"the weight is {weight.dtype}: only torch.qint8 is verified")
        weights = Int8Weights(
            weight.int_repr(), *_quantisation(weight), bias=bias, relu=relu, encoding=encoding
        )
        return cls.of(weights, input_scale=input_scale, input_zero_point=input_zero_point)

    @property
    def in_features(self) -> int:
        """Number of input features, K."""
        return self.weights.inner

    @property
    def out_features(self) -> int:
        """Number of output features, N."""
        return self.weights.columns

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Compute [.., in_features] → [.., out_features] in the input's dtype.

        Raises:
            ValueError: The input's shape is wrong, or it holds NaN or INF. TypeError: Its dtype is.
        """
        if input.dtype not in (*OUTPUTS, torch.float16):
            raise TypeError(f"input is {input.dtype}: give float32, bfloat16 or float16")
        if not input.dim() or input.shape[-1] != self.in_features:
            raise ValueError(f"input has shape {tuple(input.shape)}: give [.., {self.in_features}]")
        rows = input.detach().reshape(-1, self.in_features).float()
        scale, zero_point = self._input_scale(rows)
        a = (rows * (1.0 / scale)).round_().add_(zero_point).clamp_(0, LARGEST).to(torch.uint8)
        module = identifier(self)
        sites.module_names.setdefault(module, type(self).__name__)
        dtype = input.dtype if input.dtype in OUTPUTS else torch.float32
        output = int8_linear(
            a.contiguous(),
            self.weights,
            a_scale=scale,
            a_zero_point=zero_point,
            dtype=dtype,
            verify=self.verify,
            site=(module, OP, 0, 0),
        )
        return output.to(input.dtype).reshape(*input.shape[:-1], self.out_features)

    def scrub(self) -> bool:
        """Compare the layer's stored data with their fingerprints; repair and record changes.

        The data are packed weight, checksums, scale, zero point, bias, and scales cached from the
        latest call; the checks of ``forward`` cover only the first two. Call it when idle.

        Returns:
            True if any stored data had changed.

        Raises:
            UncorrectableFault: A change cannot be repaired (within a ``Guard``, its step fails).
        """
        module = identifier(self)
        sites.module_names.setdefault(module, type(self).__name__)
        return scrub(self.weights, (module, OP, 0, 0))

    def _input_scale(self, rows: torch.Tensor) -> tuple[float, int]:
        low, high = (float(x) for x in rows.aminmax()) if rows.numel() else (0.0, 0.0)
        if not (math.isfinite(low) and math.isfinite(high)):
            raise ValueError("the input holds NaN or INF: see its source")
        if self.input_scale is not None and self.input_zero_point is not None:
            return self.input_scale, self.input_zero_point
        low, high = min(low, 0.0), max(high, 0.0)
        scale = (high - low) / LARGEST
        if vanishes(scale, float(self.weights.scale.max())):
            return 1.0, 0
        return scale, min(LARGEST, max(0, round(-low / scale)))

    def extra_repr(self) -> str:
        """List the settings, as torch prints them."""
        static = self.input_scale is not None
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"encoding={self.weights.encoding!r}, {'static' if static else 'dynamic'}"
        )

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, value in self._state().items():
            destination[prefix + name] = value

    def _state(self) -> dict[str, torch.Tensor]:
        weights = self.weights
        weight = weights.weight()  # also repairs the other data
        zero = weights.zero_point
        scale, zero_point = self.input_scale, self.input_zero_point
        state = {
            "weight": weight,
            "scale": weights.scale.clone(),
            "zero_point": weight.new_zeros(1, dtype=torch.int32) if zero is None else zero.clone(),
            "relu": torch.tensor(weights.relu),
            "input_scale": torch.tensor([] if scale is None else [scale], dtype=torch.float64),
            "input_zero_point": torch.tensor(
                [] if zero_point is None else [zero_point], dtype=torch.int64
            ),
        }
        return state if weights.bias is None else state | {"bias": weights.bias.clone()}

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        _, strict, missing, unexpected, errors = rest
        names = _STATE if self.weights.bias is None else (*_STATE, "bias")
        lacking = [prefix + name for name in names if prefix + name not in state_dict]
        known = {prefix + name for name in names}
        more = [key for key in state_dict if key.startswith(prefix) and key not in known]
        missing.extend(lacking)
        unexpected.extend(more)
        if strict and (lacking or more):
            return
        found = {name: state_dict[prefix + name] for name in names if prefix + name in state_dict}
        try:
            self._load(found if len(found) == len(names) else self._state() | found)
        except (TypeError, ValueError) as error:
            expected = (self.weights.columns, self.weights.inner)
            errors.append(f"{prefix}weight: {error}; expected {expected}")

    def _load(self, state: dict[str, torch.Tensor]) -> None:
        old, weight = self.weights, state["weight"]
        if tuple(weight.shape) != (old.columns, old.inner):
            raise ValueError(f"weight has shape {tuple(weight.shape)}")
        scale, zero_point = state["input_scale"].tolist(), state["input_zero_point"].tolist()
        weights = Int8Weights(
            weight.to(old.device),
            state["scale"],
            state["zero_point"],
            bias=state.get("bias"),
            relu=bool(state["relu"]),
            encoding=old.encoding,
        )
        self._become(weights, scale[0] if scale else None, zero_point[0] if zero_point else None)


def quantise_weight(
    weight: torch.Tensor, *, per_channel: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a weight [N, K] symmetrically; return ``rint(W / scale)`` and the scale [N] or [1].

    Raises:
        ValueError: The weight holds NaN or INF.
    """
    wide = weight.detach().float()
    if not bool(wide.isfinite().all()):
        raise ValueError("the weight holds NaN or INF: load it again")
    largest = wide.abs().amax(1) if per_channel else wide.abs().max().reshape(1)
    scale = torch.where(largest > 0, largest / 127, torch.ones_like(largest))
    scale = scale.clamp_min(torch.finfo(torch.float32).tiny)
    return (wide / scale[:, None]).round().clamp_(-127, 127).to(torch.int8), scale


def _quantisation(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scale and zero point of a quantised weight tensor of torch."""
    if weight.qscheme() in (torch.per_channel_affine, torch.per_channel_symmetric):
        if weight.q_per_channel_axis() != 0:
            raise TypeError("the weight has scales by input: only those by output are verified")
        return weight.q_per_channel_scales(), weight.q_per_channel_zero_points()
    return torch.tensor(weight.q_scale()), torch.tensor(weight.q_zero_point())


def _fused_relu(module: nn.Module) -> bool:
    """Return whether a quantised layer of torch clamps its output at 0.

    Raises:
        TypeError: The module is not one of torch's quantised linear layers.
    """
    from torch.ao.nn import quantized
    from torch.ao.nn.intrinsic import quantized as fused

    plain = (quantized.Linear, quantized.dynamic.Linear)
    clamped = (fused.LinearReLU, fused.dynamic.LinearReLU)
    if type(module) not in (*plain, *clamped):
        kind = f"{type(module).__module__}.{type(module).__name__}"
        raise TypeError(
            "from_quantized takes torch.ao.nn.quantized.Linear or its dynamic sibling, each plain "
            f"or as LinearReLU, not {kind}"
        )
    return type(module) in clamped
