"""A rank's share holds the bytes, parities and digests that the plain way gives, and says so."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from snapshot_shares import (
    Group,
    Spec,
    flat_of,
    never,
    random_tensor,
    replicas,
    save,
    seat_of,
    small_buckets,
    specs,
    stable_of,
    states,
)

from holdfast.digest import Hasher
from holdfast.digest.tensors import tensor_digest
from holdfast.errors import ConfigError, SnapshotCorrupt
from holdfast.snapshot.client import shards
from holdfast.snapshot.layout import flat_buffer, manifest, shares
from holdfast.snapshot.layout.groups import Mode, Seat, ShardingGroup
from holdfast.snapshot.layout.shares import Share, ShareManifest
from holdfast.snapshot.layout.training_state import Training
from holdfast.snapshot.parity import isal
from holdfast.snapshot.parity.stripes import Striping
from holdfast.snapshot.restore.stripe_decode import divergence

PARITIES = st.integers(1, 2 if isal.available() else 1)


@pytest.fixture(autouse=True, scope="module")
def small() -> Iterator[None]:
    with small_buckets():
        yield


@given(states, st.integers(2, 6), PARITIES, st.integers(1, 3))
def test_what_lies_around_the_fragments_of_a_share_is_cleared(
    state: list[Spec], nodes: int, parities: int, parts: int
) -> None:
    flats = [flat_of(stable_of(state)) for _ in range(max(nodes, parities + 1))]
    for (_, node), saved in replicas(flats, parities, parts).saved.items():
        striping, left = saved.described.share.striping, saved.buffer.clone()
        for stripe in range(striping.nodes):
            fragment = striping.fragment(stripe, node)
            left[fragment.offset : fragment.offset + fragment.nbytes] = 0
        assert not left.any()


@given(specs, st.data())
def test_any_range_of_any_tensor_is_copied_in_order(spec: Spec, data: st.DataObject) -> None:
    tensor = spec.make()
    first = data.draw(st.integers(0, tensor.numel()))
    last = data.draw(st.integers(first, tensor.numel()))
    if first == last:
        return
    out = torch.zeros(last - first, dtype=tensor.dtype)
    shards.copy_elements(tensor, first, last, out)
    assert tensor_digest(out) == tensor_digest(tensor.reshape(-1)[first:last])


def test_each_byte_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[tuple[int, int]] = []
    original = shards.Live._placed

    def counted(self: Any, start: int, stop: int) -> Any:
        read.append((start, stop))
        return original(self, start, stop)

    monkeypatch.setattr(shards.Live, "_placed", counted)
    group = replicas([flat_of({"x": torch.arange(3000)}) for _ in range(3)], 1, 1)
    nbytes = group.saved[0, 0].described.share.sizes[0]
    times = np.zeros(nbytes, int)
    for start, stop in read:
        times[start:stop] += 1
    assert (times == 2).all(), "as data by its owner, for the parity by its keeper"


@pytest.mark.parametrize("strided", [False, True])
def test_a_rank_digests_the_other_ones_part_as_that_one_does(strided: bool) -> None:
    sizes = (3, 700, 1, 40, 64, 500)
    tensors = [torch.arange(n, dtype=torch.int32) + n for n in sizes]
    group = ShardingGroup(Mode.REPLICATED, (0, 1), ((0,), (1,)))

    def written(node: int, held: list[torch.Tensor]) -> shares.Digests:
        flat = flat_of(dict(zip("abcdef", held, strict=True)))
        entries = shares.plan(flat)
        nbytes = flat_buffer.stable_bytes(flat, entries)
        share = Share.of(Seat(group, node, 0, 1), 0, [nbytes] * 2)
        buffer = torch.empty(share.buffer_nbytes, dtype=torch.uint8)
        return shards.write(flat, entries, share, buffer, never, compared=1 - node)

    others = [torch.stack([t, t], 1)[:, 0] for t in tensors] if strided else tensors
    own, other = written(0, tensors), written(1, others)
    for one, two in ((own, other), (other, own)):
        seen = {stripe: nodes.popitem()[1] for stripe, nodes in one.sources.items()}
        assert seen == {stripe: two.data[stripe] for stripe in seen}
        assert seen
    tensors[5] = tensors[5] ^ 1
    tensors[1] = tensors[1] ^ 1
    struck = written(0, tensors)
    assert all(nodes[1] != other.data[stripe] for stripe, nodes in struck.sources.items())


def test_tensors_within_one_chunk_are_read_in_place() -> None:
    tensor, scratch = torch.arange(100), np.empty(128, np.uint8)
    flat = flat_of({"x": tensor})
    found = shards.Live(flat, shares.plan(flat)).read(64, 192, scratch, Hasher())
    assert np.shares_memory(found, tensor.numpy())


def test_an_abandoned_copy_stops_at_a_bucket() -> None:
    flat = flat_of({"x": torch.arange(1000)})
    entries = shares.plan(flat)
    share = Share.of(seat_of(2, 1, 0, 0), 1, flat_buffer.stable_bytes(flat, entries))
    buffer = torch.zeros(share.buffer_nbytes, dtype=torch.uint8)
    answers = iter([False, False, True])
    with pytest.raises(flat_buffer.Cancelled, match=r"stripe 1, bucket 2"):
        shards.write(flat, entries, share, buffer, lambda: next(answers))
    assert buffer[:512].any()
    assert not buffer[512:].any()


def test_ranks_that_other_nodes_have_no_partner_for_stay_idle() -> None:
    group = ShardingGroup(Mode.REPLICATED, (0, 1), ((0, 1, 2), (3, 4)))
    flat = flat_of({"x": torch.arange(1000)}, torch.ones(3))
    seats = [Seat(group, 0, 2, 3), Seat(group, 0, 1, 3), Seat(group, 1, 1, 2)]
    shares_of = [Share.of(seat, 1, 8000) for seat in seats]
    assert [share.idle for share in shares_of] == [True, False, False]
    assert shares_of[1].striping == shares_of[2].striping
    saved = save(flat, shares_of[0])
    assert saved.buffer.numel() == 0
    assert saved.described.digests.data == {}
    assert len(saved.described.private) == 12


def test_what_does_not_fit_together_is_refused() -> None:
    flat = flat_of({"x": torch.arange(1000)})
    entries = shares.plan(flat)
    share = Share.of(seat_of(2, 1, 0, 0), 1, 8000)
    small = torch.zeros(share.buffer_nbytes - 1, dtype=torch.uint8)
    with pytest.raises(ValueError, match=f"a buffer of {share.buffer_nbytes - 1} bytes"):
        shards.write(flat, entries, share, small, never)
    with pytest.raises(ValueError, match="a state of 8000 for 9000"):
        save(flat, Share.of(seat_of(2, 1, 0, 0), 1, 9000))
    with pytest.raises(ConfigError, match="states of \\[1, 2\\] bytes for 2 nodes"):
        Share.of(seat_of(2, 1, 0, 0), 1, [1, 2])
    with pytest.raises(ConfigError, match="for 3 nodes"):
        Share.of(seat_of(3, 1, 0, 0, Mode.REDUCED), 1, [1, 2])


def test_private_tensors_lie_in_the_manifest_and_not_in_the_buffer() -> None:
    secret = random_tensor(torch.uint8, [500], 3)
    group = replicas([flat_of({"x": torch.zeros(500)}, {"rng": secret}) for _ in range(2)], 1, 1)
    described = group.saved[0, 0].described
    assert secret.numpy().tobytes() in described.private
    assert secret.numpy().tobytes()[:64] not in group.saved[0, 0].buffer.numpy().tobytes()
    private = [entry.path for entry in described.manifest.entries if entry.digest]
    assert private == ["private.rng"]


def test_too_much_that_is_private_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    flat = flat_of(
        {}, {"small": torch.ones(9), "huge": torch.ones(2**19), "big": torch.ones(2**18)}
    )
    shares.plan(flat)
    monkeypatch.setattr(shares, "PRIVATE_MAX_BYTES", 2**20)
    with pytest.raises(ConfigError) as caught:
        shares.plan(flat)
    assert "private.huge (2.0 MiB), private.big (1.0 MiB), private.small" in str(caught.value)
    assert "requires_grad=False" in str(caught.value)


def test_parameters_and_optimizer_state_are_stable_and_nothing_else() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    flat = Training(model, optimizer).capture(0)
    stable = {path for path, is_stable in zip(flat.paths, flat.stable, strict=True) if is_stable}
    parameters = {f"model.{name}" for name, _ in model.named_parameters()}
    moments = {path for path in flat.paths if path.startswith("optimizer.state.")}
    assert stable == parameters | moments
    assert moments
    assert set(flat.paths) - stable >= {"model.1.running_mean", "rng.torch"}
    entries = shares.plan(flat)
    ends = flat_buffer.stable_bytes(flat, entries)
    assert all((entry.offset < ends) == (entry.path in stable) for entry in entries if entry.nbytes)


def test_a_manifest_comes_back_equal_and_one_of_no_share_is_refused() -> None:
    flats = [flat_of({"x": torch.arange(400)}, torch.ones(5)) for _ in range(3)]
    for saved in replicas(flats, 1, 2).saved.values():
        blob = saved.described.encode()
        assert ShareManifest.decode(blob, manifest.digest_of(blob)) == saved.described
    for attachment in (None, 3, (b"", (1, 2), ({}, {}, {})), (b"",)):
        blob = manifest.encode({}, [], attachment)
        with pytest.raises(SnapshotCorrupt, match="describes no share"):
            ShareManifest.decode(blob, manifest.digest_of(blob))


def comparisons(group: Group) -> list[str]:
    """The divergence that each node sees between its own share of a part and each other one."""
    return [
        divergence([saved.described, group.saved[part, other].described])
        for (part, node), saved in group.saved.items()
        for other in range(group.nodes)
        if other != node
    ]


def test_replicas_that_are_equal_raise_no_alarm() -> None:
    compared = 0
    for nodes in range(2, 7):
        group = replicas([flat_of({"x": torch.arange(2000)}) for _ in range(nodes)], 1, 2)
        found = comparisons(group)
        assert set(found) == {""}
        compared += len(found)
    assert compared == 2 * sum(n * (n - 1) for n in range(2, 7))


@given(st.integers(2, 6), PARITIES, st.integers(1, 2), st.data())
def test_a_replica_that_diverged_in_one_bit_is_found_and_named(
    nodes: int, parities: int, parts: int, data: st.DataObject
) -> None:
    nodes = max(nodes, parities + 1)
    culprit, at = data.draw(st.integers(0, nodes - 1)), data.draw(st.integers(0, 1499))
    tensors = [{"a": torch.arange(500), "b": torch.arange(1000)} for _ in range(nodes)]
    name = "a" if at < 500 else "b"
    tensors[culprit][name].view(torch.uint8)[(at % 500) * 8] ^= 1
    group = replicas([flat_of(one) for one in tensors], parities, parts)
    alarms = list(filter(None, comparisons(group)))
    assert all(f"stable.{name}" in text and f"{culprit}" in text for text in alarms)
    # Whoever reads these bytes, for its shard or for a parity, is seen.
    reads = _reads(group, culprit, shares.plan(flat_of(tensors[0])), f"stable.{name}", at % 500 * 8)
    assert bool(alarms) == reads


def _reads(group: Group, node: int, entries: list[Any], path: str, offset: int) -> bool:
    place = next(entry.offset for entry in entries if entry.path == path) + offset
    for part in range(group.parts):
        share: Share = group.saved[part, node].described.share
        striping: Striping = share.striping
        for stripe in range(striping.nodes):
            own = striping.fragment(stripe, node).role < striping.data_blocks
            for other in range(striping.nodes):
                fragment = striping.fragment(stripe, other)
                if fragment.role >= striping.data_blocks or (own and other != node):
                    continue
                start = share.place(fragment, 0).start
                if start <= place < start + fragment.nbytes:
                    return True
    return False
