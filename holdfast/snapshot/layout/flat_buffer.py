"""A nested state as one flat buffer of bytes, and back.

``flatten`` separates the tensors of a state from the rest, ``plan`` assigns every tensor its place
in the buffer, ``write`` copies the tensors there and computes their digests, ``read`` copies them
out and verifies them, and ``unflatten`` builds the nested state again.
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

from holdfast.digest import copy_each, hexdigest
from holdfast.errors import ConfigError, SnapshotCorrupt
from holdfast.snapshot.layout import dtensors
from holdfast.snapshot.layout.manifest import ArrayRef, Entry, ShardRef, TensorRef

ALIGNMENT_BYTES = 64
_PYTHON = (type(None), bool, int, float, complex, str, bytes)
_PLAIN = frozenset[type]((*_PYTHON, torch.Size, torch.dtype, torch.device))
DENSE_TYPES: tuple[type, ...] = (torch.Tensor, torch.nn.Parameter)
_MAPPINGS: tuple[type, ...] = (dict, OrderedDict, Counter)
_MAX_DEPTH = 100
_BATCH_BYTES = 32 * 2**20


class Cancelled(Exception):
    """A copy was abandoned before it was complete."""


# Takes the paths and the live tensors of a state, returns the tensors to store in their place.
Hold = Callable[[list[str], list[torch.Tensor]], list[torch.Tensor]]
# The state of a run: the names of its parts, with the values of their state_dict methods.
Tree = dict[str, Any]


@dataclass
class Flat:
    """A state whose tensors were separated from the rest.

    Attributes:
        skeleton: the nested state with a reference in the place of every tensor.
        paths: the dotted path at which each tensor was found first.
        tensors: the tensors, each once, however often the state refers to it.
        stable: true for a live tensor of the run, false for a clone that was made of one.
        frozen: the indices of parameters that are not trained.
        live: the tensors as they were found, so that a change of one that was cloned can be seen.
        watched: by index, the DTensors of which it is the local tensor, with counters of their own.
    """

    skeleton: object = None
    paths: list[str] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    stable: list[bool] = field(default_factory=list)
    frozen: set[int] = field(default_factory=set)
    live: list[torch.Tensor] = field(default_factory=list)
    watched: dict[int, list[torch.Tensor]] = field(default_factory=dict)


def flatten(state: object, hold: Hold = lambda paths, tensors: tensors) -> Flat:
    """Separate the tensors of a nested state from the rest; store tied tensors once.

    Tensors are tied if they are the same view of the same memory. The state may consist of dicts,
    lists and tuples of dense tensors, DTensors of them, and plain values. An entry of a type that
    cannot be restored exactly raises ConfigError, which names its path.
    """
    flattener = _Flattener()
    flat = flattener.flat
    flat.skeleton = flattener.visit(state, "")
    flat.live, flat.tensors = flat.tensors, hold(flat.paths, flat.tensors)
    flat.stable = [held is tensor for held, tensor in zip(flat.tensors, flat.live, strict=True)]
    return flat


class _Flattener:
    """Walks over a state; checks the common types first because training waits meanwhile."""

    def __init__(self) -> None:
        self.flat, self._describer = Flat(), dtensors.Describer()
        self._at: dict[int, list[TensorRef]] = {}  # by address

    def visit(self, value: object, path: str, depth: int = 0) -> object:
        if type(value) in _PLAIN:
            return value
        if type(value) in DENSE_TYPES:
            return self._tensor(value, path)  # type: ignore[arg-type]
        if depth > _MAX_DEPTH:
            raise ConfigError(f"state_dict entry {path[:50]!r}… is nested without end")
        if type(value) in _MAPPINGS:
            return self._mapping(value, path, depth + 1)
        if type(value) in (list, tuple):
            items: Any = value
            prefix = f"{path}." if path else ""
            below = [f"{prefix}{index}" for index in range(len(items))]
            return type(items)(map(self.visit, items, below, repeat(depth + 1)))
        if isinstance(value, torch.Tensor):
            found = self._shard if dtensors.is_dtensor(value) else self._tensor
            return found(value, path)
        if not isinstance(value, np.ndarray | np.generic):
            return _plain(value, path)
        array, scalar = np.asarray(value), isinstance(value, np.generic)
        if array.dtype.hasobject or array.dtype.fields or type(value) is np.matrix:
            raise _unfit(value, path)
        return ArrayRef(array.dtype.str, array.shape, array.tobytes(), scalar)

    def _mapping(self, value: Any, path: str, depth: int) -> object:
        # Filled item by item: a Counter made from pairs would count them.
        result = type(value)()
        prefix = f"{path}." if path else ""
        for key, item in value.items():
            below = f"{prefix}{key!s}"
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
        flat = self.flat
        here = self._at.setdefault(address, []) if (address := tensor.data_ptr()) else []
        for ref in here:
            if _identity(flat.tensors[ref.index]) == _identity(tensor):
                return ref
        ref = TensorRef(len(flat.tensors))
        flat.paths.append(path)
        flat.tensors.append(tensor.detach())  # the user may exchange .data of the original object
        here.append(ref)
        return ref


def _identity(tensor: torch.Tensor) -> object:
    if not tensor.numel():
        return object()
    place = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
    return (*place, tensor.is_conj(), tensor.is_neg())


def _check_dense(tensor: torch.Tensor, path: str) -> None:
    dense = type(tensor) in DENSE_TYPES and tensor.layout is torch.strided
    if not dense or tensor.is_quantized or tensor.is_meta:
        what = f"{type(tensor).__name__} ({tensor.layout}, {tensor.dtype}, {tensor.device})"
        raise ConfigError(
            f"state_dict entry {path!r} is a {what}: only dense tensors with memory can "
            "be snapshotted; keep it out of the state_dict or store its dense parts"
        )


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
    """Return how often autograd saw each tensor change in place; equal lists mean no change."""
    found = list(map(version, flat.tensors))
    for index, more in flat.watched.items():
        found[index] += sum(map(version, more))
    return found


def live_version(flat: Flat, index: int) -> int:
    """Return how often autograd saw the live tensor with this index change in place."""
    return sum(map(version, (flat.live[index], *flat.watched.get(index, ()))))


def version(tensor: torch.Tensor) -> int:
    """Return how often autograd saw a tensor change in place; -1 if it does not count."""
    return -1 if tensor.is_inference() else tensor._version


def plan(flat: Flat, *, stable_first: bool = False) -> list[Entry]:
    """Assign every tensor its place in the buffer, aligned to 64 bytes.

    With ``stable_first`` the stable tensors lie together at the beginning, the others after them.
    Tensors on devices lie together too, so that small ones can be copied as one piece.
    """
    sizes = [tensor.nbytes for tensor in flat.tensors]
    on_host = [tensor.is_cpu for tensor in flat.tensors]
    order: Iterable[int] = range(len(sizes))
    if stable_first or not all(on_host):
        order = sorted(order, key=lambda n: (stable_first and not flat.stable[n], on_host[n]))
    offsets, end = [0] * len(sizes), 0
    for index in order:
        offsets[index] = end
        end += aligned(sizes[index])
    rows = zip(flat.paths, flat.tensors, offsets, sizes, strict=True)
    return [
        Entry(path, _name(tensor.dtype), tuple(tensor.shape), _name(tensor.device), offset, nbytes)
        for path, tensor, offset, nbytes in rows
    ]


@cache
def _name(dtype_or_device: torch.dtype | torch.device) -> str:
    return str(dtype_or_device).removeprefix("torch.")


def aligned(nbytes: int) -> int:
    """Round a number of bytes up to a multiple of 64, to which tensors are aligned."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def total_bytes(entries: list[Entry]) -> int:
    """Return the size of the buffer that planned entries need, in bytes."""
    return max((entry.offset + entry.nbytes for entry in entries), default=0)


