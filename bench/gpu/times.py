"""The stage that times checks, on the device and on the host."""

import statistics
import time
from collections.abc import Callable, Collection, Iterator

import torch
from torch import nn

from bench.gpu.stage import Machine, Row, WrongResult
from bench.gpu.timing import copy_bytes_s, normal, seconds_of

PAIRS, HOST_CALLS = 9, 200


class Times(nn.Module):
    """Multiplies by a matrix, whose checksums are kept if it is a parameter."""

    def __init__(self, b: torch.Tensor, *, kept: bool) -> None:
        super().__init__()
        self.b = nn.Parameter(b, requires_grad=False) if kept else b

    def forward(self, a: torch.Tensor) -> torch.Tensor:
        """Multiply."""
        return torch.matmul(a, self.b)


def times(machine: Machine, done: Collection[str]) -> Iterator[Row]:
    """Time the checks: on the device by their products without and with them, and on the host."""
    large = 64 if machine.rehearsed else 4096
    wide = 64 if machine.rehearsed else 16384
    gradient = normal((wide, large // 4), torch.bfloat16, machine, 1).T
    cases = {
        f"check dW {large // 4} x {wide} x {large // 4}": (gradient, (wide, large // 4)),
        f"check {large} x {large} x {large}": (
            *(normal((large, large), torch.bfloat16, machine, 1), (large, large)),
        ),
    }
    for case, (a, shape) in cases.items():
        b = normal(shape, torch.bfloat16, machine, 2)
        yield {
            "case": case,
            "check_us": 1e6 * check_s(machine, Times(b, kept=True), a, seconds_of),
        }
    yield _encoder(machine, wide)
    small = normal((64, 64), torch.bfloat16, machine, 3)
    host_s = check_s(machine, Times(small, kept=True), small, _host_s)
    yield {"case": "host", "check_us": 1e6 * host_s}


def _encoder(machine: Machine, size: int) -> Row:
    """Compare the speed of encoding a matrix that is not kept with that of a copy."""
    b, a = (normal((rows, size), torch.bfloat16, machine, rows) for rows in (size, 16))
    fresh_s, kept_s = (
        check_s(machine, Times(b, kept=kept), a, seconds_of) for kept in (False, True)
    )
    rate, copy = b.nbytes / max(fresh_s - kept_s, 1e-9), copy_bytes_s(machine)
    return {"case": "encoder", "bytes_s": rate, "copy_bytes_s": copy, "share_of_copy": rate / copy}


def check_s(
    machine: Machine,
    model: nn.Module,
    a: torch.Tensor,
    timed: Callable[[Callable[[], object]], float],
) -> float:
    """Return the median over pairs of a product's time with its check less that without."""
    longer = []

    def run() -> object:
        return model(a)

    with torch.no_grad():
        for _ in range(2 if machine.rehearsed else PAIRS):
            run()
            without_s = timed(run)
            with machine.protected(model):
                run()
                machine.synchronize()
                longer.append(timed(run) - without_s)
                ratio = machine.largest_ratio()
            if not 0 < ratio < 1:
                raise WrongResult(f"the product that was timed has a ratio of {ratio:.3g}")
    return statistics.median(longer)


def _host_s(run: Callable[[], object]) -> float:
    """Return the seconds for which a call keeps the host."""
    started_s = time.perf_counter()
    for _ in range(HOST_CALLS):
        run()
    took_s = (time.perf_counter() - started_s) / HOST_CALLS
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return took_s
