"""Workloads: computations that are repeated on the same seeded inputs."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from holdfast.screen.difference import Parts

# To be increased with every change of a workload or a kernel that changes the bits of a result,
# so that stored references of earlier versions are not used.
KERNELS = 1
VARIANTS = 2  # number of inputs of each workload, because some faults need particular operands


@dataclass(frozen=True)
class Scale:
    """Sizes of the workloads.

    Args:
        name: "full" or "small".
        wide: Rows and columns of fp32 matrices.
        narrow: Rows and columns of 16-bit matrices, which processors without instructions for
            them multiply slowly.
        tokens: Sequence length of attention.
        table_rows: Rows of the embedding bag's table.
        block_bytes: Size of what is digested, and of the blocks of memory patterns.
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
        name: Name of the op, as findings show it.
        run: Computes the result on the input of this number, below ``VARIANTS``.
        work: Amount of work of one run.
        unit: Unit of ``work``, "flop" or "B".
        expected: The right parts of every result, if they are known beforehand.
    """

    name: str
    run: Callable[[int], Parts]
    work: float
    unit: str
    expected: Parts | None = None


def generator(op: str, variant: int) -> torch.Generator:
    """Return the generator of a workload's inputs, on the CPU so that all devices get the same."""
    seed = int.from_bytes(op.encode()[-6:], "little")
    return torch.Generator().manual_seed(seed * VARIANTS + variant)
