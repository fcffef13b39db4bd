"""Which answer belongs to which fault, on event lists made by hand."""

from typing import Any

import pytest

from holdfast.events import Event
from holdfast.inject import check_schedule
from holdfast.inject.schedule import KILLS
from holdfast_lab.trainer.gpt import GPTConfig
from holdfast_lab.trainer.random_storms import LATE_STEPS, random_storm
from holdfast_lab.trainer.storm import (
    NOT_SEEN,
    Outcome,
    anatomy,
    check,
    detection_line,
    outcomes,
    shipped_storm,
)

OP = "blocks.0.attn/bmm/forward"
DEMO = GPTConfig(layers=4, heads=4, width=256, context=128)


def _struck(time_s: float, kind: str = "bitflip", site: str = "output", **values: Any) -> Event:
    bit = 30 if kind == "bitflip" else None
    detail = {"fault": values.pop("fault", 0), "kind": kind, "site": site, "bit": bit}
    if kind not in KILLS:
        detail |= {"true": 1.0, "corrupted": 3e38, "below_line": False}
    fields: dict[str, Any] = {"step": 5, "rank": 0, "op": OP} | values
    return Event("injected", time_s=time_s, detail=detail, **fields)


def _answer(kind: str, time_s: float, **values: Any) -> Event:
    fields: dict[str, Any] = {"step": 5, "rank": 0, "detector": "checksum"} | values
    return Event(kind, time_s=time_s, **fields)


def _repair(time_s: float, kind: str = "gemm_fault", **values: Any) -> Event:
    fields = {"op": OP, "rung": "correct", "duration_s": 0.002} | values
    return _answer(kind, time_s, **fields)


def _one(*events: Event) -> Outcome:
    (outcome,) = outcomes(events)
    return outcome


@pytest.mark.parametrize(
    ("site", "kind"), [("output", "gemm_fault"), ("checksum", "checksum_fault")]
)
def test_a_fault_in_a_matmul_is_answered_by_that_matmul(site: str, kind: str) -> None:
    outcome = _one(_struck(1.0, site=site), _repair(1.5, kind))
    assert (outcome.seen_by, outcome.rung) == ("checksum", "correct")
    assert outcome.after_s == 0.002
    assert (outcome.site, outcome.op, outcome.bit, outcome.true) == (site, OP, 30, 1.0)


@pytest.mark.parametrize(
    "stranger",
    [
        _repair(1.5, rank=1),
        _repair(1.5, step=6),
        _repair(1.5, op="head/mm/forward"),
        _repair(0.5),
        _repair(1.5, "nonfinite_input", rung=""),
        _answer("rerun", 1.5, detector="loss spike", rung=""),
        _answer("rerun", 1.5, rank=1, rung="recompute"),
        _answer("rollback", 1.5, step=6, rung="rollback"),
        _answer("restored", 1.5, rung="rollback"),
    ],
    ids=lambda event: f"{event.kind} {event.rank} {event.step} {event.op}",
)
def test_what_happened_elsewhere_or_before_is_no_answer(stranger: Event) -> None:
    outcome = _one(_struck(1.0), stranger)
    assert (outcome.seen_by, outcome.rung, outcome.after_s) == (NOT_SEEN, "", 0.0)


def test_a_fault_that_a_queued_check_finds_is_answered_by_the_repetition_of_its_step() -> None:
    rerun = _answer("rerun", 3.5, detector="unrepaired fault", rung="recompute", duration_s=2.0)
    outcome = _one(_struck(1.0), _repair(1.2, rung="", duration_s=0.0), rerun)
    assert (outcome.seen_by, outcome.rung, outcome.after_s) == ("checksum", "recompute", 2.5)


def test_a_module_fault_is_answered_by_the_repetition_of_its_step() -> None:
    rerun = _answer("rerun", 3.5, detector="non-finite value", rung="recompute", duration_s=2.0)
    outcome = _one(_struck(1.0, site="module", op="ln_f"), _repair(1.2, op="ln_f"), rerun)
    assert (outcome.seen_by, outcome.rung, outcome.after_s) == (
        "non-finite value",
        "recompute",
        2.5,
    )


