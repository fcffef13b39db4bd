"""What one signed sum does not see: keys whose values cancel under the signs, and exponentials and
their gradients that are computed wrong, so that all sums follow them."""

import math
from collections.abc import Callable

import pytest
import torch
from fused_cases import NATIVE, Case, exact, torchs
from torch import nn

import holdfast
from holdfast import events, sites
from holdfast.abft.checksums.weights import signs
from holdfast.errors import UncorrectableFault
from holdfast.sites import Gemm

pytestmark = NATIVE

CASE = Case(heads=1, kv_heads=1, queries=20, keys=48, width=16)
ROW, KEY = 7, 5
Damage = Callable[[torch.Tensor], torch.Tensor]


class Strike:
    """Damages one element of the first tile of a stage."""

    def __init__(self, stage: str, damage: Damage) -> None:
        self.stage, self.damage, self.done = stage, damage, False

    def __call__(self, stage: str, site: str, gemm: Gemm, output: torch.Tensor | None) -> None:
        """See ``sites.arm``."""
        if stage != self.stage or self.done:
            return
        assert output is not None
        output[ROW, KEY] = self.damage(output[ROW, KEY])
        self.done = True


def run(
    operands: list[torch.Tensor], strike: Strike | None = None, *, verify: bool = True
) -> list[torch.Tensor]:
    """Forward and backward, with at most one fault."""
    with holdfast.protect(nn.Identity(), verify=verify):
        sites.arm(strike if strike is not None else lambda *_: None)
        try:
            return torchs(CASE, operands)
        finally:
            sites.disarm()


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_weight_of_a_value_that_cancels_under_the_signs_is_seen(dtype: torch.dtype) -> None:
    operands = of_a_key_that_cancels(dtype)
    calm = run(operands)
    assert events.recent() == []
    repaired = run(operands, Strike("probabilities", lambda p: p + 0.125))
    assert same(repaired, calm)
    assert [event.kind for event in events.recent()] == ["gemm_fault"]
    events.clear()
    struck = run(operands, Strike("probabilities", lambda p: p + 0.125), verify=False)
    assert not torch.equal(struck[0], calm[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_softmax_gradient_computed_a_little_wrong_is_seen(dtype: torch.dtype) -> None:
    operands = CASE.operands(dtype)
    calm = run(operands)
    assert events.recent() == []
    repaired = run(operands, Strike("grad_softmax", lambda ds: ds + 0.01))
    assert same(repaired, calm)
    (event,) = events.recent()
    assert (event.kind, event.detail["part"]) == ("gemm_fault", "grad_scores")
    events.clear()
    struck = run(operands, Strike("grad_softmax", lambda ds: ds + 0.01), verify=False)
    assert not same(struck, calm)


@pytest.mark.parametrize("damaged", [math.inf, -math.inf, math.nan, 1.5, -0.25], ids=str)
def test_an_exponential_outside_zero_to_one_is_seen(damaged: float) -> None:
    operands = CASE.operands(torch.float32)
    calm = run(operands)
    repaired = run(operands, Strike("exponentials", lambda p: torch.full_like(p, damaged)))
    assert same(repaired, calm)
    assert [event.kind for event in events.recent()] == ["gemm_fault"]


def test_the_largest_exponential_must_be_one() -> None:
    operands = CASE.operands(torch.float32)
    operands[1][0, 0, KEY] = 4 * operands[0][0, 0, ROW]  # the row attends to this key
    calm = run(operands)
    repaired = run(operands, Strike("exponentials", lambda p: p * 0.75))
    assert same(repaired, calm)
    assert [event.kind for event in events.recent()] == ["gemm_fault"]


def test_an_exponential_wrong_within_zero_to_one_passes_forward() -> None:
    """The blind spot that README.md names: sum, carry and product all use it."""
    operands = CASE.operands(torch.float32)
    calm = run(operands)
    with holdfast.protect(nn.Identity()):
        sites.arm(Strike("exponentials", lambda p: p / 2 + 0.25))
        q, k, v, _ = operands
        out, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
        sites.disarm()
    assert not torch.equal(out, calm[0])
    assert events.recent() == []
    assert (out.double() - exact(CASE, operands)[0]).abs().max() > 1e-3


def test_backward_sees_a_sum_that_forward_computed_too_small() -> None:
    """The rows of P then sum to more than one, with the logarithm that forward gave."""
    operands = CASE.operands(torch.float32)
    with pytest.raises(UncorrectableFault, match="logsumexp"):
        run(operands, Strike("exponentials", lambda p: p / 4))
