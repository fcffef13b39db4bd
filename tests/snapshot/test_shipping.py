"""Blocks shipped to the keepers of their parities: what was committed survives every loss."""

import random
from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from snapshot_shares import flat_of, never, parity_digests, seat_of, small_buckets
from snapshot_shippers import CHUNK_BYTES, Shippers, small_chunks, state_of

from holdfast.snapshot.client import shards
from holdfast.snapshot.layout import shares
from holdfast.snapshot.layout.groups import Mode
from holdfast.snapshot.layout.shares import Share
from holdfast.snapshot.node import memory
from holdfast.snapshot.parity import erasure_code
from holdfast.snapshot.parity.stripes import Striping
from holdfast.snapshot.protocol import cluster_commit
from holdfast.snapshot.protocol import messages as m
from holdfast.snapshot.protocol.cluster_steps import Sizes
from holdfast.snapshot.protocol.parity_stream import (
    BlockTransfer,
    ParityPlan,
    ParityRange,
    ParityReceiver,
    chunks,
)


@pytest.fixture(autouse=True)
def _small() -> Iterator[None]:
    with small_chunks():
        yield


layouts = st.integers(2, 6).flatmap(
    lambda nodes: st.tuples(
        st.lists(st.integers(0, 400), min_size=nodes, max_size=nodes),
        st.integers(1, min(2, nodes - 1)),
    )
)


@given(layouts, st.randoms(use_true_random=False))
def test_what_all_ship_are_the_parities(layout: tuple[list[int], int], draw: random.Random) -> None:
    sizes, parities = layout
    striping = Striping.of_shards(sizes, parities)
    buffers = [np.zeros(striping.buffer_nbytes, np.uint8) for _ in sizes]
    for node, buffer in enumerate(buffers):
        buffer[: sizes[node]] = np.frombuffer(draw.randbytes(sizes[node]), np.uint8)
    peers = tuple(10 + node for node in range(len(sizes)))
    loads = [shards.plan_parities(striping, node, peers, 64) for node in range(len(sizes))]
    sent = [piece for node, load in enumerate(loads) for piece in _pieces(node, load)]
    draw.shuffle(sent)
    intakes = [ParityReceiver(load) for load in loads]
    for node, piece in sent + sent:
        keeper = peers.index(piece.keeper)
        if intakes[keeper].take(peers[node], piece.there, piece.nbytes):
            room = buffers[keeper][piece.there : piece.there + piece.nbytes]
            block = buffers[node][piece.start : piece.start + piece.nbytes]
            memory.accumulate(room.data, block.tobytes(), piece.coefficient)
    for node, buffer in enumerate(buffers):
        assert intakes[node].due_nbytes == 0
        for number, coding in enumerate(striping.encodings(node)):
            blocks = [buffers[f.node][f.offset : f.offset + f.nbytes] for f in coding.sources]
            expected = np.empty(coding.target.nbytes, np.uint8)
            erasure_code.encode(number, expected, blocks)
            start = coding.target.offset
            assert np.array_equal(buffer[start : start + coding.target.nbytes], expected)


def _pieces(node: int, load: ParityPlan) -> list[tuple[int, BlockTransfer]]:
    found = list(chunks((node, shipment) for shipment in load.transfers))
    assert all(0 < piece.nbytes <= CHUNK_BYTES for _, piece in found)
    return found


@pytest.mark.parametrize("parities", [1, 2])
def test_parities_are_digested_as_a_rebuild_expects_them(parities: int) -> None:
    with small_buckets():
        flat = flat_of({"weight": torch.arange(300.0)})
        entries = shares.plan(flat)
        share = Share.of(seat_of(3, 1, 1, 0, Mode.REDUCED), parities, [400, 1200, 2000])
        buffer = torch.zeros(share.buffer_nbytes, dtype=torch.uint8)
        shards.write(flat, entries, share, buffer, never)
        load = shards.plan_parities(share.striping, 1, (0, 1, 2), shares.BUCKET_BYTES)
        intake = ParityReceiver(load)
        intake.due_nbytes = 0
        while bucket := intake.undigested():
            held = buffer[bucket[0] : sum(bucket)].numpy()
            intake.digests.append(memory.digest_of(held.data))
        assert intake.complete
        assert intake.by_stripe() == parity_digests(share, buffer)


