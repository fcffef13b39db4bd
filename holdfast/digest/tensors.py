"""Position-mixing digests of tensors: equal digests mean equal bits.

XOR hashes would not change if elements are swapped or the same bit flips in two of them.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

import numpy as np
import torch

from holdfast.digest import Hasher, digest


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """View the elements in C order as flat bytes; no copy if it is contiguous on CPU.

    Works for every dtype, also those that NumPy does not know (bf16, fp8). Of a DTensor it is this
    rank's shard; of a sparse COO tensor, its indices and values as they are.
    """
    local: torch.Tensor = getattr(tensor, "to_local", lambda: tensor)()
    if local.is_sparse:
        return memoryview(b"".join(map(tensor_bytes, (local._indices(), local._values()))))
    return raw_bytes(local).cpu().numpy().data if local.numel() else memoryview(b"")


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements in C order as flat uint8, on their device; no copy if contiguous."""
    plain = tensor.detach()
    if not plain.is_contiguous() or plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg().contiguous()
    # One element counts as contiguous whatever its stride, and view() does not take it then.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


def tensor_digest(tensor: torch.Tensor) -> str:
    """Compute the digest of a tensor's bytes (not its shape or dtype), 32 hex digits.

    The digest of a tensor on a CUDA device is computed there, and only 16 bytes are moved.
    """
    return tensor_digests([tensor])[0]


def tensor_digests(tensors: Iterable[torch.Tensor]) -> list[str]:
    """Compute the digests of many tensors, each as ``tensor_digest``.

    Those on a CUDA device are computed by one kernel, and moved to the host in one piece.
    """
    return [each.hex() for each in _digests(list(tensors))]


def _digests(tensors: list[torch.Tensor]) -> list[bytes]:
    found = [b""] * len(tensors)
    devices: defaultdict[torch.device, dict[int, torch.Tensor]] = defaultdict(dict)
    for index, tensor in enumerate(tensors):
        if is_on_device(tensor):
            local = getattr(tensor, "to_local", lambda held=tensor: held)()
            devices[tensor.device][index] = local
        else:
            found[index] = digest(tensor_bytes(tensor))
    for held in devices.values():
        # Not at the top: processes without a device do without Triton.
        from holdfast.digest import cuda

        for index, value in zip(held, cuda.digests(list(held.values())), strict=True):
            found[index] = value
    return found


def is_on_device(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's bytes are digested where they are, by ``holdfast.digest.cuda``."""
    return tensor.is_cuda and not tensor.is_sparse


def tensors_digest(tensors: Iterable[torch.Tensor | None]) -> str:
    """Compute one digest of a sequence; order, shapes, dtypes and missing tensors count.

    It is computed from the tensors' own digests (``tensor_digests``).
    """
    parts: list[bytes | torch.Tensor] = []
    for tensor in tensors:
        parts += [b"none"] if tensor is None else _described("", tensor)
    return _joined(parts)


def state_digest(state: object) -> str:
    """Compute the digest of a nested state of dicts, lists, tuples, tensors and plain values.

    Dictionary order counts. Plain values enter by ``repr``, so floats count to the last bit.
    Tensors enter by their digests (``tensor_digests``).
    """
    return _joined(list(_parts(state)))


def _joined(parts: Sequence[bytes | torch.Tensor]) -> str:
    digests = iter(_digests([part for part in parts if isinstance(part, torch.Tensor)]))
    hasher = Hasher()
    for part in parts:
        hasher.update(next(digests) if isinstance(part, torch.Tensor) else part)
    return hasher.digest().hex()


def _described(kind: str, tensor: torch.Tensor) -> list[bytes | torch.Tensor]:
    return [f"{kind}{tensor.dtype}{tuple(tensor.shape)}".encode(), tensor]


def _parts(value: object) -> Iterator[bytes | torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield from _described("tensor", value)
    elif isinstance(value, Mapping):
        yield f"map{len(value)}".encode()
        for pair in value.items():
            yield from chain.from_iterable(map(_parts, pair))
    elif isinstance(value, list | tuple):
        yield f"{type(value).__name__}{len(value)}".encode()
        yield from chain.from_iterable(map(_parts, value))
    elif isinstance(value, np.ndarray):
        try:
            held = torch.from_numpy(value.copy())
        except (TypeError, ValueError):  # strings, dates, objects, the other byte order
            yield f"{value.dtype.str}{value.shape}".encode()
            yield from _parts(value.tolist())
        else:
            yield from _parts(held)
    elif isinstance(value, set | frozenset):
        yield f"set{len(value)}".encode()
        yield from chain.from_iterable(map(_parts, sorted(value, key=repr)))
    else:
        yield f"{type(value).__name__}:{value!r}".encode()
