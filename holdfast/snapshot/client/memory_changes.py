"""Tensors whose bytes are not those that were digested: where they differ, and their repair."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from holdfast.digest.tensors import tensor_bytes, tensor_digest
from holdfast.memory import WIDEST_FAULT_BYTES
from holdfast.snapshot.client.copies import Copy
from holdfast.snapshot.layout.flat_buffer import as_tensor
from holdfast.snapshot.node.session import patience_s

MOST_FAULTS = 2  # tensors; changes of weights in more of them are taken for edits
# Memory flips a bit, or two of one word. A program that edits a number changes more of them.
MOST_FAULT_BITS = 2


@dataclass(frozen=True)
class Change:
    """A tensor that changed: ``span`` bytes from byte ``first``; 0 where that is not known.

    ``address`` is where the first of them lies in memory; 0 if they do not lie in one piece.
    ``bits`` is the number of bits that differ.
    """

    index: int
    span: int = 0
    first: int = 0
    address: int = 0
    bits: int = 0


def is_wide(changes: Sequence[Change]) -> bool:
    """Return whether changes that were found together reach further than a memory fault does.

    A page may hold many small tensors, so that their number counts only beyond a page.
    """
    if any(change.span > WIDEST_FAULT_BYTES for change in changes):
        return True
    if len(changes) <= MOST_FAULTS:
        return False
    if not all(change.address for change in changes):
        return True
    ends = [change.address + change.span for change in changes]
    return max(ends) - min(change.address for change in changes) > WIDEST_FAULT_BYTES


def change_of(copy: Copy, index: int) -> Change:
    """Compare a tensor that is known to have changed with the copy of it, if there is one."""
    right, live = _stored(copy, index), copy.flat.live[index]
    if right is None:
        return Change(index)
    now = np.frombuffer(tensor_bytes(live), np.uint8)
    flipped = now ^ np.frombuffer(tensor_bytes(right), np.uint8)
    places = np.flatnonzero(flipped)
    if not len(places):  # it differed when it was digested, and does not when it is read again
        return Change(index)
    first, last = int(places[0]), int(places[-1])
    address = live.data_ptr() + first if live.is_contiguous() else 0
    bits = int(np.unpackbits(flipped[places]).sum())
    return Change(index, last - first + 1, first, address, bits)


def mend(copy: Copy, index: int) -> bool:
    """Write the copied bytes over a tensor; return whether they are in place."""
    right, live = _stored(copy, index), copy.flat.live[index]
    if right is None:
        return False
    with torch.inference_mode(live.is_inference()), torch.no_grad():
        live.copy_(right)
    for holder in copy.flat.watched.get(index, ()):  # what was cached of them is out of date
        torch.autograd.graph.increment_version(holder)
    copy.repaired(index)
    return tensor_digest(live) == copy.digests[index]


def _stored(copy: Copy, index: int) -> torch.Tensor | None:
    """Return a tensor as the snapshot holds it; None if it does not, or not intact."""
    if copy.device is not None:
        copy.device.copied.wait(patience_s(copy.nbytes))
    raw = copy.stored(index)
    return None if raw is None else as_tensor(copy.entries[index], raw)
