"""A rank that trains a replica alone, until it is killed: only its snapshots need the network."""

import sys
from pathlib import Path
from unittest import mock

from bench import nodes_rank
from bench.nodes_rank import Replica, Work


def main(directory: Path, attempt: int, log: Path) -> None:
    """Restore, and train with a snapshot after every step, on the same batches as every rank."""
    work = Work(directory, steps=10**6, pace_s=0.05)
    with mock.patch.object(nodes_rank, "DistributedDataParallel", lambda model, **_: model):
        nodes_rank.run(work, attempt, {}, log, lambda width, rank: Replica(width, 0))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
