"""A nested state as one flat buffer of tensors, and back.

``flatten`` takes the state apart, ``plan`` gives every tensor its place, ``write`` copies and
digests, ``read`` verifies and clones, ``unflatten`` puts the state together again.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import numpy as np
import torch

from holdfast.digest import tensor_digest
from holdfast.errors import ConfigError, SnapshotCorrupt
from holdfast.snapshot.manifest import ArrayRef, Entry, Manifest, TensorRef

ALIGNMENT_BYTES = 64
PLAIN_TYPES: tuple[type, ...] = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    torch.Size,
    torch.dtype,
    torch.device,
)
_MAPPINGS: tuple[type, ...] = (dict, OrderedDict, Counter)
_MAX_DEPTH = 100


class Cancelled(Exception):
    """A copy was abandoned before it was complete."""


Hold = Callable[[str, torch.Tensor], torch.Tensor]


@dataclass
class Flat:
    """A state taken apart; ``paths[i]`` is where ``tensors[i]`` was found first."""

    skeleton: object = None
    paths: list[str] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)


def flatten(state: object, hold: Hold = lambda path, tensor: tensor) -> Flat:
    """Take a nested state apart; tied tensors (same memory, same view) are stored once.

    Args:
        state: dicts, lists and tuples of dense tensors and plain values.
        hold: gets each path and tensor, returns the tensor to store (itself, or a clone).

    Raises:
        ConfigError: an entry is of a type that cannot be restored exactly; names its path.
    """
    flattener = _Flattener(hold)
    flattener.flat.skeleton = flattener.visit(state, ())
    return flattener.flat


class _Flattener:
    def __init__(self, hold: Hold) -> None:
        self.flat = Flat()
        self._hold = hold
        self._seen: dict[object, TensorRef] = {}

    def visit(self, value: object, path: tuple[str, ...]) -> object:
        if len(path) > _MAX_DEPTH:
            raise ConfigError(f"state_dict entry {'.'.join(path[:5])!r}… is nested without end")
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if isinstance(value, np.ndarray | np.generic):
            return _array(value, path)
        if type(value) in _MAPPINGS:
            return self._mapping(value, path)
        if type(value) in (list, tuple):
            items: Any = value
            kind: Any = type(value)
            return kind(self.visit(item, (*path, str(i))) for i, item in enumerate(items))
        return _plain(value, path)

    def _mapping(self, value: Any, path: tuple[str, ...]) -> object:
        # Filled item by item: a Counter made from pairs would count them.
        result = type(value)()
        for key, item in value.items():
            result[_plain(key, (*path, str(key)))] = self.visit(item, (*path, str(key)))
        return result

    def _tensor(self, tensor: torch.Tensor, path: tuple[str, ...]) -> TensorRef:
        _check_dense(tensor, path)
        key = _identity(tensor)
        if key not in self._seen:
            self._seen[key] = TensorRef(len(self.flat.tensors))
            self.flat.paths.append(".".join(path))
            self.flat.tensors.append(self._hold(".".join(path), tensor.detach()))
        return self._seen[key]


def _identity(tensor: torch.Tensor) -> object:
    if not tensor.numel():
        return object()
    place = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
    return (*place, tensor.is_conj(), tensor.is_neg())


def _check_dense(tensor: torch.Tensor, path: tuple[str, ...]) -> None:
    known = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    if not known or tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        what = f"{type(tensor).__name__} ({tensor.layout}, {tensor.dtype}, {tensor.device})"
        raise ConfigError(
            f"state_dict entry {'.'.join(path)!r} is a {what}: only dense tensors with memory can "
            "be snapshotted; keep it out of the state_dict or store its dense parts"
        )


def _array(value: Any, path: tuple[str, ...]) -> ArrayRef:
    array = np.asarray(value)
    if array.dtype.hasobject or array.dtype.fields or type(value) is np.matrix:
        raise _unfit(value, path)
    scalar = isinstance(value, np.generic)
    return ArrayRef(array.dtype.str, array.shape, array.tobytes(), scalar)


def _plain(value: object, path: tuple[str, ...]) -> object:
    if type(value) in PLAIN_TYPES:
        return value
    if isinstance(value, Enum):
        _plain(value.value, path)
        return value
    if type(value) in (set, frozenset, tuple):
        items: Any = value
        kind: Any = type(value)
        return kind(_plain(item, path) for item in items)
    raise _unfit(value, path)


def _unfit(value: object, path: tuple[str, ...]) -> ConfigError:
    return ConfigError(
        f"state_dict entry {'.'.join(path)!r} is a <{type(value).__name__}>: keep it out of the "
        "state_dict, or turn it into tensors, numbers and strings there"
    )


def versions(flat: Flat) -> list[int]:
    """How often autograd saw each tensor change in place; equal lists mean no change was seen."""
    return [-1 if tensor.is_inference() else tensor._version for tensor in flat.tensors]


def plan(flat: Flat) -> list[Entry]:
    """Give every tensor its place in the buffer, aligned to 64 bytes."""
    entries, offset = [], 0
    for path, tensor in zip(flat.paths, flat.tensors, strict=True):
        nbytes = tensor.numel() * tensor.element_size()
        dtype = str(tensor.dtype).removeprefix("torch.")
        shape, device = tuple(tensor.shape), str(tensor.device)
        entries.append(Entry(path, dtype, shape, device, offset, nbytes))
        offset += -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return entries


def total_bytes(entries: list[Entry]) -> int:
    """The size of the buffer that ``plan`` needs, in bytes."""
    return entries[-1].offset + entries[-1].nbytes if entries else 0


def write(
    flat: Flat, entries: list[Entry], buffer: torch.Tensor, cancelled: Callable[[], bool]
) -> Iterator[Entry]:
    """Copy the tensors to ``buffer`` (uint8), yielding each entry with its digest.

    Contiguous CPU tensors are digested at the source, so that a copy that went wrong is found;
    others (strided, CUDA) are digested as copied.

    Raises:
        Cancelled: ``cancelled()`` became true between two tensors.
    """
    for tensor, entry in zip(flat.tensors, entries, strict=True):
        if cancelled():
            raise Cancelled(f"the copy was abandoned at {entry.path}")
        yield copy_tensor(tensor, entry, buffer)


def copy_tensor(tensor: torch.Tensor, entry: Entry, buffer: torch.Tensor) -> Entry:
    """Copy one tensor to its place in ``buffer``; the entry with its digest."""
    place = buffer[entry.offset : entry.offset + entry.nbytes]
    lazy = tensor.is_conj() or tensor.is_neg()
    at_source = tensor.device.type == "cpu" and tensor.is_contiguous() and not lazy
    if at_source and entry.nbytes:
        # Not torch's copy_: its second team of OpenMP threads would slow down every kernel of the
        # training thread.
        source = tensor.detach().reshape(-1).view(torch.uint8)
        np.copyto(place.numpy(), source.numpy())
    elif entry.nbytes:
        place.view(tensor.dtype).view(tensor.shape).copy_(tensor)
    digest = tensor_digest(tensor if at_source else place)
    return replace(entry, digest=digest)


def read(manifest: Manifest, buffer: torch.Tensor) -> list[torch.Tensor]:
    """Clones of the manifest's tensors, each verified after it was cloned.

    Raises:
        SnapshotCorrupt: a tensor's bytes do not match their digest; names its path.
    """
    return [_read_tensor(entry, buffer) for entry in manifest.entries]


def _read_tensor(entry: Entry, buffer: torch.Tensor) -> torch.Tensor:
    if entry.offset + entry.nbytes > buffer.numel():
        raise SnapshotCorrupt(f"{entry.path} lies outside the {buffer.numel()} bytes of its slot")
    raw = buffer[entry.offset : entry.offset + entry.nbytes].clone()
    found = tensor_digest(raw)
    if found != entry.digest:
        raise SnapshotCorrupt(
            f"{entry.path} ({entry.nbytes} bytes) has digest {found}, stored was {entry.digest}"
        )
    dtype = getattr(torch, entry.dtype)
    return (
        raw.view(dtype).view(entry.shape) if entry.nbytes else torch.empty(entry.shape, dtype=dtype)
    )


def unflatten(skeleton: object, tensors: list[torch.Tensor]) -> Any:
    """Put a state together again from its skeleton and its tensors."""
    if isinstance(skeleton, TensorRef):
        return tensors[skeleton.index]
    if isinstance(skeleton, ArrayRef):
        array = np.frombuffer(skeleton.data, np.dtype(skeleton.dtype)).reshape(skeleton.shape)
        return array[()] if skeleton.scalar else array.copy()
    if type(skeleton) in _MAPPINGS:
        mapping: Any = skeleton
        result: Any = type(skeleton)()
        result.update({key: unflatten(item, tensors) for key, item in mapping.items()})
        return result
    if type(skeleton) in (list, tuple):
        items: Any = skeleton
        kind: Any = type(skeleton)
        return kind(unflatten(item, tensors) for item in items)
    return skeleton
