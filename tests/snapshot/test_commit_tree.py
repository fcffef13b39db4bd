"""The commit of a run of several parity groups: what one of them lacks, none of them relies on."""

import random

import pytest
from case_loops import fuzz_after
from snapshot_groups import Groups
from snapshot_nodes import Nodes

from holdfast.snapshot.protocol import messages as m
from holdfast.snapshot.protocol.checkpoint_schedule import Disk, combined
from holdfast.snapshot.protocol.commit_tree import LATE_S
from holdfast.snapshot.protocol.steps import SEAL_PATIENCE_S
from holdfast.snapshot.restore import choose_step

# Sizes of the groups, parities, how many steps are kept, and the fan-out of the tree.
Shape = tuple[tuple[int, ...], int, int, int]
SHAPES: list[Shape] = [
    ((2, 2), 1, 1, 8),
    ((3, 2), 1, 1, 8),
    ((2, 2, 3), 1, 1, 1),
    ((3, 3, 3, 3), 2, 1, 2),
    ((2, 3), 1, 2, 8),
]
TREE = ("sealed", "void", "committed", "late")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", fuzz_after(range(5), 1, 3))
def test_what_was_committed_survives_every_loss_at_every_moment(shape: Shape, seed: int) -> None:
    draw = random.Random(f"{shape}/{seed}")
    nodes = Groups(*shape)
    nodes.take(1)
    steps = [1] * nodes.count
    moves = nodes.campaign_moves * nodes.count
    for number in range(4 * moves):
        if number >= moves and nodes.newest > 1:
            break  # some draws commit little
        nodes.move(draw, steps)
        if nodes.newest >= 0 and number % 6 == 0:
            nodes.check_losses(draw)
    assert nodes.newest > 1
    nodes.check_going_on(max(steps))


def slots(nodes: Groups, node: int) -> list[int]:
    """Return the steps that a node holds, oldest first."""
    return sorted(s.step for s in nodes.protocols[node].node.ranks[0].slots if s.step >= 0)


def hear(nodes: Groups, *wires: tuple[int, int]) -> None:
    """Deliver all that is said on these wires, and nothing else."""
    while busy := [wire for wire in wires if nodes.wires[wire]]:
        for wire in busy:
            nodes.deliver(*wire)


def cluster(nodes: Groups, node: int) -> dict[str, object]:
    """Return what a node says of the others."""
    found = nodes.protocols[node].cluster_commit.status()
    assert found is not None
    return found


def test_no_group_gives_a_step_up_before_all_groups_have_sealed_the_next() -> None:
    nodes = Groups((2, 2, 2), fan_out=1)
    nodes.take(1)
    nodes.copy(2, 0, 1, 2, 3, 4)  # node 5 has not begun it
    nodes.deliver_all()
    assert nodes.last_committed == [1] * 6
    nodes.begin(0, 3)  # both slots are needed until all have sealed step 2
    assert nodes.writing[0] is None
    assert [slots(nodes, node) for node in range(5)] == [[1, 2]] * 5
    found = nodes.restorable(lost=(0, 3, 5))
    assert found is not None
    assert found.stamp.step == 1
    nodes.copy(2, 5)
    nodes.deliver_all()
    assert nodes.last_committed == [2] * 6
    assert nodes.writing[0] == 3
    # One message upwards for a node, one downwards, and one to the next node of its group.
    sent = [(out.verb, out.node) for out in outs(nodes, 3)]
    assert sorted(sent) == sorted([("sealed", 1), ("committed", 5), ("committed", 2)])


def outs(nodes: Groups, node: int) -> list[m.ToPeer]:
    """Return the messages of the commit tree that a node sends while step 3 is committed."""
    found: list[m.ToPeer] = []
    send = nodes._send

    def noted(one: int, peer: int, verb: str, fields: dict[str, object], blob: bytes) -> None:
        if one == node and verb in TREE:
            found.append(m.ToPeer(peer, verb, fields))
        send(one, peer, verb, fields, blob)

    nodes._send = noted  # type: ignore[method-assign]
    for each in range(nodes.count):
        if nodes.writing[each] != 3:
            nodes.begin(each, 3)
    for each in range(nodes.count):
        nodes.write(each)
    nodes.deliver_all()
    assert nodes.last_committed == [3] * nodes.count
    nodes._send = send  # type: ignore[method-assign]
    return found


