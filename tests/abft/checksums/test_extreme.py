"""EEC-ABFT on vectors: what is repaired, how closely, and what is left alone."""

import itertools
import math

import pytest
import torch
from case_loops import for_each
from checksum_cases import (
    DTYPES,
    EXTREME,
    KINDS,
    bound,
    healthy,
    value_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from no_host_sync import NoHostSync
from struck import same_bits

from holdfast.abft.checksums import (
    Bound,
    Correction,
    Encoding,
    Status,
    correct_vectors,
    encoding,
    near_inf,
)
from holdfast.inject.faults import flip_bits


def correct(
    truth: torch.Tensor, damaged: torch.Tensor, code: Encoding, dim: int = -1
) -> Correction:
    """Correct a damaged matrix by the checksums of the true one."""
    threshold = bound(damaged.dtype, dim, code.dtype)
    return correct_vectors(damaged, *true_sums(truth, code, dim), threshold, code, dim)


def true_sums(
    truth: torch.Tensor, code: Encoding, dim: int = -1
) -> tuple[torch.Tensor, torch.Tensor]:
    """The plain and the weighted checksums, in fp64 whatever the encoding accumulates in."""
    sums = truth.movedim(dim, -1) @ code.table.double().T
    return sums[..., 0], sums[..., 1:]


def strike(
    truth: torch.Tensor, dtype: torch.dtype, position: torch.Tensor, value: torch.Tensor | float
) -> torch.Tensor:
    """The rows as stored, one element of each replaced."""
    damaged = truth.to(dtype)
    source = torch.as_tensor(value, dtype=dtype).expand(position.shape).unsqueeze(-1)
    return damaged.scatter(-1, position.unsqueeze(-1), source)


def tolerance(truth: torch.Tensor, dtype: torch.dtype, code: Encoding) -> torch.Tensor:
    """The noise of the plain checksum and the rounding of what is stored: [.., n]."""
    rounding = torch.finfo(dtype).eps / 2 * truth.abs()
    return bound(dtype, -1, code.dtype)(truth.to(dtype)).unsqueeze(-1) * 1.01 + rounding


def within(matrix: torch.Tensor, truth: torch.Tensor, code: Encoding) -> torch.Tensor:
    """bool [..]: every element of the row is within the checksum's rounding of the truth."""
    return ((matrix.double() - truth).abs() <= tolerance(truth, matrix.dtype, code)).all(-1)


@for_each("dtype", DTYPES)
def test_clean_vectors_stay_as_they_are(dtype: torch.dtype) -> None:
    truth = healthy((10_000, 48))
    damaged = truth.to(dtype)
    result = correct(truth, damaged, encoding(48))
    assert int((result.status == Status.CLEAN).sum()) == 10_000
    assert same_bits(result.matrix, damaged)


@for_each(
    ("dtype", "accumulate"),
    [*itertools.product(DTYPES[:3], [torch.float32, torch.float64]), (torch.float64,) * 2],
)
@for_each("kind", EXTREME)
def test_ten_thousand_extreme_faults_of_each_kind_are_repaired(
    kind: str, dtype: torch.dtype, accumulate: torch.dtype
) -> None:
    truth = healthy((10_000, 32), seed=1)
    position = torch.randint(32, (10_000,), generator=torch.Generator().manual_seed(2))
    damaged = strike(truth, dtype, position, value_of(kind, dtype))
    code = encoding(32, accumulate=accumulate)
    assert int(within(correct(truth, damaged, code).matrix, truth, code).sum()) == 10_000
    assert int(within(damaged, truth, code).sum()) == 0


@for_each("kind", KINDS)
@for_each("dtype", DTYPES)
@for_each("dim", [-1, -2, 1])
def test_every_kind_at_every_position_is_located_and_repaired(
    kind: str, dtype: torch.dtype, dim: int
) -> None:
    truth = healthy((3, 37, 37), seed=3)
    position = torch.arange(37).expand(3, 37)
    damaged = strike(truth, dtype, position, value_of(kind, dtype))
    code = encoding(37)
    turned = (truth, damaged) if dim == -1 else (truth.mT, damaged.mT)
    result = correct(*turned, code, dim)
    assert result.corrected.all()
    assert torch.equal(result.position, position)
    rows = result if dim == -1 else result._replace(matrix=result.matrix.mT)
    assert within(rows.matrix, truth, code).all()
    healthy_elements = torch.arange(37) != position.unsqueeze(-1)
    assert same_bits(rows.matrix[healthy_elements], damaged[healthy_elements])


@for_each("dtype", DTYPES)
@for_each("fixed_threshold", [False, True])
def test_every_bit_flip_is_repaired_or_small(dtype: torch.dtype, fixed_threshold: bool) -> None:
    bits, positions, n = dtype.itemsize * 8, 21, 21
    truth = healthy((bits, positions, n), seed=4)
    stored = truth.to(dtype)
    hit = torch.eye(n, dtype=torch.bool)
    damaged = torch.where(hit, flip_bits(stored, torch.arange(bits)[:, None, None]), stored)
    code = encoding(n)
    threshold = bound(dtype, -1)
    limit = threshold(stored)
    chosen = limit if fixed_threshold else threshold
    result = correct_vectors(damaged, *true_sums(truth, code), chosen, code)
    size = (damaged.double() - truth).diagonal(dim1=-2, dim2=-1).abs()
    large = ~(size <= (code.code.resolution(n) + 1) * limit)
    assert large.any(), "no flip tests the guarantee"
    assert result.corrected[large].all()
    assert within(result.matrix, truth, code)[large].all()
    left = ~result.corrected
    assert same_bits(result.matrix[left], damaged[left])
    assert within(result.matrix, truth, code)[result.corrected].all()
    assert not result.status.eq(Status.CHECKSUM_FAULT).any()


def test_a_fault_below_the_threshold_passes_and_one_above_does_not() -> None:
    truth, code = healthy((200, 32)), encoding(32)
    damaged = strike(truth, torch.float32, torch.arange(200) % 32, 50.0)
    sums = code.encode(truth)
    off = correct_vectors(damaged, *sums, torch.full((200,), 1e30), code)
    assert off.status.eq(Status.CLEAN).all()
    assert same_bits(off.matrix, damaged)
    assert not within(off.matrix, truth, code).any()
    on = correct_vectors(damaged, *sums, bound(torch.float32, -1), code)
    assert within(on.matrix, truth, code).all()


@settings(deadline=None, max_examples=300)
@given(
    n=st.integers(2, 70),
    data=st.data(),
    kinds=st.tuples(*[st.sampled_from([*KINDS, "like the first", "cancels the first"])] * 2),
    dtype=st.sampled_from(DTYPES),
)
def test_two_faults_in_one_vector_leave_it_as_it_was(
    n: int, data: st.DataObject, kinds: tuple[str, str], dtype: torch.dtype
) -> None:
    first, second = data.draw(st.lists(st.integers(0, n - 1), min_size=2, max_size=2, unique=True))
    truth, code = healthy((1, n), seed=n), encoding(n)
    stored = truth.to(dtype)
    damaged = stored.clone()
    damaged[0, first] = value_of(kinds[0] if kinds[0] in KINDS else "moderate", dtype)
    signs = code.table[0, [first, second]]
    change = (damaged - stored)[0, first] * (signs[0] * signs[1]).to(dtype)
    if kinds[1] in KINDS:
        damaged[0, second] = value_of(kinds[1], dtype)
    else:
        damaged[0, second] += change if kinds[1] == "like the first" else -change
    result = correct(truth, damaged, code)
    assert result.uncorrectable.all()
    assert same_bits(result.matrix, damaged)
    assert result.position.tolist() == [-1]


@for_each("wrong", [math.inf, -math.inf, math.nan, 1e30, 1e3])
def test_a_damaged_checksum_leaves_the_data_and_is_encoded_again(wrong: float) -> None:
    code = encoding(40)
    entries = 1 + code.words.shape[1]
    truth = healthy((entries, 40), seed=6)
    stored = truth.float()
    sums = truth @ code.table.T
    sums.diagonal().fill_(wrong)
    result = correct_vectors(stored, sums[:, 0], sums[:, 1:], bound(torch.float32, -1), code)
    assert result.status.eq(Status.CHECKSUM_FAULT).all()
    assert same_bits(result.matrix, stored)
    healed = torch.cat([result.checksum.unsqueeze(-1), result.weighted], -1)
    assert torch.equal(healed.diagonal(), code.sums(stored).diagonal())
    others = ~torch.eye(entries, dtype=torch.bool)
    assert torch.equal(healed[others], sums[others])
    again = correct_vectors(
        result.matrix, result.checksum, result.weighted, bound(torch.float32, -1), code
    )
    assert again.status.eq(Status.CLEAN).all()


@for_each("kind", KINDS)
def test_a_wrong_element_beside_any_wrong_checksum_is_left(kind: str) -> None:
    code = encoding(40)
    entries = 1 + code.words.shape[1]
    truth = healthy((entries, 40), seed=7)
    damaged = strike(truth, torch.float32, torch.arange(entries), value_of(kind, torch.float32))
    sums = truth @ code.table.T
    sums.diagonal().add_(7.0)
    result = correct_vectors(damaged, sums[:, 0], sums[:, 1:], bound(torch.float32, -1), code)
    assert result.status.eq(Status.UNLOCATABLE).all()
    assert same_bits(result.matrix, damaged)


MIXED = [(math.inf, 1e20), (math.nan, 1e20), (math.inf, -math.inf)]


@for_each("dtype", DTYPES)
@for_each("kind", EXTREME)
def test_several_extreme_elements_are_a_propagation(kind: str, dtype: torch.dtype) -> None:
    truth = healthy((8, 30), seed=8)
    damaged = truth.to(dtype, copy=True)
    for row in range(5):
        damaged[row, : row + 2] = value_of(kind, dtype)
    damaged[5:, [4, 9]] = torch.tensor(MIXED).to(dtype)
    result = correct(truth, damaged, encoding(30))
    assert result.status.eq(Status.PROPAGATED).all()
    assert same_bits(result.matrix, damaged)


@for_each("size", [1e4, 1e9])
def test_a_large_delta_is_not_added_because_it_has_absorbed_the_true_value(size: float) -> None:
    truth, code = healthy((100, 32), 10), encoding(32, accumulate=torch.float32)
    damaged = strike(truth, torch.float32, torch.arange(100) % 32, size)
    sums, hit = true_sums(truth, code), damaged == size
    assert within(correct(truth, damaged, code).matrix, truth, code).all()
    delta = (sums[0].float() - code.sums(damaged)[..., 0]).unsqueeze(-1) * code.table[0]
    assert not within(torch.where(hit, damaged + delta, damaged), truth, code).all()


@for_each("large", [(3,), (3, 4)])
def test_one_large_healthy_element_does_not_draw_the_repair_to_itself_and_several_stop_it(
    large: tuple[int, ...],
) -> None:
    truth, code = healthy((1, 30), seed=11), encoding(30)
    truth[0, list(large)] = 1e11
    damaged = truth.clone()
    damaged[0, 20] += 12.5
    assert correct(truth, truth, code).status.tolist() == [Status.CLEAN]
    result = correct(truth, damaged, code)
    if len(large) == 1:
        assert result.position.tolist() == [20]
        assert abs(float(result.matrix[0, 20] - truth[0, 20])) < 1e-3
    else:  # as the paper has it
        assert result.status.tolist() == [Status.PROPAGATED]
        assert same_bits(result.matrix, damaged)


@for_each("broken", [math.nan, math.inf, -1.0])
def test_a_useless_threshold_passes_nothing(broken: float) -> None:
    truth, code = healthy((4, 30)), encoding(30)
    damaged = truth.float()
    damaged[1:, 7] = torch.tensor([math.inf, math.nan, 100.0])
    result = correct_vectors(damaged, *true_sums(truth, code), torch.full((4,), broken), code)
    assert result.status.eq(Status.UNLOCATABLE).all()
    assert same_bits(result.matrix, damaged)


@for_each("threshold", [bound(torch.float16, -1), torch.ones(1)])
def test_a_true_value_beyond_the_dtype_is_not_a_repair(threshold: Bound) -> None:
    truth, code = healthy((1, 30)), encoding(30)
    truth[0, 7] = 1e6
    result = correct_vectors(truth.half(), *true_sums(truth, code), threshold, code)
    assert result.status.tolist() == [Status.UNLOCATABLE]


@for_each("dtype", DTYPES)
def test_near_inf_is_representable_and_may_be_set(dtype: torch.dtype) -> None:
    assert near_inf(dtype) == (2.0**15 if dtype is torch.float16 else 1e10)
    assert near_inf(dtype) < torch.finfo(dtype).max
    truth, code = healthy((1, 9)), encoding(9)
    damaged = truth.to(dtype, copy=True)
    damaged[0, :2] = 500.0
    threshold = bound(dtype, -1)
    for extreme, expected in ((1000.0, Status.UNLOCATABLE), (400.0, Status.PROPAGATED)):
        sums = true_sums(truth, code)
        result = correct_vectors(damaged, *sums, threshold, code, extreme=extreme)
        assert result.status.tolist() == [expected]


@for_each("shape", [(0, 9), (2, 0, 9), (1, 1), (2, 3, 4, 9)])
def test_any_number_of_vectors_and_of_batches(shape: tuple[int, ...]) -> None:
    truth, code = healthy(shape), encoding(shape[-1])
    damaged = strike(truth, torch.float32, torch.zeros(shape[:-1], dtype=torch.long), math.inf)
    result = correct(truth, damaged.requires_grad_(), code)
    assert not any(tensor.requires_grad for tensor in result)
    assert result.matrix.shape == shape
    assert result.status.shape == shape[:-1]
    assert result.corrected.all()


@for_each("dim", [-1, -2])
def test_the_host_never_waits_and_the_graph_never_breaks(dim: int) -> None:
    truth, code = healthy((2, 12, 12)), encoding(12)
    damaged = strike(truth, torch.float32, torch.arange(12).expand(2, 12), math.nan)
    arguments = (damaged, *true_sums(truth, code, dim))

    def run(matrix: torch.Tensor, plain: torch.Tensor, weighted: torch.Tensor) -> Correction:
        threshold = bound(matrix.dtype, dim)
        return correct_vectors(matrix, plain, weighted, threshold, code, dim)

    with NoHostSync():
        eager = run(*arguments)
    compiled = torch.compile(run, fullgraph=True, backend="eager")(*arguments)
    traced = torch.fx.experimental.proxy_tensor.make_fx(run)(*arguments)(*arguments)
    for other in (compiled, traced):
        assert all(torch.equal(a, b) for a, b in zip(eager, other, strict=True))
    assert eager.corrected.any()


@for_each("sync", [lambda x: x.sum().item(), torch.nonzero, lambda x: x[x > 0]])
def test_the_mode_that_forbids_waiting_can_fail(sync: object) -> None:
    with pytest.raises(AssertionError), NoHostSync():
        sync(torch.ones(3))


def test_wrong_arguments_are_refused_with_a_reason() -> None:
    code = encoding(8)
    matrix, plain, weighted = torch.ones(4, 8), torch.ones(4), torch.ones(4, 5)
    limit = torch.ones(4)
    with pytest.raises(ValueError, match=r"vectors of 8 elements"):
        correct_vectors(matrix, plain, weighted, limit, code, 0)
    with pytest.raises(ValueError, match=r"checksum sums have shape \(3,\).* have \(4,\)"):
        correct_vectors(matrix, plain[:3], weighted, limit, code)
    with pytest.raises(ValueError, match=r"weighted sums have shape \(4, 2\).*bits code.*\(4, 5\)"):
        correct_vectors(matrix, plain, weighted[:, :2], limit, code)
    with pytest.raises(ValueError, match=r"threshold has shape \(8,\)"):
        correct_vectors(matrix, plain, weighted, torch.ones(8), code)
    with pytest.raises(TypeError, match=r"torch.int64"):
        correct_vectors(matrix.long(), plain, weighted, limit, code)
    with pytest.raises(TypeError, match=r"weighted sums are torch.int64"):
        correct_vectors(matrix, plain, weighted.long(), limit, code)
