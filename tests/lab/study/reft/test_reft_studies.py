"""REFT's studies: what they must show, and that their verdicts can be no."""

import pytest
from study_runs import rows_of

from holdfast.planner.survival import Survival
from holdfast_lab.study import Row, Verdict
from holdfast_lab.study.reft import intervals, paper, survival


@pytest.fixture(scope="module")
def survivals() -> list[Row]:
    return rows_of(survival.STUDY.name)


@pytest.fixture(scope="module")
def best() -> list[Row]:
    return rows_of(intervals.STUDY.name)


def of(rows: list[Row], table: str) -> list[Row]:
    return [row for row in rows if row.table == table]


def test_figure_8s_days_are_compared_at_its_one_shape(survivals: list[Row]) -> None:
    compared = [row for row in of(survivals, survival.DAYS) if row.published]
    assert [row.case for row in compared] == [{"shape c": "1.3"}]
    assert compared[0].measured[survival.SNAPSHOTS] == pytest.approx(16.178, rel=1e-4)
    assert compared[0].measured[survival.CHECKPOINTS] == pytest.approx(0.4080, rel=1e-4)
    assert sorted(compared[0].differing()) == sorted((survival.SNAPSHOTS, survival.CHECKPOINTS))


def test_read_off_a_grid_both_of_the_papers_days_are_met(survivals: list[Row]) -> None:
    (row,) = of(survivals, survival.READ)
    assert set(row.verdicts.values()) == {Verdict.CALIBRATION}


def test_a_node_of_eight_gpus_survives_as_a_fleet_of_nodes(survivals: list[Row]) -> None:
    model = survival.fleet(1.3, nodes=384)
    assert model == Survival(384, 6, 8 * 1e-4, 8 * 1e-5, 1.3)
    gpus, nodes = (of(survivals, table) for table in (survival.DAYS, survival.NODES))
    for alone, together in zip(gpus, nodes, strict=True):
        same = together.measured[survival.CHECKPOINTS]
        assert same == pytest.approx(alone.measured[survival.CHECKPOINTS])
        assert together.measured[survival.SNAPSHOTS] < alone.measured[survival.SNAPSHOTS]


def test_the_simulation_draws_lifetimes_and_finds_the_formula(survivals: list[Row]) -> None:
    found = of(survivals, survival.SIMULATED)
    assert len(found) == 2 * len(paper.SHAPES)
    assert all(row.measured[survival.FORMULA] == pytest.approx(0.9) for row in found)
    assert min(row.measured[survival.SHARE] for row in found) > 0
    assert max(row.measured[survival.SHARE] for row in found) < 1
    assert survival.STUDY.verdict(survivals) == ""


def test_no_interval_beats_equation_5_by_equation_4(best: list[Row]) -> None:
    found = of(best, intervals.LEAST)
    assert len(found) == len(intervals.STALLS_S) * len(intervals.MTTFS_H)
    tried = [row for row in found if row.measured[intervals.CHOSEN] < 2_000]
    assert len(tried) > 8
    for row in tried:
        assert row.measured[intervals.TRIED] == row.measured[intervals.CHOSEN]
        assert row.measured[intervals.FIRST_ORDER] == 1.0
    assert any(row.measured[intervals.TRUE] > 1.001 for row in found)
    assert intervals.STUDY.verdict(best) == ""


def test_the_exact_overhead_tends_to_equation_4_as_failures_become_rare() -> None:
    rate, save = 1e-9, 1.0
    interval = (2 * save / rate) ** 0.5
    first_order = intervals.overhead(interval, save, 0.0, rate)
    assert intervals.exact_overhead(interval, save, rate) == pytest.approx(first_order, rel=1e-4)
    assert intervals.exact_overhead(1000.0, 100.0, 1e-3) > 2 * 0.1
