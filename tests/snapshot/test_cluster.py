"""Sealing among nodes: what any node saw committed survives every loss that parities cover."""

import random
from copy import deepcopy
from itertools import combinations

import pytest
from case_loops import fuzz_after
from snapshot_groups import Groups
from snapshot_nodes import Nodes
from snapshot_shippers import Shippers, small_chunks

from holdfast.snapshot.layout.groups import Dim, Job, Kind, sharding_groups, stripe_sets
from holdfast.snapshot.layout.node_groups import node_groups, tree_neighbours
from holdfast.snapshot.node.membership import held_groups
from holdfast.snapshot.node.session import Listening
from holdfast.snapshot.protocol import messages as m
from holdfast.snapshot.protocol.roster import Roster
from holdfast.snapshot.protocol.state_machine import Protocol
from holdfast.snapshot.protocol.steps import SEAL_PATIENCE_S
from holdfast.snapshot.restore import choose_step
from holdfast.version import __version__

NINE = Job((Dim("ddp", 9, Kind.REPLICATE),), ranks_per_node=1)
# Nodes, parities, and how many steps are kept.
SHAPES = [(2, 1, 1), (3, 1, 1), (3, 2, 1), (4, 2, 1)]


def all_hold(nodes: Nodes, step: int) -> None:
    """Every node has written a step, and has the mirrors; that all of them have is not heard."""
    nodes.copy(step)
    due = [wire for wire, frames in nodes.wires.items() for _ in frames]
    for wire in due:
        nodes.deliver(*wire)
    assert not nodes.committed[0] or nodes.committed[0][-1] < step


def test_a_step_is_given_up_only_for_one_that_all_hold() -> None:
    nodes = Nodes(3)
    nodes.take(1)
    nodes.copy(2, 0, 1)  # node 2 has not begun it
    nodes.deliver_all()
    nodes.begin(0, 3)
    assert nodes.writing[0] is None  # node 2 has not written step 2: step 1 must stay
    kept = nodes.restorable(lost=(2,))
    assert kept.stamp.step == 1
    without = deepcopy(nodes)
    without.protocols[0].node.ranks[0].clean()[1].retire()
    assert without.restorable(lost=(2,)) is None
    nodes.copy(2, 2)
    nodes.deliver_all()
    assert nodes.committed[0] == [1, 2]
    assert nodes.writing[0] == 3


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        *((kind, shape) for kind in (Nodes, Shippers) for shape in SHAPES),
        (Nodes, (5, 1, 2)),
        (Nodes, (5, 2, 1)),
        (Shippers, (4, 1, 2)),
    ],
)
@pytest.mark.parametrize("seed", fuzz_after(range(5), 1, 3))
def test_what_was_committed_survives_every_loss_at_every_moment(
    kind: type[Nodes], shape: tuple[int, int, int], seed: int
) -> None:
    """This holds for replicas, and for nodes with states of their own that ship their blocks."""
    draw = random.Random(f"{shape}/{seed}")
    with small_chunks():
        nodes = kind(*shape)
        steps = [0] * nodes.count
        moves = nodes.campaign_moves * nodes.count
        for number in range(4 * moves):
            if number >= moves and any(nodes.committed):
                break  # some draws commit little
            nodes.move(draw, steps)
            if nodes.newest >= 0:
                nodes.check_losses(draw)
        assert any(nodes.committed)
        nodes.check_going_on(max(steps))


def test_what_is_newer_than_the_step_resumed_from_is_void() -> None:
    nodes = Nodes(3)
    nodes.take(1)
    nodes.copy(2, 0, 1)  # node 2 has not begun it
    nodes.deliver_all()
    assert nodes.lose((2,)) == 1
    nodes.write_again(1)
    nodes.take(2)
    assert nodes.committed[0][-1] == 2
    found = nodes.restorable()
    assert found.stamp == (2, 2)
    # So is one that all hold, of which something turned out to be damaged.
    nodes = Nodes(2, keep=2)
    nodes.take(1)
    nodes.take(2)
    nodes.regroup()
    for node in range(2):
        nodes.do(node, m.Resume(0, 1, 1))
    assert nodes.restorable().stamp == (1, 1)


