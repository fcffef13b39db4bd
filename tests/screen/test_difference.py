"""XOR of wrong and right, on every width of element."""

import pytest
import torch

from holdfast.errors import ConfigError
from holdfast.inject.faults import flip_bit
from holdfast.screen.difference import difference, differences, merged
from holdfast.screen.emulation import Emulated, parse_fault

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bit", [0, 9, 15])
def test_the_flipped_bit_is_named(dtype: torch.dtype, bit: int) -> None:
    right = torch.randn(5, 7, generator=torch.Generator().manual_seed(1)).to(dtype)
    wrong = right.clone()
    wrong[3, 2] = flip_bit(right[3, 2], bit)
    found = difference("output", right, wrong)
    assert found is not None
    assert (found.index, found.elements, found.of, found.bits) == ((3, 2), 1, 35, {bit: 1})
    assert int(found.right, 16) ^ int(found.wrong, 16) == int(found.xor, 16) == 1 << bit
    assert len(found.xor) == 2 * dtype.itemsize


def test_equal_bits_are_no_difference_and_zeros_of_two_signs_are_one() -> None:
    nan = torch.tensor([float("nan"), 0.0])
    assert difference("output", nan, nan.clone()) is None
    found = difference("output", torch.zeros(2), torch.tensor([0.0, -0.0]))
    assert found is not None
    assert found.bits == {31: 1}
    found = difference("readback", torch.zeros(4, dtype=torch.int64), torch.tensor([0, 0, -1, 0]))
    assert found is not None
    assert (found.index, len(found.bits), found.xor) == ((2,), 64, "f" * 16)


def test_parts_are_merged_and_the_least_spread_one_is_first() -> None:
    right = {"spread": torch.zeros(9), "struck": torch.zeros(9)}
    wrong = {"spread": torch.ones(9), "struck": torch.tensor([0.0, 1.0] + [0.0] * 7)}
    found = merged([*differences(right, wrong), *differences(right, wrong)])
    assert [each.part for each in found] == ["struck", "spread"]
    assert found[0].elements == 1
    assert set(found[0].bits.values()) == {2}
    assert "XOR 3f800000" in found[0].text
    with pytest.raises(ValueError, match="compare results of one workload"):
        difference("output", torch.zeros(3), torch.zeros(4))


def test_a_fault_is_read_from_text_or_refused() -> None:
    assert parse_fault("unit=core 1,op=digest,bit=3,every=10,seed=4") == Emulated(
        "core 1", "digest", 3, 10, 4
    )
    assert parse_fault("unit=core 1") == Emulated("core 1")
    for text in ("", "op=digest", "unit=a,every=0", "unit=a,bit=x", "unit=a,to=b"):
        with pytest.raises(ConfigError, match="--emulate"):
            parse_fault(text)
