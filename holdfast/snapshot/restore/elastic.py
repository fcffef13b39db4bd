"""A state that was taken by another number of ranks, or on another mesh, dealt anew to this rank.

Tensors are addressed by their names and by their places in the global tensor. Of every tensor that
is divided, a rank copies the parts that it needs from the shards of the former ranks; what is not
divided it takes from the former rank with its own number, or from the first one. What belongs to a
rank cannot be divided: a rank that existed keeps its random state and its buffers, and a new one
takes the first rank's buffers, and random states derived from its. The position in the data is a
global number of samples.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from operator import length_hint
from typing import Any, NamedTuple

import numpy as np
import torch

from holdfast import config, digest, events
from holdfast.digest.tensors import state_digest
from holdfast.errors import SnapshotLost, SnapshotMismatch
from holdfast.events import EventKind
from holdfast.snapshot.layout import dtensors
from holdfast.snapshot.layout.dtensors import LocalShard
from holdfast.snapshot.layout.flat_buffer import Tree
from holdfast.snapshot.layout.manifest import Manifest, Sharding, ShardRef
from holdfast.snapshot.layout.training_state import Training

Path = tuple[str, ...]
Place = tuple[int, ...]
# What counts batches and samples in the state of a torchdata StatefulDataLoader.
_BATCHES = ("_num_yielded", "_snapshot_step", "_sampler_iter_yielded")
_SAMPLES = ("samples_yielded", "yielded")


class Former(NamedTuple):
    """A rank of the run before: its manifest, and its verified state, read when it is needed.

    The manifest of the state may differ from the first one in the offsets of its entries only.
    """

    manifest: Callable[[], Manifest]
    tensors: Callable[[], tuple[Manifest, list[torch.Tensor]]]


@dataclass
class _Target:
    """The part of a tensor that this rank holds from now on, empty at first."""

    tensor: torch.Tensor
    offsets: Place
    sharding: Sharding | None
    filled: int = 0
    taken: set[object] = field(default_factory=set)

    def overlap(self, offsets: Place, shape: Place) -> tuple[slice, ...] | None:
        """Return the box, in places of the global tensor, that a new part has in common."""
        if (not offsets and shape) or (offsets, shape) in self.taken:  # none, or a replica's
            return None
        sides = zip(self.offsets, self.tensor.shape, offsets, shape, strict=True)
        box = tuple(slice(max(a, b), min(a + n, b + m)) for a, n, b, m in sides)
        return None if any(side.start >= side.stop for side in box) else box

    def take(self, part: torch.Tensor, offsets: Place) -> None:
        """Copy what another part has in common."""
        box = self.overlap(offsets, tuple(part.shape))
        if box is not None:
            into = self.tensor[_moved(box, self.offsets)]
            into.copy_(part[_moved(box, offsets)])
            self.filled += into.numel()
            self.taken.add((offsets, tuple(part.shape)))


def _moved(box: tuple[slice, ...], origin: Place) -> tuple[slice, ...]:
    pairs = zip(box, origin, strict=True)
    return tuple(slice(side.start - start, side.stop - start) for side, start in pairs)


def is_needed(training: Training, tree: Tree, world_size: int) -> bool:
    """Return true if a state was taken by another number of ranks, or on another mesh."""
    live = training.model.state_dict()
    return world_size != config.world_size() or bool(dtensors.difference(tree["model"], live))


def dealt(training: Training, former: Mapping[int, Former]) -> Tree:
    """Return the state of this rank, made of those of the former ranks, for ``Training.fitted``.

    Raises:
        SnapshotLost: a part of a tensor is in none of them; names it.
        SnapshotMismatch: a divided tensor of optimizer or ``extra`` has no place in the new layout.
        SnapshotCorrupt: a state is damaged.
    """
    rank = config.rank()
    base = rank if rank in former else min(former)
    described, tensors = former[base].tensors()
    tree = training.tree(described, list(tensors))
    targets = dict(_targets(training, tree))
    for number, each in former.items():
        own = number == base
        entries = described if own else each.manifest()
        if rows := list(_parts(entries, targets)):
            held = tensors if own else each.tensors()[1]
            for target, index, offsets in rows:
                target.take(held[index], offsets)
    for path, target in targets.items():
        _put(tree, path, target)
    if rank != base:
        everything = chain.from_iterable(each.manifest().entries for each in former.values())
        found = [entry.digest for entry in everything if entry.path == "rng.torch"]
        # With tensor parallelism several ranks all have one random state.
        if len(found) < 2 or len(set(found)) > 1:
            tree["rng"] = _derived(tree["rng"], rank)
    _deal_position(training, tree, len(former))
    return tree


def _targets(training: Training, tree: Tree) -> Iterator[tuple[Path, _Target]]:
    """Yield each tensor that is divided, or was, with the room for this rank's part of it."""
    parts = (name for name in ("model", "extra") if name in training.parts)
    live = dict(dtensors.leaves(training.states(parts)))
    groups = getattr(training.optimizer, "param_groups", ())
    held = chain.from_iterable(group["params"] for group in groups)
    parameters = {str(number): parameter for number, parameter in enumerate(held)}
    for path, saved in dtensors.leaves(tree):
        if not isinstance(saved, LocalShard | torch.Tensor):
            continue
        ours = live.get(path)
        if path[:2] == ("optimizer", "state"):
            ours = parameters.get(path[2])
        shard, local = isinstance(saved, LocalShard), dtensors.local_of(saved)
        shape = saved.sharding.shape if isinstance(saved, LocalShard) else tuple(saved.shape)
        fits = isinstance(ours, torch.Tensor) and tuple(ours.shape) == shape
        if not fits and (shard or (local.numel() > 1 and dtensors.is_dtensor(ours))):
            raise SnapshotMismatch(
                f"{'.'.join(path)}: the snapshot has a tensor of shape {list(shape)}, and this run "
                f"has none of this shape there, whose layout it could take; {dtensors.REMEDY}"
            )
        if fits and (shard or dtensors.is_dtensor(ours)):
            divided = dtensors.is_dtensor(ours)
            sharding = dtensors.Describer().describe(ours, "") if divided else None
            offsets = sharding.offsets if sharding else (0,) * len(shape)
            room = local.new_empty(dtensors.local_of(ours).shape)
            yield path, _Target(room, offsets, sharding)


