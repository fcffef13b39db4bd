"""The random state: captured and put back for every generator a step may draw from."""

import random

import numpy as np
import torch

from holdfast.rng import rng_state, set_rng_state


def _draw() -> tuple[float, ...]:
    """From every generator; those of normal values keep one of two that they draw at once."""
    normal = random.gauss(0, 1), float(np.random.normal())
    return random.random(), float(np.random.rand()), *normal, *torch.rand(3).tolist()


def test_every_generator_repeats_itself_as_often_as_wanted() -> None:
    _draw()
    state = rng_state()
    first = _draw()
    second = _draw()
    for _ in range(3):
        set_rng_state(state)
        assert _draw() == first
        assert _draw() == second
    assert all(a != b for a, b in zip(first, second, strict=True))
