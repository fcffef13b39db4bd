"""Faults in every stage of the Triton attention: found, repaired, and let through unverified."""

import math
from dataclasses import replace
from functools import cache

import torch
from case_loops import for_each
from fused_cases import Case
from struck import same_bits
from triton_attention_cases import (
    BACKWARD_STREAM,
    FORWARD_STREAM,
    Run,
    backward,
    fault,
    faults,
    forward,
    operands,
    run,
)
from triton_device import MARKS

from holdfast.abft.attention.cuda import Part, Place, RowStatus, Verdict

pytestmark = MARKS

CASE = Case(heads=2, kv_heads=1, queries=40, keys=70, width=24)
FORWARD, OF_QUERIES, OF_KEYS = range(3)  # the kernels, as a Run has their verdicts

# What is struck, where, and which check must see it.
STRUCK: dict[str, tuple[int, Place, int, Part]] = {
    "S": (FORWARD, Place.SCORES, 68, Part.SCORES),
    "P": (FORWARD, Place.PROBABILITIES, 5, Part.PROBABILITIES),
    "maximum": (FORWARD, Place.MAXIMUM, 0, Part.STATE),
    "sum": (FORWARD, Place.SUM, 0, Part.STATE),
    "P V": (FORWARD, Place.ACCUMULATOR, 5, Part.OUTPUT),
    "S for dQ": (OF_QUERIES, Place.SCORES, 69, Part.SCORES),
    "P for dQ": (OF_QUERIES, Place.PROBABILITIES, 64, Part.PROBABILITIES),
    "dP for dQ": (OF_QUERIES, Place.GRAD_PROBABILITIES, 3, Part.GRAD_PROBABILITIES),
    "δ": (OF_QUERIES, Place.DELTA, 0, Part.STATE),
    "dQ": (OF_QUERIES, Place.ACCUMULATOR, 23, Part.OUTPUT),
    "S for dK": (OF_KEYS, Place.SCORES, 39, Part.SCORES),
    "P for dV": (OF_KEYS, Place.PROBABILITIES, 1, Part.PROBABILITIES),
    "dP for dK": (OF_KEYS, Place.GRAD_PROBABILITIES, 33, Part.GRAD_PROBABILITIES),
    "dK": (OF_KEYS, Place.ACCUMULATOR, 11, Part.OUTPUT),
    "dV": (OF_KEYS, Place.GRAD_VALUE, 0, Part.GRAD_VALUE),
}
EXTREME = (math.inf, -math.inf, math.nan, 3e38)


@cache
def clean(dtype: torch.dtype = torch.float16) -> tuple[list[torch.Tensor], Run]:
    """Operands, and what they give."""
    given = operands(CASE, dtype)
    return given, run(CASE, given)


def _computed(
    kernel: int, dtype: torch.dtype, struck: torch.Tensor, unverified: bool = False
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...], Verdict | None]:
    """What a kernel that is struck gives, what it gave before, and its verdict."""
    given, expected = clean(dtype)
    if kernel == FORWARD:
        out, lse, verdict = forward(CASE, given, faults=struck, unverified=unverified)
        return (out, lse), (expected.out, expected.lse), verdict
    name = "query_faults" if kernel == OF_QUERIES else "key_faults"
    options = {name: struck, "unverified": unverified}
    gradients, verdicts = backward(CASE, given, expected.out, expected.lse, **options)
    verdict = None if verdicts is None else verdicts[kernel - 1]
    return tuple(gradients), tuple(expected.gradients), verdict


def _stream(kernel: int) -> int:
    return FORWARD_STREAM if kernel == FORWARD else BACKWARD_STREAM


def _changed(
    found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...], matrix: int
) -> set[int]:
    """The rows of a matrix of which some result is not what it was."""
    differ = (
        (mine != theirs)[0, matrix].reshape(mine.shape[2], -1).any(1)
        for mine, theirs in zip(found, expected, strict=True)
        if mine.shape[1] > matrix
    )
    return {row for rows in differ for row in rows.nonzero().flatten().tolist()}


