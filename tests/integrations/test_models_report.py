"""What a model runs and what the report says of it, counted by two that know nothing of each other.

The report counts in the kernels; the oracle watches torch's dispatcher and asks torch's own list of
the operators that multiply matrices (which lacks the CPU's fused attention and the products with
vectors). A gradient's product is named after the forward one, so totals are compared.
"""

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from holdfast import events, native
from holdfast.protection import CoverageReport, protect
from holdfast_lab.study.attnchecker.attack import gradients
from holdfast_lab.study.attnchecker.coverage import FUSED, fused, is_fused, listed
from holdfast_lab.study.attnchecker.models import FAMILIES, subject
from holdfast_lab.study.attnchecker.subjects import Subject

pytest.importorskip("transformers", "5.23", reason="the extra 'models' is not installed")

GEMMS = {"mm", "addmm", "bmm", "baddbmm", "mv", "addmv"}
FUSED_OPS = "_scaled_dot_product"
VECTORS = {"mv", "addmv", "dot", "vdot"}
CASES = [(name, attention) for name, family in FAMILIES.items() for attention in family.attentions]


class Multiplications(TorchDispatchMode):
    """Counts the calls of operators that multiply matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Every operator passes here, forward and backward."""
        name = func.overloadpacket.__name__
        if func.overloadpacket in flop_registry or name in VECTORS or name.startswith(FUSED_OPS):
            self.calls[name] += 1
        return func(*args, **kwargs or {})


def multiplications(case: Subject) -> Counter[str]:
    """What one step of an unprotected model multiplies, by operator."""
    with Multiplications() as seen:
        gradients(case)
    return seen.calls


def report(case: Subject) -> CoverageReport:
    """The report on the same step."""
    with protect(case.model) as protection:
        gradients(case)
        return protection.report()


def calls_of(found: CoverageReport, *, fused: bool) -> int:
    """Calls of the sites of matmuls, or of fused attention, covered or not."""
    products = [site for site in found.sites if "/convolution/" not in site.site]
    return sum(site.calls for site in products if is_fused(site.site) == fused)


@pytest.mark.parametrize(("name", "attention"), CASES)
def test_every_product_of_a_step_is_in_the_report(name: str, attention: str) -> None:
    case = subject(name, attention=attention)
    run, found = multiplications(case), report(case)
    assert calls_of(found, fused=False) == sum(run[op] for op in GEMMS) > 0
    assert calls_of(found, fused=True) == sum(n for op, n in run.items() if FUSED_OPS in op)
    uncovered = [site for site in found.sites if not site.covered]
    assert all(site.reason for site in uncovered)
    convolved = sum(site.site.endswith("/convolution/forward") for site in found.sites)
    assert convolved == run["convolution"]
    for op in run.keys() - GEMMS:
        known = op.startswith((*FUSED_OPS, "convolution"))
        assert known, f"no rule for {op}: is it in the report?"


@pytest.mark.parametrize("name", [name for name, attention in CASES if attention == "sdpa"])
def test_fused_attention_is_covered_or_listed_forward_and_backward(name: str) -> None:
    case = subject(name, attention="sdpa")
    calls = sum(n for op, n in multiplications(case).items() if op.startswith(FUSED_OPS))
    row = fused(case)
    assert calls > 0
    assert calls % 2 == 0
    assert row.table == FUSED
    if native.core is not None:
        assert row.measured["covered"] == row.measured["sites"] > 0
    assert row.measured["covered"] == row.measured["sites"] or row.note
    assert events.recent() == []


@pytest.mark.parametrize("name", FAMILIES)
def test_of_unfused_models_everything_is_covered(name: str) -> None:
    assert [row.case["site"] for row in listed(subject(name))] == []


def test_the_oracle_sees_both_passes() -> None:
    weight = torch.ones(3, 3, requires_grad=True)
    with Multiplications() as seen:
        (torch.ones(2, 3) @ weight).sum().backward()
    assert seen.calls == {"mm": 2}
