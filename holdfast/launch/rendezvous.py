"""torchrun's rendezvous, static and c10d: a new store at each restart, and losses seen in a second.

torchrun 2.13 keeps one key-value store for its ranks over all restarts, in which they find the
addresses of dead ones. Here the agent of the first host opens a new one for each restart, before
ranks are started, so that none has to wait for rank 0 to open it.
"""

import argparse
import os
import sys
import uuid
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    c10d_rendezvous_backend,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from holdfast.torchrun import OWN_STORE_VARIABLE

BACKEND, QUICK_BACKEND = "holdfast-static", "holdfast-c10d"
DEFAULT_PORT = 29500  # torchrun's, as is
TIMEOUT_S = 600
# A host counts as lost after so many heartbeats without a new one. Each one writes the state of all
# hosts, so beyond so many hosts there are fewer, but never fewer than torchrun has.
HEARTBEAT_S, HEARTBEATS, POLL_S = 0.25, 4, 0.05
QUICK_NODES = 16
_LIMITS = ("join", "last_call", "close", "heartbeat")
_STOCK_HEARTBEAT_S, _STOCK_HEARTBEATS, _STOCK_POLL_S = 5, 3, 1.0


def _opened(info: RendezvousInfo, store: Store) -> tuple[RendezvousInfo, Store | None]:
    """Open the ranks' store on the first host; ``store``, new at each restart, tells all agents."""
    assert info.bootstrap_store_info is not None
    address, server = info.bootstrap_store_info.master_addr, None
    if info.rank == 0:
        server = TCPStore(address, 0, is_master=True, wait_for_workers=False)
    port = server.port if server is not None else None
    found = RendezvousStoreInfo.build(info.rank, store, address, port)
    return RendezvousInfo(store, info.rank, info.world_size, found), server


class Static(StaticTCPRendezvous):
    """The static rendezvous; agents' restarts are numbered, so that each finds its own store."""

    _restarts = 0
    _server: Store | None = None

    def get_backend(self) -> str:
        """Return the name that torchrun is given."""
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        """Agree on the address of the ranks' next store."""
        info, self._server = super().next_rendezvous(), None
        store = PrefixStore(f"restart_{self._restarts}", info.store)
        self._restarts += 1
        info, self._server = _opened(info, store)
        return info


def _create_static(params: RendezvousParameters) -> RendezvousHandler:
    address, port = parse_rendezvous_endpoint(params.endpoint.strip(), DEFAULT_PORT)
    rank, timeout = params.get_as_int("rank", 0), params.get_as_int("timeout", TIMEOUT_S)
    assert rank is not None
    assert timeout is not None
    return Static(address, port, rank, params.max_nodes, params.run_id, timeout)


def _dynamic() -> tuple[type[DynamicRendezvousHandler], bool]:
    """Return the c10d rendezvous to use, and whether it is the quick one."""
    try:
        from holdfast.launch.quick import Quick
    except ImportError as error:
        text = f"this torch's rendezvous is not known ({error}): losses are seen in its own time"
        print(f"holdfast run: {text}", file=sys.stderr, flush=True)
        return DynamicRendezvousHandler, False
    return Quick, True


def _create_dynamic(params: RendezvousParameters) -> RendezvousHandler:
    """Make the c10d handler; ``keep_alive_`` settings of the user are kept."""
    base, quick = _dynamic()

    class Dynamic(base):  # type: ignore[misc, valid-type]
        use_agent_store = True

        def get_backend(self) -> str:
            return QUICK_BACKEND

        def next_rendezvous(self) -> RendezvousInfo:
            info, self._server = super().next_rendezvous(), None
            info, self._server = _opened(info, PrefixStore("ranks", info.store))
            return info

    backend, store = c10d_rendezvous_backend.create_backend(params)
    given = {name: params.get_as_int(f"{name}_timeout") for name in _LIMITS}
    limits = {name: timedelta(seconds=limit) for name, limit in given.items() if limit is not None}
    slower = max(1.0, params.max_nodes / QUICK_NODES)
    interval_s = min(HEARTBEAT_S * slower, _STOCK_HEARTBEAT_S) if quick else _STOCK_HEARTBEAT_S
    attempts = HEARTBEATS if quick else _STOCK_HEARTBEATS
    nodes, timeout = (params.min_nodes, params.max_nodes), RendezvousTimeout(**limits)
    interval_s = float(params.get("keep_alive_interval", interval_s))
    attempts = int(params.get("keep_alive_max_attempt", attempts))
    joined = (*nodes, params.local_addr, timeout, interval_s, attempts)
    handler: DynamicRendezvousHandler
    handler = Dynamic.from_backend(params.run_id, store, backend, *joined)
    if quick:
        handler.quicken(backend, min(POLL_S * slower, _STOCK_POLL_S))  # type: ignore[attr-defined]
    return handler


def register() -> None:
    """Make both kinds known to torchrun's agent."""
    rendezvous_handler_registry.register(BACKEND, _create_static)
    rendezvous_handler_registry.register(QUICK_BACKEND, _create_dynamic)


def choose(options: argparse.Namespace) -> None:
    """Have torchrun's parsed options name the rendezvous of this module in place of torch's.

    Nothing is changed if ``OWN_STORE_VARIABLE`` tells to share torch's store.
    """
    if os.environ.get(OWN_STORE_VARIABLE, "1") != "1":
        return
    register()
    given = options.rdzv_endpoint or options.master_port is not None
    single = str(options.nnodes).rpartition(":")[2] == "1"
    alone = options.standalone or (options.rdzv_backend == "static" and single and not given)
    if alone:  # as torchrun does
        options.rdzv_endpoint, options.rdzv_id = "localhost:0", str(uuid.uuid4())
        options.standalone = False
    if alone or options.rdzv_backend == "c10d":
        options.rdzv_backend = QUICK_BACKEND
    elif options.rdzv_backend == "static":
        default = f"{options.master_addr}:{options.master_port or DEFAULT_PORT}"
        options.rdzv_endpoint = options.rdzv_endpoint or default
        rank = f"rank={options.node_rank}"
        options.rdzv_conf = f"{options.rdzv_conf},{rank}" if options.rdzv_conf else rank
        options.rdzv_backend, options.node_rank = BACKEND, 0
