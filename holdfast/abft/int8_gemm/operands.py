"""Scale, zero point and bias of an int8 product, validated and stored twice for repairs."""

import math
import operator

import torch

from holdfast.abft.int8_gemm.encoding import PADDING
from holdfast.digest.tensors import tensor_digest

_LARGEST = float(torch.finfo(torch.float32).max)
_TINY = float(torch.finfo(torch.float32).tiny)


class Twice:
    """A tensor of one entry, or of one for each column, beside the copy that the kernels read.

    ``given`` is [1] or [columns]; ``padded`` [columns + padding]. Either is made anew of the other.
    """

    def __init__(self, given: torch.Tensor, columns: int) -> None:
        self.given, self._columns = given, columns
        self.padded = self._from_given()
        self._digests = self._digest()

    def _from_given(self) -> torch.Tensor:
        return padded(self.given.expand(self._columns))

    def _digest(self) -> tuple[str, str]:
        return tensor_digest(self.given), tensor_digest(self.padded)

    def intact(self) -> bool:
        """Return whether both copies are as they were made."""
        return self._digest() == self._digests

    def mend(self) -> bool:
        """Repair the copy that changed from the other, in place; return False if both changed."""
        given, copied = (
            now == then for now, then in zip(self._digest(), self._digests, strict=True)
        )
        if not given and not copied:
            return False
        if not given:
            self.given.copy_(self.padded[: len(self.given)])
        if not copied:
            self.padded.copy_(self._from_given())
        return True


def padded(values: torch.Tensor) -> torch.Tensor:
    """Copy values and append zeros, which the kernels may read."""
    return torch.nn.functional.pad(values, (0, PADDING)).contiguous()


def check_weight(weight: torch.Tensor) -> None:
    """Check a weight, int8 [outputs, inputs].

    Raises:
        ValueError, TypeError: it is no such matrix.
    """
    _check_dense("weight", weight)
    if weight.dtype is not torch.int8:
        raise TypeError(f"weight is {weight.dtype}: quantise it to torch.int8")
    if weight.dim() != 2 or not weight.numel():
        raise ValueError(f"weight has shape {tuple(weight.shape)}: give [outputs, inputs]")


def check_scale(scale: torch.Tensor | float, columns: int, device: torch.device) -> torch.Tensor:
    """Check a weight's scale; return it as fp32 [1] or [columns].

    Raises:
        ValueError, TypeError: it does not fit, is no number, or is not finite and positive.
    """
    flat = _entries(scale, "scale", columns).to(device, torch.float32)
    if not bool((flat.isfinite() & (flat > 0)).all()):
        raise ValueError(f"scale must be finite and positive, got {flat.tolist()[:8]}")
    return flat.clone()


def check_zero_point(
    zero_point: torch.Tensor | int, columns: int, device: torch.device
) -> torch.Tensor | None:
    """Check a weight's zero point; return int32 [1] or [columns], None if all are 0.

    Raises:
        ValueError, TypeError: it does not fit, is no integer or outside int8.
    """
    flat = _entries(zero_point, "zero_point", columns).to(device, torch.float64)
    if bool((flat != flat.round()).any()):
        raise TypeError(f"zero_point must be integers, got {flat.tolist()[:8]}")
    if bool((flat < -128).any()) or bool((flat > 127).any()):
        raise ValueError(f"zero_point must be from -128 to 127, got {flat.tolist()[:8]}")
    return flat.to(torch.int32) if bool(flat.any()) else None


def check_bias(
    bias: torch.Tensor | None, columns: int, device: torch.device
) -> torch.Tensor | None:
    """Check a layer's bias; return it as fp32 [columns].

    Raises:
        ValueError, TypeError: The bias has a wrong shape, is not real, or is not finite.
    """
    if bias is None:
        return None
    _check_dense("bias", bias)
    if bias.shape != (columns,):
        raise ValueError(f"bias has shape {tuple(bias.shape)}: give [{columns}]")
    flat = bias.detach().to(device, torch.float32)
    if not bool(flat.isfinite().all()):
        raise ValueError("bias holds NaN or INF: load it again")
    return flat.clone()


