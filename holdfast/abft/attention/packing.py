"""Packed sequences, and the tiles that a mask leaves, for the Triton attention kernels."""

from typing import NamedTuple

import torch
import triton
from torch.nn import functional

from holdfast.abft.triton.launch import Matrix


class Span(NamedTuple):
    """Where the sequences of a packed operand begin.

    Attributes:
        first: int32 [batch + 1], cumulative lengths; None if the operand is not packed.
        total: Rows of the operand.
    """

    first: torch.Tensor | None
    total: int


class Starts(NamedTuple):
    """The sequences of queries and those of keys."""

    queries: Span
    keys: Span


class Packing(NamedTuple):
    """Sequences packed one after the other: cumulative lengths, int32 [batch + 1], and longest."""

    queries: torch.Tensor
    keys: torch.Tensor
    longest_query: int
    longest_key: int

    def check(self, q: torch.Tensor, k: torch.Tensor) -> None:
        """Raise ValueError if operands or cumulative lengths have another form than is needed."""
        for name, tensor in (("q", q), ("k", k)):
            if tensor.dim() != 3:
                raise ValueError(
                    f"attention: {name} has shape {tuple(tensor.shape)}: give packed sequences as "
                    "[total, heads, d]"
                )
        for name, given in (("queries", self.queries), ("keys", self.keys)):
            fits = given.dtype == torch.int32 and given.dim() == 1 and given.is_contiguous()
            if not fits or given.device != q.device or len(given) != len(self.queries):
                raise ValueError(
                    f"attention: cumulative lengths of {name} are {given.dtype} "
                    f"{tuple(given.shape)} on {given.device}: give contiguous int32 [batch + 1] on "
                    f"{q.device}, one batch for queries and keys"
                )

    def starts(self, queries: int, keys: int) -> Starts:
        """Return where the sequences begin in operands of so many rows."""
        return Starts(Span(self.queries, queries), Span(self.keys, keys))

    def unpacked(self, tensor: torch.Tensor) -> torch.Tensor:
        """View [total, heads, d] as [batch, heads, total, d], the same memory for each sequence."""
        return tensor.transpose(0, 1).expand(len(self.queries) - 1, -1, -1, -1)


class Order(NamedTuple):
    """For each tile of rows the streamed tiles of which any element is attended to.

    Attributes:
        counts: int32 [batch, heads, tiles of rows]: how many they are.
        tiles: int32 [batch, heads, tiles of rows, streamed tiles]: their numbers, in order.
    """

    counts: Matrix
    tiles: Matrix


def order_of(mask: torch.Tensor, rows: int, stream: int) -> Order:
    """List the tiles that a mask leaves, without waiting for the device.

    Args:
        mask: bool, or values of which −INF hides a key, [batch, heads, L, streamed L], broadcast;
            transposed for the kernel whose programs own keys.
        rows: Rows that a program owns.
        stream: Rows that it streams at a time.
    """
    batch, heads, length, streamed = mask.shape
    for axis in range(4):  # what is broadcast is looked at once
        mask = mask.narrow(axis, 0, 1) if mask.stride(axis) == 0 else mask
    seen = mask if mask.dtype == torch.bool else mask != -torch.inf
    for axis, size in ((2, rows), (3, stream)):
        seen = _any_of_tiles(seen, axis, size)
    shape = (batch, heads, triton.cdiv(length, rows), triton.cdiv(streamed, stream))
    last = seen.expand(-1, -1, -1, shape[3])
    # Stable: the tiles that are left keep their order.
    tiles = last.to(torch.int8).sort(dim=-1, descending=True, stable=True).indices.int()
    counts = last.sum(-1, dtype=torch.int32)
    return Order(Matrix.of(counts.expand(shape[:3])), Matrix.of(tiles.expand(shape)))


def _any_of_tiles(seen: torch.Tensor, axis: int, size: int) -> torch.Tensor:
    """Reduce an axis to its tiles of some size, of which the last may be shorter."""
    if seen.shape[axis] == 1:
        return seen
    padding = (0, 0) * (3 - axis) + (0, -seen.shape[axis] % size)
    tiles: torch.Tensor = functional.pad(seen, padding).unflatten(axis, (-1, size)).any(axis + 1)
    return tiles
