"""Fault models: what becomes of values, bit by bit, and which elements a fault strikes."""

import math

import pytest
import torch

from holdfast.inject.campaign.models import (
    BURST_BITS,
    BURST_ELEMENTS,
    ELEMENT_FAULTS,
    EXTENTS,
    FAULTS,
    LANES,
    MATRIX_FAULTS,
    fault_model,
    fault_names,
    in_class,
)
from holdfast.inject.faults import (
    bit_width,
    carry_error,
    flip_bit,
    flip_bits,
    has_bit,
    hold_bits,
    mantissa_bits,
    random_patterns,
    special_value,
)

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
all_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def patterns(values: torch.Tensor) -> list[int]:
    """Each element's bits, read from memory byte by byte."""
    raw = bytes(values.contiguous().view(torch.uint8).flatten().tolist())
    size = values.element_size()
    return [int.from_bytes(raw[at : at + size], "little") for at in range(0, len(raw), size)]


def draw(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def samples(dtype: torch.dtype, count: int = 600) -> torch.Tensor:
    values = torch.randn(count, generator=draw(1), dtype=torch.float64)
    values[:6] = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1.0])
    return values.to(dtype)


@all_dtypes
def test_every_bit_flips_in_either_direction_and_nothing_else(dtype):
    values = samples(dtype)
    for bit in range(bit_width(dtype)):
        up, down = (fault_model(f"flip-{bit}-{way}", dtype) for way in ("up", "down"))
        set_before = torch.tensor([pattern >> bit & 1 == 1 for pattern in patterns(values)])
        assert torch.equal(up.eligible(values), ~set_before)
        assert torch.equal(down.eligible(values), set_before)
        assert torch.equal(has_bit(values, bit), set_before)
        assert fault_model(f"flip-{bit}-any", dtype).eligible(values).all()
        flipped = up.corrupt(values, draw())
        assert patterns(flipped) == [pattern ^ 1 << bit for pattern in patterns(values)]
        assert patterns(flip_bit(values, bit)) == patterns(flipped)


@all_dtypes
def test_bursts_flip_adjacent_bits_anywhere(dtype):
    values = samples(dtype)
    new = fault_model("burst_bits", dtype).corrupt(values, draw())
    changed = [a ^ b for a, b in zip(patterns(values), patterns(new), strict=True)]
    starts = {(mask & -mask).bit_length() - 1 for mask in changed}
    assert all(mask >> (mask & -mask).bit_length() - 1 == 2**BURST_BITS - 1 for mask in changed)
    assert starts == set(range(bit_width(dtype) - BURST_BITS + 1))


@all_dtypes
@pytest.mark.parametrize("missing", [False, True])
def test_carries_are_integer_arithmetic_on_the_magnitude(dtype, missing):
    values = samples(dtype)
    bits = torch.randint(mantissa_bits(dtype) + 1, values.shape, generator=draw())
    new = carry_error(values, bits, missing=missing)
    sign = 1 << bit_width(dtype) - 1
    for before, after, bit in zip(patterns(values), patterns(new), bits.tolist(), strict=True):
        magnitude = before & ~sign
        expected = magnitude - 2**bit if missing else magnitude + 2**bit
        assert after == (min(max(expected, 0), sign - 1) | before & sign)


def test_a_carry_ripples_where_a_flip_does_not():
    value = torch.tensor([1.9999998807907104])  # all 23 mantissa bits set
    assert carry_error(value, torch.tensor(0), missing=False).item() == 2.0
    assert flip_bit(value, 0).item() < value.item()
    assert carry_error(torch.tensor([2.0]), torch.tensor(0), missing=True).item() == value.item()


