"""Known-answer test of the checks of a device, run before its products are first verified.

A miscompiled kernel, or one that a device computes wrong, would report clean rows for ever, or
faults in every step. So each check judges a product that is right, and the same with one element
changed by a known multiple of its row's threshold, which plain torch on CPU computed.
"""

import math
from collections.abc import Iterator

import torch

from holdfast import native
from holdfast.abft.gemm.cpu import configured_core
from holdfast.abft.gemm.raw import raw

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SIZES = (67, 130, 95)  # M, K and N: no multiples of a tile
STRIKE = 40.0  # the change of the struck element, in thresholds: far above the row's own rounding
ACCURACY = 0.05  # relative difference of |D| / T between the device and the reference


def failure(device: torch.device, backend: str) -> str:
    """Return what a device's checks do wrong; an empty string if they work.

    Args:
        device: Device to test.
        backend: Name of the backend that verifies there, ``kernels`` or ``aten``.

    Guarantees: takes well under a second once the kernels are compiled. Not covered: dtypes and
    layouts of which no product is tested (fp64, fp8, batches, groups), and faults of the device
    that come and go.
    """
    try:
        with raw():  # its own products are neither verified nor struck
            return next(filter(None, _failures(device, backend)), "")
    except Exception as error:  # whatever it is, protection is lost and not the training
        return f"the checks failed with {error!r}"


def _failures(device: torch.device, backend: str) -> Iterator[str]:
    for dtype in DTYPES:
        for transposed in (False, True):
            a, b, addend = _operands(dtype, transposed=transposed)
            c = (a.double() @ b.double() + addend.double()).to(dtype)
            struck, expected = _struck(c, a, b, addend)
            given = [each.to(device) for each in (a, b, addend)]
            name = f"{dtype} products{' of transposed operands' if transposed else ''}"
            clean = _ratio(backend, c.to(device), *given)
            if not clean < 1:
                yield f"{name} that are right were found to exceed thresholds {clean:.3g} times"
            ratio = _ratio(backend, struck.to(device), *given)
            if not abs(ratio / expected - 1) < ACCURACY:
                yield f"a fault of {expected:.3g} thresholds in {name} was found to be {ratio:.3g}"
            struck[-1, -1] = torch.nan
            if not math.isnan(ratio := _ratio(backend, struck.to(device), *given)):
                yield f"NaN in {name} was found to be {ratio:.3g} thresholds"


def _operands(
    dtype: torch.dtype, *, transposed: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw A [M, K], B [K, N] and an addend [N]; the same in every run."""
    generator = torch.Generator().manual_seed(0)
    rows, inner, columns = SIZES

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    if transposed:
        return draw(inner, rows).T, draw(columns, inner).T, draw(columns)
    return draw(rows, inner), draw(inner, columns), draw(columns)


def _struck(
    c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, addend: torch.Tensor
) -> tuple[torch.Tensor, float]:
    """Change one element of C; return the result, and |D| / T of its row by the reference."""
    core, row, column = configured_core(), c.shape[0] // 2, c.shape[1] // 3
    threshold = core.device_thresholds(c, a, b, addend, 1.0, 1.0)[0, row]
    struck = c.clone()
    struck[row, column] += STRIKE * float(threshold)
    return struck, _ratio("aten", struck, a, b, addend)


def _ratio(
    backend: str, c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, addend: torch.Tensor
) -> float:
    slot = torch.zeros(1, dtype=torch.int32, device=c.device)
    native.required().device_judge(backend, c, a, b, addend, 1.0, 1.0, slot)
    return slot.view(torch.float32).item()
