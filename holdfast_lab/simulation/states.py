"""Small training states, whose bytes follow from a number, and their copies by the library."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import torch

from holdfast import events
from holdfast.snapshot.client import shards
from holdfast.snapshot.client.copies import ShardedCopy
from holdfast.snapshot.layout import flat_buffer, groups, node_groups, shares
from holdfast.snapshot.layout.groups import Job, Mode, Seat, ShardingGroup
from holdfast.snapshot.layout.manifest import Manifest, Sharding, ShardRef, TensorRef
from holdfast.snapshot.layout.node_groups import Nodes
from holdfast.snapshot.node import membership
from holdfast.snapshot.node.session import Content
from holdfast.snapshot.protocol import messages as m
from holdfast.snapshot.protocol import parity_stream, state_machine
from holdfast.snapshot.restore import choose_step, stripe_decode

if TYPE_CHECKING:
    from holdfast.snapshot.layout.flat_buffer import Tree
    from holdfast.snapshot.node.membership import Membership

_PATHS = ["model.weight", "optimizer.state", "rng"]
# So few different states that most copies were made before. A prime: a mixture of two states is
# mistaken for one of them in one of so many cases.
STATES = 127


def next_token(token: int, step: int, life: int) -> int:
    """Return the number of the state after a step; each life trains on with other ones."""
    return zlib.crc32(f"{token} {step} {life}".encode()) % STATES


@lru_cache(maxsize=64)
def tensors_of(token: int, owner: int) -> tuple[torch.Tensor, ...]:
    """Return the tensors of a state; ``owner`` is -1 if all ranks hold the same."""
    draw = Random(f"{token} {owner}")
    sizes = 410 + 37 * (owner + 1) % 190, 90
    return tuple(torch.frombuffer(bytearray(draw.randbytes(n)), dtype=torch.uint8) for n in sizes)


def all_tensors(token: int, rank: int, replicated: bool) -> list[torch.Tensor]:
    """Return the tensors of a rank's state."""
    own = torch.tensor([rank, token], dtype=torch.int64)
    return [*tensors_of(token, -1 if replicated else rank), own]


def is_state(tree: Tree, rank: int, replicated: bool) -> bool:
    """Return true if every byte of a restored state is right."""
    return are_equal(all_tensors(tree["token"], rank, replicated), tree["tensors"])


