"""The events that the SMP's state machine handles, and the instructions that it returns.

Every event that another process sends has a schema: its fields with their types and bounds. A frame
that does not fit it exactly is a violation of the protocol, which costs its connection.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta, field

from holdfast.snapshot.protocol.roster import Count, Roster, fitted
from holdfast.snapshot.protocol.roster import ProtocolViolation as ProtocolViolation
from holdfast.snapshot.protocol.schema import Message

ANY_STEP = 2**62  # newer than every step

# A change of a message, of ``Roster``, of a frame or of a manifest makes another wire version
# (``tests/snapshot/test_wire.py`` notices it). An SMP serves processes of its own wire version,
# whatever their version of holdfast, and no others.
WIRE_VERSION = 2

_BLOBS = "manifest", "blob"

Fields = Mapping[str, object]
Text = Annotated[str, Meta(max_length=4096)]


class Event(Message):
    """An event that the state machine handles."""


class FromRank(Event, sender=True):
    """A message of local rank ``rank``."""

    rank: Count


class OfStep(FromRank):
    """A message of a local rank about a ``step``."""

    step: Count


class FromReader(Event, sender=True):
    """A message of ``holder``, a process that reads snapshots: the persister, or a command."""

    holder: Count


class FromPeer(Event, sender=True):
    """A message of the SMP of another ``node``."""

    node: Count


class Hello(FromRank, verb="hello"):
    """A trainer process begins to act for ``rank``; it expects this layout of the node.

    ``alone`` is true if no other node takes part in the run, and it can go on from disk.
    """

    world_size: Count
    keep: Count
    version: Text
    alone: bool = False


class Begin(OfStep, verb="begin"):
    """``rank`` requests a slot of ``nbytes`` bytes for the state after ``step``."""

    nbytes: Count


class Sizes(OfStep, verb="sizes"):
    """``rank`` has ``nbytes`` bytes to stripe at ``step``, and asks for the sizes of ``ranks``.

    It is sent only if the nodes hold different states; the answer comes once all have stated
    theirs. With the ``digest`` of its state a rank of a node without parities asks for those of all
    local ranks.
    """

    nbytes: Count
    ranks: list[Count]
    digest: Text = ""


class Withdraw(FromRank, verb="withdraw"):
    """``rank`` no longer waits for sizes, and skips the step."""


class SkipStep(OfStep, verb="skip_step"):
    """``rank`` will not write ``step``, so that nobody is to wait for it."""


class Written(OfStep, verb="written"):
    """``rank`` has copied all of ``step``; ``manifest`` describes the copy, ``digest`` protects it.

    Attributes:
        copy_us: the duration of this copy, in microseconds.
        stall_us: how long training has waited for all snapshots so far, in microseconds.
        claims: the digests of the blocks that this rank owns, if several nodes divide the state.
        seen: the digests of other ranks' blocks from which this rank computed its parities, each as
            [owner's rank, number of the block there, digest].
        parity_plan: if the nodes hold different states, a ``parity_stream.ParityPlan`` as JSON.
    """

    digest: Text
    manifest: bytes
    copy_us: Count = 0
    stall_us: Count = 0
    claims: list[Text] = field(default_factory=list)
    seen: list[tuple[Count, Count, Text]] = field(default_factory=list)
    parity_plan: dict[str, object] = field(default_factory=dict)


class Restore(FromRank, verb="restore"):
    """``rank`` requests the newest intact step; the step in flight is aborted.

    Attributes:
        before: only older steps than this one; the same for all ranks.
    """

    before: Count = ANY_STEP


class Verified(OfStep, verb="verified"):
    """``rank`` found its part of the offered ``step`` intact."""


class Corrupt(OfStep, verb="corrupt"):
    """``rank`` found its part of the offered ``step`` damaged, or cannot use it: it is ``kept``."""

    reason: Text
    kept: bool = False


class Recall(OfStep, verb="recall"):
    """``rank`` proposes to load ``step`` from disk; without ``found`` it has no step to propose."""

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

    epoch: Count
    step: Count


class Finished(FromRank, verb="finished"):
    """``rank`` has completed its training and needs no further snapshot."""


class Disconnected(FromRank):
    """The connection of ``rank`` has ended: it was closed, or its process died."""


class Lease(FromReader, verb="lease"):
    """Reader ``holder`` requests that the newest clean step below ``before`` is pinned, now."""

    before: Count


class Copied(FromReader, verb="copied"):
    """Reader ``holder`` requests the local ranks' memory of ``step``, complete or not, unpinned."""

    step: Count


class Pin(FromReader):
    """Reader ``holder``, on any node, requests that this very step is pinned if still clean."""

    epoch: Count
    step: Count


class Due(FromReader, verb="due"):
    """Reader ``holder`` requests the newest clean step as soon as it is due to be persisted.

    A step is due if it is in another interval of ``every`` steps than ``after``, the last one
    persisted; or if a user has asked for it. ``steps`` are on disk already.
    """

    every: Count
    after: Count
    steps: list[Count] = field(default_factory=list)


class Release(FromReader, verb="release"):
    """Reader ``holder`` no longer needs its pinned step."""


class Persisted(FromReader, verb="persisted"):
    """Reader ``holder`` has written ``step`` to disk; or has not, for the reason ``error``."""

    step: Count
    error: Text


class Gone(FromReader):
    """The connection of reader ``holder`` has ended."""


class PersistRequested(Event):
    """A user has asked for the newest clean step to be persisted now."""


class PeerLinked(FromPeer):
    """The SMP of ``node`` can be reached, and has proved that it belongs to the run."""


class PeerUnlinked(FromPeer):
    """The SMP of ``node`` cannot be reached any more."""


class OfPeerStep(FromPeer):
    """A message of another node's SMP about a step of an epoch."""

    epoch: Count
    step: Count


class PeerReplaced(FromPeer, verb="replaced"):
    """Another SMP acts for ``node`` now; the memory of the former one is lost.

    It says so itself, too, as this node may not have met the former one. What the SMP of an older
    ``epoch`` said of itself does not count in a newer one, which it joined as all others did.
    """

    epoch: Count


class PeerPassed(OfPeerStep, verb="passed"):
    """``node`` will write no step up to ``step`` that it has not written yet.

    A child in the commit tree states that of all nodes below, except for the steps ``alive``;
    ``firm`` is false if an SMP was replaced there (``commit_tree``).
    """

    alive: list[Count] = field(default_factory=list)
    firm: bool = True


class PeerSealed(OfPeerStep, verb="sealed"):
    """All nodes below ``node`` in the commit tree hold a step; ``disk`` is empty or a ``Disk``."""

    disk: list[object]
    firm: bool


class PeerVoid(OfPeerStep, verb="void"):
    """A step that was told of as sealed will not be committed; ``firm`` if that is certain."""

    firm: bool


class PeerCommitted(OfPeerStep, verb="committed"):
    """All nodes of the run hold a step; ``disk`` is empty or the ``Disk`` of all of them."""

    disk: list[object]


class PeerLate(OfPeerStep, verb="late"):
    """A step waits for ``nodes``."""

    nodes: list[Count]


class PeerSize(FromPeer, verb="size"):
    """``rank`` of ``node`` has ``nbytes`` bytes to stripe at a step."""

    rank: Count
    epoch: Count
    step: Count
    nbytes: Count


class PeerWrote(OfPeerStep, verb="wrote"):
    """All ranks of ``node`` have written a step."""


class PeerMirror(FromPeer, verb="mirror"):
    """``node`` sends the manifest of its ``rank``, to be kept here as a mirror."""

    rank: Count
    epoch: Count
    step: Count
    digest: Text
    manifest: bytes


class PeerHolds(OfPeerStep, verb="holds"):
    """``node`` holds its part of a step; ``manifest`` is a ``cluster_steps.Held``."""

    manifest: bytes


class PeerChunk(FromPeer, verb="chunk"):
    """Bytes of a data block of ``rank`` of ``node``, to be added to a parity here.

    They are multiplied by ``coefficient`` and added at ``start`` of the slot of rank ``keeper``.
    """

    rank: Count
    keeper: Count
    epoch: Count
    step: Count
    start: Count
    coefficient: Annotated[int, Meta(ge=0, le=255)]
    blob: Any  # a buffer; as bytes it would be copied


class Spare(Event):
    """There is time for background work, and the links to ``nodes`` can take more."""

    nodes: tuple[int, ...]


class OfSlot(Event):
    """A message about the memory of a ``slot`` of local rank ``rank``."""

    rank: Count
    slot: Count


class Digested(OfSlot):
    """A :class:`Digest` was carried out."""

    digest: bytes


class Allocated(OfSlot):
    """An :class:`Allocate` was carried out."""

    nbytes: Count


class AllocationRefused(OfSlot):
    """An :class:`Allocate` could not be carried out; the slot has no memory now."""

    reason: Text


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


class SetAside(Instruction):
    """Number the memory of local rank r as that of rank -1 - r, and free what had such a number."""


class Stop(Instruction):
    """Send all queued frames, free everything and exit."""

    reason: str


def parse(sender: type[Event], header: Fields, blob: Any = b"", number: int | None = None) -> Any:
    """Return the message that a frame states.

    Args:
        sender: the kind of process that sent it.
        header: the fields of the frame; ``verb`` names the message.
        blob: the bytes that came with it, of which only a message with such a field may have any.
        number: the rank, reader or node of the connection; None before a rank's hello.

    Raises:
        ProtocolViolation: the verb is unknown, no hello came before, or the fields do not fit.
    """
    verb = header.get("verb")
    kind = sender.by_verb.get(verb) if isinstance(verb, str) else None
    if kind is None:
        raise ProtocolViolation(f"unknown verb {verb!r:.60}")
    if number is None and issubclass(kind, FromRank) and kind is not Hello:
        raise ProtocolViolation(f"{verb!r} came before hello")
    names = kind.__struct_fields__
    given = {name: value for name, value in header.items() if name not in ("verb", *_BLOBS)}
    if number is not None:
        given[names[0]] = number
    if taken := [name for name in _BLOBS if name in names]:
        given[taken[0]] = blob
    elif len(blob):
        raise ProtocolViolation(f"{verb!r} came with {len(blob)} bytes")
    return fitted(given, kind)
