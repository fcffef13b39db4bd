"""``holdfast run``: what torchrun would do, with an SMP that outlives the ranks."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast import config
from holdfast.cli.main import main
from holdfast.cli.run import make_parser
from holdfast.events import LEDGER_NAME, read_ledger
from holdfast.launch.rendezvous import BACKEND, QUICK_BACKEND, choose
from holdfast.snapshot.node.launch import smp_status
from holdfast.torchrun import OWN_STORE_VARIABLE

ROOT = str(Path(__file__).parents[2])
# Every rank trains three steps; the life that the first argument names ends before the third.
SCRIPT = """
import os, sys, torch, torch.distributed as dist
from holdfast import Snapshots
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
with Snapshots(model, optimizer) as snapshots:
    first = snapshots.restore() or 0
    for step in range(first + 1, 4):
        optimizer.zero_grad()
        model(torch.ones(4) * step).sum().backward()
        snapshots.finish()
        optimizer.step()
        snapshots.begin(step)
        snapshots.wait_committed()
        dist.barrier()
        if step == 2 and os.environ["TORCHELASTIC_RESTART_COUNT"] == sys.argv[1]:
            os._exit(3)
dist.destroy_process_group()
# One write: torchrun starts the ranks unbuffered, and the pieces of a print would interleave.
sys.stdout.write(f"rank {os.environ['RANK']} began at {first}\\n")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def _run(run_dir: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "holdfast.cli.main", "run", "--run-dir", str(run_dir)]
    env = {**os.environ, "PYTHONPATH": ROOT, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, *words], env=env, capture_output=True, text=True, timeout=110, cwd=run_dir.parent
    )


def _free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port: int = bound.getsockname()[1]
        return port


@pytest.mark.filterwarnings("ignore")  # of torchrun's parser
def test_restarts_and_the_rendezvous_are_those_that_keep_a_run_alive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PET_MAX_RESTARTS", raising=False)
    assert make_parser().parse_args(["script.py"]).max_restarts == 3
    assert make_parser().parse_args(["--max-restarts", "0", "script.py"]).max_restarts == 0
    monkeypatch.setenv("PET_MAX_RESTARTS", "0")
    assert make_parser().parse_args(["script.py"]).max_restarts == 0
    static = "--nnodes 2 --node-rank 1 --master-addr 10.0.0.1 --rdzv-conf timeout=5"
    options = make_parser().parse_args([*static.split(), "script.py"])
    choose(options)
    assert (options.rdzv_backend, options.rdzv_endpoint) == (BACKEND, "10.0.0.1:29500")
    assert options.rdzv_conf == "timeout=5,rank=1"
    for others in ([], ["--standalone"], ["--rdzv-backend", "c10d", "--nnodes", "2"]):
        options = make_parser().parse_args([*others, "script.py"])
        choose(options)
        assert options.rdzv_backend == QUICK_BACKEND
        assert (options.rdzv_endpoint == "localhost:0") == ("c10d" not in others)
    monkeypatch.setenv(OWN_STORE_VARIABLE, "0")
    options = make_parser().parse_args(["script.py"])
    choose(options)
    assert options.rdzv_backend == "static"


def _smp(path: Path) -> dict[str, Any]:
    smp: dict[str, Any] = json.loads(path.read_text())["smp"]
    return smp


@pytest.mark.processes
@pytest.mark.representative
def test_killed_ranks_go_on_from_the_smp_which_ends_with_them(
    script: Path, run_dir: Path, tmp_path: Path
) -> None:
    result = tmp_path / "result.json"
    # With a port the rendezvous is static, whose store torch's own would keep over the restart.
    options = ["--json", str(result), "--nproc-per-node", "2", "--master-port", str(_free_port())]
    done = _run(run_dir, *options, str(script), "0")
    assert done.returncode == 0, done.stderr
    assert "without the standby process" not in done.stderr
    assert sorted(done.stdout.split("\n")[:2]) == ["rank 0 began at 2", "rank 1 began at 2"]
    assert "it ended when all ranks had finished" in " ".join(done.stdout.split())
    smp = _smp(result)
    assert not smp["alive"]
    assert smp["held"]["commits"] >= 2
    assert smp_status(run_dir) is None


@pytest.mark.processes
@pytest.mark.usefixtures("forked_python")
def test_of_a_run_that_failed_the_smp_lingers_and_is_stopped_by_hand(
    script: Path,
    run_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result = tmp_path / "result.json"
    # By its name it is the same run, although its arguments differ.
    monkeypatch.setenv(config.RUN_ID_VARIABLE, "one run")
    done = _run(run_dir, "--json", str(result), "--max-restarts=0", str(script), "0")
    assert done.returncode == 1
    assert "exitcode  : 3" in done.stderr
    assert f"`holdfast snapshots stop --run-dir {run_dir}` ends it" in done.stdout
    smp = _smp(result)
    assert smp["alive"]
    assert smp["held"]["newest"] == 2
    again = _run(run_dir, str(script), "no life")
    assert again.returncode == 0, again.stderr
    assert "rank 0 began at 2" in again.stdout
    assert smp_status(run_dir) is None
    assert main(["snapshots", "stop", "--run-dir", str(run_dir)]) == 1
    assert "no SMP runs" in capsys.readouterr().out


@pytest.mark.processes
@pytest.mark.usefixtures("forked_python")
def test_a_script_without_snapshots_keeps_its_own_options_and_exit_code(
    run_dir: Path, tmp_path: Path
) -> None:
    script = tmp_path / "plain.py"
    script.write_text("import os, sys; print(sys.argv[1:], os.environ['HOLDFAST_RUN_DIR'])")
    done = _run(run_dir, str(script), "--run-dir", "mine", "--help")
    assert done.returncode == 0, done.stderr
    said = done.stdout.split("\n")
    assert said[0] == f"['--run-dir', 'mine', '--help'] {run_dir}"
    assert said[1] == f"no SMP was seen in {run_dir}: the script took no snapshots there"


CONFIGURED = """
import json, sys, torch
from holdfast import Guard, Snapshots
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
snapshots = Snapshots(model, optimizer)
with Guard(model, optimizer, snapshots=snapshots) as guard:
    status = snapshots.status()
    found = [snapshots.every, guard.audit, status["interval"]["every"], status["config"]]
sys.stdout.write(json.dumps(found) + "\\n")
"""


@pytest.mark.processes
@pytest.mark.usefixtures("forked_python")
def test_a_config_file_reaches_the_ranks_and_is_said(run_dir: Path, tmp_path: Path) -> None:
    script, file = tmp_path / "configured.py", tmp_path / "holdfast.toml"
    script.write_text(CONFIGURED)
    file.write_text("[guard]\naudit = 0.25\n[snapshots]\nevery = 3\n")
    done = _run(run_dir, "--config", str(file), "--nproc-per-node", "1", str(script))
    assert done.returncode == 0, done.stderr
    assert f"config {file}: guard.audit = 0.25, snapshots.every = 3; what the" in done.stdout
    found = json.loads(next(line for line in done.stdout.split("\n") if line.startswith("[")))
    in_force = {"file": str(file), "guard.audit": 0.25, "snapshots.every": 3}
    assert found == [3, 0.25, 3, in_force]
    kinds = {event.kind: event.detail for _, event in read_ledger(run_dir / LEDGER_NAME)}
    assert kinds["config_in_force"] == in_force
