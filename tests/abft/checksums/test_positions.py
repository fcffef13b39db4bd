"""Position codes: what they tell apart, under the worst noise they claim to bear."""

import itertools
import math

import pytest
import torch
from case_loops import for_each
from hypothesis import given
from hypothesis import strategies as st

from holdfast.abft.checksums import Bits, encoding
from holdfast.abft.checksums.positions import MAX_COUNT

SIZES = [1, 2, 3, 7, 8, 9, 64, 65, 1000, 4096]


def words(code: Bits, count: int) -> torch.Tensor:
    """[count, 1 + D]: the code words, the plain checksum's weight first."""
    weights = code.weights(count)
    return torch.cat([torch.ones(1, count, dtype=torch.float64), weights]).T


@for_each("count", SIZES)
def test_every_position_reads_back_and_no_weight_exceeds_one(count: int) -> None:
    code = Bits()
    weights = code.weights(count)
    assert weights.dtype is torch.float64
    assert len(weights) - math.ceil(math.log2(max(count, 2))) in (1, 2)
    assert float(weights.abs().max()) <= 1
    assert torch.equal(weights, weights.float().double()), "a weight is not exact in fp32"
    assert (weights != 0).all(), "an element of weight 0 is invisible"
    assert float((weights.amax(1) - weights.amin(1)).max()) <= code.spread
    for size in (3.5, -1e-200, 1e200):
        assert torch.equal(code.decode(size * words(code, count), count), torch.arange(count))


@given(
    count=st.integers(1, 5000),
    data=st.data(),
    negative=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_it_reads_right_under_any_noise_up_to_the_resolution(
    count: int, data: st.DataObject, negative: bool, seed: int
) -> None:
    code = Bits()
    position = data.draw(st.integers(0, count - 1))
    word = words(code, count)[position]
    delta = code.resolution(count) * 1.000001 * (-1 if negative else 1)
    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand(word.shape, generator=generator, dtype=torch.float64) * 2 - 1
    noise = noise.sign() if seed % 2 else noise  # the corners of the cube are the worst
    residuals = delta * word + code.spread * noise * (torch.arange(len(word)) > 0)
    assert int(code.decode(residuals, count)) == position


@for_each("count", [2, 3, 8, 9, 33, 200])
def test_two_code_words_of_bits_differ_twice_and_agree_once(count: int) -> None:
    weights = Bits().weights(count)
    differ = (weights[:, :, None] != weights[:, None, :]).sum(0)
    pairs = ~torch.eye(count, dtype=torch.bool)
    assert int(differ[pairs].min()) >= 2
    assert int(differ[pairs].max()) <= len(weights) - 1


@for_each("count", [1, 2, 3, 5, 8])
def test_no_two_damages_of_bits_look_like_one_or_none(count: int) -> None:
    word = words(Bits(), count)
    single = torch.cat([word, torch.eye(word.shape[1], dtype=torch.float64)])
    for i, j in itertools.combinations(range(len(single)), 2):
        for other in [k for k in range(len(single)) if k not in (i, j)]:
            assert int(torch.linalg.matrix_rank(single[[i, j, other]])) == 3, (i, j, other)


@for_each("accumulate", [torch.float32, torch.float64])
def test_checksums_predicted_from_the_operands_are_those_of_the_product(
    accumulate: torch.dtype,
) -> None:
    code = encoding(16, accumulate=accumulate)
    a, b = (torch.randint(-9, 9, shape).to(accumulate) for shape in ((5, 7), (7, 16)))
    predicted = a @ (b @ code.table.T)
    plain, weighted = code.encode(a @ b)
    assert plain.dtype is accumulate
    assert torch.equal(predicted, torch.cat([plain.unsqueeze(-1), weighted], -1))
    across = encoding(5, accumulate=accumulate)
    plain, weighted = across.encode(a @ b, dim=-2)
    assert torch.equal((across.table @ a) @ b, torch.cat([plain[None], weighted.T]))


@for_each("dtype", [torch.bfloat16, torch.float16])
def test_weighted_sums_with_one_near_inf_element_stay_finite_in_fp32(dtype: torch.dtype) -> None:
    rows = torch.randn(50, 50).to(dtype)
    rows.diagonal().fill_(torch.finfo(dtype).max)
    code = encoding(50, accumulate=torch.float32)
    assert code.sums(rows).isfinite().all()
    naive = torch.arange(1, 51) * rows.float()
    assert naive.sum(-1).isinf().any() == (dtype is torch.bfloat16)


def test_sums_do_not_depend_on_the_precision_of_matmuls() -> None:
    rows, code = torch.randn(64, 256), encoding(256, accumulate=torch.float32)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        sums = code.sums(rows)
    finally:
        torch.set_float32_matmul_precision(before)
    exact = rows.double() @ code.table.double().T
    assert float((sums - exact).abs().max()) < 256 * 2**-23


@for_each("count", [0, -3, MAX_COUNT + 1])
def test_a_length_that_cannot_be_encoded_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match=f"{count} elements"):
        encoding(count)


def test_the_choices_of_a_caller_are_taken() -> None:
    code = encoding(9, code=Bits(name="mine"))
    assert (code.code.name, code.count, code.dtype) == ("mine", 9, torch.float64)
    assert encoding(4, device="meta").dtype is torch.float32


def test_wrong_choices_are_refused_with_those_there_are() -> None:
    with pytest.raises(TypeError, match=r"not in torch.float16"):
        encoding(4, accumulate=torch.float16)
    with pytest.raises(TypeError, match=r"fp64 data overflow"):
        encoding(4, accumulate=torch.float32).encode(torch.ones(4).double())
    with pytest.raises(ValueError, match=r"on meta and the encoding on cpu"):
        encoding(4).encode(torch.ones(4, device="meta"))
    with pytest.raises(ValueError, match=r"dimension 2"):
        encoding(4).encode(torch.ones(4, 4), dim=2)
