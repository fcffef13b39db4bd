"""A nested state as one flat buffer of tensors, and back.

``flatten`` takes the state apart, ``plan`` gives every tensor its place, ``write`` copies and
digests, ``read`` verifies and clones, ``unflatten`` puts the state together again.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from itertools import repeat
from typing import Any

import numpy as np
import torch

from holdfast.digest import copy_each
from holdfast.digest.tensors import tensor_digest
from holdfast.errors import ConfigError, SnapshotCorrupt
from holdfast.snapshot.layout import dtensors
from holdfast.snapshot.layout.manifest import ArrayRef, Entry, Manifest, ShardRef, TensorRef

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
DENSE_TYPES: tuple[type, ...] = (torch.Tensor, torch.nn.Parameter)
_MAPPINGS: tuple[type, ...] = (dict, OrderedDict, Counter)
_PLAIN = frozenset(PLAIN_TYPES)
_MAX_DEPTH = 100
_BATCH_BYTES = 32 * 2**20


class Cancelled(Exception):
    """A copy was abandoned before it was complete."""


Hold = Callable[[str, torch.Tensor], torch.Tensor]
# The state of a run: names of its parts, and what their state_dict methods gave.
Tree = dict[str, Any]


@dataclass
class Flat:
    """A state taken apart; ``paths[i]`` is where ``tensors[i]`` was found first.

    ``stable[i]``: it is the live tensor, not a clone of it. ``watched[i]``: other tensors whose
    version counters tell of its changes (DTensors, of which it is the local tensor).
    """

    skeleton: object = None
    paths: list[str] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    stable: list[bool] = field(default_factory=list)
    watched: dict[int, list[torch.Tensor]] = field(default_factory=dict)


def flatten(state: object, hold: Hold = lambda path, tensor: tensor) -> Flat:
    """Take a nested state apart; tied tensors (same memory, same view) are stored once.

    Args:
        state: dicts, lists and tuples of dense tensors, DTensors of them, and plain values.
        hold: gets each path and tensor, returns the tensor to store (itself, or a clone).

    Raises:
        ConfigError: an entry is of a type that cannot be restored exactly; names its path.
    """
    flattener = _Flattener(hold)
    flattener.flat.skeleton = flattener.visit(state, "")
    return flattener.flat


class _Flattener:
    """Takes a state apart; the common types come first, as training waits meanwhile."""

    def __init__(self, hold: Hold) -> None:
        self.flat = Flat()
        self._hold = hold
        self._live: list[torch.Tensor] = []  # what was found, as it was found
        self._at: dict[int, list[TensorRef]] = {}  # by address
        self._describer = dtensors.Describer()

    def visit(self, value: object, path: str, depth: int = 0) -> object:
        if type(value) in _PLAIN:
            return value
        if type(value) in DENSE_TYPES:
            return self._tensor(value, path)  # type: ignore[arg-type]
        if depth > _MAX_DEPTH:
            raise ConfigError(f"state_dict entry {path[:50]!r}… is nested without end")
        if dtensors.is_dtensor(value):
            return self._shard(value, path)
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if isinstance(value, np.ndarray | np.generic):
            return _array(value, path)
        if type(value) in _MAPPINGS:
            return self._mapping(value, path, depth + 1)
        if type(value) in (list, tuple):
            items: Any = value
            below = [_below(path, index) for index in range(len(items))]
            return type(items)(map(self.visit, items, below, repeat(depth + 1)))
        return _plain(value, path)

    def _mapping(self, value: Any, path: str, depth: int) -> object:
        # Filled item by item: a Counter made from pairs would count them.
        result = type(value)()
        for key, item in value.items():
            below = f"{path}.{key!s}" if path else str(key)
            known = key if type(key) in _PLAIN else _plain(key, below)
            result[known] = self.visit(item, below, depth)
        return result

    def _shard(self, tensor: Any, path: str) -> ShardRef:
        described = self._describer.describe(tensor, path)
        index = self._tensor(dtensors.local_of(tensor), path).index
        self.flat.watched.setdefault(index, []).append(tensor)
        return ShardRef(index, described)

    def _tensor(self, tensor: torch.Tensor, path: str) -> TensorRef:
        _check_dense(tensor, path)
        here = self._at.setdefault(address, []) if (address := tensor.data_ptr()) else []
        for ref in here:
            if _identity(self._live[ref.index]) == _identity(tensor):
                return ref
        flat = self.flat
        ref = TensorRef(len(flat.tensors))
        live = tensor.detach()  # not the user's own object, whose .data may be exchanged
        held = self._hold(path, live)
        flat.paths.append(path)
        flat.tensors.append(held)
        flat.stable.append(held is live)
        self._live.append(live)
        here.append(ref)
        return ref


def _below(path: str, key: object) -> str:
    return f"{path}.{key!s}" if path else str(key)


def _identity(tensor: torch.Tensor) -> object:
    if not tensor.numel():
        return object()
    place = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
    return (*place, tensor.is_conj(), tensor.is_neg())


def _check_dense(tensor: torch.Tensor, path: str) -> None:
    if (
        type(tensor) not in DENSE_TYPES
        or tensor.layout is not torch.strided
        or tensor.is_quantized
        or tensor.is_meta
    ):
        what = f"{type(tensor).__name__} ({tensor.layout}, {tensor.dtype}, {tensor.device})"
        raise ConfigError(
            f"state_dict entry {path!r} is a {what}: only dense tensors with memory can "
            "be snapshotted; keep it out of the state_dict or store its dense parts"
        )


def _array(value: Any, path: str) -> ArrayRef:
    array = np.asarray(value)
    if array.dtype.hasobject or array.dtype.fields or type(value) is np.matrix:
        raise _unfit(value, path)
    scalar = isinstance(value, np.generic)
    return ArrayRef(array.dtype.str, array.shape, array.tobytes(), scalar)


def _plain(value: object, path: str) -> object:
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Enum):
        _plain(value.value, path)
        return value
    if type(value) in (set, frozenset, tuple):
        items: Any = value
        return type(items)(_plain(item, path) for item in items)
    raise _unfit(value, path)


def _unfit(value: object, path: str) -> ConfigError:
    return ConfigError(
        f"state_dict entry {path!r} is a <{type(value).__name__}>: keep it out of the "
        "state_dict, or turn it into tensors, numbers and strings there"
    )


def versions(flat: Flat) -> list[int]:
    """Count the changes in place that autograd saw of each tensor; equal lists mean none."""
    found = list(map(_version, flat.tensors))
    for index, more in flat.watched.items():
        found[index] += sum(map(_version, more))
    return found


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def plan(flat: Flat, *, stable_first: bool = False) -> list[Entry]:
    """Give every tensor its place in the buffer, aligned to 64 bytes.

    With ``stable_first`` the stable tensors lie together at its beginning, the others after them.
    """
    sizes = [tensor.nbytes for tensor in flat.tensors]
    order: Iterable[int] = range(len(sizes))
    if stable_first:
        order = sorted(order, key=lambda index: not flat.stable[index])
    offsets, end = [0] * len(sizes), 0
    for index in order:
        offsets[index] = end
        end += aligned(sizes[index])
    return list(map(_entry, flat.paths, flat.tensors, offsets, sizes))


def _entry(path: str, tensor: torch.Tensor, offset: int, nbytes: int) -> Entry:
    dtype, device = _dtype_name(tensor.dtype), _device_name(tensor.device)
    return Entry(path, dtype, tuple(tensor.shape), device, offset, nbytes)


@cache
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_device_name = cache(str)


def aligned(nbytes: int) -> int:
    """``nbytes`` rounded up to the alignment of tensors."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def total_bytes(entries: list[Entry]) -> int:
    """Return the size of the buffer that ``plan`` needs, in bytes."""
    return max((entry.offset + entry.nbytes for entry in entries), default=0)


