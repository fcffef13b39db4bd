"""What a bag gives: torch's own bits, and the fp64 oracle's values."""

import pytest
import torch
from bag_cases import QUANTISED, batch_of, kinds_and_dims, table_of
from case_loops import for_each

from holdfast import native
from holdfast.abft.embedding_bag import KINDS, embedding_bag
from holdfast.abft.embedding_bag.cpu import BEST, FBGEMM, OURS, PORTABLE, compute, run_kernel
from holdfast.abft.embedding_bag.reference import exact_bags

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


def test_empty_bags_and_empty_batches_are_zeros_and_nothing() -> None:
    table = table_of("uint8", 32)
    empty = torch.empty(0, dtype=torch.int64)
    assert torch.equal(embedding_bag(table, empty, torch.tensor([0, 0])), torch.zeros(2, 32))
    assert embedding_bag(table, empty, empty).shape == (0, 32)
    assert embedding_bag(table, empty.view(0, 5)).shape == (0, 32)
