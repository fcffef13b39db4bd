"""Parities made over TCP by real SMPs, in threads: links cut on the way, bits flipped, sizes."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from snapshot_nodes import roster_of
from snapshot_shares import flat_of, seat_of
from snapshot_waits import PATIENCE_S, together, until

from holdfast.errors import SnapshotCorrupt
from holdfast.snapshot.client.copies import ShardedCopy
from holdfast.snapshot.layout.groups import Mode
from holdfast.snapshot.node import launch, memory, smp
from holdfast.snapshot.node.session import SmpSession
from holdfast.snapshot.protocol.roster import Stamp
from holdfast.snapshot.protocol.state_machine import Protocol
from holdfast.snapshot.restore import cluster_restore
from holdfast.snapshot.restore.choose_step import Candidate
from holdfast.snapshot.restore.cluster_restore import rebuild
from holdfast.snapshot.transport.remote import Remote

pytestmark = [pytest.mark.processes, pytest.mark.representative]

LINGER_S = 60.0


def weight(node: int, numel: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(node)
    return torch.randn(numel + 1000 * node, generator=generator)


@dataclass
class Group:
    """Nodes with one rank and one SMP each, which hold states of their own."""

    directory: Path
    nodes: int
    parities: int = 1
    servers: list[smp.Server] = field(default_factory=list)
    sessions: list[SmpSession] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.threads: list[threading.Thread] = []
        for node in range(self.nodes):
            run_dir = self.directory / f"node-{node}"
            run_dir.mkdir()
            server = smp.Server(run_dir, Protocol(1, 1, LINGER_S, time.monotonic()), os.geteuid())
            self.servers.append(server)
            self.threads.append(threading.Thread(target=server.run))
            self.threads[-1].start()
            self.sessions.append(SmpSession(launch.SmpSettings(run_dir, 1, 1, LINGER_S), 0))
        addresses = [session.listen("127.0.0.1") for session in self.sessions]
        places = tuple((said.host, said.port) for said in addresses)
        self.rosters = [roster_of(node, places, self.parities) for node in range(self.nodes)]
        for session, roster in zip(self.sessions, self.rosters, strict=True):
            session.join(roster)

    def copy(self, node: int, step: int, numel: int) -> ShardedCopy:
        """A rank's copy of its state, as ``Snapshots`` makes it."""
        seat = seat_of(self.nodes, 1, node, 0, Mode.REDUCED)
        flat = flat_of({"weight": weight(node, numel)}, {"step": step})
        peers = tuple(range(self.nodes))
        return ShardedCopy(step, flat, seat=seat, parities=self.parities, peers=peers)

    def take(self, step: int, numel: int) -> list[int | None]:
        """All ranks snapshot a step; the newest that each knows to be committed."""
        return together(*(lambda n=n: self._take(n, step, numel) for n in range(self.nodes)))

    def _take(self, node: int, step: int, numel: int) -> int | None:
        session, copy = self.sessions[node], self.copy(node, step, numel)
        if not copy.agree(session):
            return None
        buffer = session.begin(step, copy.nbytes)
        assert buffer is not None
        session.written(step, copy.write(buffer))
        return session.settle()

    def rebuild(self, node: int, step: int, lost: tuple[int, ...]) -> tuple[torch.Tensor, Any]:
        """The state of a node, put together without the memories of the lost ones."""
        left = [other for other in range(self.nodes) if other not in lost]
        manifests = {n: [n if n in left else (n + 1) % self.nodes] for n in range(3)}
        found = Candidate(Stamp(1, step), {rank: rank for rank in left}, manifests)
        sets = [tuple(range(self.nodes))]
        reach = partial(Remote, self.rosters[left[0]])
        own, memory, report = rebuild(found, node, sets, reach)
        return memory[: own.share.sizes[node]], report

    def parity(self, node: int, step: int) -> memoryview:
        """Return the memory of the first parity that a node keeps of a step."""
        found = self.servers[node].protocol.node.find(node, 1, step)
        assert found is not None
        _, number, slot = found
        area = slot.receiver.plan.ranges[0]
        return self.servers[node].memory.writable(0, number)[area.start :][: area.nbytes]

    def close(self) -> None:
        for session in self.sessions:
            session.close()
        for server, thread in zip(self.servers, self.threads, strict=True):
            launch.stop_smp(server.run_dir)
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


Make = Callable[..., Group]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Group] = []

    def group(nodes: int = 3, parities: int = 1) -> Group:
        made.append(Group(tmp_path, nodes, parities))
        return made[-1]

    yield group
    for left in made:
        left.close()


