"""What is lost or damaged within the parities comes back bit for bit; of the rest it is said what
is missing."""

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, combinations
from threading import Barrier
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from snapshot_shares import (
    POISON,
    Group,
    Memories,
    Spec,
    flat_of,
    reduced,
    replicas,
    small_buckets,
    stable_of,
    states,
    tree_digest,
)

from holdfast.digest.tensors import state_digest
from holdfast.errors import SnapshotCorrupt, SnapshotLost, SnapshotMismatch
from holdfast.snapshot.client import shards
from holdfast.snapshot.layout import flat_buffer, shares
from holdfast.snapshot.layout.manifest import Manifest
from holdfast.snapshot.layout.shares import BUCKET_BYTES, ShareManifest
from holdfast.snapshot.parity import isal
from holdfast.snapshot.parity.stripes import Fragment
from holdfast.snapshot.restore import assembly, stripe_decode
from holdfast.snapshot.restore.assembly import Assembled, Part, assemble, assemble_parts

PARITIES = st.integers(1, 2 if isal.available() else 1)
needs_isal = pytest.mark.skipif(
    not isal.available(),
    reason="a second parity needs ISA-L: pip install 'torch-holdfast[parity]'",
)
EITHER_PARITIES = [1, pytest.param(2, marks=needs_isal)]


@pytest.fixture(autouse=True, scope="module")
def small() -> Iterator[None]:
    with small_buckets():
        yield


def group_of(nodes: int = 3, parities: int = 1, parts: int = 1, numel: int = 2000) -> Group:
    tensors = [{"a": torch.arange(numel), "b": torch.arange(numel) * 3} for _ in range(nodes)]
    return replicas([flat_of(one, torch.full((5,), 0.5)) for one in tensors], parities, parts)


def original(numel: int = 2000) -> str:
    tensors = {"a": torch.arange(numel), "b": torch.arange(numel) * 3}
    return tree_digest(tensors, torch.full((5,), 0.5))


def restored(group: Group, lost: tuple[int, ...] = (), rank: tuple[int, int] = (0, 0)) -> str:
    assembled = assemble_parts(group.parts_left(lost), group.alive(lost))
    return tree_of(group.saved[rank].described, assembled)


def tree_of(described: ShareManifest, assembled: Assembled) -> str:
    tensors = assembly.tensors(described, assembled.state)
    return state_digest(flat_buffer.unflatten(described.manifest.skeleton, tensors))


def losses(nodes: int, parities: int) -> Iterator[tuple[int, ...]]:
    return chain.from_iterable(combinations(range(nodes), k) for k in range(parities + 1))


def fragments(group: Group, *, parity: bool, nodes: set[int] | None = None) -> list[Fragment]:
    striping = group.saved[0, 0].described.share.striping
    every = [striping.fragment(s, n) for s in range(group.nodes) for n in range(group.nodes)]
    return [
        fragment
        for fragment in every
        if (fragment.role >= striping.data_blocks) == parity
        and fragment.nbytes
        and (nodes is None or fragment.node in nodes)
    ]


def flip(group: Group, fragment: Fragment, at: int = 0, part: int = 0) -> None:
    group.saved[part, fragment.node].buffer[fragment.offset + at] ^= 1


@given(states, st.integers(2, 6), PARITIES, st.integers(1, 3))
def test_every_loss_within_the_parities_comes_back_bit_for_bit(
    state: list[Spec], nodes: int, parities: int, parts: int
) -> None:
    nodes = max(nodes, parities + 1)
    private = [torch.tensor([node + 0.25]) for node in range(nodes)]
    flats = [flat_of(stable_of(state), private[node]) for node in range(nodes)]
    group = replicas(flats, parities, parts)
    stable = stable_of(state)
    plain = flat_buffer.flatten({"stable": stable}).tensors
    for lost in losses(nodes, parities):
        assembled = assemble_parts(group.parts_left(lost), group.alive(lost))
        for node in (*lost, (lost[0] + 1) % nodes if lost else 0):
            found = tree_of(group.saved[0, node].described, assembled)
            assert found == tree_digest(stable, private[node]), (lost, node)
        assert set(assembled.report.lost) == set(lost)
        assert assembled.report.rebuilt_nodes <= set(lost)
        if len(plain) and lost == (0,) and sum(tensor.numel() for tensor in plain):
            assert assembled.report.rebuilt_bytes


@given(states, st.integers(2, 5), PARITIES, st.data())
def test_states_of_their_own_come_back_too(
    state: list[Spec], nodes: int, parities: int, data: st.DataObject
) -> None:
    nodes = max(nodes, parities + 1)
    each = [stable_of(data.draw(st.permutations(state))[: node + 1]) for node in range(nodes)]
    parts = data.draw(st.integers(1, 2))
    group = reduced([flat_of(stable) for stable in each], parities, parts)
    for lost in losses(nodes, parities):
        left, alive = group.parts_left(lost), group.alive(lost)
        for node in range(nodes):
            found = assemble_parts(left, alive, node=node)
            assert tree_of(group.saved[0, node].described, found) == tree_digest(each[node])