@all_dtypes
def test_stuck_bits_are_one_a_lane(dtype):
    values = samples(dtype).view(60, 10)
    for name, high in (("stuck_at_0", False), ("stuck_at_1", True)):
        new = fault_model(name, dtype).corrupt(values, draw())
        for before, after in zip(values, new, strict=True):
            held = [
                bit
                for bit in range(bit_width(dtype))
                if torch.equal(
                    hold_bits(before, torch.tensor(bit), high=high).view(torch.uint8),
                    after.view(torch.uint8),
                )
            ]
            assert held, name


@all_dtypes
def test_held_bits_are_held(dtype):
    values = samples(dtype)
    for bit in range(bit_width(dtype)):
        assert has_bit(hold_bits(values, torch.tensor(bit), high=True), bit).all()
        assert not has_bit(hold_bits(values, torch.tensor(bit), high=False), bit).any()


@all_dtypes
def test_special_values_keep_the_sign(dtype):
    values = torch.tensor([2.0, -2.0], dtype=dtype)
    assert special_value(values, "inf").tolist() == [math.inf, -math.inf]
    quarter = torch.finfo(dtype).max / 4
    assert special_value(values, "near_inf").tolist() == [quarter, -quarter]
    assert special_value(values, "nan").isnan().all()
    with pytest.raises(ValueError, match="'huge'"):
        special_value(values, "huge")


@all_dtypes
def test_random_patterns_use_every_bit(dtype):
    new = patterns(random_patterns(samples(dtype, 2000), draw()))
    for bit in range(bit_width(dtype)):
        ones = sum(pattern >> bit & 1 for pattern in new)
        assert 800 < ones < 1200, bit


@all_dtypes
def test_each_model_changes_values_and_not_its_input(dtype):
    values = samples(dtype)[6:].view(66, 9)
    kept = values.clone()
    for name in fault_names(dtype, matrix=True):
        model = fault_model(name, dtype)
        new = model.corrupt(values, draw())
        assert new.shape == values.shape, name
        assert new.dtype == dtype, name
        assert patterns(new) != patterns(values), name
        assert patterns(values) == patterns(kept), name
        assert patterns(model.corrupt(values, draw())) == patterns(new), name
        assert model.extent in EXTENTS


def test_each_named_fault_is_described_and_the_other_way_round():
    names = {name.split("-")[0] for name in fault_names(torch.float32, matrix=True)}
    assert names == set(FAULTS)
    assert set(ELEMENT_FAULTS) | set(MATRIX_FAULTS) | {"flip"} == set(FAULTS)
    assert not set(MATRIX_FAULTS) & set(fault_names(torch.float32, matrix=False))
    flips = [name for name in fault_names(torch.bfloat16, matrix=False) if in_class(name, "flip")]
    assert len(flips) == 2 * 16


def test_flips_are_grouped_by_field():
    groups = [fault_model(f"flip-{bit}-up", torch.bfloat16).group for bit in (0, 6, 7, 14, 15)]
    assert groups == ["flip mantissa"] * 2 + ["flip exponent"] * 2 + ["flip sign"]


@pytest.mark.parametrize("name", ["flip", "flip-16-up", "flip-3", "flip-3-left", "gamma", ""])
def test_unknown_faults_are_refused(name):
    with pytest.raises(ValueError, match=r"unknown fault|out of range"):
        fault_model(name, torch.bfloat16)


@pytest.mark.parametrize(
    ("wanted", "names"),
    [("flip-1", {"flip-1-up", "flip-1-down"}), ("flip-1-up", {"flip-1-up"}), ("inf", {"inf"})],
)
def test_classes_name_their_members(wanted, names):
    assert {n for n in fault_names(torch.float64, matrix=True) if in_class(n, wanted)} == names


def test_flips_of_own_bits():
    values = torch.zeros(4, dtype=torch.float16)
    assert patterns(flip_bits(values, torch.tensor([0, 3, 15, 9]))) == [1, 8, 1 << 15, 1 << 9]


def test_constants_say_what_the_descriptions_say():
    assert str(BURST_ELEMENTS) in EXTENTS["burst"]
    assert str(LANES) in EXTENTS["lane"]
