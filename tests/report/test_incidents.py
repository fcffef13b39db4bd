"""Events told as incidents: each fault once, with everything that was done about it."""

import pytest
from case_loops import for_each
from report_runs import OP, corrected, event, repeated, restored, struck

from holdfast.events import Event
from holdfast.report.incidents import Incident, incidents_of

LEFT = event("operand_fault", 1.1, op=OP)
ANSWERED = ("", "answered")


def _only(*events) -> Incident:
    (incident,) = incidents_of(events)
    return incident


def test_a_fault_repaired_in_its_op_is_one_incident():
    incident = _only(struck(1.0), corrected(1.05))
    assert (incident.rung, incident.status) == ("correct", "answered")
    assert incident.duration_s == pytest.approx(0.02)
    assert (incident.ops, incident.ranks, incident.detectors) == ([OP], [0], ["checksum"])
    assert incident.struck == {"bitflip bit 30 (output)": 1}
    assert incident.events == 2


def test_faults_of_one_step_in_two_ops_are_two_incidents():
    found = incidents_of([struck(1), corrected(2), struck(3, op="b"), corrected(4, op="b")])
    assert [incident.ops for incident in found] == [[OP], ["b"]]


def test_a_fault_that_its_op_leaves_to_the_step_is_the_steps():
    left = event("operand_fault", 1.1, op=OP, detector="checksum")
    others = event("nonfinite_input", 1.2, op="head", detector="checksum")
    again = [repeated(3.0, "transient"), repeated(3.1, "transient", rank=1, differed=False)]
    incident = _only(struck(1.0, site="operand"), left, others, *again)
    assert (incident.rung, incident.status) == ("recompute", "answered")
    assert incident.ops == [OP, "head"]
    assert incident.ranks == [0, 1]
    assert incident.duration_s == pytest.approx(2.1)
    assert incident.struck == {"bitflip bit 30 (operand)": 1}


def test_a_step_that_shadows_put_right_is_answered_and_what_struck_it_belongs_to_it():
    named = event("shadow_mismatch", 2.0, detector="shadow", rung="recompute", duration_s=0.5)
    evict = event("evict", 2.0, detector="shadow")
    incident = _only(struck(1.0, site="module", below_line=True), named, evict)
    assert (incident.rung, incident.status) == ("recompute", "answered")
    assert incident.struck == {"bitflip bit 30 (module)": 1}


def test_the_struck_module_comes_first():
    later = event("extreme_input", 1.1, op="head")
    flip = struck(1.0, op="blocks.1.ln_2", site="module")
    incident = _only(flip, later, repeated(2.5, "transient"))
    assert incident.ops == ["blocks.1.ln_2", "head"]


