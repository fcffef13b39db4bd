"""What the Triton attention refuses, and how it says it."""

import pytest
import torch
from triton_attention_cases import DEVICE, MARKS

from holdfast.abft.attention import cuda as fused

pytestmark = MARKS


def _of(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=DEVICE)


def test_operands_that_do_not_fit_are_refused() -> None:
    q, k = _of(1, 4, 3, 8), _of(1, 2, 5, 8)
    with pytest.raises(TypeError, match=r"q is torch\.float64; verified are float32, float16"):
        fused.fused_attention(q.double(), k, k)
    with pytest.raises(ValueError, match=r"k has shape \(2, 5, 8\): give \[batch, heads, L, d\]"):
        fused.fused_attention(q, k[0], k)
    with pytest.raises(ValueError, match=r"v is torch\.float32 on .*: convert one"):
        fused.fused_attention(q, k, k.float())
    for wrong in (_of(1, 3, 5, 8), _of(2, 2, 5, 8), _of(1, 2, 5, 9), _of(1, 0, 5, 8)):
        with pytest.raises(ValueError, match="do not fit: give"):
            fused.fused_attention(q, wrong, wrong)
    with pytest.raises(ValueError, match=r"v .* do not fit"):
        fused.fused_attention(q, k, k[:, :, :4])
    wide = _of(1, 1, 1, 257)
    with pytest.raises(ValueError, match="heads have size 257: use 1 to 256"):
        fused.fused_attention(wide, wide, wide)


def test_masks_that_do_not_fit_are_refused() -> None:
    q = _of(1, 2, 3, 8)
    with pytest.raises(ValueError, match=r"a mask \(3, 4\) does not broadcast to \(1, 2, 3, 3\)"):
        fused.fused_attention(q, q, q, mask=_of(3, 4))
    with pytest.raises(TypeError, match=r"the mask is torch\.int64: use bool"):
        fused.fused_attention(q, q, q, mask=_of(3, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match="the mask requires grad and gets none: detach it"):
        fused.fused_attention(q, q, q, mask=_of(3, 3).requires_grad_())


def test_counts_faults_and_gradients_that_do_not_fit_are_refused() -> None:
    q, lse = _of(1, 2, 3, 8), _of(1, 2, 3, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"counts is torch.int64 \(2,\) .* give int32 \[2\]"):
        fused.fused_attention(q, q, q, counts=_of(2, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"faults is torch.float16 .* fp32 \[F, 7\]"):
        fused.attention_forward(q, q, q, faults=q)
    with pytest.raises(ValueError, match=r"grad is .* \(1, 2, 3, 4\) .* give torch.float16"):
        fused.attention_backward(q[..., :4], q, q, q, q, lse)
    with pytest.raises(ValueError, match=r"lse is torch.float16 .* give torch.float32 \(1, 2, 3\)"):
        fused.attention_backward(q, q, q, q, q, lse.half())


def test_the_unverified_variant_has_no_verdict_and_counts_nothing() -> None:
    q = torch.ones(1, 1, 2, 8, device=DEVICE)
    out, lse, verdict = fused.attention_forward(q, q, q, unverified=True)
    assert verdict is None
    assert torch.equal(out, q)
    torch.testing.assert_close(lse, torch.full_like(lse, 8**0.5 + torch.tensor(2.0).log().item()))
    counts = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="counts is given and nothing is counted: leave one out"):
        fused.fused_attention(q, q, q, counts=counts, unverified=True)
