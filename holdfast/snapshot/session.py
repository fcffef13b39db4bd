"""One rank's conversation with the SMP: requests, their answers, and slots as tensors."""

import mmap
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from holdfast import config
from holdfast.errors import ConfigError, SmpUnavailable, SnapshotMismatch
from holdfast.snapshot import launch, transport
from holdfast.snapshot.cargo import Cargo
from holdfast.snapshot.cluster import Roster, Stamp
from holdfast.snapshot.messages import ProtocolViolation
from holdfast.version import __version__

SLOWEST_COPY_BYTES_S = 256 * 2**20
_HELLO_ATTEMPTS = 3
_DISK_PATIENCE = 8
_POLL_S = 0.05


def patience_s(nbytes: int) -> float:
    """How long to wait for work on ``nbytes`` bytes: the timeout plus a slow node's copy time."""
    return config.timeout_s() + nbytes / SLOWEST_COPY_BYTES_S


@dataclass(frozen=True)
class Content:
    """What the SMP is told of a copy besides its bytes; all but the first two as in ``Written``."""

    manifest: bytes
    digest: str
    claims: list[str] = field(default_factory=list)
    seen: list[tuple[int, int, str]] = field(default_factory=list)
    cargo: Cargo | None = None


@dataclass(frozen=True)
class Offer:
    """A step that the SMP holds: its memory as bytes, and the manifest that describes it."""

    step: int
    buffer: torch.Tensor
    manifest: bytes
    digest: str


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

    def _welcomed(self) -> transport.Connection:
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

    def _greet(self, connection: transport.Connection) -> None:
        limit_s = config.timeout_s()
        world_size, keep = self.settings.world_size, self.settings.keep
        hello = {"verb": "hello", "rank": self.rank, "world_size": world_size, "keep": keep}
        hello |= {"version": __version__}
        try:
            connection.send(hello, timeout_s=limit_s)
            answer = connection.receive(timeout_s=limit_s)
        except TimeoutError as error:
            raise SmpUnavailable(f"the SMP did not answer hello within {limit_s:g} s") from error
        if answer.verb == "unfit":
            reason = str(answer.header["reason"])
            raise (ConfigError if "keep=" in reason else SnapshotMismatch)(reason)
        self._assign_persister(connection, limit_s)

    def listen(self, host: str, port: int = 0) -> dict[str, Any]:
        """Let the SMP be reached at ``host``: where exactly, and the epoch that it knows.

        At this ``port``, unless it is listening already or somebody else is; 0: any.
        Of a host that is none of this node's there is only an ``error``.
        """
        self._send("listen", host=host, port=port)
        answer = self._expect("listening").header
        return {name: value for name, value in answer.items() if name != "verb"}

    def join(self, roster: Roster) -> None:
        """Tell the SMP who takes part in the run from now on."""
        self._unsettled = None
        self._send("join", roster=asdict(roster))
        self._expect("joined")

    def inventory(self) -> dict[str, Any]:
        """What the SMP could give to a restore."""
        self._send("inventory")
        return self._expect("inventory").header

    def resume(self, stamp: Stamp) -> None:
        """Say that all ranks go on from a step: what is newer is void."""
        self._unsettled = None
        self._send("resume", **stamp._asdict())
        self._expect("resumed")
        self.last_committed = stamp.step if stamp.epoch else None

    def _assign_persister(self, connection: transport.Connection, limit_s: float) -> None:
        persist = self.settings.persist
        message = {"verb": "persist_to", "settings": asdict(persist) if persist else None}
        try:
            connection.send(message, timeout_s=limit_s)
            connection.receive(timeout_s=limit_s)
        except TimeoutError as error:
            raise SmpUnavailable(f"the SMP took no settings within {limit_s:g} s") from error

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
        """How large the states of ``ranks`` are at ``step``, of which this rank's has ``nbytes``.

        None: ``patient()`` became false before all of them had said so.
        """
        self._send("sizes", step=step, nbytes=nbytes, ranks=list(ranks))
        answer = None
        while answer is None and patient():
            try:
                answer = self._expect("sizes", "skipped", within_s=_POLL_S)
            except TimeoutError:
                continue
        if answer is None:
            self._send("withdraw")
            answer = self._expect("sizes", "skipped")
        return list(map(int, answer.header["sizes"])) if answer.verb == "sizes" else None

    def begin(self, step: int, nbytes: int) -> torch.Tensor | None:
        """A writable uint8 buffer of at least ``nbytes``; None if ``step`` is to be skipped.

        Raises:
            ConfigError: the SMP refuses (not enough memory, a step it already holds).
            ConnectionError: the SMP is gone. SmpUnavailable: it or another rank did not answer.
        """
        self._nbytes = nbytes
        self._send("begin", step=step, nbytes=nbytes)
        answer = self._expect("granted", "skipped", "refused")
        if answer.verb == "refused":
            raise ConfigError(str(answer.header["reason"]))
        return None if answer.verb == "skipped" else self._slot(answer)

    def _slot(self, granted: transport.Frame) -> torch.Tensor:
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
        fields: dict[str, Any] = {"step": step, "digest": content.digest}
        fields |= {"claims": content.claims, "seen": content.seen}
        fields |= {"cargo": vars(content.cargo) if content.cargo else {}}
        fields |= {"copy_us": round(copy_s * 1e6), "stall_us": round(stall_s * 1e6)}
        self._send("written", content.manifest, **fields)
        self._unsettled = step

    def pass_over(self, step: int) -> None:
        """Say that this rank will not write ``step``: nobody is to wait for it."""
        self._send("pass_over", step=step)

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
        self._send("restore")
        return self._verdict_or_offer()

    def answer(self, step: int, damage: str) -> Offer | str:
        """Report the offered step as intact (no ``damage``) or not; ``"load"`` or as above."""
        if damage:
            self._send("corrupt", step=step, reason=damage[:1000])
        else:
            self._send("verified", step=step)
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
        self._send("recall", step=step or 0, found=step is not None)
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
        self._send("finished")
        self._expect("bye")

    def close(self) -> None:
        """Disconnect; the SMP lingers."""
        self._connection.close()
        self._slots.clear()

    def _send(self, verb: str, blob: bytes = b"", **fields: Any) -> None:
        limit_s = config.timeout_s()
        try:
            self._connection.send({"verb": verb, **fields}, blob, timeout_s=limit_s)
        except TimeoutError as error:
            raise self._silent(verb, limit_s) from error

    def _expect(self, *verbs: str, within_s: float | None = None) -> transport.Frame:
        """The answer; with ``within_s``, TimeoutError if nothing is said for so long."""
        while True:
            if within_s is None:
                answer = self._receive()
            else:
                answer = self._connection.receive(timeout_s=within_s)
            if answer.verb in verbs:
                return answer
            self._settled(answer)

    def _receive(self) -> transport.Frame:
        limit_s = patience_s(self._nbytes)
        try:
            return self._connection.receive(timeout_s=limit_s)
        except TimeoutError as error:
            raise self._silent("the last request", limit_s) from error

    def _silent(self, request: str, limit_s: float) -> SmpUnavailable:
        # Whoever does not wait any more must not be counted on: the SMP sees this rank leave.
        self._connection.close()
        return SmpUnavailable(
            f"no answer to {request} within {limit_s:g} s: the SMP is stopped, or another of the "
            f"{self.settings.world_size} local ranks does not do the same; see "
            f"{self.settings.run_dir / launch.LOG_NAME} or raise {config.TIMEOUT_VARIABLE}"
        )

    def _settled(self, answer: transport.Frame) -> None:
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
    """All of a memfd as bytes."""
    return torch.frombuffer(mmap.mmap(fd, 0, flags), dtype=torch.uint8)