@for_each("kernel", [FORWARD, OF_QUERIES, OF_KEYS])
def test_a_fault_is_found_and_repaired_and_without_checks_gets_through(kernel: int) -> None:
    """One moderate and one extreme fault in every stage of a kernel, each in a row of its own."""
    names = [name for name, struck in STRUCK.items() if struck[0] == kernel]
    assert len(names) == 5
    matrix = 0 if kernel == OF_KEYS else 1
    rows = {name: (3 + number, 37 - number) for number, name in enumerate(names)}
    struck = []
    for name, (moderate, extreme) in rows.items():
        _, place, column, _ = STRUCK[name]
        where = {"stream": _stream(kernel), "matrix": matrix, "column": column}
        struck.append(fault(place, row=moderate, value=7.5, **where))
        value = EXTREME[list(STRUCK).index(name) % len(EXTREME)]
        struck.append(fault(place, row=extreme, value=value, **where))

    found, expected, verdict = _computed(kernel, torch.float16, faults(*struck), unverified=True)
    assert verdict is None
    changed = _changed(found, expected, matrix)
    assert all(changed & set(pair) for pair in rows.values())
    found, expected, verdict = _computed(kernel, torch.float16, faults(*struck))
    assert same_bits(found, expected)
    assert verdict is not None
    places = sorted(row for pair in rows.values() for row in pair)
    assert verdict.status.nonzero().tolist() == [[0, matrix, row] for row in places]
    assert set(verdict.status[0, matrix, places].tolist()) == {RowStatus.CORRECTED}
    assert verdict.counts.tolist() == [10, 10]
    for name, (moderate, _) in rows.items():
        found_by = int(verdict.parts[0, matrix, moderate])
        assert found_by & STRUCK[name][3], (name, Part(found_by))


@for_each("name", ["S", "P V", "dP for dQ", "dQ", "dV"])
def test_a_small_fault_is_seen(name: str) -> None:
    given, _ = clean(torch.float32)
    kernel, place, column, part = STRUCK[name]
    # Everything is computed in fp32: what is off by a thousandth is far beyond rounding.
    healthy = _value_at(given, name, row=9, column=column)
    value = healthy + 1e-3 * max(1.0, abs(healthy))
    struck = fault(place, row=9, column=column, value=value, stream=_stream(kernel))
    found, expected, verdict = _computed(kernel, torch.float32, faults(struck))
    assert same_bits(found, expected)
    assert verdict is not None
    assert verdict.counts.tolist() == [1, 1]
    assert int(verdict.parts[0, 0, 9]) == part


def _value_at(given: list[torch.Tensor], name: str, row: int, column: int) -> float:
    """What stands at an element of matrix 0, of an accumulator after its first tile."""
    q, k, v, grad = (tensor[0, 0].double() for tensor in given)
    scores = q @ k.T
    scaled = scores * q.shape[1] ** -0.5
    grad_p = grad @ v.T
    p = scaled.softmax(1)
    ds = p * (grad_p - (p * grad_p).sum(1, keepdim=True))
    first = scaled[:, :FORWARD_STREAM]
    values = {
        "S": scores,
        "P V": (first - first.amax(1, keepdim=True)).exp() @ v[:FORWARD_STREAM],
        "dP for dQ": grad_p,
        "dQ": ds[:, :BACKWARD_STREAM] @ k[:BACKWARD_STREAM],
        "dV": p[:BACKWARD_STREAM].T @ grad[:BACKWARD_STREAM],
    }
    return float(values[name][row, column])


def test_a_fault_that_persists_is_reported_as_such() -> None:
    given, expected = clean()
    lasting = fault(Place.ACCUMULATOR, row=36, column=3, value=1e4, attempts=99)
    passing = fault(Place.ACCUMULATOR, row=2, column=3, value=1e4)
    out, _, verdict = forward(CASE, given, faults=faults(lasting, passing))
    assert verdict is not None
    assert verdict.counts.tolist() == [2, 1]
    assert verdict.status[0, 0, 36] == RowStatus.SUSPECT
    assert verdict.status[0, 0, 2] == RowStatus.CORRECTED
    assert out[0, 0, 36, 3].abs() > 10
    out[0, 0, 36] = expected.out[0, 0, 36]
    assert torch.equal(out, expected.out)


def test_a_wrong_logarithm_is_seen_by_the_sums_of_the_probabilities() -> None:
    given, expected = clean()
    for wrong in (0.01, -0.01):
        lse = expected.lse.clone()
        lse[0, 1, 20] += wrong
        _, verdicts = backward(CASE, given, expected.out, lse)
        assert verdicts is not None
        assert verdicts[0].status.nonzero().tolist() == [[0, 1, 20]]
        assert int(verdicts[0].status[0, 1, 20]) == RowStatus.SUSPECT
        assert int(verdicts[0].parts[0, 1, 20]) == Part.PROBABILITIES


def test_an_operand_that_is_not_finite_is_reported_and_used() -> None:
    case = replace(CASE, kv_heads=2)
    given = operands(case, torch.float16)
    given[0][0, 0, 4, 9] = torch.inf
    given[2][0, 1, 30, 2] = torch.nan
    out, _, verdict = forward(case, given)
    assert verdict is not None
    assert verdict.status[0, 0].nonzero().flatten().tolist() == [4]
    assert (verdict.status[0, 1] == RowStatus.SUSPECT).all()
    assert out[0, 1, :, 2].isnan().all()
    assert out[0, 0, 4].isnan().all()
    assert out[0, 0, 5].isfinite().all()
