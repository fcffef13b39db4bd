"""The nodes of a run as the state machine knows them: roster, epochs and steps."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, TypedDict, TypeVar

import msgspec

Kind = TypeVar("Kind")
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Host = Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
Port = Annotated[int, msgspec.Meta(ge=0, le=2**16 - 1)]


class ProtocolViolation(ValueError):
    """A peer sent bytes or fields that no holdfast client sends; its connection is dropped."""


class InvariantError(RuntimeError):
    """The state machine is in an impossible state; the message lists the events that led to it."""


def fitted(given: object, kind: type[Kind]) -> Kind:
    """Return plain values, as a frame states them, as a record of this kind.

    Raises:
        ProtocolViolation: they do not fit its types.
    """
    try:
        return msgspec.convert(given, kind, str_keys=True)
    except (msgspec.ValidationError, RecursionError) as error:
        raise ProtocolViolation(f"{kind.__name__} cannot be read: {error}") from error


class Stamp(NamedTuple):
    """A step of one epoch; a step of a later epoch is newer, whatever its number."""

    epoch: int
    step: int


@dataclass(frozen=True)
class Roster:
    """A node's parity group and tasks in a run, as the ranks agreed on them; never all nodes.

    Attributes:
        epoch: the number of agreements in this run so far.
        node: the number of this node.
        run_nodes: the number of nodes of the run.
        group: the nodes of this node's parity group.
        addresses: host and port of the SMPs of the group and of the neighbours in the commit tree.
        secret: a text shared by the nodes and their ranks, which alone are served.
        parities: the number of nodes of each group that may be lost, 1 or 2.
        first_rank: the first of this node's ranks.
        mirror_nodes: for every local rank, the nodes that keep a copy of its manifest.
        mirrored_ranks: the ranks of other nodes whose manifests are kept here.
        sets: for every local rank, the stripe sets (``groups.stripe_sets``) of its sharding group.
        parents, children: the neighbours in the commit tree, nodes of other groups
            (``commit_tree``); both are empty if there is one group.
        weak_domains: the failure domains with more nodes of the group than it has parities.
    """

    epoch: Count
    node: Count
    run_nodes: Count
    group: tuple[Count, ...]
    addresses: Mapping[Count, tuple[Host, Port]]
    secret: str
    parities: Count
    first_rank: Count
    mirror_nodes: tuple[tuple[Count, ...], ...]
    mirrored_ranks: tuple[Count, ...]
    sets: tuple[tuple[tuple[Count, ...], ...], ...]
    parents: tuple[Count, ...] = ()
    children: tuple[Count, ...] = ()
    weak_domains: tuple[str, ...] = ()

    def encode(self) -> dict[str, object]:
        """Return the roster as ``parse`` reads it, JSON-ready."""
        return vars(self).copy()

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> "Roster":
        """Return the roster that a frame states."""
        return fitted(given, cls)

    @property
    def peers(self) -> tuple[int, ...]:
        """The nodes to which this one keeps links: its group's and its neighbours in the tree."""
        return tuple(node for node in self.addresses if node != self.node)

    @property
    def members(self) -> tuple[int, ...]:
        """The other nodes of the group."""
        return tuple(node for node in self.group if node != self.node)

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
    """A step in a slot, and the run that wrote it.

    Attributes:
        nodes, ranks: the numbers of that run's nodes and of all its ranks.
        sets: the stripe sets of the rank's sharding group.
        committed: true if this node has seen that all nodes hold the step.
    """

    nodes: int
    ranks: int
    sets: tuple[tuple[int, ...], ...]
    committed: bool


class NodeInventory(TypedDict):
    """The steps that a node can provide to a restore."""

    epoch: int
    slots: list[HeldSlot]
    mirrors: list[HeldStep]
