"""One rank's conversation with the SMP: requests, their answers, and slots as tensors."""

import mmap
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

import torch

from holdfast import config
from holdfast.errors import ConfigError, SmpUnavailable, SnapshotMismatch
from holdfast.snapshot.node import launch
from holdfast.snapshot.protocol.parity_plan import ParityPlan
from holdfast.snapshot.protocol.roster import NodeInventory, ProtocolViolation, Roster, Stamp
from holdfast.snapshot.transport import frames
from holdfast.version import __version__

SLOWEST_COPY_BYTES_S = 256 * 2**20
_HELLO_ATTEMPTS = 3
_DISK_PATIENCE = 8
_POLL_S = 0.05


def patience_s(nbytes: int) -> float:
    """Return how long to wait for work on ``nbytes`` bytes: the timeout plus a slow copy's time."""
    return config.timeout_s() + nbytes / SLOWEST_COPY_BYTES_S


@dataclass(frozen=True)
class Content:
    """The description of a copy for the SMP: digest and manifest, the rest as in ``Written``."""

    manifest: bytes
    digest: str
    claims: list[str] = field(default_factory=list)
    seen: list[tuple[int, int, str]] = field(default_factory=list)
    plan: ParityPlan | None = None


@dataclass(frozen=True)
class Offer:
    """A step that the SMP holds: its memory as bytes, and the manifest that describes it."""

    step: int
    buffer: torch.Tensor
    manifest: bytes
    digest: str


class Listening(NamedTuple):
    """The place where an SMP listens to other nodes, the epoch it knows; ``error`` if it cannot."""

    host: str
    port: int
    epoch: int
    error: str = ""


