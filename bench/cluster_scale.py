"""Messages, links and bytes of a node for one snapshot, from 8 to 4,096 nodes with 8 ranks each.

    python -m bench.cluster_scale [--nodes 8 64 256 1024 4096] [--flat 8 64]

The state machines of all nodes run in this process, with the rosters that a run would have; what
they send is encoded as on the wire, counted and delivered in turn. The ranks are replicas (DDP),
whose digests are announced; the bytes of the manifests that other nodes mirror are counted apart.
Then one node is slow: the other groups seal the step meanwhile, nobody commits it, and every node
names the slow one. ``--flat`` forms one group of all nodes instead, as before there were groups.
"""

import argparse
import os
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from functools import cache
from typing import Any

from bench.rows import record
from holdfast.planner.parity_groups import GROUP_NODES
from holdfast.snapshot.layout.groups import Dim, Job, Kind
from holdfast.snapshot.layout.node_groups import node_groups
from holdfast.snapshot.node.membership import Membership
from holdfast.snapshot.node.session import Listening
from holdfast.snapshot.protocol import messages as m
from holdfast.snapshot.protocol.commit_tree import LATE_S
from holdfast.snapshot.protocol.roster import Roster
from holdfast.snapshot.protocol.state_machine import Protocol
from holdfast.snapshot.transport import frames
from holdfast.version import __version__

LOCAL = 8
MANIFEST = bytes(4096)
TREE = ("sealed", "void", "committed", "late")


class Network:
    """All nodes of a run, with queues for links."""

    def __init__(self, nodes: int, most: int, parities: int = 1) -> None:
        job = Job((Dim("ddp", nodes * LOCAL, Kind.REPLICATE),), LOCAL)
        started_s = time.perf_counter()
        self.cut = node_groups(job, parities, most)
        self.cut_s = time.perf_counter() - started_s
        Job.holders = cache(Job.holders)  # type: ignore[method-assign]  # the same for all nodes
        places = [Listening("10.0.0.1", 40000, 0)] * nodes
        self.rosters = [
            self._member(job, parities, node).make_roster(places, "00" * 32)
            for node in range(nodes)
        ]
        self.now_s = 0.0
        self.queue: deque[tuple[int, m.Event]] = deque()
        self.sent: dict[int, Counter[str]] = defaultdict(Counter)
        self.committed: dict[int, int] = {}
        self.protocols = [Protocol(LOCAL, 1, 1000.0, 0.0) for _ in range(nodes)]
        for node, roster in enumerate(self.rosters):
            for rank in range(LOCAL):
                self.do(node, m.Hello(rank, LOCAL, 1, __version__))
                self.do(node, m.Join(rank, roster.encode()))
        for node, roster in enumerate(self.rosters):
            for peer in roster.peers:
                self.do(node, m.PeerLinked(peer))

    def _member(self, job: Job, parities: int, node: int) -> Membership:
        made = Membership.__new__(Membership)
        made.job, made.parities, made.rank, made._domains = job, parities, node * LOCAL, []
        made.take_cut(self.cut)
        return made

    def do(self, node: int, event: m.Event) -> None:
        """Hand an event to a node, and carry out what it answers."""
        for out in self.protocols[node].handle(event, self.now_s):
            match out:
                case m.ToPeer(peer, verb, fields, blob):
                    self._send(node, peer, {"verb": verb, **fields}, blob)
                case m.Allocate(rank, slot, nbytes):
                    self.do(node, m.Allocated(rank, slot, nbytes))
                case m.Reply(_, "committed", fields):
                    self.committed[node] = int(str(fields["step"]))

    def _send(self, node: int, peer: int, header: dict[str, Any], blob: bytes) -> None:
        frame, verb = frames.encode(header, blob), header["verb"]
        count = self.sent[node]
        count["messages"] += 1
        count["bytes"] += len(frame) - (len(blob) if verb == "mirror" else 0)
        count["manifest_bytes"] += len(blob) if verb == "mirror" else 0
        count["tree_messages"] += verb in TREE
        count["tree_bytes"] += len(frame) if verb in TREE else 0
        decoder = frames.Decoder()
        decoder.feed(frame)
        (read,) = decoder.frames()
        self.queue.append((peer, m.parse(m.FromPeer, read.header, read.blob, node)))

    def deliver(self) -> None:
        """Deliver all that is on its way, and what is answered."""
        while self.queue:
            self.do(*self.queue.popleft())

    def write(self, node: int, step: int) -> None:
        """Let all ranks of a node write a step."""
        for rank, seen in enumerate(_digests(self.rosters[node])):
            self.do(node, m.Begin(rank, step, 1000))
            claims = ["0" * 32] * len(self.rosters[node].group)
            said = m.Written(rank, step, "d" * 32, MANIFEST, claims=claims, seen=seen)
            self.do(node, said)

    def take(self, step: int, *, without: int = -1) -> None:
        """Let all nodes but one write a step, and deliver all that is said."""
        for node in range(len(self.protocols)):
            if node != without:
                self.write(node, step)
        self.deliver()

    def tick(self, after_s: float) -> None:
        """Let time pass on all nodes."""
        self.now_s += after_s
        for node in range(len(self.protocols)):
            self.do(node, m.Tick())
        self.deliver()


