"""Ranks of several nodes that were not started alike are told so, before anything is at stake."""

from pathlib import Path

import pytest
from gloo_ranks import Ranks, say
from snapshot_waits import PATIENCE_S
from torch import distributed as dist

from holdfast.errors import ConfigError
from holdfast.snapshot.groups import Dim, Job, Kind
from holdfast.snapshot.membership import Membership
from holdfast.snapshot.supervisor import PersistSettings

pytestmark = pytest.mark.processes

Disk = tuple[int, int] | None  # every, keep


def _join(said: Path, disks: list[Disk]) -> None:
    given = disks[dist.get_rank()]
    disk = PersistSettings("/nowhere", *given, 2, 0) if given is not None else None
    try:
        Membership(Job((Dim("ddp", 2, Kind.REPLICATE),), 1), 1, disk, PATIENCE_S).close()
    except ConfigError as error:
        say(said, error=str(error))
    else:
        say(said, error="")


@pytest.mark.parametrize(
    ("disks", "name"),
    [
        ([None, None], ""),
        ([(10, 2), (10, 2)], ""),
        ([(10, 2), None], "persist_every"),
        ([(10, 2), (20, 2)], "persist_every"),
        ([(10, 2), (10, 3)], "persist_keep"),
    ],
)
def test_all_write_checkpoints_alike_or_none(tmp_path: Path, disks: list[Disk], name: str) -> None:
    errors = [said[0]["error"] for said in Ranks(tmp_path / "ranks", 2, _join, disks).finished()]
    # Whoever does not differ from the first sees that the other does.
    assert all(
        ("same settings" in error and name in error) if name else not error for error in errors
    )
