"""Values for the options of generated command lines, and the scratch folder that they name.

A value is ``refused`` if no option of its type can take it: the command line then has to end with
exit code 2. All paths that can be written are within the scratch folder.
"""

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.events import LEDGER_NAME, Event, EventKind, Ledger
from holdfast.events.steps import STEPS_NAME
from holdfast.report.run_files import METRICS_NAME, SETTINGS_NAME

ESCAPES = "\x1b[31m\x1b]0;title\x07"
RIGHT_TO_LEFT = "\u202egnp.x\u202c"
NOT_UTF8 = os.fsdecode(b"caf\xe9")
LONG_NAME, LONG_PATH = "n" * 300, "d/" * 2500 + "x"
HUGE = "9" * 30
NESTED = 100_000
FLEET = Path(__file__).parents[1] / "examples" / "fleet.toml"


@dataclass(frozen=True)
class Value:
    """The text of a value, and whether every option of its type must refuse it."""

    text: str
    refused: bool = False


def _values(*texts: str, refused: bool = False) -> tuple[Value, ...]:
    return tuple(Value(text, refused) for text in texts)


NOT_NUMBERS = _values("", " ", "nine", "1,5", "0x10", "--", "-", ESCAPES, NOT_UTF8, refused=True)
INTEGERS = (
    *_values("0", "-1", "1", "2", "7", HUGE, "-" + HUGE, "1_0", "\u0663"),
    *_values("nan", "inf", "1e400", "1.5", "1e3", refused=True),
    *NOT_NUMBERS,
)
SMALL_INTEGERS = (*_values("0", "-1", "1", "2"), *INTEGERS[5:7], *INTEGERS[9:])
FLOATS = (
    *_values("0", "-1", "0.5", "1", "1.0", "2", "1e-320", "-0.0", "1e300"),
    *_values("nan", "-nan", "inf", "-inf", "1e400", refused=True),
    *NOT_NUMBERS,
)
TEXTS = _values(
    "", "x", "a" * 5000, ESCAPES, RIGHT_TO_LEFT, NOT_UTF8, "-1", "0", "gemm_fault", "%s"
)
NOT_QUANTITIES = (
    "",
    "1",
    "soon",
    "-1s",
    "nans",
    "1e400s",
    "1 parsec",
    ESCAPES,
    NOT_UTF8,
    "9" * 400,
)
TIMES = (
    *_values("0", "1ms", "1 s", "0.7s", "1e-30s", "30d", "1e30y", "1e300y"),
    *_values(*NOT_QUANTITIES, "4GB", refused=True),
)
SIZES = (
    *_values("0", "1B", "1MB", "80GB", "0.5GiB", "1e290PB"),
    *_values(*NOT_QUANTITIES, "30d", refused=True),
)
SPEEDS = (
    *_values("0", "1B/s", "5GB/s", "1e290PB/s"),
    *_values(*NOT_QUANTITIES, "4GB", refused=True),
)
DEVICES = (*_values("cpu"), *_values("", "abacus", "cuda:99", "cpu:-1", ESCAPES, refused=True))
CORES = (*_values("0"), *_values("", "a", "0-", "-", "98765", f"0-{HUGE}", "1-0", refused=True))
ADDRESSES = (*_values("127.0.0.1"), *_values("", "999.1.1.1", "no host", ESCAPES, refused=True))
FAULTS = (*_values("inf", "flip-30-up"), *_values("", "flip-99", "flip--1", "x", refused=True))
SHAPES = (*_values("8x16x8"), *_values("", "8x8", "0x1x1", f"{HUGE}x1x1", "axbxc", refused=True))
EMULATED = _values("", "unit=core 0", "op=mm", "unit=core 0,op=x,at=nan", ESCAPES, refused=True)

ODD_PLACES = (LONG_NAME, LONG_PATH, "fifo", "/dev/zero")
NEW_FILES = (
    *_values("out.json", "new file.json", RIGHT_TO_LEFT + ".json", ESCAPES + ".json", "no-ending"),
    *_values("text", "none/x.json", "text/a.txt/x.json", "/proc/x.json", refused=True),
    *_values("/dev/null", *ODD_PLACES, refused=True),
)
NEW_PLOTS = (
    *_values("out.png", "out.svg", RIGHT_TO_LEFT + ".pdf", NOT_UTF8 + ".png"),
    *_values("out.gif", "none/x.png", "text", "/proc/x.png", "fifo", LONG_NAME, refused=True),
)
NEW_FOLDERS = (
    *_values("new", "a/b/c", RIGHT_TO_LEFT, NOT_UTF8, "empty"),
    *_values("garbage.toml", "garbage.toml/x", *ODD_PLACES, refused=True),
)
OLD_FILES = (
    *_values("garbage.toml", "binary", "blank", "list.json", "object.json", "nested.json"),
    *_values("nested.toml", "numbers.json", "number.toml", "null.json"),
    *_values("/dev/null"),
    *_values("none", "text", "", "loop", *ODD_PLACES, refused=True),
)
RUNS = (
    *_values("run", "run", "odd-run", "empty-ledger", "bad-ledger", "bad-metrics", "bad-steps"),
    *_values("bad-settings", "list-settings", "bad-result", "folder-ledger", "text", "empty"),
    *_values("none", "garbage.toml", LONG_NAME, "fifo", "/dev/null", "loop", refused=True),
)
ENVIRONMENTS = (
    *(("HOLDFAST_TIMEOUT_S", text) for text in ("0", "-1", "nan", "inf", "x", "", "1e400")),
    *(("HOLDFAST_RUN_DIR", text) for text in ("", "none", "fifo", "garbage.toml", LONG_NAME)),
    *(("HOLDFAST_CONFIG", text) for text in ("", "none", "binary", "fifo", "nested.toml", "text")),
    *(("HOLDFAST_LOG", text) for text in ("DEBUG", "nonsense", "")),
    *(("COLUMNS", text) for text in ("0", "1", "-1", "x")),
    *(("PYTHONIOENCODING", text) for text in ("ascii", "latin-1")),
)