def _digests(roster: Roster) -> Iterator[list[tuple[int, int, str]]]:
    """Yield for each local rank the digests of the blocks that it computed its parity from."""
    for rank, sets in enumerate(roster.sets):
        (members,) = [ranks for ranks in sets if roster.first_rank + rank in ranks]
        stripe = members.index(roster.first_rank + rank)
        yield [(other, stripe, "0" * 32) for other in members if other != members[stripe]]


def measure(nodes: int, most: int) -> dict[str, Any]:
    """Return a row for one size of run."""
    run = Network(nodes, most)
    run.take(1)
    run.sent.clear()
    started_s = time.process_time()
    run.take(2)
    cpu_s = time.process_time() - started_s
    assert set(run.committed.values()) == {2}, "not all nodes committed the step"
    sent = {name: [run.sent[node][name] for node in range(nodes)] for name in _NAMES}
    row = {
        "nodes": nodes,
        "ranks_per_node": LOCAL,
        "groups": len(run.cut),
        **{f"{name}_mean": round(sum(each) / nodes, 1) for name, each in sent.items()},
        **{f"{name}_most": max(each) for name, each in sent.items()},
        "links_most": max(len(roster.peers) for roster in run.rosters),
        "roster_bytes_most": max(len(frames.encode(r.encode())) for r in run.rosters),
        "cpu_us_a_node": round(1e6 * cpu_s / nodes),
        "cut_s": round(run.cut_s, 3),
    }
    return row | {"slow_node": slow(run, nodes - 1)}


_NAMES = ("messages", "bytes", "manifest_bytes", "tree_messages", "tree_bytes")


def slow(run: Network, node: int) -> dict[str, Any]:
    """Let one node write a step late, and return what the others did meanwhile."""
    run.sent.clear()
    run.take(3, without=node)
    clusters = [protocol.cluster_commit.cluster for protocol in run.protocols]
    late = [group for group in run.cut if node in group]
    sealed = [
        group
        for group in run.cut
        if all((each := clusters[n]) is not None and each.steps.is_sealed(3) for n in group)
    ]
    assert set(run.committed.values()) == {2}, "a step was committed that a node does not hold"
    run.tick(0.0)
    run.tick(LATE_S + 0.1)
    named = [protocol.status()["cluster"] for protocol in run.protocols]
    right = sum(isinstance(said, dict) and said["late"] == [node] for said in named)
    run.write(node, 3)
    run.deliver()
    assert set(run.committed.values()) == {3}, "not all nodes committed the step at last"
    return {
        "groups_that_sealed_meanwhile": len(sealed),
        "groups_late": len(late),
        "nodes_that_name_it": right,
        "messages_most": max(count["messages"] for count in run.sent.values()),
    }


def main() -> None:
    """Measure and record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--nodes", type=int, nargs="*", default=[8, 64, 256, 1024, 4096])
    parser.add_argument("--flat", type=int, nargs="*", default=[64])
    arguments = parser.parse_args()
    load = round(os.getloadavg()[0], 1)
    for nodes in arguments.nodes:
        groups = {"grouping": f"groups of {GROUP_NODES}", "load_beside": load}
        record("cluster_scale", groups | measure(nodes, GROUP_NODES))
    for nodes in arguments.flat:
        record(
            "cluster_scale",
            {"grouping": "one group", "load_beside": load} | measure(nodes, nodes),
        )


if __name__ == "__main__":
    main()
