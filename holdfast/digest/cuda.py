"""The digests of tensors on the device that they are on; the same values as on a CPU."""

from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial

import numpy as np
import torch

from holdfast.digest.kernels import digest_kernel
from holdfast.digest.reference import BLOCK, FIRST_STEP, KEYS, LANES, SECOND_STEP, STRIPE, mixed
from holdfast.digest.tensors import raw_bytes

# One program digests this much; with more, the largest tensors would not occupy the whole device.
_PIECE_BYTES = 32 * BLOCK
_ALIGNMENT_BYTES = 16
_TABLES = 16


def digests(tensors: Sequence[torch.Tensor]) -> list[bytes]:
    """Compute the digests of tensors of one device, elements in C order, 16 bytes each.

    There is one launch, and one transfer to the host of 16 bytes a tensor. A tensor that is not
    contiguous, or does not begin at a multiple of 16 bytes, is copied first; all of these at once.
    """
    found = queued(tensors)
    if tensors[0].is_cuda:
        torch.cuda.current_stream(tensors[0].device).synchronize()
    return found()


def queued(tensors: Sequence[torch.Tensor]) -> Callable[[], list[bytes]]:
    """Queue the digests on the current stream; the result returns them once that was waited for."""
    device = tensors[0].device
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
    flat = [_aligned(raw_bytes(tensor)) for tensor in tensors]
    sums = torch.zeros((len(flat), 2), dtype=torch.int64, device=device)
    pieces = _pieces(tuple((each.data_ptr(), each.numel()) for each in flat), device, stream)
    with torch.cuda.device_of(sums):
        digest_kernel[(len(pieces),)](
            pieces,
            _keys(device),
            sums,
            FIRST_STEP=_signed(FIRST_STEP),
            SECOND_STEP=_signed(SECOND_STEP),
            STRIPES=BLOCK // STRIPE,
            LANES=LANES,
        )
    return partial(_finished, sums.to("cpu", non_blocking=True), [each.numel() for each in flat])


def _finished(sums: torch.Tensor, sizes: list[int]) -> list[bytes]:
    lengths = np.array(sizes, np.uint64)[:, None] + np.uint64(1)
    ends = sums.numpy().view(np.uint64) + lengths * np.array([SECOND_STEP, FIRST_STEP], np.uint64)
    return [row.tobytes() for row in mixed(ends).astype("<u8")]


def _aligned(data: torch.Tensor) -> torch.Tensor:
    return data.clone() if data.data_ptr() % _ALIGNMENT_BYTES else data


@lru_cache(maxsize=_TABLES)
def _pieces(
    places: tuple[tuple[int, int], ...], device: torch.device, stream: object
) -> torch.Tensor:
    """Return the kernel's table for tensors given by address and bytes, for use on one stream."""
    sizes = np.array([nbytes for _, nbytes in places], np.int64)
    counts = -(-sizes // _PIECE_BYTES)
    of = np.repeat(np.arange(len(places)), counts)
    start = (np.arange(len(of)) - (np.cumsum(counts) - counts)[of]) * _PIECE_BYTES
    addresses = np.array([address for address, _ in places], np.int64)
    size = np.minimum(_PIECE_BYTES, sizes[of] - start)
    rows = torch.from_numpy(np.stack([addresses[of] + start, size, start // BLOCK, of], axis=1))
    # Pinned, so that nobody waits for what the stream was given before.
    return rows if stream is None else rows.pin_memory().to(device, non_blocking=True)


@cache
def _keys(device: torch.device) -> torch.Tensor:
    return torch.from_numpy(KEYS.view("<i8").copy()).to(device)


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word
