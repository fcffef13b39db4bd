"""The detector's triple: silent when clean, repaired when faulty, and not vacuous when off.

Every product, in and out of place, forward and backward, in every dtype.
"""

import itertools

import pytest
import torch
from case_loops import for_each, fuzz_after
from gemm_cases import (
    FUNCTIONAL,
    WRITING,
    Fault,
    Injection,
    armed,
    faults,
    forward,
    forward_backward,
)
from struck import kinds
from torch import nn

import holdfast
from holdfast import events
from holdfast.abft import policy
from holdfast.digest.tensors import tensors_digest
from holdfast.errors import UncorrectableFault

PLACES = ["first", "middle", "last"]
CASES = [
    *((op, "forward") for op in FUNCTIONAL),
    *itertools.product(FUNCTIONAL, ["grad_a", "grad_b"]),
    *((op, "forward") for op in WRITING),
]
all_cases = for_each(("op", "role"), CASES, first=6)
# The formats that training uses most; the others, as thorough, with `fuzz`.
ORDERED = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
all_dtypes = pytest.mark.parametrize("dtype", fuzz_after(ORDERED, 2), ids=str)


def run(op: str, role: str, dtype: torch.dtype, *, verify: bool = True) -> str:
    """The digest of everything that a product computes, under protection."""
    with holdfast.protect(nn.Identity(), verify=verify):
        return tensors_digest((forward if role == "forward" else forward_backward)(op, dtype))


def healthy(op: str, role: str, dtype: torch.dtype) -> str:
    """The same without holdfast."""
    return tensors_digest((forward if role == "forward" else forward_backward)(op, dtype))


@all_dtypes
@all_cases
def test_clean_products_are_silent_and_unchanged(op: str, role: str, dtype: torch.dtype) -> None:
    with holdfast.protect(nn.Identity()) as protection:
        protection.reset_counters()
        results = (forward if role == "forward" else forward_backward)(op, dtype)
        rows = sum(site.rows for site in protection.report().sites)
    assert tensors_digest(results) == healthy(op, role, dtype)
    assert rows > 0
    assert events.recent() == []


@all_dtypes
@all_cases
def test_faulty_outputs_are_repaired_bit_for_bit(op: str, role: str, dtype: torch.dtype) -> None:
    clean, certain = healthy(op, role, dtype), 0
    for fault, place in itertools.product(faults(dtype), PLACES):
        events.clear()
        with armed(Injection("output", role, fault, place)) as injection:
            result = run(op, role, dtype)
        found = events.recent()
        certain += injection.certain
        assert len(found) == 1 or not injection.certain, (fault, place)
        assert (result == clean) == (len(found) == 1), (fault, place)
        for event in found:
            assert event.kind == "gemm_fault"
            assert event.op.endswith(f"/{role}")
            assert event.detail["index"] == injection.index
    assert certain >= 3 * 6  # INF, NaN, near-INF and the uppermost exponent bit at the least


@all_dtypes
@all_cases
def test_without_verification_the_same_faults_reach_the_result(
    op: str, role: str, dtype: torch.dtype
) -> None:
    clean = healthy(op, role, dtype)
    for fault, place in itertools.product(faults(dtype), PLACES):
        with armed(Injection("output", role, fault, place)):
            result = run(op, role, dtype, verify=False)
        assert result != clean, (fault, place)
    assert events.recent() == []


OPERAND_FAULTS = [
    Fault("huge", value=3e4),
    Fault("inf", value=torch.inf),
    Fault("nan", value=torch.nan),
]


@all_dtypes
@all_cases
@for_each("fault", OPERAND_FAULTS)
def test_a_damaged_operand_is_raised_or_deferred(
    op: str, role: str, dtype: torch.dtype, fault: Fault
) -> None:
    with (
        armed(Injection("operand", role, fault, "middle")),
        pytest.raises(UncorrectableFault, match=rf"{role}: B changed in row \d+ after encoding"),
    ):
        run(op, role, dtype)
    with armed(Injection("operand", role, fault, "middle")), policy.collecting() as found:
        run(op, role, dtype)
    assert [event.kind for event in found.unrepaired] == ["operand_fault"]
    assert kinds().count("operand_fault") == 2
    with armed(Injection("operand", role, fault, "middle")):
        assert run(op, role, dtype, verify=False) != healthy(op, role, dtype)


@all_dtypes
@all_cases
def test_a_damaged_checksum_never_harms(op: str, role: str, dtype: torch.dtype) -> None:
    clean, seen = healthy(op, role, dtype), 0
    for fault, place in itertools.product(faults(torch.float64), PLACES):
        events.clear()
        with armed(Injection("checksum", role, fault, place)):
            assert run(op, role, dtype) == clean, (fault, place)
        assert kinds() in ([], ["checksum_fault"]), (fault, place)
        seen += len(kinds())
    assert seen >= 3 * 6
