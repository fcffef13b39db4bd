"""What the SMP's state machine is told (events) and what it answers (instructions)."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

_INT_LIMIT = 2**63


class ProtocolViolation(ValueError):
    """A peer sent bytes or fields that no holdfast client sends; its connection is dropped."""


@dataclass(frozen=True)
class Hello:
    """A trainer process takes the place of ``rank``, expecting this node layout."""

    rank: int
    world_size: int
    keep: int


@dataclass(frozen=True)
class Begin:
    """``rank`` wants a slot of ``nbytes`` bytes for the state after ``step``."""

    rank: int
    step: int
    nbytes: int


@dataclass(frozen=True)
class Written:
    """``rank`` has copied all of ``step``; ``manifest`` describes it, ``digest`` guards it."""

    rank: int
    step: int
    digest: str
    manifest: bytes


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
class Finished:
    """``rank`` has completed its training and needs no snapshot any more."""

    rank: int


@dataclass(frozen=True)
class Disconnected:
    """The connection of ``rank`` is gone (closed, killed or dropped)."""

    rank: int


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
    | Begin
    | Written
    | Restore
    | Verified
    | Corrupt
    | Finished
    | Disconnected
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


Instruction = Reply | Allocate | Free | Stop

_FROM_RANKS: dict[str, type[Any]] = {
    "hello": Hello,
    "begin": Begin,
    "written": Written,
    "restore": Restore,
    "verified": Verified,
    "corrupt": Corrupt,
    "finished": Finished,
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
    given = {**header, "manifest": blob} | ({} if rank is None else {"rank": rank})
    event: Event = kind(**{item.name: _checked(item, given) for item in fields(kind)})
    return event


def _checked(item: Any, given: Mapping[str, Any]) -> Any:
    value = given.get(item.name)
    if type(value) is not item.type:
        raise ProtocolViolation(f"field {item.name!r} is {value!r}, not {item.type.__name__}")
    if isinstance(value, int) and not 0 <= value < _INT_LIMIT:
        raise ProtocolViolation(f"field {item.name!r} is {value}, outside 0 … 2^63-1")
    return value
