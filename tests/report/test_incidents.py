"""Events told as incidents: each fault once, with everything that was done about it."""

import pytest
from report_runs import OP, corrected, event, repeated, restored, struck

from holdfast.report.incidents import Incident, incidents_of


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


def test_a_fault_that_nobody_injected_is_told_too():
    incident = _only(corrected(1.0))
    assert (incident.rung, incident.status, incident.struck) == ("correct", "answered", {})


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


def test_replicas_that_nobody_could_tell_apart_leave_the_incident_open():
    incident = _only(event("shadow_undecided", 2.0, detector="shadow"))
    assert (incident.rung, incident.status) == ("", "open")


def test_the_struck_module_comes_first():
    later = event("extreme_input", 1.1, op="head")
    flip = struck(1.0, op="blocks.1.ln_2", site="module")
    incident = _only(flip, later, repeated(2.5, "transient"))
    assert incident.ops == ["blocks.1.ln_2", "head"]


def test_a_step_that_could_not_be_confirmed_and_was_rolled_back_is_answered():
    back = event("rollback", 4.1, rung="rollback", duration_s=0.04)
    incident = _only(struck(1.0), repeated(4.0, "persistent"), restored(4.05, step=1), back)
    assert (incident.rung, incident.status) == ("rollback", "answered")


def test_a_step_that_could_not_be_confirmed_is_open():
    left = event("operand_fault", 1.1, op=OP)
    incident = _only(struck(1.0, site="operand"), left, repeated(4.0, "persistent"))
    assert (incident.rung, incident.status) == ("", "open")


def test_a_fault_that_was_found_and_left_is_open():
    assert _only(event("gemm_persistent", 1.0, op=OP)).status == "open"


def test_a_doubt_that_repeats_is_genuine():
    doubt = event("nonfinite_input", 1.0, op=OP)
    assert _only(doubt, repeated(2.0, "genuine", differed=False)).status == "genuine"


@pytest.mark.parametrize(
    ("detail", "status"), [({}, "not seen"), ({"below_line": True}, "below the line")]
)
def test_a_fault_that_nobody_answered_says_so(detail, status):
    incident = _only(struck(1.0, **detail))
    assert (incident.rung, incident.status) == ("", status)


def test_an_answer_in_another_step_is_not_this_faults():
    found = incidents_of([struck(1.0, step=1), repeated(5.0, "transient", step=2)])
    assert [(i.step, i.status) for i in found] == [(1, "not seen"), (2, "answered")]


def test_a_fault_answered_in_its_op_is_not_the_steps():
    found = incidents_of([struck(1.0), corrected(1.1), repeated(3.0, "transient")])
    assert [(i.rung, i.events) for i in found] == [("correct", 2), ("recompute", 1)]


def test_a_death_lasts_until_the_last_rank_is_back():
    kills = [struck(1.0 + rank / 100, rank=rank, kind="kill_trainer", bit=None) for rank in (0, 1)]
    incident = _only(*kills, restored(8.0), restored(8.5, rank=1))
    assert (incident.rung, incident.status) == ("rollback", "answered")
    assert incident.duration_s == pytest.approx(7.5)
    assert incident.struck == {"kill trainer": 2}
    assert incident.detectors == ["restart"]


def test_a_lost_node_is_back_when_its_shard_is_rebuilt_and_all_ranks_are():
    lost = struck(1.0, step=5, rank=-1, op="", site="process", kind="lose_node", bit=None)
    parity = {"rung": "rebuild", "detector": "digest", "duration_s": 0.5}
    built = event("snapshot_rebuilt", 8.0, step=-1, rank=1, **parity)
    incident = _only(lost, restored(7.5), built, restored(8.1, rank=1))
    assert (incident.rung, incident.status, incident.ranks) == ("rebuild", "answered", [0, 1])
    assert incident.duration_s == pytest.approx(7.1)
    assert incident.struck == {"lose node": 1}


def test_a_death_without_return_is_open():
    assert _only(struck(1.0, kind="kill_trainer", bit=None)).status == "open"


def test_two_lives_are_two_incidents_and_their_steps_differ():
    first = [struck(1.0, step=5, op="a"), restored(2.0), restored(2.1, rank=1)]
    second = [corrected(3.0, step=5, op="a"), restored(5.0), restored(5.1, rank=1)]
    found = incidents_of(first + second)
    assert [(i.rung, i.status) for i in found] == [
        ("", "not seen"),
        ("rollback", "answered"),
        ("correct", "answered"),
        ("rollback", "answered"),
    ]


def test_a_step_that_is_done_again_after_a_death_is_another():
    def left(at_s):
        return event("operand_fault", at_s, step=5, op=OP)

    again = [left(6.0), repeated(7.0, "transient", step=5)]
    found = incidents_of([left(1.0), restored(5.0), restored(5.1, rank=1), *again])
    assert [(i.rung, i.status) for i in found] == [
        ("", "open"),
        ("rollback", "answered"),
        ("recompute", "answered"),
    ]


def test_a_checkpoint_from_disk_is_the_fifth_rung():
    assert _only(restored(1.0, source="disk")).rung == "reload"


def test_notes_are_no_incidents():
    assert incidents_of([event("persisted", 1.0, rank=-1), event("persist_slow", 2.0)]) == []


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("snapshot_corrupt", "answered"),
        ("smp_lost", "answered"),
        ("snapshots_lost", "open"),
        ("replica_diverged", "open"),
    ],
)
def test_what_befalls_snapshots_is_told_one_by_one(kind, status):
    found = incidents_of([event(kind, 1.0), event(kind, 2.0)])
    assert [incident.status for incident in found] == [status] * 2


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