def same(found: torch.Tensor, node: int, numel: int) -> bool:
    return torch.equal(found.view(torch.float32), weight(node, numel))


def test_memory_is_what_the_striping_says(make: Make) -> None:
    group, numel = make(), 300_000
    group.take(0, numel)
    share = group.copy(2, 0, numel).share
    largest = 4 * (numel + 2000)
    for server in group.servers:
        status = server.status()
        assert status["bytes"] == 3 * -(-largest // 2 // 64) * 64
        assert status["bytes"] >= share.buffer_nbytes
        block = status["bytes"] // 3
        assert block - 64 < status["cluster"]["shipped_parity_bytes"] <= block
        assert status["cluster"]["due_bytes"] == 0


@pytest.mark.parametrize("end", ["sender", "keeper"])
def test_links_cut_while_blocks_are_shipped(
    make: Make, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    group, numel = make(), 5_000_000
    assert group.take(0, numel) == [0, 0, 0]
    cuts, added, accumulate = [6, 14], [0], memory.accumulate

    def cutting(*arguments: Any) -> None:
        accumulate(*arguments)
        added[0] += 1
        if added[0] in cuts:
            for server in group.servers:
                cut(server.links)

    def cut(links: Any) -> None:
        outlets = set(links.outlets().values())
        for number, channel in links.transport.channels.items():
            if (number in outlets) == (end == "sender"):
                channel.socket.shutdown(socket.SHUT_RDWR)

    monkeypatch.setattr(smp, "accumulate", cutting)
    assert group.take(1, numel) == [1, 1, 1]
    assert added[0] > max(cuts)
    for node in range(3):
        found, report = group.rebuild(node, 1, (node,))
        assert same(found, node, numel)
        assert report.damaged == []


@pytest.mark.parametrize("parities", [1, 2])
def test_every_state_is_rebuilt_and_a_bit_flipped_in_a_parity_is_found(
    make: Make, parities: int
) -> None:
    group, numel = make(3, parities), 300_000
    assert group.take(0, 100) == [0, 0, 0]
    assert group.take(1, numel) == [1, 1, 1]
    for node in range(3):
        lost = tuple((node + turn) % 3 for turn in range(parities))
        found, report = group.rebuild(node, 1, lost)
        assert same(found, node, numel)
        assert report.rebuilt_nodes == {node}
        assert report.damaged == []
    group.parity(1, 1)[5] ^= 1
    if parities == 1:
        with pytest.raises(SnapshotCorrupt, match=r"node 1's parity of stripe 1.*match its digest"):
            group.rebuild(0, 1, (0,))
        assert same(group.rebuild(0, 1, ())[0], 0, numel)
    else:
        found, report = group.rebuild(0, 1, (0,))
        assert same(found, 0, numel)
        assert any("node 1's parity" in damage for damage in report.damaged)


def test_without_digests_of_parities_the_flip_is_blamed_on_nobody(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, asked = make(), Remote.parities
    group.take(0, 300_000)
    held = group.parity(1, 0)
    held[5] ^= 1

    def trusting(remote: Remote, rank: int, stamp: Stamp) -> dict[int, bytes]:
        found = asked(remote, rank, stamp)
        return dict.fromkeys(found, memory.digest_of(held)) if rank == 1 else found

    monkeypatch.setattr(cluster_restore.Remote, "parities", trusting)
    with pytest.raises(SnapshotCorrupt, match="the decoded bytes do not match their digest"):
        group.rebuild(0, 0, (0,))


def test_a_rank_alone_waits_for_the_others_sizes_only_so_long(make: Make) -> None:
    group = make(2)
    copy = group.copy(0, 0, 100)
    started_s = time.monotonic()
    copy.prioritize()
    assert not copy.agree(group.sessions[0])
    assert 0.5 < time.monotonic() - started_s < 10
    assert group.take(1, 100) == [1, 1]


def test_a_rank_that_asks_first_learns_of_sizes_that_are_said_later(make: Make) -> None:
    group = make(2)
    copies = [group.copy(node, 0, 100) for node in range(2)]
    asked = threading.Event()

    def first() -> bool:
        asked.set()
        return copies[0].agree(group.sessions[0])

    def second() -> bool:
        asked.wait(PATIENCE_S)
        rank = group.servers[0].protocol.node.ranks[0]
        until(lambda: rank.sizing is not None, "the first asks")
        return copies[1].agree(group.sessions[1])

    assert together(first, second) == [True, True]
    assert [copy.share.sizes for copy in copies] == [(400, 4400), (400, 4400)]
