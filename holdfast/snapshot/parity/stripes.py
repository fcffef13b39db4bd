"""The layout of stripes over the nodes of a sharding group.

A group of n nodes keeps n stripes of n fragments, m of them parity (m = 1 or 2) and k = n - m data.
Replicas on one node are divided among its ranks in the same way, with m = 0: the ranks are the
nodes of the group, and none of them may be lost.
Parity p of stripe s is on node (s + p) mod n, data elsewhere. So every node holds k data blocks,
which together are one contiguous *shard*, and m parities of stripes that it has no data of::

    n = 4, m = 1      node 0    node 1    node 2    node 3        P  parity, a XOR of a row
      stripe 0          P         d0        d1        d2          d  data, numbered by role
      stripe 1          d2        P         d0        d1
      stripe 2          d1        d2        P         d0          a node's buffer: its shard (k
      stripe 3          d0        d1        d2        P           blocks), then its parities

Replicas of one state (:meth:`Striping.of_replicas`) divide it among the nodes, and each node
computes its parities from its own replica without any transfer. Nodes with states of their own
(:meth:`Striping.of_shards`) use the same layout and send their blocks to the node with the parity.

Source: RAIM5 of REFT (Wang et al. 2023, §4.3); the contiguous shards, states without replicas and
the second parity are ours.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from holdfast.errors import ConfigError, SnapshotLost

ALIGNMENT_BYTES = 64
MAX_PARITIES = 2
# The coefficients of the second parity, powers of 2 in GF(256), repeat after 255 blocks.
MAX_DATA_BLOCKS = 255


@dataclass(frozen=True)
class Span:
    """The bytes ``start`` … ``stop`` - 1."""

    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """The length in bytes."""
        return self.stop - self.start


@dataclass(frozen=True)
class Fragment:
    """One block of a stripe: ``nbytes`` bytes at ``offset`` of the buffer of ``node``.

    ``role`` is its number in the code: 0 … k-1 are data, k is the first parity, k+1 the second. A
    fragment that is shorter than another of its stripe counts as padded with zeros, which are not
    stored.
    """

    stripe: int
    role: int
    node: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Encoding:
    """The parity ``target`` and the data blocks ``sources`` of which it is computed, by role."""

    target: Fragment
    sources: tuple[Fragment, ...]


@dataclass(frozen=True)
class Striping:
    """The layout of one sharding group, made by ``of_replicas`` or ``of_shards``.

    Each node keeps ``shard_nbytes`` of state as data. If it is ``replicated`` every node can read
    all of the state, else only its own shard. Blocks are as long as the longest fragment, padded to
    64.

    **Guarantees**: any ``parities`` nodes (0, 1 or 2) may be lost. A node's buffer is n blocks: for
    replicas of W bytes at most W/(n-1) with one parity and W/(n-2) with two, plus less than 64·n
    bytes of rounding; for shards of at most W bytes n/(n-1)·W and n/(n-2)·W plus the same. Each
    clean snapshot, and the one in flight, takes one such buffer.
    """

    shard_nbytes: tuple[int, ...]
    parities: int
    replicated: bool
    block_nbytes: int

    @classmethod
    def of_replicas(cls, nodes: int, nbytes: int, parities: int = 1) -> "Striping":
        """Return the layout for ``nodes`` that all hold the same state of ``nbytes`` bytes.

        Impossible numbers raise ConfigError.
        """
        _check(nodes, [nbytes], parities)
        data_blocks = nodes - parities
        block = _padded(nbytes, nodes * data_blocks)
        full = data_blocks * block
        shards = tuple(max(0, min(full, nbytes - node * full)) for node in range(nodes))
        return cls(shards, parities, True, block)

    @classmethod
    def of_shards(cls, shard_nbytes: Sequence[int], parities: int = 1) -> "Striping":
        """Return the layout for nodes that hold different states of these sizes in bytes."""
        _check(len(shard_nbytes), shard_nbytes, parities)
        block = _padded(max(shard_nbytes), len(shard_nbytes) - parities)
        return cls(tuple(shard_nbytes), parities, False, block)

    @property
    def nodes(self) -> int:
        """The number n of nodes and of stripes."""
        return len(self.shard_nbytes)

    @property
    def data_blocks(self) -> int:
        """The number k of data blocks of a stripe and of a node."""
        return self.nodes - self.parities

    @property
    def buffer_nbytes(self) -> int:
        """The bytes of one buffer of a node: its shard, padded, and its parities."""
        return self.nodes * self.block_nbytes

    def shard(self, node: int) -> Span:
        """Return the bytes that ``node`` copies as data, as places in the state that it reads."""
        start = sum(self.shard_nbytes[:node]) if self.replicated else 0
        return Span(start, start + self.shard_nbytes[node])

    def place(self, fragment: Fragment) -> Span:
        """Return the place of a data block in the state that its node reads."""
        assert fragment.role < self.data_blocks
        start = self.shard(fragment.node).start + fragment.offset
        return Span(start, start + fragment.nbytes)

    def fragment(self, stripe: int, node: int) -> Fragment:
        """Return the fragment of ``stripe`` that ``node`` keeps."""
        turn = (node - stripe) % self.nodes
        if turn < self.parities:
            slot = role = self.data_blocks + turn
            nbytes = max(fragment.nbytes for fragment in self._data(stripe))
        else:
            slot, role = (stripe - node - 1) % self.nodes, turn - self.parities
            left = self.shard_nbytes[node] - slot * self.block_nbytes
            nbytes = max(0, min(self.block_nbytes, left))
        return Fragment(stripe, role, node, slot * self.block_nbytes, nbytes)

    def _data(self, stripe: int) -> tuple[Fragment, ...]:
        turns = range(self.parities, self.nodes)
        return tuple(self.fragment(stripe, (stripe + turn) % self.nodes) for turn in turns)

    def encodings(self, node: int) -> tuple[Encoding, ...]:
        """Return the parities on ``node``: first of stripe ``node``, second of the one before."""
        stripes = [(node - parity) % self.nodes for parity in range(self.parities)]
        return tuple(Encoding(self.fragment(s, node), self._data(s)) for s in stripes)

    def stripe(self, stripe: int) -> list[Fragment]:
        """Return the fragments of a stripe by their roles: data first, then parities."""
        found = (self.fragment(stripe, node) for node in range(self.nodes))
        return sorted(found, key=lambda fragment: fragment.role)

    def check_loss(self, lost: Collection[int]) -> None:
        """Check that the shards of the ``lost`` nodes can be decoded from those of the others.

        If more nodes were lost than there are parities, raise SnapshotLost.
        """
        if strangers := sorted(set(lost) - set(range(self.nodes))):
            raise ValueError(f"nodes {strangers} are not among the group's 0 … {self.nodes - 1}")
        if len(lost) > self.parities:
            raise SnapshotLost(
                f"nodes {sorted(lost)} of {self.nodes} were lost, and the parities make up for "
                f"{self.parities}: reload a persisted checkpoint"
            )


def portion(nbytes: int, part: int, parts: int) -> Span:
    """Return the bytes that rank ``part`` of ``parts`` of a node handles, 64-byte aligned."""
    if not 0 <= part < parts:
        raise ValueError(f"part={part} of parts={parts}: must be 0 … {parts - 1}")
    width = _padded(nbytes, parts)
    return Span(min(nbytes, part * width), min(nbytes, (part + 1) * width))


def _padded(nbytes: int, blocks: int) -> int:
    return -(-nbytes // (blocks * ALIGNMENT_BYTES)) * ALIGNMENT_BYTES


def _check(nodes: int, sizes: Sequence[int], parities: int) -> None:
    if not 0 <= parities <= MAX_PARITIES:
        raise ConfigError(f"parities={parities}: must be 0, 1 or 2")
    if nodes <= parities:
        raise ConfigError(
            f"{nodes} node(s) cannot survive the loss of {parities}: at least {parities + 1} are "
            "needed"
        )
    if parities > 1 and nodes - parities > MAX_DATA_BLOCKS:
        raise ConfigError(
            f"{nodes} nodes: with two parities a group has at most {MAX_DATA_BLOCKS + 2} nodes; "
            "make smaller sharding groups"
        )
    if min(sizes) < 0:
        raise ConfigError(f"a state of {min(sizes)} bytes: sizes must be at least 0")
