"""A rank of ``bench.snapshot_ranks`` ends, also while gloo still holds what it gathered last."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# The group's thread frees the gathered tensors while Python's lock is held, up to the rank's end.
PROGRAM = """
import argparse, os, sys, time
from pathlib import Path
import torch
from torch import distributed
from bench import snapshot_ranks

class Rank:
    def __init__(self, args, seed):
        self.training, self.snapshots = snapshot_ranks.DdpTraining(5 * 10**6, 8, seed), Snapshots()
        self.training.optimizer.zero_grad(set_to_none=True)
    def measure(self, pairs):
        return {}

class Snapshots:
    def close(self, finished):
        sys.setswitchinterval(1000)

def destroy():
    group = distributed.distributed_c10d._get_default_group()
    destroyed()
    given = torch.ones(2 * 10**7)
    group.allgather([[torch.zeros(2 * 10**7)]], [given])
    until = time.perf_counter() + 1
    while time.perf_counter() < until:
        pass

place = f"file://{sys.argv[1]}/meeting"
distributed.init_process_group("gloo", init_method=place, rank=0, world_size=1)
destroyed, distributed.destroy_process_group = distributed.destroy_process_group, destroy
snapshot_ranks.Rank, snapshot_ranks.check = Rank, lambda rank, folder: None
snapshot_ranks.be_rank(argparse.Namespace(life=1, folder=Path(sys.argv[1]), pairs=1))
sys.setswitchinterval(0.005)
print("ended")
"""


@pytest.mark.processes
def test_a_rank_ends_while_a_thread_of_its_group_waits_for_pythons_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    words = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.endswith("ended\n"), done.stderr
    assert done.returncode == 0, done.stderr
