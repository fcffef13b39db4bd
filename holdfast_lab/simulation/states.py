"""Small training states, whose bytes follow from a number, and their copies by the library."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from random import Random
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from holdfast import events
from holdfast.snapshot.client import shards
from holdfast.snapshot.client.copies import ShardedCopy
from holdfast.snapshot.layout import flat_buffer, shares
from holdfast.snapshot.layout.groups import Mode
from holdfast.snapshot.layout.manifest import Manifest, TensorRef
from holdfast.snapshot.node.session import Content
from holdfast.snapshot.protocol import messages as m
from holdfast.snapshot.protocol import parity_stream, state_machine
from holdfast.snapshot.restore import stripe_decode

if TYPE_CHECKING:
    from holdfast.snapshot.layout.flat_buffer import Tree
    from holdfast.snapshot.node.membership import Membership

_PATHS = ["model.weight", "optimizer.state", "rng"]


def next_token(token: int, step: int, life: int) -> int:
    """Return the number of the state after a step; each life trains on with other ones."""
    return zlib.crc32(f"{token} {step} {life}".encode())


@lru_cache(maxsize=64)
def tensors_of(token: int, owner: int) -> tuple[torch.Tensor, ...]:
    """Return the tensors of a state; ``owner`` is -1 if all ranks hold the same."""
    draw = Random(f"{token} {owner}")
    sizes = 410 + 37 * (owner + 1) % 190, 90
    return tuple(torch.frombuffer(bytearray(draw.randbytes(n)), dtype=torch.uint8) for n in sizes)


def _all_tensors(token: int, rank: int, replicated: bool) -> list[torch.Tensor]:
    own = torch.tensor([rank, token], dtype=torch.int64)
    return [*tensors_of(token, -1 if replicated else rank), own]


def is_state(tree: Tree, rank: int, replicated: bool) -> bool:
    """Return true if every byte of a restored state is right."""
    wanted = _all_tensors(tree["token"], rank, replicated)
    pairs = zip(wanted, tree["tensors"], strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


def tree_of(described: Manifest, tensors: list[torch.Tensor]) -> Tree:
    """Return the state that a manifest and its tensors make."""
    skeleton: Any = described.skeleton
    return {"token": skeleton["token"], "tensors": tensors}


def copy_of(rank: int, step: int, token: int, membership: Membership) -> ShardedCopy:
    """Return the library's copy of a rank's state."""
    seat = membership.seat
    tensors = _all_tensors(token, rank, seat.group.mode is Mode.REPLICATED)
    references = [TensorRef(index) for index in range(len(tensors))]
    flat = flat_buffer.Flat(
        {"token": token, "tensors": references}, _PATHS, tensors, [True, True, False], live=tensors
    )
    peers = membership.peers()
    return ShardedCopy(step, flat, seat=seat, parities=membership.parities, peers=peers)


def asked(copy: ShardedCopy) -> tuple[int, list[int]]:
    """Return what a copy asks of other nodes: its own size, and the ranks whose sizes it needs."""
    return copy.share.sizes[copy.seat.index], list(copy.peers)


class _Sizes:
    """Answers the one question of ``ShardedCopy.agree``."""

    def __init__(self, sizes: list[int]) -> None:
        self._sizes = sizes

    def sizes(self, *_: object) -> list[int]:
        return self._sizes


def agree(copy: ShardedCopy, sizes: list[int]) -> None:
    """Give a copy the sizes of the states that are striped with its own."""
    answers: Any = _Sizes(sizes)
    copy.agree(answers)


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

    def submit(self, work: Any, *arguments: Any) -> _Done:
        return _Done(work(*arguments))


class _Done:
    def __init__(self, value: Any) -> None:
        self._value = value

    def result(self) -> Any:
        return self._value


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
        (parity_stream, "CHUNK_BYTES", 128),
        (stripe_decode, "ThreadPoolExecutor", _OneThread),
        (events, "record", silent),
        (state_machine.History, "note", silent),  # the world has a log of its own
    ]
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(mock.patch.object(*patch))
        yield
