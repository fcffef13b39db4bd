"""The division of a state among the ranks of one node that all hold it (data parallelism).

Without parities each rank would copy all of its state, and a node with L replicas would keep L
copies of every snapshot. Instead each of them copies an L-th part, and digests the part of another
rank, a different one in each snapshot, so that replicas that differ are still noticed.
"""

import time
from contextlib import suppress
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from holdfast import config, digest
from holdfast.digest.tensors import tensor_digests
from holdfast.errors import ConfigError, SnapshotError
from holdfast.snapshot.client.copies import Copy, ShardedCopy
from holdfast.snapshot.layout import flat_buffer, shares
from holdfast.snapshot.layout.groups import Mode, Seat, ShardingGroup
from holdfast.snapshot.layout.manifest import Entry
from holdfast.snapshot.node.session import Content, SmpSession
from holdfast.snapshot.protocol.roster import ProtocolViolation
from holdfast.snapshot.restore.reader import Reader

# How long training waits for the other local ranks at the first snapshot of all.
COMPARISON_PATIENCE_S = 10.0
# How long a repair waits for other local ranks that have not copied their parts yet.
PARTS_PATIENCE_S = 3.0
_POLL_S = 0.02


class Replicas:
    """The local ranks that hold the same state as this one.

    They are found at the first snapshot, where all local ranks compare the digests of their states.
    If the very first states that are divided after step 0 differ, the ranks were equal only at the
    start (trainings of their own that began alike), and from then on each copies all of its state.

    Attributes:
        ranks: the local ranks that divide a state with this one; empty until they are known.
    """

    def __init__(self, local_rank: int) -> None:
        self.ranks: tuple[int, ...] = ()
        self._local_rank = local_rank
        self._divided, self._proven = -1, False

    @staticmethod
    def possible() -> bool:
        """Return true if this process is one of several local ranks that train together."""
        joined = dist.is_available() and dist.is_initialized()
        return joined and config.local_world_size() > 1

    @property
    def shared(self) -> bool:
        """True if other local ranks hold the same state."""
        return len(self.ranks) > 1

    def found(self, ranks: tuple[int, ...]) -> None:
        """Note the ranks that divided the state which was restored."""
        self.ranks, self._proven = ranks, bool(ranks)

    def settle(self, session: SmpSession) -> None:
        """Learn what became of the snapshot before this one, as all local ranks do."""
        if self.shared and not self._proven:
            committed = session.settle()
            self.judged(session.diverged)
            self._proven = self.shared and committed == self._divided > 0

    def compare(self, session: SmpSession, copy: "LocalCopy") -> bool:
        """Find the local ranks with the same state; return false if they did not all answer."""
        said = session.compare(copy.step, copy.state_digest(), copy.is_patient)
        if said is None:
            return False
        own = said[self._local_rank]
        alike = tuple(rank for rank, other in enumerate(said) if other == own)
        self.ranks = alike if own else (self._local_rank,)
        return True

    def judged(self, diverged: dict[int, list[tuple[int, ...]]]) -> None:
        """Clear what was found to differ if the ranks turn out to hold states of their own."""
        if diverged and self.shared and not self._proven:
            diverged.clear()
            self.ranks = (self._local_rank,)

    def seat(self, step: int) -> Seat:
        """Return the place of this rank among those that divide the state after a step."""
        self._divided = step
        members = tuple((rank,) for rank in self.ranks)
        group = ShardingGroup(Mode.REPLICATED, self.ranks, members)
        return Seat(group, self.ranks.index(self._local_rank), 0, 1)


@dataclass
class LocalCopy(ShardedCopy):
    """The copy of a state on a node without parities: all of it, or this rank's part.

    Attributes:
        replicas: the local ranks that hold the same state.
    """

    seat: Seat = field(init=False)
    parities: int = field(default=0, init=False)
    peers: tuple[int, ...] = field(default=(), init=False)
    replicas: Replicas = field(kw_only=True)

    def __post_init__(self) -> None:
        Copy.__post_init__(self)
        self.start_waiting()

    def _planned(self) -> list[Entry]:
        return flat_buffer.plan(self.flat)

    def agree(self, session: SmpSession) -> bool:
        """Find out with whom the state is divided; as ``Copy.agree``."""
        replicas, self._run_dir = self.replicas, session.settings.run_dir
        replicas.settle(session)
        if not replicas.ranks and not replicas.compare(session, self):
            return False
        if replicas.shared:
            self.entries = shares.plan(self.flat)
            self.seat, self.peers = replicas.seat(self.step), replicas.ranks
            self.share_out([flat_buffer.stable_bytes(self.flat, self.entries)] * len(self.peers))
        return True

    def prioritize(self) -> None:
        """Copy with more threads, and wait for the other ranks only a moment longer."""
        Copy.prioritize(self)
        self.limit_patience(COMPARISON_PATIENCE_S)

    def state_digest(self) -> str:
        """Return a digest of the part that ranks could divide; empty if this state cannot be."""
        try:
            entries = shares.plan(self.flat)
        except ConfigError:
            return ""
        stable = [n for n, stable in enumerate(self.flat.stable) if stable]
        with self._ordered():
            digests = tensor_digests([self.flat.tensors[n] for n in stable])
        rows = zip((entries[n] for n in stable), digests, strict=True)
        told = [f"{e.path} {e.dtype} {e.shape} {e.offset} {found}" for e, found in rows]
        return digest.hexdigest("\n".join(told).encode())

    def write(self, buffer: torch.Tensor) -> Content:
        """Fill ``buffer`` with all of the state or with this rank's share, as ``Copy.write``."""
        return super().write(buffer) if self.peers else Copy.write(self, buffer)

    def stored(self, index: int) -> torch.Tensor | None:
        """Return the bytes that all ranks together copied of a tensor, as ``Copy.stored``.

        The digest shows parts that are not copied yet, for which it waits a moment, as well as
        damaged ones and those of another state.
        """
        if not (self.peers and self.flat.stable[index]):
            return super().stored(index)
        self.limit_patience(PARTS_PATIENCE_S)
        with suppress(OSError, ProtocolViolation, SnapshotError), Reader(self._run_dir) as reader:
            while not self._is_intact(index, raw := self._gathered(index, reader)):
                if not self.is_patient():
                    return None
                time.sleep(_POLL_S)
            return raw
        return None

    def _gathered(self, index: int, reader: Reader) -> torch.Tensor:
        entry, parts = self.entries[index], {part.rank: part for part in reader.copied(self.step)}
        raw = torch.zeros(entry.nbytes, dtype=torch.uint8)
        for node, rank in enumerate(self.peers):
            shard, start = self.share.striping.shard(node), entry.offset
            first, last = max(start, shard.start), min(start + entry.nbytes, shard.stop)
            held = parts[rank].buffer if rank in parts else raw[:0]
            if first < last <= shard.start + held.numel():
                raw[first - start : last - start] = held[first - shard.start : last - shard.start]
        return raw

    def _compared(self) -> int | None:
        count = len(self.peers)
        return (self.seat.index + 1 + self.step % (count - 1)) % count
