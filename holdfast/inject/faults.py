"""The effect of faults on tensor elements, and writing an element behind autograd's back.

Bits are counted from 0, the least significant. Where a function takes ``bits``, it is an integer
tensor that broadcasts to the values. Values are fp64, fp32, fp16 or bf16 tensors of any shape and
are never changed: the result is a new tensor outside autograd. Another dtype, or a bit that it
lacks, raises ValueError.
"""

from math import inf, isfinite, nan

import torch

from holdfast.inject.schedule import Fault

_INTEGER = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}
_EXPONENT_BITS = {torch.float64: 11, torch.float32: 8, torch.float16: 5, torch.bfloat16: 8}


def bit_width(dtype: torch.dtype) -> int:
    """Return the number of bits of a floating-point element: 64, 32 or 16."""
    if dtype not in _INTEGER:
        valid = ", ".join(str(known) for known in _INTEGER)
        raise ValueError(f"cannot inject bit faults into {dtype}; use one of {valid}")
    return dtype.itemsize * 8


def bit_field(dtype: torch.dtype, bit: int) -> str:
    """Return the field that a bit belongs to: ``"sign"``, ``"exponent"`` or ``"mantissa"``."""
    sign = _checked_bit(dtype, bit) - 1
    if bit == sign:
        return "sign"
    return "exponent" if bit >= sign - _EXPONENT_BITS[dtype] else "mantissa"


def mantissa_bits(dtype: torch.dtype) -> int:
    """Return the number of stored mantissa bits: 52, 23, 10 or 7."""
    return bit_width(dtype) - 1 - _EXPONENT_BITS[dtype]


def flip_bit(value: torch.Tensor, bit: int) -> torch.Tensor:
    """Invert one bit of every element, by XOR on the integer with the same bits."""
    _checked_bit(value.dtype, bit)
    return flip_bits(value, torch.tensor(bit, device=value.device))


def flip_bits(value: torch.Tensor, bits: torch.Tensor, *, adjacent: int = 1) -> torch.Tensor:
    """Invert ``adjacent`` bits of every element, from its entry in ``bits`` upwards."""
    mask = _masks(value.dtype, bits, (1 << adjacent) - 1)
    return (_pattern(value) ^ mask).view(value.dtype)


def flip_integer(value: torch.Tensor, bit: int) -> torch.Tensor:
    """Invert one bit of every element of an int8, uint8 or int32 tensor, as ``flip_bit`` does."""
    if value.dtype not in (torch.int8, torch.uint8, torch.int32):
        raise ValueError(f"cannot flip bits of {value.dtype}; give int8, uint8 or int32")
    width = value.dtype.itemsize * 8
    if not 0 <= bit < width:
        raise ValueError(f"bit {bit} is out of range for {value.dtype}; valid: 0 to {width - 1}")
    return value.detach() ^ torch.tensor(1 << bit, dtype=torch.int64).to(value.dtype)


def has_bit(value: torch.Tensor, bit: int) -> torch.Tensor:
    """Return which elements have a bit set, a bool tensor of the same shape."""
    _checked_bit(value.dtype, bit)
    return (_pattern(value) >> bit) & 1 == 1


def hold_bits(value: torch.Tensor, bits: torch.Tensor, *, high: bool) -> torch.Tensor:
    """Set one bit of every element to 1 (``high``) or to 0, as a stuck line does."""
    mask, pattern = _masks(value.dtype, bits), _pattern(value)
    return (pattern | mask if high else pattern & ~mask).view(value.dtype)


def carry_error(value: torch.Tensor, bits: torch.Tensor, *, missing: bool) -> torch.Tensor:
    """Change every element as an adder does that loses a carry into a bit, or adds a false one.

    The adder works on the magnitude as an integer: ±2^bit, which can reach the exponent. The sign
    is kept, and the magnitude stays between zero and the largest bit pattern.
    """
    sign = _masks(value.dtype, torch.tensor(bit_width(value.dtype) - 1))
    pattern = _pattern(value)
    magnitude, step = pattern & ~sign, _masks(value.dtype, bits)
    if missing:
        magnitude = (magnitude - step).clamp_min(0)
    else:
        magnitude += step.clamp_max(~sign - magnitude)
    return (magnitude | (pattern & sign)).view(value.dtype)


