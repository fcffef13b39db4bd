"""The Triton attention is right, silent on clean data, and the same unverified."""

import torch
from case_loops import for_each
from fused_cases import NAMES, Case
from triton_attention_cases import DEVICE, MARKS, exact, operands, run

from holdfast.abft.attention import cuda as fused

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
}
OF_EVERY_DTYPE = ("causal", "grouped", "full mask")
RUNS = [
    *((torch.float16, name) for name in CASES),
    *((dtype, name) for dtype in (torch.float32, torch.bfloat16) for name in OF_EVERY_DTYPE),
]


LENGTH = 70


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
    for mine, theirs in zip(run(case, given).tensors, bare.tensors, strict=True):
        assert torch.equal(mine, theirs)


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
    for mine, theirs in zip(found.tensors, expected.tensors, strict=True):
        assert torch.equal(mine, theirs)


def test_autograd_gives_these_gradients_and_counts_in_both_directions() -> None:
    case = Case(heads=1, kv_heads=1, queries=20, keys=20, causal=True)
    q, k, v, grad = operands(case, torch.float32)
    expected = run(case, [q, k, v, grad])
    counts = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    out, lse = fused.fused_attention(*leaves, causal=True, counts=counts)
    assert not lse.requires_grad
    gradients = torch.autograd.grad(out, leaves, grad)
    for mine, theirs in zip((out, lse, *gradients), expected.tensors, strict=True):
        assert torch.equal(mine, theirs)
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


def _coherent() -> dict[str, list[torch.Tensor]]:
    """Operands whose roundings add up: means, repeats, one peak, tiny and large values."""
    generator = torch.Generator().manual_seed(2)
    shape = (1, 1, LENGTH, 32)

    def normal() -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    constant = [torch.full(shape, value) for value in (-3.0, 1 / 3, 0.1, 0.7)]
    channel = torch.ones(32)
    channel[3] = 30.0
    return {
        "normal": [normal() for _ in range(4)],
        "means": [normal() + 2 for _ in range(4)],
        "a common key": [normal(), normal() * 0.1 + normal()[:, :, :1], normal() + 3, normal()],
        "constant": constant,
        "peaked": [normal() * 6 for _ in range(3)] + [normal()],
        "an outlier channel": [normal() * channel for _ in range(3)] + [normal()],
        "tiny gradients": [normal(), normal(), normal(), normal() * 1e-6],
        "tiny operands": [normal() * 1e-4 for _ in range(4)],
        "ramps": [torch.linspace(-3, 3, LENGTH)[None, None, :, None] * normal() for _ in range(4)],
    }


@for_each("name", _coherent())
def test_no_distribution_raises_a_suspicion(name: str) -> None:
    case = Case(heads=1, kv_heads=1, queries=LENGTH, keys=LENGTH, width=32)
    for dtype in (torch.float32, torch.float16)[: 2 if name == "means" else 1]:
        given = [tensor.to(dtype).to(DEVICE) for tensor in _coherent()[name]]
        assert run(case, given).counts == [[0, 0], [0, 0]]