def _parts(
    described: Manifest, targets: Mapping[Path, _Target]
) -> Iterator[tuple[_Target, int, Place]]:
    """Yield the parts that a former rank had of these tensors, with their places."""
    for path, leaf in dtensors.leaves(described.skeleton):
        if path in targets:
            entry = described.entries[leaf.index]
            whole = (0,) * len(entry.shape)
            offsets = leaf.sharding.offsets if isinstance(leaf, ShardRef) else whole
            if targets[path].overlap(offsets, entry.shape) is not None:
                yield targets[path], leaf.index, offsets


def _put(tree: Any, path: Path, target: _Target) -> None:
    if missing := target.tensor.numel() - target.filled:
        name = ".".join(path)
        raise SnapshotLost(f"{name} lacks {missing} elements: the ranks that held them are gone")
    for key in path[:-1]:
        tree = tree[_key(tree, key)]
    found = target.tensor
    tree[_key(tree, path[-1])] = LocalShard(found, target.sharding) if target.sharding else found


def _key(holder: Any, text: str) -> Any:
    if isinstance(holder, list):
        return int(text)
    return next(key for key in holder if str(key) == text)


def _deal_position(training: Training, tree: Tree, former: int) -> None:
    """Set the position of a loader that has a state; record the change of ranks."""
    ranks, before, now = config.world_size(), int(tree.get("samples", 0)), training.samples
    former = tree.get("ranks", former)
    detail = {"step": tree["step"], "from_ranks": former, "to_ranks": ranks}
    loader, drawn = tree.get("loader"), None
    detail["position"] = "the same number of batches"
    if isinstance(loader, dict):
        detail["position"] += " of each rank: the state of the loader cannot be dealt anew"
        drawn = _dealt_loader(loader, training.loader, before, now)
    elif loader is None and tree["epoch"] is not None:
        drawn = tree["step"] - tree["epoch"][0]  # ``Training.batches_drawn`` moves it
    if drawn is not None and before and now:
        again = drawn * before % now
        detail["position"] = f"after {drawn * before} samples, of which {again} come again"
    events.record(EventKind.WORLD_CHANGED, rung="rollback", detail=detail)


def _dealt_loader(state: Tree, live: Any, before: int, now: int) -> int | None:
    """Set the state of a StatefulDataLoader to the same number of samples of all ranks.

    Return how many batches a rank had drawn; None if it is the state of another loader, or of a
    stream that has a state of its own or is read by workers.
    """
    parts, workers = list(_dicts(state)), state.get("_snapshot")
    step = workers.get("_snapshot_step") if isinstance(workers, dict) else state.get("_num_yielded")
    streams = [part for part in parts if isinstance(part.get("fetcher_state"), dict)]
    if type(step) is not int or any(workers or _has_state(stream) for stream in streams):
        return None
    drawn = step + int(state.get("_steps_since_snapshot", 0))
    if before and now:
        batches, length = drawn * before // now, length_hint(getattr(live, "sampler", None), 2**62)
        samples = min(length, batches * (now // config.world_size()))
        counts = dict.fromkeys(_BATCHES, batches) | dict.fromkeys(_SAMPLES, samples)
        counts["_steps_since_snapshot"] = 0
        for part in parts:
            part |= {key: counts[key] for key in part.keys() & counts.keys()}
    return drawn


def _has_state(stream: Tree) -> bool:
    of_iterator = stream["fetcher_state"].get("dataset_iter_state")
    return stream.get("dataset_state") is not None or of_iterator is not None


def _dicts(state: Tree) -> Iterator[Tree]:
    """Yield the dicts of a loader's state, without those of its data set."""
    yield state
    for key, value in state.items():
        if isinstance(value, dict) and key not in ("dataset_state", "fetcher_state"):
            yield from _dicts(value)


def _derived(state: Tree, rank: int) -> Tree:
    """Return a random state for a new rank, the same whenever it is derived from this one."""
    seed = int(digest.hexdigest(f"{state_digest(state)} {rank}".encode())[:8], 16)
    python, numpy = random.Random(seed).getstate(), np.random.RandomState(seed).get_state()
    torch_state = torch.Generator().manual_seed(seed).get_state()
    return {**state, "python": python, "numpy": numpy, "torch": torch_state}
