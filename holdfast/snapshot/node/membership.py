"""The ranks of a run on several nodes: they agree on who protects whom, and on steps.

They agree through a gloo process group of their own: when ``Snapshots`` is made, when a state is
restored, and when the run ends. None of this happens while training goes on.
"""

import secrets
import socket
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist

from holdfast import config
from holdfast.errors import ConfigError, SmpUnavailable
from holdfast.snapshot.layout import groups
from holdfast.snapshot.layout.groups import Job, Seat
from holdfast.snapshot.node.session import Listening, SmpSession, patience_s
from holdfast.snapshot.node.supervisor import PersistSettings
from holdfast.snapshot.protocol.exchange import Call, Exchange, Gather, carry_out
from holdfast.snapshot.protocol.roster import Roster
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
        parities: the number of nodes that may be lost, 1 or 2.
        persist: how often checkpoints are written and how many are kept; None if none are written.
        patience_s: the longest time that one rank waits for the others, in seconds.

    Raises:
        ConfigError: there is no process group, or the ranks were given different settings.
        SmpUnavailable: not all ranks came in time.
    """

    def __init__(
        self, job: Job, parities: int, persist: PersistSettings | None, patience_s: float
    ) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise ConfigError(
                "snapshots that protect several nodes need torch.distributed: call "
                "init_process_group before Snapshots, or give parities=0 for nodes on their own"
            )
        self.job, self.parities = job, parities
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.groups = groups.sharding_groups(job, parities)
        self.sets = groups.stripe_sets(self.groups)
        self.roster: Roster | None = None
        self._patience_s = patience_s
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=patience_s))
        settings = {
            "parities": parities,
            "ranks_per_node": job.ranks_per_node,
            "persist_every": persist.every if persist else None,
            "persist_keep": persist.keep if persist else None,
            "version": __version__,
        }
        for rank, given in enumerate(self.gather(settings)):
            if given != settings:
                raise ConfigError(
                    f"rank {rank} has {given}, rank {self.rank} has {settings}: start every rank "
                    "with the same settings, and every node with as many ranks"
                )

    @classmethod
    def of_model(
        cls,
        model: torch.nn.Module,
        mesh: "DeviceMesh | Job | None",
        parities: int,
        persist: PersistSettings | None,
    ) -> "Membership":
        """Return the membership of the job that a mesh describes, or else the model."""
        if isinstance(mesh, Job):
            job = mesh
        else:
            job = groups.of_model(model, config.world_size(), config.local_world_size(), mesh)
        nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
        return cls(job, parities, persist, _AGREEMENT * patience_s(_MOMENTS * nbytes))

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
        own = {seat.index: self.rank}
        return tuple(
            own.get(index, members[part]) for index, members in enumerate(seat.group.members)
        )

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

    def join(self, session: SmpSession) -> Roster:
        """Begin a new epoch: tell every SMP which nodes take part from now on."""
        return carry_out(self.joining(own_address()), session, self.gather)

    def joining(self, address: str) -> Exchange[Roster]:
        """Exchange what ``join`` needs; ``address`` is that of this node."""
        own = yield Call("listen", (address,))
        everyone = yield Gather((own, secrets.token_hex(_SECRET_BYTES)))
        places = [place for place, _ in everyone]
        errors = [place.error for place in places if place.error]
        if errors:
            raise ConfigError(f"{errors[0]}: set {config.ADDRESS_VARIABLE} on that node")
        self.roster = self._roster(places, everyone[0][1])
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
        first = self.node * self.job.ranks_per_node
        local = range(first, first + self.job.ranks_per_node)
        mirrors = {rank: self._mirror_nodes(rank) for rank in range(self.world_size)}
        return Roster(
            epoch=1 + max(place.epoch for place in places),
            node=self.node,
            addresses=tuple((place.host, place.port) for place in self.of_nodes(places)),
            secret=secret,
            parities=self.parities,
            first_rank=first,
            mirror_nodes=tuple(mirrors[rank] for rank in local),
            mirrored_ranks=tuple(rank for rank, nodes in mirrors.items() if self.node in nodes),
            sets=tuple(
                groups.stripe_sets([groups.seat(self.groups, rank).group]) for rank in local
            ),
        )

    def _mirror_nodes(self, rank: int) -> tuple[int, ...]:
        """Return the nodes that mirror a rank's manifest: those after it in its group."""
        seat = groups.seat(self.groups, rank)
        nodes = seat.group.nodes
        following = range(seat.index + 1, seat.index + 1 + self.parities)
        return tuple(nodes[index % len(nodes)] for index in following)

    def close(self) -> None:
        """Destroy the process group."""
        if dist.is_initialized():
            dist.destroy_process_group(self._group)


def own_address() -> str:
    """Return the address at which the other nodes reach this one."""
    given, master = config.address(), config.master_address()
    if given:
        return given
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            # A connected UDP socket sends nothing; the kernel only chooses the own address for it.
            sock.connect((master, 9))
            name: str = sock.getsockname()[0]
    except OSError as error:
        raise ConfigError(
            f"this node's address cannot be derived from MASTER_ADDR={master!r} ({error}): set "
            f"{config.ADDRESS_VARIABLE} to the address at which the other nodes reach it"
        ) from error
    return name
