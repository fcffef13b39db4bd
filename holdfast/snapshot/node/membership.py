"""The ranks of a run on several nodes: they agree on who protects whom, and on steps.

They agree through a gloo process group of their own: when ``Snapshots`` is made, when a state is
restored, and when the run ends. None of this happens while training goes on. What they tell each
other becomes rosters, without I/O.
"""

import secrets
import warnings
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist

from holdfast import config, events
from holdfast.errors import ConfigError, SmpUnavailable
from holdfast.events import EventKind
from holdfast.planner.parity_groups import GROUP_NODES
from holdfast.snapshot.layout import groups, node_groups
from holdfast.snapshot.layout.groups import Job, Seat, StripeSet
from holdfast.snapshot.node import addresses
from holdfast.snapshot.node.session import Listening, SmpSession, patience_s
from holdfast.snapshot.node.supervisor import PersistSettings
from holdfast.snapshot.protocol.exchange import Call, Exchange, Gather, carry_out
from holdfast.snapshot.protocol.roster import Roster
from holdfast.snapshot.transport import tls
from holdfast.version import __version__

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_SECRET_BYTES = 32
# Ranks agree after each has read its part of the state, which has the size of the parameters
# and a few times as much for the optimizer.
_MOMENTS = 4
_AGREEMENT = 2

Value = TypeVar("Value")


