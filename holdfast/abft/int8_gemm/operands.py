"""Scale, zero point and bias of an int8 product, which are checked and stored twice."""

import math
import operator

import torch

from holdfast.abft.int8_gemm.encoding import PADDING
from holdfast.digest.tensors import tensor_digest

LARGEST = float(torch.finfo(torch.float32).max)
TINY = float(torch.finfo(torch.float32).tiny)


class Twice:
    """A tensor ``given``, [1] or [columns], and the copy ``padded`` that the kernels read.

    ``padded`` is [columns + padding]; a change of either is repaired from the other.
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
        """Return whether both copies still have the digests that they had at first."""
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
    """Copy values and append zeros, as the kernels may read beyond the last value."""
    return torch.nn.functional.pad(values, (0, PADDING)).contiguous()


def check_weight(weight: torch.Tensor) -> None:
    """Raise ValueError or TypeError if a weight is not int8 [outputs, inputs]."""
    _check_dense("weight", weight)
    if weight.dtype is not torch.int8:
        raise TypeError(f"weight is {weight.dtype}: quantise it to torch.int8")
    if weight.dim() != 2 or not weight.numel():
        raise ValueError(f"weight has shape {tuple(weight.shape)}: give [outputs, inputs]")


def check_scale(scale: torch.Tensor | float, columns: int, device: torch.device) -> torch.Tensor:
    """Return a weight's scale as fp32 [1] or [columns]; raise if it is not finite and positive."""
    flat = _entries(scale, "scale", columns).to(device, torch.float32)
    if not bool((flat.isfinite() & (flat > 0)).all()):
        raise ValueError(f"scale must be finite and positive, got {flat.tolist()[:8]}")
    return flat.clone()


def check_zero_point(
    zero_point: torch.Tensor | int, columns: int, device: torch.device
) -> torch.Tensor | None:
    """Return zero points as int32 [1] or [columns], None if all are 0; raise if not int8."""
    flat = _entries(zero_point, "zero_point", columns).to(device, torch.float64)
    if bool((flat != flat.round()).any()):
        raise TypeError(f"zero_point must be integers, got {flat.tolist()[:8]}")
    if bool((flat < -128).any()) or bool((flat > 127).any()):
        raise ValueError(f"zero_point must be from -128 to 127, got {flat.tolist()[:8]}")
    return flat.to(torch.int32) if bool(flat.any()) else None


def check_bias(
    bias: torch.Tensor | None, columns: int, device: torch.device
) -> torch.Tensor | None:
    """Return a layer's bias as fp32 [columns]; raise if it has another shape or is not finite."""
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
    return not a_scale >= TINY or a_scale * weight_scale < TINY


def check_call(
    a_scale: float,
    a_zero_point: int,
    out_scale: float,
    out_zero_point: int,
    *,
    weight_scale: float,
    accumulator: int,
) -> None:
    """Raise ValueError if scales are not finite and positive or zero points not from 0 to 255.

    ``out_scale`` is 0 if the output is not quantised, ``weight_scale`` the largest one of the
    weight, and ``accumulator`` the largest value that an accumulator may have.
    """
    step = a_scale * weight_scale
    if vanishes(a_scale, weight_scale) or math.isinf(a_scale):
        raise ValueError(
            f"a_scale = {a_scale} must be positive and, times the weight's {weight_scale:g}, a "
            "normal fp32 number: calibrate the activations"
        )
    if not step * accumulator <= LARGEST or a_scale > LARGEST:
        raise ValueError(
            f"a_scale = {a_scale} times the weight's {weight_scale:g} overflows fp32 in an "
            f"accumulator of {accumulator}: activations this large have no finite output to rely "
            "on; scale them down, or see their source"
        )
    if out_scale != 0 and not TINY <= out_scale <= LARGEST:
        raise ValueError(f"out_scale = {out_scale} must be finite and positive")
    for name, value in (("a_zero_point", a_zero_point), ("out_zero_point", out_zero_point)):
        if not 0 <= value <= 255:
            raise ValueError(f"{name} = {value} must be from 0 to 255, as uint8 has it")


def as_call(
    a_scale: float, a_zero_point: int, out_scale: float, out_zero_point: int
) -> tuple[float, int, float, int]:
    """Convert a call's scales and zero points to Python numbers; raise if they are not numbers."""
    scales = [number(*each) for each in (("a_scale", a_scale), ("out_scale", out_scale))]
    points = []
    for name, value in (("a_zero_point", a_zero_point), ("out_zero_point", out_zero_point)):
        try:
            points.append(operator.index(value))
        except TypeError:
            raise TypeError(f"{name} = {value!r} must be an integer") from None
    return scales[0], points[0], scales[1], points[1]


def number(name: str, value: float) -> float:
    """Convert a scale to a float; raise TypeError or ValueError if that is not possible."""
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
