"""What happens to suspect rows: the slow path, taken only when a residual exceeds its threshold.

Suspicion is not yet a fault. In this order: rows whose operands are already NaN or INF are
reported as such; the product is computed again by the same kernel, and what differs is replaced;
what reproduces bit for bit is compared with a fresh encoding of B (a damaged checksum heals, a
damaged B is a fault of memory) and at last with fp64 arithmetic against a worst-case bound, which
clears rows that were only unlucky.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import torch

from holdfast import events
from holdfast.abft.checksums.rows import self_consistent
from holdfast.abft.gemm.correction import correct_rows, full_addend
from holdfast.abft.gemm.exact import exact_rows, flushed
from holdfast.abft.gemm.masked import Unmasked, has_mask, unequal
from holdfast.abft.gemm.passes import encode, verify
from holdfast.abft.gemm.reference import as_batch, over_threshold, suspect_rows
from holdfast.abft.thresholds.extreme import EXTREME
from holdfast.errors import UncorrectableFault
from holdfast.sites import Gemm, SiteTuple, site_name

CORRECTIONS = ("recompute", "checksum", "detect")  # see ``protect``
RERUNS = 3  # bounded: after these a product that never repeats itself is given up


class Case(Protocol):
    """What an event tells of a suspicion."""

    @property
    def site(self) -> SiteTuple:
        """Which matmul of the program."""

    @property
    def output(self) -> torch.Tensor:
        """What it computed."""

    @property
    def started_s(self) -> float:
        """When the suspicion arose, on ``time.perf_counter``."""


@dataclass(frozen=True)
class Suspicion:
    """A product with suspect rows; ``rerun`` computes it again with the same kernel."""

    site: SiteTuple
    gemm: Gemm
    output: torch.Tensor
    rows: torch.Tensor  # fp64 [3, batch, M]: residual, threshold, energy
    kept: bool  # the checksums of B were made before this op
    rerun: Callable[[], torch.Tensor]
    forget: Callable[[], None] = lambda: None  # drops the kept checksums of B
    correction: str = ""  # one of CORRECTIONS; the process's where empty
    encode: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]] = encode  # as B's were
    started_s: float = field(default_factory=time.perf_counter)


@dataclass
class Deferred:
    """What a pass left to decide: faults not repaired, and inputs that no healthy pass has."""

    unrepaired: list[events.Event] = field(default_factory=list)
    doubtful: set[tuple[str, str]] = field(default_factory=set)  # (kind, site)


@dataclass
class _Policy:
    deferred: Deferred | None = None
    correction: str = "recompute"
    dismissed_rows: int = 0
    doubts_reported: set[tuple[int, str]] = field(default_factory=set)  # (step, kind)


_policy = _Policy()


@contextmanager
def deferring() -> Iterator[Deferred]:
    """Collect unrepaired faults instead of raising in mid-step.

    A rank that raised in the middle of a backward pass would leave the others waiting in their
    collective; the Guard finishes the step and then decides with all ranks.
    """
    outer, _policy.deferred = _policy.deferred, Deferred()
    try:
        yield _policy.deferred
    finally:
        _policy.deferred = outer


def set_correction(correction: str) -> None:
    """How faults are corrected in this process from now on, one of ``CORRECTIONS``.

    Raises:
        ValueError: it is none of them.
    """
    if correction not in CORRECTIONS:
        raise ValueError(f"correction must be one of {', '.join(CORRECTIONS)}, got {correction!r}")
    _policy.correction = correction


def dismissed_rows() -> int:
    """Suspect rows that the second opinion cleared, in this process."""
    return _policy.dismissed_rows


def dismiss(rows: int) -> None:
    """Count suspect rows that another op's second opinion cleared."""
    _policy.dismissed_rows += rows


def correction() -> str:
    """How faults are corrected in this process, one of ``CORRECTIONS``."""
    return _policy.correction