def are_equal(wanted: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> bool:
    """Return true if every byte of some tensors is right."""
    return all(torch.equal(one, other) for one, other in zip(wanted, found, strict=True))


def tree_of(described: Manifest, tensors: list[torch.Tensor]) -> Tree:
    """Return the state that a manifest and its tensors make."""
    skeleton: Any = described.skeleton
    return {"token": skeleton["token"], "tensors": tensors}


class Written(NamedTuple):
    """What the library's copy of a state writes, and says of it."""

    memory: bytes
    content: Content


class Source(NamedTuple):
    """A rank's state, at the rank's place among the ranks that divide or stripe it.

    ``sharding`` says of which tensor of all ranks its first one is a shard, if they divide one.
    """

    rank: int
    token: int
    seat: Seat
    parities: int
    peers: tuple[int, ...]
    sharding: Sharding | None = None

    @classmethod
    def of(cls, rank: int, token: int, membership: Membership) -> Source:
        """Return the state of a rank."""
        return cls(rank, token, membership.seat, membership.parities, membership.peers())

    def asked(self) -> tuple[int, list[int]]:
        """Return what is asked of other nodes: the own size, and the ranks of other sizes."""
        return _own_nbytes(self._replace(token=0)), list(self.peers)

    def written(self, sizes: Iterable[int] | None) -> Written:
        """Return the copy by the library, among states of these sizes; each is made once."""
        return _written(self, None if sizes is None else tuple(sizes))

    def copy(self) -> ShardedCopy:
        """Return the library's copy of the state, which has not been written yet."""
        replicated = self.seat.group.mode is Mode.REPLICATED
        tensors = all_tensors(self.token, self.rank, replicated)
        references = [TensorRef(index) for index in range(len(tensors))]
        if self.sharding is not None:
            references[0] = ShardRef(0, self.sharding)
        tree = {"token": self.token, "tensors": references}
        flat = flat_buffer.Flat(tree, _PATHS, tensors, [True, True, False], live=tensors)
        about: Any = {"seat": self.seat, "parities": self.parities, "peers": self.peers}
        return ShardedCopy(0, flat, **about)


@lru_cache(maxsize=1024)
def _own_nbytes(source: Source) -> int:
    return source.copy().share.sizes[source.seat.index]


@lru_cache(maxsize=2**15)
def _written(source: Source, sizes: tuple[int, ...] | None) -> Written:
    copy = source.copy()
    if sizes is not None:
        copy.share_out(list(sizes))
    memory = bytearray(copy.nbytes)
    room = torch.frombuffer(memory, dtype=torch.uint8) if memory else torch.empty(0)
    content = copy.write(room)
    return Written(bytes(memory), content)


def forget() -> None:
    """Forget the copies that were made, because other code makes them from now on."""
    _written.cache_clear()


def written(local: int, step: int, content: Content) -> m.Written:
    """Return the message that a copy is complete, as ``SmpSession.written`` sends it."""
    plan = vars(content.plan) if content.plan else {}
    about = local, step, content.digest, content.manifest
    return m.Written(*about, claims=content.claims, seen=content.seen, parity_plan=plan)


class _OneThread:
    """A ``ThreadPoolExecutor`` that computes at once, so that a seed always does the same."""

    def __init__(self, *_: object) -> None:
        pass

    def __enter__(self) -> _OneThread:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def map(self, work: Any, items: list[Any]) -> list[Any]:
        return [work(item) for item in items]


# Ranks compute the same groups and steps; in a real run each does so in a process of its own.
_known_groups = lru_cache(maxsize=2**14)(groups.sharding_groups)
_known_cut = lru_cache(maxsize=256)(node_groups.node_groups)
_known_holders = lru_cache(maxsize=16)(Job.holders)


def _sharding_groups(job: Job, parities: int, cut: Iterable[Nodes]) -> tuple[ShardingGroup, ...]:
    return _known_groups(job, parities, tuple(cut))


def _node_groups(
    job: Job, parities: int, most: int, domains: Iterable[str], kept: Iterable[Nodes]
) -> tuple[Nodes, ...]:
    return _known_cut(job, parities, most, tuple(domains), tuple(kept))


def _once(function: Any) -> Any:
    """Return a function that computes once what all ranks do from what they told each other."""
    known: dict[str, Any] = {}

    def shared(told: Sequence[Any], size: int) -> Any:
        if known.get("by") is not told[0]:  # in another agreement
            known.update(by=told[0], found=list(function(told, size)))
        return known["found"]

    return shared


_held_steps, _held_groups = _once(choose_step.held_steps), _once(membership.held_groups)


@contextmanager
def small_pieces() -> Iterator[None]:
    """Let states of some hundred bytes have several pieces; decode them in this thread.

    What restores record as events is dropped, because it befell no process of this run.
    """

    def silent(*_: object, **__: object) -> None:
        pass

    patches = [
        (shares, "BUCKET_BYTES", 256),
        (shards, "CHUNK_BYTES", 128),
        (parity_stream, "CHUNK_BYTES", 192),
        (stripe_decode, "ThreadPoolExecutor", _OneThread),
        (events, "record", silent),
        (groups, "sharding_groups", _sharding_groups),
        (node_groups, "node_groups", _node_groups),
        (Job, "holders", _known_holders),
        (choose_step, "held_steps", _held_steps),
        (membership, "held_groups", _held_groups),
        (state_machine.History, "note", silent),  # the world has a log of its own
    ]
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(mock.patch.object(*patch))
        yield
