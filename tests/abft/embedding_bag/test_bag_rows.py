"""Rows and their checksums: both backends make the same ones, and find what contradicts them."""

import pytest
import torch
from bag_cases import flip, kinds_and_dims, table_of
from case_loops import for_each

from holdfast import native
from holdfast.abft.embedding_bag import KINDS, Table, rows_reference

needs_core = pytest.mark.skipif(native.core is None, reason="there is no native core")


@needs_core
@for_each(("kind", "dim"), kinds_and_dims())
def test_both_backends_make_the_same_checksums(kind: str, dim: int) -> None:
    table = table_of(kind, dim)
    assert rows_reference.rotten(table.data, dim, table.kind, 0, len(table)) == []
    stored = table.data.clone()
    table.data[:, table.layout.payload :] = 0
    rows_reference.encode(table.data, dim, table.kind, 0, len(table))
    assert torch.equal(table.data, stored)


@needs_core
@for_each("dim", [*range(1, 2000), 4096, 32768])
def test_both_backends_have_the_same_signs_of_sum_not_zero(dim: int) -> None:
    assert native.core is not None
    signs = torch.tensor(native.core.embedding_signs(dim)).double()
    assert torch.equal(signs, rows_reference.signs(dim))
    assert set(signs.tolist()) <= {-1.0, 1.0}
    assert signs.sum() != 0


@pytest.mark.usefixtures("_core")
@for_each(("kind", "dim"), [("uint8", 16), ("uint4", 16), ("float16", 4)])
def test_every_single_bit_of_a_row_is_found_and_flipped_back(kind: str, dim: int) -> None:
    table = table_of(kind, dim, rows=9)
    stored = table.data.clone()
    for bit in range(8 * table.layout.used):
        flip(table, 5, bit)
        assert table.rotten() == [5]
        assert table.correct(5) == [bit]
        assert torch.equal(table.data, stored)


@pytest.mark.usefixtures("_core")
@for_each("kind", ["uint8", "uint4", "float16"])
def test_any_bits_of_one_byte_are_flipped_back(kind: str) -> None:
    table = table_of(kind, 16, rows=9)
    stored = table.data.clone()
    for byte in range(table.layout.used):
        bits = [bit for bit in range(8) if (37 * byte + 5) >> bit & 1]
        for bit in bits:
            flip(table, 5, 8 * byte + bit)
        assert table.rotten() == [5]
        assert table.correct(5) == [8 * byte + bit for bit in bits]
        assert torch.equal(table.data, stored)


@pytest.mark.usefixtures("_core")
@for_each(("kind", "dim"), [*((kind, 1) for kind in KINDS if kind != "uint4"), ("uint4", 2)])
@for_each("odd", [0, 16])
@for_each("rows", [1, 2])
def test_a_table_of_any_width_and_of_one_row(kind: str, dim: int, odd: int, rows: int) -> None:
    weight = torch.randn(rows, dim + odd, generator=torch.Generator().manual_seed(0))
    table = Table.from_float(weight, kind)
    error = (table.values(torch.arange(rows)) - weight).abs().max()
    assert error <= {8: 0.02, 4: 0.3, 16: 0.02, 32: 0}[table.kind.bits]
    if table.kind.parameter:
        packed = table.data[:, : table.layout.payload].clone()
        assert torch.equal(Table.from_packed(packed, kind).data, table.data)
    table.data[rows - 1, :2] ^= 3
    table.source = lambda row: weight[row]
    assert table.restore(rows - 1)
    assert torch.equal(table.data, Table.from_float(weight, kind).data)


@for_each("kind", ["uint8", "uint4"])
def test_packed_rows_are_taken_as_they_are(kind: str) -> None:
    weight = torch.randn(20, 32, generator=torch.Generator().manual_seed(0))
    table = Table.from_float(weight, kind)
    packed = table.data[:, : table.layout.payload].clone()
    assert torch.equal(Table.from_packed(packed, kind).data, table.data)
    step = table.parameters()[:, 0].double()[:, None]
    assert ((table.values(torch.arange(20)) - weight).abs() <= 0.52 * step + 1e-2).all()


@for_each("kind", list(KINDS))
@for_each("dim", [16, 32, 64, 128, 256])
def test_checksums_cost_no_cache_line(kind: str, dim: int) -> None:
    layout = table_of(kind, dim).layout

    def lines(stride: int, read: int) -> float:
        starts = [row * stride % 64 for row in range(64)]
        return sum((start + read - 1) // 64 + 1 for start in starts) / 64

    if KINDS[kind].dtype is None:
        assert lines(layout.stride, layout.used) <= lines(layout.payload, layout.payload)
    else:
        assert lines(layout.stride, layout.used) <= lines(layout.payload, layout.payload) + 1
