"""Diagnosis of convolutions whose check failed; ``abft.policy`` handles the findings.

A failed check is made again in fp64, which rounding, overflow and underflow of the check's own sums
do not affect. If it fails too, the same kernel computes the result again, and elements that differ
are replaced. A result that repeats bit for bit is compared with fp64 arithmetic: elements that NaN,
INF or an overflow explain are reported as suspect inputs, and one beyond a worst-case bound is a
fault that repeats. Within the bound the alarm was false.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch

from holdfast.abft import counters
from holdfast.abft.conv.checks import Check
from holdfast.abft.conv.reference import Exact
from holdfast.abft.policy import (
    FalseAlarm,
    FaultContext,
    Findings,
    Repair,
    SuspectInput,
    Unrepaired,
    checking,
    decide,
    settle_by_recomputing,
)
from holdfast.errors import HoldfastError
from holdfast.events import EventKind
from holdfast.sites import SiteTuple

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Computed:
    """A result of a convolution or of its backward pass.

    ``axes`` names its first dimensions in events, ``check`` checks such a result in sums of a
    dtype, and ``again`` computes it by the same kernel.
    """

    site: SiteTuple
    axes: tuple[str, ...]
    output: torch.Tensor
    check: Callable[[torch.Tensor, torch.dtype], Check]
    again: Callable[[], torch.Tensor]
    exact: Callable[[], Exact]
    started_s: float = field(default_factory=time.perf_counter)


def resolve(computed: Computed) -> None:
    """Diagnose a result whose check failed, and repair it in place.

    Raises:
        UncorrectableFault: A fault was not repaired, and no caller is collecting faults.
    """
    device = str(computed.output.device)
    context = FaultContext(computed.site, device=device, started_s=computed.started_s)
    with checking(context):
        decide(context, partial(_findings, computed))


def _findings(computed: Computed, correction: str) -> Findings:
    try:
        yield from _diagnosed(computed)
    except HoldfastError:
        raise
    except Exception:
        counters.left_out(computed.site, "its check failed")
        raise


def _diagnosed(computed: Computed) -> Findings:
    def sound(result: torch.Tensor) -> bool:
        return not computed.check(result, torch.float64).suspects.any()

    before = computed.output.clone()
    if sound(before):
        return
    again = computed.again()
    if _same_bits(again, before):
        yield from _of_repeated(computed, before)
        return
    settled = settle_by_recomputing(computed.again, sound, _same_bits, (before, again), 2)
    if settled is None:
        yield Unrepaired(EventKind.GEMM_PERSISTENT, "no two recomputations agree")
        return
    if not _same_bits(settled, before) and not (yield _repair(computed, settled, before)):
        return
    if not sound(settled):
        yield from _of_repeated(computed, settled)


def _repair(computed: Computed, settled: torch.Tensor, before: torch.Tensor) -> Repair:
    differing = _bits(settled) != _bits(before)
    index = _first(differing)
    detail: dict[str, object] = {
        "method": "recompute",
        "elements": int(differing.sum()),
        "index": list(index),
        "corrupted": float(before[index]),
        "repaired": float(settled[index]),
    }
    where: dict[str, object] = dict(zip(computed.axes, index, strict=False))
    return Repair(
        EventKind.GEMM_FAULT,
        detail | where,
        lambda: computed.output.copy_(settled),
        refusal=f"{_place(computed, index)} differs from its recomputation",
        refusal_detail=where,
    )


def _of_repeated(computed: Computed, result: torch.Tensor) -> Findings:
    """Compare a result that repeats bit for bit with fp64 arithmetic and a worst-case bound."""
    exact = computed.exact()
    explained = ~exact.values.isfinite() | ~exact.bound.isfinite()
    wrong = ~((result.double() - exact.values).abs() <= exact.bound) & ~explained
    if wrong.any():
        place = _place(computed, _first(wrong))
        yield Unrepaired(EventKind.GEMM_PERSISTENT, f"{place} repeats a wrong value")
    elif explained.any():
        reason = "an operand is NaN or INF, or the result overflows"
        yield SuspectInput(EventKind.NONFINITE_INPUT, int(explained.sum()), reason)
    else:
        yield FalseAlarm(1)


def _first(mask: torch.Tensor) -> tuple[int, ...]:
    return tuple(mask.nonzero()[0].tolist())


def _place(computed: Computed, index: tuple[int, ...]) -> str:
    return ", ".join(f"{axis} {at}" for axis, at in zip(computed.axes, index, strict=False))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(_BITS[tensor.element_size()])


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(_bits(left), _bits(right))
