"""A model compiled bare and then protected: its checks are in the graph, forward and backward."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from case_loops import for_each
from compile_cases import (
    COMPILING,
    SITES,
    bit_flip,
    forward_backward,
    injected,
    small_model,
)
from site_reports import covered, uncovered
from torch import nn

import holdfast
from holdfast import events
from holdfast.protection import Protection

pytestmark = COMPILING


@dataclass
class Compiled:
    """A model in one graph, forward and backward."""

    model: nn.Module
    protection: Protection
    bare: str  # digest of what it computed before it was protected


@pytest.fixture(scope="module")
def compiled() -> Iterator[Compiled]:
    """Compiled first, protected then: made once, as Inductor takes seconds."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.compiler.reset()
    model = torch.compile(small_model(), fullgraph=True)
    bare = forward_backward(model)
    with holdfast.protect(model) as protection:
        yield Compiled(model, protection, bare)
    torch.compiler.reset()
    torch.set_num_threads(threads)


@pytest.mark.representative
def test_a_protected_graph_computes_the_same_bits_under_the_names_of_eager_mode(
    compiled: Compiled,
) -> None:
    compiled.protection.reset_counters()
    assert forward_backward(compiled.model) == compiled.bare
    report = compiled.protection.report()
    assert covered(report) == dict.fromkeys(SITES, 1)
    assert uncovered(report) == {}
    compiled.protection.reset_counters()
    forward_backward(compiled.model._orig_mod)
    assert covered(compiled.protection.report()) == dict.fromkeys(SITES, 1)
    assert events.recent() == []


@for_each("op", sorted(SITES))
def test_a_fault_in_a_compiled_product_is_repaired_bit_for_bit(compiled: Compiled, op: str) -> None:
    assert injected(compiled.model, bit_flip(op)) == compiled.bare
    assert [(event.kind, event.op) for event in events.recent()][1:] == [("gemm_fault", op)]


@for_each("op", ["0.up/addmm/forward", "0/bmm#2/grad_b"])
def test_a_damaged_checksum_heals_in_a_compiled_graph(compiled: Compiled, op: str) -> None:
    assert injected(compiled.model, bit_flip(op, site="checksum", bit=62)) == compiled.bare
    assert [(event.kind, event.op) for event in events.recent()][1:] == [("checksum_fault", op)]