def test_a_step_that_one_node_passed_over_is_given_up() -> None:
    nodes = Nodes(3)
    nodes.take(1)
    nodes.copy(2, 0, 1)  # node 2 has not begun it
    nodes.begin(2, 2)  # its copy was torn: it is never written
    for node in range(3):
        nodes.begin(node, 3)
    nodes.write(2)
    nodes.deliver_all()
    assert ("aborted", 2) in nodes.replies[0]
    for node in (0, 1):
        nodes.write(node)
    nodes.deliver_all()
    assert nodes.last_committed == [3, 3, 3]


def test_nobody_waits_for_a_step_that_is_never_followed_by_another() -> None:
    nodes = Nodes(3)
    nodes.take(1)
    nodes.copy(2, 0, 1)  # node 2 has not begun it
    nodes.begin(2, 2)
    nodes.deliver_all()
    nodes.do(2, m.SkipStep(0, 2))  # its copy was torn, and it was the last one
    nodes.deliver_all()
    for node in (0, 1):
        assert nodes.replies[node][-1] == ("aborted", 2)
    nodes.begin(2, 2)
    assert nodes.replies[2][-1] == ("skipped", 2)  # the others do not wait for it any more


def test_an_smp_that_was_replaced_does_not_hold_up_those_that_wait_for_what_it_wrote() -> None:
    nodes = Nodes(3)
    nodes.take(1)
    for node in range(3):
        nodes.begin(node, 2)
    nodes.write(1)
    nodes.deliver_all()
    nodes.replace_smp(1)  # it said that it wrote step 2, and never that it holds it
    for node in (0, 2):
        nodes.write(node)
    nodes.copy(3, 1)
    nodes.mend()
    assert [nodes.replies[node][-1] for node in (0, 2)] == [("aborted", 2)] * 2
    nodes.copy(3, 0, 2)
    nodes.deliver_all()
    assert nodes.last_committed == [3, 3, 3]


def test_a_step_that_only_a_lost_smp_and_one_node_saw_sealed_is_kept_by_the_others() -> None:
    nodes = Nodes(3)
    nodes.take(1)
    all_hold(nodes, 2)
    nodes.unlink(1, 2)  # node 2 will not hear that node 1 holds it
    nodes.deliver_all()
    assert nodes.last_committed == [2, 2, 1]
    nodes.begin(0, 3)  # written where step 1 was
    nodes.replace_smp(1)
    nodes.do(1, m.SkipStep(0, 2))
    nodes.mend()
    assert nodes.replies[2][-1] == ("aborted", 2)
    nodes.begin(2, 3)
    assert nodes.replies[2][-1] == ("granted", 3)
    assert [slot.step for slot in nodes.protocols[2].node.ranks[0].slots] == [1, 2, 3]
    kept = nodes.restorable()
    assert kept.stamp.step == 2
    nodes.begin(1, 3)
    for node in range(3):
        nodes.write(node)
    nodes.deliver_all()
    assert nodes.last_committed == [3, 3, 3]
    assert len([slot for slot in nodes.protocols[2].node.ranks[0].slots if slot.capacity]) == 2


def test_without_memory_for_what_is_in_doubt_a_snapshot_is_skipped() -> None:
    nodes = Nodes(2)
    nodes.take(1)
    all_hold(nodes, 2)
    nodes.unlink(1, 0)
    nodes.deliver_all()
    nodes.replace_smp(1)
    nodes.do(1, m.SkipStep(0, 2))
    nodes.mend()
    nodes.roomy = False
    nodes.begin(0, 3)
    assert nodes.replies[0][-1] == ("skipped", 3)


