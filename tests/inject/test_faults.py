"""Fault effects: exact bit flips in every dtype, and writes that autograd cannot see."""

import math

import pytest
import torch
from case_loops import for_each

from holdfast.inject.faults import (
    bit_field,
    bit_width,
    corrupted,
    flip_bit,
    flip_bits,
    special_value,
    write_element,
)
from holdfast.inject.schedule import KILLS, KINDS, NO_RANK, Fault

WIDTHS = {torch.float64: 64, torch.float32: 32, torch.float16: 16, torch.bfloat16: 16}
DTYPES = list(WIDTHS)
EVERY_BIT = [(dtype, bit) for dtype, width in WIDTHS.items() for bit in range(width)]


def _bits(tensor: torch.Tensor) -> list[int]:
    """Each element's bits, read from memory byte by byte."""
    raw = bytes(tensor.contiguous().view(torch.uint8).flatten().tolist())
    size = tensor.element_size()
    return [int.from_bytes(raw[at : at + size], "little") for at in range(0, len(raw), size)]


def _fault(kind: str, **values: object) -> Fault:
    return Fault(step=0, rank=0, kind=kind, op="a/mm/forward", **values)


@for_each("dtype", [torch.int8, torch.int64, torch.bool, torch.complex64])
def test_other_dtypes_are_refused_by_name(dtype):
    with pytest.raises(ValueError, match=str(dtype)):
        bit_width(dtype)
    with pytest.raises(ValueError, match=str(dtype)):
        flip_bit(torch.zeros(2, dtype=dtype), 0)
    with pytest.raises(ValueError, match=str(dtype)):
        corrupted(torch.zeros(2, dtype=dtype), _fault("nan"))


@for_each(
    ("dtype", "mantissa", "exponent"),
    [
        (torch.float64, 52, 11),
        (torch.float32, 23, 8),
        (torch.float16, 10, 5),
        (torch.bfloat16, 7, 8),
    ],
)
def test_bit_fields(dtype, mantissa, exponent):
    fields = [bit_field(dtype, bit) for bit in range(bit_width(dtype))]
    assert fields == ["mantissa"] * mantissa + ["exponent"] * exponent + ["sign"]


@for_each(("dtype", "bit"), EVERY_BIT)
def test_flip_changes_exactly_one_bit(dtype, bit):
    values = [0.0, -0.0, 1.0, -3.140625, math.inf, -math.inf, math.nan, torch.finfo(dtype).tiny]
    before = torch.tensor(values, dtype=dtype)
    kept = before.clone()
    after = flip_bit(before, bit)
    assert after.dtype == dtype
    assert _bits(before) == _bits(kept)
    differences = [a ^ b for a, b in zip(_bits(before), _bits(after), strict=True)]
    assert differences == [1 << bit] * len(values)
    assert _bits(flip_bit(after, bit)) == _bits(before)


@for_each("bit", [-1, 16, 64])
def test_bit_outside_the_dtype_is_refused(bit):
    with pytest.raises(ValueError, match=rf"bit {bit} .*bfloat16.*0 to 15"):
        flip_bit(torch.ones(1, dtype=torch.bfloat16), bit)
    with pytest.raises(ValueError, match="0 to 15"):
        bit_field(torch.float16, bit)


def test_flip_keeps_shape_and_leaves_autograd():
    parameter = torch.randn(3, 4, requires_grad=True)
    assert flip_bit(parameter.t(), 31).tolist() == (-parameter.t()).tolist()
    assert not flip_bit(parameter, 31).requires_grad
    assert flip_bit(torch.tensor(2.0), 31).item() == -2.0
    assert flip_bit(torch.empty(0, 3), 3).shape == (0, 3)


@for_each("dtype", DTYPES)
def test_corrupted_values(dtype):
    clean = torch.tensor([1.5, -1.5, 0.0, -0.0], dtype=dtype)
    quarter = torch.finfo(dtype).max / 4
    signs = [1, -1, 1, -1]
    assert corrupted(clean, _fault("inf")).tolist() == [sign * math.inf for sign in signs]
    assert corrupted(clean, _fault("near_inf")).tolist() == [sign * quarter for sign in signs]
    assert corrupted(clean, _fault("nan")).isnan().all()
    assert corrupted(clean, _fault("value", value=-7.0)).tolist() == [-7.0] * 4
    flipped = corrupted(clean, _fault("bitflip", bit=3))
    assert _bits(flipped) == _bits(flip_bit(clean, 3))
    assert clean.tolist() == [1.5, -1.5, 0.0, -0.0]


