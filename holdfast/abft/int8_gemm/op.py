"""The verified int8 product: uint8 activations times a packed int8 weight."""

import torch

from holdfast import sites
from holdfast.abft import counters
from holdfast.abft.int8_gemm.operands import number
from holdfast.abft.int8_gemm.reference import Scales, Suspects
from holdfast.abft.int8_gemm.suspects import SuspectRows, resolve
from holdfast.abft.int8_gemm.weights import Int8Weights
from holdfast.errors import ConfigError
from holdfast.sites import Gemm, SiteTuple

OUTPUTS = (torch.float32, torch.bfloat16)
OP = "int8_gemm"
OUTSIDE: SiteTuple = (0, OP, 0, 0)


def int8_linear(
    a: torch.Tensor,
    weights: Int8Weights,
    *,
    a_scale: float | torch.Tensor,
    a_zero_point: int | torch.Tensor = 0,
    out_scale: float | None = None,
    out_zero_point: int = 0,
    dtype: torch.dtype = torch.float32,
    verify: bool = True,
    site: SiteTuple = OUTSIDE,
    slot: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute ``(A − za)(W − zw)ᵀ · a_scale · scale + bias``; verify every int32 row.

    Args:
        a: uint8 [M, K], contiguous, on the weights' device; M may be 0.
        weights: W with its checksums.
        a_scale: Scale of a, positive. On CUDA also a tensor [] there, which is not checked, and
            then ``a_zero_point`` is one of int32.
        a_zero_point: Zero point of a, 0 to 255.
        out_scale: If given, the output is uint8 ``rint(y / out_scale) + out_zero_point``,
            saturated.
        out_zero_point: Zero point of a quantised output, 0 to 255.
        dtype: Dtype of an output that is not quantised, float32 or bfloat16.
        verify: False multiplies without any check.
        site: Site of the product in events; by default outside of any module.
        slot: On CUDA, int32 [1] on the device of a, in which a failure is recorded: it becomes the
            bits of 2.0 in fp32, if it is less. Rows that fail their check are not repaired then,
            and the host does not wait for the device. Without it the host waits once a call.

    Returns:
        [M, N]; equal bit for bit to ``int8_linear_reference``.

    Guarantees: with ``digits``, every change of the int32 accumulators that changes the sum of a
    row is found, and so is every change of one packed weight that changes an output. One wrong
    element of a row is corrected from the row's checksums, several by computing the row again, and
    changed weights are located and repaired one after the other, as long as one is alone in its
    input or output, all bit for bit. Integers do not round, so no healthy row is ever suspected.
    With ``mod127`` a change by a multiple of 127 passes, and a changed weight can be repaired only
    from ``Int8Weights.source``.

    Not covered: faults in ``a`` before the product, and in the dequantisation of a verified row;
    errors of a row that cancel in its sum; scales, zero points and bias, which only
    ``Int8Linear.scrub`` and ``Int8Weights.heal`` compare with their fingerprints.

    Raises:
        ValueError, TypeError: An argument does not fit; says what would.
        UncorrectableFault: A fault could not be corrected (a ``Guard`` collects it).

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
    if slot is not None and not weights.deferred:
        raise ConfigError("a slot is for products on a CUDA device with Triton: leave it out")
    to_slot = () if slot is None else (slot,)
    if sites.armed():
        suspects = _visited(a, weights, out, scales, verify, site, *to_slot)
    else:
        suspects = weights.gemm.multiply(a, out, scales, verify, *to_slot)
    if verify and site[0]:
        counters.verified(site, len(a), 0 if suspects is None else len(suspects[0]), 0.0)
    if suspects is not None:
        resolve(SuspectRows(site, weights, a, out, scales, *suspects, since))
    return out


def _output(
    a: torch.Tensor, weights: Int8Weights, out_scale: float | None, dtype: torch.dtype
) -> torch.Tensor:
    if not isinstance(a, torch.Tensor) or a.dtype is not torch.uint8 or a.is_nested:
        dense = isinstance(a, torch.Tensor) and not a.is_nested
        given = a.dtype if dense else type(a).__name__
        raise TypeError(f"a is {given}: quantise it to a tensor of torch.uint8")
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


def _visited(
    a: torch.Tensor,
    weights: Int8Weights,
    out: torch.Tensor,
    scales: Scales,
    verify: bool,
    site: SiteTuple,
    *slot: torch.Tensor,
) -> Suspects:
    """Multiply step by step, so that a fault injector can change weights and accumulators."""
    gemm = Gemm(None, a, weights.gemm.buffer, 0.0, 1.0, weights.checks, weights.weighted)
    sites.visit("checksum", site, gemm, None)
    sites.visit("operand", site, gemm, None)
    c = weights.gemm.accumulate(a)
    sites.visit("output", site, gemm, c)
    return weights.gemm.finish(c, a, out, scales, verify, *slot)