def test_training_waits_for_a_node_that_is_away_and_for_an_unreachable_one_not_at_all() -> None:
    nodes = Nodes(3)
    nodes.take(1)
    nodes.copy(2, 0, 1)  # node 2 has not begun it
    nodes.begin(1, 3)
    assert nodes.replies[1][-1] == ("granted", 2)
    nodes.now += 2 * SEAL_PATIENCE_S
    nodes.do(1, m.Tick())
    assert nodes.replies[1][-1] == ("skipped", 3)
    nodes.unlink(0, 2)
    nodes.begin(0, 3)
    assert nodes.replies[0][-1] == ("skipped", 3)
    nodes.link(0, 2)
    nodes.begin(0, 4)
    assert nodes.replies[0][-1] == ("skipped", 3)  # waits: the answer comes with the seal
    nodes.copy(2, 2)
    nodes.deliver_all()
    assert nodes.replies[0][-1] == ("granted", 4)


def test_what_was_lost_on_a_link_is_sent_again() -> None:
    nodes = Nodes(2)
    nodes.unlink(0, 1)
    nodes.copy(1)
    nodes.deliver_all()
    assert nodes.committed == [[], []]
    nodes.link(0, 1)
    nodes.deliver_all()
    assert nodes.committed == [[1], [1]]


@pytest.mark.parametrize(("seen", "verb"), [("same", "committed"), ("other", "aborted")])
def test_a_step_of_which_replicas_differ_is_given_up_by_all(seen: str, verb: str) -> None:
    nodes = Nodes(3)
    nodes.take(1)
    for node in range(3):
        nodes.begin(node, 2)
    nodes.write(0, claims=["", "same"])
    nodes.write(1, claims=["x", ""], seen=[[0, 1, seen]])
    nodes.write(2)
    nodes.deliver_all()
    assert [said[-1] for said in nodes.replies] == [(verb, 2)] * 3
    assert nodes.diverged == [[] if verb == "committed" else [[1, 0, 1]]] * 3
    found = nodes.restorable(lost=(1,))
    assert found.stamp.step == (2 if verb == "committed" else 1)


def test_a_step_already_held_is_refused_unless_it_was_resumed_from() -> None:
    nodes = Nodes(2)
    nodes.take(1)
    nodes.begin(0, 1)
    assert nodes.replies[0][-1] == ("refused", 1)
    nodes.regroup()
    nodes.begin(0, 1)
    assert nodes.replies[0][-1] == ("refused", 1)
    nodes.lose(())
    nodes.begin(0, 1)
    assert nodes.replies[0][-1] == ("granted", 1)


def test_a_rank_that_resumes_later_does_not_take_the_first_step_of_another_away() -> None:
    protocol = Protocol(2, 1, 1000.0, 0.0)
    roster = Nodes(2).roster(0) | {
        "first_rank": 0,
        "mirror_nodes": [[1], [1]],
        "mirrored_ranks": [],
    }
    for rank in range(2):
        protocol.handle(m.Hello(rank, 2, 1, __version__), 0.0)
        protocol.handle(m.Join(rank, roster), 0.0)
    protocol.handle(m.Resume(0, 0, 0), 0.0)
    protocol.handle(m.Begin(0, 0, 8), 0.0)
    protocol.handle(m.Allocated(0, 0, 8), 0.0)
    protocol.handle(m.Written(0, 0, "d", b"m"), 0.0)
    protocol.handle(m.Resume(1, 0, 0), 0.0)
    assert protocol.status()["slots"][0][0] == "written"
    protocol.handle(m.Join(0, roster | {"epoch": 2}), 0.0)  # all begin anew: it is void
    assert protocol.status()["slots"][0][0] == "empty"


def test_steps_of_another_number_of_nodes_are_found_with_the_sets_of_those() -> None:
    nodes = Nodes(3)
    nodes.take(1)
    (found,) = choose_step.candidates(nodes.inventories()[:2], [(0, 1)], 1, range(2), 2)
    assert found.sets == dict.fromkeys(range(3), ((0, 1, 2),))
    assert {*range(3)} - found.slots.keys() == {2}
    assert choose_step.candidates(nodes.inventories()[:1], [], 1, range(1), 1) == []


