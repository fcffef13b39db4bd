"""The bound on rounding, compared with sums in fp64 in every order."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.collectives import sums
from holdfast.collectives.sums import MEAN, SUM, block_of, block_sums, wrong_blocks
from holdfast.digest.tensors import tensor_digest

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def chain(given: torch.Tensor) -> torch.Tensor:
    result = given[0].clone()
    for each in given[1:]:
        result = result + each
    return result


def tree(given: torch.Tensor) -> torch.Tensor:
    parts = list(given)
    while len(parts) > 1:
        parts = [sum(parts[n + 1 : n + 2], parts[n]) for n in range(0, len(parts), 2)]
    return parts[0]


def data(seed: int, ranks: int, kind: str, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ranks, 3 * block_of(dtype) + 5, generator=generator)
    if kind == "alike":
        x = x[:1] + 0.01 * x
    if kind == "cancelling":
        x = (100 * x[:1] + x) * torch.tensor([1.0, -1.0]).repeat(ranks)[:ranks, None]
    if kind == "positive":
        x = x.abs() + 1
    if kind == "unequal":
        x = x * 10 ** torch.empty(x.shape).uniform_(-3, 1, generator=generator)
    return x.to(dtype)


def judged(x: torch.Tensor, result: torch.Tensor, operation: int) -> list[int]:
    given = torch.stack([block_sums(each)[0] for each in x])
    total = torch.stack([given[:, 0].sum(0), given[:, 1].sqrt().sum(0)])
    return wrong_blocks(total, block_sums(result)[0][0], x.dtype, len(x), operation)


@given(
    st.integers(0, 2**31),
    st.sampled_from((2, 3, 8, 33)),
    st.sampled_from(("normal", "alike", "cancelling", "positive", "unequal")),
    st.sampled_from(DTYPES),
)
def test_rounding_in_any_order_is_no_fault(
    seed: int, ranks: int, kind: str, dtype: torch.dtype
) -> None:
    x = data(seed, ranks, kind, dtype)
    for add in (chain, tree, lambda x: chain(x.sort(0, descending=True).values)):
        assert judged(x, add(x), SUM) == []
        assert judged(x, add(x) / ranks, MEAN) == []
        assert judged(x, add(x / ranks), MEAN) == []


@given(st.integers(0, 2**31), st.sampled_from((2, 8)), st.sampled_from(DTYPES))
def test_a_change_of_more_than_twice_the_threshold_is_one(
    seed: int, ranks: int, dtype: torch.dtype
) -> None:
    x = data(seed, ranks, "normal", dtype)
    norms = torch.stack([block_sums(each)[0][1].sqrt() for each in x]).sum(0)
    bound = sums.threshold(norms, dtype, ranks, SUM)
    for block, place in ((0, 0), (2, 3 * block_of(dtype) - 1), (3, 3 * block_of(dtype))):
        result = chain(x)
        # What rounds to the dtype may be less by a unit in the last place.
        change = 2 * bound[block] * (1 + 4 * torch.finfo(dtype).eps)
        result[place] += (change + result[place].abs() * torch.finfo(dtype).eps).to(dtype)
        assert judged(x, result, SUM) == [block]


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_and_digest_are_those_of_the_elements(dtype: torch.dtype) -> None:
    x = data(1, 1, "unequal", dtype)[0]
    found, digest = block_sums(x, digested=True)
    assert digest == tensor_digest(x.float() if dtype == torch.float16 else x)
    block = block_of(dtype)
    signs = sums.signs(x.device)
    for number, part in enumerate(x.double().split(block)):
        signed, square = (part * signs[: len(part)]).sum(), part.square().sum()
        torch.testing.assert_close(found[:, number], torch.stack([signed, square]))


def test_sums_without_the_native_pass_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype in DTYPES:
        x = data(2, 1, "normal", dtype)[0]
        native = block_sums(x)[0]
        with monkeypatch.context() as patched:
            patched.setattr(sums, "signed_sums", None)
            torch.testing.assert_close(block_sums(x)[0], native)


@pytest.mark.parametrize("special", [torch.inf, torch.nan])
def test_what_is_not_finite_must_come_out_of_a_sum_it_went_into(special: float) -> None:
    x = data(3, 3, "normal", torch.float32)
    x[1, 5] = special
    assert judged(x, chain(x), SUM) == []
    calm = chain(x)
    calm[5] = 0.0
    assert judged(x, calm, SUM) == [0]
    x[1, 5] = 0.0
    wrong = chain(x)
    wrong[5] = special
    assert judged(x, wrong, SUM) == [0]
