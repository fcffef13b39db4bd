"""The digest of a tensor's bytes on the device that it is on; the same value as on a CPU."""

from functools import cache

import torch

from holdfast.digest.kernels import digest_kernel
from holdfast.digest.reference import BLOCK, FIRST_STEP, KEYS, LANES, SECOND_STEP, STRIPE, finished

_STRIPES = BLOCK // STRIPE
_WORD = 8


def digest(tensor: torch.Tensor) -> bytes:
    """Compute the digest of the elements in C order, 16 bytes; 16 are moved to the host.

    A tensor that is not contiguous, or does not begin at a multiple of 8 bytes, is copied first.
    """
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    data = flat.as_strided(flat.shape, (1,)).view(torch.uint8)
    if data.data_ptr() % _WORD:
        data = data.clone()
    sums = torch.zeros(2, dtype=torch.int64, device=data.device)
    whole = data.numel() // BLOCK
    if whole:
        _add(data[: whole * BLOCK], sums, 0, _STRIPES)
    if left := data.numel() - whole * BLOCK:
        padded = torch.zeros(BLOCK, dtype=torch.uint8, device=data.device)
        padded[:left] = data[whole * BLOCK :]
        _add(padded, sums, whole, -(-left // STRIPE))
    first, second = sums.tolist()
    return finished(first, second, data.numel())


def _add(blocks: torch.Tensor, sums: torch.Tensor, first_block: int, stripes: int) -> None:
    digest_kernel[(blocks.numel() // BLOCK,)](
        blocks.view(torch.int64),
        _keys(blocks.device),
        sums,
        stripes,
        first_block,
        FIRST_STEP=_signed(FIRST_STEP),
        SECOND_STEP=_signed(SECOND_STEP),
        STRIPES=_STRIPES,
        LANES=LANES,
    )


@cache
def _keys(device: torch.device) -> torch.Tensor:
    return torch.from_numpy(KEYS.view("<i8").copy()).to(device)


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word