class Membership:
    """This rank among all ranks of the run; every rank makes one and calls the same methods.

    Args:
        job: the ranks, with the states that they hold and the nodes that they run on.
        parities: the number of nodes of a parity group that may be lost, 1 or 2.
        group_nodes: the largest number of nodes of a parity group (``node_groups``).
        persist: how often checkpoints are written and how many are kept; None if none are written.
        patience_s: the longest time that one rank waits for the others, in seconds.

    Raises:
        ConfigError: there is no process group, or the ranks were given different settings.
        SmpUnavailable: not all ranks came in time.
    """

    def __init__(
        self,
        job: Job,
        parities: int,
        persist: PersistSettings | None,
        patience_s: float,
        group_nodes: int = GROUP_NODES,
    ) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise ConfigError(
                "snapshots that protect several nodes need torch.distributed: call "
                "init_process_group before Snapshots, or give parities=0 for nodes on their own"
            )
        self.job, self.parities = job, parities
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.group_nodes = group_nodes
        self.roster: Roster | None = None
        self.addresses: dict[int, tuple[str, int]] = {}
        self._patience_s, self._domains_said = patience_s, False
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=patience_s))
        settings = {
            "parities": parities,
            "group_nodes": group_nodes,
            "ranks_per_node": job.ranks_per_node,
            "persist_every": persist.every if persist else None,
            "persist_keep": persist.keep if persist else None,
            "version": __version__,
        }
        told = self.gather((settings, config.failure_domain()))
        self._domains = self.of_nodes([domain for _, domain in told])
        for rank, (given, _) in enumerate(told):
            if given != settings:
                raise ConfigError(
                    f"rank {rank} has {given}, rank {self.rank} has {settings}: start every rank "
                    "with the same settings, and every node with as many ranks"
                )
        self._cut(())

    @classmethod
    def of_model(
        cls,
        model: torch.nn.Module,
        mesh: "DeviceMesh | Job | None",
        parities: int,
        persist: PersistSettings | None,
        group_nodes: int = GROUP_NODES,
    ) -> "Membership":
        """Return the membership of the job that a mesh describes, or else the model."""
        if isinstance(mesh, Job):
            job = mesh
        else:
            job = groups.of_model(model, config.world_size(), config.local_world_size(), mesh)
        nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
        limit_s = _AGREEMENT * patience_s(_MOMENTS * nbytes)
        return cls(job, parities, persist, limit_s, group_nodes)

    def _cut(self, kept: Iterable[tuple[int, ...]]) -> None:
        """Form the parity groups, of which ``kept`` stay as they were."""
        about = self.parities, self.group_nodes, self._domains, kept
        self.take_cut(node_groups.node_groups(self.job, *about))

    def take_cut(self, cut: Sequence[tuple[int, ...]]) -> None:
        """Belong to one of these parity groups from now on."""
        self.cut = cut
        self.group = next(group for group in cut if self.node in group)
        self.groups = groups.sharding_groups(self.job, self.parities, [self.group])
        self.sets = groups.stripe_sets(self.groups)

    @property
    def node(self) -> int:
        """The node that this rank is on."""
        return self.job.node(self.rank)

    @property
    def seat(self) -> Seat:
        """This rank's place in its sharding group."""
        return groups.seat(self.groups, self.rank)

    def peers(self) -> tuple[int, ...]:
        """Return the ranks, by node of the group, that stripe a state together with this one."""
        seat = self.seat
        part = min(seat.part, min(map(len, seat.group.members)) - 1)
        found = [members[part] for members in seat.group.members]
        found[seat.index] = self.rank
        return tuple(found)

    def gather(self, value: Value) -> list[Value]:
        """Exchange values between all ranks and return them in the order of ranks."""
        found = [value] * self.world_size
        try:
            dist.all_gather_object(found, value, group=self._group)
        except RuntimeError as error:
            raise SmpUnavailable(
                f"the ranks of all nodes did not agree within {self._patience_s:g} s ({error}): "
                f"restart them all, or raise {config.TIMEOUT_VARIABLE}"
            ) from error
        return found

    def of_nodes(self, by_rank: list[Value]) -> list[Value]:
        """Select the value of each node's first rank from the values of all ranks."""
        return by_rank[:: self.job.ranks_per_node]

    def gathering(self, value: Value) -> Exchange[list[Value]]:
        """Exchange a value of each node, for which its first rank speaks."""
        return self.of_nodes((yield Gather(None if self.rank % self.job.ranks_per_node else value)))

    def join(self, session: SmpSession) -> Roster:
        """Begin a new epoch: tell every SMP which nodes take part from now on."""
        tls.check()
        return carry_out(self.joining(addresses.own_address()), session, self.gather)

    def joining(
        self, address: str, place_of: Callable[[str], addresses.Place] = addresses.own_place
    ) -> Exchange[Roster]:
        """Exchange what ``join`` needs.

        ``address`` is that of this node, ``place_of`` says where an address can be reached.
        """
        own = yield Call("listen", (address,))
        said = own, place_of(own.host), secrets.token_hex(_SECRET_BYTES)
        nodes = yield from self.gathering(said)
        places = [listening for listening, _, _ in nodes]
        if error := next((place.error for place in places if place.error), ""):
            raise ConfigError(f"{error}: set {config.ADDRESS_VARIABLE} on that node")
        addresses.check([place for _, place, _ in nodes])
        self.roster = self._roster(places, nodes[0][2])
        self._say_weak_domains(self.roster)
        yield Call("join", (self.roster,))
        # No rank may read from another node before all nodes know the new secret.
        yield Gather(None)
        return self.roster

    def rejoining(self) -> Exchange[None]:
        """Let an SMP that replaced a lost one take part in the present epoch.

        It takes over the address. If the port is taken, it tells the other nodes its own.
        """
        if self.roster is not None:
            yield Call("listen", self.roster.addresses[self.node])
            yield Call("join", (self.roster, True))

    def _roster(self, places: list[Listening], secret: str) -> Roster:
        self._cut(held_groups(places, self.job.nodes))
        self.addresses = {node: place[:2] for node, place in enumerate(places)}
        return self.make_roster(places, secret)

    def make_roster(self, places: Sequence[Listening], secret: str) -> Roster:
        """Return the roster of this node in a new epoch, from the places of all nodes.

        The nodes share the ``secret`` from now on.
        """
        mirrors: dict[int, tuple[int, ...]] = {}
        for rank in self.ranks_of_group():
            seat = groups.seat(self.groups, rank)
            nodes = seat.group.nodes  # those after it in its sharding group mirror its manifest
            after = range(seat.index + 1, seat.index + 1 + self.parities)
            mirrors[rank] = tuple(nodes[index % len(nodes)] for index in after)
        parents, children = node_groups.tree_neighbours(self.cut, self.node)
        own = [rank for rank in mirrors if self.job.node(rank) == self.node]
        return Roster(
            epoch=1 + max(place.epoch for place in places),
            node=self.node,
            run_nodes=self.job.nodes,
            group=self.group,
            addresses={n: places[n][:2] for n in (*self.group, *parents, *children)},
            secret=secret,
            parities=self.parities,
            first_rank=own[0],
            mirror_nodes=tuple(mirrors[rank] for rank in own),
            mirrored_ranks=tuple(rank for rank, nodes in mirrors.items() if self.node in nodes),
            sets=tuple(map(self.sets_of, own)),
            parents=parents,
            children=children,
            weak_domains=node_groups.weak_domains(self.group, self._domains, self.parities),
        )

    def ranks_of_group(self) -> list[int]:
        """Return the ranks on the nodes of this rank's parity group."""
        local = self.job.ranks_per_node
        return [node * local + rank for node in self.group for rank in range(local)]

    def sets_of(self, rank: int) -> tuple[StripeSet, ...]:
        """Return the stripe sets of a rank's sharding group, in whichever parity group it is."""
        group = next(group for group in self.cut if self.job.node(rank) in group)
        found = groups.sharding_groups(self.job, self.parities, [group])
        return groups.stripe_sets([groups.seat(found, rank).group])

    def _say_weak_domains(self, roster: Roster) -> None:
        if roster.weak_domains and config.local_rank() == 0 and not self._domains_said:
            self._domains_said = True
            detail = {"group": list(roster.group), "domains": list(roster.weak_domains)}
            events.record(EventKind.DOMAIN_SHARED, detail=detail)
            warnings.warn(
                f"the parity group of nodes {list(roster.group)} has more than {roster.parities} "
                f"of them in {list(roster.weak_domains)}, whose loss it does not survive: place "
                "the run on more racks or switches, or give smaller groups (group_nodes)",
                RuntimeWarning,
                stacklevel=2,
            )

    def close(self) -> None:
        """Destroy the process group."""
        if dist.is_initialized():
            dist.destroy_process_group(self._group)


def held_groups(places: Sequence[Listening], nodes: int) -> list[tuple[int, ...]]:
    """Return the parity groups whose steps the SMPs hold, by the latest agreement of the run.

    ``places`` are those of all nodes. Nothing is returned of another number of nodes, or if the
    groups contradict each other.
    """
    known = [place for place in places if place.group and place.run_nodes == nodes]
    latest = max((place.epoch for place in known), default=0)
    found = sorted({place.group for place in known if place.epoch == latest})
    members = [node for group in found for node in group]
    return found if len(set(members) & set(range(nodes))) == len(members) else []
