"""What happens to suspect bags: the slow path, taken only when a check failed.

Suspicion is not yet a fault. The rows of the bag are checked by their CRCs: a rotten one is named
and repaired, by its one wrong bit or from the source of truth. Then the bag is pooled again by the
scalar path, which rounds as the fast one does: equal bits mean that rounding was unlucky, different
ones that a fault is proven, and the new ones are the repair.
"""

import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

import torch

from holdfast import events
from holdfast.abft.embedding_bag.batch import Batch
from holdfast.abft.embedding_bag.reference import differing
from holdfast.abft.embedding_bag.table import Table
from holdfast.abft.gemm.recovery import correction, defer, dismiss
from holdfast.errors import UncorrectableFault

ATTEMPTS = 4  # bounded: rows may rot while they are repaired, but not for ever


class _LeftToOthersError(Exception):
    """The fault is recorded, and who defers faults decides on it."""


class Compute(Protocol):
    """Pools and checks; returns the output and the suspect bags."""

    def __call__(
        self, table: Table, batch: Batch, *, portable: bool = False
    ) -> tuple[torch.Tensor, list[int]]:
        """``portable`` takes another path with the same rounding."""


@dataclass
class _Case:
    table: Table
    batch: Batch
    deferrable: bool = True  # by the Guard of the step that pools; a scrub has none
    started_s: float = field(default_factory=time.perf_counter)

    def report(self, kind: str, rung: str, **detail: object) -> events.Event:
        return events.record(
            kind,
            op=f"{self.table.name}/embedding_bag/forward",
            detector="checksum",
            rung=rung,
            duration_s=time.perf_counter() - self.started_s,
            detail=detail,
        )

    def give_up(self, kind: str, reason: str, **detail: object) -> Exception:
        """Record what is not repaired; to be raised."""
        event = self.report(kind, "", reason=reason, **detail)
        if self.deferrable and defer(event):
            return _LeftToOthersError()
        return UncorrectableFault(
            f"{event.op}: {reason} (rank {event.rank}, {event.host}); the output must not be used"
        )


def resolve(
    table: Table, batch: Batch, output: torch.Tensor, suspects: list[int], compute: Compute
) -> None:
    """Decide on every suspect bag; repairs ``output`` [bags, dim] and the table's rows in place.

    With ``correction="detect"`` neither is changed.

    Raises:
        UncorrectableFault: a rotten row cannot or must not be repaired, or no two computations
            agree; and nobody defers faults.
    """
    with suppress(_LeftToOthersError):
        _decide(_Case(table, batch), output, sorted(suspects), compute)


def _decide(case: _Case, output: torch.Tensor, bags: list[int], compute: Compute) -> None:
    batch, rotten = case.batch, set[int]()
    for _ in range(ATTEMPTS):
        rotten |= _repair_rows(case, bags)
        bags = sorted({*bags, *_bags_with(batch, rotten)})
        settled = _settle(case, batch.only(bags), compute)
        if settled is not None:
            break
    else:
        raise case.give_up("embedding_bag_persistent", "no two computations of a bag agree")
    wrong = differing(settled, output[bags]).any(-1)
    if not rotten:
        dismiss(int((~wrong).sum()))
    if wrong.any():
        _replace(case, output, settled, bags, wrong, bool(rotten))


def _repair_rows(case: _Case, bags: list[int]) -> set[int]:
    """Repair the rotten rows of these bags; which they were."""
    rows = case.batch.only(bags).indices.unique().tolist()
    rotten = {row for row in rows if row != case.batch.padding and case.table.rotten(row, 1)}
    if rotten and correction() == "detect":
        row = min(rotten)
        raise case.give_up(
            "row_fault",
            f"row {row} of {case.table.name} contradicts its checksums",
            table=case.table.name,
            row=row,
        )
    for row in rotten:
        repair_row(case.table, row, case)
    return rotten


def _bags_with(batch: Batch, rows: set[int]) -> list[int]:
    """The bags that pool any of these rows."""
    held = torch.isin(batch.indices.flatten(), torch.tensor(sorted(rows), dtype=torch.int64))
    return [bag for bag in batch.bag_of_each()[held].unique().tolist() if bag >= 0]


def _settle(case: _Case, batch: Batch, compute: Compute) -> torch.Tensor | None:
    """What two computations agree on and no check doubts: rows may rot meanwhile."""
    first, doubts = compute(case.table, batch, portable=True)
    second, more = compute(case.table, batch)
    agree = not differing(first, second).any()
    return second if agree and not doubts and not more else None


def _replace(
    case: _Case,
    output: torch.Tensor,
    settled: torch.Tensor,
    bags: list[int],
    wrong: torch.Tensor,
    rotten: bool,
) -> None:
    which = int(wrong.nonzero()[0])
    bag = bags[which]
    column = int(differing(settled[which], output[bag]).nonzero()[0])
    if correction() == "detect":
        reason = f"bag {bag}, column {column} differs from its recomputation"
        raise case.give_up("embedding_bag_fault", reason, index=[bag, column])
    corrupted, repaired = float(output[bag, column]), float(settled[which, column])
    output[bags] = settled
    case.report(
        "embedding_bag_fault",
        "correct" if rotten else "recompute",
        method="row" if rotten else "recompute",
        bags=int(wrong.sum()),
        index=[bag, column],
        corrupted=corrupted,
        repaired=repaired,
    )


def repair_row(table: Table, row: int, case: "_Case | None" = None) -> None:
    """Repair a rotten row, by its one wrong bit or from its source; record which.

    Raises:
        UncorrectableFault: more than a bit is wrong, and the row has no source.
    """
    case = case or _Case(table, Batch(torch.empty(0, 0, dtype=torch.int64)), deferrable=False)
    with table.lock:
        if not table.rotten(row, 1):  # another thread was here
            return
        bit = table.correct(row)
        named = {"table": table.name, "row": row}
        if bit >= 0:
            part = part_of(table, bit)
            case.report("row_fault", "correct", method="bit", bit=bit % 8, **part, **named)
        elif table.restore(row):
            case.report("row_fault", "correct", method="source", **named)
        else:
            raise case.give_up(
                "row_fault",
                f"row {row} of {table.name} is wrong in more than one bit: register_source() would "
                "restore it, or load the table again",
                **named,
            )


def part_of(table: Table, bit: int) -> dict[str, object]:
    """What a bit of a row belongs to: an element, scale, bias or the checksums."""
    layout, byte = table.layout, bit // 8
    if byte < layout.elements:
        return {"part": "element", "element": bit // table.kind.bits}
    if byte < layout.payload:
        return {"part": "scale" if byte < layout.elements + layout.parameters // 2 else "bias"}
    return {"part": "checksum"}