def stable_bytes(flat: Flat, entries: list[Entry]) -> int:
    """Return the size of the part with the stable tensors in a plan with ``stable_first``."""
    return total_bytes([e for e, stable in zip(entries, flat.stable, strict=True) if stable])


def write(
    flat: Flat,
    entries: list[Entry],
    buffer: torch.Tensor,
    cancelled: Callable[[], bool],
    helpers: Callable[[], int] = lambda: 0,
) -> list[Entry]:
    """Copy the tensors to their places in ``buffer`` (uint8), as ``copy_tensors``.

    Before each batch of 32 MiB ``cancelled`` is called, which may end the copy with ``Cancelled``,
    and ``helpers`` until it returns how many more threads are to copy the rest.
    """
    left = iter(list(batches(entries)))  # whichever thread is free takes the next batch
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


def batches(entries: Sequence[Entry]) -> Iterator[slice]:
    """Yield neighbouring entries of about 32 MiB together, the work between two interruptions."""
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

    ``start`` is the offset of the first byte of ``buffer``. The digest of a contiguous CPU tensor
    is computed from the tensor, which makes an error of the copy detectable; the digest of any
    other tensor (strided, CUDA) is computed from its copy.
    """
    digests, rows, direct = [""] * len(entries), [], []
    base = buffer.data_ptr() - start
    for index, (tensor, entry) in enumerate(zip(tensors, entries, strict=True)):
        first = entry.offset - start
        if first + entry.nbytes > buffer.numel():
            raise ValueError(f"{entry.path} does not fit into a buffer of {buffer.numel()} bytes")
        if in_place(tensor):
            rows.append((tensor.data_ptr(), base + entry.offset, entry.nbytes))
            direct.append(index)
            continue
        place = buffer[first : first + entry.nbytes]
        if entry.nbytes:
            place.view(tensor.dtype).view(tensor.shape).copy_(tensor)
        digests[index] = hexdigest(place.numpy())
    if rows:
        # torch's copy_ would start a second team of OpenMP threads, which slows down every kernel
        # of the training thread. A single call for all tensors also takes Python's lock only once.
        found = copy_each(np.array(rows, np.int64)).hex()
        for number, index in enumerate(direct):
            digests[index] = found[32 * number : 32 * number + 32]
    return [Entry(*e[:-1], found) for e, found in zip(entries, digests, strict=True)]


def in_place(tensor: torch.Tensor) -> bool:
    """Return whether the memory of a tensor holds its bytes in order, on the host."""
    plain = tensor.is_cpu and tensor.is_contiguous()
    return plain and not (tensor.is_conj() or tensor.is_neg())


def read(entries: Sequence[Entry], buffer: torch.Tensor, start: int = 0) -> list[torch.Tensor]:
    """Return clones of the tensors in ``buffer``, whose first byte has the offset ``start``.

    One that does not match its digest raises SnapshotCorrupt, which names its path.
    """
    clones = []
    for entry in entries:
        first = entry.offset - start
        if first + entry.nbytes > buffer.numel():
            raise SnapshotCorrupt(
                f"{entry.path} lies outside the {buffer.numel()} bytes of its slot"
            )
        clones.append(buffer[first : first + entry.nbytes].clone())
        if (found := hexdigest(clones[-1].numpy())) != entry.digest:
            raise SnapshotCorrupt(
                f"{entry.path} ({entry.nbytes} bytes) has digest {found}, stored was {entry.digest}"
            )
    return list(map(as_tensor, entries, clones))


def as_tensor(entry: Entry, raw: torch.Tensor) -> torch.Tensor:
    """Return the bytes of an entry as a tensor of its dtype and shape, in the same memory."""
    dtype = getattr(torch, entry.dtype)
    found = raw.view(dtype) if entry.nbytes else torch.empty(entry.shape, dtype=dtype)
    return found.view(entry.shape)


def unflatten(skeleton: Any, tensors: list[torch.Tensor]) -> Any:
    """Build a nested state from its skeleton and its tensors."""
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
