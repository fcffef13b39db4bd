"""DTensors in a snapshot (FSDP2, HSDP, tensor parallel): each rank's own shard, bit for bit.

Saving needs no collective: a DTensor is stored as its local tensor and a description of where that
lies in the whole. Restoring puts it back on a mesh that is described alike; another mesh is
refused, since resharding is what DCP is for.
"""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from holdfast.errors import ConfigError, SnapshotMismatch
from holdfast.snapshot.layout.manifest import Placement, Sharding, leaves

_REMEDY = (
    "start the same ranks with the same mesh, or reshard: `holdfast snapshots export --format "
    "dcp`, and torch.distributed.checkpoint loads that into any mesh (docs/snapshots.md)"
)


# The device mesh by its ``Sharding.mesh``: values that are equal on every rank.
Meshes = Mapping[object, Any]


@dataclass(frozen=True)
class LocalShard:
    """A rank's shard in a state tree that was read and is not on a mesh yet."""

    tensor: torch.Tensor
    sharding: Sharding


def is_dtensor(value: object) -> bool:
    """Whether it is a DTensor; costs no import where there are none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local_of(value: Any) -> Any:
    """Return the dense tensor that this rank holds of a tensor; itself if it is not divided."""
    if isinstance(value, LocalShard):
        return value.tensor
    if not is_dtensor(value):
        return value
    with torch.no_grad():
        return value.to_local()


class Describer:
    """Describes DTensors; what is laid out alike is worked out once."""

    def __init__(self) -> None:
        self._known: dict[object, Sharding] = {}
        self._meshes: dict[object, tuple[int, ...]] = {}

    def describe(self, tensor: Any, path: str) -> Sharding:
        """Describe how a DTensor is divided.

        Raises:
            ConfigError: it is a sum that is still to be reduced; names its path.
        """
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
    """Add the live parameters' own local tensors to what is watched for changes.

    A state_dict has detached DTensors: they share the version counter of the parameter, but not
    that of its local tensor, which a custom optimizer may write to.
    """
    places = {local.data_ptr(): local for local in map(local_of, filter(is_dtensor, live))}
    for index, tensor in enumerate(flat):
        if tensor.numel() and index in watched and tensor.data_ptr() in places:
            watched[index].append(places[tensor.data_ptr()])


def names_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the model's name of each of the optimizer's parameters, as its state_dict has them."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    held = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    return [names.get(id(parameter), str(number)) for number, parameter in enumerate(held)]


def check(tree: Mapping[str, Any], live: Mapping[str, object], meshes: Meshes) -> None:
    """See that a state tree is divided as the live model is, and on meshes that it has.

    Args:
        tree: the whole state tree, as read.
        live: the model's state_dict.
        meshes: as ``meshes_of`` found them.

    Raises:
        SnapshotMismatch: it is not; names the first entry that differs, and both layouts.
    """
    describer = Describer()
    for name in (name for name in tree["model"] if name in live):
        saved, ours = tree["model"][name], live[name]
        sides = _layout(saved, describer), _layout(ours, describer)
        divided = isinstance(saved, LocalShard) or is_dtensor(ours)
        if divided and sides[0] != sides[1]:
            raise SnapshotMismatch(
                f"model entry {name!r}: the snapshot has {sides[0]}, this run has {sides[1]}; "
                f"{_REMEDY}"
            )
    for path, shard in leaves(tree):
        if isinstance(shard, LocalShard) and shard.sharding.mesh not in meshes:
            raise SnapshotMismatch(
                f"{'.'.join(path)}: the snapshot has {shard.sharding}, and this run's parameters "
                f"are on no such mesh; {_REMEDY}"
            )


def _layout(value: object, describer: Describer) -> str:
    if isinstance(value, LocalShard):
        return str(value.sharding)
    if is_dtensor(value):
        return str(describer.describe(value, "model"))
    return f"all of {list(value.shape)}" if isinstance(value, torch.Tensor) else "no tensor"


def is_divided(tree: Mapping[str, object]) -> bool:
    """Whether a state tree that was read holds shards."""
    return any(isinstance(leaf, LocalShard) for _, leaf in leaves(dict(tree)))


def meshes_of(tree: Mapping[str, object]) -> Meshes:
    """Return the meshes that the tensors of a live state tree are on."""
    describer = Describer()
    found: dict[object, Any] = {}
    for path, leaf in leaves(tree):
        if is_dtensor(leaf):
            tensor: Any = leaf
            found[describer.describe(tensor, ".".join(path)).mesh] = tensor.device_mesh
    return found


def on_meshes(value: Any, meshes: Meshes) -> Any:
    """Return a state tree with its shards as DTensors again; no collective, no copy."""
    if isinstance(value, LocalShard):
        return _on_mesh(value, meshes[value.sharding.mesh])
    if isinstance(value, dict):
        result = type(value)()
        result.update({key: on_meshes(item, meshes) for key, item in value.items()})
        return result
    if type(value) in (list, tuple):
        return type(value)(on_meshes(item, meshes) for item in value)
    return value


def _on_mesh(shard: LocalShard, mesh: Any) -> Any:
    from torch.distributed.tensor import DTensor

    described = shard.sharding
    return DTensor.from_local(
        shard.tensor,
        mesh,
        tuple(map(_placement, described.placements)),
        run_check=False,
        shape=torch.Size(described.shape),
        stride=described.stride,
    )
