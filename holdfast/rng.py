"""Saving and restoring the random state of Python, NumPy, torch on CPU and, if in use, CUDA."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def rng_state() -> dict[str, Any]:
    """Return the present random state of all generators, as plain values and tensors."""
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Restore a state that ``rng_state`` returned; the same state can be restored repeatedly."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    for index, device_state in enumerate(state.get("cuda", [])):
        torch.cuda.set_rng_state(device_state, index)
