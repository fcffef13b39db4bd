"""Repairs of a finished product by Triton: faults found, put right, and nothing else touched."""

import torch
from case_loops import for_each
from triton_cases import DTYPES, MARKS, exact, faults, product, random

from holdfast.abft.gemm import cuda as passes
from holdfast.abft.gemm.cuda import RowStatus
from holdfast.abft.gemm.cuda_types import Mode

pytestmark = MARKS

M, K, N = 19, 200, 150


def _operands(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    a, b = random(M, K, dtype=dtype), random(K, N, dtype=dtype, seed=1)
    return a, b, product(a, b)


def _verify(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, mode: Mode) -> passes.Verdict:
    return passes.verify(c, a, passes.encode(b, weighted=mode == "checksum"), b, mode=mode)


def _damage(c: torch.Tensor) -> tuple[torch.Tensor, list[int], list[str]]:
    """A copy with one fault a row, in changing columns; rows 0, 2, … stay clean."""
    damaged, rows, kinds = c.clone(), [], []
    for index, kind in enumerate(faults(c[0, 0])):
        row, column = (2 * index + 1) % c.shape[0], (0, c.shape[1] - 1, 7 * index)[index % 3]
        damaged[row, column] = faults(c[row, column])[kind]
        rows.append(row)
        kinds.append(kind)
    return damaged, rows, kinds


def _certain(c: torch.Tensor, damaged: torch.Tensor, rows: list[int], verdict: passes.Verdict):
    """Of the damaged rows those whose change exceeds twice the clean row's threshold."""
    assert verdict.rows is not None
    change = (damaged.double() - c.double()).abs().nan_to_num(torch.inf).amax(-1)
    return [row for row in rows if change[row] > 2 * verdict.rows[1, 0, row]]


@for_each("dtype", DTYPES)
def test_faults_are_found_and_repaired(dtype: torch.dtype) -> None:
    a, b = random(24, K, dtype=dtype), random(K, N, dtype=dtype, seed=1)
    c = product(a, b)
    clean = _verify(c, a, b, "detect")
    damaged, rows, kinds = _damage(c)
    certain = _certain(c, damaged, rows, clean)
    assert len(certain) >= len(rows) - 2, kinds  # not every low exponent flip is large
    assert not torch.equal(damaged, c)  # with the detector off they reach the output

    detected = damaged.clone()
    verdict = _verify(detected, a, b, "detect")
    suspects = verdict.status[0].nonzero().flatten().tolist()
    assert set(certain) <= set(suspects) <= set(rows)
    assert verdict.counts.tolist() == [len(suspects), 0]
    assert torch.equal(detected.nan_to_num(3.0), damaged.nan_to_num(3.0))

    clean_rows = [row for row in range(24) if row not in rows]
    for mode in ("recompute", "checksum"):
        repaired = damaged.clone()
        verdict = _verify(repaired, a, b, mode)
        status = verdict.status[0]
        assert (status[certain] == RowStatus.CORRECTED).all(), (mode, kinds)
        assert not status[clean_rows].any()
        assert verdict.counts.tolist() == [len(suspects), int((status == 2).sum())]
        assert torch.equal(repaired[clean_rows], c[clean_rows])
        assert _verify(repaired, a, b, "detect").counts.tolist() == [0, 0]
        # recompute: at most each side's rounding; checksum: that of a row sum.
        unit = torch.finfo(c.dtype).eps / 2
        limit = 4 * unit * c.double().abs() + 1e-5 * N
        if mode == "checksum":
            assert clean.rows is not None
            limit = limit + clean.rows[1, 0].double().unsqueeze(-1)
        assert ((repaired.double() - exact(a, b)).abs() <= limit)[certain].all(), mode


@for_each("mode", ["recompute", "checksum"])
def test_a_fault_at_every_position_of_a_row(mode: Mode) -> None:
    columns = 70
    a = random(1, K, dtype=torch.float32).expand(columns, K)
    b = random(K, columns, dtype=torch.float32, seed=1)
    c = product(a, b)
    damaged = c + 5 * torch.eye(columns, device=c.device)
    verdict = _verify(damaged, a, b, mode)
    assert (verdict.status == RowStatus.CORRECTED).all()
    torch.testing.assert_close(damaged, c, rtol=1e-5, atol=1e-4)


def test_two_faults_in_a_row() -> None:
    a, b, c = _operands(torch.float32)
    for columns in ([3, 4], [0, N - 1], [8, 64]):
        damaged = c.clone()
        damaged[5, columns] += c.new_tensor([40.0, 70.0])
        left = damaged.clone()
        verdict = _verify(left, a, b, "checksum")
        assert verdict.status[0].nonzero().flatten().tolist() == [5]
        assert verdict.status[0, 5] == RowStatus.SUSPECT
        assert torch.equal(left, damaged)  # not made worse
        assert _verify(damaged, a, b, "recompute").counts.tolist() == [1, 1]
        torch.testing.assert_close(damaged, c, rtol=1e-5, atol=1e-4)


@for_each("mode", ["recompute", "checksum"])
def test_a_damaged_checksum_leaves_the_product_alone(mode: Mode) -> None:
    a, b, c = _operands(torch.bfloat16)
    before = c.clone()
    for row in (0, 1):  # the signed sums, and the spread, which must not hide what is there
        checksums = passes.encode(b, weighted=True)
        checksums.sums[0, 0, row, 17] = torch.nan if row else 1e4
        verdict = passes.verify(c, a, checksums, b, mode=mode)
        assert verdict.counts[0] > M // 2
        assert (verdict.status != RowStatus.CORRECTED).all()
        assert torch.equal(c, before)


@for_each("mode", ["recompute", "checksum", "detect"])
def test_an_operand_that_is_not_finite_is_no_fault_of_the_product(mode: Mode) -> None:
    for value in (torch.nan, torch.inf):
        a, b, _ = _operands(torch.float16)
        a[4, 9] = value
        c = product(a, b)
        before = c.clone()
        verdict = _verify(c, a, b, mode)
        assert verdict.status[0].nonzero().flatten().tolist() == [4]
        assert verdict.status[0, 4] == RowStatus.SUSPECT
        assert torch.equal(c.nan_to_num(7.0), before.nan_to_num(7.0))
