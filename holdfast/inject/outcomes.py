"""Whether the outputs of a run with a fault count as right."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from holdfast.digest.tensors import tensors_digest
from holdfast.errors import ConfigError

Outcome = Callable[[Any, Any], bool | str]


def tensors_of(value: object) -> list[torch.Tensor]:
    """Return the tensors in nested containers."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def first_tensor(value: object) -> torch.Tensor | None:
    """Return the first floating-point tensor in nested containers; None without."""
    return next((leaf for leaf in tensors_of(value) if leaf.is_floating_point()), None)


def equal(golden: Any, outputs: Any) -> bool:
    """Return whether all tensors are the same, bit for bit."""
    return tensors_digest(tensors_of(golden)) == tensors_digest(tensors_of(outputs))


def _same_argmax(golden: Any, outputs: Any) -> bool:
    right, new = first_tensor(golden), first_tensor(outputs)
    if right is None or new is None or right.shape != new.shape:
        return False
    dim = 1 if right.dim() > 3 else -1
    same = torch.equal(right.argmax(dim), new.argmax(dim))
    return same and torch.equal(right.isfinite(), new.isfinite())


def _all_close(golden: Any, outputs: Any) -> bool:
    right, new = tensors_of(golden), tensors_of(outputs)
    return len(right) == len(new) and all(
        a.shape == b.shape and torch.allclose(a, b, equal_nan=True)
        for a, b in zip(right, new, strict=True)
    )


OUTCOMES: dict[str, Outcome] = {"argmax": _same_argmax, "allclose": _all_close, "equal": equal}


def outcome_of(name: str | Outcome | None, golden: Any) -> Outcome:
    """Return the function with a name, or by default that which suits the golden outputs.

    Raises:
        ConfigError: There is no such function, or the outputs hold no tensor.
    """
    if callable(name):
        return name
    first = first_tensor(golden)
    if first is None:
        raise ConfigError(
            f"the run returns {type(golden).__name__}, without a tensor to compare; give run= a "
            "function that returns one, or an outcome of your own"
        )
    chosen = name or ("argmax" if first.dim() > 1 else "allclose")
    if chosen not in OUTCOMES:
        raise ConfigError(f"outcome = {name!r}; use a function or one of {', '.join(OUTCOMES)}")
    return OUTCOMES[chosen]
