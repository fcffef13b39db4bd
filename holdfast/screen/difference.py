"""The bits in which a wrong result differs from the right one, as their XOR."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from holdfast.digest.tensors import tensor_bytes

Parts = Mapping[str, torch.Tensor]
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True)
class Difference:
    """The wrong elements of one part of a result, e.g. of ``"grad_a"``.

    ``elements`` of ``of`` elements differ, and ``bits`` counts them by the bit in which they
    differ, 0 the least significant. ``right``, ``wrong`` and ``xor`` are the bits of the first
    wrong element, at ``index``, in hex.
    """

    part: str
    dtype: str
    elements: int
    of: int
    bits: Mapping[int, int]
    index: tuple[int, ...]
    right: str
    wrong: str
    xor: str

    @property
    def text(self) -> str:
        """One line of text for people."""
        listed = ", ".join(f"{bit} ({count}×)" for bit, count in self.worst_bits[:8])
        more = f" and {len(self.bits) - 8} more" if len(self.bits) > 8 else ""
        return (
            f"{self.part} ({self.dtype}): {self.elements} of {self.of} elements; bits {listed}"
            f"{more}; first at {list(self.index)}: {self.wrong} for {self.right}, XOR {self.xor}"
        )

    @property
    def worst_bits(self) -> list[tuple[int, int]]:
        """Bits with their numbers of elements, the most frequent first."""
        return sorted(self.bits.items(), key=lambda item: (-item[1], -item[0]))


def differences(right: Parts, wrong: Parts) -> tuple[Difference, ...]:
    """Compare the parts that two results have in common; return those that differ."""
    found = (difference(name, right[name], wrong[name]) for name in right if name in wrong)
    return tuple(each for each in found if each is not None)


def difference(part: str, right: torch.Tensor, wrong: torch.Tensor) -> Difference | None:
    """Compare two tensors of one shape and dtype; return None if they are equal bit for bit."""
    if right.shape != wrong.shape or right.dtype != wrong.dtype:
        raise ValueError(
            f"{part} is {wrong.dtype} {list(wrong.shape)} here and {right.dtype} "
            f"{list(right.shape)} there: compare results of one workload"
        )
    of_right, of_wrong = _pattern(right), _pattern(wrong)
    where = np.flatnonzero(of_right != of_wrong)
    if not len(where):
        return None
    xor = of_right[where] ^ of_wrong[where]
    bits = np.unpackbits(xor[:, None].view(np.uint8), axis=1, bitorder="little")
    counts = bits.sum(0, dtype=np.int64)
    first, digits = int(where[0]), 2 * xor.itemsize
    return Difference(
        part=part,
        dtype=str(right.dtype).removeprefix("torch."),
        elements=len(where),
        of=right.numel(),
        bits={bit: count for bit, count in enumerate(counts.tolist()) if count},
        index=tuple(int(i) for i in np.unravel_index(first, tuple(right.shape))),
        right=f"{int(of_right[first]):0{digits}x}",
        wrong=f"{int(of_wrong[first]):0{digits}x}",
        xor=f"{int(xor[0]):0{digits}x}",
    )


def merged(found: Iterable[Difference]) -> tuple[Difference, ...]:
    """Merge differences of several results into one for each part.

    The counts of bits are added up; ``elements`` is that of the worst result, and the example is
    the first one.
    """
    by_part: dict[str, Difference] = {}
    for each in found:
        known = by_part.get(each.part)
        by_part[each.part] = each if known is None else _added(known, each)
    # The part in which a fault occurred has fewer wrong elements than those it spread to.
    return tuple(sorted(by_part.values(), key=lambda each: each.elements))


def _added(known: Difference, each: Difference) -> Difference:
    bits = Counter(known.bits) + Counter(each.bits)
    return replace(known, bits=dict(bits), elements=max(known.elements, each.elements))


def _pattern(tensor: torch.Tensor) -> np.ndarray:
    return np.frombuffer(tensor_bytes(tensor), dtype=_UNSIGNED[tensor.dtype.itemsize])
