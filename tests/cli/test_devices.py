"""``holdfast devices``, and the command that ``holdfast run --on-evict`` runs."""

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
