"""The golden training run: equal bits however often it is repeated, and others after one flip."""

import pytest
import torch

from holdfast import sites
from holdfast.digest.tensors import tensors_digest
from holdfast.screen.emulation import Emulated, FaultyUnit
from holdfast.screen.job import SCALES, Job
from holdfast.screen.training import OP, STEPS, training_job


@pytest.fixture
def job(one_thread: None) -> Job:
    return training_job(SCALES["small"], torch.device("cpu"))


def test_it_learns_and_ends_in_the_same_bits_every_time(job: Job) -> None:
    first, again, other = (job.run(variant) for variant in (0, 0, 1))
    assert tensors_digest(first.values()) == tensors_digest(again.values())
    assert tensors_digest(first.values()) != tensors_digest(other.values())
    assert first["losses"].shape == (STEPS,)
    assert first["losses"][-1] < first["losses"][0]
    assert all(each.isfinite().all() for each in first.values())


def test_a_flip_of_the_last_bit_in_one_gradient_is_in_all_that_follows(job: Job) -> None:
    visits = 0
    with sites.injecting(lambda *_: None):  # under which a protected process rounds otherwise
        clean = job.run(0)

    def strike(stage: str, site: str, gemm: sites.Gemm, output: torch.Tensor | None) -> None:
        nonlocal visits
        if site == f"screen/{OP}" and output is not None:
            visits += 1
            if visits == 3:
                output.view(torch.int32)[5, 7] ^= 1

    with sites.injecting(strike):
        struck = job.run(0)
    assert visits == STEPS
    assert torch.equal(clean["losses"][:3], struck["losses"][:3])
    assert tensors_digest(clean.values()) != tensors_digest(struck.values())
    alone = job.run(0)
    with FaultyUnit([Emulated("unit 1", "gemm.fp32")]).computing(OP):  # of another workload
        assert tensors_digest(job.run(0).values()) == tensors_digest(alone.values())
