"""The work of a group's nodes to save a state, run on this machine one after another."""

import multiprocessing
import os
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path

import torch

from holdfast import config
from holdfast.memory import available_bytes
from holdfast.snapshot.client import shards
from holdfast.snapshot.layout import flat_buffer, shares
from holdfast.snapshot.layout.flat_buffer import Flat
from holdfast.snapshot.layout.shares import Share
from holdfast.snapshot.parity import erasure_code
from holdfast.snapshot.parity.stripes import Fragment, Span
from holdfast_lab.study import timing
from holdfast_lab.study.reft.opt import Opt, cut, training_state

_CHUNK_BYTES = 16 * 2**20
_RESERVE_BYTES = 2 * 10**9
REPEATS = 3


def room_for(nbytes: int) -> str:
    """Return the reason why ``nbytes`` of memory cannot be used; empty if they can."""
    room = available_bytes() - _RESERVE_BYTES
    return "" if nbytes <= room else f"{nbytes} bytes are needed and {max(0, room)} available"


def seconds(run: Callable[[], object]) -> float:
    """Return the shortest time of a few runs, which has the least disturbance by other work."""
    return min(timing.seconds(run) for _ in range(REPEATS))


def touched(nbytes: int) -> torch.Tensor:
    """Allocate memory and touch all its pages, as the snapshot process does with its buffers."""
    return torch.full((nbytes,), 1, dtype=torch.uint8)


def whole_s(flat: Flat) -> float:
    """Measure the time in which one node alone copies and digests the whole state."""
    entries = flat_buffer.plan(flat)
    buffer = touched(flat_buffer.total_bytes(entries))
    return seconds(lambda: flat_buffer.write(flat, entries, buffer, lambda: False))


class Group:
    """Nodes (at least 2) that hold replicas of one state, and the memory into which each saves."""

    def __init__(self, flat: Flat, nodes: int) -> None:
        self.flat, self.entries = flat, shares.plan(flat)
        size = flat_buffer.stable_bytes(flat, self.entries)
        self.shares = [Share(n, nodes, 1, 0, 1, True, (size,) * nodes) for n in range(nodes)]
        self.buffers = [touched(share.buffer_nbytes) for share in self.shares]

    def save(self, node: int) -> None:
        """Save the shard of ``node`` and its parity, with digests."""
        share, buffer = self.shares[node], self.buffers[node]
        shards.write(self.flat, self.entries, share, buffer, lambda: False)

    def slowest_s(self) -> float:
        """Return the longest time of any node to save; they run one after another."""
        return max(seconds(partial(self.save, node)) for node in range(len(self.shares)))

    def slowest_shard_s(self) -> float:
        """Return the longest time of any node to save its shard without parities."""
        return max(
            whole_s(cut(self.flat, share.striping.shard(share.node))) for share in self.shares
        )

    def moved_bytes(self, node: int) -> int:
        """Return the bytes of the state that a node reads, for its shard and for its parity."""
        striping = self.shares[node].striping
        (coding,) = striping.encodings(node)
        return striping.shard(node).nbytes + sum(source.nbytes for source in coding.sources)

    def decoded(self, lost: int) -> list[tuple[Fragment, torch.Tensor]]:
        """Compute the fragments of a lost node's shard from what the other nodes hold."""
        striping, found = self.shares[0].striping, []
        for stripe in range(striping.nodes):
            target = striping.fragment(stripe, lost)
            if target.role >= striping.data_blocks or not target.nbytes:
                continue
            others = [each for each in striping.stripe(stripe) if each.node != lost]
            sources = {s.role: self._held(s).numpy() for s in others[: striping.data_blocks]}
            fragment = torch.empty(target.nbytes, dtype=torch.uint8)
            erasure_code.decode({target.role: fragment.numpy()}, sources, striping.data_blocks)
            found.append((target, fragment))
        return found

    def check(self, lost: int) -> None:
        """Check that the other nodes' memory reproduces the shard of a lost node bit for bit.

        Raises:
            RuntimeError: It does not, so that no measured time is valid.
        """
        for target, fragment in self.decoded(lost):
            if not torch.equal(fragment, self._state(self.shares[0].striping.place(target))):
                raise RuntimeError(f"a fragment of {lost} came back wrong: {target}")

    def _held(self, fragment: Fragment) -> torch.Tensor:
        return self.buffers[fragment.node][fragment.offset : fragment.offset + fragment.nbytes]

    def _state(self, span: Span) -> torch.Tensor:
        scratch = torch.zeros(span.nbytes, dtype=torch.uint8)
        for entry, tensor in zip(self.entries, self.flat.tensors, strict=True):
            first, last = max(span.start, entry.offset), min(span.stop, entry.offset + entry.nbytes)
            if first < last:
                raw = tensor.reshape(-1).view(torch.uint8)[
                    first - entry.offset : last - entry.offset
                ]
                scratch[first - span.start : last - span.start] = raw
        return scratch