def test_a_damaged_operand_is_answered_by_the_roll_back_after_the_repetitions() -> None:
    outcome = _one(
        _struck(1.0, site="operand"),
        _answer("operand_fault", 1.1, op=OP),
        _answer("rerun", 2.0, detector="unrepaired fault"),
        _answer("rollback", 3.0, detector="rerun", rung="rollback"),
    )
    assert (outcome.seen_by, outcome.rung, outcome.after_s) == ("rerun", "rollback", 2.0)


WEIGHT = "model.blocks.2.mlp.up.weight"


def test_a_tensor_at_rest_is_answered_by_its_repair_or_by_the_roll_back() -> None:
    found = {"op": WEIGHT, "detector": "digest"}
    flip = _struck(1.0, site="rest", op=WEIGHT)
    rerun = _answer("rerun", 2.0, detector="unrepaired fault", rung="recompute")
    mended = _answer("state_fault", 1.5, rung="correct", duration_s=0.1, **found)
    outcome = _one(flip, mended, rerun)
    assert (outcome.seen_by, outcome.rung, outcome.after_s) == ("digest", "correct", 0.1)
    back = _answer("rollback", 3.0, detector="rerun", rung="rollback")
    outcome = _one(flip, _answer("state_fault", 1.5, **found), back)
    assert (outcome.seen_by, outcome.rung, outcome.after_s) == ("digest", "rollback", 2.0)
    for strangers in ([rerun, back], [_answer("state_fault", 1.5, **found | {"op": "model.x"})]):
        assert _one(flip, *strangers).seen_by == NOT_SEEN


def test_a_wrong_update_is_answered_in_place_and_a_wrong_sum_by_the_repetition() -> None:
    update = _answer("optimizer_fault", 1.5, detector="recomputation", rung="recompute")
    outcome = _one(_struck(1.0, site="update", op=WEIGHT), update)
    assert (outcome.seen_by, outcome.rung, outcome.after_s) == ("recomputation", "recompute", 0.0)
    rerun = _answer("rerun", 3.0, detector="unrepaired fault", rung="recompute")
    flip = _struck(1.0, site="collective", op="all_reduce")
    outcome = _one(flip, _answer("collective_fault", 2.0, detector="notes"), rerun)
    assert (outcome.seen_by, outcome.rung, outcome.after_s) == ("notes", "recompute", 2.0)
    assert (_one(flip, rerun).seen_by, _one(flip, update).seen_by) == (NOT_SEEN, NOT_SEEN)


@pytest.mark.parametrize("op", ["", OP])
def test_a_kill_is_answered_by_the_same_ranks_next_restore(op: str) -> None:
    outcome = _one(
        _struck(1.0, "kill_trainer", op=op),
        _answer("restored", 0.9, step=-1, rung="rollback"),
        _answer("restored", 6.0, step=-1, rank=1, rung="rollback"),
        _answer("restored", 7.0, step=-1, rung="rollback"),
        _answer("restored", 9.0, step=-1, rung="rollback"),
    )
    assert (outcome.site, outcome.seen_by, outcome.rung) == ("process", "torchrun", "rollback")
    assert outcome.after_s == 6.0
    assert (outcome.true, outcome.corrupted, outcome.below_line) == (None, None, False)
    alone = _one(_struck(1.0, "kill_trainer"), _answer("restored", 6.0, rank=1, rung="rollback"))
    assert (alone.seen_by, alone.rung) == (NOT_SEEN, "")


