"""The job script on a real Slurm of one node: a killed step goes on from the memory of another."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from snapshot_trainer import Tiny
from snapshot_waits import alive, until

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "snapshot" / "snapshot_trainer.py"
DAEMONS = ("munged", "slurmctld", "slurmd")
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthInfo=socket={place}/munge.sock
StateSaveLocation={place}/state
SlurmdSpoolDir={place}/spool
SlurmctldPidFile={place}/slurmctld.pid
SlurmdPidFile={place}/slurmd.pid
SlurmctldLogFile={place}/slurmctld.log
SlurmdLogFile={place}/slurmd.log
ProctrackType=proctrack/cgroup
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
TaskPlugin=task/none
SchedulerParameters=batch_sched_delay=0,sched_interval=1
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus}
PartitionName=all Nodes={host} Default=YES State=UP
"""
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(
        os.geteuid() != 0 or None in map(shutil.which, DAEMONS),
        reason="it takes root and Debian's slurmd, slurmctld, slurm-client and munge",
    ),
]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def call(*command: object) -> str:
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.strip()


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cluster of this machine alone; its daemons end with the test."""
    place = tmp_path / "slurm"
    for name in ("state", "spool"):
        (place / name).mkdir(parents=True)
    tmp_path.chmod(0o755)
    (place / "munge.key").write_bytes(os.urandom(128))
    (place / "munge.key").chmod(0o600)
    ports, host = (free_port(), free_port()), socket.gethostname()
    text = CONFIG.format(host=host, ports=ports, place=place, cpus=os.cpu_count())
    (place / "slurm.conf").write_text(text)
    first = Path("/sys/fs/cgroup/freezer").exists()
    (place / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n" if first else "")
    monkeypatch.setenv("SLURM_CONF", str(place / "slurm.conf"))
    names = {"key": "key-file", "sock": "socket", "pid": "pid-file", "log": "log-file"}
    munge = [f"--{option}={place}/munge.{name}" for name, option in names.items()]
    try:
        call("munged", "--force", f"--seed-file={place}/munge.seed", *munge)
        call("slurmctld")
        call("slurmd", "-N", host)
        until(lambda: "idle" in call("sinfo", "-h"), "the node is idle")
        yield place
    finally:
        subprocess.run(["scancel", "--user=root"], timeout=30, check=False)
        time.sleep(1)
        files = [place / f"{name}.pid" for name in ("slurmd", "slurmctld", "munge")]
        pids = [int(path.read_text()) for path in files if path.exists()]
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
        until(lambda: not any(map(alive, pids)), "the daemons have ended", 60)


def test_a_step_that_is_killed_whole_goes_on_bit_for_bit_in_the_next_step(
    one_thread: None, slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = tmp_path / "holdfast"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m holdfast "$@"\n')
    command.chmod(0o755)
    run_dir, out = tmp_path / "run", tmp_path / "out.txt"
    monkeypatch.chdir(tmp_path)
    for name, value in {
        "PYTHONPATH": ROOT,
        "OMP_NUM_THREADS": 1,
        "HOLDFAST": command,
        "HOLDFAST_RUN_DIR": run_dir,
        "TRAIN_NODES": 1,
        "RANKS_PER_NODE": 1,
        "SCREEN_FOR": "1s",
        "SMP_START_S": 5,
    }.items():
        monkeypatch.setenv(name, str(value))
    options = ["--parsable", "--nodes=1", "--no-requeue", f"--output={out}"]
    script = [ROOT / "examples" / "slurm" / "train.sbatch", SCRIPT, run_dir]
    job = call("sbatch", *options, *script, "--steps", 12, "--delay-s", 0.5)

    def said(word: str) -> list[list[str]]:
        lines = out.read_text().splitlines() if out.exists() else []
        return [line.split()[1:] for line in lines if line.startswith(word + " ")]

    until(lambda: len(said("step")) >= 4, "the job trains", 120)
    call("scancel", "--signal=KILL", f"{job}.2")  # the steps are the screening, the SMP, this one
    until(lambda: said("end"), "the job has trained", 120)
    digests = Tiny().train(range(1, 13))
    (first, _), (step, digest) = said("start")
    assert first == "0"
    assert digest == digests[int(step)] != digests[1]
    assert said("end") == [[digests[12]]]
    until(lambda: job not in call("squeue", "-h", "-o", "%A").split(), "the job has ended")
