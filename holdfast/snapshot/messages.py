"""What the SMP's state machine is told (events) and what it answers (instructions)."""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, get_origin

_INT_LIMIT = 2**63


class ProtocolViolation(ValueError):
    """A peer sent bytes or fields that no holdfast client sends; its connection is dropped."""


@dataclass(frozen=True)
class Hello:
    """A trainer process takes the place of ``rank``, expecting this node layout."""

    rank: int
    world_size: int
    keep: int
    version: str


@dataclass(frozen=True)
class Begin:
    """``rank`` wants a slot of ``nbytes`` bytes for the state after ``step``."""

    rank: int
    step: int
    nbytes: int


@dataclass(frozen=True)
class Sizes:
    """``rank`` has ``nbytes`` bytes to stripe at ``step``, and asks how many ``ranks`` have.

    Only where nodes hold different states; the answer comes once all of them have said so.
    """

    rank: int
    step: int
    nbytes: int
    ranks: list[Any]


@dataclass(frozen=True)
class Withdraw:
    """``rank`` waits for sizes no more: it skips the step."""

    rank: int


@dataclass(frozen=True)
class PassOver:
    """``rank`` will not write ``step``, whatever became of its copy; nobody is to wait for it."""

    rank: int
    step: int


@dataclass(frozen=True)
class Written:
    """``rank`` has copied all of ``step``; ``manifest`` describes it, ``digest`` guards it.

    ``copy_us`` is how long this copy took, ``stall_us`` how long training waited for all so far.
    Of a state that several nodes divide, ``claims`` are the digests of the blocks that this rank
    owns, ``seen`` those of other ranks' blocks that its parities were computed from, each as
    [owner's rank, number of the block there, digest]. ``cargo``, where nodes hold different states,
    is a ``cargo.Cargo`` as JSON.
    """

    rank: int
    step: int
    digest: str
    manifest: bytes
    copy_us: int = 0
    stall_us: int = 0
    claims: list[Any] = field(default_factory=list)
    seen: list[Any] = field(default_factory=list)
    cargo: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Restore:
    """``rank`` wants the newest intact step; whatever is in flight is abandoned."""

    rank: int


@dataclass(frozen=True)
class Verified:
    """``rank`` found its part of the offered ``step`` intact."""

    rank: int
    step: int


@dataclass(frozen=True)
class Corrupt:
    """``rank`` found its part of the offered ``step`` damaged."""

    rank: int
    step: int
    reason: str


@dataclass(frozen=True)
class Recall:
    """``rank`` proposes to load ``step`` from disk; not ``found``: it has none to propose."""

    rank: int
    step: int
    found: bool


@dataclass(frozen=True)
class Join:
    """``rank`` states who takes part in the run from now on: a ``cluster.Roster`` as JSON."""

    rank: int
    roster: dict[str, Any]


@dataclass(frozen=True)
class Inventory:
    """``rank`` asks what this node holds, of its own ranks and of others."""

    rank: int


@dataclass(frozen=True)
class Resume:
    """All ranks of all nodes go on from a step: what is newer is void."""

    rank: int
    epoch: int
    step: int


@dataclass(frozen=True)
class Finished:
    """``rank`` has completed its training and needs no snapshot any more."""

    rank: int


@dataclass(frozen=True)
class Disconnected:
    """The connection of ``rank`` is gone (closed, killed or dropped)."""

    rank: int


@dataclass(frozen=True)
class Lease:
    """Reader ``holder`` wants the newest clean step below ``before`` pinned, now."""

    holder: int
    before: int


@dataclass(frozen=True)
class Pin:
    """Reader ``holder``, on whatever node, wants this very step pinned if it is still clean."""

    holder: int
    epoch: int
    step: int


@dataclass(frozen=True)
class Due:
    """Reader ``holder`` wants the newest clean step pinned as soon as it is due to be persisted.

    Due is a step in another interval of ``every`` steps than ``after``, the last one persisted,
    and any other step once somebody asked for it. ``steps`` are on disk already.
    """

    holder: int
    every: int
    after: int
    steps: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Release:
    """Reader ``holder`` needs its pinned step no more."""

    holder: int


@dataclass(frozen=True)
class Persisted:
    """Reader ``holder`` has written ``step`` to disk; or has not, for the reason ``error``."""

    holder: int
    step: int
    error: str


@dataclass(frozen=True)
class Gone:
    """The connection of reader ``holder`` is gone."""

    holder: int


