"""Bags are pooled and checked group by group; large tables lie on huge pages."""

import copy
import gc
import re
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from bag_cases import flip, table_of
from case_loops import for_each

from holdfast import native
from holdfast.abft.embedding_bag import Table, embedding_bag
from holdfast.abft.embedding_bag import layout as layouts

ROWS, DIM, BAGS, POOLING = 500, 64, 12, 90  # a group holds 20 KiB: two bags or three
PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
SMAPS = Path("/proc/self/smaps")
pytestmark = pytest.mark.skipif(native.core is None, reason="groups are the native core's")


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """How many pool at once."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def bags() -> tuple[Table, torch.Tensor, torch.Tensor]:
    """A table, and the indices and offsets of more bags than a group holds."""
    generator = torch.Generator().manual_seed(0)
    indices = torch.randint(ROWS, (BAGS * POOLING,), generator=generator)
    return table_of("uint8", DIM, ROWS), indices, torch.arange(BAGS) * POOLING


@pytest.mark.usefixtures("threads")
@for_each("prefetch", [True, False])
@for_each("dtype", [torch.int32, torch.int64])
def test_groups_are_pooled_as_bags_alone_are(
    bags: tuple[Table, torch.Tensor, torch.Tensor], dtype: torch.dtype, prefetch: bool
) -> None:
    table, indices, offsets = bags
    together = embedding_bag(table, indices.to(dtype), offsets, prefetch=prefetch)
    for bag in range(BAGS):
        alone = indices[bag * POOLING : (bag + 1) * POOLING]
        assert torch.equal(together[bag], embedding_bag(table, alone, offsets[:1])[0])


@pytest.mark.usefixtures("threads")
@for_each("prefetch", [True, False])
@for_each("position", [0, POOLING - 1, 3 * POOLING, 5 * POOLING + 7, -1])
@for_each("index", [ROWS, -1, 1 << 40])
def test_an_index_of_no_row_is_refused_in_any_group(
    bags: tuple[Table, torch.Tensor, torch.Tensor], index: int, position: int, prefetch: bool
) -> None:
    table, indices, offsets = bags
    indices = indices.clone()
    indices[position] = index
    place = position % len(indices)
    with pytest.raises(IndexError, match=f"index {index} at position {place} is outside"):
        embedding_bag(table, indices, offsets, prefetch=prefetch)


@pytest.mark.usefixtures("threads")
def test_a_fault_in_any_group_is_found(
    bags: tuple[Table, torch.Tensor, torch.Tensor],
) -> None:
    table, indices, offsets = bags
    right, clean = embedding_bag(table, indices, offsets), table.data.clone()
    for bag in range(BAGS):
        row = int(indices[bag * POOLING])
        flip(table, row, 28)
        assert torch.equal(embedding_bag(table, indices, offsets), right)
        assert torch.equal(table.data, clean)  # found, and flipped back


def flags_of(data: torch.Tensor) -> str:
    """The kernel's flags of the mapping that holds a tensor."""
    address, inside = data.data_ptr(), False
    for line in SMAPS.read_text().splitlines():
        span = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if span:
            inside = int(span[1], 16) <= address < int(span[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line
    raise AssertionError("the tensor is in no mapping")


class Asking(layouts.mmap.mmap):
    """Memory that notes of each mapping with advice how many bytes it has."""

    asked: ClassVar[list[int]] = []

    def madvise(self, option: int) -> None:  # type: ignore[override]
        super().madvise(option)
        self.asked.append(len(self))


@pytest.mark.skipif(not PAGES.exists(), reason="this kernel has no huge pages to ask for")
def test_large_tables_ask_for_huge_pages_and_small_ones_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(layouts.mmap, "mmap", Asking)
    monkeypatch.setattr(Asking, "asked", [])
    large, small = Table.zeros(1 << 17, DIM), Table.zeros(ROWS, DIM)
    assert large.data.nbytes >= layouts._HUGE_BYTES > small.data.nbytes
    assert " hg" in flags_of(large.data)
    # The flags of a small table say nothing: it lies in the heap, for parts of which NumPy asks.
    assert Asking.asked == [large.data.nbytes]


def test_a_large_table_is_memory_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "_HUGE_BYTES", 1)
    table = table_of("uint8", DIM, ROWS)
    indices, offsets = torch.arange(ROWS), torch.arange(0, ROWS, 10)
    right = embedding_bag(table, indices, offsets)
    data = table.data
    again = Table.of(copy.deepcopy(data), DIM, "uint8")
    del table
    gc.collect()
    assert torch.equal(again.data, data)  # whoever holds the rows holds the memory
    assert torch.equal(embedding_bag(again, indices, offsets), right)
    monkeypatch.delattr(layouts.mmap, "MADV_HUGEPAGE", raising=False)
    assert torch.equal(table_of("uint8", DIM, ROWS).data, data)