def test_other_nodes_do_not_choose_a_step_that_a_group_has_not_announced() -> None:
    nodes = Groups([3, 3], keep=2)
    for step in (1, 2):
        nodes.take(step)
    left = nodes.inventories()[1:]
    about = [(0, 1, 2, 3, 4)], 1, range(5), 5
    assert [each.stamp for each in choose_step.candidates(left, *about)] == [(1, 2), (1, 1)]
    for said in left[2:]:  # it had the manifests of step 2, and waited for parities
        said["slots"] = [held for held in said["slots"] if held["step"] == 1]
    (found,) = choose_step.candidates(left, *about)
    assert found.stamp == (1, 1)
    assert found.sets == {n: ((0, 1, 2),) if n < 3 else ((3, 4, 5),) for n in range(6)}


def test_a_step_is_put_together_by_the_groups_that_wrote_it_whatever_they_are_now() -> None:
    """A run went from nine nodes to seven, committed nothing, and is back, in other domains."""
    before, domains = node_groups(NINE, 1, 8), list("abcabcaab")
    seven = [Listening("h", 1, 2, "", group, 7) for group in before]
    now = node_groups(NINE, 1, 8, domains, held_groups(seven, 9))
    assert now == node_groups(NINE, 1, 8, domains) != before
    nodes = Groups([5, 4])
    nodes.groups = list(before)
    nodes.tree = [tree_neighbours(before, node) for node in range(9)]
    nodes.regroup()
    nodes.take(1)
    others = [(g, h) for group in before for g, h in combinations(group, 2)]
    apart = next(pair for pair in others if not any({*pair} <= {*group} for group in now))
    together = next(pair for group in now for pair in combinations(group, 2) if pair not in others)
    for lost, intact in ((apart, False), (together, True)):
        for group in now:
            found = choose_step.candidates(nodes.inventories(lost), [group], 1, group, 9)
            assert len(found) == intact
            for each in found:
                assert not each.former
                assert each.sets == {rank: (nodes.group_of(rank),) for rank in range(9)}


def test_a_rank_that_keeps_nothing_is_read_with_the_sets_of_its_group() -> None:
    nodes = Nodes(3)
    nodes.take(1)
    left = nodes.inventories()
    for said in left:  # two nodes stripe the state; the third rank is idle
        said["slots"] = [{**held, "nodes": 2, "sets": ((0, 1),)} for held in said["slots"]]
    (found,) = choose_step.candidates(left, [(0, 1, 2)], 1, range(3), 3)
    assert found.sets == dict.fromkeys(range(3), ((0, 1),))


def test_every_part_of_a_state_is_a_stripe_set() -> None:
    job = Job((Dim("ddp", 6, Kind.REPLICATE),), ranks_per_node=2)
    assert stripe_sets(sharding_groups(job)) == ((0, 2, 4), (1, 3, 5))


@pytest.mark.parametrize("damage", [{"epoch": "x"}, {"addresses": [1]}, {"mirrored_ranks": None}])
def test_a_roster_that_cannot_be_read_is_refused(damage: dict[str, object]) -> None:
    given = Nodes(2).roster(0)
    assert Roster.parse(given).peers == (1,)
    with pytest.raises(m.ProtocolViolation, match="Roster"):
        Roster.parse(given | damage)


def test_a_second_restore_in_a_row_drops_nothing_that_was_announced() -> None:
    nodes = Nodes(3)
    nodes.take(1)
    all_hold(nodes, 2)
    nodes.unlink(0, 1)
    nodes.unlink(1, 0)
    nodes.deliver_all()
    assert nodes.last_committed == [1, 1, 2]  # node 2 gives up step 1 for it
    nodes.regroup()  # a restore that fails, as a node cannot be read for a moment
    nodes.regroup()
    assert nodes.restorable().stamp == (1, 2)


