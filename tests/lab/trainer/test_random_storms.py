"""Random storms: reproducible, within the run, and always with something of every kind."""

from collections import Counter
from dataclasses import replace

import pytest
from case_loops import for_each

from holdfast.inject import Fault, check_schedule, parse_schedule
from holdfast.inject.schedule import dump_schedule
from holdfast_lab.trainer.random_storms import (
    LATE_STEPS,
    LOW_MANTISSA_BITS,
    TOP_EXPONENT_BIT,
    numbered,
    random_storm,
)

STEPS, RANKS, SEEDS = 60, 2, 200
OPS = [
    f"blocks.{layer}.{place}/{role}"
    for layer in range(2)
    for place in ("attn.qkv/addmm", "attn/bmm", "attn/bmm#2", "mlp.up/addmm")
    for role in ("forward", "grad_a", "grad_b")
]
MODULES = ["blocks.0.ln_1", "blocks.0.ln_2", "ln_f"]


def _storm(seed: int, **options: int) -> list[Fault]:
    sizes = {"steps": STEPS, "ranks": RANKS} | options
    return random_storm(seed, ops=OPS, modules=MODULES, **sizes)


@pytest.fixture(scope="module")
def storms() -> list[list[Fault]]:
    return [_storm(seed) for seed in range(SEEDS)]


def test_a_seed_draws_one_storm_and_another_seed_another(storms: list[list[Fault]]) -> None:
    assert [_storm(seed) for seed in range(20)] == storms[:20]
    assert len({dump_schedule(storm) for storm in storms}) == SEEDS


def test_neither_fused_attention_nor_the_order_of_the_names_changes_a_storm() -> None:
    fused = ["blocks.0.attn/sdpa/forward", "blocks.0.attn/sdpa_backward/grad_qkv"]
    for ops, modules in (([*fused, *OPS], MODULES), (OPS[::-1], MODULES[::-1])):
        assert random_storm(3, ops=ops, modules=modules, steps=STEPS, ranks=RANKS) == _storm(3)


def test_every_storm_can_strike_and_survives_its_file(storms: list[list[Fault]]) -> None:
    for storm in storms:
        check_schedule(storm, ops=OPS, modules=MODULES, steps=STEPS, ranks=RANKS)
        assert parse_schedule(dump_schedule(storm), "storm.toml") == storm
        assert [fault.identifier for fault in storm] == list(range(len(storm)))
        assert [fault.step for fault in storm] == sorted(fault.step for fault in storm)


def test_every_storm_has_faults_of_every_kind_and_none_meet(storms: list[list[Fault]]) -> None:
    for storm in storms:
        flips = [f for f in storm if f.kind == "bitflip" and f.site == "output"]
        assert len(flips) == 24
        assert {fault.rank for fault in flips} == set(range(RANKS))
        assert {"inf", "nan", "near_inf"} <= {fault.kind for fault in storm}
        assert [f.bit for f in storm if f.site == "module"] == [TOP_EXPONENT_BIT]
        sites = Counter(fault.site for fault in storm)
        assert (sites["output"], sites["operand"], sites["checksum"]) == (24 + 3 + RANKS, 1, 1)
        kills = [fault for fault in storm if fault.kind == "kill_trainer"]
        assert sorted(fault.rank for fault in kills) == list(range(RANKS))
        (killed,) = {fault.step for fault in kills}
        assert STEPS // 3 <= killed < 2 * STEPS // 3
        others = [fault for fault in storm if fault.kind != "kill_trainer"]
        assert {fault.step for fault in others} <= {*range(1, STEPS - 1)} - {killed}
        assert len({(f.step, f.rank, f.op) for f in others}) == len(others)


def test_low_flips_come_on_top(storms: list[list[Fault]]) -> None:
    low = [f for f in _storm(5, low_flips=9) if f.bit in LOW_MANTISSA_BITS]
    assert len(low) == 9
    assert not [fault for fault in storms[5] if fault.bit in LOW_MANTISSA_BITS]


def test_runs_without_room_for_a_storm_are_refused() -> None:
    with pytest.raises(ValueError, match="no place is left for 26 faults"):
        random_storm(0, ops=["a/mm/forward"], modules=["ln"], steps=15, ranks=2)
    with pytest.raises(ValueError, match=r"steps = 11: .* at least 12"):
        _storm(0, steps=11)


@for_each(("steps", "ranks"), [(12, 1), (12, 2), (13, 3), (200, 8)])
def test_the_shortest_and_other_runs_have_storms_too(steps: int, ranks: int) -> None:
    for seed in range(30):
        storm = _storm(seed, steps=steps, ranks=ranks)
        check_schedule(storm, ops=OPS, modules=MODULES, steps=steps, ranks=ranks)


def test_numbering_orders_by_step_and_keeps_everything_else() -> None:
    faults = [Fault(5, 0, "inf", op="a/mm/forward"), Fault(2, 1, "nan", op="b/mm/forward")]
    assert numbered(faults) == [faults[1], replace(faults[0], identifier=1)]


def test_of_several_hosts_one_is_lost_and_nothing_strikes_meanwhile() -> None:
    hosts = set()
    for seed in range(SEEDS):
        storm = _storm(seed, nodes=3)
        check_schedule(storm, ops=OPS, modules=MODULES, steps=STEPS, ranks=RANKS, nodes=3)
        assert parse_schedule(dump_schedule(storm), "storm.toml") == storm
        (lost,) = [fault for fault in storm if fault.kind == "lose_node"]
        hosts.add(lost.host)
        others = {fault.step for fault in storm if fault is not lost}
        assert not others & set(range(lost.step, lost.step + LATE_STEPS))
        assert lost.step + LATE_STEPS <= STEPS
    assert hosts == {0, 1, 2}