def stable_bytes(flat: Flat, entries: list[Entry]) -> int:
    """Return the size of the first part, of the stable tensors in a plan with ``stable_first``."""
    return total_bytes([e for e, stable in zip(entries, flat.stable, strict=True) if stable])


def write(
    flat: Flat,
    entries: list[Entry],
    buffer: torch.Tensor,
    cancelled: Callable[[], bool],
    helpers: Callable[[], int] = lambda: 0,
) -> list[Entry]:
    """Copy the tensors to ``buffer`` (uint8); return the entries with their digests.

    Contiguous CPU tensors are digested at the source, so that a copy that went wrong is found;
    others (strided, CUDA) are digested as copied.

    Args:
        flat: the state.
        entries: the places of its tensors, of ``plan``.
        buffer: where to.
        cancelled: asked before each batch.
        helpers: asked before each batch, until it says how many threads are to help with the rest.

    Raises:
        Cancelled: ``cancelled()`` became true between two batches of 32 MiB.
    """
    left = iter(list(_batches(entries)))  # whoever is free takes the next
    found = list(entries)

    def copy(batch: slice) -> None:
        if cancelled():
            raise Cancelled(f"the copy was abandoned at {entries[batch.start].path}")
        found[batch] = copy_tensors(flat.tensors[batch], entries[batch], buffer)

    def help_with_the_rest() -> None:
        for batch in left:
            copy(batch)

    with ExitStack() as stack:
        helping: list[Future[None]] = []
        for batch in left:
            if not helping and (count := helpers()):
                pool = stack.enter_context(ThreadPoolExecutor(count, "holdfast-snapshot-helper"))
                helping = [pool.submit(help_with_the_rest) for _ in range(count)]
            copy(batch)
        for helper in helping:
            helper.result()
    return found


