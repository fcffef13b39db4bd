"""The events that the SMP's state machine handles, and the instructions that it returns."""

from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field
from typing import ClassVar, dataclass_transform, get_origin

from holdfast.snapshot.protocol.roster import ProtocolViolation as ProtocolViolation
from holdfast.snapshot.protocol.roster import Roster

_INT_LIMIT = 2**63
ANY_STEP = 2**62  # newer than every step

Fields = Mapping[str, object]


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Message:
    """A frozen dataclass without the decorator; ``verb`` is its name in a frame."""

    __dataclass_fields__: ClassVar[dict[str, Field[object]]]
    by_verb: ClassVar[dict[str, type["Message"]]] = {}

    def __init_subclass__(cls, verb: str = "", sender: bool = False) -> None:
        dataclass(frozen=True)(cls)
        if sender:
            cls.by_verb = {}
        if verb:
            cls.by_verb[verb] = cls


class Event(Message):
    """An event that the state machine handles."""


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
    """A trainer process begins to act for ``rank``; it expects this layout of the node."""

    world_size: int
    keep: int
    version: str


class Begin(FromRank, verb="begin"):
    """``rank`` requests a slot of ``nbytes`` bytes for the state after ``step``."""

    step: int
    nbytes: int


class Sizes(FromRank, verb="sizes"):
    """``rank`` has ``nbytes`` bytes to stripe at ``step``, and asks for the sizes of ``ranks``.

    It is sent only if the nodes hold different states; the answer comes once all have stated
    theirs.
    """

    step: int
    nbytes: int
    ranks: list[int]


class Withdraw(FromRank, verb="withdraw"):
    """``rank`` no longer waits for sizes, and skips the step."""


class SkipStep(FromRank, verb="skip_step"):
    """``rank`` will not write ``step``, so that nobody is to wait for it."""

    step: int


class Written(FromRank, verb="written"):
    """``rank`` has copied all of ``step``; ``manifest`` describes the copy, ``digest`` protects it.

    Attributes:
        copy_us: the duration of this copy, in microseconds.
        stall_us: how long training has waited for all snapshots so far, in microseconds.
        claims: the digests of the blocks that this rank owns, if several nodes divide the state.
        seen: the digests of other ranks' blocks from which this rank computed its parities, each as
            [owner's rank, number of the block there, digest].
        parity_plan: if the nodes hold different states, a ``parity_stream.ParityPlan`` as JSON.
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
    """``rank`` requests the newest intact step; the step in flight is aborted.

    Attributes:
        before: only older steps than this one; the same for all ranks.
    """

    before: int = ANY_STEP


class Verified(FromRank, verb="verified"):
    """``rank`` found its part of the offered ``step`` intact."""

    step: int


class Corrupt(FromRank, verb="corrupt"):
    """``rank`` found its part of the offered ``step`` damaged."""

    step: int
    reason: str


class Recall(FromRank, verb="recall"):
    """``rank`` proposes to load ``step`` from disk; without ``found`` it has no step to propose."""

    step: int
    found: bool


class Join(FromRank, verb="join"):
    """``rank`` states which nodes take part in the run from now on (``Roster.encode``).

    ``again`` is true if another SMP of this node took part in the epoch before.
    """

    roster: dict[str, object]
    again: bool = False


class Inventory(FromRank, verb="inventory"):
    """``rank`` requests a list of the steps that this node holds, of its own and other ranks."""


class Resume(FromRank, verb="resume"):
    """All ranks of all nodes continue from a step; newer ones are void."""

    epoch: int
    step: int


class Finished(FromRank, verb="finished"):
    """``rank`` has completed its training and needs no further snapshot."""


class Disconnected(FromRank):
    """The connection of ``rank`` has ended: it was closed, or its process died."""


class Lease(FromReader, verb="lease"):
    """Reader ``holder`` requests that the newest clean step below ``before`` is pinned, now."""

    before: int


class Pin(FromReader):
    """Reader ``holder``, on any node, requests that this very step is pinned if still clean."""

    epoch: int
    step: int


class Due(FromReader, verb="due"):
    """Reader ``holder`` requests the newest clean step as soon as it is due to be persisted.

    A step is due if it is in another interval of ``every`` steps than ``after``, the last one
    persisted; or if a user has asked for it. ``steps`` are on disk already.
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
    """The connection of reader ``holder`` has ended."""


