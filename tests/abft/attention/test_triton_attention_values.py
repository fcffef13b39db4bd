"""The Triton attention is right, silent on clean data, and the same unverified."""

import pytest
import torch
from case_loops import for_each
from fused_cases import COHERENT, NAMES, OVERFLOWS_FP16, Case
from struck import same_bits
from triton_attention_cases import exact, forward, operands, run
from triton_device import DEVICE, MARKS

from holdfast.abft.attention import cuda as fused
from holdfast.abft.attention import problem

pytestmark = MARKS

CASES = {
    "one key": Case(heads=1, kv_heads=1, queries=1, keys=1),
    "decoding": Case(heads=2, kv_heads=1, queries=1, keys=130, width=40),
    "causal": Case(heads=1, kv_heads=1, queries=70, keys=70, width=33, causal=True),
    "grouped": Case(heads=2, kv_heads=1, queries=40, keys=70, width=20),
    "causal, more queries": Case(heads=1, kv_heads=1, queries=70, keys=33, causal=True),
    "causal, more keys": Case(heads=1, kv_heads=1, queries=33, keys=70, causal=True),
    "full mask": Case(heads=1, kv_heads=1, queries=20, keys=70, mask="full"),
    "key mask": Case(batch=2, heads=1, kv_heads=1, queries=20, keys=40, mask="keys"),
    "mask by heads": Case(queries=20, keys=33, mask="heads", scale=0.3),
    "mask by rows": Case(heads=1, kv_heads=1, queries=20, keys=33, mask="rows"),
    "empty rows": Case(heads=1, kv_heads=1, queries=20, keys=70, mask="empty_rows"),
    "bool mask": Case(heads=1, kv_heads=1, queries=20, keys=70, mask="bool"),
    "wide": Case(heads=1, kv_heads=1, queries=20, keys=40, width=128),
    "widest": Case(heads=1, kv_heads=1, queries=20, keys=40, width=200),
}
OF_EVERY_DTYPE = ("causal", "grouped", "full mask")
RUNS = [
    *((torch.float16, name) for name in CASES),
    *((dtype, name) for dtype in (torch.float32, torch.bfloat16) for name in OF_EVERY_DTYPE),
]


def _unit(dtype: torch.dtype) -> float:
    # The interpreter cuts bf16 off where a device rounds to nearest.
    cut = 2 if dtype == torch.bfloat16 and DEVICE == "cpu" else 1
    return cut * torch.finfo(dtype).eps


@for_each(("dtype", "name"), RUNS)
def test_results_and_gradients_are_right_and_nothing_is_suspect(
    dtype: torch.dtype, name: str
) -> None:
    case = CASES[name]
    given = operands(case, dtype)
    found = run(case, given)
    truth = exact(case, given, torch.float64)
    torchs = exact(case, given, dtype)
    # The logarithm is fp32 whatever the operands are.
    torchs[1] = exact(case, given, torch.float32)[1]
    for part, mine, theirs, true in zip(NAMES, found.tensors, torchs, truth, strict=True):
        assert mine.shape == true.shape, part
        assert mine.dtype == (torch.float32 if part == "logsumexp" else dtype), part
        # With a single key the gradients of q and k are differences that cancel to nothing.
        largest = max(true.abs().max().item(), 1.0 if case.keys < 4 else 0.0)
        error = (mine.double() - true).abs().max().item()
        allowed = 2 * (theirs.double() - true).abs().max().item() + 4 * _unit(mine.dtype) * largest
        assert error <= allowed, f"{part}: {error:.2e} > {allowed:.2e}"
    for verdict in found.verdicts:
        assert not verdict.status.any()
        assert not verdict.parts.any()
    assert found.counts == [[0, 0], [0, 0]]


@for_each("dtype", [torch.float32, torch.float16])
def test_verified_and_unverified_have_the_same_bits(dtype: torch.dtype) -> None:
    case = CASES["grouped"]
    given = operands(case, dtype)
    bare = run(case, given, unverified=True)
    assert bare.verdicts == ()
    assert same_bits(run(case, given).tensors, bare.tensors)


def test_any_strides_and_broadcast_operands() -> None:
    case = Case(batch=2, heads=2, kv_heads=1, queries=20, keys=33)
    q, k, v, grad = operands(case, torch.float16)
    grad = grad[:1, :, :1]
    expected = run(case, [q, k, v, grad.expand(q.shape).contiguous()])
    turned = q.transpose(1, 2).contiguous().transpose(1, 2)
    sparse = torch.stack([k, k], -1)[..., 0]
    columns = v.mT.contiguous().mT
    assert not any(tensor.is_contiguous() for tensor in (turned, sparse, columns))
    found = run(case, [turned, sparse, columns, grad.expand(q.shape)])
    assert same_bits(found.tensors, expected.tensors)


def test_autograd_gives_these_gradients_and_counts_in_both_directions() -> None:
    case = Case(heads=1, kv_heads=1, queries=20, keys=20, causal=True)
    q, k, v, grad = operands(case, torch.float32)
    expected = run(case, [q, k, v, grad])
    counts = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    out, lse = fused.fused_attention(*leaves, causal=True, counts=counts)
    assert not lse.requires_grad
    gradients = torch.autograd.grad(out, leaves, grad)
    assert same_bits((out.detach(), lse, *gradients), expected.tensors)
    assert counts.tolist() == [0, 0]
    damaged = lse.clone()
    damaged[0, 0, 3] = -50.0  # P = exp(S − lse) is then far above 1
    fused.attention_backward(
        grad, *(x.detach() for x in (q, k, v, out)), damaged, causal=True, counts=counts
    )
    assert counts[0] > 0


