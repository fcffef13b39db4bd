"""The description of a snapshot's buffer, as bytes that are only trusted after their digest.

The manifest is a pickled skeleton (the state with tensors replaced by references) and one entry a
tensor: dotted path, dtype, shape, device, offset, bytes, digest of the bytes. It is unpickled
only after its own digest was checked, and only into the types that ``layout.flatten`` lets in.
"""

import io
import pickle
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import torch

from holdfast import digest
from holdfast.errors import SnapshotCorrupt

# The modules in which the classes of a manifest lay when older checkpoints were written.
_FORMER_MODULES = frozenset({"holdfast.snapshot.manifest", "holdfast.snapshot.sharding"})

Placement = tuple[str | int, ...]


@dataclass(frozen=True)
class Sharding:
    """The part of a whole tensor that a rank's shard is.

    Attributes:
        shape, stride: of the whole tensor.
        placements: for each mesh dimension ``("Shard", dim)``, ``("Replicate",)`` or
            ``("_StridedShard", dim, split_factor)``.
        mesh_shape, mesh_names: of the mesh; names are empty if it has none.
        ranks: of the mesh, last dimension fastest.
        offsets: where the shard begins in the whole tensor; empty on a rank outside the mesh.
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
        """The identity of the mesh: equal on every rank of it, and after a restart."""
        return self.mesh_shape, self.mesh_names, self.ranks

    def __str__(self) -> str:
        names = self.mesh_names or tuple(str(number) for number in range(len(self.mesh_shape)))
        sizes = zip(names, self.mesh_shape, strict=True)
        mesh = ", ".join(f"{name}={size}" for name, size in sizes)
        placed = ", ".join(
            f"{name}({', '.join(map(str, args))})" for name, *args in self.placements
        )
        where = f"the part at {list(self.offsets)}" if self.offsets else "no part"
        return f"{where} of {list(self.shape)}, {placed} on mesh ({mesh}) of {_shown(self.ranks)}"


def _shown(ranks: tuple[int, ...]) -> str:
    if len(ranks) > 2 and ranks == tuple(range(ranks[0], ranks[0] + len(ranks))):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}"


@dataclass(frozen=True)
class TensorRef:
    """Stands for the tensor of entry ``index`` in a skeleton."""

    index: int


@dataclass(frozen=True)
class ShardRef(TensorRef):
    """Stands for a DTensor: entry ``index`` is this rank's shard of it."""

    sharding: Sharding


@dataclass(frozen=True)
class ArrayRef:
    """Stands for a NumPy array, or scalar, in a skeleton: its bytes in C order."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes
    scalar: bool


class Entry(NamedTuple):
    """The place of one tensor in the buffer; ``digest`` is empty until it was written."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    device: str
    offset: int
    nbytes: int
    digest: str = ""


class Opaque:
    """Stands for a value whose type is not imported here: its type's name, what it is made from."""

    def __init__(self, type_name: str, *arguments: object) -> None:
        self.type_name, self.arguments = type_name, arguments


@dataclass(frozen=True)
class Manifest:
    """The content of a buffer: the state without its tensors, and the place of each tensor.

    ``attachment``: plain values that describe a share of a state (``shares.ShareManifest``).
    """

    skeleton: object
    entries: tuple[Entry, ...]
    attachment: object = None


def leaves(value: object, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], object]]:
    """Yield path and value of every leaf of nested dicts, lists and tuples."""
    if isinstance(value, dict):
        below: Iterable[tuple[object, object]] = value.items()
    elif isinstance(value, list | tuple):
        below = enumerate(value)
    else:
        yield path, value
        return
    for key, item in below:
        yield from leaves(item, (*path, str(key)))


def encode(skeleton: object, entries: Sequence[Entry], attachment: object = None) -> bytes:
    """Return the manifest as bytes."""
    rows = list(map(tuple, entries))
    content = (skeleton, rows) if attachment is None else (skeleton, rows, attachment)
    return pickle.dumps(content, protocol=4)


def digest_of(blob: bytes) -> str:
    """Return the digest of an encoded manifest, 32 hex digits."""
    return digest.hexdigest(blob)


def decode(blob: bytes, digest: str, *, opaque: bool = False) -> Manifest:
    """Return the manifest, if its bytes match ``digest``.

    With ``opaque`` values of unknown types become :class:`Opaque`: for who only moves them on.

    Raises:
        SnapshotCorrupt: they do not, or they ask for types that no manifest holds.
    """
    if digest_of(blob) != digest:
        raise SnapshotCorrupt(f"the manifest ({len(blob)} bytes) does not match digest {digest}")
    try:
        skeleton, rows, *more = _Unpickler(io.BytesIO(blob), opaque).load()
        return Manifest(skeleton, tuple(Entry(*row) for row in rows), *more)
    except (pickle.UnpicklingError, ValueError, TypeError) as error:
        raise SnapshotCorrupt(f"the manifest cannot be read: {error}") from error


class _Unpickler(pickle.Unpickler):
    _ALLOWED = frozenset(
        {
            (__name__, "TensorRef"),
            (__name__, "ShardRef"),
            (__name__, "ArrayRef"),
            (__name__, "Sharding"),
            ("builtins", "set"),
            ("builtins", "frozenset"),
            ("builtins", "complex"),
            ("collections", "OrderedDict"),
            ("collections", "Counter"),
            ("torch", "Size"),
            ("torch", "device"),
        }
    )

    def __init__(self, file: io.BytesIO, opaque: bool) -> None:
        super().__init__(file)
        self._opaque = opaque

    def find_class(self, module: str, name: str) -> Any:
        module = __name__ if module in _FORMER_MODULES else module
        # Only what is imported already: importing a module runs its code.
        found: Any = sys.modules.get(module)
        for part in name.split("."):
            found = getattr(found, part, None)
        enum = isinstance(found, type) and issubclass(found, Enum)
        if (module, name) in self._ALLOWED or isinstance(found, torch.dtype) or enum:
            return found
        if self._opaque:
            return partial(Opaque, f"{module}.{name}")
        raise pickle.UnpicklingError(
            f"{module}.{name} is no type of a manifest (an enum's module must be imported first)"
        )