def _batches(entries: Sequence[Entry]) -> Iterator[slice]:
    """Neighbours with 32 MiB or so together: short enough to stop in between, and to be shared."""
    start = nbytes = 0
    for index, entry in enumerate(entries):
        nbytes += entry.nbytes
        if nbytes >= _BATCH_BYTES or index == len(entries) - 1:
            yield slice(start, index + 1)
            start, nbytes = index + 1, 0


def copy_tensors(
    tensors: Sequence[torch.Tensor], entries: Sequence[Entry], buffer: torch.Tensor, start: int = 0
) -> list[Entry]:
    """Copy tensors to their places in ``buffer``; return the entries with their digests.

    The first byte of ``buffer`` has offset ``start``.
    """
    digests, rows, direct = [""] * len(entries), [], []
    base = buffer.data_ptr() - start
    for index, (tensor, entry) in enumerate(zip(tensors, entries, strict=True)):
        if not entry.offset - start + entry.nbytes <= buffer.numel():
            raise ValueError(f"{entry.path} does not fit into a buffer of {buffer.numel()} bytes")
        lazy = tensor.is_conj() or tensor.is_neg()
        if tensor.device.type == "cpu" and tensor.is_contiguous() and not lazy:
            rows.append((tensor.data_ptr(), base + entry.offset, entry.nbytes))
            direct.append(index)
            continue
        place = buffer[entry.offset - start : entry.offset - start + entry.nbytes]
        if entry.nbytes:
            place.view(tensor.dtype).view(tensor.shape).copy_(tensor)
        digests[index] = tensor_digest(place)
    if rows:
        # Not torch's copy_: its second team of OpenMP threads would slow down every kernel of the
        # training thread. One call for all: that thread is not kept from Python, either.
        found = copy_each(np.array(rows, np.int64)).hex()
        for number, index in enumerate(direct):
            digests[index] = found[32 * number : 32 * number + 32]
    pairs = zip(entries, digests, strict=True)
    return [Entry(*entry[:-1], digest) for entry, digest in pairs]


def read(manifest: Manifest, buffer: torch.Tensor) -> list[torch.Tensor]:
    """Clones of the manifest's tensors, each verified after it was cloned.

    Raises:
        SnapshotCorrupt: a tensor's bytes do not match their digest; names its path.
    """
    return [read_tensor(entry, buffer) for entry in manifest.entries]


def read_tensor(entry: Entry, buffer: torch.Tensor, start: int = 0) -> torch.Tensor:
    """Return a clone of one tensor, verified after it was cloned; ``start`` as in ``copy_tensors``.

    Raises:
        SnapshotCorrupt: as ``read``.
    """
    offset = entry.offset - start
    if offset + entry.nbytes > buffer.numel():
        raise SnapshotCorrupt(f"{entry.path} lies outside the {buffer.numel()} bytes of its slot")
    raw = buffer[offset : offset + entry.nbytes].clone()
    found = tensor_digest(raw)
    if found != entry.digest:
        raise SnapshotCorrupt(
            f"{entry.path} ({entry.nbytes} bytes) has digest {found}, stored was {entry.digest}"
        )
    return as_tensor(entry, raw)


def as_tensor(entry: Entry, raw: torch.Tensor) -> torch.Tensor:
    """Return an entry's bytes as the tensor that they are; shares their memory."""
    dtype = getattr(torch, entry.dtype)
    return (
        raw.view(dtype).view(entry.shape) if entry.nbytes else torch.empty(entry.shape, dtype=dtype)
    )


def unflatten(skeleton: Any, tensors: list[torch.Tensor]) -> Any:
    """Put a state together again from its skeleton and its tensors."""
    if isinstance(skeleton, ShardRef):
        return dtensors.LocalShard(tensors[skeleton.index], skeleton.sharding)
    if isinstance(skeleton, TensorRef):
        return tensors[skeleton.index]
    if isinstance(skeleton, ArrayRef):
        array = np.frombuffer(skeleton.data, np.dtype(skeleton.dtype)).reshape(skeleton.shape)
        return array[()] if skeleton.scalar else array.copy()
    if type(skeleton) in _MAPPINGS:
        result = type(skeleton)()
        result.update({key: unflatten(item, tensors) for key, item in skeleton.items()})
        return result
    if type(skeleton) in (list, tuple):
        return type(skeleton)(unflatten(item, tensors) for item in skeleton)
    return skeleton
