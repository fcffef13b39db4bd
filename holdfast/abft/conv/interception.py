"""Which convolutions of a protected process are checked, as the native core hands them over."""

import os
import platform
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from holdfast import native, sites
from holdfast.abft import counters
from holdfast.abft.conv.checks import Check, check_bias, check_images, check_weight
from holdfast.abft.conv.problem import Convolution, image_map
from holdfast.abft.conv.reference import Exact, exact_bias, exact_images, exact_weight
from holdfast.abft.conv.suspects import Computed, resolve
from holdfast.abft.gemm.raw import raw
from holdfast.abft.policy import FaultContext, Policy, report_failed_check
from holdfast.native import ELEMENTS
from holdfast.sites import SiteTuple

_OUTPUT, _WEIGHT = ("image", "channel"), ("channel", "input channel")
_GRADIENTS = _GRAD_IMAGES, _GRAD_WEIGHT = 1, 2  # roles of sites
_MACHINES = ("x86_64", "AMD64")
_every_call = 0  # open contexts that have every call checked


@contextmanager
def every_call(wanted: bool = True) -> Iterator[None]:
    """Check every convolution while the context is open, whatever share the policies say."""
    global _every_call
    _every_call += wanted
    try:
        yield
    finally:
        _every_call -= wanted


def on_convolution(
    site: SiteTuple,
    arguments: tuple[Any, ...],
    gradient: torch.Tensor | None,
    results: Sequence[torch.Tensor | None],
    seconds: float,
) -> None:
    """Verify the output, or those gradients of images, weight and bias that were asked for.

    This is the native core's handler; ``arguments`` are those of ``Convolution``.
    """
    convolution = Convolution(*arguments)
    operands = convolution.images, convolution.weight, gradient
    if any(each is not None and not each.numel() for each in operands):
        return
    if gradient is None:
        roles = [site[3]]
    else:
        wanted = results[0] is not None, any(each is not None for each in results[1:])
        roles = [
            role for role, given in zip((_GRAD_IMAGES, _GRAD_WEIGHT), wanted, strict=True) if given
        ]
    checked = set()
    if native.required().verifying():
        reason = uncovered(convolution.images)
        for role in roles:
            each = (*site[:3], role)
            counters.computed(each, 0.0, seconds / len(roles))
            if reason:
                counters.left_out(each, reason)
            elif _chosen(each):
                checked.add(each)
    if not checked and not sites.armed():
        return
    with raw(), torch.no_grad():
        try:
            parts = [*_parts(site, convolution, gradient, results)]
        except Exception as error:
            report_failed_check(FaultContext(site), repr(error))
            return
        for part in parts:
            _visit(part, convolution)
        for part in parts:
            if part.site in checked:
                _verify(part)


def uncovered(images: torch.Tensor) -> str:
    """Return why a convolution of such images is not verified; empty if it is.

    The rounding of other kernels than oneDNN's for x86 is not known well enough to tell it from a
    fault: NNPACK's and some for ARM transform tiles of the image, and reduced precision rounds the
    operands. In fp64 torch multiplies matrices.
    """
    if images.dtype not in ELEMENTS:
        return "dtype has no rounding threshold"
    if images.dtype is torch.float64:
        return ""
    backends: Any = torch.backends
    mkldnn = backends.mkldnn
    if not (mkldnn.is_available() and mkldnn.enabled) or platform.machine() not in _MACHINES:
        return "not computed by oneDNN on x86"
    precisions = mkldnn.conv.fp32_precision, mkldnn.fp32_precision, backends.fp32_precision
    precision = next((each for each in precisions if each != "none"), "ieee")
    mode = os.environ.get("ONEDNN_DEFAULT_FPMATH_MODE", "STRICT").upper()
    if images.dtype is torch.float32 and (precision != "ieee" or mode not in ("", "STRICT")):
        return "fp32 products may be computed in reduced precision"
    return ""


def _parts(
    site: SiteTuple,
    convolution: Convolution,
    gradient: torch.Tensor | None,
    results: Sequence[torch.Tensor | None],
) -> Iterator[Computed]:
    """List the results that were asked for and are not empty."""
    parts: list[tuple[int, tuple[str, ...], Callable[..., Check], Callable[..., Exact], Any]]
    if gradient is None:
        parts = [(site[3], _OUTPUT, check_images, exact_images, [image_map(convolution)])]
    else:
        both = convolution, gradient
        parts = [
            (_GRAD_IMAGES, _OUTPUT, check_images, exact_images, [image_map(*both)]),
            (_GRAD_WEIGHT, _WEIGHT, check_weight, exact_weight, both),
            (_GRAD_WEIGHT, _WEIGHT[:1], check_bias, exact_bias, [gradient]),
        ]
    for index, (role, axes, check, exact, given) in enumerate(parts):
        output = results[index]
        if output is not None and output.numel():
            yield Computed(
                (*site[:3], role),
                axes,
                output.detach(),
                partial(check, *given),
                partial(_again, convolution, gradient, results, index),
                partial(exact, *given, output.dtype),
            )


def _again(
    convolution: Convolution,
    gradient: torch.Tensor | None,
    results: Sequence[torch.Tensor | None],
    index: int,
) -> torch.Tensor:
    """Compute all results again, as another selection may be computed by another kernel."""
    images, weight, bias = convolution[:3]
    if gradient is None:
        return convolution.forward(images, weight, bias)
    mask = [result is not None for result in results]
    result = convolution.backward(gradient, images, weight, mask)[index]
    assert result is not None
    return result


def _visit(part: Computed, convolution: Convolution) -> None:
    """Let a fault injector change a result before it is checked."""
    if sites.armed():
        nothing = torch.empty(0, dtype=torch.float64)
        operands = convolution.images, convolution.weight
        gemm = sites.Gemm(None, *operands, 0.0, 1.0, nothing, nothing)
        sites.visit("output", part.site, gemm, part.output)


def _verify(part: Computed) -> None:
    before = time.perf_counter()
    exact = part.output.dtype is torch.float64 or torch.get_float32_matmul_precision() != "highest"
    wide = torch.float64 if exact else torch.float32
    try:
        check = part.check(part.output, wide)
        suspects = int(check.suspects.sum())
    except Exception as error:
        counters.left_out(part.site, "its check failed")
        report_failed_check(FaultContext(part.site), repr(error))
        return
    spent = time.perf_counter() - before
    if counters.verified(part.site, check.residual.numel(), suspects, spent):
        counters.note_ratio(part.site, check.line)
    if suspects:
        resolve(part)


def _chosen(site: SiteTuple) -> bool:
    """Return whether this call of a site is one to check; counts it."""
    policy: Policy = FaultContext(site).policy
    count = next(policy.convolution_calls[site])
    return count == 0 or _every_call > 0 or chosen(str(site), count, policy.convolutions)


def chosen(key: str, count: int, share: float) -> bool:
    """Return whether call ``count`` (0 is the first) of what ``key`` names is one to check.

    Calls are divided into equal blocks, of each of which a hash chooses one, so that what recurs
    with a period, as the convolutions that share a site in compiled code, is not missed for ever.
    """
    numerator, denominator = share.as_integer_ratio()
    if not numerator:
        return False
    block = count * numerator // denominator
    first, end = (-(-each * denominator // numerator) for each in (block, block + 1))
    return count - first == zlib.crc32(f"{key}/{block}".encode()) % (end - first)
