"""The persister: writes clean steps of a node's SMP to disk while training continues (rung 5).

The SMP starts and supervises it. It ends when the SMP does, after the checkpoint that it is
writing. If it fails, training continues and no incomplete checkpoint is ever visible.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from threading import Timer

import torch

from holdfast import config, events
from holdfast.errors import HoldfastError, SmpUnavailable, SnapshotError, SnapshotLost
from holdfast.events import EventKind
from holdfast.snapshot.disk.remote_checkpoints import checkpoints_at
from holdfast.snapshot.node.supervisor import PersistSettings, end_with_parent
from holdfast.snapshot.restore.full_state import full_state
from holdfast.snapshot.restore.reader import Leased, Reader, damage_of

SLOW_STORAGE_BYTES_S = 50 * 10**6
_NICENESS = 10
_ATTEMPTS = 10
_RETRY_S = 1.0


class Persister:
    """Writes the steps that are due, one checkpoint at a time."""

    def __init__(self, reader: Reader, settings: PersistSettings) -> None:
        self._reader, self._settings = reader, settings
        self._checkpoints = checkpoints_at(settings.directory)

    def run(self) -> None:
        """Persist the steps that become due, until the SMP ends with a ConnectionError."""
        after = max(self._listed(0), default=0)
        while True:
            there = self._listed(after)
            leased = self._reader.wait_due(self._settings.every, after, there)
            tried = leased.step
            end_with_parent(False)
            self._persist(leased, after)
            end_with_parent()
            after = tried

    def _listed(self, after: int) -> list[int]:
        """Return the steps on disk as soon as they can be read, because other nodes need them."""
        said = ""
        while True:
            try:
                return self._checkpoints.steps()
            except OSError as error:
                if said != str(error):  # once, not every second
                    said = str(error)
                    self._failed(after, said)
                time.sleep(_RETRY_S)

    def _persist(self, newest: Leased, after: int) -> None:
        """Persist a step; if it is damaged in memory, the next older one that is not on disk."""
        leased: Leased | None = newest
        while leased is not None:
            told = (f"local rank {part.rank}: {damage_of(part)}" for part in leased.parts)
            damage = next((text for text in told if not text.endswith(": ")), "")
            if not damage:
                self._write_full(leased)
                return
            if not self._reader.release()[0]:
                self._failed(leased.step, f"step {leased.step}: its memory was needed meanwhile")
                return
            detail = {"step": leased.step, "reason": damage, "source": "memory"}
            events.record(EventKind.SNAPSHOT_CORRUPT, detector="digest", rank=-1, detail=detail)
            self._failed(leased.step, f"step {leased.step} is damaged in memory: {damage}")
            leased = self._reader.lease(before=leased.step)
            if leased is not None and leased.step <= after:
                self._reader.release()
                return

    def _write_full(self, leased: Leased) -> None:
        """Write the step, rebuilt as a whole if the nodes divide it."""
        reason = ""
        for _ in range(_ATTEMPTS):
            try:
                found = full_state(leased, self._reader)
            except SnapshotError as error:
                reason = str(error)
                self._reader.release()
                newer = self._reader.lease() if isinstance(error, SnapshotLost) else None
                if newer is None or newer.step <= leased.step:
                    break
                # Another node retired this step before it was pinned there: take a newer one.
                leased = newer
            else:
                self._write(found)
                return
        self._reader.release()
        self._failed(leased.step, reason)

    def _write(self, leased: Leased) -> None:
        started_s = time.monotonic()
        released: list[tuple[bool, int]] = []

        def still_intact() -> bool:
            try:
                released.append(self._reader.release())
            except (ConnectionError, SmpUnavailable):
                # The SMP is gone, so that no other process can overwrite this memory.
                return True
            # After a rollback to an older step this one does not belong to the run any more.
            return released[0][0] and released[0][1] >= leased.step

        patience_s = config.timeout_s() + leased.nbytes / SLOW_STORAGE_BYTES_S
        slow = Timer(patience_s, self._slow, (leased, started_s, "it is not done yet"))
        slow.daemon = True
        slow.start()
        names = ("world_size", "first_rank", "keep")
        about = {name: getattr(self._settings, name) for name in names}
        about |= {"needed": leased.needed, "still_intact": still_intact}
        try:
            nbytes = self._checkpoints.write(leased.step, leased.parts, **about)
        except (OSError, HoldfastError) as error:
            self._failed(leased.step, str(error))
            return
        finally:
            slow.cancel()
        seconds, path = time.monotonic() - started_s, self._checkpoints.path(leased.step)
        detail = {"step": leased.step, "path": str(path), "bytes": nbytes}
        events.record(EventKind.PERSISTED, rank=-1, duration_s=seconds, detail=detail)
        every = self._settings.every
        if released and released[0][1] // every > leased.step // every:
            self._slow(leased, started_s, f"step {released[0][1]} came meanwhile")
        self._reader.persisted(leased.step, "")

    def _slow(self, leased: Leased, started_s: float, why: str) -> None:
        remedy = "raise persist_every, or give persist_dir a faster storage"
        detail = {"step": leased.step, "bytes": leased.nbytes, "reason": why, "remedy": remedy}
        seconds = time.monotonic() - started_s
        events.record(EventKind.PERSIST_SLOW, rank=-1, duration_s=seconds, detail=detail)

    def _failed(self, step: int, error: str) -> None:
        detail = {"step": step, "reason": error, "directory": self._settings.directory}
        events.record(EventKind.PERSIST_FAILED, rank=-1, detail=detail)
        print(f"persister: {error}", file=sys.stderr, flush=True)
        self._reader.persisted(step, error)


def main(argv: Sequence[str] | None = None) -> int:
    """Persist until the SMP of the run directory ends; return 0."""
    # An SMP that was started before an upgrade gives these options, so they stay.
    parser = argparse.ArgumentParser(prog="python -m holdfast.snapshot.disk.persister")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--directory", required=True)
    for name in ("every", "keep", "world-size", "first-rank"):
        parser.add_argument(f"--{name}", type=int, required=True)
    given = vars(parser.parse_args(argv))
    run_dir = given.pop("run_dir")
    os.nice(_NICENESS)
    torch.set_num_threads(1)
    try:
        events.open_ledger(run_dir)
        with Reader(run_dir) as reader:
            Persister(reader, PersistSettings(**given)).run()
    except (ConnectionError, SmpUnavailable):
        print("persister: the SMP ended", file=sys.stderr, flush=True)
    finally:
        events.close_ledger()
    return 0


if __name__ == "__main__":
    sys.exit(main())
