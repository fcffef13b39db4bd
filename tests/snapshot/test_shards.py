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
    reduced,
    replicas,
    save,
    seat_of,
    small_buckets,
    specs,
    stable_of,
    states,
)

from holdfast.digest import Hasher, digest
from holdfast.digest.tensors import tensor_digest
from holdfast.errors import ConfigError, SnapshotCorrupt
from holdfast.snapshot.client import shards
from holdfast.snapshot.client.training_state import Training
from holdfast.snapshot.layout import flat_buffer, gather, manifest, shares
from holdfast.snapshot.layout.groups import Mode, Seat, ShardingGroup
from holdfast.snapshot.layout.shares import BUCKET_BYTES, Share, ShareManifest
from holdfast.snapshot.parity import erasure_code, isal
from holdfast.snapshot.parity.stripes import Striping
from holdfast.snapshot.restore.expected_digests import divergence

PARITIES = st.integers(1, 2 if isal.available() else 1)


@pytest.fixture(autouse=True, scope="module")
def small() -> Iterator[None]:
    with small_buckets():
        yield


def plain_bytes(flat: flat_buffer.Flat) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The stable tensors copied one after another, as a snapshot on one node holds them."""
    entries = shares.plan(flat)
    whole = torch.zeros(flat_buffer.total_bytes(entries), dtype=torch.uint8)
    flat_buffer.write(flat, entries, whole, never)
    return whole[: flat_buffer.stable_bytes(flat, entries)].numpy()


def digests_of(data: np.ndarray[Any, np.dtype[np.uint8]]) -> bytes:
    step = shares.BUCKET_BYTES
    parts = (data[at : at + step] for at in range(0, len(data), step))
    return b"".join(digest(part) for part in parts)


def check_against_plain(group: Group, whole: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
    for (_, node), saved in group.saved.items():
        share, digests = saved.described.share, saved.described.digests
        striping, buffer = share.striping, saved.buffer.numpy()
        expected = np.zeros_like(buffer)
        for stripe in range(striping.nodes):
            fragment = striping.fragment(stripe, node)
            blocks = {
                other: whole[(at := share.place(f, 0).start) : at + f.nbytes]
                for other in range(striping.nodes)
                if (f := striping.fragment(stripe, other)).role < striping.data_blocks
            }
            out = expected[fragment.offset : fragment.offset + fragment.nbytes]
            if fragment.role < striping.data_blocks:
                out[:] = blocks[node]
                assert digests.data[stripe] == digests_of(out)
                continue
            by_role = sorted(blocks, key=lambda other: striping.fragment(stripe, other).role)
            number = fragment.role - striping.data_blocks
            erasure_code.encode(number, out, [blocks[other] for other in by_role])
            assert digests.parity[stripe] == digests_of(out)
            seen = digests.sources[stripe]
            assert seen == {other: digests_of(block) for other, block in blocks.items()}
        # Padding included: it holds zeros, whatever was there.
        assert np.array_equal(buffer, expected)


@given(states, st.integers(2, 6), PARITIES, st.integers(1, 3))
def test_a_share_is_what_the_plain_way_gives(
    state: list[Spec], nodes: int, parities: int, parts: int
) -> None:
    nodes = max(nodes, parities + 1)
    flats = [flat_of(stable_of(state)) for _ in range(nodes)]
    check_against_plain(replicas(flats, parities, parts), plain_bytes(flats[0]))


def test_large_shares_in_buckets_of_full_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "BUCKET_BYTES", BUCKET_BYTES)
    monkeypatch.setattr(shards, "CHUNK_BYTES", 512 * 2**10)
    sizes = (BUCKET_BYTES * 5 + 7, 3, BUCKET_BYTES * 4)
    state = [Spec(torch.uint8, [size // 3], "plain", size) for size in sizes]
    flats = [flat_of(stable_of(state)) for _ in range(3)]
    group = replicas(flats, 1, 1)
    assert len(group.saved[0, 0].described.digests.data[1]) > shares.DIGEST_BYTES
    check_against_plain(group, plain_bytes(flats[0]))


@given(specs, st.data())
def test_any_range_of_any_tensor_is_copied_in_order(spec: Spec, data: st.DataObject) -> None:
    tensor = spec.make()
    first = data.draw(st.integers(0, tensor.numel()))
    last = data.draw(st.integers(first, tensor.numel()))
    if first == last:
        return
    out = torch.zeros(last - first, dtype=tensor.dtype)
    gather.copy_elements(tensor, first, last, out)
    assert tensor_digest(out) == tensor_digest(tensor.reshape(-1)[first:last])


def test_each_byte_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[tuple[int, int]] = []
    original = gather.Live._placed

    def counted(self: Any, start: int, stop: int) -> Any:
        read.append((start, stop))
        return original(self, start, stop)

    monkeypatch.setattr(gather.Live, "_placed", counted)
    group = replicas([flat_of({"x": torch.arange(3000)}) for _ in range(3)], 1, 1)
    nbytes = group.saved[0, 0].described.share.sizes[0]
    once = sorted(read)
    assert len(set(once)) * 2 == len(once), "as data by its owner, for the parity by its keeper"
    assert sum(stop - start for start, stop in once) == 2 * nbytes


def test_tensors_within_one_chunk_are_read_in_place() -> None:
    tensor = torch.arange(100)
    flat = flat_of({"x": tensor})
    live = gather.Live(flat, shares.plan(flat))
    scratch = np.empty(128, np.uint8)
    found = live.read(64, 192, scratch, Hasher())
    assert np.shares_memory(found, tensor.numpy())
    assert not np.shares_memory(found, scratch)


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


def test_a_manifest_comes_back_equal_and_a_damaged_one_not_at_all() -> None:
    flats = [flat_of({"x": torch.arange(400)}, torch.ones(5)) for _ in range(3)]
    for saved in replicas(flats, 1, 2).saved.values():
        blob = saved.described.encode()
        digest = manifest.digest_of(blob)
        assert ShareManifest.decode(blob, digest) == saved.described
        for at in range(0, len(blob), 97):
            damaged = bytearray(blob)
            damaged[at] ^= 16
            with pytest.raises(SnapshotCorrupt, match="does not match digest"):
                ShareManifest.decode(bytes(damaged), digest)


@pytest.mark.parametrize("attachment", [None, 3, (b"", (1, 2), ({}, {}, {})), (b"",)])
def test_a_manifest_of_no_share_is_refused(attachment: object) -> None:
    blob = manifest.encode({}, [], attachment)
    with pytest.raises(SnapshotCorrupt, match="describes no share"):
        ShareManifest.decode(blob, manifest.digest_of(blob))


def test_replicas_that_are_equal_raise_no_alarm() -> None:
    compared = 0
    for nodes in range(2, 7):
        group = replicas([flat_of({"x": torch.arange(2000)}) for _ in range(nodes)], 1, 2)
        for (part, node), saved in group.saved.items():
            others = [group.saved[part, n].described for n in range(nodes) if n != node]
            assert divergence([saved.described, *others]) == ""
            compared += len(others)
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
    found = [
        (node, divergence([saved.described, group.saved[part, n].described]))
        for (part, node), saved in group.saved.items()
        for n in range(nodes)
        if n != node
    ]
    alarms = [(node, text) for node, text in found if text]
    assert all(f"stable.{name}" in text and f"{culprit}" in text for _, text in alarms)
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


def test_blocks_of_others_are_added_to_parities_that_begin_as_zeros() -> None:
    flats = [flat_of({"x": torch.arange(100 * (n + 1))}) for n in range(4)]
    wholes = [plain_bytes(flat) for flat in flats]
    group = reduced(flats, 1)
    for node in range(4):
        saved = group.saved[0, node]
        striping = saved.described.share.striping
        (coding,) = striping.encodings(node)
        target = np.zeros(coding.target.nbytes, np.uint8)
        places = [(f, striping.place(f)) for f in coding.sources]
        erasure_code.encode(0, target, [wholes[f.node][at.start : at.stop] for f, at in places])
        held = saved.buffer[coding.target.offset :][: coding.target.nbytes].numpy()
        assert np.array_equal(held, target)
        assert saved.described.digests.parity == {node: digests_of(target)}
        assert saved.described.digests.sources == {}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tensors_on_a_device_are_staged() -> None:
    state = [Spec(torch.float32, [40, 7], kind, 5) for kind in ("plain", "strided", "scalar")]
    here = stable_of(state)
    there = {**here, "tensors": {name: t.cuda() for name, t in here["tensors"].items()}}
    there["tied"] = [there["tensors"]["t0"]]
    group = replicas([flat_of(there) for _ in range(3)], 1, 1)
    check_against_plain(group, plain_bytes(flat_of(here)))
