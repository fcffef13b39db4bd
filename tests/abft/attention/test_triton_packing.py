"""Packed sequences are right one by one, and tiles that a mask hides are not computed."""

import math

import pytest
import torch
from case_loops import for_each
from fused_cases import NAMES, Case
from struck import same_bits
from torch.nn import functional
from triton_attention_cases import fault, faults, operands
from triton_device import DEVICE, MARKS

from holdfast.abft.attention import cuda as fused
from holdfast.abft.attention.cuda import Place, RowStatus
from holdfast.abft.attention.packing import Packing, order_of
from holdfast.abft.attention.reference import attention, attention_gradients

pytestmark = MARKS

# Lengths of queries and keys: an empty sequence, fewer keys than queries, one beyond a tile.
LENGTHS = ([20, 0, 40, 5], [33, 4, 70, 3])


def _cumulative(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32, device=DEVICE).cumsum(0).int()


def _packed(dtype: torch.dtype) -> tuple[list[torch.Tensor], Packing]:
    """q, k, v and the gradient of the output of packed sequences, two query heads a key head."""
    generator = torch.Generator().manual_seed(5)
    totals = [sum(lengths) for lengths in LENGTHS]
    shapes = [(totals[0], 2, 24), (totals[1], 1, 24), (totals[1], 1, 24), (totals[0], 2, 24)]
    given = [torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in shapes]
    return given, Packing(*map(_cumulative, LENGTHS), *map(max, LENGTHS))


def _one_by_one(given: list[torch.Tensor], causal: bool, dtype: torch.dtype) -> list[torch.Tensor]:
    """Output, logarithm and gradients of each sequence by the reference, packed again."""
    q, k, v, grad = (tensor.to(dtype).transpose(0, 1)[None] for tensor in given)
    parts = []
    for a, b in zip(q.split(LENGTHS[0], 2), k.split(LENGTHS[1], 2), strict=True):
        parts.append((a, b))
    values, gradients = v.split(LENGTHS[1], 2), grad.split(LENGTHS[0], 2)
    rows = []
    for (one, keys), value, incoming in zip(parts, values, gradients, strict=True):
        shape = one.shape[2], keys.shape[2]
        mask = torch.ones(shape, dtype=torch.bool, device=one.device)
        mask = mask.tril(shape[1] - shape[0]) if causal else mask
        found = attention(one, keys, value, mask)
        rows.append([*found, *attention_gradients(incoming, one, keys, value, mask)])
    out, lse, *rest = (torch.cat(each, 2)[0] for each in zip(*rows, strict=True))
    return [out.transpose(0, 1), lse, *(each.transpose(0, 1) for each in rest)]


def _of_varlen(
    given: list[torch.Tensor], packing: Packing, causal: bool, counts: torch.Tensor
) -> list[torch.Tensor]:
    leaves = [each.clone().requires_grad_() for each in given[:3]]
    out, lse = fused.fused_attention_varlen(*leaves, *packing, causal=causal, counts=counts)
    return [out.detach(), lse, *torch.autograd.grad(out, leaves, given[3])]


@for_each(("dtype", "causal"), [(torch.float16, True)])
def test_packed_sequences_are_right_and_nothing_is_suspect(
    dtype: torch.dtype, causal: bool
) -> None:
    given, packing = _packed(dtype)
    counts = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    found = _of_varlen(given, packing, causal, counts)
    truth, torchs = (_one_by_one(given, causal, each) for each in (torch.float64, dtype))
    torchs[1] = _one_by_one(given, causal, torch.float32)[1]
    for part, mine, theirs, true in zip(NAMES, found, torchs, truth, strict=True):
        assert mine.shape == true.shape, part
        unit = 4 * torch.finfo(mine.dtype).eps * true.abs().max()
        error, allowed = (mine.double() - true).abs().max(), (theirs.double() - true).abs().max()
        assert error <= 2 * allowed + unit, f"{part}: {error:.2e} > 2 · {allowed:.2e} + {unit:.2e}"
    assert counts.tolist() == [0, 0]


def test_a_fault_in_a_packed_sequence_is_repaired_and_without_checks_gets_through() -> None:
    given, packing = _packed(torch.float16)
    q, k, v, _ = given
    clean, _, _ = fused.attention_forward(q, k, v, packing=packing)
    # Sequence 2, head 1.
    struck = faults(fault(Place.SCORES, matrix=5, row=36, column=3, value=9.0))
    out, _, verdict = fused.attention_forward(
        q, k, v, packing=packing, faults=struck, unverified=True
    )
    assert verdict is None
    assert not same_bits(out, clean)
    out, _, verdict = fused.attention_forward(q, k, v, packing=packing, faults=struck)
    assert same_bits(out, clean)
    assert verdict is not None
    assert verdict.status.nonzero().tolist() == [[1, 20 + 36]]
    assert verdict.counts.tolist() == [1, 1]


def _blocks(pattern: list[list[int]], rows: int, columns: int) -> torch.Tensor:
    blocks = torch.tensor(pattern, dtype=torch.bool, device=DEVICE)
    return blocks.repeat_interleave(rows, 0).repeat_interleave(columns, 1)


