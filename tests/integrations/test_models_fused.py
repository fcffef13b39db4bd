"""Fused attention inside real models: a struck tile is repaired; unprotected, it does harm."""

from math import nan

import pytest
from struck import Strike

from holdfast import events, native, sites
from holdfast.digest.tensors import tensors_digest
from holdfast.protection import protect
from holdfast_lab.study.attnchecker.attack import gradients
from holdfast_lab.study.attnchecker.models import FAMILIES, subject
from holdfast_lab.study.attnchecker.subjects import Subject

pytest.importorskip("transformers", "5.23", reason="the extra 'models' is not installed")
pytestmark = pytest.mark.skipif(native.core is None, reason="the fused kernel is native")

STAGES = ("scores", "probabilities", "accumulator", "grad_probabilities", "grad_query", "grad_key")
NAMES = [name for name, family in FAMILIES.items() if "sdpa" in family.attentions]


def run(case: Subject, strike: Strike, *, verify: bool = True) -> str:
    """The digest of a step with the first tile of a stage struck."""
    with protect(case.model, verify=verify):
        sites.arm(strike)
        try:
            return tensors_digest(gradients(case))
        finally:
            sites.disarm()


@pytest.mark.parametrize("name", NAMES)
def test_a_struck_tile_is_repaired_bit_for_bit_and_harmful_unprotected(name: str) -> None:
    case = subject(name, attention="sdpa")
    clean = run(case, Strike((0, 0), nan, stage="none"))
    assert events.recent() == []
    for stage in STAGES:
        strike = Strike((0, 0), nan, stage=stage)
        assert run(case, strike) == clean, stage
        found = [(event.kind, event.op) for event in events.recent()]
        assert found == [("gemm_fault", strike.seen[0])], stage
        events.clear()
        assert run(case, Strike((0, 0), nan, stage=stage), verify=False) != clean, stage
        assert events.recent() == []
