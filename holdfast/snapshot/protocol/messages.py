"""Events that the SMP's state machine is told of, and instructions that it answers with."""

from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field
from typing import ClassVar, dataclass_transform, get_origin

from holdfast.snapshot.protocol.roster import ProtocolViolation as ProtocolViolation
from holdfast.snapshot.protocol.roster import Roster

_INT_LIMIT = 2**63

Fields = Mapping[str, object]


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Message:
    """A frozen dataclass without the decorator; ``verb`` names it where it arrives in a frame."""

    __dataclass_fields__: ClassVar[dict[str, Field[object]]]
    by_verb: ClassVar[dict[str, type["Message"]]] = {}

    def __init_subclass__(cls, verb: str = "", sender: bool = False) -> None:
        dataclass(frozen=True)(cls)
        if sender:
            cls.by_verb = {}
        if verb:
            cls.by_verb[verb] = cls


class Event(Message):
    """Something that the state machine is told."""


class FromRank(Event, sender=True):
    """A message of local rank ``rank``."""

    rank: int


class FromReader(Event, sender=True):
    """A message of ``holder``, a process that reads snapshots: the persister, or a command."""

    holder: int


class FromPeer(Event, sender=True):
    """A message of the SMP of another ``node``."""

    node: int


class Hello(FromRank, verb="hello"):
    """A trainer process takes the place of ``rank``, expecting this node layout."""

    world_size: int
    keep: int
    version: str


class Begin(FromRank, verb="begin"):
    """``rank`` wants a slot of ``nbytes`` bytes for the state after ``step``."""

    step: int
    nbytes: int


class Sizes(FromRank, verb="sizes"):
    """``rank`` has ``nbytes`` bytes to stripe at ``step``, and asks how many ``ranks`` have.

    Only where nodes hold different states; the answer comes once all of them have said so.
    """

    step: int
    nbytes: int
    ranks: list[int]


class Withdraw(FromRank, verb="withdraw"):
    """``rank`` no longer waits for sizes: it skips the step."""


class SkipStep(FromRank, verb="skip_step"):
    """``rank`` will not write ``step``, whatever became of its copy; nobody is to wait for it."""

    step: int


class Written(FromRank, verb="written"):
    """``rank`` has copied all of ``step``; ``manifest`` describes it, ``digest`` guards it.

    ``copy_us`` is how long this copy took, ``stall_us`` how long training waited for all so far.
    Of a state that several nodes divide, ``claims`` are the digests of the blocks that this rank
    owns, ``seen`` those of other ranks' blocks that its parities were computed from, each as
    [owner's rank, number of the block there, digest]. ``parity_plan``, where nodes hold different
    states, is a ``parity_plan.ParityPlan`` as JSON.
    """

    step: int
    digest: str
    manifest: bytes
    copy_us: int = 0
    stall_us: int = 0
    claims: list[str] = field(default_factory=list)
    seen: list[tuple[int, int, str]] = field(default_factory=list)
    parity_plan: dict[str, object] = field(default_factory=dict)


class Restore(FromRank, verb="restore"):
    """``rank`` wants the newest intact step; whatever is in flight is abandoned."""


class Verified(FromRank, verb="verified"):
    """``rank`` found its part of the offered ``step`` intact."""

    step: int


class Corrupt(FromRank, verb="corrupt"):
    """``rank`` found its part of the offered ``step`` damaged."""

    step: int
    reason: str


class Recall(FromRank, verb="recall"):
    """``rank`` proposes to load ``step`` from disk; not ``found``: it has none to propose."""

    step: int
    found: bool


class Join(FromRank, verb="join"):
    """``rank`` states who takes part in the run from now on: ``Roster.encode``."""

    roster: dict[str, object]


class Inventory(FromRank, verb="inventory"):
    """``rank`` asks for the steps that this node holds, of its own ranks and of others."""


class Resume(FromRank, verb="resume"):
    """All ranks of all nodes go on from a step: newer ones are void."""

    epoch: int
    step: int


class Finished(FromRank, verb="finished"):
    """``rank`` has completed its training and needs no further snapshot."""


class Disconnected(FromRank):
    """The connection of ``rank`` is gone (closed, killed or dropped)."""


class Lease(FromReader, verb="lease"):
    """Reader ``holder`` wants the newest clean step below ``before`` pinned, now."""

    before: int


class Pin(FromReader):
    """Reader ``holder``, on whatever node, wants this very step pinned if it is still clean."""

    epoch: int
    step: int


class Due(FromReader, verb="due"):
    """Reader ``holder`` wants the newest clean step pinned as soon as it is due to be persisted.

    Due is a step in another interval of ``every`` steps than ``after``, the last one persisted,
    and any other step once somebody asked for it. ``steps`` are on disk already.
    """

    every: int
    after: int
    steps: list[int] = field(default_factory=list)


class Release(FromReader, verb="release"):
    """Reader ``holder`` no longer needs its pinned step."""


class Persisted(FromReader, verb="persisted"):
    """Reader ``holder`` has written ``step`` to disk; or has not, for the reason ``error``."""

    step: int
    error: str


class Gone(FromReader):
    """The connection of reader ``holder`` is gone."""


class PersistRequested(Event):
    """Someone allowed to wants the newest clean step persisted now."""


class PeerLinked(FromPeer):
    """The SMP of ``node`` can be reached, and has proved that it belongs to the run."""


class PeerUnlinked(FromPeer):
    """The SMP of ``node`` cannot be reached any more."""


class PeerReplaced(FromPeer):
    """Another SMP than before speaks for ``node``: the memory of the former one is lost."""