def test_all_are_told_that_a_rank_got_no_memory_for_a_step() -> None:
    nodes = Nodes(3)
    nodes.take(1)
    nodes.copy(2, 1, 2)
    nodes.roomy = False
    nodes.protocols[0].node.ranks[0].slots[1].capacity = 0
    nodes.begin(0, 2)
    assert nodes.replies[0][-1] == ("refused", 2)
    nodes.deliver_all()
    assert [nodes.replies[node][-1] for node in (1, 2)] == [("aborted", 2)] * 2


def test_a_step_in_doubt_costs_a_slot_only_until_a_newer_one_is_committed() -> None:
    nodes = Nodes(3)
    nodes.take(1)
    all_hold(nodes, 2)
    nodes.unlink(1, 2)
    nodes.deliver_all()
    nodes.replace_smp(1)
    nodes.do(1, m.SkipStep(0, 2))
    nodes.mend()
    nodes.take(3)
    nodes.copy(4)
    nodes.begin(2, 5)
    slots = nodes.protocols[2].node.ranks[0].slots
    assert sum(slot.capacity > 0 for slot in slots) == 2
    assert nodes.replies[2][-1][0] == "granted"
    assert nodes.replies[2][-1] != ("granted", 5)  # it waits until all hold step 4


def test_after_a_restore_no_more_steps_are_kept_than_before() -> None:
    nodes = Nodes(2)
    nodes.take(1)
    all_hold(nodes, 2)
    nodes.regroup()
    nodes.do(0, m.Resume(0, 1, 2))
    assert nodes.protocols[0].status()["clean"] == [[2]]


def test_a_rank_does_not_wait_for_one_beside_it_that_begins_no_step_any_more() -> None:
    protocol = Protocol(2, 1, 1e9, 0.0)
    for rank in range(2):
        protocol.handle(m.Hello(rank, 2, 1, __version__), 0.0)
    protocol.handle(m.Begin(0, 1, 8), 0.0)
    protocol.handle(m.Allocated(0, 0, 8), 0.0)
    protocol.handle(m.Written(0, 1, "d", b"m"), 0.0)
    assert protocol.handle(m.Begin(0, 2, 8), 0.0) == []  # it waits for the other's step 1
    assert protocol.handle(m.Tick(), SEAL_PATIENCE_S) == []
    told = protocol.handle(m.Tick(), SEAL_PATIENCE_S + 1)
    assert told[0] == m.Reply(0, "aborted", told[0].fields)
    assert protocol.node.ranks[0].dirty().step == 2


def test_an_smp_says_itself_that_it_replaced_one_that_another_node_never_met() -> None:
    nodes = Nodes(3)
    nodes.take(1)
    all_hold(nodes, 2)
    nodes.unlink(2, 1)  # node 1 will not hear that node 2 holds it
    nodes.deliver_all()
    assert nodes.last_committed == [2, 1, 2]
    nodes.replace_smp(2)
    nodes.unknown.discard((2, 1))  # nor has it met the SMP that is lost
    nodes.do(2, m.SkipStep(0, 2))
    nodes.mend()
    assert nodes.replies[1][-1] == ("aborted", 2)
    assert nodes.restorable().stamp.step == 2


def test_that_an_smp_was_replaced_does_not_count_in_a_newer_epoch() -> None:
    nodes = Shippers(2)
    nodes.take(1)
    nodes.replace_smp(1)
    nodes.link(1, 0)
    late = nodes.wires[1, 0][0]
    assert isinstance(late, m.PeerReplaced)
    nodes.mend()
    assert nodes.lose(()) == 1
    nodes.begin_all(1)
    nodes.write(1)
    nodes.deliver_frames()
    nodes.do(0, late)  # or node 0 would forget that node 1 waits for its blocks
    nodes.write(0)
    nodes.deliver_all()
    assert nodes.replies[0][-1] == nodes.replies[1][-1] == ("committed", 1)
