"""Units, the ranks that compute one replica's gradient together, and messages between them.

Each rank of plain data parallelism is a unit, and so is each rank of FSDP2: ranks divide the
parameters, but each computes the gradient of its own batch. The ranks of a tensor-parallel group
compute one gradient together and are one unit: a wrong value on one of them reaches the others.
"""

import io
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from holdfast import config
from holdfast.digest import digest
from holdfast.errors import ConfigError

# Mesh dimensions along which ranks have different batches; ranks along any other are one unit.
DATA_DIMS = frozenset(
    {"ddp", "dp", "replicate", "dp_replicate", "fsdp", "shard", "dp_shard", "data"}
)
_DIGEST_BYTES = 16


def units_of(
    model: nn.Module, mesh: DeviceMesh | None = None, unit: Sequence[str] | None = None
) -> list[tuple[int, ...]]:
    """Return the ranks of each unit of a job.

    Args:
        model: The model, whose DTensor parameters say which mesh the job has if none is given.
        mesh: The ``DeviceMesh`` of the whole job. Without one, and without DTensors, each rank is
            a unit.
        unit: Names of the mesh's dimensions along which ranks are one unit; by default all that
            are not known to be data-parallel (``DATA_DIMS``).

    Raises:
        ConfigError: The mesh has no such dimensions, does not contain all ranks, or has to be
            given.
    """
    ranks = dist.get_world_size()
    mesh = mesh if mesh is not None else _mesh_of(model)
    if mesh is None:
        return [(rank,) for rank in range(ranks)]
    names = tuple(mesh.mesh_dim_names or ())
    if len(names) != len(mesh.shape) or mesh.mesh.numel() != ranks:
        raise ConfigError(
            f"a mesh of shape {tuple(mesh.shape)} with names {names} for {ranks} ranks: give "
            "Shadow(mesh=...) the mesh of the whole job, made with mesh_dim_names"
        )
    together = set(names) - DATA_DIMS if unit is None else set(unit)
    if not together <= set(names):
        raise ConfigError(f"unit = {sorted(together)}: the mesh has the dimensions {names}")
    order = sorted(range(len(names)), key=lambda place: names[place] in together)
    inside = [size for name, size in zip(names, mesh.shape, strict=True) if name in together]
    width = int(torch.tensor(inside).prod()) if inside else 1
    table = mesh.mesh.permute(order).reshape(-1, width).tolist()
    return [tuple(int(rank) for rank in row) for row in table]


def _mesh_of(model: nn.Module) -> DeviceMesh | None:
    """Return the mesh of the model's DTensor parameters; None if each rank is a unit."""
    found = {p.device_mesh for p in model.parameters() if hasattr(p, "device_mesh")}
    roots = {mesh._get_root_mesh() if hasattr(mesh, "_get_root_mesh") else mesh for mesh in found}
    if not roots:
        return None
    root: DeviceMesh | None = roots.pop() if len(roots) == 1 else None
    if root is not None and root.mesh_dim_names:
        return root
    fsdp = all(hasattr(model, name) for name in ("unshard", "set_requires_gradient_sync"))
    if root is not None and fsdp and len(root.shape) == 1:
        return None
    raise ConfigError(
        "the model's parameters are on meshes that do not tell which ranks compute a gradient "
        "together: give Shadow(mesh=...) the mesh of the whole job, with mesh_dim_names"
    )


class Channel:
    """A gloo group of all ranks for the messages of shadow replicas; every wait is bounded.

    Attributes:
        rank: This rank.
        ranks: Number of ranks.
        places: Host and device of each rank.
    """

    def __init__(self, device: torch.device) -> None:
        self.rank, self.ranks, self.device = dist.get_rank(), dist.get_world_size(), device
        limit = timedelta(seconds=config.timeout_s())
        self._group = dist.new_group(backend="gloo", timeout=limit)
        self.places: list[tuple[str, str]] = [("", "")] * self.ranks
        here = (socket.gethostname(), str(device))
        dist.all_gather_object(self.places, here, group=self._group)

    def digests(self, mine: Sequence[str], *, flag: bool) -> list[tuple[bool, tuple[str, ...]]]:
        """Gather a flag and digests from every rank, the same number of digests from each."""
        packed = bytes([flag]) + b"".join(bytes.fromhex(digest) for digest in mine)
        sent = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
        received = [torch.empty_like(sent) for _ in range(self.ranks)]
        dist.all_gather(received, sent, group=self._group)
        return [_unpacked(one.numpy().tobytes()) for one in received]

    def any_rank(self, flag: bool) -> bool:
        """Return True if the flag is set on any rank."""
        return any(flag for flag, _ in self.digests([], flag=flag))

    def rotate(self, value: object, *, to: int, source: int) -> Any:
        """Send a value to one rank and return the value of another; all ranks call it."""
        if to == self.rank:
            return value
        sending = self._send(value, to)
        received = self._receive(source)
        for part in sending:
            part.wait()
        return received

    def hand(self, value: object, *, giver: int, taker: int) -> Any:
        """Send a value from one rank to another; return it there, and None on all other ranks."""
        if giver == taker:
            return value if self.rank == taker else None
        if self.rank == giver:
            for part in self._send(value, taker):
                part.wait()
        return self._receive(giver) if self.rank == taker else None

    def _send(self, value: object, to: int) -> list[dist.Work]:
        """Begin to send a value, its size first; return what has to be waited for."""
        packed = self._packed(value)
        parts = torch.tensor([packed.numel()]), packed
        sending = [dist.isend(part, to, group=self._group) for part in parts]
        return [work for work in sending if work is not None]

    def _receive(self, source: int) -> Any:
        size = torch.empty(1, dtype=torch.int64)
        dist.recv(size, source, group=self._group)
        packed = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(packed, source, group=self._group)
        return self._unpacked(packed)

    def _packed(self, value: object) -> torch.Tensor:
        buffer = io.BytesIO()
        torch.save(value, buffer)
        data = buffer.getvalue()
        return torch.frombuffer(bytearray(digest(data) + data), dtype=torch.uint8)

    def _unpacked(self, packed: torch.Tensor) -> Any:
        received = packed.numpy().tobytes()
        stated, data = received[:_DIGEST_BYTES], received[_DIGEST_BYTES:]
        if digest(data) != stated:
            raise RuntimeError(f"a message of {len(data)} bytes was changed between two ranks")
        # Pickled data is trusted if it arrived whole: it comes from a rank of this job, as
        # gradients do, and a batch may have any type.
        return torch.load(io.BytesIO(data), map_location=self._here, weights_only=False)

    def _here(self, storage: Any, location: str) -> Any:
        return storage if location == "cpu" else storage.to(self.device)


def _unpacked(packed: bytes) -> tuple[bool, tuple[str, ...]]:
    digests = packed[1:].hex()
    width = 2 * _DIGEST_BYTES
    return bool(packed[0]), tuple(digests[n : n + width] for n in range(0, len(digests), width))
