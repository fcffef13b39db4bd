"""What the persister told, and memory lost, for the tests of checkpoints."""

from pathlib import Path

import psutil
from snapshot_waits import alive, until

from holdfast import events
from holdfast.snapshot.client.snapshots import Snapshots


def told(run_dir: Path, kind: str) -> list[events.Event]:
    """What the persister wrote into the run's ledger."""
    return [event for _, event in events.read_ledger(run_dir / events.LEDGER_NAME, kind=kind)]


def lose_smp(snapshots: Snapshots) -> None:
    """Nothing is left in memory, and no copy is in flight that would go to another SMP."""
    snapshots.finish()
    pid = snapshots.status()["pid"]
    psutil.Process(pid).kill()
    until(lambda: not alive(pid), "the SMP is killed")
    snapshots.close(finished=False)