def test_what_is_not_due_is_refused() -> None:
    intake = ParityReceiver(ParityPlan((), (ParityRange(0, 64, 128),), 256, 64))
    assert intake.take(1, 64, 100)
    assert not intake.take(1, 64, 100)
    for start, nbytes in [(63, 1), (100, 100), (64, 0), (64, 200)]:
        with pytest.raises(m.ProtocolViolation, match="not due"):
            intake.take(2, start, nbytes)
    assert intake.due_nbytes == 156


@pytest.mark.parametrize(
    "damage",
    [
        {"ranges": None},
        {"transfers": [[0, 1]]},
        {"transfers": [[0, 65, 1, 0, 1]]},
        {"transfers": [[-1, 1, 1, 0, 1]]},
        {"bucket_nbytes": 0},
    ],
)
def test_a_parity_plan_that_cannot_be_meant_is_refused(damage: dict[str, object]) -> None:
    given = vars(ParityPlan(((0, 64, 1, 0, 1),), (ParityRange(0, 0, 64),), 64, 64))  # type: ignore[arg-type]
    assert ParityPlan.parse(given, 64).due_nbytes == 64
    with pytest.raises(m.ProtocolViolation, match=r"[Pp]arity ?[Pp]lan"):
        ParityPlan.parse(given | damage, 64)


def test_sizes_of_a_step_are_known_once_all_said_theirs() -> None:
    sizes = Sizes()
    sizes.know(5, 0, 100, [1])
    assert sizes.of(5, [0, 3]) is None
    sizes.know(5, 3, 70)
    assert sizes.of(5, [3, 0]) == [70, 100]
    assert list(sizes.told(1)) == [(5, 0, 100)]
    assert list(sizes.told(2)) == []
    for step in range(6, 200):
        sizes.know(step, 0, step, [1])
    assert len(list(sizes.told(1))) == 4


def test_sizes_that_change_at_the_first_step_are_agreed_upon() -> None:
    nodes = Shippers(3)
    for step in range(3):
        nodes.take(step)
        sizes = tuple(len(state_of(node, step)) for node in range(3))
        assert {nodes.striping[node, step].shard_nbytes for node in range(3)} == {sizes}
        for lost in nodes.losses():
            assert nodes.check_loss(lost).stamp.step == step


def test_a_rank_that_waits_for_sizes_no_more_skips_the_step() -> None:
    nodes = Shippers(2)
    nodes.begin(0, 1)
    nodes.give_up(0)
    assert nodes.replies[0][-1] == ("skipped", 1)
    nodes.begin(1, 1)
    nodes.deliver_all()
    assert ("granted", 1) in nodes.replies[1]
    nodes.give_up(1)  # it has its answer
    assert nodes.replies[1][-1] == ("granted", 1)
    nodes.take(2)
    assert nodes.committed == [[2], [2]]


def test_sizes_lost_on_a_link_are_sent_again() -> None:
    nodes = Shippers(2)
    nodes.unlink(0, 1)
    for node in range(2):
        nodes.begin(node, 1)
    nodes.deliver_all()
    assert nodes.writing == [1, None]
    nodes.link(0, 1)
    nodes.deliver_all()
    assert nodes.writing == [1, 1]


def test_chunks_lost_on_a_link_are_sent_again_and_added_once() -> None:
    for way, arrived in product([(0, 1), (1, 0)], range(4)):
        nodes = Shippers(2)
        nodes.write_all(1)
        for _ in range(arrived):
            nodes.work(0)
            nodes.deliver(0, 1)
        nodes.work(0)
        assert nodes.chunks()
        nodes.unlink(*way)
        nodes.deliver_all()
        nodes.link(*way)
        nodes.deliver_all()
        assert nodes.committed == [[1], [1]]
        for lost in nodes.losses():
            nodes.check_loss(lost)


