"""What a bag gives: torch's own bits, and the fp64 oracle's values."""

import pytest
import torch
from bag_cases import QUANTISED, batch_of, kinds_and_dims, table_of
from case_loops import for_each
from hypothesis import given
from hypothesis import strategies as st

from holdfast import native
from holdfast.abft.embedding_bag import KINDS, embedding_bag
from holdfast.abft.embedding_bag.batch import Batch
from holdfast.abft.embedding_bag.op import BEST, FBGEMM, OURS, PORTABLE, compute, run_kernel
from holdfast.abft.embedding_bag.reference import embedding_bag_reference, exact_bags

needs_core = pytest.mark.skipif(native.core is None, reason="there is no native core")


@needs_core
@for_each("weighted", [False, True])
@for_each("index_type", [torch.int32, torch.int64])
@for_each("kind", QUANTISED)
@for_each("dim", [2, 16, 30, 64, 100, 128, 256])
def test_bits_are_those_of_torchs_quantised_bag(
    kind: str, dim: int, index_type: torch.dtype, weighted: bool
) -> None:
    table, batch = table_of(kind, dim), batch_of(weighted=weighted)
    packed = table.data[:, : table.layout.payload].contiguous()
    name = "byte" if kind == "uint8" else "4bit"
    op = getattr(torch.ops.quantized, f"embedding_bag_{name}_rowwise_offsets")
    offsets = batch.offsets
    assert offsets is not None
    expected = op(packed, batch.indices, offsets, False, 0, False, batch.weights, None, False)
    given = embedding_bag(
        table,
        batch.indices.to(index_type),
        offsets.to(index_type),
        per_sample_weights=batch.weights,
    )
    assert torch.equal(given, expected)


@needs_core
@for_each("mode", ["sum", "mean"])
@for_each("weighted", [False, True])
@for_each(("kind", "dim"), kinds_and_dims())
def test_every_kernel_rounds_alike_and_suspects_nothing(
    kind: str, dim: int, weighted: bool, mode: str
) -> None:
    if weighted and mode == "mean":
        mode = "sum"
    table, batch = table_of(kind, dim), batch_of(weighted=weighted, mode=mode)
    kernels = [BEST, OURS, PORTABLE] + ([FBGEMM] if kind in QUANTISED else [])
    outputs = []
    for kernel in kernels:
        output, suspects = run_kernel(table, batch, kernel, check=kernel != FBGEMM)
        assert suspects == []
        outputs.append(output)
    assert all(torch.equal(output, outputs[0]) for output in outputs)


@for_each("mode", ["sum", "mean"])
@for_each("kind", list(KINDS))
def test_error_is_no_more_than_twice_plain_torchs(kind: str, mode: str) -> None:
    table, batch = table_of(kind, 64), batch_of(mode=mode)
    exact = exact_bags(table, batch)
    rows = table.values(torch.arange(len(table))).float()
    plain = torch.nn.functional.embedding_bag(batch.indices, rows, batch.offsets, mode=mode)
    ours, _ = compute(table, batch)
    # 2^-24 of the largest partial sum that a bag of n rows may have.
    slack = 2.0**-24 * 195 * rows.abs().max()
    assert (ours - exact).abs().max() <= 2 * (plain - exact).abs().max() + slack


@given(
    kind=st.sampled_from(list(KINDS)),
    dim=st.integers(1, 70),
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=8),
    include_last=st.booleans(),
    weighted=st.booleans(),
    mean=st.booleans(),
    padding=st.sampled_from([None, 0, 7, -1]),
    half=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_arguments_give_the_oracles_values_and_no_suspicion(
    kind: str,
    dim: int,
    sizes: list[int],
    include_last: bool,
    weighted: bool,
    mean: bool,
    padding: int | None,
    half: bool,
    seed: int,
) -> None:
    dim += dim % 2 if kind == "uint4" else 0
    table = table_of(kind, dim, rows=12, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randint(0, 12, (sum(sizes),), generator=generator)
    starts = torch.tensor([0, *sizes]).cumsum(0)
    weights = torch.randn(len(indices), generator=generator) if weighted and not mean else None
    batch = Batch(
        indices,
        starts if include_last else starts[:-1],
        weights,
        include_last,
        "mean" if mean else "sum",
        -1 if padding is None else padding % 12,
        torch.float16 if half else torch.float32,
    )
    output, suspects = compute(table, batch)
    assert suspects == []
    assert output.shape == (len(sizes), dim)
    exact = exact_bags(table, batch)
    # fp16: half a unit of the result; fp32: two roundings a row of partial sums.
    unit = 2.0**-11 if half else 2.0**-22 * max(1, *sizes)
    size = exact_bags(table, batch).abs() + table.values(torch.arange(12)).abs().max() * 40
    assert ((output.double() - exact).abs() <= unit * size).all()
    assert embedding_bag_reference(table, batch)[1] == []


def test_rows_of_equal_length_need_no_offsets() -> None:
    table = table_of("uint8", 32)
    indices = torch.arange(12).view(3, 4)
    expected = embedding_bag(table, indices.flatten(), torch.tensor([0, 4, 8]))
    assert torch.equal(embedding_bag(table, indices), expected)


def test_empty_bags_and_empty_batches_are_zeros_and_nothing() -> None:
    table = table_of("uint8", 32)
    empty = torch.empty(0, dtype=torch.int64)
    assert torch.equal(embedding_bag(table, empty, torch.tensor([0, 0])), torch.zeros(2, 32))
    assert embedding_bag(table, empty, empty).shape == (0, 32)
    assert embedding_bag(table, empty.view(0, 5)).shape == (0, 32)


def test_padding_is_as_in_torch() -> None:
    table = table_of("float32", 32)
    rows = table.values(torch.arange(len(table))).float()
    indices, offsets = torch.tensor([5, 1, 5, 2, 5, 5]), torch.tensor([0, 2, 4])
    for mode in ("sum", "mean"):
        expected = torch.nn.functional.embedding_bag(
            indices, rows, offsets, mode=mode, padding_idx=5
        )
        given = embedding_bag(table, indices, offsets, mode=mode, padding_idx=5)
        assert torch.allclose(given, expected, rtol=1e-6, atol=0)
        assert torch.equal(given[2], torch.zeros(32))


def test_threads_change_no_bit() -> None:
    table, batch = table_of("uint8", 128), batch_of()
    before = torch.get_num_threads()
    outputs = []
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            outputs.append(compute(table, batch)[0])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(output, outputs[0]) for output in outputs)
