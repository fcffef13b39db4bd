"""Diagnosis of bags whose check failed; ``abft.policy`` handles the findings.

A bag whose check failed is only suspected. Its rows are checked by their CRCs; a damaged row is
repaired by flipping the wrong bits of one byte, or from the table's source. Then the bag is pooled
again by the scalar kernel, which rounds as the fast one does: if the bits are equal the alarm was
false, otherwise there was a fault, and the new result replaces the wrong one.
"""

import torch

from holdfast.abft.embedding_bag.batch import Batch
from holdfast.abft.embedding_bag.cpu import compute
from holdfast.abft.embedding_bag.reference import differing
from holdfast.abft.embedding_bag.table import Table
from holdfast.abft.policy import (
    Damage,
    FalseAlarm,
    FaultContext,
    Finding,
    Findings,
    Repair,
    Restored,
    Unrepaired,
    decide,
    decide_each,
)
from holdfast.events import EventKind

ATTEMPTS = 4  # limit of attempts, as rows may be damaged again while they are repaired


def resolve(table: Table, batch: Batch, output: torch.Tensor, suspects: list[int]) -> None:
    """Diagnose all suspect bags; repair ``output`` [bags, dim] and rows of the table in place.

    With ``correction="detect"`` neither is changed.

    Raises:
        UncorrectableFault: A fault was not repaired, and no caller is collecting faults.
    """
    bags = sorted(suspects)
    batch = batch.on("cpu")
    decide(_context(table), lambda correction: _of_bags(table, batch, output, bags))


def repair_row(table: Table, row: int) -> None:
    """Repair a damaged row by its one wrong byte or from its source, and record an event.

    Raises:
        UncorrectableFault: More than one byte is wrong, and the table has no source.
    """
    decide_each(_context(table, collectable=False), _mend(table, row))


def _context(table: Table, *, collectable: bool = True) -> FaultContext:
    """Describe the table; faults that a scrub finds are not collected, as it serves no step."""
    name = f"{table.name}/embedding_bag/forward"
    return FaultContext(name, table.module, collectable=collectable)


def _of_bags(table: Table, batch: Batch, output: torch.Tensor, bags: list[int]) -> Findings:
    damaged = set[int]()
    for _ in range(ATTEMPTS):
        for row in _damaged_rows(table, batch, bags):
            damaged.add(row)
            if not (yield _damage(table, row)):
                return
        bags = sorted({*bags, *_bags_with(batch, damaged)})
        settled = _settle(table, batch.only(bags))
        if settled is not None:
            break
    else:
        yield Unrepaired(EventKind.EMBEDDING_BAG_PERSISTENT, "no two computations of a bag agree")
        return
    wrong = differing(settled, output[bags]).any(-1)
    if not damaged:
        yield FalseAlarm(int((~wrong).sum()))
    if wrong.any():
        yield _replacement(output, settled, bags, wrong, by_rows=bool(damaged))


def _damaged_rows(table: Table, batch: Batch, bags: list[int]) -> list[int]:
    rows = batch.only(bags).indices.unique().tolist()
    return [row for row in rows if row != batch.padding and table.rotten(row, 1)]


def _damage(table: Table, row: int) -> Damage:
    reason = f"row {row} of {table.name} contradicts its checksums"
    named: dict[str, object] = {"table": table.name, "row": row}
    return Damage(EventKind.ROW_FAULT, reason, lambda: _mend(table, row), named)


def _bags_with(batch: Batch, rows: set[int]) -> list[int]:
    """Find the bags that pool any of these rows."""
    held = torch.isin(batch.indices.flatten(), torch.tensor(sorted(rows), dtype=torch.int64))
    return [bag for bag in batch.bag_of_each()[held].unique().tolist() if bag >= 0]


def _settle(table: Table, batch: Batch) -> torch.Tensor | None:
    """Pool by two kernels; return the result if both agree and pass their checks."""
    batch = batch.on(table.data.device)
    first, suspects = compute(table, batch, portable=True)
    second, more = compute(table, batch)
    agree = not differing(first, second).any()
    return second if agree and not suspects and not more else None


def _replacement(
    output: torch.Tensor,
    settled: torch.Tensor,
    bags: list[int],
    wrong: torch.Tensor,
    *,
    by_rows: bool,
) -> Repair:
    which = int(wrong.nonzero()[0])
    bag = bags[which]
    column = int(differing(settled[which], output[bag]).nonzero()[0])
    index: dict[str, object] = {"index": [bag, column]}
    detail = {
        "method": "row" if by_rows else "recompute",
        "bags": int(wrong.sum()),
        **index,
        "corrupted": float(output[bag, column]),
        "repaired": float(settled[which, column]),
    }
    return Repair(
        EventKind.EMBEDDING_BAG_FAULT,
        detail,
        lambda: output.__setitem__(bags, settled),
        refusal=f"bag {bag}, column {column} differs from its recomputation",
        rung="correct" if by_rows else "recompute",
        refusal_detail=index,
    )


def _mend(table: Table, row: int) -> list[Finding]:
    named: dict[str, object] = {"table": table.name, "row": row}
    with table.lock:
        if not table.rotten(row, 1):  # another thread has repaired the row
            return []
        bits = table.correct(row)
        if bits:
            return [Restored(EventKind.ROW_FAULT, _flipped(table, bits) | named)]
        if table.restore(row):
            return [Restored(EventKind.ROW_FAULT, {"method": "source", **named})]
    reason = (
        f"row {row} of {table.name} is wrong in more than one byte: register_source() would "
        "restore it, or load the table again"
    )
    return [Unrepaired(EventKind.ROW_FAULT, reason, named)]


def _flipped(table: Table, bits: list[int]) -> dict[str, object]:
    """Describe the bits of one byte that were flipped back."""
    in_byte = [bit % 8 for bit in bits]
    one = len(bits) == 1
    which: dict[str, object] = {"bit": in_byte[0]} if one else {"bits": in_byte}
    return {"method": "bit" if one else "byte", **which, **part_of(table, bits[0])}


def part_of(table: Table, bit: int) -> dict[str, object]:
    """Name the part of a row that a bit belongs to: an element, scale, bias or checksum."""
    layout, byte = table.layout, bit // 8
    if byte < layout.elements:
        return {"part": "element", "element": bit // table.kind.bits}
    if byte < layout.payload:
        return {"part": "scale" if byte < layout.elements + layout.parameters // 2 else "bias"}
    return {"part": "checksum"}
