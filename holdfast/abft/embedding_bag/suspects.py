"""Diagnosis of bags whose check failed; ``abft.policy`` handles the findings.

A bag whose check failed is only suspected. Its rows are checked by their CRCs: a damaged one is
named and repaired, by its one wrong bit or from the source of truth. Then the bag is pooled again
by the scalar path, which rounds as the fast one does: equal bits mean that rounding was unlucky,
different ones that a fault is proven, and the new ones are the repair.
"""

from typing import Protocol

import torch

from holdfast.abft.embedding_bag.batch import Batch
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


class Compute(Protocol):
    """A function that pools and checks; it returns the output and the suspect bags."""

    def __call__(
        self, table: Table, batch: Batch, *, portable: bool = False
    ) -> tuple[torch.Tensor, list[int]]:
        """Pool and check; ``portable`` uses the scalar kernel, whose results have the same bits."""


def resolve(
    table: Table, batch: Batch, output: torch.Tensor, suspects: list[int], compute: Compute
) -> None:
    """Diagnose all suspect bags; repair ``output`` [bags, dim] and rows of the table in place.

    With ``correction="detect"`` neither is changed.

    Raises:
        UncorrectableFault: a damaged row cannot or must not be repaired, or no two computations
            agree; and nobody collects faults.
    """
    bags = sorted(suspects)
    decide(_context(table), lambda correction: _of_bags(table, batch, output, bags, compute))


def repair_row(table: Table, row: int) -> None:
    """Repair a damaged row, by its one wrong bit or from its source; record which.

    Raises:
        UncorrectableFault: more than a bit is wrong, and the row has no source.
    """
    decide_each(_context(table, collectable=False), _mend(table, row))


def _context(table: Table, *, collectable: bool = True) -> FaultContext:
    """Describe the table; a scrub serves no step, so that nobody collects its faults."""
    name = f"{table.name}/embedding_bag/forward"
    return FaultContext(name, table.module, collectable=collectable)


def _of_bags(
    table: Table, batch: Batch, output: torch.Tensor, bags: list[int], compute: Compute
) -> Findings:
    damaged = set[int]()
    for _ in range(ATTEMPTS):
        for row in _damaged_rows(table, batch, bags):
            damaged.add(row)
            if not (yield _damage(table, row)):
                return
        bags = sorted({*bags, *_bags_with(batch, damaged)})
        settled = _settle(table, batch.only(bags), compute)
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


def _settle(table: Table, batch: Batch, compute: Compute) -> torch.Tensor | None:
    """Pool until two results agree and pass their checks, as rows may change meanwhile."""
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
        bit = table.correct(row)
        if bit >= 0:
            part = {"method": "bit", "bit": bit % 8, **part_of(table, bit)}
            return [Restored(EventKind.ROW_FAULT, part | named)]
        if table.restore(row):
            return [Restored(EventKind.ROW_FAULT, {"method": "source", **named})]
    reason = (
        f"row {row} of {table.name} is wrong in more than one bit: register_source() would "
        "restore it, or load the table again"
    )
    return [Unrepaired(EventKind.ROW_FAULT, reason, named)]


def part_of(table: Table, bit: int) -> dict[str, object]:
    """Tell what a bit of a row belongs to: an element, scale, bias or the checksums."""
    layout, byte = table.layout, bit // 8
    if byte < layout.elements:
        return {"part": "element", "element": bit // table.kind.bits}
    if byte < layout.payload:
        return {"part": "scale" if byte < layout.elements + layout.parameters // 2 else "bias"}
    return {"part": "checksum"}
