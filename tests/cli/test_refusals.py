"""Bad input to every verb: exit code 2, one line with value and remedy, nothing begun."""

import json
import os
import shutil
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import pytest
from case_loops import for_each
from report_runs import corrected, write_run

from holdfast import __version__
from holdfast.cli import calibration as calibrate_verb
from holdfast.cli import plots
from holdfast.cli.main import main, make_parser
from holdfast.report.run_files import SETTINGS_NAME
from holdfast_lab.trainer import launch
from holdfast_lab.trainer.rundir import LOCK_NAME

FLEET = Path(__file__).parents[2] / "examples" / "fleet.toml"
TRAIN = "train --run-dir new --data text --layers 1 --heads 2 --width 16 --context 16 --steps 6"
STORM = "demo --run-dir new --random-storm 1 --low-flips"
JOB = "plan snapshots --nodes 16 --group 8 --mttf 30d --state 80GB --step 0.7s"
SCREEN = "screen --scale small --rounds 2 --no-gpu"
CAMPAIGN = "campaign --out new --operator mm --dtype bf16 --site output --workers 1"
FAULT = '[[fault]]\nstep = 2\nrank = 0\nkind = "bitflip"\nbit = 40\nop = "head/mm/forward"\n'
PHI = {gemm: dict.fromkeys(("inf", "nan", "near_inf"), 0.5) for gemm in ("Q", "K", "V", "AS", "CL")}


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, one_thread: None) -> Path:
    """The current folder, with inputs of every kind; nothing that takes long may be started."""

    def started(*_: object, **__: object) -> None:
        raise AssertionError("work was begun on bad input")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(launch, "_launch", started)
    monkeypatch.setattr(calibrate_verb, "calibrate", started)
    monkeypatch.setattr("holdfast.screen.runner.worker_handle.start", started)
    for folder, content in {"text": b"to be or not to be " * 20, "binary": b"a\0b" * 100}.items():
        Path(folder).mkdir()
        Path(folder, "a.txt").write_bytes(content)
    Path("empty").mkdir()
    Path("script.py").touch()
    write_run(Path("run"))
    shutil.copy(FLEET, "fleet.toml")
    Path("bad.toml").write_text("[fleet]\ndevice = 8")
    Path("audit.toml").write_text("[guard]\naudit = 2\n")
    Path("bit.toml").write_text(FAULT)
    Path("op.toml").write_text(FAULT.replace("head/", "haed/").replace("40", "30"))
    Path("list.json").write_text("[1]")
    Path("broken.json").write_text("{")
    Path("binary.json").write_bytes(b"\xff\xfe\x00")
    Path("phi.json").write_text(json.dumps({"other": PHI}))
    _write_damaged_inputs()
    return tmp_path


def _write_damaged_inputs() -> None:
    os.mkfifo("fifo")
    Path("deep.json").write_text("[" * 100_000)
    Path("deep.toml").write_text("a = " + "[" * 100_000)
    Path("kept").mkdir()
    Path("kept", "reft.survival.json").write_text("[1]")
    write_run(Path("text-of-settings"))
    Path("text-of-settings", SETTINGS_NAME).write_text('{"ranks": "many"}')
    write_run(Path("damaged-result"))
    Path("damaged-result", "result-0.json").write_text('{"coverage": 7}')
    write_run(Path("damaged-event"), [corrected(1.0)])
    with closing(sqlite3.connect("damaged-event/events.sqlite")) as ledger, ledger:
        ledger.execute("UPDATE events SET detail = '[1]'")


def _files(folder: Path) -> dict[str, bytes]:
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != LOCK_NAME]
    return {str(path): path.read_bytes() for path in paths}


