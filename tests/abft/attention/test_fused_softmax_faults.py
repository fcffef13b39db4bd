"""What one signed sum does not see: keys whose values cancel under the signs, and exponentials and
their gradients that are computed wrong, so that all sums follow them."""

import math
from collections.abc import Callable

import pytest
import torch
from case_loops import for_each
from fused_cases import NATIVE, Case, exact, torchs
from struck import kinds, struck
from torch import nn

import holdfast
from holdfast import events
from holdfast.abft.checksums.weights import signs
from holdfast.errors import UncorrectableFault

pytestmark = NATIVE

CASE = Case(heads=1, kv_heads=1, queries=20, keys=48, width=16)
ROW, KEY = 7, 5


def run(
    operands: list[torch.Tensor],
    stage: str = "",
    damage: Callable[[torch.Tensor], torch.Tensor] = torch.clone,
    *,
    verify: bool = True,
) -> list[torch.Tensor]:
    """Forward and backward, with one element of the first tile of a stage damaged."""
    with holdfast.protect(nn.Identity(), verify=verify), struck((ROW, KEY), damage, stage=stage):
        return torchs(CASE, operands)


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    """Bit for bit."""
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def of_a_key_that_cancels(dtype: torch.dtype) -> list[torch.Tensor]:
    """Operands in which one value has the signed sum 0, exactly."""
    operands = CASE.operands(dtype)
    r = signs(CASE.width, torch.float64)
    value = operands[2][0, 0, KEY]
    value.copy_((value * 64).round() / 64)  # so that sums of them are exact
    value[0] -= (value.double() @ r * r[0]).to(dtype)
    assert value.double() @ r == 0
    assert value.norm() > 1
    return operands


@for_each("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_weight_of_a_value_that_cancels_under_the_signs_is_seen(dtype: torch.dtype) -> None:
    operands = of_a_key_that_cancels(dtype)
    calm = run(operands)
    assert events.recent() == []
    repaired = run(operands, "probabilities", lambda p: p + 0.125)
    assert same(repaired, calm)
    assert kinds() == ["gemm_fault"]
    events.clear()
    struck = run(operands, "probabilities", lambda p: p + 0.125, verify=False)
    assert not torch.equal(struck[0], calm[0])


@for_each("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_softmax_gradient_computed_a_little_wrong_is_seen(dtype: torch.dtype) -> None:
    operands = CASE.operands(dtype)
    calm = run(operands)
    assert events.recent() == []
    repaired = run(operands, "grad_softmax", lambda ds: ds + 0.01)
    assert same(repaired, calm)
    (event,) = events.recent()
    assert (event.kind, event.detail["part"]) == ("gemm_fault", "grad_scores")
    events.clear()
    struck = run(operands, "grad_softmax", lambda ds: ds + 0.01, verify=False)
    assert not same(struck, calm)


@for_each("damaged", [math.inf, -math.inf, math.nan, 1.5, -0.25])
def test_an_exponential_outside_zero_to_one_is_seen(damaged: float) -> None:
    operands = CASE.operands(torch.float32)
    calm = run(operands)
    repaired = run(operands, "exponentials", lambda p: torch.full_like(p, damaged))
    assert same(repaired, calm)
    assert kinds() == ["gemm_fault"]


def test_the_largest_exponential_must_be_one() -> None:
    operands = CASE.operands(torch.float32)
    operands[1][0, 0, KEY] = 4 * operands[0][0, 0, ROW]  # the row attends to this key
    calm = run(operands)
    repaired = run(operands, "exponentials", lambda p: p * 0.75)
    assert same(repaired, calm)
    assert kinds() == ["gemm_fault"]


def test_an_exponential_wrong_within_zero_to_one_passes_forward() -> None:
    """The blind spot that README.md names: sum, carry and product all use it."""
    operands = CASE.operands(torch.float32)
    calm = run(operands)
    with holdfast.protect(nn.Identity()):
        q, k, v, _ = operands
        with struck((ROW, KEY), lambda p: p / 2 + 0.25, stage="exponentials"):
            out, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
    assert not torch.equal(out, calm[0])
    assert events.recent() == []
    assert (out.double() - exact(CASE, operands)[0]).abs().max() > 1e-3


def test_backward_sees_a_sum_that_forward_computed_too_small() -> None:
    """The rows of P then sum to more than one, with the logarithm that forward gave."""
    operands = CASE.operands(torch.float32)
    with pytest.raises(UncorrectableFault, match="logsumexp"):
        run(operands, "exponentials", lambda p: p / 4)
