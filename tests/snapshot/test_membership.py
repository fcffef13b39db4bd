"""Ranks of several nodes that were not started alike are told so, before anything is at stake."""

from pathlib import Path

import pytest
from gloo_ranks import Ranks
from snapshot_waits import PATIENCE_S
from torch import distributed as dist

from bench.nodes_rank import say
from holdfast.errors import ConfigError
from holdfast.snapshot.layout.groups import Dim, Job, Kind
from holdfast.snapshot.node.membership import Membership
from holdfast.snapshot.node.supervisor import PersistSettings

pytestmark = [pytest.mark.processes, pytest.mark.representative]

Disk = tuple[int, int] | None  # every, keep


# What two ranks were given, and which setting they are told of.
CASES: list[tuple[list[Disk], str]] = [
    ([None, None], ""),
    ([(10, 2), (10, 2)], ""),
    ([(10, 2), None], "persist_every"),
    ([(10, 2), (20, 2)], "persist_every"),
    ([(10, 2), (10, 3)], "persist_keep"),
]


def _join(said: Path) -> None:
    for disks, _ in CASES:
        given = disks[dist.get_rank()]
        disk = PersistSettings("/nowhere", *given, 2, 0) if given is not None else None
        try:
            Membership(Job((Dim("ddp", 2, Kind.REPLICATE),), 1), 1, disk, PATIENCE_S).close()
        except ConfigError as error:
            say(said, error=str(error))
        else:
            say(said, error="")


def test_all_write_checkpoints_alike_or_none(tmp_path: Path) -> None:
    for lines in Ranks(tmp_path / "ranks", 2, _join).finished():
        for (disks, name), line in zip(CASES, lines, strict=True):
            # Whoever does not differ from the first sees that the other does.
            assert name in line["error"], disks
            assert ("same settings" in line["error"]) == bool(name), disks