@dataclass(frozen=True)
class PersistRequested:
    """Someone allowed to wants the newest clean step persisted now."""


@dataclass(frozen=True)
class PeerLinked:
    """The SMP of ``node`` can be reached, and has proved that it belongs to the run."""

    node: int


@dataclass(frozen=True)
class PeerUnlinked:
    """It cannot be reached any more."""

    node: int


@dataclass(frozen=True)
class PeerReplaced:
    """Another SMP than before speaks for ``node``: what the former one held is lost."""

    node: int


@dataclass(frozen=True)
class PeerPassed:
    """``node`` will write no step up to ``step`` that it has not written yet."""

    node: int
    epoch: int
    step: int


@dataclass(frozen=True)
class PeerSize:
    """``rank`` of ``node`` has so many bytes to stripe at a step."""

    node: int
    rank: int
    epoch: int
    step: int
    nbytes: int


@dataclass(frozen=True)
class PeerWrote:
    """All ranks of ``node`` have written a step."""

    node: int
    epoch: int
    step: int


@dataclass(frozen=True)
class PeerMirror:
    """``node`` sends the manifest of its ``rank``, to be kept for it."""

    node: int
    rank: int
    epoch: int
    step: int
    digest: str
    manifest: bytes


@dataclass(frozen=True)
class PeerHolds:
    """``node`` holds all that it should of a step; ``manifest`` is what ``cluster.Held`` reads."""

    node: int
    epoch: int
    step: int
    manifest: bytes


@dataclass(frozen=True)
class PeerChunk:
    """Bytes of ``rank`` of ``node``, to be added, times ``coefficient``, at ``start`` to the slot
    of local rank ``keeper`` of the run."""

    node: int
    rank: int
    keeper: int
    epoch: int
    step: int
    start: int
    coefficient: int
    blob: bytes


@dataclass(frozen=True)
class Spare:
    """There is time for background work, and the links to ``nodes`` have room."""

    nodes: tuple[int, ...]


@dataclass(frozen=True)
class Digested:
    """The shell carried out a :class:`Digest`."""

    rank: int
    slot: int
    digest: bytes


@dataclass(frozen=True)
class Allocated:
    """The shell carried out an :class:`Allocate`."""

    rank: int
    slot: int
    nbytes: int


@dataclass(frozen=True)
class AllocationRefused:
    """The shell could not carry out an :class:`Allocate`; the slot now has no memory."""

    rank: int
    slot: int
    reason: str


@dataclass(frozen=True)
class StopRequested:
    """Someone allowed to asked the SMP to stop."""


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


Event = (
    Hello
    | Sizes
    | Withdraw
    | Begin
    | PassOver
    | Written
    | Restore
    | Verified
    | Corrupt
    | Recall
    | Join
    | Inventory
    | Resume
    | Finished
    | Disconnected
    | Lease
    | Pin
    | Due
    | Release
    | Persisted
    | Gone
    | PersistRequested
    | PeerLinked
    | PeerUnlinked
    | PeerReplaced
    | PeerWrote
    | PeerPassed
    | PeerMirror
    | PeerHolds
    | PeerSize
    | PeerChunk
    | Spare
    | Digested
    | Allocated
    | AllocationRefused
    | StopRequested
    | Tick
)


@dataclass(frozen=True)
class Reply:
    """Send ``verb`` with ``fields`` to ``rank``; with ``slot``, pass that slot's memory along."""

    rank: int
    verb: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    slot: int | None = None
    writable: bool = False
    manifest: bytes = b""


@dataclass(frozen=True)
class Answer:
    """Send ``verb`` with ``fields`` to reader ``holder``; with ``slot``, ``rank``'s memory too."""

    holder: int
    verb: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    rank: int = -1
    slot: int | None = None
    manifest: bytes = b""


@dataclass(frozen=True)
class Connect:
    """Serve and reach the nodes of this roster from now on, and no others."""

    roster: Any


@dataclass(frozen=True)
class ToPeer:
    """Send ``verb`` with ``fields`` to the SMP of ``node``, if a link to it stands."""

    node: int
    verb: str
    fields: Mapping[str, Any]
    blob: bytes = b""


@dataclass(frozen=True)
class Ship:
    """Send a chunk to the SMP of ``node``: ``nbytes`` bytes at ``start`` of a slot."""

    node: int
    rank: int
    slot: int
    start: int
    nbytes: int
    fields: Mapping[str, Any]


