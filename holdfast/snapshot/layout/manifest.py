"""The description of a snapshot's buffer, as bytes that are used only after their digest matched.

The manifest is a pickled skeleton (the state with references in the place of its tensors) and one
entry for each tensor: dotted path, dtype, shape, device, offset, size and digest. It is unpickled
only into the types that ``flat_buffer.flatten`` accepts.
"""

import io
import pickle
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import torch

from holdfast.digest import hexdigest
from holdfast.errors import SnapshotCorrupt

# The modules that define the classes of a manifest in older checkpoints.
_FORMER_MODULES = frozenset({"holdfast.snapshot.manifest", "holdfast.snapshot.sharding"})

Placement = tuple[str | int, ...]
digest_of = hexdigest  # of an encoded manifest


@dataclass(frozen=True)
class Sharding:
    """The part of a global tensor that one rank holds as its shard.

    Attributes:
        shape, stride: those of the global tensor.
        placements: for each mesh dimension ``("Shard", dim)``, ``("Replicate",)`` or
            ``("_StridedShard", dim, split_factor)``.
        mesh_shape, mesh_names, ranks: those of the mesh; ranks with the last dimension fastest.
        offsets: where the shard begins in the global tensor; empty on a rank outside the mesh.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    placements: tuple[Placement, ...]
    mesh_shape: tuple[int, ...]
    mesh_names: tuple[str, ...]
    ranks: tuple[int, ...]
    offsets: tuple[int, ...]

    @property
    def mesh(self) -> tuple[tuple[int, ...], tuple[str, ...], tuple[int, ...]]:
        """The identity of the mesh, which is equal on all its ranks and after a restart."""
        return self.mesh_shape, self.mesh_names, self.ranks

    def __str__(self) -> str:
        names = self.mesh_names or tuple(str(number) for number in range(len(self.mesh_shape)))
        sizes = zip(names, self.mesh_shape, strict=True)
        mesh = ", ".join(f"{name}={size}" for name, size in sizes)
        placed = ", ".join(f"{name}({', '.join(map(str, a))})" for name, *a in self.placements)
        where = f"the part at {list(self.offsets)}" if self.offsets else "no part"
        ranks = ", ".join(map(str, self.ranks))
        first, last = self.ranks[0], self.ranks[-1]
        if last > first + 1 and self.ranks == tuple(range(first, last + 1)):
            ranks = f"{first} to {last}"
        return f"{where} of {list(self.shape)}, {placed} on mesh ({mesh}) of ranks {ranks}"


@dataclass(frozen=True)
class TensorRef:
    """The reference to the tensor of entry ``index`` in a skeleton."""

    index: int


@dataclass(frozen=True)
class ShardRef(TensorRef):
    """The reference to a DTensor in a skeleton; entry ``index`` is this rank's shard of it."""

    sharding: Sharding


@dataclass(frozen=True)
class ArrayRef:
    """A NumPy array or scalar in a skeleton, as its bytes in C order."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes
    scalar: bool


class Entry(NamedTuple):
    """The place of one tensor in the buffer; ``digest`` is empty until the tensor was written."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    device: str
    offset: int
    nbytes: int
    digest: str = ""


class Opaque:
    """A value of a type that this process has not imported, with the type's name and arguments."""

    def __init__(self, type_name: str, *arguments: object) -> None:
        self.type_name, self.arguments = type_name, arguments


@dataclass(frozen=True)
class Manifest:
    """The content of a buffer: the state without its tensors, and the place of each tensor.

    ``attachment`` holds plain values that describe a share of a state (``shares.ShareManifest``).
    """

    skeleton: object
    entries: tuple[Entry, ...]
    attachment: object = None


def encode(skeleton: object, entries: Sequence[Entry], attachment: object = None) -> bytes:
    """Return the manifest as bytes."""
    rows = list(map(tuple, entries))
    content = (skeleton, rows) if attachment is None else (skeleton, rows, attachment)
    return pickle.dumps(content, protocol=4)


def decode(blob: bytes, digest: str, *, opaque: bool = False) -> Manifest:
    """Return the manifest, if its bytes match ``digest``.

    With ``opaque`` a value of an unknown type becomes :class:`Opaque`, to be passed on.

    Raises:
        SnapshotCorrupt: the bytes do not match, or they ask for types that no manifest holds.
    """
    if digest_of(blob) != digest:
        raise SnapshotCorrupt(f"the manifest ({len(blob)} bytes) does not match digest {digest}")
    try:
        skeleton, rows, *more = _Unpickler(io.BytesIO(blob), opaque).load()
        return Manifest(skeleton, tuple(Entry(*row) for row in rows), *more)
    except (pickle.UnpicklingError, ValueError, TypeError) as error:
        raise SnapshotCorrupt(f"the manifest cannot be read: {error}") from error


class _Unpickler(pickle.Unpickler):
    _ALLOWED: Mapping[str, Sequence[str]] = {
        __name__: ("TensorRef", "ShardRef", "ArrayRef", "Sharding"),
        "builtins": ("set", "frozenset", "complex"),
        "collections": ("OrderedDict", "Counter"),
        "torch": ("Size", "device"),
    }

    def __init__(self, file: io.BytesIO, opaque: bool) -> None:
        super().__init__(file)
        self._opaque = opaque

    def find_class(self, module: str, name: str) -> Any:
        module = __name__ if module in _FORMER_MODULES else module
        # Only modules that are imported already are used, because an import runs code.
        found: Any = sys.modules.get(module)
        for part in name.split("."):
            found = getattr(found, part, None)
        enum = isinstance(found, type) and issubclass(found, Enum)
        if name in self._ALLOWED.get(module, ()) or isinstance(found, torch.dtype) or enum:
            return found
        if self._opaque:
            return partial(Opaque, f"{module}.{name}")
        raise pickle.UnpicklingError(
            f"{module}.{name} is no type of a manifest (an enum's module must be imported first)"
        )
