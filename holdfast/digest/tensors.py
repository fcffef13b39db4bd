"""Position-mixing digests of tensors: equal digests mean equal bits.

XOR hashes would not change if elements are swapped or the same bit flips in two of them.
"""

from collections.abc import Iterable, Mapping

import numpy as np
import torch

from holdfast.digest import Hasher, hexdigest


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """View the elements in C order as flat bytes; no copy if it is contiguous on CPU.

    Works for every dtype, also those that NumPy does not know (bf16, fp8). Of a DTensor it is this
    rank's shard; of a sparse COO tensor, its indices and values as they are.
    """
    local: torch.Tensor = getattr(tensor, "to_local", lambda: tensor)()
    if local.is_sparse:
        return memoryview(b"".join(map(tensor_bytes, (local._indices(), local._values()))))
    flat = local.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    # One element counts as contiguous whatever its stride, and view() does not take it then.
    flat = flat.as_strided(flat.shape, (1,))
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def tensor_digest(tensor: torch.Tensor) -> str:
    """Compute the digest of a tensor's bytes (not its shape or dtype), 32 hex digits.

    The digest of a tensor on a CUDA device is computed there, and only 16 bytes are moved.
    """
    local: torch.Tensor = getattr(tensor, "to_local", lambda: tensor)()
    if local.is_cuda and not local.is_sparse:
        # Not at the top: processes without a device do without Triton.
        from holdfast.digest import cuda

        return cuda.digest(local).hex()
    return hexdigest(tensor_bytes(local))


def tensors_digest(tensors: Iterable[torch.Tensor | None]) -> str:
    """Compute one digest of a sequence; order, shapes, dtypes and missing tensors count."""
    state = Hasher()
    for tensor in tensors:
        if tensor is None:
            state.update(b"none")
            continue
        state.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        state.update(tensor_bytes(tensor))
    return state.digest().hex()


def state_digest(state: object) -> str:
    """Compute the digest of a nested state of dicts, lists, tuples, tensors and plain values.

    Dictionary order counts. Plain values enter by ``repr``, so floats count to the last bit.
    """
    hasher = Hasher()
    _update(hasher, state)
    return hasher.digest().hex()


def _update(hasher: Hasher, value: object) -> None:
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
