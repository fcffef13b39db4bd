"""Read access of any process to the SMP's clean steps, which stay pinned while they are read."""

import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from holdfast import config
from holdfast.errors import SmpUnavailable, SnapshotCorrupt
from holdfast.snapshot.disk.persist_format import Part
from holdfast.snapshot.layout import flat_buffer, manifest, shares
from holdfast.snapshot.layout.shares import ShareManifest
from holdfast.snapshot.node import launch
from holdfast.snapshot.node.session import mapped
from holdfast.snapshot.protocol.checkpoint_schedule import ALONE, Needed
from holdfast.snapshot.protocol.messages import ANY_STEP
from holdfast.snapshot.protocol.roster import ProtocolViolation, Roster
from holdfast.snapshot.transport.frames import Frame


@dataclass(frozen=True)
class Leased:
    """A pinned step: the state of every local rank, or its share of the state.

    ``needed`` names the checkpoints that must not be removed when this step is written to disk.
    """

    step: int
    parts: list[Part]
    epoch: int = 0
    first_rank: int = 0
    nodes: int = 1
    needed: Needed = ALONE

    @property
    def nbytes(self) -> int:
        """The bytes of memory of all ranks."""
        return sum(part.buffer.numel() for part in self.parts)

    @property
    def world_size(self) -> int:
        """The number of ranks of the run, of all nodes."""
        return self.nodes * len(self.parts)


def damage_of(part: Part) -> str:
    """Describe the first damage that the digests show in a rank's state or share, if any."""
    try:
        described = manifest.decode(part.manifest, part.digest, opaque=True)
        if described.attachment is not None:
            share = ShareManifest.decode(part.manifest, part.digest, opaque=True)
            return shares.damage_in(share, part.buffer)
        for entry in described.entries:
            flat_buffer.read([entry], part.buffer)
    except SnapshotCorrupt as error:
        return str(error)
    return ""


class Reader:
    """A connection that pins one step at a time; only one thread may use it at a time.

    A request raises ConnectionError if the SMP is gone, and SmpUnavailable if it does not answer in
    time.
    """

    def __init__(self, run_dir: Path) -> None:
        connection = launch.connect(run_dir)
        if connection is None:
            raise SmpUnavailable(
                f"no SMP runs in {run_dir}: it was lost, stopped, or never started"
            )
        self._connection = connection
        self.close = connection.close  # the SMP then releases the step that is held

    def lease(self, before: int = ANY_STEP) -> Leased | None:
        """Pin the newest clean step below ``before``; return None if there is none."""
        self._connection.send("lease", before=before)
        return self._leased(self._connection.receive())

    def copied(self, step: int) -> list[Part]:
        """Return the memory of a step of the ranks that copy it or have done so; it may change."""
        self._connection.send("copied", step=step)
        leased = self._leased(self._connection.receive())
        return leased.parts if leased is not None else []

    def wait_due(self, every: int, after: int, steps: Sequence[int]) -> Leased:
        """Wait for a step that is due (``messages.Due``), as long as it takes, and pin it."""
        self._connection.send("due", every=every, after=after, steps=list(steps))
        while (answer := self._connection.poll(config.timeout_s())) is None:
            continue
        leased = self._leased(answer)
        assert leased is not None
        return leased

    def release(self) -> tuple[bool, int]:
        """Release the step; return whether it stayed unchanged, and the newest step."""
        self._connection.send("release")
        answer = self._connection.receive()
        return bool(answer.header["intact"]), int(answer.header["newest"])

    def persisted(self, step: int, error: str) -> None:
        """Report that a step is on disk, or the ``error`` that prevented it."""
        self._connection.send("persisted", step=step, error=error[:1000])

    def clean_steps(self) -> Iterator[Leased]:
        """Yield the clean steps, newest first, each pinned until the next is taken."""
        before = ANY_STEP
        while (leased := self.lease(before)) is not None:
            yield leased
            before = leased.step

    def roster(self) -> Roster | None:
        """Return the nodes that divide the state; None if each is on its own."""
        self._connection.send("roster")
        given = self._connection.receive().header["roster"]
        return Roster.parse(given) if given is not None else None

    def _leased(self, answer: Frame) -> Leased | None:
        if answer.verb == "none":
            return None
        if answer.verb != "leased":
            raise ProtocolViolation(f"unexpected {answer.verb!r} from the SMP")
        header = answer.header
        parts = []
        for frame in (self._connection.receive() for _ in range(int(header["ranks"]))):
            buffer: torch.Tensor = mapped(frame.fds[0], mmap.MAP_PRIVATE)
            frame.close_fds()
            rank, digest = int(frame.header["rank"]), str(frame.header["digest"])
            parts.append(Part(rank, buffer, frame.blob, digest))
        needed = Needed(*header["needed"])
        return Leased(int(header["step"]), parts, header["epoch"], needed=needed)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
