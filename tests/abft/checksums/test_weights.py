"""The fixed sequence of random signs."""

import math

import torch
from case_loops import for_each

from holdfast.abft.checksums.weights import ones, signs

WIDTHS = [1 << power for power in range(6, 18)]


@for_each("count", [0, 1, 63, 4096, 4097, 131_072])
def test_signs_are_plus_and_minus_one(count: int) -> None:
    row = signs(count)
    assert row.shape == (count,)
    assert row.dtype is torch.float64
    assert torch.equal(row.abs(), ones(count))


@for_each("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8])
def test_every_dtype_holds_the_same_signs(dtype: torch.dtype) -> None:
    assert signs(100, dtype).dtype is dtype
    assert torch.equal(signs(100, dtype).double(), signs(100))
    assert torch.equal(ones(100, dtype), torch.ones(100, dtype=dtype))


@for_each("count", [1, 100, 4096, 5000])
def test_every_length_is_a_prefix_of_one_sequence(count: int) -> None:
    assert torch.equal(signs(count), signs(131_072)[:count])


def test_the_sequence_never_changes() -> None:
    """Stored checksums outlive the process that made them."""
    leading = (signs(32) > 0).long() @ (1 << torch.arange(32))
    assert int(leading) == 0x40C6ABCF


@for_each("count", WIDTHS)
def test_a_constant_shift_of_a_row_shows_in_its_checksum(count: int) -> None:
    assert abs(float(signs(count).sum())) >= 0.45 * math.sqrt(count)


def test_the_signs_look_independent() -> None:
    row, count = signs(131_072), 131_072
    five_sigma = 5 * math.sqrt(count)
    assert abs(float(row.sum())) < five_sigma
    for lag in range(1, 65):
        assert abs(float((row[lag:] * row[:-lag]).sum())) < five_sigma


def test_the_caller_may_change_its_copy() -> None:
    first = signs(10)
    first.zero_()
    assert signs(10).abs().eq(1).all()


def test_equal_rounding_errors_do_not_add_up() -> None:
    count, error = 4096, 1.0
    assert abs(float((error * ones(count)).sum())) == count
    assert abs(float((error * signs(count)).sum())) < 8 * math.sqrt(count)
