"""``holdfast devices``, and the command that ``holdfast run --on-evict`` runs."""

import pytest
from report_runs import corrected, event

from holdfast.cli.drain import Drain
from holdfast.cli.main import main
from holdfast.events import LEDGER_NAME, EventKind, Ledger


def test_a_device_that_stands_out_is_a_negative_verdict(tmp_path, document, capsys):
    ledger = Ledger(tmp_path / LEDGER_NAME)
    ledger.append(*(corrected(n, step=n, rank=n % 8 and 2) for n in range(40)))
    ledger.append(event("restored", 90.0, step=-1, rank=3))
    ledger.close()
    first, *others = document("devices", tmp_path, code=1)
    assert (first["place"], first["stands_out"]) == (2, True)
    assert not any(device["stands_out"] for device in others)
    assert "stands out" in capsys.readouterr().out


def test_runs_without_faults_accuse_nobody(tmp_path):
    Ledger(tmp_path / LEDGER_NAME).close()
    assert main(["devices", str(tmp_path)]) == 0


def test_the_command_runs_once_for_each_device_that_is_named_from_now_on(tmp_path, capfd):
    ledger = Ledger(tmp_path / LEDGER_NAME)
    ledger.append(event(EventKind.EVICT, 1.0, rank=0))
    command = f'echo "$HOLDFAST_RANK of $HOLDFAST_HOST in $HOLDFAST_RUN_DIR" >> {tmp_path}/drained'
    with Drain(tmp_path, command):
        ledger.append(event(EventKind.EVICT, 2.0, rank=3), event(EventKind.EVICT, 3.0, rank=3))
    ledger.close()
    assert (tmp_path / "drained").read_text() == f"3 of node-a in {tmp_path}\n"
    assert "rank 3 on node-a was named as faulty; --on-evict was run" in capfd.readouterr().err


def test_a_command_that_fails_is_said_and_costs_nothing(tmp_path, capfd):
    with Drain(tmp_path, "exit 3"):
        ledger = Ledger(tmp_path / LEDGER_NAME)
        ledger.append(event(EventKind.EVICT, 2.0, rank=3))
        ledger.close()
    assert "--on-evict ended with 3" in capfd.readouterr().err


@pytest.mark.processes
def test_a_script_that_drains_a_node_is_told_of_each_device_and_may_take_its_time(tmp_path):
    run_dir = tmp_path / "a run"
    run_dir.mkdir()
    (tmp_path / "nodes").mkdir()
    script = tmp_path / "drain.sh"
    script.write_text(
        "#!/bin/sh\nset -eu\nsleep 0.1\n"
        'echo "rank $HOLDFAST_RANK, $HOLDFAST_DEVICE, step $HOLDFAST_STEP" '
        f'>> "{tmp_path}/nodes/$HOLDFAST_HOST"\n'
        'test -f "$HOLDFAST_RUN_DIR/ledger.sqlite"\n'
    )
    script.chmod(0o755)
    with Drain(run_dir, f'"{script}"'):
        ledger = Ledger(run_dir / LEDGER_NAME)  # the run begins after its launcher
        ledger.append(event(EventKind.EVICT, 2.0, step=7, rank=3))
        ledger.append(corrected(2.5, step=7, rank=2))
        ledger.append(event(EventKind.EVICT, 3.0, step=8, rank=1))
        ledger.append(event(EventKind.EVICT, 4.0, step=9, rank=1))
        ledger.close()
    told = (tmp_path / "nodes" / "node-a").read_text().splitlines()
    assert [line.partition(",")[0] for line in told] == ["rank 3", "rank 1"]
    assert [line.rpartition(", ")[2] for line in told] == ["step 7", "step 8"]