def random_patterns(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return a tensor of the same dtype and shape whose bits are all drawn at random."""
    integer = torch.iinfo(_INTEGER[value.dtype])
    drawn = torch.randint(
        integer.min, integer.max, value.shape, generator=generator, dtype=_INTEGER[value.dtype]
    )
    return drawn.view(value.dtype)


def special_value(value: torch.Tensor, kind: str) -> torch.Tensor:
    """Replace every element by ``"inf"``, ``"nan"`` or ``"near_inf"`` with its own sign.

    near-INF is a quarter of the largest finite number of the dtype.
    """
    bit_width(value.dtype)
    special = {"inf": inf, "nan": nan, "near_inf": torch.finfo(value.dtype).max / 4}
    if kind not in special:
        raise ValueError(f"{kind!r} is no special value; use one of {', '.join(special)}")
    filled = torch.full_like(value.detach(), special[kind])
    return torch.copysign(filled, value.detach())


def corrupted(value: torch.Tensor, fault: Fault) -> torch.Tensor:
    """Apply a fault to every element of a copy.

    ``bitflip`` inverts ``fault.bit``, also of int32 and int8, the accumulators and the packed
    weight of an int8 product. ``inf`` gives infinity and ``near_inf`` a quarter of the largest
    finite number, both with the element's sign; ``nan`` gives NaN; ``value`` gives ``fault.value``
    rounded to the dtype.

    Raises:
        ValueError: The dtype has no such bit, cannot hold the value, or the fault changes no data.
    """
    if fault.kind == "bitflip" and fault.bit is not None:
        flip = flip_bit if value.is_floating_point() else flip_integer
        return flip(value, fault.bit)
    if fault.kind == "value" and fault.value is not None:
        return torch.full_like(value.detach(), _representable(fault.value, value.dtype))
    if fault.kind == "kill_trainer":
        raise ValueError(f"a fault of kind {fault.kind!r} changes no data")
    return special_value(value, fault.kind)


def write_element(
    tensor: torch.Tensor, index: tuple[int, ...], new: torch.Tensor | float
) -> tuple[float, float]:
    """Overwrite one element in memory behind autograd's back, as failing hardware does.

    Args:
        tensor: Tensor of any strides; it may be a leaf that requires grad.
        index: One non-negative integer for each dimension.
        new: A one-element tensor of the same dtype, which is written bit for bit, or a number.

    Returns:
        The original and the corrupted value.

    Guarantees: ``tensor._version`` does not change, so autograd cannot notice. Not covered:
    elements that share the memory, as in an expanded tensor, change with it.

    Raises:
        ValueError: The tensor is not strided, the index is outside of it, or ``new`` does not fit.
    """
    if tensor.layout is not torch.strided:
        raise ValueError(f"cannot write into a {tensor.layout} tensor; give a strided one")
    shape = tuple(tensor.shape)
    if len(index) != len(shape) or not all(
        0 <= position < size for position, size in zip(index, shape, strict=False)
    ):
        raise ValueError(f"index {list(index)} is outside a tensor of shape {list(shape)}")
    # .data shares the memory but has a version counter of its own; .detach() shares both.
    element = tensor.data[index]
    true = float(element)
    with torch.inference_mode(tensor.is_inference()):
        element.copy_(_as_element(new, tensor))
    return true, float(element)


def _as_element(new: torch.Tensor | float, tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(new, torch.Tensor):
        new = torch.tensor(_representable(new, tensor.dtype), dtype=tensor.dtype)
    if new.dtype != tensor.dtype or new.numel() != 1:
        raise ValueError(
            f"cannot write {new.numel()} element(s) of {new.dtype} as one element of {tensor.dtype}"
        )
    return new.detach().reshape(())


def _pattern(value: torch.Tensor) -> torch.Tensor:
    bit_width(value.dtype)
    return value.detach().view(_INTEGER[value.dtype])


def _masks(dtype: torch.dtype, bits: torch.Tensor, run: int = 1) -> torch.Tensor:
    """Return ``run << bits`` as integers of the dtype's width; the sign bit wraps around."""
    return (torch.tensor(run, dtype=torch.int64) << bits).to(_INTEGER[dtype])


def _representable(value: float, dtype: torch.dtype) -> float:
    if dtype.is_floating_point and isfinite(value) and abs(value) > torch.finfo(dtype).max:
        largest = torch.finfo(dtype).max
        raise ValueError(f"value {value} does not fit {dtype}, whose largest is {largest:.6g}")
    return value


def _checked_bit(dtype: torch.dtype, bit: int) -> int:
    width = bit_width(dtype)
    if not 0 <= bit < width:
        raise ValueError(f"bit {bit} is out of range for {dtype}; valid: 0 to {width - 1}")
    return width
