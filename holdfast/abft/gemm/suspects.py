"""Diagnosis of matrix product rows whose check failed; ``abft.policy`` handles the findings.

A row over its threshold is only suspected, and diagnosed in this order. Rows whose operands hold
NaN or INF are reported as suspect inputs. The same kernel computes the product again: if the result
differs and passes its check, the rows that differ are replaced. Otherwise a second kernel computes
it too (``second_kernel``): if all suspect rows agree with it to within T, only the encoding of B is
left to be looked at, and the rounding errors just added up. If rows do not agree and the product
repeats bit for bit, B is encoded again and compared with its checksums: damaged checksums are
replaced, and a damaged B is a fault of memory. If B is as it was, the rows that the second kernel
contradicts are compared with fp64 arithmetic and a worst-case bound, and with what the same kernel
computes in other columns.
"""

import logging
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from functools import cache, partial

import torch

from holdfast import native
from holdfast.abft.checksums.rows import self_consistent
from holdfast.abft.gemm.correction import correct_rows, exact_rows, flushed, full_addend
from holdfast.abft.gemm.cpu import encode, verify_gemm
from holdfast.abft.gemm.masked import Unmasked, mask_of
from holdfast.abft.gemm.raw import raw
from holdfast.abft.gemm.reference import as_batch, over_threshold
from holdfast.abft.gemm.second_kernel import agreeing, moved, transposed, unmoved_columns
from holdfast.abft.policy import (
    RECOMPUTATIONS,
    FalseAlarm,
    FaultContext,
    Finding,
    Findings,
    Repair,
    Restored,
    SuspectInput,
    Unrepaired,
    checking,
    decide,
    is_collecting,
    report,
    report_failed_check,
    settle_by_recomputing,
)
from holdfast.abft.thresholds.extreme import EXTREME
from holdfast.events import EventKind
from holdfast.sites import Gemm, SiteTuple

_logger = logging.getLogger("holdfast.abft.gemm")

POSSIBLE_EDIT = (
    "either its memory is faulty, or the program edited it where autograd does not see it (through "
    ".data or NumPy): then edit it under torch.no_grad(), or call protection.refresh() afterwards"
)


@dataclass(frozen=True)
class SuspectProduct:
    """A product with suspect rows.

    Attributes:
        rows: Residual, threshold and energy of each row, fp64 [3, batch, M]; zeros, if the caller
            likes, for rows that passed their check.
        kept: True if the checksums of B were made before this product.
        rerun: Computes the product again with the same kernel.
        forget: Drops the kept checksums of B.
        correction: One of ``policy.CORRECTIONS``; if empty, that of the site's policy.
        encode: Computes the checksums of B again, in the way in which they were computed.
        with_addend: Computes the product with another addend, if the same kernel can be asked.
        device: Device that computed the product, whose operands and result are on CPU.
        started_s: Time at which the check failed, on ``time.perf_counter``, in seconds.
    """

    site: SiteTuple
    gemm: Gemm
    output: torch.Tensor
    rows: torch.Tensor
    kept: bool
    rerun: Callable[[], torch.Tensor]
    forget: Callable[[], None] = lambda: None
    correction: str = ""
    encode: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]] = encode
    with_addend: Callable[[torch.Tensor | None], torch.Tensor] | None = None
    device: str = "cpu"
    started_s: float = field(default_factory=time.perf_counter)


def resolve(suspect: SuspectProduct) -> None:
    """Diagnose every suspect row of a product, and repair ``suspect.output`` in place.

    Raises:
        UncorrectableFault: A fault was not repaired, and no caller is collecting faults.
    """
    context = FaultContext(
        suspect.site,
        override=suspect.correction,
        device=suspect.device,
        started_s=suspect.started_s,
    )
    with checking(context):
        masked = suspect.gemm.addend is not None and bool(mask_of(suspect.gemm.addend).any())
        judge = _beside_mask if masked and suspect.gemm.beta != 0 else _of_rows
        decide(context, partial(judge, suspect))


