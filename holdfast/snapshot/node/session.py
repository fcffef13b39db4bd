"""A rank's conversation with the SMP: requests, their answers, and slots as tensors."""

import mmap
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

import torch

from holdfast import config
from holdfast.errors import ConfigError, SmpUnavailable, SnapshotMismatch
from holdfast.snapshot.node import launch, record
from holdfast.snapshot.node.supervisor import PersistSettings
from holdfast.snapshot.protocol.messages import ANY_STEP
from holdfast.snapshot.protocol.parity_stream import ParityPlan
from holdfast.snapshot.protocol.roster import NodeInventory, ProtocolViolation, Roster, Stamp
from holdfast.snapshot.transport import frames
from holdfast.version import __version__

SLOWEST_COPY_BYTES_S = 256 * 2**20
_HELLO_ATTEMPTS = 3
_DISK_PATIENCE = 8
_POLL_S = 0.05


def patience_s(nbytes: int) -> float:
    """Return the time limit for work on ``nbytes`` bytes: the timeout plus that of a slow copy."""
    return config.timeout_s() + nbytes / SLOWEST_COPY_BYTES_S


@dataclass(frozen=True)
class Content:
    """The manifest of a copy and its digest; the other fields are those of ``messages.Written``."""

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


class NotEnoughMemory(ConfigError):
    """The node lacks memory for a snapshot."""


class Listening(NamedTuple):
    """The address of an SMP for other nodes and the epoch it knows, or the ``error``.

    If it holds steps, ``group`` is their parity group, in a run of ``run_nodes`` nodes.
    """

    host: str = ""
    port: int = 0
    epoch: int = 0
    error: str = ""
    group: tuple[int, ...] = ()
    run_nodes: int = 0