def test_hidden_tiles_are_not_computed_and_the_others_keep_their_order() -> None:
    case = Case(heads=2, kv_heads=1, queries=160, keys=150, width=24)
    q, k, v, grad = operands(case, torch.float16)
    # By tiles of queries and keys; one tile of queries sees nothing.
    mask = _blocks([[0, 1, 0], [1, 0, 1], [0, 0, 0], [1, 1, 1], [0, 0, 1]], 32, 64)[:, :150]
    order = order_of(mask.expand(1, 2, 160, 150), 32, 64)
    assert order.counts.data[0, 1].tolist() == [1, 2, 0, 3, 1]
    assert [order.tiles.data[0, 0, row, 0].item() for row in (0, 1, 3, 4)] == [1, 0, 0, 2]
    assert order.tiles.data[0, 0, 1, :2].tolist() == [0, 2]

    # What is not computed cannot be struck: hidden keys and values are NaN, and rows are right.
    hidden = torch.ones(150, dtype=torch.bool, device=DEVICE)
    hidden[:64] = False
    mask = mask & ~hidden
    expected, lse = attention(q.double(), k.double(), v.double(), mask)
    k, v = (each.masked_fill(hidden[:, None], math.nan) for each in (k, v))
    out, mine, verdict = fused.attention_forward(q, k, v, mask=mask)
    assert verdict is not None
    assert verdict.counts.tolist() == [0, 0]
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-3)
    torch.testing.assert_close(mine.double(), lse, rtol=0, atol=1e-4)
    (of_q, of_k, _), verdicts = fused.attention_backward(grad, q, k, v, out, mine, mask=mask)
    assert verdicts is not None
    assert not verdicts[0].status.any()  # keys that are NaN are suspect themselves
    assert of_q.isfinite().all()
    assert not of_k[:, :, 128:].any()  # of a tile of keys that no query sees


@for_each("kind", ["bool", "additive"])
def test_a_block_mask_gives_what_torch_gives(kind: str) -> None:
    case = Case(heads=2, kv_heads=1, queries=96, keys=80, width=40)
    given = operands(case, torch.float16)
    seen = _blocks([[1, 0], [0, 1], [1, 1]], 32, 40)
    seen[5, 3] = False
    mask = seen if kind == "bool" else torch.zeros_like(seen, dtype=torch.float16)
    mask = mask if kind == "bool" else mask.masked_fill(~seen, -math.inf)
    leaves = [each.requires_grad_() for each in given[:3]]
    counts = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    out, _ = fused.fused_attention(*leaves, mask=mask, counts=counts)
    wide = [each.detach().double().requires_grad_() for each in leaves]
    truth = functional.scaled_dot_product_attention(*wide, attn_mask=seen, enable_gqa=True)
    torchs = functional.scaled_dot_product_attention(*leaves, attn_mask=mask, enable_gqa=True)
    results = [
        (each.detach(), *torch.autograd.grad(each, inputs, given[3].to(each.dtype)))
        for each, inputs in ((out, leaves), (torchs, leaves), (truth, wide))
    ]
    for mine, theirs, true in zip(*results, strict=True):
        error, allowed = (mine.double() - true).abs().max(), (theirs.double() - true).abs().max()
        assert error <= 2 * allowed + 4 * torch.finfo(mine.dtype).eps * true.abs().max()
    assert counts.tolist() == [0, 0]


def test_a_row_that_stays_suspect_raises_the_slot_and_nothing_else_does() -> None:
    q, k, v, grad = operands(Case(heads=1, kv_heads=1, queries=40, keys=40), torch.float16)
    slot = torch.zeros(1, dtype=torch.int32, device=DEVICE)

    def value() -> float:
        return slot.view(torch.float32).item()

    out, lse, _ = fused.attention_forward(q, k, v, slot=slot)
    fused.attention_backward(grad, q, k, v, out, lse, slot=slot)
    passing = faults(fault(Place.ACCUMULATOR, row=5, column=3, value=1e4))
    _, _, verdict = fused.attention_forward(q, k, v, slot=slot, faults=passing)
    assert verdict is not None
    assert verdict.counts.tolist() == [1, 1]  # it was corrected
    assert value() == 0.0
    lasting = faults(fault(Place.ACCUMULATOR, row=5, column=3, value=1e4, attempts=9))
    fused.attention_forward(q, k, v, slot=slot, faults=lasting)
    assert value() == 2.0
    slot.zero_()
    fused.attention_backward(grad, q, k, v, out, lse, slot=slot, key_faults=lasting)
    assert value() == 2.0
    q[0, 0, 7, 1] = math.nan
    _, _, verdict = fused.attention_forward(q, k, v, slot=slot)
    assert verdict is not None
    assert verdict.status.nonzero().tolist() == [[0, 0, 7]]
    assert verdict.status[0, 0, 7] == RowStatus.SUSPECT
    assert value() == math.inf
    fused.attention_forward(*(each.nan_to_num() for each in (q, k, v)), slot=slot, faults=lasting)
    assert value() == math.inf  # it never falls


def test_packed_sequences_that_do_not_fit_are_refused() -> None:
    (q, k, v, _), packing = _packed(torch.float16)
    with pytest.raises(
        ValueError, match=r"q has shape .*: give packed sequences as \[total, heads"
    ):
        fused.attention_forward(q[None], k, v, packing=packing)
    for wrong in (packing.queries.long(), packing.queries[:-1]):
        with pytest.raises(ValueError, match=r"cumulative lengths of .* give contiguous int32"):
            fused.attention_forward(q, k, v, packing=packing._replace(queries=wrong))
    mask = torch.ones(1, dtype=torch.bool, device=DEVICE)
    with pytest.raises(ValueError, match="packed sequences and a mask are given: leave one out"):
        fused.attention_forward(q, k, v, packing=packing, mask=mask)
    slot = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match=r"slot is torch.int32 \(2,\): give int32 \[1\]"):
        fused.attention_forward(q, k, v, packing=packing, slot=slot)
