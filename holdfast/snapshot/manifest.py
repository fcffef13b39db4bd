"""What lies where in a snapshot's buffer, as bytes that are only trusted after their digest.

The manifest is a pickled skeleton (the state with tensors replaced by references) and one entry a
tensor: dotted path, dtype, shape, device, offset, bytes, digest of the bytes. It is unpickled
only after its own digest was checked, and only into the types that ``layout.flatten`` lets in.
"""

import io
import pickle
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import torch

from holdfast import digest
from holdfast.errors import SnapshotCorrupt
from holdfast.snapshot.sharding import Sharding


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
    """Where one tensor lies in the buffer; ``digest`` is empty until it was written."""

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
    """What a buffer holds: the state without its tensors, and where each tensor is.

    ``attachment``: what else a share of a state must say (``shares.ShareManifest``), plain values.
    """

    skeleton: object
    entries: tuple[Entry, ...]
    attachment: object = None


def encode(skeleton: object, entries: Sequence[Entry], attachment: object = None) -> bytes:
    """The manifest as bytes."""
    rows = list(map(tuple, entries))
    content = (skeleton, rows) if attachment is None else (skeleton, rows, attachment)
    return pickle.dumps(content, protocol=4)


def digest_of(blob: bytes) -> str:
    """Of an encoded manifest, 32 hex digits."""
    return digest.hexdigest(blob)


def decode(blob: bytes, digest: str, *, opaque: bool = False) -> Manifest:
    """The manifest, if its bytes match ``digest``.

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
            (Sharding.__module__, "Sharding"),
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