class SmpSession:
    """The connection of one rank to its node's SMP, for use by one thread at a time.

    With ``alone`` (``messages.Hello``) another SMP takes the place of one of several nodes.

    Every request may raise ConnectionError if the SMP is gone, and SmpUnavailable if the SMP, or
    another rank that it waits for, does not answer in time.

    Raises:
        SmpUnavailable: no SMP can be started or reached in time.
        SnapshotMismatch: the SMP serves another number of local ranks.
        ConfigError: it was started with another ``keep``, or the run directory is unusable.
    """

    def __init__(self, settings: launch.SmpSettings, rank: int, *, alone: bool = False) -> None:
        self.settings, self.rank, self._alone = settings, rank, alone
        self.commits = 0
        self.last_committed: int | None = None
        self.former = False  # whether it holds states of another number of local ranks
        self.diverged: dict[int, list[tuple[int, ...]]] = {}
        self.refusal = ""  # why the last snapshot that was not committed was not
        self._unsettled: int | None = None
        self._past: int | None = None
        self._ended = False
        self._nbytes = 0
        self._slots: dict[int, tuple[int, torch.Tensor]] = {}
        self._connect()

    def _connect(self) -> None:
        run_dir = self.settings.run_dir
        for _ in range(_HELLO_ATTEMPTS):
            self._connection = launch.find_or_start(self.settings)
            try:
                return self._greet()
            except BaseException as error:
                self._connection.close()
                # The SMP was about to stop when this rank connected: start the next one.
                if not isinstance(error, ConnectionError):
                    raise
        if reason := record.foreign(run_dir):
            raise SnapshotMismatch(reason)
        raise SmpUnavailable(
            f"the SMP of {run_dir} closed {_HELLO_ATTEMPTS} connections: see "
            f"{run_dir / launch.LOG_NAME}"
        )

    def _greet(self) -> None:
        given = {"world_size": self.settings.world_size, "keep": self.settings.keep}
        about = {"rank": self.rank, "version": __version__, **given}
        about |= {"alone": True} if self._alone else {}
        answer = self._ask("hello", "welcome", "unfit", **about)
        if answer.verb == "unfit":
            reason = str(answer.header["reason"])
            raise (ConfigError if "keep=" in reason else SnapshotMismatch)(reason)
        self.former = bool(answer.header.get("former"))
        self._persist_to(self.settings.persist)

    def restart_persister(self) -> None:
        """Have the persister look anew at what is on disk."""
        self._persist_to(None)
        self._persist_to(self.settings.persist)

    def _persist_to(self, persist: PersistSettings | None) -> None:
        self._ask("persist_to", "assigned", settings=persist and asdict(persist))

    def listen(self, host: str, port: int = 0) -> Listening:
        """Let the SMP listen for other nodes at ``host``; return its address and its epoch.

        ``port`` is used unless the SMP is listening already or the port is taken; 0 means any.
        Only ``error`` is set if this node has no such host address.
        """
        said = self._ask("listen", "listening", host=host, port=port).header
        known = {name: said[name] for name in Listening._fields if name in said}
        return Listening(**known | {"group": tuple(known.get("group", ()))})

    def join(self, roster: Roster, again: bool = False) -> None:
        """Tell the SMP which nodes take part in the run from now on.

        ``again`` is true if another SMP of this node took part in the epoch before.
        """
        self._unsettled = self._past = None
        self._ask("join", "joined", roster=roster.encode(), again=again)

    def inventory(self) -> NodeInventory:
        """Return the steps that the SMP can provide to a restore."""
        said = self._ask("inventory", "inventory").header
        return NodeInventory(epoch=said["epoch"], slots=said["slots"], mirrors=said["mirrors"])

    def resume(self, stamp: Stamp) -> None:
        """Tell the SMP that all ranks continue from a step, which makes newer steps void."""
        self._unsettled = None
        self._ask("resume", "resumed", **stamp._asdict())
        self.last_committed = stamp.step if stamp.epoch else None

    def reconnect(self) -> int | None:
        """Connect to another SMP after the former one was lost with all that it held.

        Returns:
            The newest step of this epoch that was written or skipped, if there is one. Other nodes
            may still wait for this one to hold it, even if it was committed here.
        """
        self._connection.close()
        self._slots.clear()
        past, self._past = self._past, None
        self._unsettled = self.last_committed = None
        self._connect()
        return past

    def is_lost(self) -> bool:
        """Return true if the SMP has closed the connection, unless this rank needs it no more.

        Ask from any thread.
        """
        return not self._ended and self._connection.is_closed_by_peer()

    def sizes(
        self, step: int, nbytes: int, ranks: Sequence[int], patient: Callable[[], bool]
    ) -> list[int] | None:
        """Return the sizes of the states of ``ranks`` at ``step``; this rank's has ``nbytes``.

        Return None if ``patient()`` became false before all of these ranks had stated theirs.
        """
        answer = self._exchanged(patient, step, nbytes=nbytes, ranks=list(ranks))
        return list(map(int, answer.header["sizes"])) if answer.verb == "sizes" else None

    def compare(self, step: int, digest: str, patient: Callable[[], bool]) -> list[str] | None:
        """Return the digests that all local ranks state of their states at ``step``.

        Return None if ``patient()`` became false before all had stated theirs.
        """
        said = "=" + digest  # an empty digest asks as well
        header = self._exchanged(patient, step, nbytes=0, ranks=[], digest=said).header
        return [str(each)[1:] for each in header["digests"]] if "digests" in header else None

    def _exchanged(self, patient: Callable[[], bool], step: int, **fields: object) -> frames.Frame:
        self._connection.send("sizes", step=step, **fields)
        answer = None
        while answer is None and patient():
            answer = self._connection.poll(_POLL_S)
            if answer is not None and answer.verb not in ("sizes", "skipped"):
                self._settled(answer)
                answer = None
        if answer is None:
            answer = self._ask("withdraw", "sizes", "skipped")
        if answer.verb == "skipped":
            self._past = step
        return answer

    def begin(self, step: int, nbytes: int) -> torch.Tensor | None:
        """Return a writable uint8 buffer of at least ``nbytes``; None if ``step`` is skipped."""
        self._nbytes = nbytes
        answer = self._ask("begin", "granted", "skipped", "refused", step=step, nbytes=nbytes)
        reason = str(answer.header.get("reason", ""))
        if answer.verb == "refused":
            self._past = step
            raise (NotEnoughMemory if answer.header.get("memory") else ConfigError)(reason)
        if answer.verb == "skipped":
            self.refusal, self._past = reason, step
            return None
        return self._slot(answer)

    def _slot(self, granted: frames.Frame) -> torch.Tensor:
        header = granted.header
        index, generation, live = header["slot"], header["generation"], header["generations"]
        if self._slots.get(index, (None,))[0] != generation:
            self._slots[index] = generation, mapped(granted.fds[0], mmap.MAP_SHARED)
        granted.close_fds()
        self._slots = {i: slot for i, slot in self._slots.items() if slot[0] == live[i]}
        return self._slots[index][1]

    def slots(self) -> list[torch.Tensor]:
        """Return the memory of this rank that the SMP has granted so far."""
        return [slot for _, slot in self._slots.values()]

    def written(
        self, step: int, content: Content, *, copy_s: float = 0.0, stall_s: float = 0.0
    ) -> None:
        """Tell the SMP that ``step`` is copied; ``settle`` or a later request learns its fate.

        ``copy_s`` is the duration of this copy, ``stall_s`` the time that training has waited for
        all snapshots so far.
        """
        times = {"copy_us": round(copy_s * 1e6), "stall_us": round(stall_s * 1e6)}
        told = {"digest": content.digest, "claims": content.claims, "seen": content.seen}
        plan = vars(content.plan) if content.plan else {}
        fields = {"step": step, "parity_plan": plan, **told, **times}
        self._connection.send("written", content.manifest, **fields)
        self._unsettled = self._past = step

    def skip_step(self, step: int) -> None:
        """Tell the SMP that this rank will not write ``step``, so that nobody waits for it."""
        self._connection.send("skip_step", step=step)
        self._past = step

    def settle(self) -> int | None:
        """Wait until the step last written is committed or aborted.

        Returns:
            The newest step that is committed then.
        """
        while (step := self._unsettled) is not None:
            try:
                self._settled(self._connection.receive(patience_s(self._nbytes)))
            except SmpUnavailable as error:
                raise SmpUnavailable(
                    f"step {step} was not committed: {error}; of several nodes, `holdfast "
                    "snapshots status` shows whether they reach each other, and "
                    f"{config.ADDRESS_VARIABLE} sets the address of one"
                ) from error
        return self.last_committed

    def restore(self, before: int = ANY_STEP) -> Offer | str:
        """Ask for the newest step of all ranks that is older than ``before``.

        Returns:
            An offer; ``"lost"`` or ``"fresh"`` if there is none.
        """
        return self._verdict_or_offer("restore", before=before)

    def answer(self, step: int, damage: str, kept: bool = False) -> Offer | str:
        """Report the offered step as damaged, or as intact if ``damage`` is empty.

        An intact step that is of no use to this rank is ``kept``, and an older one offered.

        Returns:
            ``"load"`` if all ranks are to load the step, else as ``restore``.
        """
        about = {"reason": damage[:1000], "kept": kept} if damage else {}
        verdict = self._verdict_or_offer("corrupt" if damage else "verified", step=step, **about)
        if verdict == "load":
            # If there were newer steps, the SMP has dropped them.
            self.last_committed = step
        return verdict

    def recall(self, step: int | None, nbytes: int) -> tuple[str, int]:
        """Propose a step on disk to the local ranks, as ``disk_restore.Propose`` describes.

        Other ranks may need longer to read ``nbytes`` bytes from slow disks; this call waits.
        """
        self._nbytes = _DISK_PATIENCE * nbytes
        verdicts = ("load", "older", "nothing")
        answer = self._ask("recall", *verdicts, step=step or 0, found=step is not None)
        self.last_committed = None
        return answer.verb, int(answer.header["step"])

    def _verdict_or_offer(self, verb: str, **fields: object) -> Offer | str:
        answer = self._ask(verb, "offer", "load", "lost", "fresh", **fields)
        if answer.verb != "offer":
            return answer.verb
        # A private mapping: changes of the tensors of an offer never reach the snapshot.
        buffer = mapped(answer.fds[0], mmap.MAP_PRIVATE)
        answer.close_fds()
        self._nbytes = buffer.numel()
        step, digest = int(answer.header["step"]), str(answer.header["digest"])
        return Offer(step, buffer, answer.blob, digest)

    def finished(self) -> None:
        """Tell the SMP that this rank needs no snapshot any more."""
        self._ended = True
        self._ask("finished", "bye")

    def close(self) -> None:
        """Disconnect; the SMP stays for a while and waits for another trainer."""
        self._ended = True
        self._connection.close()
        self._slots.clear()

    def _ask(self, verb: str, *answers: str, **fields: object) -> frames.Frame:
        """Send a request and return its answer, which has one of the verbs ``answers``."""
        self._connection.send(verb, **fields)
        limit_s = patience_s(self._nbytes)
        while (answer := self._connection.receive(limit_s)).verb not in answers:
            self._settled(answer)
        return answer

    def _settled(self, answer: frames.Frame) -> None:
        if answer.verb not in ("committed", "aborted"):
            answer.close_fds()
            raise ProtocolViolation(f"unexpected {answer.verb!r} from the SMP")
        step = int(answer.header["step"])
        if answer.verb == "committed":
            self.commits += 1
            self.last_committed, self.former = step, False
        else:
            self.refusal = str(answer.header.get("reason", ""))
        if found := answer.header.get("diverged"):
            self.diverged[step] = [tuple(pair) for pair in found]
        if step == self._unsettled:
            self._unsettled = None


def mapped(fd: int, flags: int) -> torch.Tensor:
    """Map all of a memfd and return it as a uint8 tensor."""
    return torch.frombuffer(mmap.mmap(fd, 0, flags), dtype=torch.uint8)
