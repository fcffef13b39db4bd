"""What a workload is: the same seeded inputs, computed again and again."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from holdfast.screen.difference import Parts

# Moves with every change of a workload or of a kernel of ours that changes a result's bits.
KERNELS = 1
VARIANTS = 2  # inputs of each workload: some faults need particular operands


@dataclass(frozen=True)
class Scale:
    """Sizes of the workloads.

    Args:
        name: "full" or "small"; wide: of fp32 matrices; narrow: of 16-bit ones, which processors
            without such instructions multiply slowly; tokens: of attention; table_rows: of the
            embedding bag; block_bytes: of the digest and of the memory patterns.
    """

    name: str
    wide: int
    narrow: int
    tokens: int
    table_rows: int
    block_bytes: int


SCALES = {
    "full": Scale("full", 512, 256, 256, 200_000, 1 << 20),
    "small": Scale("small", 64, 48, 32, 500, 1 << 16),
}


@dataclass(frozen=True)
class Job:
    """One workload of one unit.

    Args:
        name: the op, as in findings; run: computes the result on one of ``VARIANTS`` inputs.
        work: of one run, in flop or bytes; unit: which of both.
        expected: what the parts of every result must be, where that is known beforehand.
    """

    name: str
    run: Callable[[int], Parts]
    work: float
    unit: str
    expected: Parts | None = None


def generator(op: str, variant: int) -> torch.Generator:
    """The source of a workload's inputs: always on the CPU, so the same for every device."""
    seed = int.from_bytes(op.encode()[-6:], "little")
    return torch.Generator().manual_seed(seed * VARIANTS + variant)