@for_each(
    ("events", "expected"),
    [
        # Nobody injected it.
        ([corrected(1.0)], [("correct", "answered")]),
        # Nobody could tell the replicas apart.
        ([event("shadow_undecided", 2.0, detector="shadow")], [("", "open")]),
        # The step could not be confirmed, and was rolled back.
        (
            [
                *(struck(1.0), repeated(4.0, "persistent"), restored(4.05, step=1)),
                event("rollback", 4.1, rung="rollback", duration_s=0.04),
            ],
            [("rollback", "answered")],
        ),
        # A roll-back undoes what was struck at rest before the step; a product then is not.
        (
            [
                *(struck(1.0, op="model.w", site="rest"), struck(1.1, op="head/mm/forward")),
                *(repeated(4.0, "persistent", step=2), restored(4.05, step=2)),
                event("rollback", 4.1, step=2, rung="rollback", duration_s=0.04),
            ],
            [("rollback", "answered"), ("", "not seen")],
        ),
        # The step could not be confirmed, and nothing was done about it.
        (
            [LEFT, struck(1.0, site="operand"), repeated(4.0, "persistent")],
            [("", "open")],
        ),
        # It was found and left.
        ([event("gemm_persistent", 1.0, op=OP)], [("", "open")]),
        # A doubt that repeats is genuine.
        (
            [event("nonfinite_input", 1.0, op=OP), repeated(2.0, "genuine", differed=False)],
            [("", "genuine")],
        ),
        # Nobody answered.
        ([struck(1.0)], [("", "not seen")]),
        ([struck(1.0, below_line=True)], [("", "below the line")]),
        ([struck(1.0, kind="kill_trainer", bit=None)], [("", "open")]),
        # The answer is another step's.
        (
            [struck(1.0, step=1), repeated(5.0, "transient", step=2)],
            [("", "not seen"), ("recompute", "answered")],
        ),
        # It was answered in its op, and the step is repeated for another reason.
        (
            [struck(1.0), corrected(1.1), repeated(3.0, "transient")],
            [("correct", "answered"), ("recompute", "answered")],
        ),
        ([restored(1.0, source="disk")], [("reload", "answered")]),
        # Two lives, whose steps of one number differ.
        (
            [
                *(struck(1.0, step=5, op="a"), restored(2.0), restored(2.1, rank=1)),
                *(corrected(3.0, step=5, op="a"), restored(5.0), restored(5.1, rank=1)),
            ],
            [
                *(("", "not seen"), ("rollback", "answered")),
                *(("correct", "answered"), ("rollback", "answered")),
            ],
        ),
        # A step that is done again after a death is another.
        (
            [
                event("operand_fault", 1.0, step=5, op=OP),
                *(restored(5.0), restored(5.1, rank=1)),
                event("operand_fault", 6.0, step=5, op=OP),
                repeated(7.0, "transient", step=5),
            ],
            [("", "open"), ("rollback", "answered"), ("recompute", "answered")],
        ),
        # Notes are no incidents.
        ([event("persisted", 1.0, rank=-1), event("persist_slow", 2.0)], []),
        # What befalls snapshots is told one by one.
        ([event("snapshot_corrupt", 1.0), event("snapshot_corrupt", 2.0)], 2 * [ANSWERED]),
        ([event("smp_lost", 1.0), event("smp_lost", 2.0)], 2 * [ANSWERED]),
        ([event("snapshots_lost", 1.0), event("snapshots_lost", 2.0)], 2 * [("", "open")]),
        ([event("replica_diverged", 1.0), event("replica_diverged", 2.0)], 2 * [("", "open")]),
    ],
)
def test_what_became_of_each_fault(events: list[Event], expected: list[tuple[str, str]]) -> None:
    found = incidents_of(sorted(events, key=lambda event: event.time_s))
    assert [(incident.rung, incident.status) for incident in found] == expected


def test_a_death_lasts_until_the_last_rank_is_back():
    kills = [struck(1.0 + rank / 100, rank=rank, kind="kill_trainer", bit=None) for rank in (0, 1)]
    incident = _only(*kills, restored(8.0), restored(8.5, rank=1))
    assert (incident.rung, incident.status) == ("rollback", "answered")
    assert incident.duration_s == pytest.approx(7.5)
    assert incident.struck == {"kill trainer": 2}
    assert incident.detectors == ["restart"]


def test_a_rank_that_is_killed_after_its_return_has_died_anew():
    first, second = (
        struck(at_s, step=4, rank=rank, op="", kind="kill_trainer", bit=None)
        for rank, at_s in enumerate((1.0, 3.0))
    )
    back = [restored(2.0), restored(2.1, rank=1), restored(4.0), restored(4.1, rank=1)]
    found = incidents_of([first, *back[:2], second, *back[2:]])
    assert [(one.struck, one.status) for one in found] == [({"kill trainer": 1}, "answered")] * 2
    assert [one.duration_s for one in found] == pytest.approx([1.1, 1.1])


def test_a_host_that_is_lost_after_a_return_is_lost_anew():
    lost = {"rank": -1, "op": "node-1", "kind": "lose_node", "bit": None}
    both = [restored(2.0), restored(2.1, rank=1)]
    found = incidents_of([struck(1.0, **lost), *both, struck(3.0, **lost), restored(4.0)])
    assert [one.struck for one in found] == [{"lose node": 1}] * 2


