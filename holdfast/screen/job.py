"""Workloads: computations that are repeated on the same seeded inputs."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from holdfast.screen.difference import Parts

# To be increased with every change of a workload or a kernel that changes the bits of a result,
# so that stored references of earlier versions are not used.
KERNELS = 2
VARIANTS = 2  # number of inputs of each workload, because some faults need particular operands


@dataclass(frozen=True)
class Scale:
    """Sizes of the workloads.

    ``wide`` and ``narrow`` are the rows and columns of fp32 and of 16-bit matrices; processors
    without instructions for 16 bits multiply them slowly. ``tokens`` is the length of attention,
    ``table_rows`` that of the embedding table, and ``block_bytes`` the number of bytes that are
    digested, and of each block of memory patterns.
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

    ``inputs`` holds the arguments of ``compute`` for each variant. One execution takes ``work``
    flop, bytes or tests, as ``unit`` says. ``expected`` holds the right parts of every result, if
    they are known beforehand.
    """

    name: str
    compute: Callable[..., Parts]
    inputs: Sequence[Sequence[torch.Tensor]]
    work: float
    unit: str
    expected: Parts | None = None

    def run(self, variant: int) -> Parts:
        """Compute the result on one of the inputs."""
        return self.compute(*self.inputs[variant])


def drawn(
    op: str, device: torch.device, draw: Callable[[torch.Generator], Iterable[torch.Tensor]]
) -> list[list[torch.Tensor]]:
    """Draw the inputs of every variant on the CPU, so that they are the same on all devices."""
    seed = int.from_bytes(op.encode()[-6:], "little") * VARIANTS
    generators = (torch.Generator().manual_seed(seed + variant) for variant in range(VARIANTS))
    return [[each.to(device) for each in draw(generator)] for generator in generators]