def test_large_shares_in_buckets_of_full_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "BUCKET_BYTES", BUCKET_BYTES)
    monkeypatch.setattr(shards, "CHUNK_BYTES", 512 * 2**10)
    sizes = (BUCKET_BYTES * 5 + 7, 3, BUCKET_BYTES * 4)
    state = [Spec(torch.uint8, [size // 3], "plain", size) for size in sizes]
    group = replicas([flat_of(stable_of(state)) for _ in range(3)], 1, 1)
    assert len(group.saved[0, 0].described.digests.data[1]) > shares.DIGEST_BYTES
    for lost in losses(3, 1):
        assert restored(group, lost) == tree_digest(stable_of(state))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tensors_on_a_device_are_staged() -> None:
    state = [Spec(torch.float32, [40, 7], kind, 5) for kind in ("plain", "strided", "scalar")]
    here = stable_of(state)
    there = {**here, "tensors": {name: t.cuda() for name, t in here["tensors"].items()}}
    there["tied"] = [there["tensors"]["t0"]]
    group = replicas([flat_of(there) for _ in range(3)], 1, 1)
    for lost in losses(3, 1):
        assert restored(group, lost) == tree_digest(here)


@pytest.mark.parametrize("parities", EITHER_PARITIES)
def test_memory_that_nobody_wrote_shows_nowhere(
    parities: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = group_of(4, parities, parts=2)
    part, wiped = group.part_left(0, (1,)), torch.full((16000,), POISON, dtype=torch.uint8)
    assert state_digest(wiped) != state_digest(assemble(part.shares, [0, 2, 3], part.source).state)
    original_empty = np.empty
    monkeypatch.setattr(np, "empty", lambda n, t: original_empty(n, t) | POISON)
    for lost in losses(4, parities):
        parts = group.parts_left(lost)
        wiped.fill_(POISON)
        into = wiped[: parts[0].shares[0].share.slice_of(0).nbytes]
        done = assemble(parts[0].shares, group.alive(lost)[0], parts[0].source, into=into)
        assert done.state is into
        assert restored(group, lost) == original()


def test_clean_memory_is_read_once_and_nothing_is_reported() -> None:
    for nodes in range(2, 7):
        group = group_of(nodes)
        part = group.part_left(0)
        report = assemble(part.shares, range(nodes), part.source).report
        assert report == stripe_decode.Report(fetched_bytes=32000)
        assert len(part.source.reads) == len(set(part.source.reads))


@given(st.integers(2, 6), PARITIES, st.data())
def test_damage_within_the_parities_is_found_named_and_made_good(
    nodes: int, parities: int, data: st.DataObject
) -> None:
    nodes = max(nodes, parities + 1)
    group = group_of(nodes, parities)
    lost = tuple(data.draw(st.sampled_from(list(losses(nodes, parities)))))
    left = set(range(nodes)) - set(lost)
    stripe = data.draw(st.integers(0, nodes - 1))
    column = [f for p in (0, 1) for f in fragments(group, parity=bool(p), nodes=left)]
    column = [fragment for fragment in column if fragment.stripe == stripe]
    victims = data.draw(st.permutations(column))[: parities - len(lost)]
    for victim in victims:
        flip(group, victim, data.draw(st.integers(0, min(255, victim.nbytes - 1))))
    assembled = assemble_parts(group.parts_left(lost), group.alive(lost))
    assert tree_of(group.saved[0, 0].described, assembled) == original()
    blocks = [v for v in victims if v.role < nodes - parities]
    report = assembled.report
    # A damaged parity is found only where it is needed.
    assert len(blocks) <= report.damaged_buckets <= len(victims)
    assert report.rebuilt_nodes >= {block.node for block in blocks}
    for block in blocks:
        named = f"node {block.node}'s block of stripe {stripe}, bucket 0, with stable."
        assert any(line.startswith(named) for line in report.damaged)


def test_a_copy_that_went_wrong_is_found_and_made_good(monkeypatch: pytest.MonkeyPatch) -> None:
    copy, gone_wrong = shards.Live.copy, []

    def copy_and_flip(live: Any, start: int, stop: int, target: Any, *rest: Any) -> None:
        copy(live, start, stop, target, *rest)
        if not gone_wrong:
            gone_wrong.append(len(target))
            target[5] ^= 1

    monkeypatch.setattr(shards.Live, "copy", copy_and_flip)
    group = group_of()
    monkeypatch.undo()
    assert gone_wrong
    assembled = assemble_parts(group.parts_left(), group.alive())
    assert tree_of(group.saved[0, 0].described, assembled) == original()
    assert (assembled.report.damaged_buckets, assembled.report.rebuilt_nodes) == (1, {0})


def test_with_the_digests_not_looked_at_damage_gets_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = group_of()
    flip(group, fragments(group, parity=False)[0])
    assert restored(group) == original()
    monkeypatch.setattr(stripe_decode.Fetcher, "intact", lambda *_: True)
    assert restored(group) != original()


@pytest.mark.parametrize("lost", [(), (1,)])
def test_damage_beyond_the_parities_is_refused_by_name(lost: tuple[int, ...]) -> None:
    group = group_of()
    striping = group.saved[0, 0].described.share.striping
    column = [f for f in (striping.fragment(0, n) for n in range(3)) if f.node not in lost]
    block = next(fragment for fragment in column if fragment.role < 2)
    parity = next(fragment for fragment in column if fragment.role == 2)
    for fragment in (block, parity):
        flip(group, fragment, 300)
    with pytest.raises(SnapshotCorrupt) as caught:
        restored(group, lost)
    text = str(caught.value)
    assert "stripe 0, bucket 1 cannot be rebuilt with 1 parities" in text
    assert f"node {block.node}'s block of stripe 0, bucket 1, with stable." in text
    assert "reload a persisted checkpoint" in text
    if lost:
        assert re.search("node 1's block of stripe 0, bucket 1, with stable.[ab]: it is gone", text)
    else:
        assert f"node {parity.node}'s parity of stripe 0, bucket 1: it does not match" in text


@pytest.mark.parametrize("parities", EITHER_PARITIES)
def test_too_many_losses_are_refused_before_anything_is_read(parities: int) -> None:
    group = group_of(4, parities)
    for lost in combinations(range(4), parities + 1):
        part = group.part_left(0, lost)
        with pytest.raises(SnapshotLost, match=rf"nodes \[{lost[0]}, .*reload a persisted"):
            assemble(part.shares, group.alive(lost)[0], part.source)
        assert not part.source.reads


@given(st.integers(2, 5), PARITIES, st.integers(1, 2), st.data())
def test_nodes_that_die_while_they_are_read(
    nodes: int, parities: int, parts: int, data: st.DataObject
) -> None:
    nodes = max(nodes, parities + 1)
    group = group_of(nodes, parities, parts)
    dying = data.draw(st.sampled_from([loss for loss in losses(nodes, parities) if loss]))
    left = group.parts_left()
    for node in dying:
        memory = left[data.draw(st.integers(0, parts - 1))].source
        memory.reads_left[node] = data.draw(st.integers(0, 12))
    assembled = assemble_parts(left, group.alive())
    assert tree_of(group.saved[0, 0].described, assembled) == original()
    assert set(assembled.report.lost) <= set(dying)
    for node, reason in assembled.report.lost.items():
        assert reason == f"it could not be read: node {node} does not answer"


def test_more_deaths_midway_than_parities_are_refused_by_name() -> None:
    group = group_of()
    part = group.part_left(0)
    part.source.reads_left.update({0: 1, 2: 2})
    with pytest.raises(SnapshotLost) as caught:
        assemble(part.shares, range(3), part.source)
    assert "node 0's block of stripe" in str(caught.value)
    assert "it could not be read: node 2 does not answer" in str(caught.value)


@given(st.integers(2, 6), PARITIES, st.data())
def test_any_one_manifest_may_be_lost_with_its_node_or_without_it(
    nodes: int, parities: int, data: st.DataObject
) -> None:
    nodes = max(nodes, parities + 1)
    group = group_of(nodes, parities)
    lost = data.draw(st.sampled_from([loss for loss in losses(nodes, parities) if loss]))
    part = group.part_left(0, lost if data.draw(st.booleans()) else ())
    left = {node: said for node, said in part.shares.items() if node != lost[0]}
    done = assemble(left, part.source.buffers.keys(), part.source)
    witness = next(iter(left.values()))
    assert tree_of(witness, done) == original()
    assert done.report.damaged[0] == f"the manifest of node {lost[0]} is missing"


def test_without_any_manifest_there_is_nothing_to_trust() -> None:
    with pytest.raises(SnapshotLost, match="no manifest"):
        assemble({}, [0, 1], Memories({}))
    group = group_of(2)
    alone = group.saved[0, 0].described
    memory = group.part_left(0).source
    assert tree_of(alone, assemble({0: alone}, [0], memory)) == original()
    no_sources = replace(alone, digests=replace(alone.digests, sources={}))
    with pytest.raises(SnapshotLost, match=r"node 1's block .* no manifest that has its digest"):
        assemble({0: no_sources}, [0, 1], memory)


def test_parities_of_a_replica_that_diverged_are_not_trusted() -> None:
    ours, theirs = ({"a": torch.arange(4000) + more} for more in (0, 1))
    group = replicas([flat_of(one) for one in (theirs, ours, ours)], 1, 1)
    with pytest.raises(SnapshotCorrupt) as caught:
        restored(group, (1,))
    assert "the decoded bytes do not match their digest: nodes 0 and 1" in str(caught.value)
    assert "hold different bytes of stable.a" in str(caught.value)
    # Where nobody decodes, nobody looks for it: the state is one that never was.
    assert restored(group) not in {tree_digest(ours), tree_digest(theirs)}


@needs_isal
def test_the_second_parity_is_tried_where_the_first_gives_something_else() -> None:
    tensors = [{"a": torch.arange(4000)} for _ in range(5)]
    # Node 2 keeps the first parity of stripe 2, and reads the first node's shard only for parities.
    tensors[2]["a"][:500] += 1
    group = replicas([flat_of(one) for one in tensors], 2, 1)
    assert group.saved[0, 0].described.share.striping.shard_nbytes[0] > 500 * 8
    read = group.part_left(0, (0,)).source
    done = assemble(group.part_left(0).shares, [1, 2, 3, 4], read)
    assert tree_of(group.saved[0, 0].described, done) == tree_digest({"a": torch.arange(4000)})
    second = group.saved[0, 3].described.share.striping.fragment(2, 3)
    assert second.role == 4
    assert (3, second.offset) in read.reads


def test_manifests_of_different_states_are_refused() -> None:
    ours, parts = group_of(), group_of(parts=2)
    first, second = ours.saved[0, 0].described, ours.saved[0, 1].described
    odd = replace(second, manifest=Manifest({}, ()))
    for other, message in [
        (group_of(numel=1999).saved[0, 1].described, "nodes 0 and 1 are not of one part"),
        (first, "are not of one part"),
        (odd, "no replicas of one state"),
    ]:
        with pytest.raises(SnapshotMismatch, match=message):
            assemble({0: first, 1: other}, [0, 1], Memories({}))
    with pytest.raises(SnapshotMismatch, match=r"parts \[0\] of states"):
        assemble_parts(parts.parts_left()[:1], parts.alive()[:1])


def test_calls_that_cannot_be_meant_are_refused() -> None:
    group = group_of()
    part = group.part_left(0)
    with pytest.raises(ValueError, match="wanted=\\[3\\]"):
        assemble(part.shares, range(3), part.source, wanted=[3])
    with pytest.raises(ValueError, match="10 bytes of memory for the 32000"):
        assemble(part.shares, range(3), part.source, into=torch.empty(10, dtype=torch.uint8))
    with pytest.raises(ValueError, match="say which node's"):
        assemble_parts(reduced([flat_of({"a": torch.ones(4)})] * 2, 1).parts_left(), [[0, 1]])
    with pytest.raises(SnapshotMismatch, match="a state of 3 bytes, its manifest says 32000"):
        assembly.tensors(part.shares[0], torch.empty(3, dtype=torch.uint8))


def test_tensors_of_an_assembled_state_are_checked_and_copied() -> None:
    described = group_of().saved[0, 0].described
    state = torch.zeros(32000, dtype=torch.uint8)
    (first, *_) = assembly.tensors(described, state)
    assert first.untyped_storage().nbytes() < state.numel()
    damaged = replace(described, private=b"\0" * len(described.private))
    with pytest.raises(SnapshotCorrupt, match=r"private \(20 bytes\)"):
        assembly.tensors(damaged, state)


def test_all_nodes_are_read_at_once() -> None:
    group = group_of(4)
    part, together, seen = group.part_left(0), Barrier(4), set[int]()

    def read(node: int, offset: int, out: memoryview) -> None:
        if node not in seen:
            seen.add(node)
            together.wait(timeout=30)
        part.source.read(node, offset, out)

    done = assemble(part.shares, range(4), SimpleNamespace(read=read))
    assert tree_of(group.saved[0, 0].described, done) == original()


def test_an_error_of_the_callers_own_ends_the_assembly() -> None:
    part = group_of(4).part_left(0)
    read = Mock(side_effect=RuntimeError("enough"))
    with pytest.raises(RuntimeError, match="enough"):
        assemble(part.shares, range(4), SimpleNamespace(read=read))
    assert read.call_count <= 4


def test_one_rank_of_a_part_may_be_lost_alone() -> None:
    group = group_of(3, 1, parts=2)
    parts: list[Part] = [group.part_left(0, (2,)), group.part_left(1, (0,))]
    done = assemble_parts(parts, [[0, 1], [1, 2]])
    assert tree_of(group.saved[1, 0].described, done) == original()
