"""The softmax of verified attention, checked by the sum of each row, which must be one."""

import time
from collections.abc import Callable

import torch

from holdfast import sites
from holdfast.abft.attention import section_counters
from holdfast.abft.attention.section_product import Section
from holdfast.abft.gemm.passes import encode
from holdfast.abft.gemm.suspects import differing_rows
from holdfast.abft.policy import (
    FaultContext,
    Findings,
    Repair,
    SuspectInput,
    Unrepaired,
    decide,
)
from holdfast.abft.thresholds.protocol import ACCUMULATION
from holdfast.events import EventKind
from holdfast.sites import Gemm

STEPS = 32  # roundings in a row of one exponential, its share and the quotient, generously


def softmax(scores: torch.Tensor, empty: torch.Tensor | None) -> torch.Tensor:
    """Compute softmax over the last dimension; rows marked in ``empty`` [.., 1] are zero."""
    probabilities = torch.softmax(scores, -1)
    return probabilities if empty is None else probabilities.masked_fill_(empty, 0)


def row_bound(columns: int, dtype: torch.dtype) -> float:
    """Bound how far the sum of a row of probabilities may be from 1, for any scores.

    Each probability is rounded once to its dtype, all of them by no more than ``u · Σ P``, and lost
    below the smallest subnormal; their sum is rounded to the dtype as well. The exponentials' sum,
    by which all are divided, and the sum of the check add ``columns`` roundings each of the
    accumulator.
    """
    out, accumulator = torch.finfo(dtype), torch.finfo(ACCUMULATION[dtype])
    steps = 2 * columns + STEPS
    return out.eps + steps * accumulator.eps / 2 + columns * out.smallest_normal * out.eps


def visit(section: Section, probabilities: torch.Tensor) -> None:
    """Let a fault injector change P, which is passed as the product ``P·I``, with no rounding."""
    if not sites.armed():
        return
    columns = probabilities.shape[-1]
    identity = torch.eye(columns, dtype=probabilities.dtype)
    shape = (len(probabilities), -1)
    row_sum, statistics = (t.expand(shape).contiguous() for t in encode(identity))
    many = identity.expand(len(probabilities), columns, columns)
    gemm = Gemm(None, probabilities.clone(), many, 1.0, 1.0, row_sum, statistics)
    sites.visit("output", section.site("AP"), gemm, probabilities)


def settle(
    section: Section,
    probabilities: torch.Tensor,
    empty: torch.Tensor | None,
    again: Callable[[], torch.Tensor],
) -> bool:
    """Check P [batch, rows, columns] and replace it if it was wrong; return whether it changed.

    Guarantees: an element that is wrong by more than twice ``row_bound`` is found, if no other of
    its row makes up for it. Not covered: probabilities that are wrong together (scores that were
    exchanged, a maximum that is not the row's): their sum is one as well.

    Raises:
        UncorrectableFault: P differs each time it is computed, and nobody collects faults.
    """
    if not section.due or not probabilities.numel():
        return False
    started_s = time.perf_counter()
    off = probabilities.sum(-1).sub_(1)  # accumulated in fp32 or fp64; asked for, it would copy
    if empty is not None:
        off += empty.squeeze(-1)
    off.abs_()
    bound = row_bound(probabilities.shape[-1], probabilities.dtype)
    clean = bool(off.amax() <= bound)  # comparisons with NaN are False
    suspects = 0 if clean else int((~(off <= bound)).sum())
    seconds = time.perf_counter() - started_s
    section_counters.verified(section.site("AP"), off.numel(), suspects, seconds)
    return not clean and _decide(section, probabilities, off, bound, again)


def _decide(
    section: Section,
    probabilities: torch.Tensor,
    off: torch.Tensor,
    bound: float,
    again: Callable[[], torch.Tensor],
) -> bool:
    before = probabilities.clone()
    context = FaultContext(
        section.site("AP"),
        override=section.correction,
        device=str(probabilities.device),
        detector="row_sum",
    )
    failing = ~(off <= bound)
    decide(context, lambda correction: _judged(probabilities, failing, again))
    return bool(differing_rows(probabilities, before).any())


def _judged(
    probabilities: torch.Tensor, failing: torch.Tensor, again: Callable[[], torch.Tensor]
) -> Findings:
    first, second = again(), again()
    if differing_rows(first, second).any():
        yield Unrepaired(EventKind.SOFTMAX_PERSISTENT, "no two recomputations agree")
        return
    wrong = differing_rows(first, probabilities)
    if wrong.any():
        refusal = "a row does not sum to one, and did not repeat"
        detail = _difference(probabilities, first, wrong)
        yield Repair(EventKind.SOFTMAX_FAULT, detail, lambda: probabilities.copy_(first), refusal)
    # Scores that hold NaN, or INF from an overflow, have no softmax; anything else is wrong.
    elif probabilities[failing].isfinite().all():
        yield Unrepaired(EventKind.SOFTMAX_PERSISTENT, "a row repeats a sum that is not one")
    else:
        yield SuspectInput(EventKind.NONFINITE_INPUT, int(failing.sum()), "scores are NaN or INF")


def _difference(wrong: torch.Tensor, right: torch.Tensor, rows: torch.Tensor) -> dict[str, object]:
    batch, row = rows.nonzero()[0].tolist()
    column = int((wrong[batch, row] != right[batch, row]).nonzero()[0])
    return {
        "method": "recompute",
        "rows": int(rows.sum()),
        "index": [batch, row, column],
        "corrupted": float(wrong[batch, row, column]),
        "repaired": float(right[batch, row, column]),
    }
