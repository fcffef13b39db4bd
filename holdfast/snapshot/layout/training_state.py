"""The state of a training run: captured from the live objects, and loaded back bit for bit."""

import logging
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, Protocol, TypeAlias

import torch

from holdfast import config
from holdfast.digest.tensors import state_digest
from holdfast.errors import ConfigError, SnapshotCorrupt, SnapshotMismatch
from holdfast.optimizers import Optimizers, as_one, each_of
from holdfast.rng import rng_state, set_rng_state
from holdfast.snapshot.layout import dtensors, flat_buffer, identity, manifest
from holdfast.snapshot.layout.flat_buffer import Flat, Tree
from holdfast.snapshot.layout.identity import RunIdentity, groups_of
from holdfast.snapshot.layout.manifest import Entry, Manifest

_STATEFUL = ("scheduler", "scaler", "loader", "extra")
# Larger states are not loaded once to see whether they can be.
_REHEARSED_BYTES = 2**28
_OPTIMIZER, _GROUPS = "optimizer.", ".param_groups."

_logger = logging.getLogger("holdfast.snapshot")
# Of a loader without state_dict: the number of batches drawn in its present pass, and the random
# state before the pass. A step may take several batches, or a batch several steps.
Epoch = tuple[int, Any]


class Stateful(Protocol):
    """Anything whose state can be saved and loaded."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state: Any, /) -> object:
        """Load a state that ``state_dict`` returned."""


# A model, or its parts.
Models: TypeAlias = "torch.nn.Module | Sequence[torch.nn.Module]"


@dataclass
class Training:
    """The live objects of a training run.

    A ``loader`` without ``state_dict`` and ``load_state_dict`` is not saved; ``parts`` names what
    is. A container of optimizers that torch does not know is saved and loaded by these methods. Any
    other object without them raises ConfigError.
    """

    model: Any  # a sequence of modules becomes a ModuleList
    optimizer: Any  # a sequence of optimizers becomes Optimizers
    scheduler: Any = None
    loader: object = None
    extra: Stateful | None = None
    epoch: Epoch | None = None
    scaler: Stateful | None = None
    run_id: str = ""
    samples: int = 0  # in a batch of the loader on all ranks together; 0 if it is not known
    samples_before: int = 0  # the same of the run that took the restored state
    identity: RunIdentity = field(init=False)

    def __post_init__(self) -> None:
        if isinstance(self.model, list | tuple):
            parts, names = self.model, [type(part).__name__ for part in self.model]
            if not parts or not all(isinstance(part, torch.nn.Module) for part in parts):
                raise ConfigError(f"model is a list of {names}: modules are needed")
            self.model = torch.nn.ModuleList(parts)  # the parts themselves do not notice it
        self.optimizer = as_one(self.optimizer)
        for each in each_of(self.optimizer):
            if hasattr(each, "consolidate_state_dict"):
                raise ConfigError(
                    f"{type(each).__name__} has a state_dict on one rank only, and after a "
                    "collective, so that no snapshot can hold it: divide the model by FSDP2 "
                    "(fully_shard), or use the optimizer that it wraps"
                )
        for name in ("model", "optimizer", "scheduler", "scaler", "extra"):
            value = getattr(self, name)
            optional = name in _STATEFUL and value is None
            if not optional and not _is_stateful(value):
                raise ConfigError(
                    f"{name} is a {type(value).__name__} without state_dict and load_state_dict: "
                    "give it both, or leave it out"
                )
        self.identity = RunIdentity.of(self.run_id, self.model, self.optimizer.state_dict())
        self.note_loader(self.loader)

    def note_loader(self, loader: object) -> None:
        """Note how many samples a batch of this loader has on all ranks together, if it says so."""
        size = getattr(loader, "batch_size", None)
        self.samples = size * config.world_size() if isinstance(size, int) else self.samples

    def batches_drawn(self, drawn: int) -> int:
        """Return how many batches have the samples of so many batches before the restore.

        The number differs if a batch of all ranks together has another size than it had then.
        """
        before, now = self.samples_before, self.samples
        return drawn * before // now if before and now else drawn

    def dry_run(self, plan: Callable[[Flat], list[Entry]] = flat_buffer.plan) -> None:
        """Check that every part can be saved and restored, without copying a tensor.

        The loader is left out, because asking some loaders for their state starts their workers.
        ``plan`` assigns every tensor its place. What cannot be saved raises ConfigError, which
        names the part and the entry.
        """
        flat = flat_buffer.flatten(self.states(n for n in self.parts if n != "loader"))
        flat.stable = list(map(self._stable_in(), flat.paths, flat.tensors))
        blob = manifest.encode(flat.skeleton, plan(flat))
        try:
            described = manifest.decode(blob, manifest.digest_of(blob))
            self._check_structure(flat_buffer.unflatten(described.skeleton, flat.tensors))
        except (SnapshotCorrupt, SnapshotMismatch) as error:
            raise ConfigError(f"a snapshot of this run could not be restored: {error}") from error
        if sum(tensor.nbytes for tensor in flat.tensors) <= _REHEARSED_BYTES:
            self._rehearse()

    def _rehearse(self) -> None:
        """Load into each object of a type that torch does not define its own state."""
        known = isinstance(self.optimizer, torch.optim.Optimizer | Optimizers)
        for name in ("optimizer", "scheduler", "scaler", "extra")[known:]:
            value = getattr(self, name)
            try:
                if name == "optimizer":
                    _load_optimizer(value, value.state_dict())
                elif value is not None:
                    value.load_state_dict(value.state_dict())
            except Exception as error:
                raise ConfigError(
                    f"{name}, a {type(value).__name__}, cannot load the state that its own "
                    f"state_dict returns ({error!r}): a snapshot of it could not be restored; give "
                    "Snapshots the objects in it that can, or leave it out"
                ) from error

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the saved parts, without the random number generators and the step."""
        optional = (name for name in _STATEFUL if _is_stateful(getattr(self, name)))
        return ("model", "optimizer", *optional)

    def capture(self, step: int) -> flat_buffer.Flat:
        """Take the state after ``step`` and separate its tensors from the rest.

        Parameters and optimizer state are stored as references, because only ``optimizer.step``
        changes them. Everything else is copied at once. An entry that cannot be stored raises
        ConfigError, which names its path.
        """
        tree = self.states(self.parts)
        tree |= {"rng": rng_state(), "step": step, "epoch": _counted_from(step, self.epoch)}
        tree |= {identity.KEY: self.identity.encode(), "samples": self.samples}
        tree["ranks"] = config.world_size()
        if any(map(dtensors.is_dtensor, self.model.parameters())):
            grouped = hasattr(self.optimizer, "param_groups")
            names = dtensors.names_of(self.model, self.optimizer) if grouped else []
            tree["parameters"] = names
        stable = self._stable_in()

        def hold(paths: list[str], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            pairs = zip(paths, tensors, strict=True)
            return [tensor if stable(path, tensor) else tensor.clone() for path, tensor in pairs]

        return self._watched(flat_buffer.flatten(tree, hold))

    def held(self) -> flat_buffer.Flat:
        """Return the live tensors of model and optimizer; none of them is copied."""
        flat = flat_buffer.flatten(self.states(("model", "optimizer")))
        flat.stable = list(map(self._stable_in(), flat.paths, flat.tensors))
        return self._watched(flat)

    def _watched(self, flat: flat_buffer.Flat) -> flat_buffer.Flat:
        parameters = list(self.model.parameters())
        if any(map(dtensors.is_dtensor, parameters)):
            dtensors.watch(flat.watched, flat.tensors, parameters)
        untrained = (dtensors.local_of(p) for p in parameters if not p.requires_grad)
        frozen = set(map(_storage, untrained))
        if frozen:
            flat.frozen = {n for n, tensor in enumerate(flat.tensors) if _storage(tensor) in frozen}
        return flat

    def _stable_in(self) -> Callable[[str, torch.Tensor], bool]:
        """Return the test by path for tensors that only ``optimizer.step`` changes."""
        parameters = {_storage(dtensors.local_of(each)) for each in self.model.parameters()}

        def stable(path: str, tensor: torch.Tensor) -> bool:
            state = path.startswith(_OPTIMIZER) and _GROUPS not in path
            return state or _storage(tensor) in parameters

        return stable

    def states(self, names: Iterable[str]) -> Tree:
        """Return the states of some parts."""
        return {name: getattr(self, name).state_dict() for name in names}

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

    def fitted(self, tree: Tree, where: str = "the run_dir") -> Tree:
        """Check that a state tree belongs to these objects and to this run; return it for ``load``.

        Shards are DTensors in the result, on the meshes of the live state. After this the run
        continues under the id of the run that took the state. ``where`` it was is for the message.
        Otherwise SnapshotMismatch names the first entry that differs, with both sides, or the run.
        """
        stored = tuple(name for name in ("model", "optimizer", *_STATEFUL) if name in tree)
        if stored != self.parts:
            raise _mismatch("the parts", ", ".join(stored), ", ".join(self.parts))
        meshes = self._check_structure(tree)
        if identity.KEY not in tree:
            said = (
                f"{where} holds a state without the identity of its run, which an older release of "
                "holdfast took: it is restored without checking that it is this run's"
            )
            _logger.warning(said)
            if config.rank() == 0:
                warnings.warn(said, stacklevel=2)
        self.identity = self.identity.adopted(tree.get(identity.KEY), where)
        return dtensors.on_meshes(tree, meshes) if meshes else tree

    def _check_structure(self, tree: Tree) -> dtensors.Meshes:
        """Compare model and optimizers of a state tree with the live ones; return the meshes."""
        live, saved = self.model.state_dict(), tree["model"]
        names = [name for name in self.parts if name != "loader"]
        meshes = dtensors.meshes_of(tree, partial(self.states, names))
        dtensors.check(tree, live, meshes)
        live, saved = ({n: dtensors.local_of(v) for n, v in s.items()} for s in (live, saved))
        for name in chain(live, (name for name in saved if name not in live)):
            sides = _describe(saved, name), _describe(live, name)
            if sides[0] != sides[1]:
                raise _mismatch(f"model entry {name!r}", *sides)
        _check_groups(tree["optimizer"], self.optimizer.state_dict())
        return meshes

    def load(self, tree: Tree, skip: tuple[str, ...] = ()) -> None:
        """Load a fitted state tree into the live objects, bit for bit, generators included.

        Parts named in ``skip`` stay as they are.
        """
        live = self.model.state_dict()
        # Updated in place to keep its _metadata, which load_state_dict reads.
        live.update(tree["model"])
        self.model.load_state_dict(live)
        _load_optimizer(self.optimizer, tree["optimizer"])
        for name in (name for name in self.parts[2:] if name not in skip):
            getattr(self, name).load_state_dict(tree[name])
        if "loader" not in skip:
            self.epoch = _counted_from(tree["step"], tree["epoch"])
            self.samples_before = int(tree.get("samples", 0))
        set_rng_state(tree["rng"])


def _counted_from(step: int, epoch: Epoch | None) -> Epoch | None:
    """Return an epoch as it is stored after ``step``, or as it is from what was stored.

    The stored number is ``step`` less the batches drawn.
    """
    return None if epoch is None else (step - epoch[0], epoch[1])


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


def _check_groups(saved: object, live: object) -> None:
    """Check that two states have equal groups of parameters, as far as they have groups."""
    theirs, ours = groups_of(saved), groups_of(live)
    if len(theirs) != len(ours):
        raise _mismatch("the optimizer", f"{len(theirs)} groups", f"{len(ours)} groups")
    for index, pair in enumerate(zip(theirs, ours, strict=True)):
        sides = tuple(
            f"{len(group['params'])} parameters, options {sorted(group.keys() - {'params'})}"
            for group in pair
        )
        if sides[0] != sides[1]:
            raise _mismatch(f"optimizer group {index}", *sides)


def _load_optimizer(optimizer: Any, saved: Any) -> None:
    """Load a state into an optimizer, or into a container of optimizers, bit for bit."""
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


def _mismatch(what: str, saved: str, live: str) -> SnapshotMismatch:
    """Return the error that names what differs, and both sides."""
    return SnapshotMismatch(
        f"{what}: the snapshot has {saved}, this run has {live}; build the same model and "
        "optimizer, or use another run_dir"
    )
