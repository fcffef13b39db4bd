"""The protocol's shell for tests: imaginary memory that knows which step was written to it."""

from dataclasses import dataclass, field

from holdfast.snapshot.protocol import messages as m
from holdfast.snapshot.protocol.slots import SlotState
from holdfast.snapshot.protocol.state_machine import Protocol
from holdfast.version import __version__

LINGER_S = 100.0
RANKS = 2
KEEP = 2


@dataclass
class Shell:
    """Carries out instructions on imaginary memory: a list that holds which step was written.

    A process that was replaced, or is believed dead, stays as a ghost that writes whenever it can.
    """

    ranks: int = RANKS
    keep: int = KEEP
    room: bool = True
    now: float = 0.0
    memory: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    granted: dict[int, tuple[int, int, list[int]]] = field(default_factory=dict)
    ghosts: list[list[int]] = field(default_factory=list)
    stopped: str = ""
    answers: list[m.Answer] = field(default_factory=list)
    held: dict[int, list[tuple[list[int], int]]] = field(default_factory=dict)
    refusals: int = 0

    def __post_init__(self) -> None:
        self.protocol = Protocol(self.ranks, self.keep, LINGER_S, self.now)

    def do(self, event: m.Event) -> list[m.Reply]:
        if isinstance(event, m.Hello | m.Disconnected) and event.rank in self.granted:
            self.ghosts.append(self.granted.pop(event.rank)[2])
        if isinstance(event, m.Restore | m.Begin):
            self.granted.pop(event.rank, None)
        if isinstance(event, m.Lease | m.Due | m.Release | m.Gone):
            self.held.pop(event.holder, None)
        replies = []
        for instruction in self.protocol.handle(event, self.now):
            match instruction:
                case m.Reply():
                    self._check_grant(instruction)
                    replies.append(instruction)
                case m.Answer():
                    self.answers.append(instruction)
                    self._hold(instruction)
                case m.Allocate(rank, slot, nbytes):
                    self.refusals += not self.room
                    self.memory[rank, slot] = [-1]
                    refusal = m.AllocationRefused(rank, slot, "no room")
                    replies += self.do(m.Allocated(rank, slot, nbytes) if self.room else refusal)
                case m.Free(rank, slot):
                    del self.memory[rank, slot]
                case m.Stop(reason):
                    self.stopped = reason
        return replies

    def _hold(self, answer: m.Answer) -> None:
        if answer.verb == "leased":
            self.held[answer.holder] = []
        if answer.verb == "part":
            assert answer.slot is not None
            memory = self.memory[answer.rank, answer.slot]
            self.held[answer.holder].append((memory, int(answer.manifest[1:])))

    def reading(self, holder: int) -> int | None:
        """The step that a reader holds."""
        return next((step for _, step in self.held.get(holder, [])), None)

    def overwritten(self, holder: int) -> bool:
        """Whether something was written over what a reader holds."""
        return any(memory != [step] for memory, step in self.held.get(holder, []))

    def release(self, holder: int) -> bool:
        """Let a reader give its step back; whether it is told that all stayed intact."""
        self.do(m.Release(holder))
        return bool(self.answers[-1].fields["intact"])

    def _check_grant(self, reply: m.Reply) -> None:
        if reply.verb == "granted":
            assert reply.slot is not None
            slot = self.protocol.node.ranks[reply.rank].slots[reply.slot]
            assert slot.state is SlotState.WRITING
            memory = self.memory[reply.rank, reply.slot]
            memory[0] = -1
            self.granted[reply.rank] = reply.slot, reply.fields["step"], memory

    def hello(self, *ranks: int) -> None:
        for rank in ranks or range(self.ranks):
            self.do(m.Hello(rank, self.ranks, self.keep, __version__))

    def verbs(self, event: m.Event) -> list[tuple[int, str, int | None]]:
        return [(reply.rank, reply.verb, reply.fields.get("step")) for reply in self.do(event)]

    def write(self, rank: int, step: int) -> list[tuple[int, str, int | None]]:
        if rank in self.granted:
            _, granted, memory = self.granted.pop(rank)
            memory[0] = granted
        return self.verbs(self.written(rank, step))

    def written(self, rank: int, step: int) -> m.Written:
        return m.Written(rank, step, f"d{step}", f"m{step}".encode())

    def commit(self, *steps: int) -> None:
        for step in steps:
            for rank in range(self.ranks):
                self.do(m.Begin(rank, step, 10))
            for rank in range(self.ranks):
                self.write(rank, step)

    def clean(self) -> list[list[int]]:
        return [list(rank.clean()) for rank in self.protocol.node.ranks]

    def with_memory(self) -> list[int]:
        """Return how many slots of each rank have memory."""
        ranks = self.protocol.node.ranks
        return [sum(bool(slot.capacity) for slot in rank.slots) for rank in ranks]
