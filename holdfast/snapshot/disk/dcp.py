"""One checkpoint of ``torch.distributed.checkpoint`` for all ranks of a model that is divided.

Each DTensor becomes one tensor whose chunks are the shards of the ranks, so that DCP loads it into
any mesh and any number of ranks. Optimizer state is stored under the names of its parameters, as in
``torch.distributed.checkpoint.state_dict``.
"""

from collections.abc import Iterable, Iterator
from math import prod
from pathlib import Path

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from holdfast.errors import ConfigError
from holdfast.snapshot.disk.export import State, stock
from holdfast.snapshot.layout import flat_buffer, identity
from holdfast.snapshot.layout.flat_buffer import Tree
from holdfast.snapshot.layout.manifest import Entry, Manifest, ShardRef, TensorRef

Place = tuple[str, ...]
_OF_THE_RUN = ("model", "optimizer")


class Whole:
    """A tensor of the run with its chunks; each is read and verified when it is written."""

    def __init__(self, shape: tuple[int, ...], dtype: str, ranks: tuple[int, ...] = ()) -> None:
        self.shape, self.dtype, self.ranks = shape, dtype, ranks
        self._chunks: dict[tuple[int, ...], tuple[Entry, torch.Tensor]] = {}

    def add(self, offsets: tuple[int, ...], entry: Entry, buffer: torch.Tensor) -> bool:
        """Add the chunk at ``offsets``; return false if a different one is there."""
        known, _ = self._chunks.setdefault(offsets, (entry, buffer))
        return (known.digest, known.shape) == (entry.digest, entry.shape)

    @property
    def missing(self) -> int:
        """The number of elements that are in none of the chunks."""
        return prod(self.shape) - sum(prod(entry.shape) for entry, _ in self._chunks.values())

    def read(self, offsets: tuple[int, ...]) -> torch.Tensor:
        """Return the chunk at ``offsets``."""
        entry, buffer = self._chunks[offsets]
        return flat_buffer.read([entry], buffer)[0]

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties(dtype=getattr(torch, self.dtype))
        found = []
        for offsets, (entry, _buffer) in self._chunks.items():
            chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(entry.shape))
            data = TensorWriteData(chunk, properties, torch.Size(self.shape))
            index = MetadataIndex(fqn, offsets)
            found.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        return found


class _Planner(DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> object:
        found = self.state_dict[index.fqn]
        return found.read(tuple(index.offset or ())) if isinstance(found, Whole) else found


class Gathered:
    """The states of several ranks as one state.

    Model, optimizer and everything that is divided belong to the run. All the rest belongs to a
    rank and is stored under ``ranks.<n>``. The same is done with a value that differs from that of
    an earlier rank in the same place (a BatchNorm's buffers).
    """

    def __init__(self) -> None:
        self._leaves: dict[Place, object] = {}
        self._added: list[int] = []

    def add(self, rank: int, described: Manifest, buffer: torch.Tensor) -> None:
        """Add a rank's state."""
        parts: Tree = dict(described.skeleton)  # type: ignore[call-overload]
        parts.pop(identity.KEY, None)
        if names := parts.pop("parameters", None):
            parts["optimizer"] = _named(parts["optimizer"], names)
        for path, leaf in _leaves_of(parts, ()):
            common = path[0] in _OF_THE_RUN or isinstance(leaf, ShardRef)
            if not common or not self._fits(path, leaf, described, buffer):
                alone = TensorRef(leaf.index) if isinstance(leaf, ShardRef) else leaf
                self._fits(("ranks", str(rank), *path), alone, described, buffer)
        self._added.append(rank)

    def _fits(self, path: Place, leaf: object, described: Manifest, buffer: torch.Tensor) -> bool:
        if not isinstance(leaf, TensorRef):
            return bool(self._leaves.setdefault(path, leaf) == leaf)
        entry = described.entries[leaf.index]
        whole, offsets = Whole(entry.shape, entry.dtype), (0,) * len(entry.shape)
        if isinstance(leaf, ShardRef):
            whole = Whole(leaf.sharding.shape, entry.dtype, leaf.sharding.ranks)
            offsets = leaf.sharding.offsets
        known = self._leaves.setdefault(path, whole)
        if not isinstance(known, Whole):
            return False
        if (known.shape, known.dtype) != (whole.shape, whole.dtype):
            return False
        if not prod(known.shape):
            offsets = (0,) * len(known.shape)
        elif not prod(entry.shape):
            return True
        return known.add(offsets, entry, buffer)

    def tree(self) -> Tree:
        """Return the nested state for DCP."""
        tree: Tree = {}
        for path, leaf in self._leaves.items():
            if isinstance(leaf, Whole) and leaf.missing:
                others = sorted(set(leaf.ranks) - set(self._added))
                raise ConfigError(
                    f"{'.'.join(path)} lacks {leaf.missing} of its {prod(leaf.shape)} elements: "
                    f"ranks {others} hold parts of it, and only ranks {self._added} are here; "
                    "export from disk, with --persist-dir where the folders node-0, node-1, … of "
                    "all nodes are"
                )
            place = tree
            for key in path[:-1]:
                place = place.setdefault(key, {})
            kept = isinstance(leaf, Whole)
            place[path[-1]] = leaf if kept else stock(flat_buffer.unflatten(leaf, []))
        return tree


def _leaves_of(value: object, path: Place) -> Iterator[tuple[Place, object]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves_of(item, (*path, str(key)))
    elif isinstance(value, list | tuple) and any(map(_is_inner, value)):
        for index, item in enumerate(value):
            yield from _leaves_of(item, (*path, str(index)))
    else:
        yield path, value


def _is_inner(value: object) -> bool:
    inner = isinstance(value, list | tuple) and any(map(_is_inner, value))
    return inner or isinstance(value, TensorRef | dict)


def _named(optimizer: Tree, names: list[str]) -> Tree:
    groups = [{**g, "params": [names[n] for n in g["params"]]} for g in optimizer["param_groups"]]
    state = {names[number]: held for number, held in optimizer["state"].items()}
    return {**optimizer, "state": state, "param_groups": groups}


def write(folder: Path, states: Iterable[State]) -> None:
    """Write the checkpoint of all ranks.

    If ranks that hold a part are missing, or parts overlap, raise ConfigError.
    """
    gathered = Gathered()
    for state in states:
        gathered.add(*state)
    tree, planner = gathered.tree(), _Planner()
    try:
        save(tree, storage_writer=FileSystemWriter(folder), planner=planner, no_dist=True)
    except ValueError as error:
        raise ConfigError(f"the ranks' shards do not form complete tensors: {error}") from error
