"""The damage that a fault does to the output of one call of an operator.

Each kind changes the bits of a tensor, as integers in one dimension of which ``width`` bits are
used; ``old`` is what a stale output holds.
"""

from collections.abc import Callable
from random import Random

import torch

from holdfast.inject.models import LANES

Bits = torch.Tensor
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _flip(bits: Bits, width: int, draw: Random, old: Bits | None) -> None:
    """Invert one bit of one element."""
    bits[draw.randrange(len(bits))] ^= _one_of(bits, width, draw)


def _stuck(bits: Bits, width: int, draw: Random, old: Bits | None) -> None:
    """Force one bit of every eighth element to 0 or to 1, as a broken line of a lane does."""
    lane, mask = bits[draw.randrange(min(LANES, len(bits))) :: LANES], _one_of(bits, width, draw)
    lane.copy_(lane | mask if draw.random() < 0.5 else lane & ~mask)


def _zeros(bits: Bits, width: int, draw: Random, old: Bits | None) -> None:
    """Set all elements to zero, or a run of them whose length is drawn evenly in its logarithm."""
    run = len(bits) if draw.random() < 0.5 else int(len(bits) ** draw.random())
    start = draw.randrange(len(bits) - run + 1)
    bits[start : start + run] = 0


def _stale(bits: Bits, width: int, draw: Random, old: Bits | None) -> None:
    """Leave what was there before, or what an earlier call has written."""
    if old is not None and old.numel() == len(bits):
        bits.copy_(_pattern(old))


KINDS: dict[str, Callable[[Bits, int, Random, Bits | None], None]] = {
    "flip": _flip,
    "stuck": _stuck,
    "stale": _stale,
    "zeros": _zeros,
}


@torch.no_grad()
def damage(target: torch.Tensor, kind: str, draw: Random, old: torch.Tensor | None) -> bool:
    """Damage a dense tensor on CPU, of any plain dtype, in memory and behind autograd's back.

    The same state of ``draw`` gives the same place. Returns whether a bit has changed: a line that
    is stuck at its right value does no damage.
    """
    bits = _pattern(target)
    before = bits.clone()
    KINDS[kind](bits, 1 if target.dtype is torch.bool else 8 * target.itemsize, draw, old)
    target.data.copy_(bits.view(target.dtype).view(target.shape))
    return not torch.equal(bits, before)


def _pattern(tensor: torch.Tensor) -> Bits:
    copied = tensor.detach().clone(memory_format=torch.contiguous_format)
    return copied.view(-1).view(_INTEGERS[tensor.itemsize])


def _one_of(bits: Bits, width: int, draw: Random) -> Bits:
    """Return a mask of one bit; the shift of a signed integer wraps around at the sign."""
    return torch.tensor(1, dtype=bits.dtype) << draw.randrange(width)
