"""DTensors in a snapshot (FSDP2, HSDP, tensor parallel): each rank's own shard, bit for bit.

Saving needs no collective: a DTensor is stored as its local tensor with a description of the place
of this shard in the global tensor. Restoring puts the shard back on a mesh with an equal
description; for another mesh ``restore.elastic`` deals it anew first.
"""

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from holdfast.errors import ConfigError, SnapshotMismatch
from holdfast.optimizers import Optimizers
from holdfast.snapshot.layout.manifest import Placement, Sharding

REMEDY = (
    "start the same ranks with the same mesh, or reshard: `holdfast snapshots export --format "
    "dcp`, and torch.distributed.checkpoint loads that into any mesh (docs/snapshots.md)"
)

# Each device mesh by the ``Sharding.mesh`` that describes it with equal values on every rank.
Meshes = Mapping[object, Any]


@dataclass(frozen=True)
class LocalShard:
    """A rank's shard in a state tree that was read from a snapshot, not on a mesh yet."""

    tensor: torch.Tensor
    sharding: Sharding


def is_dtensor(value: object) -> bool:
    """Return true for a DTensor; import nothing if the program has not imported DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local_of(value: Any) -> Any:
    """Return the local tensor of a DTensor or of a stored shard; any other value as it is."""
    if isinstance(value, LocalShard):
        return value.tensor
    if not is_dtensor(value):
        return value
    with torch.no_grad():
        return value.to_local()


class Describer:
    """Describes how DTensors are divided; computes each different layout once."""

    def __init__(self) -> None:
        self._known: dict[object, Sharding] = {}
        self._meshes: dict[object, tuple[int, ...]] = {}

    def describe(self, tensor: Any, path: str) -> Sharding:
        """Describe how a DTensor is divided."""
        key = (tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())
        if key not in self._known:
            if any(placement.is_partial() for placement in tensor.placements):
                raise ConfigError(
                    f"state_dict entry {path!r} is a DTensor placed {tensor.placements}, a sum "
                    "that is still to be reduced: redistribute it before it is kept as state"
                )
            self._known[key] = self._described(tensor)
        return self._known[key]

    def _described(self, tensor: Any) -> Sharding:
        mesh = tensor.device_mesh
        if mesh not in self._meshes:
            self._meshes[mesh] = tuple(int(rank) for rank in mesh.mesh.flatten().tolist())
        inside = mesh.get_coordinate() is not None
        return Sharding(
            shape=tuple(tensor.shape),
            stride=tuple(tensor.stride()),
            placements=tuple(map(_spelled, tensor.placements)),
            mesh_shape=tuple(mesh.shape),
            mesh_names=tuple(mesh.mesh_dim_names or ()),
            ranks=self._meshes[mesh],
            offsets=tuple(tensor.__create_chunk_list__()[0].offsets) if inside else (),
        )


def _spelled(placement: Any) -> Placement:
    if placement.is_replicate():
        return ("Replicate",)
    if (split := getattr(placement, "split_factor", None)) is not None:
        return ("_StridedShard", placement.dim, split)
    return ("Shard", placement.dim)


def _placement(spelled: Placement) -> Any:
    from torch.distributed.tensor import placement_types

    name, *arguments = spelled
    if name == "_StridedShard":
        return placement_types._StridedShard(int(arguments[0]), split_factor=int(arguments[1]))
    return placement_types.Shard(int(arguments[0])) if arguments else placement_types.Replicate()


def watch(watched: dict[int, list[torch.Tensor]], flat: Iterable[Any], live: Iterable[Any]) -> None:
    """Add the local tensors of the live parameters to the tensors watched for changes.

    A custom optimizer may write to them; the DTensors of a state_dict do not share their counters.
    """
    places = {local.data_ptr(): local for local in map(local_of, filter(is_dtensor, live))}
    for index, tensor in enumerate(flat):
        if tensor.numel() and index in watched and tensor.data_ptr() in places:
            watched[index].append(places[tensor.data_ptr()])


def names_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer | Optimizers) -> list[str]:
    """Return the model's names of the optimizer's parameters, in the optimizer's order."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    held = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    return [names.get(id(parameter), str(number)) for number, parameter in enumerate(held)]


def difference(saved: Mapping[str, object], live: Mapping[str, object]) -> str:
    """Describe a tensor that is divided otherwise than the live one; empty if there is none."""
    describer = Describer()

    def layout(value: object) -> str:
        if isinstance(value, LocalShard):
            return str(value.sharding)
        if is_dtensor(value):
            return str(describer.describe(value, "model"))
        return f"all of {list(value.shape)}" if isinstance(value, torch.Tensor) else "no tensor"

    for name in (name for name in saved if name in live):
        if isinstance(saved[name], LocalShard) or is_dtensor(live[name]):
            theirs, ours = layout(saved[name]), layout(live[name])
            if theirs != ours:
                return f"model entry {name!r}: the snapshot has {theirs}, this run has {ours}"
    return ""


def check(tree: Mapping[str, Any], live: Mapping[str, object], meshes: Meshes) -> None:
    """Check that a state tree is divided like the live model's state_dict, on existing meshes."""
    if found := difference(tree["model"], live):
        raise SnapshotMismatch(f"{found}; {REMEDY}")
    for path, shard in leaves(tree):
        if isinstance(shard, LocalShard) and shard.sharding.mesh not in meshes:
            raise SnapshotMismatch(
                f"{'.'.join(path)}: the snapshot has {shard.sharding}, and this run's parameters "
                f"are on no such mesh; {REMEDY}"
            )


Leaf = tuple[tuple[str, ...], Any]


def leaves(value: object, path: tuple[str, ...] = ()) -> list[Leaf]:
    """Return the path and the value of every leaf of nested dicts, lists and tuples."""
    if isinstance(value, dict):
        below: Iterable[tuple[object, object]] = value.items()
    elif isinstance(value, list | tuple):
        below = enumerate(value)
    else:
        return [(path, value)]
    return [leaf for key, item in below for leaf in leaves(item, (*path, str(key)))]


def meshes_of(saved: Mapping[str, object], live: Callable[[], Mapping[str, object]]) -> Meshes:
    """Return the meshes of the live state tree; none if the saved tree holds no shard."""
    if not any(isinstance(leaf, LocalShard) for _, leaf in leaves(saved)):
        return {}
    describer = Describer()
    return {
        describer.describe(tensor, ".".join(path)).mesh: tensor.device_mesh
        for path, tensor in leaves(live())
        if is_dtensor(tensor)
    }


def on_meshes(value: Any, meshes: Meshes) -> Any:
    """Return a state tree with its shards as DTensors again, without a collective or a copy."""
    if isinstance(value, dict):
        result = type(value)()
        result.update({key: on_meshes(item, meshes) for key, item in value.items()})
        return result
    if type(value) in (list, tuple):
        return type(value)(on_meshes(item, meshes) for item in value)
    if not isinstance(value, LocalShard):
        return value
    from torch.distributed.tensor import DTensor

    kept, placements = value.sharding, tuple(map(_placement, value.sharding.placements))
    place: Any = {"shape": torch.Size(kept.shape), "stride": kept.stride, "run_check": False}
    return DTensor.from_local(value.tensor, meshes[kept.mesh], placements, **place)
