"""``holdfast campaign SCRIPT.py``: what a script defines, what is written, and what is refused."""

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from case_loops import for_each

from holdfast.cli.main import main

SCRIPT = """
import torch
from helper import width

model = torch.nn.Sequential(torch.nn.Linear(width, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))

def inputs():
    return torch.ones(2, width)

if __name__ == "__main__":
    raise SystemExit("this part trains")
"""


@pytest.fixture(autouse=True)
def _own_process(monkeypatch) -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("sys.path", ["", *__import__("sys").path])
    monkeypatch.setattr("sys.argv", ["holdfast"])
    yield
    signal.signal(signal.SIGTERM, before)


def script(folder: Path, text: str = SCRIPT) -> str:
    (folder / "helper.py").write_text("width = 4\n")
    (folder / "script.py").write_text(text)
    return str(folder / "script.py")


def test_a_script_of_two_names_is_a_campaign(tmp_path, capsys):
    out, summary = tmp_path / "out", tmp_path / "summary.json"
    options = f"--what weight activation --fault flip zero --trials 24 --workers 1 --out {out}"
    call = ["campaign", script(tmp_path), *options.split(), "--json", str(summary)]
    assert main(call) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^ *weight +zero +6 ", printed, re.M)
    assert "trials.csv" in printed
    assert {path.name for path in out.iterdir()} >= {"trials.csv", "trials.jsonl"}
    written = json.loads(summary.read_text())
    assert sum(row["trials"] for row in written["by_what_fault"]) == 24
    assert {row["layer"] for row in written["by_layer_what_fault"]} == {"0", "1", "2"}
    kept = (out / "trials.jsonl").read_bytes()
    assert main(call) == 0
    assert (out / "trials.jsonl").read_bytes() == kept
    assert main([*call, "--seed", "1"]) == 2


@for_each(
    ("text", "options", "said"),
    [
        (SCRIPT.replace("inputs", "batch"), "", "defines no inputs: set model to a module"),
        ("1 / 0", "", r"raised ZeroDivisionError: division by zero \(.*script.py:1\)"),
        (SCRIPT, "--site output", "--site is for campaigns on products"),
        (SCRIPT, "--full", "--full is for campaigns on products"),
        (SCRIPT, "--fault flop", "unknown fault 'flop'"),
        (SCRIPT + "faults = 'flip-99'", "", "bit 99 is out of range"),
    ],
)
def test_a_script_that_does_not_do_is_one_clear_line(tmp_path, capsys, text, options, said):
    assert main(["campaign", script(tmp_path, text), *options.split()]) == 2
    error = capsys.readouterr().err
    assert re.search(said, error)
    assert len(error.splitlines()) == 1


def test_a_missing_script_and_an_option_without_one_are_refused(tmp_path, capsys):
    assert main(["campaign", str(tmp_path / "none.py")]) == 2
    assert "there is no script" in capsys.readouterr().err
    assert main(["campaign", "--what", "weight"]) == 2
    assert "name the script" in capsys.readouterr().err
