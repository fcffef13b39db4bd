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

    epoch: int
    node: int
    run_nodes: int
    group: tuple[int, ...]
    addresses: Mapping[int, tuple[str, int]]
    secret: str
    parities: int
    first_rank: int
    mirror_nodes: tuple[tuple[int, ...], ...]
    mirrored_ranks: tuple[int, ...]
    sets: tuple[tuple[tuple[int, ...], ...], ...]
    parents: tuple[int, ...] = ()
    children: tuple[int, ...] = ()
    weak_domains: tuple[str, ...] = ()

    def encode(self) -> dict[str, object]:
        """Return the roster as ``parse`` reads it, JSON-ready."""
        values: dict[str, object] = vars(self).copy()
        values["addresses"] = [[node, *place] for node, place in self.addresses.items()]
        values["keepers"] = values.pop("mirror_nodes")
        return values | {"wards": values.pop("mirrored_ranks")}

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> "Roster":
        """Return the roster that a frame states."""
        try:
            return cls(
                epoch=int(given["epoch"]),
                node=int(given["node"]),
                run_nodes=int(given["run_nodes"]),
                group=_numbers(given["group"]),
                addresses={
                    int(node): (str(host), int(port)) for node, host, port in given["addresses"]
                },
                secret=str(given["secret"]),
                parities=int(given["parities"]),
                first_rank=int(given["first_rank"]),
                mirror_nodes=tuple(map(_numbers, given["keepers"])),
                mirrored_ranks=_numbers(given["wards"]),
                sets=tuple(tuple(map(_numbers, sets)) for sets in given["sets"]),
                parents=_numbers(given["parents"]),
                children=_numbers(given["children"]),
                weak_domains=tuple(map(str, given["weak_domains"])),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolViolation(f"the roster cannot be read: {error!r}") from error

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
    """A step in a slot; ``nodes`` is the number of nodes of the run when it was written."""

    nodes: int


class NodeInventory(TypedDict):
    """The steps that a node can provide to a restore."""

    epoch: int
    slots: list[HeldSlot]
    mirrors: list[HeldStep]


def _numbers(given: Iterable[Any]) -> tuple[int, ...]:
    return tuple(map(int, given))
