"""torchtitan's Trainer on a CPU: the contract of every adapter."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from contract import INF, AdapterContract, Striker, outcome
from torchtitan_program import TorchtitanProgram

import holdfast.integrations.torchtitan
from holdfast.digest.tensors import state_digest
from holdfast.errors import ConfigError

pytestmark = pytest.mark.processes


@pytest.fixture(autouse=True)
def _no_rank_is_left() -> Iterator[None]:
    """Accelerate, in a later file of this process, would take the variables for torchrun's."""
    before, level = dict(os.environ), logging.root.level
    yield
    logging.root.setLevel(level)
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


class TestTorchtitan(AdapterContract):
    program = TorchtitanProgram
    adapter = holdfast.integrations.torchtitan

    def test_without_protection_each_of_these_faults_changes_the_weights(
        self, bare: str, tmp_path: Path
    ) -> None:
        """Or ends the run: torchtitan looks whether the loss that it logs is finite."""
        for number, (place, factor) in enumerate(self.faults().items()):
            program, strike = self.program(tmp_path / str(number)), Striker({place: factor})
            if factor == INF:
                with pytest.raises(RuntimeError, match="Loss is not finite"):
                    outcome(program, strike)
            else:
                assert outcome(program, strike) != bare, place
            assert set(strike.struck.values()) == {1}

    def test_a_second_training_is_guarded_too(self, run_dir: Path, tmp_path: Path) -> None:
        """It has nothing to do: torchtitan counts the steps of all trainings."""
        program = self.program(tmp_path)
        done = outcome(program, run_dir=run_dir)
        program.train()
        assert state_digest(program.result()) == done


def test_stages_of_a_pipeline_are_refused() -> None:
    trainer: Any = SimpleNamespace(parallel_dims=SimpleNamespace(pp_enabled=True))
    with pytest.raises(ConfigError, match="pipeline parallelism"):
        holdfast.integrations.torchtitan.attach(trainer)