@dataclass(frozen=True)
class Accumulate:
    """Add ``coefficient`` · ``blob`` to the bytes at ``start`` of a slot, in GF(2⁸)."""

    rank: int
    slot: int
    start: int
    coefficient: int
    blob: bytes


@dataclass(frozen=True)
class Digest:
    """Digest ``nbytes`` bytes at ``start`` of a slot, and say so with a :class:`Digested`."""

    rank: int
    slot: int
    start: int
    nbytes: int


@dataclass(frozen=True)
class Allocate:
    """Give the slot ``nbytes`` of fresh memory (its old memory, if any, is not needed)."""

    rank: int
    slot: int
    nbytes: int


@dataclass(frozen=True)
class Free:
    """Give the slot's memory back to the system."""

    rank: int
    slot: int


@dataclass(frozen=True)
class Stop:
    """Send what is queued, free everything and exit."""

    reason: str


Instruction = (
    Reply | Answer | Connect | ToPeer | Ship | Accumulate | Digest | Allocate | Free | Stop
)

_FROM_RANKS: dict[str, type[Any]] = {
    "hello": Hello,
    "sizes": Sizes,
    "withdraw": Withdraw,
    "begin": Begin,
    "pass_over": PassOver,
    "written": Written,
    "restore": Restore,
    "verified": Verified,
    "corrupt": Corrupt,
    "recall": Recall,
    "join": Join,
    "inventory": Inventory,
    "resume": Resume,
    "finished": Finished,
}
_FROM_READERS: dict[str, type[Any]] = {
    "lease": Lease,
    "due": Due,
    "release": Release,
    "persisted": Persisted,
}
_FROM_PEERS: dict[str, type[Any]] = {
    "wrote": PeerWrote,
    "passed": PeerPassed,
    "mirror": PeerMirror,
    "holds": PeerHolds,
    "size": PeerSize,
    "chunk": PeerChunk,
}


def parse(header: Mapping[str, Any], blob: bytes, rank: int | None) -> Event:
    """The event that a frame states; ``rank`` is whom the connection belongs to (None: no one yet).

    Raises:
        ProtocolViolation: unknown verb, a rank that did not say hello, a missing or odd field.
    """
    verb = header.get("verb")
    kind = _FROM_RANKS.get(verb) if isinstance(verb, str) else None
    if kind is None:
        raise ProtocolViolation(f"unknown verb {verb!r}")
    if rank is None and kind is not Hello:
        raise ProtocolViolation(f"{verb!r} came before hello")
    return _made(kind, {**header, "manifest": blob} | ({} if rank is None else {"rank": rank}))


def reads(header: Mapping[str, Any]) -> bool:
    """Whether a frame is one that only readers send."""
    verb = header.get("verb")
    return isinstance(verb, str) and verb in _FROM_READERS


def parse_reader(header: Mapping[str, Any], holder: int) -> Event:
    """The event that a reader's frame states.

    Raises:
        ProtocolViolation: a missing or odd field.
    """
    return _made(_FROM_READERS[header["verb"]], {**header, "holder": holder})


def parse_peer(header: Mapping[str, Any], blob: bytes, node: int) -> Event:
    """The event that a frame of another node's SMP states.

    Raises:
        ProtocolViolation: unknown verb, a missing or odd field.
    """
    kind = _FROM_PEERS.get(str(header.get("verb")))
    if kind is None:
        raise ProtocolViolation(f"unknown verb {header.get('verb')!r} from node {node}")
    return _made(kind, {**header, "manifest": blob, "blob": blob, "node": node})


def _made(kind: type[Any], given: Mapping[str, Any]) -> Event:
    event: Event = kind(**{item.name: _checked(item, given) for item in fields(kind)})
    return event


def _checked(item: Any, given: Mapping[str, Any]) -> Any:
    default = None if item.default is MISSING else item.default
    default = default if item.default_factory is MISSING else item.default_factory()
    value = given.get(item.name, default)
    kind = get_origin(item.type) or item.type
    if type(value) is not kind:
        raise ProtocolViolation(f"field {item.name!r} is {value!r}, not {kind.__name__}")
    if isinstance(value, int) and not 0 <= value < _INT_LIMIT:
        raise ProtocolViolation(f"field {item.name!r} is {value}, outside 0 … 2^63-1")
    return value
