"""The DLRM studies of the int8 product: what they count, and that their verdicts can fail."""

import pytest
import torch
from case_loops import for_each
from study_runs import rows_of

from holdfast.abft.int8_gemm.op import int8_linear
from holdfast_lab.study import Row
from holdfast_lab.study.dlrm import gemm_detection
from holdfast_lab.study.dlrm.gemm_detection import Counts, Target
from holdfast_lab.study.dlrm.gemm_shapes import BENCHMARK, SHAPES, UNIFORM


@pytest.fixture(scope="module")
def detection() -> list[Row]:
    return rows_of(gemm_detection.STUDY.name)


def test_digits_see_and_correct_what_changes_anything(detection: list[Row]) -> None:
    rows = [row for row in detection if row.case["encoding"] == "digits" and "flips" in row.table]
    assert len(rows) == 2 * len(gemm_detection.KINDS)
    assert all(row.measured[gemm_detection.EFFECTIVE] == 100 for row in rows)
    assert all(row.measured[gemm_detection.CORRECTED] == 100 for row in rows)
    assert gemm_detection.STUDY.verdict(detection) == ""


@for_each("kind", ["strike_b", "strike_c"])
@for_each("encoding", gemm_detection.ENCODINGS)
def test_a_strike_is_undone(kind: str, encoding: str) -> None:
    target = Target((2, 9, 7), UNIFORM, encoding, torch.Generator().manual_seed(0))
    buffer, c = target.weights.gemm.buffer.clone(), target.c.clone()
    counts = Counts()
    for draw in range(40):
        getattr(target, kind)(counts, [3 * draw, 5 * draw, draw])
    assert counts.runs == 40
    assert torch.equal(target.weights.gemm.buffer, buffer)
    assert torch.equal(target.c, c)
    assert target.multiply() is None


def test_127_and_254_hide_a_flip_from_the_paper_and_0_hides_it_from_all() -> None:
    for encoding, seen in (("mod127", 0), ("digits", 2)):
        target = Target((1, 9, 3), UNIFORM, encoding, torch.Generator().manual_seed(0))
        target.a[:] = torch.tensor([0, 127, 254])
        target.expected = int8_linear(
            target.a,
            target.weights,
            **dict(
                zip(
                    ("a_scale", "a_zero_point", "out_scale", "out_zero_point"),
                    gemm_detection.SCALES,
                    strict=True,
                )
            ),
        )
        counts = Counts()
        for k in range(3):
            target.strike_b(counts, [k, 4, 6])
        assert (counts.effective, counts.detected) == (2, seen)


def test_benchmark_activations_are_zero_as_often_as_the_papers_misses_say() -> None:
    a = BENCHMARK.draw_a(1, 60_000, torch.Generator().manual_seed(0))
    single_rows = sum(m == 1 for m, _, _ in SHAPES)
    expected = 1 - float((a == 0).double().mean()) * single_rows / len(SHAPES)
    assert expected == pytest.approx(2663 / 2800, abs=0.005)