def resolve(suspicion: Suspicion) -> None:
    """Decide on every suspect row of a product; repairs ``suspicion.output`` in place.

    Raises:
        UncorrectableFault: a confirmed fault is not repairable here and nobody defers faults.
    """
    if has_mask(suspicion.gemm):
        _resolve_masked(suspicion)
    else:
        _decide(suspicion)


def _resolve_masked(suspicion: Suspicion) -> None:
    """Rows whose addend holds INF: decided by the product without it (see ``masked``)."""
    unmasked = Unmasked.of(suspicion.gemm)
    again = unmasked.compute(suspicion.output)
    _restore_mask(suspicion, unmasked, again)
    revealed = unmasked.where(again, suspicion.output)
    before = revealed.clone()
    plain = replace(
        suspicion,
        gemm=unmasked.gemm,
        output=revealed,
        rows=_verify(unmasked.gemm, revealed),
        rerun=partial(unmasked.compute, suspicion.output),
    )
    _decide(plain, differing_rows(revealed, again))
    if not _same_bits(revealed, before):
        suspicion.output.copy_(unmasked.where(suspicion.output, revealed))


def _restore_mask(suspicion: Suspicion, unmasked: Unmasked, product: torch.Tensor) -> None:
    """Where the addend holds INF and C does not: take what the kernel gives a second time."""
    wrong = unmasked.wrong(suspicion.output, product)
    if not wrong.any():
        return
    rows = as_batch(wrong).any(-1)
    reason = f"row {_first(rows)} is not masked as its addend says"
    if _correction(suspicion) == "detect":
        give_up(suspicion, "gemm_fault", reason)
        return
    again, before = suspicion.rerun(), suspicion.output.clone()
    if unmasked.wrong(again, product).any():
        give_up(suspicion, "gemm_persistent", reason)
        return
    suspicion.output.copy_(unmasked.where(again, before))
    _report_repair(suspicion, rows, before, "mask")


def _decide(suspicion: Suspicion, differing: torch.Tensor | None = None) -> None:
    """Decide on rows over their threshold, and on those that a second computation contradicts."""
    over = over_threshold(suspicion.rows)
    unexplained = _unexplained(suspicion.gemm, suspicion.rows)
    explained = over & ~unexplained
    if differing is not None and differing.any():
        unexplained |= differing & ~_nonfinite_operand_rows(suspicion.gemm)
    if explained.any():
        doubt(suspicion, "nonfinite_input", explained, "an operand is NaN or INF")
    if unexplained.any() and _correction(suspicion) == "checksum":
        unexplained = _correct(suspicion, unexplained)
    if unexplained.any():
        _recompute(suspicion, unexplained)
    extreme = suspect_rows(suspicion.rows) & ~over
    if extreme.any():
        doubt(suspicion, "extreme_input", extreme, f"operands make a row exceed {EXTREME:.0e}")


def _correction(suspicion: Suspicion) -> str:
    return suspicion.correction or _policy.correction


def _correct(suspicion: Suspicion, suspects: torch.Tensor) -> torch.Tensor:
    """Repair by checksums what they can locate; the rows that stay suspect, bool [batch, M]."""
    before = suspicion.output.clone()
    repaired = correct_rows(suspicion.gemm, before, suspects)
    left = _unexplained(suspicion.gemm, _verify(suspicion.gemm, repaired))
    changed = differing_rows(repaired, before) & ~left
    if changed.any():
        as_batch(suspicion.output)[changed] = as_batch(repaired)[changed]
        _report_repair(suspicion, changed, before, "checksum")
    return left


def _recompute(suspicion: Suspicion, suspects: torch.Tensor) -> None:
    """Compute again; repair what differs; judge what repeats."""
    again = suspicion.rerun()
    if _same_bits(again, suspicion.output):
        _judge_reproducible(suspicion, suspects)
        return
    before = suspicion.output.clone()
    settled = _settle(suspicion, [before, again])
    if settled is None:
        give_up(suspicion, "gemm_persistent", "no two recomputations agree")
        return
    changed = differing_rows(settled, before)
    if changed.any() and _correction(suspicion) == "detect":
        give_up(suspicion, "gemm_fault", f"row {_first(changed)} differs from its recomputation")
        return
    if changed.any():
        suspicion.output.copy_(settled)
        _report_repair(suspicion, changed, before, "recompute")
    remaining = _unexplained(suspicion.gemm, _verify(suspicion.gemm, settled))
    if remaining.any():
        _judge_reproducible(suspicion, remaining)