def test_every_kind_but_the_kills_changes_data():
    clean = torch.tensor([1.5])
    extra = {"bitflip": {"bit": 30}, "value": {"value": 2.0}}
    for kind in set(KINDS) - set(KILLS):
        assert _bits(corrupted(clean, _fault(kind, **extra.get(kind, {})))) != _bits(clean)
    with pytest.raises(ValueError, match="kill_trainer"):
        corrupted(clean, Fault(step=0, rank=0, kind="kill_trainer"))
    with pytest.raises(ValueError, match="lose_node"):
        corrupted(clean, Fault(step=0, rank=NO_RANK, kind="lose_node", host=0))


def test_value_that_the_dtype_cannot_hold_is_refused():
    with pytest.raises(ValueError, match=r"100000\.0 .*float16.*65504"):
        corrupted(torch.ones(1, dtype=torch.float16), _fault("value", value=1e5))
    with pytest.raises(ValueError, match="float16"):
        write_element(torch.ones(1, dtype=torch.float16), (0,), -1e5)
    infinite = corrupted(torch.ones(1, dtype=torch.float16), _fault("value", value=-math.inf))
    assert infinite.item() == -math.inf


@for_each("dtype", DTYPES)
def test_write_reports_both_values_and_touches_one_element(dtype):
    tensor = torch.arange(12, dtype=dtype).reshape(3, 4)
    assert write_element(tensor, (1, 2), 100.0) == (6.0, 100.0)
    expected = [float(number) for number in range(12)]
    expected[6] = 100.0
    assert tensor.flatten().tolist() == expected


def test_autograd_does_not_notice_a_write_as_it_would_an_ordinary_one():
    parameter = torch.full((2, 2), 3.0, requires_grad=True)
    version = parameter._version
    product = (parameter * parameter).sum()
    write_element(parameter, (0, 1), 5.0)
    assert parameter._version == version
    product.backward()
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [[6.0, 10.0], [6.0, 6.0]]
    product = (parameter * parameter).sum()
    with torch.no_grad():
        parameter[0, 1] = 5.0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_write_through_any_strides():
    base = torch.zeros(4, 6, 8)
    view = base.permute(2, 0, 1)[1::2, :, 3:]
    write_element(view, (2, 3, 1), 9.0)
    assert base[3, 4, 5].item() == 9.0
    assert base.count_nonzero().item() == 1
    scalar = torch.tensor(2.0)
    assert write_element(scalar, (), -1.0) == (2.0, -1.0)
    assert scalar.item() == -1.0


def test_write_into_non_leaf_and_inference_tensors():
    leaf = torch.ones(3, requires_grad=True)
    hidden = leaf * 2
    write_element(hidden, (1,), 8.0)
    assert hidden.tolist() == [2.0, 8.0, 2.0]
    with torch.inference_mode():
        fixed = torch.ones(3)
    write_element(fixed, (0,), 4.0)
    assert fixed.tolist() == [4.0, 1.0, 1.0]


@for_each("dtype", DTYPES)
def test_a_tensor_is_written_bit_for_bit(dtype):
    integer = {64: torch.int64, 32: torch.int32, 16: torch.int16}[WIDTHS[dtype]]
    # A signalling NaN with a payload: any conversion on the way would quieten it.
    fields = [bit_field(dtype, bit) for bit in range(WIDTHS[dtype])]
    pattern = sum(1 << bit for bit, name in enumerate(fields) if name == "exponent") | 0b101
    odd = torch.tensor([pattern], dtype=integer).view(dtype)
    tensor = torch.zeros(2, 2, dtype=dtype)
    true, new = write_element(tensor, (1, 0), odd)
    assert true == 0.0
    assert math.isnan(new)
    assert _bits(tensor) == [0, 0, pattern, 0]


def test_a_write_outside_the_tensor_or_of_something_unfit_is_refused():
    tensor = torch.zeros(2, 3)
    for index in ((0,), (0, 0, 0), (2, 0), (0, -1), ()):
        with pytest.raises(ValueError, match=r"outside a tensor of shape \[2, 3\]"):
            write_element(tensor, index, 1.0)
    assert tensor.count_nonzero().item() == 0
    with pytest.raises(ValueError, match=r"torch.float64 .* torch.float32"):
        write_element(torch.zeros(2), (0,), torch.tensor(1.0, dtype=torch.float64))
    with pytest.raises(ValueError, match="2 element"):
        write_element(torch.zeros(2), (0,), torch.zeros(2))
    with pytest.raises(ValueError, match="sparse_coo"):
        write_element(torch.zeros(2).to_sparse(), (0,), 1.0)


def test_each_element_flips_a_bit_of_its_own():
    values = torch.zeros(4, dtype=torch.float16)
    assert _bits(flip_bits(values, torch.tensor([0, 3, 15, 9]))) == [1, 8, 1 << 15, 1 << 9]


def test_an_unknown_special_value_is_refused():
    with pytest.raises(ValueError, match="'huge'"):
        special_value(torch.ones(1), "huge")
