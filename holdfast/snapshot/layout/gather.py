"""The bytes of a state by their place in its plan, read from the live tensors.

What lies within one contiguous CPU tensor is read in place. The rest goes through memory that the
caller bounds: several small tensors in one piece, tensors on other devices, strided ones.
"""

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
import torch

from holdfast.digest import Hasher
from holdfast.digest.tensors import tensor_bytes
from holdfast.snapshot.layout.flat_buffer import Flat
from holdfast.snapshot.layout.manifest import Entry
from holdfast.snapshot.parity.isal import Bytes


class Live:
    """The stable tensors of a state, by their places in its plan; between them there are zeros."""

    def __init__(self, flat: Flat, entries: Sequence[Entry]) -> None:
        rows = zip(entries, flat.tensors, flat.stable, strict=True)
        placed = [(entry, tensor) for entry, tensor, stable in rows if stable and entry.nbytes]
        placed.sort(key=lambda pair: pair[0].offset)
        self._starts = [entry.offset for entry, _ in placed]
        self._stops = [entry.offset + entry.nbytes for entry, _ in placed]
        self._tensors = [tensor for _, tensor in placed]
        self._bytes = [_in_place(tensor) for tensor in self._tensors]
        # Copies from there want pinned memory.
        self.on_device = any(tensor.is_cuda for tensor in self._tensors)

    def read(self, start: int, stop: int, scratch: Bytes, hasher: Hasher) -> Bytes:
        """Bytes ``start`` … ``stop`` - 1: in place if they can be, else gathered into ``scratch``.

        ``hasher`` gets them from where they came, so that a copy that went wrong is found.
        ``scratch`` is as long as they are; bounds are multiples of 64, but for a state's end.
        """
        index, direct = self._placed(start, stop)
        if direct is None:
            return self._gathered(index, start, stop, scratch, hasher)
        hasher.update(direct)
        return direct

    def copy(self, start: int, stop: int, target: Bytes, scratch: Bytes, hasher: Hasher) -> None:
        """Copy them to ``target``, in one pass if they can be read in place; else as ``read``."""
        index, direct = self._placed(start, stop)
        if direct is not None:
            hasher.copy(direct, target)
            return
        found = self._gathered(index, start, stop, scratch, hasher)
        if found is not target:
            # Not torch's copy_: its second team of OpenMP threads would slow down every kernel of
            # the training thread.
            np.copyto(target, found)

    def _placed(self, start: int, stop: int) -> tuple[int, Bytes | None]:
        """Return the tensor at ``start`` or the next, and all bytes if it holds them in place."""
        index = max(0, bisect_right(self._starts, start) - 1)
        direct = self._bytes[index] if self._bytes else None
        if direct is None or not self._starts[index] <= start <= stop <= self._stops[index]:
            return index, None
        base = self._starts[index]
        return index, direct[start - base : stop - base]

    def _gathered(self, index: int, start: int, stop: int, out: Bytes, hasher: Hasher) -> Bytes:
        end = start
        while index < len(self._starts) and self._starts[index] < stop:
            first, last = max(start, self._starts[index]), min(stop, self._stops[index])
            if first < last:
                _zero(out[end - start : first - start], hasher)
                self._copy(index, first, last, out[first - start : last - start], hasher)
                end = last
            index += 1
        _zero(out[end - start :], hasher)
        return out

    def _copy(self, index: int, first: int, last: int, out: Bytes, hasher: Hasher) -> None:
        base, direct = self._starts[index], self._bytes[index]
        if direct is not None:
            hasher.copy(direct[first - base : last - base], out)
            return
        tensor = self._tensors[index]
        size = tensor.element_size()
        target = torch.from_numpy(out).view(tensor.dtype)
        copy_elements(tensor, (first - base) // size, (last - base) // size, target)
        hasher.update(out)


def _in_place(tensor: torch.Tensor) -> Bytes | None:
    lazy = tensor.is_conj() or tensor.is_neg()
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or lazy:
        return None
    return np.asarray(tensor_bytes(tensor))


def _zero(out: Bytes, hasher: Hasher) -> None:
    if len(out):
        out[:] = 0
        hasher.update(out)


def copy_elements(tensor: torch.Tensor, first: int, last: int, out: torch.Tensor) -> None:
    """Copy elements ``first`` … ``last`` - 1, in C order, to ``out``; allocates nothing on CPU."""
    if tensor.is_contiguous():
        out.copy_(tensor.reshape(-1)[first:last])
        return
    inner = tensor[0].numel()
    row = first // inner
    if head := min(-first % inner, last - first):
        copy_elements(tensor[row], first - row * inner, first - row * inner + head, out[:head])
        first, row = first + head, row + 1
    whole = (last - first) // inner
    if whole:
        block = tensor[row : row + whole]
        out[head : head + whole * inner].view(block.shape).copy_(block)
    if tail := last - first - whole * inner:
        copy_elements(tensor[row + whole], 0, tail, out[head + whole * inner :])