def _settle(suspicion: Suspicion, results: list[torch.Tensor]) -> torch.Tensor | None:
    """The first result that passes or agrees with an earlier one; None if RERUNS give none."""
    while True:
        latest = results[-1]
        if any(_same_bits(latest, earlier) for earlier in results[:-1]):
            return latest
        if not _unexplained(suspicion.gemm, _verify(suspicion.gemm, latest)).any():
            return latest
        if len(results) > RERUNS:
            return None
        results.append(suspicion.rerun())


def _judge_reproducible(suspicion: Suspicion, suspects: torch.Tensor) -> None:
    """The output repeats bit for bit and is still over its threshold: checksum, B, or rounding."""
    gemm = suspicion.gemm
    row_sum, statistics = suspicion.encode(gemm.b)
    fresh = replace(gemm, row_sum=row_sum, statistics=statistics)
    moved = unequal(row_sum, gemm.row_sum)
    if not self_consistent(gemm.row_sum, gemm.statistics):
        suspicion.forget()
        report(suspicion, "checksum_fault", rung="correct", entries=int(moved.sum()))
    elif not (moved.any() or unequal(statistics, gemm.statistics).any()):
        _second_opinion(suspicion, gemm, suspects)
        return
    elif suspicion.kept and int(moved.sum()) > 1 and _policy.deferred is None:
        # Edits through .data or NumPy do not move the version counter. Within a guarded step
        # nobody edits weights: there it is damage.
        suspicion.forget()
        report(suspicion, "weight_changed_unseen", rung="", entries=int(moved.sum()))
    else:
        where = f" in row {_first(moved)}" if moved.any() else ""
        give_up(suspicion, "operand_fault", f"B changed{where} after encoding")
        return
    remaining = _unexplained(fresh, _verify(fresh, suspicion.output))
    if remaining.any():
        _second_opinion(suspicion, fresh, remaining)


def _second_opinion(suspicion: Suspicion, gemm: Gemm, suspects: torch.Tensor) -> None:
    """Compare suspect rows with fp64 arithmetic against the worst-case bound."""
    for batch in suspects.any(1).nonzero().flatten().tolist():
        rows = suspects[batch].nonzero().flatten()
        actual = as_batch(suspicion.output)[batch, rows]
        exact, magnitude, bound = exact_rows(gemm, batch, rows)
        overflow = ~actual.isfinite() & (magnitude > torch.finfo(actual.dtype).max / 2)
        if overflow.any():
            doubt(
                suspicion, "nonfinite_input", suspects, "the product of finite operands overflows"
            )
        wrong = ~((actual.double() - exact).abs() <= bound) & ~overflow & bound.isfinite()
        if wrong.any():
            bound = bound + abs(gemm.alpha) * flushed(gemm, batch, rows)
            wrong &= ~((actual.double() - exact).abs() <= bound)
        if wrong.any():
            column = int(wrong.any(0).nonzero()[0])
            reason = f"row {int(rows[wrong.any(1)][0])}, column {column} repeats a wrong value"
            give_up(suspicion, "gemm_persistent", reason)
            return
        _policy.dismissed_rows += len(rows)


