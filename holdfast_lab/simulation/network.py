"""Links between the SMPs: delays, losses at a link's end, cuts, and frames that come late.

A node sends over the links that it opened (``holdfast.snapshot.transport.links``). Frames of one
link arrive in order; when it ends, those on their way are lost from some moment on. Frames of
several links overtake each other. Some frames arrive twice, some only in a later epoch.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from holdfast.snapshot.protocol import messages as m
from holdfast.snapshot.protocol.roster import Roster

if TYPE_CHECKING:
    from holdfast_lab.simulation.node import Node
    from holdfast_lab.simulation.world import World

TWICE = 0.01  # the share of frames that arrive twice
LATE = 0.3  # the share of frames on their way that arrive although a new epoch began
_BLOBS = {m.PeerMirror: "manifest", m.PeerHolds: "manifest", m.PeerChunk: "blob"}
QUIET_S = 5.0  # a node that is silent for so long counts as not linked, until it speaks again
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0


@dataclass
class Link:
    """A link that a node opened: the SMPs at its ends, their epoch, and when its frames end.

    ``recent`` has the frames sent last.
    """

    sender: int
    receiver: int
    epoch: int
    arrived_s: float = 0.0
    lost_from_s: float = math.inf
    recent: deque[m.Event] = field(default_factory=lambda: deque(maxlen=6))


class Network:
    """All links of the cluster, by the node that opened one and the node that it leads to."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._links: dict[tuple[int, int], Link] = {}
        self._pairs: dict[int, set[tuple[int, int]]] = defaultdict(set)  # of links, by node
        self._cut_s: dict[frozenset[int], float] = {}

    def connect(self, node: Node, roster: Roster) -> None:
        """Begin a new epoch: the links of the former one end, new ones are opened."""
        world = self._world
        node.epoch, node.met = roster.epoch, {}
        for pair in sorted(self._pairs[node.index]):
            if pair[0] == node.index:
                self._end(pair)
            else:
                self._repeat(pair, self._links[pair])
                world.at(world.soon(1e-4, 5e-3), self._closed, pair, self._links[pair])
        for peer in roster.peers:
            retry = node, node.instance, roster.epoch, peer, _FIRST_PAUSE_S
            world.at(world.soon(0, 0.02), self._open, *retry)

    def reachable(self, one: int, other: int) -> bool:
        """Return true if packets get from one node to another now."""
        return self._cut_s.get(frozenset((one, other)), 0.0) <= self._world.now

    def cut(self, one: int, other: int, seconds: float) -> None:
        """Let nothing pass between two nodes for a while."""
        self._cut_s[frozenset((one, other))] = self._world.now + seconds
        self.drop(one, other)
        self.drop(other, one)

    def drop(self, one: int, other: int) -> None:
        """End the link from one node to another, which is opened again later."""
        if link := self._links.get((one, other)):
            self._closed((one, other), link)

    def died(self, node: Node) -> None:
        """End all links of an SMP that died."""
        world = self._world
        for pair in sorted(self._pairs[node.index]):
            if pair[0] == node.index:
                self._end(pair)
            else:
                world.at(world.soon(1e-3, 0.2), self._closed, pair, self._links[pair])

    def send(self, node: Node, out: m.ToPeer | m.Ship, blob: bytes) -> None:
        """Send a message over a node's link; without one it is lost."""
        link = self._links.get((node.index, out.node))
        if link is None:
            return
        event = _event(out, node.index, blob)
        world, receiver = self._world, self._world.nodes[out.node]
        delay_s = world.soon(1e-4, 3e-3) * max(node.pace, receiver.pace)
        link.arrived_s = max(link.arrived_s, world.now + delay_s)
        arrival = link, node.index, out.node, event
        world.at(link.arrived_s - world.now, self._arrive, *arrival)
        if world.draw.random() < TWICE:
            world.at(link.arrived_s - world.now, self._arrive, *arrival)
        link.recent.append(event)
        world.stats["messages"] += 1

    def with_capacity(self, node: Node) -> tuple[int, ...]:
        """Return the nodes to which a node has a link."""
        pairs = self._pairs[node.index]
        return tuple(sorted([other for one, other in pairs if one == node.index]))

    def _arrive(self, link: Link, sender: int, receiver: int, event: m.Event) -> None:
        world, node = self._world, self._world.nodes[receiver]
        if node.asleep():
            world.at(node.wakes_s - world.now, self._arrive, link, sender, receiver, event)
            return
        # The links of an SMP whose place another one took were dropped.
        stale = node.instance != link.receiver
        if node.epoch == link.epoch:
            stale |= node.met.get(sender) != link.sender
        else:
            stale |= node.met.get(sender, link.sender) != link.sender
            stale |= world.draw.random() > LATE
        if stale or world.now > link.lost_from_s:
            return
        node.handle(event)

    def _repeat(self, pair: tuple[int, int], link: Link) -> None:
        """Deliver some of the last frames of a link once more, after a new epoch has begun."""
        late = replace(link, lost_from_s=math.inf)
        for event in link.recent:
            if self._world.draw.random() < LATE:
                self._world.at(self._world.soon(1e-3, 0.3), self._arrive, late, *pair, event)

    def _open(self, node: Node, instance: int, epoch: int, peer: int, pause_s: float) -> None:
        world, other = self._world, self._world.nodes[peer]
        if node.instance != instance or node.epoch != epoch or (node.index, peer) in self._links:
            return
        up = other.protocol is not None and other.epoch == epoch and other.descriptors
        up = up and node.descriptors and not other.asleep() and not node.asleep()
        if not (up and self.reachable(node.index, peer)):
            later_s = min(_LONGEST_PAUSE_S, 2 * pause_s)
            world.at(pause_s, self._open, node, instance, epoch, peer, later_s)
            return
        known = other.met.setdefault(node.index, instance)
        if known != instance:
            other.met[node.index] = instance
            other.handle(m.PeerReplaced(node.index, epoch))
        link = Link(instance, other.instance, epoch)
        world.at(world.soon(1e-4, 3e-3), self._opened, node, peer, link)

    def _opened(self, node: Node, peer: int, link: Link) -> None:
        if node.instance != link.sender or node.epoch != link.epoch:
            return
        self._links[node.index, peer] = link
        for end in (node.index, peer):
            self._pairs[end].add((node.index, peer))
        node.handle(m.PeerLinked(peer))

    def _end(self, pair: tuple[int, int]) -> None:
        link = self._links.pop(pair)
        for end in pair:
            self._pairs[end].discard(pair)
        link.lost_from_s = self._world.now + self._world.soon(-2e-3, 4e-3)

    def _closed(self, pair: tuple[int, int], link: Link) -> None:
        """Let a node notice that a link that it opened has ended."""
        if self._links.get(pair) is not link:
            return
        self._end(pair)
        node = self._world.nodes[pair[0]]
        node.handle(m.PeerUnlinked(pair[1]))
        retry = node, node.instance, node.epoch, pair[1], _FIRST_PAUSE_S
        self._world.at(_FIRST_PAUSE_S, self._open, *retry)

    def fell_silent(self, silent: Node) -> None:
        """Let the other nodes notice that a node sends nothing any more, until it does again."""
        if not silent.asleep():
            return
        for one, other in sorted(self._pairs[silent.index]):
            if other == silent.index:
                link = self._links[one, other]
                self._world.nodes[one].handle(m.PeerUnlinked(other))
                back_s = silent.wakes_s - self._world.now + self._world.soon(0, 1)
                self._world.at(back_s, self._heard, (one, other), link)

    def _heard(self, pair: tuple[int, int], link: Link) -> None:
        if self._links.get(pair) is link:
            self._world.nodes[pair[0]].handle(m.PeerLinked(pair[1]))


def _event(out: m.ToPeer | m.Ship, node: int, blob: bytes) -> m.Event:
    kind: Any = m.FromPeer.by_verb[out.verb if isinstance(out, m.ToPeer) else "chunk"]
    if name := _BLOBS.get(kind):
        return kind(node=node, **out.fields, **{name: blob})  # type: ignore[no-any-return]
    return kind(node=node, **out.fields)  # type: ignore[no-any-return]
