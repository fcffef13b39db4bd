"""Injection of many faults into computed products at once, and what verification detects.

A fault in the output, in a partial sum or in an element of A as one row reads it changes one row.
Such faults are injected into every row of a product at once. A fault in B, in a checksum or in a
column reaches all rows, so that each needs a verification of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from holdfast.abft.thresholds.protocol import ACCUMULATION
from holdfast.inject.models import BURST_ELEMENTS, LANES, FaultModel
from holdfast_lab.campaign.effects import MASKED, change
from holdfast_lab.campaign.workload import Problem

MOST_AT_ONCE = 64  # most faults that reach all rows in one call
CANDIDATES = 64  # elements that are drawn to find one whose bit can flip as wanted


@dataclass(frozen=True)
class Edit:
    """A fault as a write into a tensor of a product.

    Attributes:
        target: ``output``, ``a``, ``b``, ``checksum`` or ``statistics``.
        index: Index in the tensor as a batch of matrices.
        values: Wrong values that are written.
        lasting: False if the right values are back before the product is verified.
    """

    target: str
    index: tuple[int | slice, ...]
    values: torch.Tensor
    lasting: bool = True


@dataclass(frozen=True)
class Strikes:
    """The faults injected into a product.

    Attributes:
        detected: True where some row is suspect, bool [faults].
        effects: Class of the effect by ``EFFECTS``, uint8 [faults].
        edit: Function of a fault's number that returns the fault, to be repeated end to end.
        tries: Number of faults that would have been injected if every element could have this
            fault.
    """

    detected: torch.Tensor
    effects: torch.Tensor
    edit: Callable[[int], Edit]
    tries: int = 0


def strike(
    problem: Problem, site: str, model: FaultModel, generator: torch.Generator, wanted: int
) -> Strikes:
    """Inject up to ``wanted`` faults into a product; fewer if no more elements can have the fault.

    Guarantees: the same generator state injects the same faults. Not covered: the order in which
    the device adds partial sums; the accumulator is emulated in the order of k.
    """
    if site in _ROW_SITES and model.extent != "column":
        return _judge_rows(problem, _ROW_SITES[site](problem, model, generator), wanted)
    tries = min(wanted, MOST_AT_ONCE)
    if model.extent == "column":
        strikes = _strike_columns(problem, model, generator, tries)
    elif site == "operand_b":
        strikes = _strike_operand_b(problem, model, generator, tries)
    else:
        strikes = _strike_encoding(problem, site, model, generator, tries)
    return replace(strikes, tries=tries)


@dataclass(frozen=True)
class _Rows:
    """A product with a fault in each row that can have one; rows of all batches in order."""

    placed: torch.Tensor  # bool [rows]
    c: torch.Tensor  # [rows, N]
    edit: Callable[[int], Edit]  # returns the fault of a row
    a: torch.Tensor | None = None  # [batch, M, K], if the fault remains in A


def _judge_rows(problem: Problem, rows: _Rows, wanted: int) -> Strikes:
    struck = rows.placed.nonzero().flatten()[:wanted]
    suspects = problem.suspects(rows.c.view(problem.c.shape), rows.a).flatten()
    moved = change(rows.c[struck], _flat(problem.c)[struck])
    effects = problem.scale.classify(
        moved.amax(-1), moved.norm(dim=-1), _batch_and_row(problem, struck)
    )
    return Strikes(
        suspects[struck], effects, lambda fault: rows.edit(int(struck[fault])), len(rows.placed)
    )


def _strike_output(problem: Problem, model: FaultModel, generator: torch.Generator) -> _Rows:
    clean = _flat(problem.c)
    index, placed = _place(clean, model, generator)
    c = clean.scatter(1, index, model.corrupt(clean.gather(1, index), generator))
    return _Rows(placed, c, _output_edit(problem, c))


def _strike_accumulator(problem: Problem, model: FaultModel, generator: torch.Generator) -> _Rows:
    """Compute ``C += alpha (S' − S)`` for a wrong partial sum S', rounded once to the output."""
    clean, (batches, rows, inner) = _flat(problem.c), problem.a.shape
    column = torch.randint(clean.shape[1], (batches, rows), generator=generator)
    depth = torch.randint(inner, (batches, rows, 1), generator=generator)
    right = problem.b.mT.gather(1, column.unsqueeze(-1).expand(-1, -1, inner)).double()
    terms = (problem.a.double() * right).masked_fill(torch.arange(inner) > depth, 0.0)
    partial = _flat(terms).sum(-1, keepdim=True).to(ACCUMULATION[clean.dtype])
    placed = model.eligible(partial).flatten()
    damage = model.corrupt(partial, generator).double() - partial.double()
    column = column.view(-1, 1)
    wrong = clean.gather(1, column).double() + problem.gemm.alpha * damage
    c = clean.scatter(1, column, wrong.to(clean.dtype))
    return _Rows(placed, c, _output_edit(problem, c))


def _strike_operand_a(problem: Problem, model: FaultModel, generator: torch.Generator) -> _Rows:
    clean, left = _flat(problem.c), _flat(problem.a)
    index, placed = _place(left, model, generator)
    old = left.gather(1, index)
    new = model.corrupt(old, generator)
    batch, row = _batch_and_row(problem, torch.arange(len(clean)))
    factors = problem.b[batch, index.flatten()].double()
    wrong = clean.double() + problem.gemm.alpha * (new.double() - old.double()) * factors

    def edit(fault: int) -> Edit:
        place = (int(batch[fault]), int(row[fault]), int(index[fault, 0]))
        return Edit("a", place, new[fault, 0], lasting=False)

    return _Rows(placed, wrong.to(clean.dtype), edit)


def _strike_operand_a_memory(
    problem: Problem, model: FaultModel, generator: torch.Generator
) -> _Rows:
    rows = _strike_operand_a(problem, model, generator)
    a = problem.a.clone()
    edits = [replace(rows.edit(row), lasting=True) for row in range(len(rows.placed))]
    for edit in edits:
        a[edit.index] = edit.values
    return replace(rows, a=a, edit=lambda row: edits[row])


_ROW_SITES: dict[str, Callable[[Problem, FaultModel, torch.Generator], _Rows]] = {
    "output": _strike_output,
    "accumulator": _strike_accumulator,
    "operand_a": _strike_operand_a,
    "operand_a_memory": _strike_operand_a_memory,
}


def _strike_operand_b(
    problem: Problem, model: FaultModel, generator: torch.Generator, wanted: int
) -> Strikes:
    places, old = _draw(problem.b, model, generator, wanted)
    new = model.corrupt(old, generator)
    batch, inner, column = places
    damage = problem.gemm.alpha * (new.double() - old.double()).unsqueeze(-1)
    clean = problem.c[batch, :, column]
    wrong = clean.double() + damage * problem.a[batch, :, inner].double()

    def edit(fault: int) -> Edit:
        place = (int(batch[fault]), int(inner[fault]), int(column[fault]))
        return Edit("b", place, new[fault])

    return _judge_columns(problem, batch, column, wrong.to(clean.dtype), edit)


def _strike_columns(
    problem: Problem, model: FaultModel, generator: torch.Generator, wanted: int
) -> Strikes:
    batches, _, columns = problem.c.shape
    batch = torch.randint(batches, (wanted,), generator=generator)
    column = torch.randint(columns, (wanted,), generator=generator)
    new = model.corrupt(problem.c[batch, :, column], generator)

    def edit(fault: int) -> Edit:
        return Edit("output", (int(batch[fault]), slice(None), int(column[fault])), new[fault])

    return _judge_columns(problem, batch, column, new, edit)


def _judge_columns(
    problem: Problem,
    batch: torch.Tensor,
    column: torch.Tensor,
    new: torch.Tensor,
    edit: Callable[[int], Edit],
) -> Strikes:
    """Verify faults that each replace a column of the product by a row of ``new`` [faults, M]."""
    c = problem.c.clone()
    detected = torch.zeros(len(new), dtype=torch.bool)
    for fault, place in enumerate(zip(batch.tolist(), column.tolist(), strict=True)):
        c[place[0], :, place[1]] = new[fault]
        detected[fault] = problem.suspected(c)
        c[place[0], :, place[1]] = problem.c[place[0], :, place[1]]
    moved = change(new, problem.c[batch, :, column])
    rows = (batch.unsqueeze(-1), torch.arange(new.shape[-1]))
    effects = problem.scale.classify(moved, moved, rows)
    return Strikes(detected, effects.amax(-1) if len(new) else effects[:, 0], edit)


def _strike_encoding(
    problem: Problem, site: str, model: FaultModel, generator: torch.Generator, wanted: int
) -> Strikes:
    target = "statistics" if site == "statistics" else "checksum"
    checksum, statistics = (kept.clone() for kept in problem.encoding)
    struck = statistics if target == "statistics" else checksum
    places, old = _draw(struck, model, generator, wanted)
    new = model.corrupt(old, generator)
    indices = [tuple(place) for place in torch.stack(places, -1).tolist()]
    detected = torch.zeros(len(new), dtype=torch.bool)
    for fault, index in enumerate(indices):
        struck[index] = new[fault]
        detected[fault] = problem.suspected(problem.c, (checksum, statistics))
        struck[index] = old[fault]
    effects = torch.full((len(new),), MASKED, dtype=torch.uint8)
    return Strikes(detected, effects, lambda fault: Edit(target, indices[fault], new[fault]))


def _place(
    values: torch.Tensor, model: FaultModel, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose an element of each row [rows, columns], and return which rows have an eligible one."""
    rows, columns = values.shape
    if model.bit is not None:
        eligible = model.eligible(values)
        lots = torch.rand(values.shape, generator=generator).masked_fill_(~eligible, -1.0)
        return lots.argmax(1, keepdim=True), eligible.any(1)
    everywhere = torch.ones(rows, dtype=torch.bool)
    if model.extent == "row":
        return torch.arange(columns).expand(rows, columns), everywhere
    lanes = min(LANES, columns)
    width = {"burst": min(BURST_ELEMENTS, columns), "lane": columns // lanes}.get(model.extent, 1)
    stride = lanes if model.extent == "lane" else 1
    starts = lanes if model.extent == "lane" else columns - width + 1
    start = torch.randint(starts, (rows, 1), generator=generator)
    return start + stride * torch.arange(width), everywhere


def _draw(
    values: torch.Tensor, model: FaultModel, generator: torch.Generator, wanted: int
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Draw up to ``wanted`` elements that can have the fault; return their indices and values."""
    shape = (wanted, CANDIDATES if model.bit is not None else 1)
    candidates = tuple(torch.randint(size, shape, generator=generator) for size in values.shape)
    eligible = model.eligible(values[candidates])
    first = eligible.byte().argmax(1, keepdim=True)
    placed = eligible.any(1)
    index = tuple(places.gather(1, first).flatten()[placed] for places in candidates)
    return index, values[index]


def _flat(matrices: torch.Tensor) -> torch.Tensor:
    return matrices.reshape(-1, matrices.shape[-1])


def _batch_and_row(problem: Problem, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    height = problem.c.shape[1]
    return rows // height, rows % height


def _output_edit(problem: Problem, c: torch.Tensor) -> Callable[[int], Edit]:
    height = problem.c.shape[1]
    return lambda row: Edit("output", (row // height, row % height), c[row])