def test_a_lost_host_is_answered_by_the_ranks_return_up_to_the_highest_rung() -> None:
    lost = _struck(5.0, "lose_node", "node", rank=-1, op="host-1")
    outcome = _one(
        lost,
        _answer("restored", 4.0, rank=0, rung="reload"),
        _answer("snapshot_rebuilt", 9.0, rank=1, rung="rebuild"),
        _answer("restored", 9.5, rank=1, rung="rollback"),
        _answer("restored", 8.0, rank=0, rung="rollback"),
        _answer("restored", 20.0, rank=0, rung="reload"),
    )
    assert (outcome.rank, outcome.site, outcome.op) == (-1, "node", "host-1")
    assert (outcome.seen_by, outcome.rung, outcome.after_s) == ("torchrun", "rebuild", 4.0)
    assert (_one(lost).seen_by, _one(lost).rung) == (NOT_SEEN, "")


def test_faults_come_in_the_order_in_which_they_struck_each_with_its_own_ranks_answer() -> None:
    struck = [_struck(3.0, fault=2), _struck(1.0, fault=7, step=1), _struck(1.1, rank=1, fault=4)]
    found = [(one.fault, one.rank, one.seen_by) for one in outcomes([*struck, _repair(3.2)])]
    assert found == [(7, 0, NOT_SEEN), (4, 1, NOT_SEEN), (2, 0, "checksum")]
    assert outcomes([_repair(1.0)]) == []


def test_the_line_is_that_of_the_sites_that_ran() -> None:
    lines = [0.0, 2.0**-10, 2.0**-8, 2.0**-12]
    line = detection_line({"sites": [{"line": value} for value in lines]})
    assert (line.median, line.worst, line.mantissa_bit) == (2.0**-10, 2.0**-8, 13)


@pytest.fixture(scope="module")
def demo_names() -> Any:
    return anatomy(DEMO)


def test_the_shipped_storm_strikes_the_demos_model(demo_names: Any, in_turn: Any) -> None:
    faults = shipped_storm(nodes=3)
    check(faults, demo_names, steps=60, ranks=3, nodes=3)
    flips = [fault for fault in faults if fault.kind == "bitflip"]
    assert len(flips) >= 20
    assert {fault.rank for fault in flips} == {0, 1, 2}
    assert {fault.rank for fault in faults if fault.kind == "kill_trainer"} == {0, 1, 2}
    killed = {fault.step for fault in faults if fault.kind == "kill_trainer"}
    assert not killed & {fault.step for fault in faults if fault.kind != "kill_trainer"}
    (lost,) = [fault for fault in faults if fault.kind == "lose_node"]
    (update,) = [fault for fault in faults if fault.site == "update"]
    assert update.step < min(killed)  # a restart begins the rotation anew
    assert update.op in in_turn(DEMO, update.step)
    assert "all_reduce" in {fault.op for fault in faults if fault.site == "collective"}
    rest = [fault.op for fault in faults if fault.site == "rest"]
    assert [op.partition(".")[0] for op in rest] == ["model", "optimizer"]
    assert set(rest) <= set(demo_names.weights_and_moments)
    late = set(range(lost.step, lost.step + LATE_STEPS))
    assert not late & {fault.step for fault in faults if fault is not lost}
    alone = shipped_storm(nodes=1)
    check(alone, demo_names, steps=60, ranks=3)
    assert [fault for fault in faults if fault is not lost] == alone


def test_random_storms_strike_the_demos_model(demo_names: Any) -> None:
    for seed in range(20):
        names = demo_names
        drawn = {"state": names.weights_and_moments, "steps": 60, "ranks": 2}
        storm = random_storm(seed, ops=names.ops, modules=names.norms, **drawn)
        check_schedule(storm, ops=names.ops, modules=names.modules, **drawn)
        rest = sorted(fault.op for fault in storm if fault.site == "rest")
        assert [op.partition(".")[0] for op in rest] == ["model", "optimizer"]
        assert {fault.op for fault in storm if fault.site == "module"} <= set(names.norms)


def test_the_anatomy_names_all_products_of_forward_and_backward(demo_names: Any) -> None:
    per_block = 3 * (4 + 2)
    assert len(demo_names.ops) == DEMO.layers * per_block + 3
    assert demo_names.norms == [
        *(f"blocks.{layer}.ln_{n}" for layer in range(DEMO.layers) for n in (1, 2)),
        "ln_f",
    ]
