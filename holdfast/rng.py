"""Saving and restoring the random state of Python, NumPy, torch on CPU and, if in use, CUDA.

Generators of the user's own are part of it once they are registered, ``Guard(generators=...)``.
"""

import random
from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch

from holdfast.errors import ConfigError

# Of the process, as the generators of Python, NumPy and torch are.
_registered: WeakValueDictionary[str, torch.Generator] = WeakValueDictionary()


def register(name: str, generator: torch.Generator) -> None:
    """Make a generator part of the random state, under a name that is the same after a restart.

    Raises:
        ConfigError: It is not a ``torch.Generator``, or another one has the name.
    """
    if not isinstance(generator, torch.Generator):
        raise ConfigError(
            f"generator {name!r} is a {type(generator).__name__}: only a torch.Generator can be "
            "registered"
        )
    if _registered.get(name, generator) is not generator:
        raise ConfigError(
            f"another generator is registered as {name!r}: give names of their own, as in "
            "Guard(generators={'augmentation': generator})"
        )
    _registered[name] = generator


def register_all(
    generators: Mapping[str, torch.Generator] | Iterable[torch.Generator],
) -> list[str]:
    """Register generators by name, or by their place in a sequence; return the names."""
    if not isinstance(generators, Mapping):
        generators = {f"generator {n}": each for n, each in enumerate(generators)}
    for name, generator in generators.items():
        register(name, generator)
    return list(generators)


def unregister(names: Iterable[str]) -> None:
    """Remove generators from the random state."""
    for name in names:
        _registered.pop(name, None)


def rng_state() -> dict[str, Any]:
    """Return the present random state of all generators, as plain values and tensors."""
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    own = {name: generator.get_state() for name, generator in sorted(_registered.items())}
    return state | {"generators": own} if own else state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Restore a state that ``rng_state`` returned; the same state can be restored repeatedly.

    A registered generator that the state does not have stays as it is.
    """
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    for index, device_state in enumerate(state.get("cuda", [])):
        torch.cuda.set_rng_state(device_state, index)
    for name, own in state.get("generators", {}).items():
        generator = _registered.get(name)
        if generator is not None:
            generator.set_state(own)
