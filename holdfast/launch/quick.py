"""The waiting in torchrun's c10d rendezvous, so that a lost host is replaced in about a second.

torch has no public way to change how it waits. This module imports names that are private in torch
2.13; ``rendezvous`` does without it where torch lacks them.
"""

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    RendezvousSettings,
    _Action,
    _BackendRendezvousStateHolder,
    _DistributedRendezvousOpExecutor,
    _NodeDesc,
    _RendezvousContext,
    _RendezvousJoinOp,
    _RendezvousKeepAliveOp,
)

# So many looks in a row must find too few hosts before a reserve joins: one that starts its ranks
# again is neither in the group nor waiting for a moment, and is to have its place back.
_LOOKS = 3
_NEEDED = {"_this_node", "_state_holder", "_op_executor"}
if missing := _NEEDED - DynamicRendezvousHandler.__annotations__.keys():
    raise ImportError(f"no {sorted(missing)}")
Operation = Callable[[_RendezvousContext, float], _Action]


class Holder(_BackendRendezvousStateHolder):
    """The state of all hosts; one is lost if this process sees no new heartbeat of it for too long.

    torch compares the wall clocks of hosts: one whose clock is ahead would give up the others.
    """

    def __init__(
        self, backend: RendezvousBackend, settings: RendezvousSettings, cache_s: float
    ) -> None:
        super().__init__(backend, settings, cache_s)  # type: ignore[arg-type]
        # The newest heartbeat of each host, and when this process first saw it.
        self._seen: dict[_NodeDesc, tuple[datetime, float]] = {}

    def _sanitize(self) -> None:
        now, now_s = datetime.now(UTC), time.monotonic()
        beats = self._state.last_heartbeats
        for node, beat in beats.items():
            if self._seen.get(node, (None, 0.0))[0] != beat:
                self._seen[node] = beat, now_s
        self._seen = {node: self._seen[node] for node in beats}
        for node, (_, seen_s) in self._seen.items():
            beats[node] = now - timedelta(seconds=now_s - seen_s)
        super()._sanitize()
        for node in beats:
            beats[node] = self._seen[node][0]


class Executor(_DistributedRendezvousOpExecutor):
    """Looks for changes every ``poll_s`` seconds instead of every second."""

    def __init__(
        self, node: _NodeDesc, holder: Holder, settings: RendezvousSettings, poll_s: float
    ) -> None:
        super().__init__(node, holder, settings)
        self._poll_s, self._lacking = poll_s, 0

    def run(self, state_handler: Operation, *rest: Any) -> None:
        """Execute an operation of torch's rendezvous."""

        def without_waiting(context: _RendezvousContext, deadline: float) -> _Action:
            while (found := self._next(state_handler, context, deadline)) == _Action.SYNC:
                time.sleep(self._poll_s)
                self._state_holder.sync()
                self._state = context.state = self._state_holder.state
            return found

        super().run(without_waiting, *rest)

    def _next(self, operation: Operation, context: _RendezvousContext, deadline: float) -> _Action:
        state, node = context.state, context.node
        if not isinstance(operation, _RendezvousJoinOp) or state.closed:
            return operation(context, deadline)
        most = context.settings.max_nodes
        if node in state.redundancy_list:
            enough = len(state.wait_list.union(state.participants)) >= most
            self._lacking = 0 if enough else self._lacking + 1
            if self._lacking < _LOOKS:
                alive = _RendezvousKeepAliveOp()(context, time.monotonic() + self._poll_s)
                return alive if alive == _Action.KEEP_ALIVE else _Action.SYNC
        elif node in state.wait_list and state.complete and len(state.participants) >= most:
            # torch would leave it in the list, for which all others would start again for ever.
            state.wait_list.remove(node)
            return _Action.ADD_TO_REDUNDANCY_LIST
        return operation(context, deadline)

    def _record(self, *_: Any, **__: Any) -> None:
        """Do nothing: torch looks for its caller's name in all modules, for a log that is off."""


class Quick(DynamicRendezvousHandler):
    """The rendezvous itself; ``quicken`` before its first use."""

    def quicken(self, backend: RendezvousBackend, poll_s: float) -> None:
        """Wait in steps of ``poll_s`` seconds, and judge heartbeats by this process's clock."""
        holder = Holder(backend, self.settings, poll_s)
        self._state_holder = holder
        self._op_executor = Executor(self._this_node, holder, self.settings, poll_s)

    def num_nodes_waiting(self) -> int:
        """Return how many hosts wait and have room; for others ranks need not start again."""
        waiting = super().num_nodes_waiting()
        full = len(self._state_holder.state.participants) >= self.settings.max_nodes
        return 0 if full else waiting

    _record = Executor._record
