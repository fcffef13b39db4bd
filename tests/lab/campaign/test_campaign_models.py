"""Fault models: what becomes of values, bit by bit, and which elements a fault strikes."""

import math

import pytest
import torch
from case_loops import for_each

from holdfast.inject.models import fault_model
from holdfast_lab.campaign.models import FAULTS, fault_names, in_class

WIDTHS = {torch.float64: 64, torch.float32: 32, torch.float16: 16, torch.bfloat16: 16}
MANTISSAS = {torch.float64: 52, torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}
MATRIX_FAULTS = {"stuck_at_0", "stuck_at_1", "burst_elements", "row", "column"}
all_dtypes = for_each("dtype", WIDTHS)


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
    for bit in range(WIDTHS[dtype]):
        up, down = (fault_model(f"flip-{bit}-{way}", dtype) for way in ("up", "down"))
        set_before = torch.tensor([pattern >> bit & 1 == 1 for pattern in patterns(values)])
        assert torch.equal(up.eligible(values), ~set_before)
        assert torch.equal(down.eligible(values), set_before)
        assert fault_model(f"flip-{bit}-any", dtype).eligible(values).all()
        flipped = up.corrupt(values, draw())
        assert patterns(flipped) == [pattern ^ 1 << bit for pattern in patterns(values)]
        assert patterns(down.corrupt(values, draw())) == patterns(flipped)


@all_dtypes
def test_bursts_flip_three_adjacent_bits_anywhere(dtype):
    values = samples(dtype)
    new = fault_model("burst_bits", dtype).corrupt(values, draw())
    changed = [a ^ b for a, b in zip(patterns(values), patterns(new), strict=True)]
    assert set(changed) == {0b111 << start for start in range(WIDTHS[dtype] - 2)}


@all_dtypes
@for_each(("name", "way"), [("spurious_carry", 1), ("missing_carry", -1)])
def test_carries_add_a_power_of_two_to_the_magnitude_up_to_the_ends_of_the_format(dtype, name, way):
    values = samples(dtype, 2000)[6:]
    new = fault_model(name, dtype).corrupt(values, draw())
    sign, seen = 1 << WIDTHS[dtype] - 1, set()
    for before, after in zip(patterns(values), patterns(new), strict=True):
        assert before & sign == after & sign
        seen.add(way * ((after & ~sign) - (before & ~sign)))
    assert seen == {2**bit for bit in range(MANTISSAS[dtype] + 1)}
    end = sign - 1 if name == "spurious_carry" else 0  # of the format, where carries stop
    signed = {16: torch.int16, 32: torch.int32, 64: torch.int64}[WIDTHS[dtype]]
    values = torch.full((50,), end, dtype=signed).view(dtype)
    assert set(patterns(fault_model(name, dtype).corrupt(values, draw()))) == {end}


@all_dtypes
@for_each(("name", "high"), [("stuck_at_0", False), ("stuck_at_1", True)])
def test_stuck_bits_are_one_a_lane(dtype, name, high):
    values = samples(dtype, 4000).view(400, 10)
    new = fault_model(name, dtype).corrupt(values, draw())
    used = set()
    for before, after in zip(map(patterns, values), map(patterns, new), strict=True):
        held = [
            bit
            for bit in range(WIDTHS[dtype])
            if after == [p | 1 << bit if high else p & ~(1 << bit) for p in before]
        ]
        assert held
        used.update(held)
    assert used == set(range(WIDTHS[dtype]))


@all_dtypes
def test_special_values_keep_the_sign(dtype):
    values = torch.tensor([2.0, -2.0], dtype=dtype)
    assert fault_model("inf", dtype).corrupt(values, draw()).tolist() == [math.inf, -math.inf]
    quarter = torch.finfo(dtype).max / 4
    assert fault_model("near_inf", dtype).corrupt(values, draw()).tolist() == [quarter, -quarter]
    assert fault_model("nan", dtype).corrupt(values, draw()).isnan().all()


@all_dtypes
def test_random_values_use_every_bit(dtype):
    new = patterns(fault_model("random_value", dtype).corrupt(samples(dtype, 2000), draw()))
    for bit in range(WIDTHS[dtype]):
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
        assert model.extent != "element" or name not in MATRIX_FAULTS


def test_each_named_fault_is_described_and_the_other_way_round():
    names = {name.split("-")[0] for name in fault_names(torch.float32, matrix=True)}
    assert names == set(FAULTS)
    elements = {name.split("-")[0] for name in fault_names(torch.float32, matrix=False)}
    assert names - elements == MATRIX_FAULTS
    flips = [name for name in fault_names(torch.bfloat16, matrix=False) if in_class(name, "flip")]
    assert len(flips) == 2 * 16


@for_each("name", ["flips-17", "flip-16-up", "flip-3-left", "value=", "gamma", ""])
def test_unknown_faults_are_refused(name):
    with pytest.raises(ValueError, match=r"unknown fault|out of range"):
        fault_model(name, torch.bfloat16)