@pytest.mark.filterwarnings("ignore")  # of torchrun's parser
@for_each(
    ("words", "expected"),
    [
        (f"{TRAIN} --ranks 0", "ranks = 0 must be at least 1"),
        (f"{TRAIN} --ranks 20000", "ranks = 20000 is too many"),
        (f"{TRAIN} --json /no/such/x.json", "/no/such is no writable directory"),
        (f"{TRAIN} --width 15", "width = 15 is not divisible by heads = 2"),
        (f"{TRAIN} --context 500", "has 380 bytes, one sequence needs 501"),
        (f"{TRAIN} --lr nan", "lr = nan must be a positive number"),
        (f"{TRAIN} --warmup-steps 6", "warmup_steps = 6 must be less than steps = 6"),
        (f"{TRAIN} --data none", "none: give an existing folder of text files"),
        (f"{TRAIN} --data binary", "1 binary files"),
        (f"{TRAIN} --schedule none.toml", "none.toml: No such file"),
        (f"{TRAIN} --schedule bit.toml", "bit 40"),
        (f"{TRAIN} --schedule op.toml", "'haed/mm/forward' is not a matmul"),
        (f"{TRAIN} --data=", "--data is empty"),
        (f"{TRAIN} --schedule deep.toml", "deep.toml: "),
        (f"{TRAIN} --schedule fifo", "it is a device or a pipe"),
        (f"{TRAIN} --resume", "holds no run to resume: start it without --resume"),
        (f"{TRAIN} --run-dir run", "run already holds a run: give"),
        ("demo --run-dir new --low-flips 3", "--low-flips 3 needs --random-storm"),
        ("demo --run-dir new --audit 1.5", "audit = 1.5"),
        ("demo --run-dir new --seed -1", "seed = -1"),
        (f"{STORM} -2", "--low-flips -2 must be at least 0"),
        (f"{STORM} 99999", "--low-flips 99999: no place is left"),
        ("calibrate --threads 0", "--threads 0 must be at least 1"),
        ("calibrate --device abacus", "'abacus' is no device"),
        ("calibrate --device cuda:99", "'cuda:99' is not here"),
        ("calibrate --plot plot.gif", "name a file that ends in .png"),
        ("calibrate --plot /no/such/plot.png", "/no/such is no writable directory"),
        ("calibrate --json /no/such/out.json", "/no/such is no writable directory"),
        ("calibrate --profile kept.txt", "name a file that ends in .json"),
        ("calibrate --profile a.json --json a.json", "both a.json; name two files"),
        ("calibrate --profile list.json", "is there and no calibration profile"),
        ("calibrate --show --profile /no/such/kept.json", "cannot read /no/such/kept.json"),
        ("calibrate --show", "measure with: holdfast calibrate --device cpu --threads 1"),
        ("calibrate --check", "not calibrated under its present settings"),
        ("events empty", "no event ledger"),
        ("plan attention --target 0", "target = 0.0 must be more than 0 and less than 1"),
        ("plan attention --width 64", "give both --width and --heads"),
        ("plan attention --width 64 --heads 0", "--heads 0 must be at least 1"),
        ("plan attention --costs none.json", "cannot read none.json: No such file"),
        ("plan attention --costs broken.json", "broken.json is no JSON"),
        ("plan attention --costs binary.json", "binary.json is no JSON"),
        ("plan attention --costs list.json", "costs are [1]: give {section: seconds}"),
        ("plan attention --costs fifo", "fifo: it is a device or a pipe"),
        ("plan attention --costs /dev/zero", "/dev/zero: it is a device or a pipe"),
        ("plan attention --costs deep.json", "deep.json is no JSON"),
        ("plan ladder fifo", "it is a device or a pipe"),
        ("plan ladder deep.toml", "deep.toml: "),
        ("plan attention --phi list.json", "no vulnerabilities: give {model: {gemm: {type:"),
        ("plan attention --phi phi.json --model gpt2", "no vulnerabilities of 'gpt2', only of"),
        ("plan attention --plot plan.gif", "cannot draw plan.gif"),
        ("plan attention --json /no/such/x.json", "/no/such"),
        (
            "plan attention --rate-inf 0 --rate-nan 0 --rate-near-inf 0 --plot x.png",
            "--plot draws over the error rate",
        ),
        ("plan ladder none.toml", "cannot read the fleet file"),
        ("plan ladder bad.toml", "unknown key fleet.device = 8; valid: devices"),
        ("plan ladder fleet.toml --simulate 1", "--simulate 1: give at least 2 months"),
        (f"plan ladder fleet.toml --simulate {'9' * 30}", "give at most 1000000 months"),
        ("plan ladder fleet.toml --plot plan.gif", "cannot draw plan.gif"),
        ("plan ladder fleet.toml --write /no/such/x.toml", "/no/such"),
        ("plan ladder fleet.toml --json /no/such/x.json", "/no/such"),
        (f"{JOB} --mttf 30", "--mttf 30: give a time like 700ms, 90s, 5m, 12h or 30d"),
        (f"{JOB} --state 4", "--state 4: give a size like 350MB, 4GB or 4GiB"),
        (f"{JOB} --disk-rate 4GB", "--disk-rate 4GB: give a speed like 250MB/s"),
        (f"{JOB} --group 0", "16 nodes in groups of 0: both must be at least 1"),
        (f"{JOB} --parities 3", "--parities 3: a group of 8 can have 0 to 2"),
        (f"{JOB} --parities -1", "--parities -1: a group of 8 can have 0 to 2"),
        (f"{JOB} --group 2 --parities 2", "--parities 2: a group of 2 can have 0 to 1"),
        (f"{JOB} --survival 1", "--survival 1.0 must be more than 0 and less than 1"),
        (f"{JOB} --plot plan.gif", "cannot draw plan.gif"),
        (f"{JOB} --plot /no/such/x.png", "/no/such"),
        ("report none", "there is no"),
        ("report text-of-settings", "settings.json is not the record of a run (ranks = 'many')"),
        ("report damaged-result", "result-0.json is not the record of a run (coverage = 7)"),
        ("report damaged-event", "/events.sqlite is damaged: its detail is [1]"),
        ("events damaged-event", "/events.sqlite is damaged: its detail is [1]"),
        ("events run --op \udce9", "cannot read the event ledger"),
        ("report empty", "holds neither a run nor a campaign"),
        ("report run --out empty", "it is a directory; name a file in it"),
        ("report run --out none/page.html", "is no writable directory"),
        ("report run --json none/a.json", "is no writable directory"),
        ("report run --baseline empty", "holds no run"),
        ("report run --serve 0 --json empty/a.json", "--json goes with a page"),
        ("report none --serve 0", "there is no run directory"),
        ("run none.py", "there is no script none.py: give"),
        ("run --json /no/such/x script.py", "no writable directory"),
        ("run --nproc-per-node many script.py", "torchrun refuses: "),
        ("run --config audit.toml script.py", "audit.toml: guard.audit = 2 must be a share"),
        ("run --nproc-per-node 0 script.py", "--nproc-per-node 0: give 1 to"),
        ("run --nnodes 0 script.py", "--nnodes 0: give a number of at least 1"),
        ("run --nnodes 3:2 script.py", "--nnodes 3:2: give"),
        ("run --max-restarts -1 script.py", "--max-restarts -1 must be at least 0"),
        ("run --node-rank 2 --nnodes 2 script.py", "--node-rank 2: give 0 to 1, for --nnodes 2"),
        ("run --master-port 99999 script.py", "--master-port 99999: give 1 to 65535"),
        ("run --run-dir script.py script.py", "script.py is no directory"),
        ("run --run-dir /proc/x script.py", "no file can be made in /proc"),
        ("spare --run-dir new none.py", "there is no script none.py: give"),
        ("spare --run-dir script.py script.py", "cannot use "),
        ("spare --run-dir new script.py", "script.py ended without a Guard.step"),
        ("run --run-dir script.py/x script.py", "script.py is no directory"),
        ("run --monitor-interval -1 script.py", "--monitor-interval -1.0 must be a number"),
        ("run --monitor-interval nan script.py", "--monitor-interval nan must be a number"),
        ("run --config deep.toml script.py", "deep.toml is no TOML file"),
        ("run --config fifo script.py", "it is a device or a pipe"),
        ("run --json empty script.py", "it is a directory; name a file in it"),
        ("report run --json empty", "it is a directory; name a file in it"),
        ("report run --json /dev/null", "is a device or a pipe"),
        (f"report run --json {'x' * 300}", "File name too long"),
        ("calibrate --threads 999999999", "--threads 999999999 is too many"),
        (f"{JOB} --nodes {'9' * 30}", "give 1 to 1000000"),
        (f"{SCREEN} --cores 0-99999999999", "no core has a number above"),
        (f"{SCREEN} --for soon", "--for soon"),
        (f"{SCREEN} --for 0", "--for 0 s"),
        (f"{SCREEN} --cores a", "--cores a"),
        (f"{SCREEN} --cores 3-1", "--cores 3-1: 3-1 ends before it begins"),
        (f"{SCREEN} --memory 0", "--memory 0 B: give at least 1MiB"),
        (f"{SCREEN} --cores 98765", "this process may run on"),
        (f"{SCREEN} --units 0", "--units 0"),
        (f"{SCREEN} --memory 1", "--memory 1"),
        (f"{SCREEN} --emulate unit=core_0", "--emulate unit=core_0: units are core 0"),
        (f"{SCREEN} --reference /nothing/here.json", "cannot read"),
        (f"{SCREEN} --json /nothing/here.json", "cannot write"),
        *(
            (f"snapshots {action} --run-dir none", "none: give --run-dir")
            for action in ("status", "verify", "recover", "export --to out")
        ),
        *(
            (f"snapshots {action} --json /no/such/x", "no writable directory")
            for action in ("status", "verify", "recover", "export --to out")
        ),
        ("snapshots verify --run-dir empty", "no snapshot is held"),
        ("study reft.surviva", "there is no study 'reft.surviva'; did you mean reft.survival?"),
        ("study list --plot x.png", "--plot goes with a study, not with 'list'"),
        ("study list --export x.json", "--export goes with a study, not with 'list'"),
        ("study list --kept kept", "reft.survival.json is damaged"),
        ("study list --kept /no/such", "there is no folder /no/such"),
        ("study reft.survival --resume toy", "only attnchecker.vulnerability: leave out"),
        ("study x", "there is no study 'x'; `holdfast study list` names them all"),
        ("study reft.survival --json /no/such/x.json", "/no/such"),
        ("study reft.survival --plot /no/such/x.png", "/no/such"),
        ("study reft.survival --plot toy.xyz", "cannot draw toy.xyz: name a file that ends in"),
        ("study reft.survival --seed -1", "seed = -1 must be at least 0"),
        ("study reft.survival --threads 0", "threads = 0 must be at least 1"),
        ("study reft.survival --export x.json", "no other verb reads of reft.survival"),
        (f"{CAMPAIGN} --fault gamma", "unknown fault 'gamma'"),
        (f"{CAMPAIGN} --fault flip-31", "no cell matches"),
        (f"{CAMPAIGN} --trials 0", "--trials 0 must be at least 1"),
        (f"{CAMPAIGN} --workers 0", "--workers 0 must be at least 1"),
        (f"{CAMPAIGN} --end-to-end -1", "--end-to-end -1 must be at least 0"),
        (f"{CAMPAIGN} --json /no/such/x.json", "/no/such"),
    ],
)
def test_bad_input_is_one_line_with_the_value_and_the_remedy_and_nothing_is_begun(
    capsys: pytest.CaptureFixture[str], here: Path, words: str, expected: str
) -> None:
    before = _files(here)
    assert main(words.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == "" or words.split()[0] in ("train", "screen", "campaign")
    (line,) = captured.err.splitlines()
    assert line.startswith(f"holdfast {words.split()[0]}: ")
    assert expected in line
    assert _files(here) == before
    assert "HOLDFAST_RUN_DIR" not in os.environ


@for_each("words", ["calibrate", "plan attention", JOB, "study reft.survival"])
def test_without_matplotlib_a_plot_is_refused_with_the_remedy(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, here: Path, words: str
) -> None:
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    assert main([*words.split(), "--plot", "plot.png"]) == 2
    assert "pip install 'torch-holdfast[plot]'" in capsys.readouterr().err


@for_each(
    ("words", "shown"),
    [
        ("", "usage: holdfast"),
        ("no-such-verb", "no-such-verb"),
        ("train --steps many", "many"),
        ("train --mode x", "'x'"),
        ("train --lr=--", "argument --lr: expected one argument"),
        ("train --steps=--", "argument --steps: expected one argument"),
        ("plan ladder --simulate=-- fleet.toml", "argument --simulate: expected one argument"),
        ("events run \x1b[31m", r"unrecognized arguments: \x1b[31m"),
        ("calibrate --quick --full", "--full"),
        ("calibrate --dtype fp8", "fp8"),
        ("calibrate --seed x", "'x'"),
        ("events run --limit=0", "not a positive number of events"),
        ("events run --limit=-1", "not a positive number of events"),
        ("events run --limit=many", "not a positive number of events"),
        ("plan", "required"),
        ("plan nothing", "nothing"),
        ("plan attention --model gpt5", "gpt5"),
        ("plan snapshots --nodes 8", "--mttf"),
        ("plan snapshots --nodes eight", "eight"),
        ("report run --serve=-1", "is no port"),
        ("report run --serve=65536", "is no port"),
        ("report run --serve=http", "is no port"),
        ("run", "training_script"),
        ("run --no-such-option x.py", "usage: holdfast run"),
        ("campaign --dtype fp8", "fp8"),
        ("campaign --operator conv", "conv"),
        ("campaign --site nowhere", "nowhere"),
        ("campaign --distribution cauchy", "cauchy"),
        ("campaign --shape 3x4", "3x4"),
        ("campaign --shape 0x4x4", "0x4x4"),
        ("campaign --shape 99999999x8x8", "too large"),
        ("campaign --quick --full", "--full"),
        ("campaign --trials many", "many"),
    ],
)
def test_what_the_parser_refuses_ends_with_code_two(
    capsys: pytest.CaptureFixture[str], words: str, shown: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert "usage: holdfast" in error
    assert shown in error


def test_version_and_the_help_of_every_verb_are_answered(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (verbs,) = [action.choices for action in make_parser()._actions if action.dest == "verb"]
    assert len(verbs) == 16
    shown = {"run": ["--nproc-per-node", "--run-dir", "SMP"], "campaign": ["near_inf", "operand_b"]}
    for words in (["--version"], ["--help"], *([verb, "--help"] for verb in verbs)):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 0
        said = capsys.readouterr().out
        expected = shown.get(words[0], [__version__ if words == ["--version"] else words[0]])
        assert [word for word in expected if word not in said] == []
