"""Reading steps that the SMP holds, from any process: pinned meanwhile, by read-only memory."""

import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from holdfast import config
from holdfast.errors import SmpUnavailable, SnapshotCorrupt
from holdfast.snapshot.client.session import mapped
from holdfast.snapshot.disk.persist_format import Part
from holdfast.snapshot.layout import flat_buffer, manifest, shares
from holdfast.snapshot.layout.manifest import Manifest
from holdfast.snapshot.layout.shares import ShareManifest
from holdfast.snapshot.node import launch
from holdfast.snapshot.protocol.checkpoint_schedule import ALONE, Needed
from holdfast.snapshot.protocol.roster import ProtocolViolation, Roster
from holdfast.snapshot.transport.frames import Frame

ANY_STEP = 2**62


@dataclass(frozen=True)
class Leased:
    """A pinned step: the state, or the share of it, of every local rank.

    ``needed`` are checkpoints that must not be removed for it.
    """

    step: int
    parts: list[Part]
    epoch: int = 0
    first_rank: int = 0
    nodes: int = 1
    needed: Needed = ALONE

    @property
    def nbytes(self) -> int:
        """Bytes of memory of all ranks."""
        return sum(part.buffer.numel() for part in self.parts)

    @property
    def world_size(self) -> int:
        """The ranks of the run, of all nodes."""
        return self.nodes * len(self.parts)


def damage_of(part: Part) -> str:
    """Describe what does not match its digest in a rank's state or share; or nothing."""
    try:
        described = manifest.decode(part.manifest, part.digest, opaque=True)
        if described.attachment is not None:
            share = ShareManifest.decode(part.manifest, part.digest, opaque=True)
            return shares.damage_in(share, part.buffer)
        for entry in described.entries:
            flat_buffer.read(Manifest(None, (entry,)), part.buffer)
    except SnapshotCorrupt as error:
        return str(error)
    return ""


class Reader:
    """A connection that reads; holds one step at a time; not for two threads at once.

    Raises:
        SmpUnavailable: no SMP runs in ``run_dir``, or it cannot be reached.
    """

    def __init__(self, run_dir: Path) -> None:
        connection = launch.connect(run_dir)
        if connection is None:
            raise SmpUnavailable(
                f"no SMP runs in {run_dir}: it was lost, stopped, or never started"
            )
        self._connection = connection
        self.close = connection.close  # which gives back what is held

    def lease(self, before: int = ANY_STEP) -> Leased | None:
        """Pin the newest clean step below ``before``; None if there is none.

        Raises:
            ConnectionError: the SMP is gone. SmpUnavailable: it does not answer in time.
        """
        self._connection.send("lease", before=before)
        return self._leased(self._connection.receive())

    def wait_due(self, every: int, after: int, steps: Sequence[int]) -> Leased:
        """Wait, as long as it takes, for a step that is due to be persisted, and pin it.

        ``every``, ``after`` and ``steps`` are those of ``messages.Due``.

        Raises:
            ConnectionError: the SMP ended.
        """
        self._connection.send("due", every=every, after=after, steps=list(steps))
        while (answer := self._connection.poll(config.timeout_s())) is None:
            continue
        leased = self._leased(answer)
        assert leased is not None
        return leased

    def release(self) -> tuple[bool, int]:
        """Give the step back: whether it stayed as it was all the time, and the newest step now."""
        self._connection.send("release")
        answer = self._connection.receive()
        return bool(answer.header["intact"]), int(answer.header["newest"])

    def persisted(self, step: int, error: str) -> None:
        """Say what became of a step; no ``error``: it is on disk."""
        self._connection.send("persisted", step=step, error=error[:1000])

    def clean_steps(self) -> Iterator[Leased]:
        """Return the clean steps, newest first, each pinned until the next is taken."""
        before = ANY_STEP
        while (leased := self.lease(before)) is not None:
            yield leased
            before = leased.step

    def roster(self) -> Roster | None:
        """Return the nodes that divide the state; None where each is on its own."""
        self._connection.send("roster")
        given = self._connection.receive().header["roster"]
        return Roster.parse(given) if given is not None else None

    def _leased(self, answer: Frame) -> Leased | None:
        if answer.verb == "none":
            return None
        if answer.verb != "leased":
            raise ProtocolViolation(f"unexpected {answer.verb!r} from the SMP")
        frames = [self._connection.receive() for _ in range(int(answer.header["ranks"]))]
        header = answer.header
        return Leased(
            int(header["step"]),
            [_part(frame) for frame in frames],
            header["epoch"],
            needed=Needed(*header["needed"]),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _part(frame: Frame) -> Part:
    buffer: torch.Tensor = mapped(frame.fds[0], mmap.MAP_PRIVATE)
    frame.close_fds()
    return Part(int(frame.header["rank"]), buffer, frame.blob, str(frame.header["digest"]))