def on_suspect_rows(
    site: SiteTuple,
    problem: tuple[torch.Tensor, ...],
    output: torch.Tensor,
    rows: torch.Tensor,
    kept: bool,
    compute: Callable[[torch.Tensor | None], torch.Tensor],
) -> None:
    """Resolve suspect rows of an intercepted product, as the native core's handler for them.

    ``compute`` runs the product's own kernel with another addend, or with None again.
    """
    assert native.core is not None
    gemm = Gemm(*problem)  # type: ignore[arg-type]
    forget, rerun = partial(native.core.forget, gemm.b), partial(compute, None)
    resolve(SuspectProduct(site, gemm, output, rows, kept, rerun, forget, with_addend=compute))


def report_damaged_encoding(site: SiteTuple) -> None:
    """Record that a cached encoding did not match its fingerprint and was computed again."""
    context = FaultContext(site, detector="fingerprint")
    report(context, EventKind.CHECKSUM_FAULT, "correct", {})


def on_failed_check(site: SiteTuple, error: str) -> None:
    """Report an error inside the check of an intercepted product, which is unverified then."""
    report_failed_check(FaultContext(site), error.splitlines()[0])  # without the C++ stack


def differing_rows(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Compare two products bit by bit; return the rows that differ, bool [batch, M]."""
    return (_bits(left) != _bits(right)).any(-1).reshape(-1, left.shape[-2])


def _beside_mask(suspect: SuspectProduct, correction: str) -> Findings:
    """Diagnose rows whose addend masks, by the same product without the mask (see ``masked``)."""
    unmasked = Unmasked.of(suspect.gemm)
    if suspect.with_addend is None:
        compute = partial(unmasked.compute, suspect.output)
    else:
        compute = partial(suspect.with_addend, unmasked.gemm.addend)
    again = compute()
    yield from _of_mask(suspect, unmasked, again)
    revealed = unmasked.where(again, suspect.output)
    before = revealed.clone()
    plain = replace(
        suspect,
        gemm=unmasked.gemm,
        output=revealed,
        rows=verify_gemm(unmasked.gemm, revealed),
        rerun=compute,
    )
    yield from _of_rows(plain, correction, differing_rows(revealed, again))
    if not _same_bits(revealed, before):
        suspect.output.copy_(unmasked.where(suspect.output, revealed))


def _of_mask(suspect: SuspectProduct, unmasked: Unmasked, product: torch.Tensor) -> Findings:
    """Find wrong elements under the mask, and replace them by a second computation."""
    wrong = unmasked.wrong(suspect.output, product)
    wrong &= ~_rows_without_beta(suspect).view(*wrong.shape[:-1], 1)
    if not wrong.any():
        return
    rows = as_batch(wrong).any(-1)
    reason = f"row {_first(rows)} is not masked as its addend says"
    again = suspect.rerun()
    if unmasked.wrong(again, product).any():
        yield Unrepaired(EventKind.GEMM_PERSISTENT, reason)
    else:
        restored = unmasked.where(again, suspect.output)
        yield _repair(suspect, restored, rows, "mask", reason)


def _of_rows(
    suspect: SuspectProduct, correction: str, differing: torch.Tensor | None = None
) -> Findings:
    """Diagnose rows over their threshold, and those that a second computation contradicts."""
    over = over_threshold(suspect.rows)
    unwritten = over & _rows_without_beta(suspect)
    if unwritten.any():
        _warn_of_torch()
        yield FalseAlarm(int(unwritten.sum()))
        over = over & ~unwritten
    unexplained = _unexplained(suspect.gemm, suspect.rows, over)
    explained = over & ~unexplained
    if differing is not None and differing.any():
        unexplained |= differing & ~_nonfinite_operand_rows(suspect.gemm, differing)
    if explained.any():
        count = int(explained.sum())
        yield SuspectInput(EventKind.NONFINITE_INPUT, count, "an operand is NaN or INF")
    if correction == "checksum" and unexplained.any():
        unexplained = yield from _by_checksums(suspect, unexplained)
    if unexplained.any():
        by_bound = unexplained if differing is None else unexplained & ~differing
        yield from _by_recomputing(suspect, unexplained, by_bound)
    extreme = ~over & ~unwritten & ~(suspect.rows[2] <= EXTREME**2)
    if extreme.any():
        reason = f"operands make a row exceed {EXTREME:.0e}"
        yield SuspectInput(EventKind.EXTREME_INPUT, int(extreme.sum()), reason)


def _by_checksums(
    suspect: SuspectProduct, suspects: torch.Tensor
) -> Generator[Finding, bool, torch.Tensor]:
    """Repair elements that checksums locate; return the rows that stay suspect, bool [batch, M]."""
    repaired = correct_rows(suspect.gemm, suspect.output, suspects)
    left = _still_suspect(suspect.gemm, repaired)
    changed = differing_rows(repaired, suspect.output) & ~left
    if changed.any():
        after = repaired.where(changed.view(*repaired.shape[:-1], 1), suspect.output)
        yield _repair(suspect, after, changed, "checksum", "")
    return left


def _by_recomputing(
    suspect: SuspectProduct, suspects: torch.Tensor, by_bound: torch.Tensor
) -> Findings:
    """Compute the product again; replace rows that differ, and diagnose those that do not.

    The rows ``by_bound`` are suspect for their checksum alone: they are right if they repeat and a
    second kernel agrees to within T.
    """
    again = suspect.rerun()
    changed = differing_rows(again, suspect.output)
    left = _still_suspect(suspect.gemm, again) if changed.any() else suspects
    if not left.any():  # the usual case: nothing else has to be computed
        yield _recomputed(suspect, again, changed)
        return
    doubtful = suspects & ~_confirmed(suspect, by_bound)
    if not changed.any() or not doubtful.any():
        yield from _of_repeated(suspect, suspects, doubtful)
        return

    def sound(result: torch.Tensor) -> bool:
        return not _still_suspect(suspect.gemm, result).any()

    before = suspect.output.clone()
    settled = settle_by_recomputing(
        suspect.rerun, sound, _same_bits, (before, again), RECOMPUTATIONS - 1
    )
    if settled is None:
        yield Unrepaired(EventKind.GEMM_PERSISTENT, "no two recomputations agree")
        return
    changed = differing_rows(settled, before)
    if changed.any() and not (yield _recomputed(suspect, settled, changed)):
        return
    remaining = _still_suspect(suspect.gemm, settled)
    if remaining.any():
        yield from _of_repeated(suspect, remaining, remaining)


def _recomputed(suspect: SuspectProduct, right: torch.Tensor, changed: torch.Tensor) -> Repair:
    reason = f"row {_first(changed)} differs from its recomputation"
    return _repair(suspect, right, changed, "recompute", reason)


def _confirmed(suspect: SuspectProduct, suspects: torch.Tensor) -> torch.Tensor:
    """Mark the suspect rows that another kernel confirms, bool [batch, M]."""
    # In fp64 the transposed product sums in another order, and would confirm less.
    kernel = moved if suspect.gemm.a.dtype == torch.float64 else transposed
    with raw():
        other = kernel(suspect.gemm)
    return agreeing(suspect.output, other, suspect.rows[1], suspects)


def _of_repeated(
    suspect: SuspectProduct, suspects: torch.Tensor, doubtful: torch.Tensor
) -> Findings:
    """Diagnose rows that fail their check repeatedly, due to the checksum, B, or rounding.

    Of the suspect rows, a second kernel did not confirm the doubtful ones.
    """
    gemm = suspect.gemm
    row_sum, statistics = suspect.encode(gemm.b)
    moved = ~_equal(row_sum, gemm.row_sum)
    entries: dict[str, object] = {"entries": int(moved.sum())}
    if not self_consistent(gemm.row_sum, gemm.statistics):
        suspect.forget()
        yield Restored(EventKind.CHECKSUM_FAULT, entries)
    elif not moved.any() and _equal(statistics, gemm.statistics).all():
        yield from _by_exact_arithmetic(suspect, gemm, suspects, doubtful)
        return
    elif suspect.kept and int(moved.sum()) > 1 and not is_collecting():
        # Edits through .data or NumPy do not move the version counter. Within a guarded step
        # nobody edits weights: there it is damage.
        suspect.forget()
        yield Restored(EventKind.WEIGHT_CHANGED_UNSEEN, entries, rung="")
    else:
        where = f" in row {_first(moved)}" if moved.any() else ""
        reason = f"B changed{where} after encoding"
        if suspect.kept:
            reason += f"; {POSSIBLE_EDIT}"
        yield Unrepaired(EventKind.OPERAND_FAULT, reason)
        return
    fresh = replace(gemm, row_sum=row_sum, statistics=statistics)
    remaining = _still_suspect(fresh, suspect.output)
    if remaining.any():
        yield from _by_exact_arithmetic(suspect, fresh, remaining, remaining & doubtful)


def _by_exact_arithmetic(
    suspect: SuspectProduct, gemm: Gemm, suspects: torch.Tensor, doubtful: torch.Tensor
) -> Findings:
    """Compare doubtful rows with fp64 arithmetic and the worst-case bound of a healthy kernel.

    Within that bound, those that are wrong by what the same kernel computes elsewhere are wrong.
    """
    unwritten = _rows_without_beta(suspect)
    suspects, doubtful = suspects & ~unwritten, doubtful & ~unwritten
    if (suspects & ~doubtful).any():
        yield FalseAlarm(int((suspects & ~doubtful).sum()))
    contradicted = _contradicted(suspect, doubtful) if doubtful.any() else doubtful
    for batch in doubtful.any(1).nonzero().flatten().tolist():
        rows = doubtful[batch].nonzero().flatten()
        actual = as_batch(suspect.output)[batch, rows]
        exact, magnitude, bound = exact_rows(gemm, batch, rows)
        overflow = ~actual.isfinite() & (magnitude > torch.finfo(actual.dtype).max / 2)
        if overflow.any():
            reason = "the product of finite operands overflows"
            yield SuspectInput(EventKind.NONFINITE_INPUT, int(suspects.sum()), reason)
        wrong = ~((actual.double() - exact).abs() <= bound) & ~overflow & bound.isfinite()
        if wrong.any():
            bound = bound + abs(gemm.alpha) * flushed(gemm, batch, rows)
            wrong &= ~((actual.double() - exact).abs() <= bound)
        wrong |= contradicted[batch, rows] & ~overflow
        if wrong.any():
            column = int(wrong.any(0).nonzero()[0])
            reason = f"row {int(rows[wrong.any(1)][0])}, column {column} repeats a wrong value"
            yield Unrepaired(EventKind.GEMM_PERSISTENT, reason)
            return
        yield FalseAlarm(len(rows))


def _rows_without_beta(suspect: SuspectProduct) -> torch.Tensor:
    """Find rows that torch's 16-bit kernels leave unwritten at alpha = 0, bool [batch, M].

    oneDNN's ``baddbmm`` and ``addmv`` then return the addend itself in place of ``beta · addend``,
    and with beta = 0 whatever the memory of the result held before.
    """
    gemm, output = suspect.gemm, suspect.output
    known = suspect.site[1] in ("baddbmm", "addmv") and gemm.a.dtype.itemsize == 2
    if not known or gemm.alpha != 0 or gemm.addend is None:
        return torch.zeros(suspect.rows.shape[1:], dtype=torch.bool)
    if gemm.beta == 0:
        return torch.ones(suspect.rows.shape[1:], dtype=torch.bool)
    return ~differing_rows(output, full_addend(gemm).contiguous())


@cache
def _warn_of_torch() -> None:
    _logger.warning(
        "torch computes baddbmm and addmv in 16 bits with alpha = 0 wrongly: beta is left out, and "
        "with beta = 0 the result is never written. Such products are not verified; use "
        "beta * input in their place"
    )


def _contradicted(suspect: SuspectProduct, doubtful: torch.Tensor) -> torch.Tensor:
    """Mark the elements of doubtful rows that the same kernel, elsewhere, contradicts.

    An element counts if the kernels sum its column in the same order, which rounding cannot
    explain then, and if its row differs by more than T. Returns bool [batch, M, N].
    """
    output = as_batch(suspect.output)
    if suspect.device != "cpu":  # the product's own kernel cannot be asked from here
        return torch.zeros_like(output, dtype=torch.bool)
    with raw():
        other = as_batch(moved(suspect.gemm))
    alike = unmoved_columns(output, other)
    known = torch.where(alike, other, output)
    differ = doubtful & ~agreeing(output, known, suspect.rows[1], doubtful)
    return (_bits(known) != _bits(output)) & differ.unsqueeze(-1)


def _repair(
    suspect: SuspectProduct, right: torch.Tensor, changed: torch.Tensor, method: str, refusal: str
) -> Repair:
    """Describe the replacement of the output by ``right``, which differs in rows ``changed``."""
    detail = {"method": method} | first_difference(suspect.output, right, changed)
    return Repair(EventKind.GEMM_FAULT, detail, partial(suspect.output.copy_, right), refusal)


def first_difference(
    before: torch.Tensor, after: torch.Tensor, changed: torch.Tensor
) -> dict[str, object]:
    """Describe, for an event, the first element that differs in the rows ``changed`` [batch, M]."""
    batch, row = changed.nonzero()[0].tolist()
    shape = (-1, *after.shape[-2:])
    wrong, right = (each.view(shape)[batch, row] for each in (before, after))
    column = int((_bits(wrong) != _bits(right)).nonzero()[0])
    return {
        "rows": int(changed.sum()),
        "index": [batch, row, column],
        "corrupted": float(wrong[column]),
        "repaired": float(right[column]),
    }


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.contiguous().view(integer)


def _equal(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return torch.isclose(left, right, rtol=0, atol=0, equal_nan=True)


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(_bits(left), _bits(right))


def _first(mask: torch.Tensor) -> int:
    return int(mask.flatten().nonzero()[0]) % mask.shape[-1]


def _nonfinite_operand_rows(gemm: Gemm, among: torch.Tensor) -> torch.Tensor:
    """Find the rows of C, ``among`` these, that a NaN or INF in A, B or the addend reaches.

    A value of B counts only where B's checksum is not finite either: B was then NaN or INF before
    it was encoded, and not damaged since. ``among`` and the result are bool [batch, M].
    """
    reached = ~as_batch(gemm.a)[among].isfinite().all(-1)
    if not gemm.row_sum.isfinite().all():
        in_b = ~as_batch(gemm.b).isfinite().all(-1) & ~gemm.row_sum.isfinite()
        reached |= in_b.any(-1, keepdim=True).expand_as(among)[among]
    if gemm.addend is not None and gemm.beta != 0:
        reached |= ~as_batch(full_addend(gemm))[among].isfinite().all(-1)
    return among.masked_scatter(among, reached)


def _still_suspect(gemm: Gemm, output: torch.Tensor) -> torch.Tensor:
    """Verify a product once more; return its unexplained suspect rows, bool [batch, M]."""
    rows = verify_gemm(gemm, output)
    return _unexplained(gemm, rows, over_threshold(rows))


def _unexplained(gemm: Gemm, rows: torch.Tensor, over: torch.Tensor) -> torch.Tensor:
    """Keep the rows over their threshold that no NaN or INF in an operand explains."""
    # Non-finite operands make residual or threshold non-finite: else there is nothing to look for.
    if rows[:2].isfinite().all(0)[over].all():
        return over.clone()
    return over & ~_nonfinite_operand_rows(gemm, over)
