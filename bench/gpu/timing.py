"""Times of single calls, and the operands that they are given."""

from collections.abc import Callable

import torch

from bench.cuda import seconds
from bench.gpu.stage import Machine

SAMPLE_S = 10e-3
COPY_BYTES = 2 * 10**9


def seconds_of(run: Callable[[], object]) -> float:
    """Return the seconds of a call on the device, or on CPU where there is none."""
    repeats = int(SAMPLE_S / max(seconds(run, 1), 1e-6))
    return max(seconds(run, max(1, repeats)), 1e-9)


def copy_bytes_s(machine: Machine) -> float:
    """Return the speed of a copy on the device, in bytes read and written a second."""
    source = torch.empty(COPY_BYTES // (10**5 if machine.rehearsed else 1), dtype=torch.uint8)
    source = source.to(machine.device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds_of(lambda: target.copy_(source))


def normal(shape: tuple[int, int], dtype: torch.dtype, machine: Machine, seed: int) -> torch.Tensor:
    """Draw a matrix on the device, the same for the same seed."""
    generator = torch.Generator(machine.device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=machine.device).to(dtype)