class PersistRequested(Event):
    """A user has asked for the newest clean step to be persisted now."""


class PeerLinked(FromPeer):
    """The SMP of ``node`` can be reached, and has proved that it belongs to the run."""


class PeerUnlinked(FromPeer):
    """The SMP of ``node`` cannot be reached any more."""


class PeerReplaced(FromPeer, verb="replaced"):
    """Another SMP acts for ``node`` now; the memory of the former one is lost.

    It says so itself, too, as this node may not have met the former one.
    """


class PeerPassed(FromPeer, verb="passed"):
    """``node`` will write no step up to ``step`` that it has not written yet."""

    epoch: int
    step: int


class PeerSize(FromPeer, verb="size"):
    """``rank`` of ``node`` has ``nbytes`` bytes to stripe at a step."""

    rank: int
    epoch: int
    step: int
    nbytes: int


class PeerWrote(FromPeer, verb="wrote"):
    """All ranks of ``node`` have written a step."""

    epoch: int
    step: int


class PeerMirror(FromPeer, verb="mirror"):
    """``node`` sends the manifest of its ``rank``, to be kept here as a mirror."""

    rank: int
    epoch: int
    step: int
    digest: str
    manifest: bytes


class PeerHolds(FromPeer, verb="holds"):
    """``node`` holds its part of a step; ``manifest`` is a ``cluster_steps.Held``."""

    epoch: int
    step: int
    manifest: bytes


class PeerChunk(FromPeer, verb="chunk"):
    """Bytes of a data block of ``rank`` of ``node``, to be added to a parity here.

    They are multiplied by ``coefficient`` and added at ``start`` of the slot of rank ``keeper``.
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
    """A :class:`Digest` was carried out."""

    rank: int
    slot: int
    digest: bytes


class Allocated(Event):
    """An :class:`Allocate` was carried out."""

    rank: int
    slot: int
    nbytes: int


class AllocationRefused(Event):
    """An :class:`Allocate` could not be carried out; the slot has no memory now."""

    rank: int
    slot: int
    reason: str


class StopRequested(Event):
    """A user has asked the SMP to stop."""


class Tick(Event):
    """Time has passed."""


class Instruction(Message):
    """An action that the process around the state machine is to carry out."""


class Reply(Instruction):
    """Send ``verb`` with ``fields`` to ``rank``, with the memory of ``slot`` if given."""

    rank: int
    verb: str
    fields: Fields = field(default_factory=dict)
    slot: int | None = None
    writable: bool = False
    manifest: bytes = b""


class Answer(Instruction):
    """Send ``verb`` with ``fields`` to reader ``holder``, with the memory of ``slot`` if given."""

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
    """Send ``verb`` with ``fields`` to the SMP of ``node``, if there is a link to it."""

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
    """Digest ``nbytes`` bytes at ``start`` of a slot; answer with :class:`Digested`."""

    rank: int
    slot: int
    start: int
    nbytes: int


class Allocate(Instruction):
    """Give the slot ``nbytes`` of fresh memory; its old memory is not needed."""

    rank: int
    slot: int
    nbytes: int


class Free(Instruction):
    """Free the slot's memory."""

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
        sender: the kind of process that sent it.
        header: the fields of the frame; ``verb`` names the event.
        blob: the bytes that came with it.
        number: the rank, reader or node of the connection; None before a rank's hello.

    Raises:
        ProtocolViolation: the verb is unknown, no hello came before, or a field is missing or of a
            wrong type.
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
