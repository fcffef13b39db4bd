"""What the persister told, and memory lost, for the tests of checkpoints."""

from pathlib import Path

from snapshot_waits import kill

from holdfast import events
from holdfast.snapshot.client.snapshots import Snapshots


def told(run_dir: Path, kind: str) -> list[events.Event]:
    """What the persister wrote into the run's ledger."""
    return [event for _, event in events.read_ledger(run_dir / events.LEDGER_NAME, kind=kind)]


def lose_smp(snapshots: Snapshots) -> None:
    """Kill the SMP, with no copy in flight that would go to another one."""
    snapshots.finish()
    kill(snapshots.status()["pid"])
    snapshots.close(finished=False)
