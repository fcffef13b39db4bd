"""The softmax of verified attention, checked by the sum of each row, which must be one."""

import time
from collections.abc import Callable

import torch

from holdfast import sites
from holdfast.abft import counters
from holdfast.abft.attention.section_product import Section
from holdfast.abft.gemm.cpu import encode
from holdfast.abft.gemm.suspects import differing_rows, first_difference
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

STEPS = 32  # more roundings than one exponential, its sum's reciprocal and the quotient take


def softmax(scores: torch.Tensor, empty: torch.Tensor | None) -> torch.Tensor:
    """Compute softmax over the last dimension; rows marked in ``empty`` [.., 1] are zero."""
    probabilities = torch.softmax(scores, -1)
    return probabilities if empty is None else probabilities.masked_fill_(empty, 0)


def row_bound(columns: int, dtype: torch.dtype) -> float:
    """Bound the distance from 1 of the sum of a row of probabilities, for any scores.

    The roundings of the probabilities to their dtype change their sum by at most ``u · Σ P``, plus
    what underflows; the sum is rounded to the dtype as well. Summing the exponentials, and summing
    the probabilities in the check, add ``columns`` roundings of the accumulator each.
    """
    out, accumulator = torch.finfo(dtype), torch.finfo(ACCUMULATION[dtype])
    steps = 2 * columns + STEPS
    return out.eps + steps * accumulator.eps / 2 + columns * out.smallest_normal * out.eps


def visit(section: Section, probabilities: torch.Tensor) -> None:
    """Let a fault injector change P, which it sees as the output of the product ``P·I``."""
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

    Guarantees: an element that is wrong by more than twice ``row_bound`` is found, unless another
    element of its row cancels it. Not covered: several wrong probabilities whose sum is still one,
    as after an exchange of scores or with a maximum that is not the row's.

    Raises:
        UncorrectableFault: P differs each time it is computed, and no caller is collecting faults.
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
    counters.verified(section.site("AP"), off.numel(), suspects, seconds)
    if clean:
        return False
    before, failing = probabilities.clone(), ~(off <= bound)
    context = FaultContext(
        section.site("AP"),
        override=section.correction,
        device=str(probabilities.device),
        detector="row_sum",
    )
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
        detail = {"method": "recompute"} | first_difference(probabilities, first, wrong)
        yield Repair(EventKind.SOFTMAX_FAULT, detail, lambda: probabilities.copy_(first), refusal)
    # The softmax of scores with NaN, or INF from an overflow, is NaN; anything else is a fault.
    elif probabilities[failing].isfinite().all():
        yield Unrepaired(EventKind.SOFTMAX_PERSISTENT, "a row repeats a sum that is not one")
    else:
        yield SuspectInput(EventKind.NONFINITE_INPUT, int(failing.sum()), "scores are NaN or INF")
