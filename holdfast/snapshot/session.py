"""One rank's conversation with the SMP: requests, their answers, and slots as tensors."""

import mmap
from dataclasses import dataclass
from typing import Any

import torch

from holdfast import config
from holdfast.errors import ConfigError, SmpUnavailable, SnapshotMismatch
from holdfast.snapshot import launch, transport
from holdfast.snapshot.messages import ProtocolViolation

SLOWEST_COPY_BYTES_S = 256 * 2**20
_HELLO_ATTEMPTS = 3


def patience_s(nbytes: int) -> float:
    """How long to wait for work on ``nbytes`` bytes: the timeout plus a slow node's copy time."""
    return config.timeout_s() + nbytes / SLOWEST_COPY_BYTES_S


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
        try:
            connection.send(hello, timeout_s=limit_s)
            answer = connection.receive(timeout_s=limit_s)
        except TimeoutError as error:
            raise SmpUnavailable(f"the SMP did not answer hello within {limit_s:g} s") from error
        if answer.verb == "unfit":
            reason = str(answer.header["reason"])
            raise (ConfigError if "keep=" in reason else SnapshotMismatch)(reason)

    def reconnect(self) -> None:
        """Connect anew after the SMP was lost; what it held or owed is forgotten."""
        self._connection.close()
        self._slots.clear()
        self._unsettled = self.last_committed = None
        self._connection = self._welcomed()

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
            self._slots[index] = generation, _mapped(granted.fds[0], mmap.MAP_SHARED)
        granted.close_fds()
        return self._slots[index][1]

    def written(self, step: int, manifest: bytes, digest: str) -> None:
        """Say that ``step`` is copied; its fate is learned by ``settle`` or a later request."""
        self._send("written", manifest, step=step, digest=digest)
        self._unsettled = step

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

    def _verdict_or_offer(self) -> Offer | str:
        answer = self._expect("offer", "load", "lost", "fresh")
        if answer.verb != "offer":
            return answer.verb
        # Private, so that nothing done to the tensors of an offer can reach the snapshot.
        buffer = _mapped(answer.fds[0], mmap.MAP_PRIVATE)
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

    def _expect(self, *verbs: str) -> transport.Frame:
        while (answer := self._receive()).verb not in verbs:
            self._settled(answer)
        return answer

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
        if answer.verb == "committed":
            self.commits += 1
            self.last_committed = int(answer.header["step"])
        self._unsettled = None


def _mapped(fd: int, flags: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(fd, 0, flags), dtype=torch.uint8)
