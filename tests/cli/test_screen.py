"""``holdfast screen``: exit codes, what it prints, its JSON and its events."""

import json
from pathlib import Path

import pytest

from holdfast.cli.main import main
from holdfast.events import LEDGER_NAME, read_ledger
from holdfast.report.suspects import Faults

pytestmark = pytest.mark.processes
SMALL = ("screen", "--scale", "small", "--rounds", "3", "--memory", "1MiB", "--no-gpu")


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.representative
def test_a_healthy_machine_is_0_and_its_results_can_be_kept(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    stored, document = tmp_path / "stored.json", tmp_path / "out.json"
    assert main([*SMALL, "--cores", "0", "--store", str(stored), "--json", str(document)]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1].startswith("HEALTHY: 1 unit, ")
    assert "rule of three" in printed
    assert "stored by a single unit" in printed
    written = json.loads(document.read_text())
    assert (written["verdict"], written["exit_code"], written["suspects"]) == ("healthy", 0, [])
    assert written["false_alarm_bound_95"] == 3 / sum(written["comparisons"].values())
    assert [unit["name"] for unit in written["units"]] == ["core 0"]
    fault = "unit=core 0,op=digest,bit=3"
    assert main([*SMALL, "--cores", "0", "--reference", str(stored), "--emulate", fault]) == 1
    printed = capsys.readouterr().out
    assert "core 0, digest: which bits are wrong is not known" in printed
    assert printed.splitlines()[-1].startswith("SUSPECT: core 0 (faults were emulated")


def test_a_suspect_is_1_and_its_op_bits_and_finder_are_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fault = "unit=core 0,op=memory.random,bit=40"
    words = ["--cores", "0", "--emulate", fault, "--run-dir", str(tmp_path / "run")]
    assert main([*SMALL, *words, "--without", "reference"]) == 1
    printed = capsys.readouterr().out
    row = next(line for line in printed.splitlines() if "memory.random   checksum" in line)
    assert "6 of 6" in row
    assert "readback (int64): 1 of 8192 elements; bits 40" in printed
    assert "XOR 0000010000000000" in printed
    stored = [event for _, event in read_ledger(tmp_path / "run" / LEDGER_NAME)]
    found, answer = stored
    assert (found.kind, found.op, found.device) == ("screen_fault", "memory.random", "core 0")
    assert (found.detector, found.detail["bits"]) == ("checksum", [40])
    assert (answer.kind, answer.detail["verdict"]) == ("screened", "suspect")
    faults = Faults()
    faults.take(stored)
    assert faults.by_device(steps=0, ranks=1) == []  # emulated: of no device
    found.detail["emulated"] = False
    faults.take(stored)
    (suspect,) = faults.by_device(steps=0, ranks=1)
    assert (suspect.faults, "core 0" in suspect.name) == (1, True)


def test_too_few_units_is_3(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--cores", "0", "--units", "2"]) == 3
    printed = capsys.readouterr().out
    assert "1 units are here and 2 are needed" in printed
    assert printed.splitlines()[-1] == "UNABLE to tell"
