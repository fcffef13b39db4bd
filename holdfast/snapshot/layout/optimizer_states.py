"""The states of optimizers: compared with the live ones, and loaded bit for bit."""

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch

from holdfast.digest.tensors import state_digest
from holdfast.errors import SnapshotMismatch
from holdfast.optimizers import Optimizers
from holdfast.snapshot.layout.flat_buffer import Tree


def check_groups(saved: object, live: object) -> None:
    """Check that two states have equal groups of parameters, as far as they have groups.

    Raises:
        SnapshotMismatch: names the group, and both sides.
    """
    theirs, ours = groups_of(saved), groups_of(live)
    if len(theirs) != len(ours):
        raise mismatch("the optimizer", f"{len(theirs)} groups", f"{len(ours)} groups")
    for index, pair in enumerate(zip(theirs, ours, strict=True)):
        sides = tuple(
            f"{len(group['params'])} parameters, options {sorted(group.keys() - {'params'})}"
            for group in pair
        )
        if sides[0] != sides[1]:
            raise mismatch(f"optimizer group {index}", *sides)


def groups_of(state: object) -> list[Tree]:
    """Return the groups of parameters in an optimizer's state; none if it has none of its own."""
    return list(state.get("param_groups", ())) if isinstance(state, Mapping) else []


def load_optimizer(optimizer: Any, saved: Any) -> None:
    """Load a state into an optimizer, or into a container of optimizers, bit for bit.

    Raises:
        SnapshotMismatch: a container does not return the state that it was given.
    """
    optimizer.load_state_dict(saved)
    if groups_of(saved) and hasattr(optimizer, "param_groups") and hasattr(optimizer, "state"):
        _undo_casts(optimizer, saved)
    if isinstance(optimizer, torch.optim.Optimizer | Optimizers):
        return
    if state_digest(optimizer.state_dict()) != state_digest(saved):
        raise SnapshotMismatch(
            f"the {type(optimizer).__name__} does not return from state_dict what it was given in "
            "load_state_dict: give Snapshots the optimizers themselves, as a list"
        )


def _undo_casts(optimizer: Any, saved: Tree) -> None:
    # Optimizer.load_state_dict casts state to the parameter's dtype, which loses bits.
    states = optimizer.state
    groups = zip(saved["param_groups"], optimizer.param_groups, strict=True)
    pairs = (zip(ours["params"], live["params"], strict=True) for ours, live in groups)
    for number, parameter in chain.from_iterable(pairs):
        for key, value in saved["state"].get(number, {}).items():
            state = states[parameter]
            state[key] = _uncast(value, state[key])


def _uncast(saved: Any, loaded: Any) -> Any:
    if isinstance(saved, torch.Tensor):
        return loaded if loaded.dtype == saved.dtype else saved.to(loaded.device)
    if isinstance(saved, dict):
        return {key: _uncast(value, loaded[key]) for key, value in saved.items()}
    if isinstance(saved, list | tuple):
        return type(saved)(_uncast(*pair) for pair in zip(saved, loaded, strict=True))
    return loaded


def mismatch(what: str, saved: str, live: str) -> SnapshotMismatch:
    """Return the error that names what differs, and both sides."""
    return SnapshotMismatch(
        f"{what}: the snapshot has {saved}, this run has {live}; build the same model and "
        "optimizer, or use another run_dir"
    )
