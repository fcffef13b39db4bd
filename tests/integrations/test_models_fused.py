"""Fused attention inside real models: a struck tile is repaired; unprotected, it does harm."""

from math import nan

import pytest
import torch

from holdfast import events, native, sites
from holdfast.digest.tensors import tensors_digest
from holdfast.inject.faults import write_element
from holdfast.protection import protect
from holdfast.sites import Gemm
from holdfast_lab.study.attnchecker.attack import gradients
from holdfast_lab.study.attnchecker.models import FAMILIES, subject
from holdfast_lab.study.attnchecker.subjects import Subject

pytest.importorskip("transformers", "5.23", reason="the extra 'models' is not installed")
pytestmark = pytest.mark.skipif(native.core is None, reason="the fused kernel is native")

STAGES = ("scores", "probabilities", "accumulator", "grad_probabilities", "grad_query", "grad_key")
NAMES = [name for name, family in FAMILIES.items() if "sdpa" in family.attentions]


class Tile:
    """A site hook that overwrites an element of the first tile of a stage, once."""

    def __init__(self, stage: str) -> None:
        self._stage = stage
        self.site = ""

    def __call__(self, stage: str, site: str, gemm: Gemm, output: torch.Tensor | None) -> None:
        """See ``sites.arm``."""
        if stage == self._stage and not self.site:
            assert output is not None
            self.site = site
            write_element(output, (0, 0), nan)


def run(case: Subject, tile: Tile | None, *, verify: bool = True) -> str:
    """The digest of a step with a tile struck; without one the same kernel runs untouched."""
    with protect(case.model, verify=verify):
        sites.arm(tile if tile is not None else lambda *_: None)
        try:
            return tensors_digest(gradients(case))
        finally:
            sites.disarm()


@pytest.mark.parametrize("name", NAMES)
def test_a_struck_tile_is_repaired_bit_for_bit_and_harmful_unprotected(name: str) -> None:
    case = subject(name, attention="sdpa")
    clean = run(case, None)
    assert events.recent() == []
    for stage in STAGES:
        tile = Tile(stage)
        assert run(case, tile) == clean, stage
        assert [(event.kind, event.op) for event in events.recent()] == [("gemm_fault", tile.site)]
        events.clear()
        assert run(case, Tile(stage), verify=False) != clean, stage
        assert events.recent() == []
