"""The random state: captured and put back for every generator a step may draw from."""

import random

import numpy as np
import torch

from holdfast.replay.rng import RngState


def _draw() -> tuple[float, float, list[float]]:
    return random.random(), float(np.random.rand()), torch.rand(3).tolist()


def test_every_generator_repeats_itself_as_often_as_wanted() -> None:
    state = RngState.capture()
    first = _draw()
    second = _draw()
    for _ in range(3):
        state.restore()
        assert _draw() == first
        assert _draw() == second
    assert all(a != b for a, b in zip(first, second, strict=True))


def test_a_captured_state_does_not_move_with_the_generators() -> None:
    state = RngState.capture()
    saved = state.state
    before = saved["torch"].clone(), saved["python"], saved["numpy"][1].copy()
    _draw()
    assert torch.equal(saved["torch"], before[0])
    assert saved["python"] == before[1]
    assert np.array_equal(saved["numpy"][1], before[2])


def test_the_normal_generators_half_drawn_value_is_part_of_it() -> None:
    random.gauss(0, 1)
    np.random.normal()
    state = RngState.capture()
    first = random.gauss(0, 1), np.random.normal()
    state.restore()
    assert (random.gauss(0, 1), np.random.normal()) == first
