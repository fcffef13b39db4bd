"""The nodes of a run as the state machine knows them: roster, epochs and steps."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypedDict


class ProtocolViolation(ValueError):
    """A peer sent bytes or fields that no holdfast client sends; its connection is dropped."""


class InvariantError(RuntimeError):
    """The state machine is in an impossible state; the message lists the events that led to it."""


class Stamp(NamedTuple):
    """A step of one epoch; a step of a later epoch is newer, whatever its number."""

    epoch: int
    step: int


@dataclass(frozen=True)
class Roster:
    """The nodes of a run and this node's tasks for the others, as the ranks agreed on them.

    Attributes:
        epoch: the number of agreements in this run so far.
        node: the number of this node.
        addresses: host and port of every node's SMP.
        secret: a text shared by the nodes and their ranks, which alone are served.
        parities: the number of nodes that may be lost, 1 or 2.
        first_rank: the first of this node's ranks.
        mirror_nodes: for every local rank, the nodes that keep a copy of its manifest.
        mirrored_ranks: the ranks of other nodes whose manifests are kept here.
        sets: for every local rank, the stripe sets (``groups.stripe_sets``) of its sharding group.
    """

    epoch: int
    node: int
    addresses: tuple[tuple[str, int], ...]
    secret: str
    parities: int
    first_rank: int
    mirror_nodes: tuple[tuple[int, ...], ...]
    mirrored_ranks: tuple[int, ...]
    sets: tuple[tuple[tuple[int, ...], ...], ...]

    def encode(self) -> dict[str, object]:
        """Return the roster as ``parse`` reads it, JSON-ready."""
        values = vars(self).copy()
        values["keepers"] = values.pop("mirror_nodes")
        return values | {"wards": values.pop("mirrored_ranks")}

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> "Roster":
        """Return the roster that a frame states."""
        try:
            return cls(
                epoch=int(given["epoch"]),
                node=int(given["node"]),
                addresses=tuple((str(host), int(port)) for host, port in given["addresses"]),
                secret=str(given["secret"]),
                parities=int(given["parities"]),
                first_rank=int(given["first_rank"]),
                mirror_nodes=tuple(map(_numbers, given["keepers"])),
                mirrored_ranks=_numbers(given["wards"]),
                sets=tuple(tuple(map(_numbers, sets)) for sets in given["sets"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolViolation(f"the roster cannot be read: {error!r}") from error

    @property
    def peers(self) -> tuple[int, ...]:
        """The other nodes."""
        return tuple(node for node in self.nodes if node != self.node)

    @property
    def nodes(self) -> range:
        """All nodes."""
        return range(len(self.addresses))

    def node_of(self, rank: int) -> int:
        """Return the node of a rank of the run."""
        return rank // len(self.mirror_nodes)


class HeldStep(TypedDict):
    """A step of a rank that a node holds in a slot, or whose manifest it mirrors."""

    rank: int
    epoch: int
    step: int
    digest: str


class HeldSlot(HeldStep):
    """A step in a slot.

    Attributes:
        nodes: the number of nodes of the run when it was written.
        committed: true if this node has seen that all hold it.
    """

    nodes: int
    committed: bool


class NodeInventory(TypedDict):
    """The steps that a node can provide to a restore."""

    epoch: int
    slots: list[HeldSlot]
    mirrors: list[HeldStep]


def _numbers(given: Iterable[Any]) -> tuple[int, ...]:
    return tuple(map(int, given))