@for_each(("queries", "keys"), [(0, 5), (5, 0)])
def test_nothing_to_attend_from_or_to(queries: int, keys: int) -> None:
    case = Case(queries=queries, keys=keys)
    found = run(case, operands(case, torch.float16))
    assert [tensor.shape[2] for tensor in found.tensors] == [queries] * 3 + [keys] * 2
    assert not any(tensor.any() for tensor in found.tensors)
    assert not any(verdict.status.any() for verdict in found.verdicts)


@for_each(
    ("name", "dtype"),
    [
        *((name, torch.float32) for name in sorted(COHERENT.keys() - OVERFLOWS_FP16)),
        ("around five", torch.float16),
    ],
)
def test_no_distribution_raises_a_suspicion(name: str, dtype: torch.dtype) -> None:
    case = Case(heads=1, kv_heads=1, queries=40, keys=70, width=32)
    given = [COHERENT[name](x).to(dtype) for x in operands(case, torch.float32)]
    assert run(case, given).counts == [[0, 0], [0, 0]]


def test_of_a_hundred_thousand_clean_rows_none_is_suspect(monkeypatch: pytest.MonkeyPatch) -> None:
    # Large tiles, as the interpreter's time grows with their number; in fp32 it uses BLAS.
    for plans, stream in ((problem.FORWARD_PLANS, 16), (problem.BACKWARD_PLANS, 256)):
        monkeypatch.setitem(plans, 128, plans[128]._replace(rows=4096, stream=stream))
    rows = 0
    for queries in (90112, 8192):
        case = Case(heads=1, kv_heads=1, queries=queries, keys=16, width=16)
        given = operands(case, torch.float32, seed=2)
        _, _, verdict = forward(case, given)
        verdicts = [verdict] if queries > 8192 else run(case, given).verdicts
        for found in verdicts:
            assert found is not None
            rows += found.status.numel()
            assert found.counts.tolist() == [0, 0]
    assert rows == 90112 + 2 * 8192 + 16 > 100_000


def _zeros(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=DEVICE)


def test_operands_that_do_not_fit_are_refused() -> None:
    q, k = _zeros(1, 4, 3, 8), _zeros(1, 2, 5, 8)
    with pytest.raises(TypeError, match=r"q is torch\.float64; verified are float32, float16"):
        fused.fused_attention(q.double(), k, k)
    with pytest.raises(ValueError, match=r"k has shape \(2, 5, 8\): give \[batch, heads, L, d\]"):
        fused.fused_attention(q, k[0], k)
    with pytest.raises(ValueError, match=r"v is torch\.float32 on .*: convert one"):
        fused.fused_attention(q, k, k.float())
    for wrong in (_zeros(1, 3, 5, 8), _zeros(2, 2, 5, 8), _zeros(1, 2, 5, 9), _zeros(1, 0, 5, 8)):
        with pytest.raises(ValueError, match="do not fit: give"):
            fused.fused_attention(q, wrong, wrong)
    with pytest.raises(ValueError, match=r"v .* do not fit"):
        fused.fused_attention(q, k, k[:, :, :4])
    wide = _zeros(1, 1, 1, 257)
    with pytest.raises(ValueError, match="heads have size 257: use 1 to 256"):
        fused.fused_attention(wide, wide, wide)


def test_masks_that_do_not_fit_are_refused() -> None:
    q = _zeros(1, 2, 3, 8)
    with pytest.raises(ValueError, match=r"a mask \(3, 4\) does not broadcast to \(1, 2, 3, 3\)"):
        fused.fused_attention(q, q, q, mask=_zeros(3, 4))
    with pytest.raises(TypeError, match=r"the mask is torch\.int64: use bool"):
        fused.fused_attention(q, q, q, mask=_zeros(3, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match="the mask requires grad and gets none: detach it"):
        fused.fused_attention(q, q, q, mask=_zeros(3, 3).requires_grad_())


def test_counts_faults_and_gradients_that_do_not_fit_are_refused() -> None:
    q, lse = _zeros(1, 2, 3, 8), _zeros(1, 2, 3, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"counts is torch.int64 \(2,\) .* give int32 \[2\]"):
        fused.fused_attention(q, q, q, counts=_zeros(2, dtype=torch.int64))
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
    with pytest.raises(
        ValueError, match="counts or slot is given and nothing is counted: leave one"
    ):
        fused.fused_attention(q, q, q, counts=counts, unverified=True)


def test_an_unknown_option_is_refused() -> None:
    q = torch.ones(1, 1, 2, 8, device=DEVICE)
    with pytest.raises(TypeError, match="unexpected keyword argument 'causl'"):
        fused.attention_forward(q, q, q, causl=True)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword argument 'causl'"):
        fused.attention_backward(q, q, q, q, q, q[..., 0], causl=True)  # type: ignore[call-arg]
