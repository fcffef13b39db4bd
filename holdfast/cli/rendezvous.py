"""torchrun's static rendezvous (``--master-port``, ``--node-rank``), with a new store a restart."""

import argparse

from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import (
    StaticTCPRendezvous,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

BACKEND = "holdfast-static"
DEFAULT_PORT = 29500  # torchrun's, as is
TIMEOUT_S = 600


class Static(StaticTCPRendezvous):
    """The static rendezvous, in which rank 0 makes the ranks' store anew after each restart.

    torch's own lets the ranks of every restart use the agent's store, where they find the addresses
    of dead ones. The agents' restarts are numbered, so that each node finds the store of its own.
    """

    _restarts = 0

    def get_backend(self) -> str:
        """Return the name that torchrun is given."""
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """Return False: rank 0 hosts the store."""
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        """Agree on the address of the ranks' next store."""
        info = super().next_rendezvous()
        store = PrefixStore(f"restart_{self._restarts}", info.store)
        self._restarts += 1
        address = RendezvousStoreInfo.build(info.rank, store, local_addr=self.master_addr)
        return RendezvousInfo(store, info.rank, info.world_size, address)


def _create(params: RendezvousParameters) -> RendezvousHandler:
    address, port = parse_rendezvous_endpoint(params.endpoint.strip(), DEFAULT_PORT)
    rank, timeout = params.get_as_int("rank", 0), params.get_as_int("timeout", TIMEOUT_S)
    assert rank is not None
    assert timeout is not None
    return Static(address, port, rank, params.max_nodes, params.run_id, timeout)


def use_own_static(options: argparse.Namespace) -> None:
    """Replace the static rendezvous, if torchrun would use it, in its parsed options."""
    given = options.rdzv_endpoint or options.master_port is not None
    single = str(options.nnodes).rpartition(":")[2] == "1"
    if options.rdzv_backend != "static" or options.standalone or (single and not given):
        return
    rendezvous_handler_registry.register(BACKEND, _create)
    default = f"{options.master_addr}:{options.master_port or DEFAULT_PORT}"
    options.rdzv_endpoint = options.rdzv_endpoint or default
    rank = f"rank={options.node_rank}"
    options.rdzv_conf = f"{options.rdzv_conf},{rank}" if options.rdzv_conf else rank
    options.rdzv_backend, options.node_rank = BACKEND, 0
