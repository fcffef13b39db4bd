"""The verified int8 product: uint8 activations times a packed int8 weight."""

import torch

from holdfast import sites
from holdfast.abft.attention import section_counters
from holdfast.abft.int8_gemm.operands import number
from holdfast.abft.int8_gemm.reference import Scales, Suspects
from holdfast.abft.int8_gemm.suspects import SuspectRows, resolve
from holdfast.abft.int8_gemm.weights import Int8Weights
from holdfast.sites import Gemm, SiteTuple

OUTPUTS = (torch.float32, torch.bfloat16)
OP = "int8_gemm"
OUTSIDE: SiteTuple = (0, OP, 0, 0)


def int8_linear(
    a: torch.Tensor,
    weights: Int8Weights,
    *,
    a_scale: float,
    a_zero_point: int = 0,
    out_scale: float | None = None,
    out_zero_point: int = 0,
    dtype: torch.dtype = torch.float32,
    verify: bool = True,
    site: SiteTuple = OUTSIDE,
) -> torch.Tensor:
    """Compute ``(A − za)(W − zw)ᵀ · a_scale · scale + bias``; verify every int32 row.

    Args:
        a: uint8 [M, K], contiguous, on the weights' device; M may be 0.
        weights: W, packed.
        a_scale: of a, positive.
        a_zero_point: of a, 0 to 255.
        out_scale: the output is uint8 ``rint(y / out_scale) + out_zero_point``, saturated; without
            it, y itself.
        out_zero_point: see out_scale.
        dtype: of an output that is not quantised, float32 or bfloat16.
        verify: False multiplies without any check.
        site: what the product is called in events; outside any module by default.

    Returns:
        [M, N]; equal bit for bit to ``int8_linear_reference``.

    Guarantees: with ``digits``, every change of the int32 accumulators, by however many faults,
    that changes the sum of a row is found, so any single one, and any change of one packed weight
    that changes an output. One wrong element of a row is corrected from the row's checks, several
    by computing the row again, one changed weight for each input is located and healed: all bit for
    bit. No healthy row is ever suspected, as integers do not round. With ``mod127`` a change that
    is a multiple of 127 passes, and a changed weight cannot be healed.

    Not covered: faults in a before the product and in the requantisation of a verified row; errors
    of a row that cancel in its sum; scales, zero points and bias, which only ``Int8Linear.scrub``
    or ``Int8Weights.heal`` compares with their fingerprints.

    Raises:
        ValueError, TypeError: an argument does not fit, with what would.
        UncorrectableFault: a fault that could not be corrected (a ``Guard`` collects it).

    Source: Li et al., Efficient Soft-Error Detection for Low-precision Deep Learning Recommendation
    Models, section IV (``mod127``); digits and correction are ours.
    """
    if out_scale is not None:
        out_scale = number("out_scale", out_scale)
    out = _output(a, weights, out_scale, dtype)
    scales = weights.scales(a_scale, a_zero_point, out_scale or 0.0, out_zero_point)
    if not len(a):
        return out
    since = weights.history
    if sites.armed():
        suspects = _visited(a, weights, out, scales, verify, site)
    else:
        suspects = weights.gemm.multiply(a, out, scales, verify)
    if verify and site[0]:
        section_counters.verified(site, len(a), 0 if suspects is None else len(suspects[0]), 0.0)
    if suspects is not None:
        resolve(SuspectRows(site, weights, a, out, scales, *suspects, since))
    return out


def _output(
    a: torch.Tensor, weights: Int8Weights, out_scale: float | None, dtype: torch.dtype
) -> torch.Tensor:
    if not isinstance(a, torch.Tensor) or a.dtype is not torch.uint8 or a.is_nested:
        raise TypeError(f"a is {_kind(a)}: quantise it to a tensor of torch.uint8")
    if a.dim() != 2 or a.shape[1] != weights.inner or not a.is_contiguous():
        raise ValueError(
            f"a has shape {tuple(a.shape)} and strides {a.stride()}: give [M, {weights.inner}], "
            "contiguous"
        )
    if a.device != weights.device:
        raise ValueError(f"a is on {a.device} and the weights on {weights.device}: move one")
    if out_scale is not None:
        if not out_scale > 0:
            raise ValueError(f"out_scale = {out_scale} must be positive, or left out")
        dtype = torch.uint8
    elif dtype not in OUTPUTS:
        raise TypeError(f"dtype = {dtype}: give float32 or bfloat16, or an out_scale for uint8")
    return a.new_empty((len(a), weights.columns), dtype=dtype)


def _kind(a: object) -> str:
    dense = isinstance(a, torch.Tensor) and not a.is_nested
    return str(a.dtype) if dense else type(a).__name__  # type: ignore[attr-defined]


def _visited(
    a: torch.Tensor,
    weights: Int8Weights,
    out: torch.Tensor,
    scales: Scales,
    verify: bool,
    site: SiteTuple,
) -> Suspects:
    """Multiply in steps, so that an injector reaches the packed weight and the accumulators."""
    gemm = Gemm(None, a, weights.gemm.buffer, 0.0, 1.0, weights.checks, weights.weighted)
    sites.visit("checksum", site, gemm, None)
    sites.visit("operand", site, gemm, None)
    c = weights.gemm.accumulate(a)
    sites.visit("output", site, gemm, c)
    return weights.gemm.finish(c, a, out, scales, verify)
