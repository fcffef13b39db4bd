"""The state of a training run: captured from the live objects, and loaded back bit for bit."""

from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import torch

from holdfast.errors import ConfigError, SnapshotCorrupt, SnapshotMismatch
from holdfast.optimizers import Optimizers
from holdfast.rng import rng_state, set_rng_state
from holdfast.snapshot.layout import dtensors, flat_buffer
from holdfast.snapshot.layout.flat_buffer import Tree
from holdfast.snapshot.layout.manifest import Manifest

_STATEFUL = ("scheduler", "scaler", "loader", "extra")


# Of a loader without state_dict: the first step of its present pass, the random state before it.
Epoch = tuple[int, Any]


class Stateful(Protocol):
    """Anything whose state can be saved and loaded."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state: Any, /) -> object:
        """Load a state that ``state_dict`` returned."""


@dataclass
class Training:
    """The live objects of a training run.

    ``scheduler``, ``scaler`` and ``extra`` must have ``state_dict`` and ``load_state_dict``. A
    ``loader`` without these methods is not saved; ``parts`` names what is saved.

    Raises:
        ConfigError: model, optimizer, scheduler, scaler or extra lacks one of the two methods.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer | Optimizers
    scheduler: Any = None
    loader: object = None
    extra: Stateful | None = None
    epoch: Epoch | None = None
    scaler: Stateful | None = None

    def __post_init__(self) -> None:
        for name in ("model", "optimizer", "scheduler", "scaler", "extra"):
            value = getattr(self, name)
            optional = name in _STATEFUL and value is None
            if not optional and not _is_stateful(value):
                raise ConfigError(
                    f"{name} is a {type(value).__name__} without state_dict and load_state_dict: "
                    "give it both, or leave it out"
                )

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the saved parts, without the random number generators and the step."""
        optional = (name for name in _STATEFUL if _is_stateful(getattr(self, name)))
        return ("model", "optimizer", *optional)

    def capture(self, step: int) -> flat_buffer.Flat:
        """Take the state after ``step`` and separate its tensors from the rest.

        Parameters and optimizer state are stored as references, because only ``optimizer.step``
        changes them. Everything else is copied at once: buffers, random number generators, plain
        values.

        Raises:
            ConfigError: an entry cannot be stored; names its path.
        """
        tree = self._live()
        tree |= {"rng": rng_state(), "step": step, "epoch": self.epoch}
        live = list(self.model.parameters())
        parameters = set(map(_storage, [*map(dtensors.local_of, live)]))
        divided = any(map(dtensors.is_dtensor, live))
        if divided:
            tree["parameters"] = dtensors.names_of(self.model, self.optimizer)

        def hold(paths: list[str], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            stable = [path.startswith("optimizer.state.") for path in paths]
            return [
                tensor if known or _storage(tensor) in parameters else tensor.clone()
                for tensor, known in zip(tensors, stable, strict=True)
            ]

        flat = flat_buffer.flatten(tree, hold)
        if divided:
            dtensors.watch(flat.watched, flat.tensors, live)
        return flat

    def _live(self) -> Tree:
        return {name: getattr(self, name).state_dict() for name in self.parts}

    def tree(self, manifest: Manifest, tensors: list[torch.Tensor]) -> Tree:
        """Return the state tree of a manifest and its verified tensors."""
        for index, entry in enumerate(manifest.entries):
            # load_state_dict of model and optimizer moves its tensors itself, one at a time.
            if entry.path.startswith(("scheduler.", "scaler.", "loader.", "extra.")):
                tensors[index] = tensors[index].to(entry.device)
        tree = flat_buffer.unflatten(manifest.skeleton, tensors)
        if not isinstance(tree, dict):
            raise SnapshotCorrupt(f"the manifest holds a {type(tree).__name__}, not a state tree")
        return tree

    def fitted(self, tree: Tree) -> Tree:
        """Check that a state tree belongs to these objects; return it for ``load``.

        Shards are DTensors in the result, on the meshes of the live state.

        Raises:
            SnapshotMismatch: names the first entry that differs, and both sides.
        """
        stored = tuple(name for name in ("model", "optimizer", *_STATEFUL) if name in tree)
        if stored != self.parts:
            raise _mismatch("the parts", ", ".join(stored), ", ".join(self.parts))
        live, saved = self.model.state_dict(), tree["model"]
        meshes = dtensors.meshes_of(tree, self._live)
        dtensors.check(tree, live, meshes)
        live, saved = dtensors.local_state(live), dtensors.local_state(saved)
        for name in chain(live, (name for name in saved if name not in live)):
            sides = _describe(saved, name), _describe(live, name)
            if sides[0] != sides[1]:
                raise _mismatch(f"model entry {name!r}", *sides)
        self._check_groups(tree["optimizer"]["param_groups"])
        return dtensors.on_meshes(tree, meshes) if meshes else tree

    def _check_groups(self, saved: list[Tree]) -> None:
        live = self.optimizer.state_dict()["param_groups"]
        if len(saved) != len(live):
            raise _mismatch("the optimizer", f"{len(saved)} groups", f"{len(live)} groups")
        for index, (ours, theirs) in enumerate(zip(live, saved, strict=True)):
            sides = tuple(
                f"{len(group['params'])} parameters, options {sorted(group.keys() - {'params'})}"
                for group in (theirs, ours)
            )
            if sides[0] != sides[1]:
                raise _mismatch(f"optimizer group {index}", *sides)

    def load(self, tree: Tree, skip: tuple[str, ...] = ()) -> None:
        """Load a fitted state tree into the live objects, bit for bit, generators included.

        Parts named in ``skip`` stay as they are.
        """
        live = self.model.state_dict()
        # Updated in place to keep its _metadata, which load_state_dict reads.
        live.update(tree["model"])
        self.model.load_state_dict(live)
        self.optimizer.load_state_dict(tree["optimizer"])
        self._undo_casts(tree["optimizer"])
        for name in (name for name in self.parts[2:] if name not in skip):
            getattr(self, name).load_state_dict(tree[name])
        if "loader" not in skip:
            self.epoch = tree["epoch"]
        set_rng_state(tree["rng"])

    def _undo_casts(self, saved: Tree) -> None:
        # Optimizer.load_state_dict casts state to the parameter's dtype, which loses bits.
        groups = zip(saved["param_groups"], self.optimizer.param_groups, strict=True)
        pairs = (zip(ours["params"], live["params"], strict=True) for ours, live in groups)
        for number, parameter in chain.from_iterable(pairs):
            for key, value in saved["state"].get(number, {}).items():
                state = self.optimizer.state[parameter]
                state[key] = _uncast(value, state[key])


def _uncast(saved: Any, loaded: Any) -> Any:
    if isinstance(saved, torch.Tensor):
        return loaded if loaded.dtype == saved.dtype else saved.to(loaded.device)
    if isinstance(saved, dict):
        return {key: _uncast(value, loaded[key]) for key, value in saved.items()}
    if isinstance(saved, list | tuple):
        return type(saved)(_uncast(*pair) for pair in zip(saved, loaded, strict=True))
    return loaded


def _is_stateful(value: object) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _storage(local: torch.Tensor) -> tuple[torch.device, int]:
    return local.device, local.data_ptr() - int(local.storage_offset()) * local.element_size()


def _describe(state: Tree, name: str) -> str:
    if name not in state:
        return "no such entry"
    value = state[name]
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return "extra state"


def _mismatch(what: str, saved: str, live: str) -> SnapshotMismatch:
    return SnapshotMismatch(
        f"{what}: the snapshot has {saved}, this run has {live}; build the same model and "
        "optimizer, or use another run_dir"
    )