def at_once_s(model: Opt, nodes: int) -> float:
    """Measure processes that save their shares at the same time; return the slowest one's time.

    Each holds a replica of its own, as nodes do, but all share this machine's memory bandwidth.

    Raises:
        RuntimeError: A process failed or did not answer in time.
    """
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(nodes)
    limit_s = 2 * config.timeout_s() + model.state_bytes / 50e6
    pipes = [context.Pipe(duplex=False) for _ in range(nodes)]
    rows = [(model, node, nodes, barrier, limit_s, pipes[node][1]) for node in range(nodes)]
    processes = [context.Process(target=_member, args=row, daemon=True) for row in rows]
    try:
        for process, (_, sending) in zip(processes, pipes, strict=True):
            process.start()
            sending.close()
        return max(_answer(receiving, limit_s) for receiving, _ in pipes)
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()


def _answer(receiving: Connection, limit_s: float) -> float:
    try:
        if receiving.poll(limit_s):
            return float(receiving.recv())
    except EOFError:
        pass
    raise RuntimeError(f"a process that saves a share failed, or took longer than {limit_s:g} s")


def _member(
    model: Opt, node: int, nodes: int, barrier: Barrier, limit_s: float, sending: Connection
) -> None:
    torch.set_num_threads(1)
    flat = training_state(model.stages(1)[0], torch.Generator().manual_seed(0))
    entries = shares.plan(flat)
    size = flat_buffer.stable_bytes(flat, entries)
    share = Share(node, nodes, 1, 0, 1, True, (size,) * nodes)
    buffer = touched(share.buffer_nbytes)
    times = []
    for _ in range(REPEATS):
        barrier.wait(limit_s)
        started_s = time.perf_counter()
        shards.write(flat, entries, share, buffer, lambda: False)
        barrier.wait(limit_s)
        times.append(time.perf_counter() - started_s)
    sending.send(min(times))


def raw_write_s(folder: Path, nbytes: int, bucket: int = _CHUNK_BYTES) -> float:
    """Measure the time of writing bytes to a new file in buckets, with a sync at the end."""
    source, path = touched(bucket).numpy().data, folder / "raw"

    def run() -> None:
        with open(path, "wb", buffering=0) as file:
            for start in range(0, nbytes, bucket):
                file.write(source[: min(bucket, nbytes - start)])
            os.fsync(file.fileno())
        path.unlink()

    return seconds(run)


def write_checkpoint(state: object, path: Path) -> None:
    """Write a file by ``torch.save``, until the disk has it."""
    with open(path, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def torch_save_s(folder: Path, nbytes: int) -> float:
    """Measure the time of ``torch.save``, serialisation included."""
    tensor, path = touched(nbytes), folder / "saved"

    def run() -> None:
        write_checkpoint(tensor, path)
        path.unlink()

    return seconds(run)