def test_one_group_sends_none_of_these_messages() -> None:
    class Watched(Nodes):
        verbs: set[str] = set()  # noqa: RUF012

        def _send(
            self, node: int, peer: int, verb: str, fields: dict[str, object], blob: bytes
        ) -> None:
            self.verbs.add(verb)
            super()._send(node, peer, verb, fields, blob)

    nodes = Watched(3)
    nodes.take(1)
    nodes.copy(2, 0, 1)
    nodes.begin(0, 3)
    nodes.do(2, m.SkipStep(0, 2))
    nodes.now += 2 * LATE_S
    nodes.do(0, m.Tick())
    nodes.deliver_all()
    assert nodes.verbs == {"wrote", "mirror", "holds", "passed"}


@pytest.mark.parametrize("cut", [(0, 2), (2, 0)])
def test_a_broken_edge_of_one_tree_is_made_up_for_by_the_next_node_of_the_group(
    cut: tuple[int, int],
) -> None:
    nodes = Groups((2, 2, 2), fan_out=1)  # the trees are 0-2-4 and 1-3-5
    nodes.take(1)
    nodes.unlink(*cut)
    nodes.take(2)
    assert nodes.last_committed == [2] * 6
    nodes.link(*cut)
    nodes.take(3)
    assert nodes.last_committed == [3] * 6


@pytest.mark.parametrize("mended", [(2, 0), (3, 1)])
def test_what_a_broken_edge_of_each_tree_has_kept_back_is_said_again(
    mended: tuple[int, int],
) -> None:
    nodes = Groups((2, 2))
    nodes.take(1)
    nodes.unlink(2, 0)
    nodes.unlink(3, 1)
    nodes.take(2)
    assert nodes.last_committed == [1] * 4
    nodes.link(*mended)
    nodes.deliver_all()
    assert nodes.last_committed == [2] * 4


def test_a_lost_smp_of_the_root_delays_nothing_that_its_group_had_sealed() -> None:
    nodes = Groups((2, 2))
    nodes.take(1)
    nodes.copy(2)
    hear(nodes, (0, 1), (1, 0), (2, 3), (3, 2))  # sealed in both groups, and not said upwards
    nodes.replace_smp(0)
    nodes.do(0, m.SkipStep(0, 2))
    nodes.deliver_all()
    assert nodes.last_committed[1:] == [2, 2, 2]
    found = nodes.restorable(lost=(0, 2))
    assert found is not None
    assert found.stamp.step == 2
    nodes.mend()
    nodes.take(3)
    assert nodes.last_committed == [3] * 4


@pytest.mark.parametrize("skipping", range(6))
def test_a_step_that_a_node_skipped_is_given_up_by_all_groups(skipping: int) -> None:
    nodes = Groups((2, 2, 2), fan_out=1)
    nodes.take(1)
    nodes.copy(2, *(node for node in range(6) if node != skipping))
    nodes.deliver_all()
    nodes.begin(skipping, 2)
    nodes.do(skipping, m.SkipStep(0, 2))  # its copy was torn, and it was the last one
    nodes.deliver_all()
    for node in set(range(6)) - {skipping}:
        assert nodes.replies[node][-1] == ("aborted", 2)
        assert slots(nodes, node) == [1]  # no node can have seen it committed
    nodes.take(3)
    assert nodes.last_committed == [3] * 6


@pytest.mark.parametrize("first", [0, 2, 4])
def test_a_step_of_which_replicas_of_one_group_differ_is_given_up_by_all(first: int) -> None:
    nodes = Groups((2, 2, 2), fan_out=1)
    nodes.take(1)
    nodes.begin_all(2)
    nodes.write(first, claims=["x", ""])
    nodes.write(first + 1, claims=["", "y"], seen=[[first, 0, "other"]])
    for node in set(range(6)) - {first, first + 1}:
        nodes.write(node)
    nodes.deliver_all()
    assert [replies[-1] for replies in nodes.replies] == [("aborted", 2)] * 6
    nodes.take(3)
    assert nodes.last_committed == [3] * 6