class PeerPassed(FromPeer, verb="passed"):
    """``node`` will write no step up to ``step`` that it has not written yet."""

    epoch: int
    step: int


class PeerSize(FromPeer, verb="size"):
    """``rank`` of ``node`` has so many bytes to stripe at a step."""

    rank: int
    epoch: int
    step: int
    nbytes: int


class PeerWrote(FromPeer, verb="wrote"):
    """All ranks of ``node`` have written a step."""

    epoch: int
    step: int


class PeerMirror(FromPeer, verb="mirror"):
    """``node`` sends the manifest of its ``rank``, to be kept for it."""

    rank: int
    epoch: int
    step: int
    digest: str
    manifest: bytes


class PeerHolds(FromPeer, verb="holds"):
    """``node`` holds all that it should of a step; ``manifest`` is a ``cluster_steps.Held``."""

    epoch: int
    step: int
    manifest: bytes


class PeerChunk(FromPeer, verb="chunk"):
    """Bytes of a data block, to be added to a parity here.

    They are of ``rank`` of ``node``; times ``coefficient`` they are added at ``start`` of the slot
    of rank ``keeper``, which is on this node.
    """

    rank: int
    keeper: int
    epoch: int
    step: int
    start: int
    coefficient: int
    blob: bytes


class Spare(Event):
    """There is time for background work, and the links to ``nodes`` can take more."""

    nodes: tuple[int, ...]


class Digested(Event):
    """The shell carried out a :class:`Digest`."""

    rank: int
    slot: int
    digest: bytes


class Allocated(Event):
    """The shell carried out an :class:`Allocate`."""

    rank: int
    slot: int
    nbytes: int


class AllocationRefused(Event):
    """The shell could not carry out an :class:`Allocate`; the slot now has no memory."""

    rank: int
    slot: int
    reason: str


class StopRequested(Event):
    """Someone allowed to asked the SMP to stop."""


class Tick(Event):
    """Time has passed."""


class Instruction(Message):
    """Something that the shell is to do."""


class Reply(Instruction):
    """Send ``verb`` with ``fields`` to ``rank``; with ``slot``, pass that slot's memory along."""

    rank: int
    verb: str
    fields: Fields = field(default_factory=dict)
    slot: int | None = None
    writable: bool = False
    manifest: bytes = b""


class Answer(Instruction):
    """Send ``verb`` with ``fields`` to reader ``holder``; with ``slot``, ``rank``'s memory too."""

    holder: int
    verb: str
    fields: Fields = field(default_factory=dict)
    rank: int = -1
    slot: int | None = None
    manifest: bytes = b""


class Connect(Instruction):
    """Serve and reach the nodes of this roster from now on, and no others."""

    roster: Roster


class ToPeer(Instruction):
    """Send ``verb`` with ``fields`` to the SMP of ``node``, if a link to it stands."""

    node: int
    verb: str
    fields: Fields
    blob: bytes = b""


class Ship(Instruction):
    """Send a chunk to the SMP of ``node``: ``nbytes`` bytes at ``start`` of a slot."""

    node: int
    rank: int
    slot: int
    start: int
    nbytes: int
    fields: Fields


class Accumulate(Instruction):
    """Add ``coefficient`` · ``blob`` to the bytes at ``start`` of a slot, in GF(2⁸)."""

    rank: int
    slot: int
    start: int
    coefficient: int
    blob: bytes


class Digest(Instruction):
    """Digest ``nbytes`` bytes at ``start`` of a slot, and say so with a :class:`Digested`."""

    rank: int
    slot: int
    start: int
    nbytes: int


class Allocate(Instruction):
    """Give the slot ``nbytes`` of fresh memory (its old memory, if any, is not needed)."""

    rank: int
    slot: int
    nbytes: int


class Free(Instruction):
    """Give the slot's memory back to the system."""

    rank: int
    slot: int


class Stop(Instruction):
    """Send all queued frames, free everything and exit."""

    reason: str


def parse(
    sender: type[FromRank | FromReader | FromPeer], header: Fields, blob: bytes, number: int | None
) -> Event:
    """Return the event that a frame states.

    Args:
        sender: the kind of process whose connection it came over.
        header: the frame's fields; ``verb`` names the event.
        blob: the bytes that came with it.
        number: the rank, reader or node of the connection; None before a rank's hello.

    Raises:
        ProtocolViolation: unknown verb, a rank that did not say hello, a missing or odd field.
    """
    verb = header.get("verb")
    kind = sender.by_verb.get(verb) if isinstance(verb, str) else None
    if kind is None or not issubclass(kind, Event):
        raise ProtocolViolation(f"unknown verb {verb!r}")
    if number is None and kind is not Hello:
        raise ProtocolViolation(f"{verb!r} came before hello")
    given = {**header, "manifest": blob, "blob": blob}
    if number is not None:
        given[next(iter(sender.__dataclass_fields__))] = number
    values = {name: _checked(item, given) for name, item in kind.__dataclass_fields__.items()}
    return kind(**values)


def _checked(item: Field[object], given: Fields) -> object:
    default = None if item.default is MISSING else item.default
    default = default if item.default_factory is MISSING else item.default_factory()
    value = given.get(item.name, default)
    kind = get_origin(item.type) or item.type
    assert isinstance(kind, type)
    if type(value) is not kind:
        raise ProtocolViolation(f"field {item.name!r} is {value!r}, not {kind.__name__}")
    if isinstance(value, int) and not 0 <= value < _INT_LIMIT:
        raise ProtocolViolation(f"field {item.name!r} is {value}, outside 0 … 2^63-1")
    return value
