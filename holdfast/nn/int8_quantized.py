"""A verified linear layer whose input and output are torch's quantised tensors (quint8)."""

from typing import Any, Self

import torch
from torch import nn

from holdfast import sites
from holdfast.abft.gemm.modules import identifier
from holdfast.abft.int8_gemm.op import OP, int8_linear
from holdfast.abft.int8_gemm.quantise import LEVELS
from holdfast.abft.source import Source
from holdfast.nn.eager import EagerModule
from holdfast.nn.int8_linear import Int8Linear


class Int8QuantizedLinear(EagerModule):
    """Verified replacement of ``torch.ao.nn.quantized.Linear``, with quint8 input and output.

    Scale and zero point of the input are read from the quantised tensor. The verified result y is
    quantised to ``rint(y / scale) + zero_point``.

    Args:
        linear: The verified layer that computes y.
        scale, zero_point: Quantisation of the output.

    Guarantees, errors and what is not covered are those of ``int8_linear``. Outputs may differ from
    those of torch's layer by one quantisation step, as that layer also rounds its bias.

    Raises:
        ValueError: The quantisation of the output is out of range.
    """

    def __init__(self, linear: Int8Linear, scale: float, zero_point: int) -> None:
        super().__init__()
        self.linear = linear
        self._requantise(scale, zero_point)

    def _requantise(self, scale: float, zero_point: int) -> None:
        if not 0 < scale < float("inf") or not 0 <= zero_point <= LEVELS:
            raise ValueError(
                f"scale = {scale}, zero_point = {zero_point} of the output: give a positive number "
                f"and one from 0 to {LEVELS}"
            )
        self.scale, self.zero_point = float(scale), int(zero_point)

    @classmethod
    def from_quantized(cls, module: nn.Module, *, encoding: str = "digits") -> Self:
        """Convert a statically quantised linear layer of torch, plain or with ReLU fused.

        Raises:
            TypeError: The module is not such a layer, or its weight is not int8.
        """
        linear = Int8Linear.from_quantized(module, encoding=encoding)
        if isinstance(module, torch.ao.nn.quantized.dynamic.Linear):
            raise TypeError(
                f"{type(module).__name__} is dynamic, its output has no scale: "
                "Int8Linear.from_quantized takes it"
            )
        scale, zero_point = module.scale, module.zero_point
        return cls(linear, scale, zero_point).train(module.training)  # type: ignore[arg-type]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Compute quint8 [.., in_features] → quint8 [.., out_features].

        Raises:
            TypeError: The input is not quint8 with one scale. ValueError: Its shape is wrong.
        """
        self.check_eager()
        if input.dtype is not torch.quint8 or input.qscheme() is not torch.per_tensor_affine:
            raise TypeError(f"input is {input.dtype}: give torch.quint8, quantised per tensor")
        features = self.linear.in_features
        if not input.dim() or input.shape[-1] != features:
            raise ValueError(f"input has shape {tuple(input.shape)}: give [.., {features}]")
        module = identifier(self.linear)
        sites.module_names.setdefault(module, type(self.linear).__name__)
        codes = int8_linear(
            input.int_repr().reshape(-1, features).contiguous(),
            self.linear.weights,
            a_scale=input.q_scale(),
            a_zero_point=input.q_zero_point(),
            out_scale=self.scale,
            out_zero_point=self.zero_point,
            verify=self.linear.verify,
            site=(module, OP, 0, 0),
        )
        output: torch.Tensor = torch._make_per_tensor_quantized_tensor(
            codes.reshape(*input.shape[:-1], codes.shape[1]), self.scale, self.zero_point
        )
        return output

    def register_source(self, source: Source | None) -> None:
        """Set the function that returns an output's weights, see ``Int8Linear.register_source``."""
        self.linear.register_source(source)

    def scrub(self) -> bool:
        """Check the stored data of the layer against fingerprints, see ``Int8Linear.scrub``."""
        return self.linear.scrub()

    def get_extra_state(self) -> dict[str, Any]:
        """Return the quantisation of the output, for the state dict."""
        return {"scale": self.scale, "zero_point": self.zero_point}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Take over the quantisation of the output from a state dict."""
        self._requantise(state["scale"], state["zero_point"])

    def extra_repr(self) -> str:
        """List the settings, as torch prints them."""
        return f"scale={self.scale:g}, zero_point={self.zero_point}"
