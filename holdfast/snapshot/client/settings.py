"""Settings of ``Snapshots``: the keywords that a user may give, and the values in force."""

import logging
import os
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, TypedDict

from torch.nn import Module

from holdfast import config
from holdfast.errors import ConfigError
from holdfast.planner.parity_groups import GROUP_NODES
from holdfast.snapshot.client import pacing
from holdfast.snapshot.client.pacing import Pacing
from holdfast.snapshot.disk import checkpoints
from holdfast.snapshot.layout.groups import Job
from holdfast.snapshot.node.launch import SmpSettings
from holdfast.snapshot.node.membership import Membership

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

PERSIST_EVERY = 1000
MOST_GROUP_NODES = 16
# How often torchrun and Slurm have restarted a run, with the same arguments.
_RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")

Path = str | PathLike[str]
_logger = logging.getLogger("holdfast.snapshot")


class SnapshotOptions(TypedDict, total=False):
    """The keywords of ``Snapshots`` besides the objects to save; ``Snapshots`` describes each."""

    run_dir: Path | None
    every: int | None
    interval: str | None
    mttf_s: float | None
    keep: int | None
    parities: int | None
    group_nodes: int | None
    mesh: "DeviceMesh | Job | None"
    linger_s: float
    persist_dir: Path | None
    persist_every: int | None
    persist_keep: int
    run_id: str | None
    fresh: bool
    strict: bool


@dataclass(frozen=True)
class SnapshotSettings:
    """The values in force: those given, or else those of the config file, or else the defaults.

    With a ``pacing``, ``every`` is only the first interval; ``smp`` is for this node's process.
    """

    every: int
    pacing: Pacing | None
    parities: int
    group_nodes: int
    mesh: "DeviceMesh | Job | None"
    smp: SmpSettings
    run_id: str
    fresh: bool
    strict: bool

    def membership(self, model: Module) -> Membership | None:
        """Return the ranks of all nodes, if the nodes protect each other; all ranks must ask."""
        if not self.parities:
            return None
        about = self.mesh, self.parities, self.smp.persist, self.group_nodes
        return Membership.of_model(model, *about)

    def log(self) -> None:
        """Log where snapshots and checkpoints go."""
        run_dir, disk = self.smp.run_dir, self.smp.persist
        written = f"every {disk.every} steps in {disk.directory}" if disk else "none on disk"
        text = "snapshots every %d steps into the memory of the process of %s; checkpoints: %s"
        _logger.info(text, self.every, run_dir, written)

    @classmethod
    def of(cls, options: SnapshotOptions) -> "SnapshotSettings":
        """Return the settings that follow from a user's keywords.

        Raises:
            TypeError: there is no such keyword.
            ConfigError: the settings cannot be used.
        """
        unknown = sorted(options.keys() - SnapshotOptions.__annotations__.keys())
        if unknown:
            raise TypeError(f"Snapshots() got an unexpected keyword argument {unknown[0]!r}")
        every, interval, mttf_s = pacing.resolved(
            options.get("every"), options.get("interval"), options.get("mttf_s")
        )
        several_nodes = int(config.world_size() > config.local_world_size())
        parities = config.value("snapshots.parities", options.get("parities"), several_nodes)
        if parities < 0:
            raise ConfigError(f"parities={parities}: must be 0, 1 or 2")
        group_nodes = config.value("snapshots.group_nodes", options.get("group_nodes"), GROUP_NODES)
        if parities and not max(2, parities + 1) <= group_nodes <= MOST_GROUP_NODES:
            raise ConfigError(
                f"group_nodes={group_nodes}: must be {max(2, parities + 1)} to {MOST_GROUP_NODES}"
            )
        keep, linger_s = options.get("keep"), options.get("linger_s", 600.0)
        keep = keep if keep is not None else 1 if parities else 2
        for name, value in {"every": every, "keep": keep}.items():
            if value < 1:
                raise ConfigError(f"{name}={value}: must be at least 1")
        if not linger_s > 0:
            raise ConfigError(f"linger_s={linger_s}: must be more than 0 seconds")
        paced = pacing.of(interval, every, mttf_s)
        given = options.get("persist_every")
        persist_every = config.value("snapshots.persist_every", given, PERSIST_EVERY)
        run_dir, persist_keep = (
            config.run_dir(options.get("run_dir")),
            options.get("persist_keep", 2),
        )
        about = options.get("persist_dir"), persist_every, persist_keep, run_dir
        local = config.local_world_size()
        smp = SmpSettings(run_dir, local, keep, linger_s, checkpoints.settings(*about))
        first, mesh = every if paced is None else pacing.MEASURING, options.get("mesh")
        # The snapshots of a run that a launcher has restarted are its own.
        restarted = any(os.environ.get(name, "0") not in ("", "0") for name in _RESTARTS)
        fresh = options.get("fresh", False) and not restarted
        run_id, strict = config.run_id(options.get("run_id")), options.get("strict", False)
        return cls(first, paced, parities, group_nodes, mesh, smp, run_id, fresh, strict)