class SmpSession:
    """A connected rank; not for use by two threads at once.

    Raises:
        SmpUnavailable: no SMP can be started or reached in time.
        SnapshotMismatch: the SMP serves another number of local ranks.
        ConfigError: it was started with another ``keep``, or the run directory is unusable.
    """

    def __init__(self, settings: launch.SmpSettings, rank: int) -> None:
        self.settings, self.rank = settings, rank
        self.commits = 0
        self.last_committed: int | None = None
        self.diverged: dict[int, list[tuple[int, ...]]] = {}
        self._unsettled: int | None = None
        self._nbytes = 0
        self._slots: dict[int, tuple[int, torch.Tensor]] = {}
        self._connection = self._welcomed()

    def _welcomed(self) -> launch.SmpConnection:
        for _ in range(_HELLO_ATTEMPTS):
            connection = launch.find_or_start(self.settings)
            try:
                self._greet(connection)
            except ConnectionError:
                # An SMP that was just stopping took the connection with it: start the next.
                connection.close()
                continue
            except BaseException:
                connection.close()
                raise
            return connection
        raise SmpUnavailable(
            f"the SMP of {self.settings.run_dir} closed {_HELLO_ATTEMPTS} connections: see "
            f"{self.settings.run_dir / launch.LOG_NAME}"
        )

    def _greet(self, connection: launch.SmpConnection) -> None:
        settings = self.settings
        connection.send(
            "hello",
            rank=self.rank,
            world_size=settings.world_size,
            keep=settings.keep,
            version=__version__,
        )
        answer = connection.receive()
        if answer.verb == "unfit":
            reason = str(answer.header["reason"])
            raise (ConfigError if "keep=" in reason else SnapshotMismatch)(reason)
        persist = settings.persist
        connection.send("persist_to", settings=asdict(persist) if persist else None)
        connection.receive()

    def listen(self, host: str, port: int = 0) -> Listening:
        """Let the SMP be reached at ``host``; return the place, and the epoch that it knows.

        At this ``port``, unless it is listening already or somebody else is; 0: any.
        Of a host that is none of this node's there is only an ``error``.
        """
        self._connection.send("listen", host=host, port=port)
        said = self._expect("listening").header
        place = str(said.get("host")), int(said.get("port", 0)), int(said.get("epoch", 0))
        return Listening(*place, str(said.get("error", "")))

    def join(self, roster: Roster) -> None:
        """Tell the SMP who takes part in the run from now on."""
        self._unsettled = None
        self._connection.send("join", roster=roster.encode())
        self._expect("joined")

    def inventory(self) -> NodeInventory:
        """Ask for the steps that the SMP could give to a restore."""
        self._connection.send("inventory")
        said = self._expect("inventory").header
        return NodeInventory(epoch=said["epoch"], slots=said["slots"], mirrors=said["mirrors"])

    def resume(self, stamp: Stamp) -> None:
        """Say that all ranks go on from a step: what is newer is void."""
        self._unsettled = None
        self._connection.send("resume", **stamp._asdict())
        self._expect("resumed")
        self.last_committed = stamp.step if stamp.epoch else None

    def reconnect(self) -> int | None:
        """Connect anew after the SMP was lost; what it held or owed is forgotten.

        Returns:
            The step that was written, and whose fate is not known, if there is one.
        """
        self._connection.close()
        self._slots.clear()
        unsettled, self._unsettled = self._unsettled, None
        self.last_committed = None
        self._connection = self._welcomed()
        return unsettled

    def sizes(
        self, step: int, nbytes: int, ranks: Sequence[int], patient: Callable[[], bool]
    ) -> list[int] | None:
        """Learn the sizes of the states of ``ranks`` at ``step``, of which this one has ``nbytes``.

        None: ``patient()`` became false before all of them had said so.
        """
        self._connection.send("sizes", step=step, nbytes=nbytes, ranks=list(ranks))
        answer = None
        while answer is None and patient():
            answer = self._connection.poll(_POLL_S)
            if answer is not None and answer.verb not in ("sizes", "skipped"):
                self._settled(answer)
                answer = None
        if answer is None:
            self._connection.send("withdraw")
            answer = self._expect("sizes", "skipped")
        return list(map(int, answer.header["sizes"])) if answer.verb == "sizes" else None

    def begin(self, step: int, nbytes: int) -> torch.Tensor | None:
        """Return a writable uint8 buffer of at least ``nbytes``; None if ``step`` is skipped.

        Raises:
            ConfigError: the SMP refuses (not enough memory, a step it already holds).
            ConnectionError: the SMP is gone. SmpUnavailable: it or another rank did not answer.
        """
        self._nbytes = nbytes
        self._connection.send("begin", step=step, nbytes=nbytes)
        answer = self._expect("granted", "skipped", "refused")
        if answer.verb == "refused":
            raise ConfigError(str(answer.header["reason"]))
        return None if answer.verb == "skipped" else self._slot(answer)

    def _slot(self, granted: frames.Frame) -> torch.Tensor:
        index, generation = granted.header["slot"], granted.header["generation"]
        known = self._slots.get(index)
        if known is None or known[0] != generation:
            self._slots[index] = generation, mapped(granted.fds[0], mmap.MAP_SHARED)
        granted.close_fds()
        live = granted.header["generations"]
        self._slots = {i: slot for i, slot in self._slots.items() if slot[0] == live[i]}
        return self._slots[index][1]

    def written(
        self, step: int, content: Content, *, copy_s: float = 0.0, stall_s: float = 0.0
    ) -> None:
        """Say that ``step`` is copied; its fate is learned by ``settle`` or a later request.

        ``copy_s`` is how long the copy took, ``stall_s`` how long training has waited so far.
        """
        self._connection.send(
            "written",
            content.manifest,
            step=step,
            digest=content.digest,
            claims=content.claims,
            seen=content.seen,
            parity_plan=vars(content.plan) if content.plan else {},
            copy_us=round(copy_s * 1e6),
            stall_us=round(stall_s * 1e6),
        )
        self._unsettled = step

    def skip_step(self, step: int) -> None:
        """Say that this rank will not write ``step``: nobody is to wait for it."""
        self._connection.send("skip_step", step=step)

    def settle(self) -> int | None:
        """Wait for the fate of the step last written; returns the newest step committed by then.

        Raises:
            ConnectionError: the SMP is gone. SmpUnavailable: other ranks did not write in time.
        """
        while self._unsettled is not None:
            self._settled(self._receive())
        return self.last_committed

    def restore(self) -> Offer | str:
        """Ask for the newest step of all ranks: an offer, ``"lost"`` or ``"fresh"``."""
        self._connection.send("restore")
        return self._verdict_or_offer()

    def answer(self, step: int, damage: str) -> Offer | str:
        """Report the offered step as intact (no ``damage``) or not; ``"load"`` or as above."""
        if damage:
            self._connection.send("corrupt", step=step, reason=damage[:1000])
        else:
            self._connection.send("verified", step=step)
        verdict = self._verdict_or_offer()
        if verdict == "load":
            # Newer steps, if there were any, have been dropped.
            self.last_committed = step
        return verdict

    def recall(self, step: int | None, nbytes: int) -> tuple[str, int]:
        """Propose a step on disk (None: there is none): ``load``, ``older`` or ``nothing``, step.

        The others may read ``nbytes`` bytes from slow disks meanwhile, which is waited for.
        """
        self._nbytes = _DISK_PATIENCE * nbytes
        self._connection.send("recall", step=step or 0, found=step is not None)
        answer = self._expect("load", "older", "nothing")
        self.last_committed = None
        return answer.verb, int(answer.header["step"])

    def _verdict_or_offer(self) -> Offer | str:
        answer = self._expect("offer", "load", "lost", "fresh")
        if answer.verb != "offer":
            return answer.verb
        # Private, so that nothing done to the tensors of an offer can reach the snapshot.
        buffer = mapped(answer.fds[0], mmap.MAP_PRIVATE)
        answer.close_fds()
        self._nbytes = buffer.numel()
        header = answer.header
        return Offer(int(header["step"]), buffer, answer.blob, str(header["digest"]))

    def finished(self) -> None:
        """Tell the SMP that this rank needs it no more."""
        self._connection.send("finished")
        self._expect("bye")

    def close(self) -> None:
        """Disconnect; the SMP lingers."""
        self._connection.close()
        self._slots.clear()

    def _expect(self, *verbs: str) -> frames.Frame:
        while (answer := self._receive()).verb not in verbs:
            self._settled(answer)
        return answer

    def _receive(self) -> frames.Frame:
        return self._connection.receive(patience_s(self._nbytes))

    def _settled(self, answer: frames.Frame) -> None:
        if answer.verb not in ("committed", "aborted"):
            answer.close_fds()
            raise ProtocolViolation(f"unexpected {answer.verb!r} from the SMP")
        step = int(answer.header["step"])
        if answer.verb == "committed":
            self.commits += 1
            self.last_committed = step
        if found := answer.header.get("diverged"):
            self.diverged[step] = [tuple(pair) for pair in found]
        if step == self._unsettled:
            self._unsettled = None


def mapped(fd: int, flags: int) -> torch.Tensor:
    """Return all of a memfd as bytes."""
    return torch.frombuffer(mmap.mmap(fd, 0, flags), dtype=torch.uint8)