def test_a_chunk_that_comes_twice_would_undo_a_parity() -> None:
    nodes = Shippers(2)
    nodes.write_all(1)
    nodes.work(0)
    (_, chunk), *_ = nodes.chunks()
    nodes.deliver_all()
    found = nodes.check_loss((0,))
    nodes.do(1, chunk)
    nodes.check(found)
    nodes.carry_out(1, m.Accumulate(0, nodes.granted[1], chunk.start, 1, chunk.blob))
    with pytest.raises(AssertionError):
        nodes.check(found)
    # One of an older epoch is for nothing.
    nodes.lose(())
    before = {slot: room.copy() for slot, room in nodes.memory[1].items()}
    nodes.do(1, chunk)
    assert all(np.array_equal(nodes.memory[1][slot], room) for slot, room in before.items())


def test_an_smp_that_took_the_place_of_a_lost_one_is_sent_all_again() -> None:
    nodes = Shippers(2)
    nodes.write_all(1)
    nodes.work(0)
    nodes.deliver(0, 1)
    nodes.unlink(0, 1)
    nodes.unlink(1, 0)
    nodes.protocols[1] = nodes._fresh()
    nodes.do(1, m.Join(0, nodes.roster(1)))
    nodes.link(0, 1)
    nodes.link(1, 0)
    nodes.work(0)  # before there is a slot that it could be added to
    nodes.begin(1, 1)
    nodes.deliver_all()
    nodes.write(1)
    nodes.deliver_all()
    assert nodes.committed == [[1], [1]]
    nodes.check_loss((0,))


@pytest.mark.parametrize(("soon_nbytes", "answer"), [(50, "skipped"), (10_000, None)])
def test_training_does_not_wait_for_what_is_shipped_for_long(
    monkeypatch: pytest.MonkeyPatch, soon_nbytes: int, answer: str | None
) -> None:
    monkeypatch.setattr(cluster_commit, "SOON_BYTES", soon_nbytes)
    nodes = Shippers(2)
    nodes.take(1)
    nodes.write_all(2)
    nodes.begin_all(3)
    said = [reply for reply in nodes.replies[0] if reply[1] == 3 and reply[0] != "sizes"]
    assert said == ([(answer, 3)] if answer else [])
    nodes.deliver_all()
    assert nodes.committed == [[1, 2], [1, 2]]
    if not answer:
        assert nodes.writing == [3, 3]


def test_a_node_that_passed_a_step_over_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_commit, "SOON_BYTES", 0)
    nodes = Shippers(2)
    nodes.take(1)
    nodes.begin_all(2)
    nodes.write(0)
    nodes.begin_all(3)  # node 1's copy of step 2 was torn
    nodes.deliver_all()
    assert nodes.asking[0]
    nodes.write(1)
    nodes.deliver_all()
    nodes.write(0)
    nodes.deliver_all()
    assert nodes.committed == [[1, 3], [1, 3]]


def test_nothing_is_shipped_before_the_keeper_has_cleared_its_parity() -> None:
    nodes = Shippers(2)
    nodes.begin_all(1)
    nodes.write(0)
    nodes.deliver_frames()
    assert not nodes.work(0)
    nodes.write(1)
    nodes.deliver(1, 0)  # "wrote"
    assert nodes.work(0)


def test_a_step_that_was_passed_over_is_shipped_no_more() -> None:
    nodes = Shippers(2, keep=2)
    nodes.write_all(1)
    nodes.do(0, m.PeerWrote(1, nodes.epoch, 3))
    nodes.protocols[0].cluster_commit.cluster.steps.wrote[1].discard(1)  # type: ignore[union-attr]
    nodes.do(0, m.PeerWrote(1, nodes.epoch, 4))
    assert nodes.replies[0][-1] == ("aborted", 1)
    assert not nodes.work(0)


def test_a_step_that_was_given_up_does_not_hold_up_the_next() -> None:
    nodes = Shippers(3)
    nodes.take(1)
    nodes.begin_all(2)
    nodes.write(0)
    nodes.write(1)
    nodes.do(2, m.SkipStep(0, 2))
    nodes.writing[2] = None
    nodes.deliver_frames()
    assert nodes.replies[0][-1] == ("aborted", 2)
    nodes.write_all(3)
    assert nodes.work(0)
    assert {chunk.step for _, chunk in nodes.chunks()} == {3}  # type: ignore[attr-defined]
