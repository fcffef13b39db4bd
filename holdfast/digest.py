"""Position-mixing digests of tensors: equal digests mean equal bits, up to 2⁻¹²⁸ chance.

XOR hashes, which other replay tools use, cannot see swapped, reversed or paired-flip data; xxh3
mixes every byte with its position.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
import xxhash


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The tensor's elements in C order as flat bytes; no copy if it is contiguous on CPU.

    Works for every dtype, also those that NumPy does not know (bf16, fp8).
    """
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def tensor_digest(tensor: torch.Tensor) -> str:
    """xxh3-128 of a tensor's bytes (shape and dtype are not part of it), 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(tensor_bytes(tensor))


def tensors_digest(tensors: Iterable[torch.Tensor | None]) -> str:
    """One digest for a sequence of tensors; order, shapes, dtypes and missing ones count."""
    state = xxhash.xxh3_128()
    for tensor in tensors:
        if tensor is None:
            state.update(b"none")
            continue
        state.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        state.update(tensor_bytes(tensor))
    return state.hexdigest()


def state_digest(state: object) -> str:
    """Digest of a nested state (dicts, lists, tuples, tensors, plain values), e.g. a state_dict.

    Dictionary order counts. Plain values enter by ``repr``, so floats count to the last bit.
    """
    hasher = xxhash.xxh3_128()
    _update(hasher, state)
    return hasher.hexdigest()


def _update(hasher: Any, value: object) -> None:
    if isinstance(value, torch.Tensor):
        hasher.update(f"tensor{value.dtype}{tuple(value.shape)}".encode())
        hasher.update(tensor_bytes(value))
    elif isinstance(value, Mapping):
        hasher.update(f"map{len(value)}".encode())
        for key, item in value.items():
            _update(hasher, key)
            _update(hasher, item)
    elif isinstance(value, list | tuple):
        hasher.update(f"{type(value).__name__}{len(value)}".encode())
        for item in value:
            _update(hasher, item)
    elif isinstance(value, np.ndarray):
        _update(hasher, torch.from_numpy(value.copy()))
    elif isinstance(value, set | frozenset):
        hasher.update(f"set{len(value)}".encode())
        for item in sorted(value, key=repr):
            _update(hasher, item)
    else:
        hasher.update(f"{type(value).__name__}:{value!r}".encode())