def vanishes(a_scale: float, weight_scale: float) -> bool:
    """Return whether the product of the two scales underflows the normal fp32 numbers."""
    return not a_scale >= _TINY or a_scale * weight_scale < _TINY


def check_call(
    a_scale: float,
    a_zero_point: int,
    out_scale: float,
    out_zero_point: int,
    *,
    weight_scale: float,
    accumulator: int,
) -> None:
    """Check the scales and zero points of one call of an int8 product.

    Args:
        a_scale: of the activations.
        a_zero_point: of the activations, 0 to 255.
        out_scale: of the output; 0: it is not quantised.
        out_zero_point: of the output, 0 to 255.
        weight_scale: the largest of the weight.
        accumulator: the largest that K can make.

    Raises:
        ValueError: a scale is not finite and positive, or a zero point not from 0 to 255.
    """
    step = a_scale * weight_scale
    if vanishes(a_scale, weight_scale) or math.isinf(a_scale):
        raise ValueError(
            f"a_scale = {a_scale} must be positive and, times the weight's {weight_scale:g}, a "
            "normal fp32 number: calibrate the activations"
        )
    if not step * accumulator <= _LARGEST or a_scale > _LARGEST:
        raise ValueError(
            f"a_scale = {a_scale} times the weight's {weight_scale:g} overflows fp32 in an "
            f"accumulator of {accumulator}: activations this large have no finite output to rely "
            "on; scale them down, or see their source"
        )
    if out_scale != 0 and not _TINY <= out_scale <= _LARGEST:
        raise ValueError(f"out_scale = {out_scale} must be finite and positive")
    for name, value in (("a_zero_point", a_zero_point), ("out_zero_point", out_zero_point)):
        if not 0 <= value <= 255:
            raise ValueError(f"{name} = {value} must be from 0 to 255, as uint8 has it")


def as_call(
    a_scale: float, a_zero_point: int, out_scale: float, out_zero_point: int
) -> tuple[float, int, float, int]:
    """Convert a call's scales and zero points to Python numbers, as tensors may change later.

    Raises:
        TypeError: a scale is no number, or a zero point no integer.
        ValueError: a scale is beyond every number.
    """
    scales = [number(*each) for each in (("a_scale", a_scale), ("out_scale", out_scale))]
    points = []
    for name, value in (("a_zero_point", a_zero_point), ("out_zero_point", out_zero_point)):
        try:
            points.append(operator.index(value))
        except TypeError:
            raise TypeError(f"{name} = {value!r} must be an integer") from None
    return scales[0], points[0], scales[1], points[1]


def number(name: str, value: float) -> float:
    """Convert a scale to a plain number.

    Raises:
        TypeError: It is not a number. ValueError: It is too large for a float.
    """
    try:
        return float(value)
    except (TypeError, RuntimeError):
        raise TypeError(f"{name} = {value!r} must be a number") from None
    except (OverflowError, ValueError):
        raise ValueError(f"{name} = {value!r} must be a number that fp32 holds") from None


def _check_dense(name: str, tensor: torch.Tensor) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta:
        raise TypeError(f"{name} must be a dense tensor, got {tensor.layout} on {tensor.device}")
    if tensor.is_complex():
        raise TypeError(f"{name} must be real, got {tensor.dtype}")


def _entries(values: torch.Tensor | float, name: str, columns: int) -> torch.Tensor:
    try:
        given = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name} = {values!r}: give a number or a tensor") from None
    _check_dense(name, given)
    if given.numel() not in (1, columns):
        raise ValueError(
            f"{name} has {given.numel()} elements: give one, or one for each of the "
            f"{columns} outputs"
        )
    return given.detach().reshape(-1)