def differing_rows(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Rows whose bits differ, bool [batch, M]; a NaN equals the same NaN."""
    return (as_batch(_bits(left)) != as_batch(_bits(right))).any(-1)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.contiguous().view(integer)


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(_bits(left), _bits(right))


def _first(mask: torch.Tensor) -> int:
    return int(mask.flatten().nonzero()[0]) % mask.shape[-1]


def _verify(gemm: Gemm, output: torch.Tensor) -> torch.Tensor:
    encoding = (gemm.row_sum, gemm.statistics)
    return verify(output, gemm.a, *encoding, gemm.addend, gemm.beta, gemm.alpha, gemm.b)


def _nonfinite_operand_rows(gemm: Gemm) -> torch.Tensor:
    """Rows of C that a NaN or INF in A, B or the addend reaches, bool [batch, M].

    B counts only where its checksum shows the same: what became NaN after encoding is a fault.
    """
    in_b = ~as_batch(gemm.b).isfinite().all(-1) & ~gemm.row_sum.isfinite()
    rows = ~as_batch(gemm.a).isfinite().all(-1) | in_b.any(-1, keepdim=True)
    if gemm.addend is not None and gemm.beta != 0:
        rows = rows | ~as_batch(full_addend(gemm)).isfinite().all(-1)
    return rows


def _unexplained(gemm: Gemm, rows: torch.Tensor) -> torch.Tensor:
    """Rows over their threshold that no NaN or INF in an operand explains, bool [batch, M]."""
    over = over_threshold(rows)
    # Non-finite operands make residual or threshold non-finite: else there is nothing to look for.
    if rows[:2].isfinite().all(0)[over].all():
        return over
    return over & ~_nonfinite_operand_rows(gemm)


def report_damaged_encoding(site: SiteTuple) -> None:
    """A kept encoding lost its fingerprint; it was dropped and made anew."""
    events.record(
        "checksum_fault", op=site_name(site), detector="fingerprint", rung="correct", device="cpu"
    )


def report(suspicion: Case, kind: str, *, rung: str, **detail: object) -> events.Event:
    """Record what was decided of a suspicion."""
    return events.record(
        kind,
        op=site_name(suspicion.site),
        detector="checksum",
        rung=rung,
        duration_s=time.perf_counter() - suspicion.started_s,
        device=str(suspicion.output.device),
        detail=detail,
    )


def _report_repair(
    suspicion: Suspicion, changed: torch.Tensor, before: torch.Tensor, method: str
) -> None:
    batch, row = changed.nonzero()[0].tolist()
    wrong = _bits(as_batch(before)[batch, row]) != _bits(as_batch(suspicion.output)[batch, row])
    column = int(wrong.nonzero()[0])
    report(
        suspicion,
        "gemm_fault",
        rung="correct",
        method=method,
        rows=int(changed.sum()),
        index=[batch, row, column],
        corrupted=float(as_batch(before)[batch, row, column]),
        repaired=float(as_batch(suspicion.output)[batch, row, column]),
    )


def doubt(suspicion: Case, kind: str, rows: torch.Tensor, reason: str) -> None:
    """Record an input that no healthy pass has.

    Every site is noted; the event is of the step's first, next to the source: others inherit it.
    """
    if _policy.deferred is not None:
        _policy.deferred.doubtful.add((kind, site_name(suspicion.site)))
    step = events.current_step()
    if step >= 0 and (step, kind) in _policy.doubts_reported:
        return
    _policy.doubts_reported = {(s, k) for s, k in _policy.doubts_reported if s == step}
    _policy.doubts_reported.add((step, kind))
    report(suspicion, kind, rung="", rows=int(rows.sum()), reason=reason)


def give_up(suspicion: Case, kind: str, reason: str) -> None:
    """Record what cannot be repaired here, and raise it or leave it to who defers."""
    event = report(suspicion, kind, rung="", reason=reason)
    if not defer(event):
        raise UncorrectableFault(
            f"{event.op}: {reason} (rank {event.rank}, {event.host}, {event.device}); the result "
            "must not be used: restore a snapshot or run under holdfast.Guard, and check this node"
        )


def defer(event: events.Event) -> bool:
    """Leave an unrepaired fault to who defers faults; whether anybody does."""
    if _policy.deferred is None:
        return False
    _policy.deferred.unrepaired.append(event)
    return True