def test_after_an_smp_was_replaced_other_groups_keep_what_may_have_been_committed() -> None:
    nodes = Groups((2, 2))
    nodes.take(1)
    nodes.copy(2)
    # The root group has committed step 2, and the other has not heard of it.
    hear(nodes, (0, 1), (1, 0), (2, 3), (3, 2), (2, 0), (3, 1))
    nodes.unlink(1, 0)
    nodes.unlink(1, 3)
    assert nodes.last_committed == [2, 2, 1, 1]
    nodes.wires[0, 1].clear()
    nodes.wires[0, 2].clear()
    nodes.begin(1, 3)  # written where step 1 was
    nodes.replace_smp(0)
    nodes.do(0, m.SkipStep(0, 2))
    nodes.link(0, 2)
    nodes.link(2, 0)
    nodes.deliver_all()
    assert nodes.replies[2][-1] == ("aborted", 2)
    assert slots(nodes, 2) == [1, 2]
    found = nodes.restorable(lost=(0,))
    assert found is not None
    assert found.stamp.step == 2


def test_nodes_that_a_step_waits_for_are_named_everywhere() -> None:
    nodes = Groups((2, 2, 2), fan_out=1)
    nodes.take(1)
    nodes.copy(2, 0, 1, 2, 3, 5)  # node 4 has not begun it
    nodes.deliver_all()
    for _ in range(2):
        for node in range(6):
            nodes.do(node, m.Tick())
        nodes.deliver_all()
        nodes.now += max(LATE_S, SEAL_PATIENCE_S) + 0.1
    assert [cluster(nodes, node)["late"] for node in range(6)] == [[4]] * 6
    nodes.begin(0, 3)
    skipped = nodes.protocols[0].handle(m.Tick(), nodes.now + 2 * SEAL_PATIENCE_S)
    reasons = [out.fields["reason"] for out in skipped if isinstance(out, m.Reply)]
    assert reasons == ["nodes [4] have not written step 2 yet"]
    nodes.copy(2, 4)
    nodes.deliver_all()
    assert nodes.last_committed == [2] * 6
    assert [cluster(nodes, node)["late"] for node in range(6)] == [[]] * 6


@pytest.mark.parametrize("busy", [None, 0, 3, 5])
def test_all_groups_write_the_same_checkpoint_or_none_does(busy: int | None) -> None:
    nodes = Groups((2, 2, 2), fan_out=1)
    for node in set(range(6)) - {busy}:
        nodes.do(node, m.Due(1, every=1, after=0, steps=[]))
    nodes.take(1)
    leased = [nodes.protocols[node].status()["leased"] for node in range(6)]
    assert leased == [[1] if busy is None else []] * 6


def test_ranks_are_found_wherever_they_are_if_nodes_are_numbered_anew() -> None:
    nodes = Groups((2, 2))
    nodes.take(1)
    held = nodes.inventories()[::-1]
    for group in nodes.groups:
        (found,) = choose_step.candidates(held, [group], 1, group, 4)
        assert {rank: found.slots[rank] for rank in group} == {rank: 3 - rank for rank in group}


def test_what_is_said_of_disks_together_is_what_each_says() -> None:
    disks = [Disk(10, 20, (10, 20), True), Disk(10, 10, (10,), True), Disk(10, 20, (20, 10), True)]
    whole = combined(disks)
    assert whole == Disk(10, 20, (10,), True)
    assert combined([combined(disks[:2]), combined(disks[2:])]) == whole
    assert combined([whole, None]) is None


@pytest.mark.parametrize("disk", [[1], ["x", 2, [], True], [1, 2, 3, True]])
def test_a_disk_that_cannot_be_read_costs_the_link_only(disk: list[object]) -> None:
    nodes = Groups((2, 2))
    with pytest.raises(m.ProtocolViolation, match="Disk cannot be read"):
        nodes.do(0, m.PeerSealed(2, 1, 1, disk, firm=True))
