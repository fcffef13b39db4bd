"""A GPU is a unit of its own, screened beside the cores."""

from collections.abc import Callable

import pytest
import torch

from holdfast.screen.emulation import Emulated
from holdfast.screen.units import Unit, machine_units
from holdfast.screen.verdict import Verdict
from holdfast.screen.workloads import op_names

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.processes,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
Screen = Callable[..., Verdict]


def gpus() -> list[Unit]:
    return [unit for unit in machine_units() if unit.core is None]


def test_every_gpu_repeats_its_bits(screened: Screen) -> None:
    verdict = screened(gpus())
    assert verdict.state == "healthy"
    assert set(verdict.work[0].executions) == set(op_names("cuda"))


def test_an_emulated_fault_is_found_on_a_gpu(screened: Screen) -> None:
    faults = [Emulated(gpus()[0].name, "elementwise", 12, every=3)]
    verdict = screened(gpus(), faults=faults, rounds=12)
    assert verdict.suspects() == [gpus()[0].name]