def test_a_lost_node_is_back_when_its_shard_is_rebuilt_and_all_ranks_are():
    lost = struck(1.0, step=5, rank=-1, op="", site="process", kind="lose_node", bit=None)
    parity = {"rung": "rebuild", "detector": "digest", "duration_s": 0.5}
    built = event("snapshot_rebuilt", 8.0, step=-1, rank=1, **parity)
    incident = _only(lost, restored(7.5), built, restored(8.1, rank=1))
    assert (incident.rung, incident.status, incident.ranks) == ("rebuild", "answered", [0, 1])
    assert incident.duration_s == pytest.approx(7.1)
    assert incident.struck == {"lose node": 1}


def test_kinds_unknown_here_are_told_by_name_and_rung():
    found = incidents_of([
        event("lattice_fault", 1.0, op=OP),
        event("node_rebuilt", 2.0, step=2, rung="rebuild"),
        event("greeting", 3.0, step=3),
    ])  # fmt: skip
    assert [(i.kinds, i.rung, i.status) for i in found] == [
        (["lattice fault"], "", "open"),
        (["node rebuilt"], "rebuild", "answered"),
    ]


def test_every_event_but_notes_is_in_one_incident():
    events = [struck(n, step=n % 7, rank=n % 2, op=f"op{n % 3}") for n in range(200)]
    events += [
        corrected(n + 0.5, step=n % 7, rank=n % 2, op=f"op{n % 3}") for n in range(0, 200, 2)
    ]
    events += [repeated(n + 0.7, "transient", step=n % 7) for n in range(0, 200, 9)]
    assert sum(incident.events for incident in incidents_of(events)) == len(events)


WEIGHT = "model.blocks.2.mlp.up.weight"


def at_rest(at_s: float, rung: str, op: str = WEIGHT) -> Event:
    """A tensor that changed at rest; ``rung`` says whether it was repaired in place."""
    return event("state_fault", at_s, op=op, detector="digest", rung=rung, duration_s=0.01)


def test_a_weight_repaired_at_rest_and_the_repeated_step_are_one_incident():
    flip = struck(1.0, op=WEIGHT, site="rest")
    again = [repeated(3.0, "transient"), repeated(3.1, "transient", rank=1)]
    incident = _only(flip, at_rest(2.0, "correct"), *again)
    assert (incident.rung, incident.status) == ("recompute", "answered")
    assert (incident.ops, incident.ranks) == ([WEIGHT], [0, 1])
    assert incident.detectors[0] == "digest"
    assert incident.struck == {"bitflip bit 30 (rest)": 1}
    assert incident.kinds[0] == "state changed at rest"


def test_a_moment_repaired_at_rest_answers_its_own_fault_only():
    moment = "optimizer.state.8.exp_avg_sq"
    other = struck(1.1, op="blocks.0.ln_1", site="module")
    answered, missed = incidents_of(
        [struck(1.0, op=moment, site="rest"), other, at_rest(2.0, "correct", moment)]
    )
    assert (answered.ops, answered.rung, answered.status) == ([moment], "correct", "answered")
    assert answered.duration_s == pytest.approx(0.01)
    assert (missed.ops, missed.status) == (["blocks.0.ln_1"], "not seen")


def test_wrong_updates_and_copies_of_a_sum_are_one_incident_with_their_repair():
    flip = struck(1.0, op=WEIGHT, site="update")
    named = {"op": "AdamW.step/blocks.2.mlp.up.weight", "detector": "recomputation"}
    incident = _only(flip, event("optimizer_fault", 2.0, rung="recompute", **named))
    assert (incident.rung, incident.status) == ("recompute", "answered")
    assert incident.struck == {"bitflip bit 30 (update)": 1}
    flip = struck(1.0, op="all_reduce", site="collective")
    found = event("collective_fault", 2.0, op="all_reduce", detector="notes")
    incident = _only(flip, found, repeated(3.0, "transient"))
    assert (incident.rung, incident.status) == ("recompute", "answered")


def test_a_tensor_that_its_snapshot_does_not_hold_is_answered_by_the_roll_back():
    back = event("rollback", 3.0, detector="rerun", rung="rollback", duration_s=0.5)
    flip = struck(1.0, op=WEIGHT, site="rest")
    incident = _only(flip, at_rest(2.0, ""), back)
    assert (incident.rung, incident.status) == ("rollback", "answered")
    assert incident.detectors == ["digest", "rerun"]
    assert _only(flip, at_rest(2.0, "")).status == "open"
