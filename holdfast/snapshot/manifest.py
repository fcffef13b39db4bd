"""What lies where in a snapshot's buffer, as bytes that are only trusted after their digest.

The manifest is a pickled skeleton (the state with tensors replaced by references) and one entry a
tensor: dotted path, dtype, shape, device, offset, bytes, xxh3-128 of the bytes. It is unpickled
only after its own digest was checked, and only into the types that ``layout.flatten`` lets in.
"""

import io
import pickle
import sys
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
import xxhash

from holdfast.errors import SnapshotCorrupt


@dataclass(frozen=True)
class TensorRef:
    """Stands for the tensor of entry ``index`` in a skeleton."""

    index: int


@dataclass(frozen=True)
class ArrayRef:
    """Stands for a NumPy array, or scalar, in a skeleton: its bytes in C order."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes
    scalar: bool


@dataclass(frozen=True)
class Entry:
    """Where one tensor lies in the buffer; ``digest`` is empty until it was written."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    device: str
    offset: int
    nbytes: int
    digest: str = ""


@dataclass(frozen=True)
class Manifest:
    """What a buffer holds: the state without its tensors, and where each tensor is."""

    skeleton: object
    entries: tuple[Entry, ...]


def encode(skeleton: object, entries: list[Entry]) -> bytes:
    """The manifest as bytes."""
    rows = [tuple(vars(entry).values()) for entry in entries]
    return pickle.dumps((skeleton, rows), protocol=4)


def digest_of(blob: bytes) -> str:
    """xxh3-128 of an encoded manifest, 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(blob)


def decode(blob: bytes, digest: str) -> Manifest:
    """The manifest, if its bytes match ``digest``.

    Raises:
        SnapshotCorrupt: they do not, or they ask for types that no manifest holds.
    """
    if digest_of(blob) != digest:
        raise SnapshotCorrupt(f"the manifest ({len(blob)} bytes) does not match digest {digest}")
    try:
        skeleton, rows = _Unpickler(io.BytesIO(blob)).load()
    except (pickle.UnpicklingError, ValueError, TypeError) as error:
        raise SnapshotCorrupt(f"the manifest cannot be read: {error}") from error
    return Manifest(skeleton, tuple(Entry(*row) for row in rows))


class _Unpickler(pickle.Unpickler):
    _ALLOWED = frozenset(
        {
            (__name__, "TensorRef"),
            (__name__, "ArrayRef"),
            ("builtins", "set"),
            ("builtins", "frozenset"),
            ("builtins", "complex"),
            ("collections", "OrderedDict"),
            ("collections", "Counter"),
            ("torch", "Size"),
            ("torch", "device"),
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        # Only what is imported already: importing a module runs its code.
        found: Any = sys.modules.get(module)
        for part in name.split("."):
            found = getattr(found, part, None)
        enum = isinstance(found, type) and issubclass(found, Enum)
        if (module, name) in self._ALLOWED or isinstance(found, torch.dtype) or enum:
            return found
        raise pickle.UnpicklingError(
            f"{module}.{name} is no type of a manifest (an enum's module must be imported first)"
        )
