"""Schemas of the requests over the Unix socket that the SMP answers without its state machine."""

from holdfast.snapshot.node.supervisor import PersistSettings
from holdfast.snapshot.protocol import messages as m
from holdfast.snapshot.protocol.roster import Host, Port


class Query(m.Event, sender=True):
    """A request over the Unix socket, of any process of the user."""


class Status(Query, verb="status"):
    """Asks for the status."""


class Stop(Query, verb="stop"):
    """Asks the SMP to free everything and exit."""


class Persist(Query, verb="persist"):
    """Asks for the newest clean step to be persisted now."""


class WhichRoster(Query, verb="roster"):
    """Asks which nodes take part in the run."""


class Listen(Query, verb="listen"):
    """Asks the SMP to listen for other nodes at an address; port 0 means any."""

    host: Host
    port: Port = 0


class PersistTo(Query, verb="persist_to"):
    """Has checkpoints written as these settings say; None: no more."""

    settings: PersistSettings | None
