"""Checksums that grow with their matrix are those of the whole matrix."""

import pytest
import torch
from case_loops import for_each
from struck import DTYPES

from holdfast.abft.gemm import incremental_checksums as growing
from holdfast.abft.gemm.cpu import encode


def matrices(inner: int, columns: int, dtype: torch.dtype, transposed: bool) -> torch.Tensor:
    """[3, inner, columns], with a row repeated, contiguous along rows or along columns."""
    generator = torch.Generator().manual_seed(inner)
    b = torch.randn(3, inner, columns, generator=generator)
    b[1, 1:2] = b[1, :1]
    b = b.to(dtype)
    return b.mT.contiguous().mT if transposed else b


def grown(b: torch.Tensor, steps: list[int]) -> torch.Tensor:
    """The sums of b, some columns at a time."""
    sums, first = growing.no_sums(b.shape[0], b.shape[1]), 0
    for part in b.split(steps, -1):
        sums = growing.add_columns(sums, part, first)
        first += part.shape[-1]
    return sums


@for_each("transposed", [False, True])
@for_each("dtype", DTYPES)
@for_each("inner", [1, 4, 13, 130])
def test_grown_sums_do_not_depend_on_the_steps(
    dtype: torch.dtype, inner: int, transposed: bool
) -> None:
    b = matrices(inner, 37, dtype, transposed)
    at_once = grown(b, [37])
    for steps in ([1] * 37, [20, 1, 16], [36, 1]):
        assert torch.equal(grown(b, steps), at_once)
    assert torch.equal(grown(b.contiguous(), [37]), at_once)


@for_each("dtype", DTYPES)
@for_each("inner", [1, 13, 400])
def test_the_encoding_of_the_sums_is_that_of_the_matrix(dtype: torch.dtype, inner: int) -> None:
    b = matrices(inner, 37, dtype, False)
    found = growing.encoding_of(grown(b, [1] * 37), 37, dtype)
    expected = encode(b)
    magnitude = b.double().abs().sum(-1)
    assert ((found[0] - expected[0]).abs() <= 1e-6 * magnitude).all()
    z, expected_z = found[1][:, :-2], expected[1][:, :-2]
    torch.testing.assert_close(z, expected_z, rtol=1e-4, atol=0.0)
    assert torch.equal(found[1][:, -2], expected[1][:, -2])


@for_each("transposed", [False, True])
@for_each("dtype", DTYPES)
def test_native_and_reference_agree_in_every_bit(dtype: torch.dtype, transposed: bool) -> None:
    b = matrices(13, 37, dtype, transposed)
    first, rest = b.split([5, 32], -1)
    native_sums = growing.add_columns(growing.no_sums(3, 13), first, 0)
    plain_sums = growing.add_columns_reference(growing.no_sums(3, 13), first, 0)
    assert torch.equal(native_sums, plain_sums)
    native_sums = growing.add_columns(native_sums, rest, 5)
    assert torch.equal(native_sums, growing.add_columns_reference(plain_sums, rest, 5))
    native_encoding = growing.encoding_of(native_sums, 37, dtype)
    plain_encoding = growing.encoding_of_reference(native_sums, 37, dtype)
    assert torch.equal(native_encoding[0], plain_encoding[0])
    statistics = (encoding[1][:, :-1] for encoding in (native_encoding, plain_encoding))
    torch.testing.assert_close(*statistics, rtol=1e-14, atol=0.0)


def test_any_flipped_bit_of_the_sums_changes_their_fingerprint() -> None:
    sums = grown(matrices(3, 5, torch.float32, False), [5])
    before = growing.fingerprints(sums)
    for entry in range(sums[0].numel()):
        for bit in range(0, 64, 7):
            damaged = sums.clone()
            damaged[0].view(torch.int64).view(-1)[entry] ^= 1 << bit
            after = growing.fingerprints(damaged)
            assert after[0] != before[0]
            assert torch.equal(after[1:], before[1:])


@for_each(
    ("sums", "b", "says"),
    [
        (torch.zeros(3, 2, 4).double(), torch.zeros(3, 4, 1), r"\[batch, 3, K\]"),
        (torch.zeros(3, 3, 4), torch.zeros(3, 4, 1), "float64"),
        (torch.zeros(3, 3, 4).double(), torch.zeros(3, 5, 1), "does not belong"),
    ],
)
def test_sums_that_do_not_fit_are_refused(sums: torch.Tensor, b: torch.Tensor, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        growing.add_columns(sums, b, 0)
