"""Pooling of bags on a CUDA device, where one Triton kernel pools and verifies them.

With ``TRITON_INTERPRET=1`` set before Triton is first imported it runs on CPU tensors, for tests.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
import triton

from holdfast.abft.embedding_bag.batch import Batch, check_kinds, checked
from holdfast.abft.embedding_bag.kernels import bag_kernel
from holdfast.abft.embedding_bag.reference import SIGMAS, differing
from holdfast.abft.embedding_bag.rows_reference import guard_tables, signs
from holdfast.abft.embedding_bag.table import Table
from holdfast.abft.policy import count_false_alarms
from holdfast.abft.triton.launch import FAILED, INTERPRETED, on, slot_on

LARGEST_BLOCK = 1024
ELEMENTS = 128  # of a program that pools several bags: a warp with four each
INTERPRETED_BAGS = 512  # the interpreter's time is one of operations, not of elements
UNROLL = 4  # rows of a bag that are fetched at once


class _Rows(NamedTuple):
    """A table as the kernel takes it."""

    data: torch.Tensor
    signs: torch.Tensor
    guards: torch.Tensor
    rows: int
    stride: int
    elements: int
    sign_sum: float


class _Bags(NamedTuple):
    """A batch as the kernel takes it: bag b ends at ``bounds[b + 1]`` if b < ``ends``."""

    indices: torch.Tensor
    bounds: torch.Tensor
    weights: torch.Tensor
    bags: int
    ends: int
    indices_count: int
    padding: int


def pool_triton(
    table: Table,
    batch: Batch,
    *,
    portable: bool = False,
    site: Callable[[torch.Tensor], None] | None = None,
    check: bool = True,
    slot: torch.Tensor | None = None,
) -> tuple[torch.Tensor, list[int]]:
    """Pool bags; return the output [bags, dim] and the numbers of the bags that failed their check.

    Args:
        table: Rows on the device.
        batch: Bags on the device. Values of indices and offsets are checked by the kernel: an index
            outside of the table is not read, and its bag fails.
        portable: Selects another schedule of the same operations, with the same bits.
        site: Called with the pooled rows, which it may change before they are checked.
        check: False pools without any check.
        slot: int32 [1] on the device, which becomes at least the bits of 2.0 if a bag fails. Then
            no bag is named, and the host does not wait for the device.
    """
    bags = _prepared(batch, table.data.device)
    output = table.data.new_empty((bags.bags, table.dim), dtype=batch.dtype)
    if not output.numel():
        return output, []
    faults = None if site is None else _faults(table, batch, bags, site)
    flag = slot_on(output.device, slot)
    suspects = _launch(table, batch, bags, output, flag, check, portable, faults)
    if not check or slot is not None or not int(flag):
        return output, []
    return output, _confirmed(table, batch, output, suspects.nonzero().flatten().tolist())


def _confirmed(table: Table, batch: Batch, output: torch.Tensor, bags: list[int]) -> list[int]:
    """Return the suspect bags but for those whose check failed by their rounding errors.

    Their rows are intact, and another schedule of the kernel gives the same bits.
    """
    whole = checked(batch.on("cpu"), len(table), table.dim)
    part = whole.only(bags).on(table.data.device)
    again, _ = pool_triton(table, part, portable=True, check=False)
    changed = differing(again, output[bags]).any(-1).tolist()
    rotten: dict[int, bool] = {}
    left = []
    for bag, differs in zip(bags, changed, strict=True):
        rows = set(whole.only([bag]).indices.tolist()) - {batch.padding}
        rotten |= {row: bool(table.rotten(row, 1)) for row in rows - rotten.keys()}
        if differs or any(rotten[row] for row in rows):
            left.append(bag)
    count_false_alarms(table.module, len(bags) - len(left))
    return left


def _launch(
    table: Table, batch: Batch, bags: _Bags, output: torch.Tensor, slot: torch.Tensor,
    check: bool, portable: bool, faults: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    suspects = output.new_zeros(bags.bags, dtype=torch.int8)
    block = min(LARGEST_BLOCK, max(2, triton.next_power_of_2(table.dim)))
    together = max(1, ELEMENTS // block)
    if INTERPRETED:
        together = triton.next_power_of_2(min(bags.bags, INTERPRETED_BAGS))
    with on(table.data):
        bag_kernel[(triton.cdiv(bags.bags, together),)](
            _rows_of(table), bags, faults, 0 if faults is None else len(faults),
            output, suspects, slot, table.dim,
            KIND=table.kind.number,
            ALIGNED=table.layout.elements % 4 == 0,
            WEIGHTED=batch.weights is not None,
            MEAN=batch.mode == "mean",
            VERIFY=check,
            SIGMAS=SIGMAS, FAILED=FAILED,
            BAGS=together, BLOCK=block, UNROLL=1 if portable or INTERPRETED else UNROLL,
            num_warps=max(1, min(4, block // 128)),
            enable_fp_fusion=False,
        )  # fmt: skip
    return suspects


def _prepared(batch: Batch, device: torch.device) -> _Bags:
    """Return a batch in contiguous memory; raise for arguments that no implementation takes."""
    check_kinds(batch)
    for each in (batch.indices, batch.offsets, batch.weights):
        if each is not None and each.device != device:
            raise ValueError(f"a batch has a tensor on {each.device}, the table is on {device}")
    indices = batch.indices.contiguous()
    weights = indices if batch.weights is None else batch.weights.detach().resolve_neg()
    count = indices.numel()
    if batch.offsets is None:
        bags, size = indices.shape
        bounds = torch.arange(bags + 1, device=indices.device) * size
        return _Bags(indices, bounds, weights.contiguous(), bags, bags, count, batch.padding)
    ends = len(batch.offsets) - 1
    bags = ends if batch.include_last else ends + 1
    if ends < 0 and (batch.include_last or count):
        raise ValueError(f"offsets are empty: no bag has the {count} indices")
    bounds = batch.offsets.contiguous()
    return _Bags(indices, bounds, weights.contiguous(), bags, max(ends, 0), count, batch.padding)


def _faults(
    table: Table, batch: Batch, bags: _Bags, site: Callable[[torch.Tensor], None]
) -> torch.Tensor:
    """Return the changes that a site makes to clean bags, int64 [F, 3]: bag, column, bits."""
    clean = table.data.new_empty((bags.bags, table.dim), dtype=torch.float32)
    _launch(table, batch, bags, clean, slot_on(clean.device, None), False, False, None)
    changed = clean.clone()
    site(changed)
    where = differing(clean, changed).nonzero()
    values = changed.view(torch.int32)[where[:, 0], where[:, 1]].long()
    return torch.cat((where, values[:, None]), 1).contiguous()


def _rows_of(table: Table) -> _Rows:
    data = table.data
    sign, guards, total = _constants(table.dim, data.device)
    return _Rows(data, sign, guards, len(table), data.stride(0), table.layout.elements, total)


@cache
def _constants(dim: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Return the columns' signs, int8, and the tables of guards, uint8, on a device."""
    sign = signs(dim)
    return sign.to(torch.int8).to(device), guard_tables().to(device), float(sign.sum())