def furnish(folder: Path, template: Path) -> None:
    """Make a folder with everything that the values name, of which ``template`` has the files."""
    shutil.copytree(template, folder, symlinks=True)
    os.mkfifo(folder / "fifo")


def write_template(folder: Path) -> None:
    """Write every file and folder that the values name, except the pipe."""
    folder.mkdir()
    for name in ("text", "empty"):
        (folder / name).mkdir()
    (folder / "text" / "a.txt").write_text("to be or not to be, that is the question " * 40)
    (folder / "script.py").write_text("print('trained')\n")
    (folder / "failing.py").write_text("raise SystemExit(3)\n")
    (folder / "fleet.toml").write_text(FLEET.read_text())
    (folder / "loop").symlink_to("loop")
    _write_inputs(folder)
    _write_runs(folder)


def _write_inputs(folder: Path) -> None:
    contents = {
        "garbage.toml": "[[[ = \x01 not TOML",
        "number.toml": f"[fleet]\ndevices = {HUGE}{HUGE}\n[guard]\naudit = nan\n",
        "nested.toml": "a = " + "[" * NESTED + "]" * NESTED,
        "nested.json": "[" * NESTED + "]" * NESTED,
        "blank": "",
        "list.json": "[1]",
        "null.json": "null",
        "object.json": json.dumps({"S_AS": "x", ESCAPES: {"Q": None}}),
        "numbers.json": '{"S_AS": NaN, "S_CL": 1e400, "S_O": -1}',
    }
    for name, text in contents.items():
        (folder / name).write_text(text)
    (folder / "binary").write_bytes(bytes(range(256)) * 40)


def _write_runs(folder: Path) -> None:
    _write_ledger(folder / "run", "blocks.0.attn.qkv/addmm/forward")
    _write_ledger(folder / "odd-run", ESCAPES + RIGHT_TO_LEFT + "\n" + "x" * 10_000)
    (folder / "odd-run" / STEPS_NAME).write_text('{"step": 1, "loss": NaN}\n\x00\n')
    for name in ("bad-ledger", "bad-metrics", "bad-steps", "bad-settings", "list-settings"):
        shutil.copytree(folder / "run", folder / name)
    shutil.copytree(folder / "run", folder / "bad-result")
    (folder / "bad-ledger" / LEDGER_NAME).write_bytes(b"SQLite format 3\0" + bytes(range(256)) * 9)
    (folder / "bad-metrics" / METRICS_NAME).write_text("[]\nnull\n")
    (folder / "bad-steps" / STEPS_NAME).write_bytes(b"\xff\xfe{}\n")
    (folder / "bad-settings" / SETTINGS_NAME).write_text('{"ranks": "many", "steps": [1]}')
    (folder / "list-settings" / SETTINGS_NAME).write_text("[1]")
    (folder / "bad-result" / "result-0.json").write_text('{"coverage": 7, "finite": "x"}')
    (folder / "folder-ledger" / LEDGER_NAME).mkdir(parents=True)
    (folder / "empty-ledger").mkdir()
    (folder / "empty-ledger" / LEDGER_NAME).touch()


def _write_ledger(run_dir: Path, op: str) -> None:
    run_dir.mkdir()
    ledger = Ledger(run_dir / LEDGER_NAME)
    detail = {"kind": "bitflip", "site": "output", "bit": 30, "note": op}
    ledger.append(
        Event(EventKind.INJECTED, op=op, step=1, rank=0, detail=detail),
        Event(EventKind.GEMM_FAULT, op=op, step=1, rank=0, rung="correct"),
        Event(op[:40], op=op, host=op[:60]),
    )
    ledger.close()


def texts(values: Sequence[Value]) -> list[str]:
    """Return the texts of values."""
    return [value.text for value in values]
