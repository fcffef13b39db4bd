"""Generated command lines: no traceback, no hang, no wrong exit code.

    python -m bench.command_lines [--count 300] [--seed 0] [--light] [--json FILE]

Draws command lines of every verb and sub-verb of ``holdfast`` from its parsers, with values that
are valid, borderline and absurd, and runs each one as a process of its own in a scratch folder.
Each process is forked from this one, which has imported torch already. What is expected of a
command line is said in ``complaints_about``. ``--light`` leaves out command lines that do real work
(training, measuring, screening), and records no row.
"""

import argparse
import json
import os
import random
import shlex
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from bench.command_line_draw import CLOSED, FULL, Line, draw
from bench.command_line_process import Outcome, adopt_orphans, execute
from bench.command_line_values import furnish, write_template
from bench.rows import record
from holdfast import config
from holdfast.errors import ConfigError

USAGE_CODE = 2
CODES = {"events": {0, 2}, "report": {0, 2}, "screen": {0, 1, 2, 3}}  # docs/command_line.md
OTHER_CODES = {0, 1, 2}
FAILED_OUTPUT = {FULL: 1, CLOSED: 141}
CONTROLS = ("\x1b", "\x07", "\u202e")


def complaints_about(line: Line, outcome: Outcome, folder: Path) -> list[str]:
    """Return what is wrong with the end of a command line; nothing if it is as documented.

    It ends in time, with an exit code that its verb documents, without a traceback and without
    terminal controls in what it prints. It leaves no process and writes nothing outside of its
    folder. Exit code 2 comes with one line that names the verb, and with nothing begun. Exit code 0
    means that every file that was asked for is there and whole.
    """
    found = list(_about_end(line, outcome))
    if outcome.code == USAGE_CODE:
        found += _about_refusal(line, outcome)
    elif outcome.code == FAILED_OUTPUT.get(line.stdout):
        return found
    elif line.refused:
        found.append(f"{line.refused} was not refused: exit code {outcome.code}")
    if outcome.code == 0:
        found += [text for name in line.promised if (text := _about_file(name, line, folder))]
    return found


def _about_end(line: Line, outcome: Outcome) -> Iterator[str]:
    if outcome.code is None:
        yield f"did not end within {outcome.seconds:.0f} s"
    elif outcome.code not in {*CODES.get(line.verb, OTHER_CODES), FAILED_OUTPUT.get(line.stdout)}:
        yield f"exit code {outcome.code} is not documented for {line.verb or 'no verb'}"
    for name, text in (("stdout", outcome.stdout), ("stderr", outcome.stderr)):
        if "Traceback (most recent call last)" in text:
            yield f"a traceback on {name}: {text.strip().splitlines()[-1][:200]}"
        if any(control in text for control in CONTROLS):
            yield f"terminal controls on {name}"
    if outcome.left:
        yield f"left running: {', '.join(outcome.left)}"
    for path in outcome.strayed:
        yield f"wrote outside of its folder: {path}"
    if outcome.code == 1 and not (outcome.stdout or outcome.stderr).strip():
        yield "exit code 1 without a word"


def _about_refusal(line: Line, outcome: Outcome) -> Iterator[str]:
    lines = outcome.stderr.strip().splitlines()
    refusals = [text for text in lines if text.startswith("holdfast")]
    if len(refusals) != 1 or refusals[0] != lines[-1]:
        yield f"exit code 2 and no single line that ends with the reason: {outcome.stderr[-300:]!r}"
    elif "usage: " not in outcome.stderr and len(lines) != 1:
        yield f"exit code 2 and more than one line: {outcome.stderr[:300]!r}"
    if outcome.made:
        yield f"refused, and yet made {', '.join(sorted(outcome.made)[:3])}"


def _about_file(name: str, line: Line, folder: Path) -> str:
    """Return what is wrong with a file that a command line has promised by exit code 0."""
    path = folder / line.promised[name]
    if not path.exists():
        return f"exit code 0, and --{name} {path.name} is not there"
    if path.is_dir():
        return "" if any(path.iterdir()) else f"exit code 0, and --{name} {path.name} is empty"
    return "" if _is_whole(name, path) else f"exit code 0, and --{name} {path.name} is not whole"


def _is_whole(name: str, path: Path) -> bool:
    try:
        if name == "write":
            config.read(path)
        elif name in ("json", "store", "export"):
            json.loads(path.read_text(), parse_constant=_refuse_constant)
        elif name == "out":
            return "</html>" in path.read_text()
    except (ConfigError, ValueError):
        return False
    return path.stat().st_size > 0


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def run_lines(lines: list[Line], limit_s: float) -> list[dict[str, object]]:
    """Run command lines one after another; return those about which there is a complaint."""
    adopt_orphans()
    bad, codes = [], Counter[str]()
    with tempfile.TemporaryDirectory(prefix="command-lines-") as base:
        template = Path(base, "template")
        write_template(template)
        for number, line in enumerate(lines):
            outcome, found = _run_one(line, Path(base, str(number)), template, limit_s)
            codes[str(outcome.code)] += 1
            if found:
                bad.append(_described(number, line, outcome, found))
            if sys.stderr.isatty():
                print(f"\r{number + 1} of {len(lines)}, {len(bad)} bad", end="", file=sys.stderr)
    print(f"{len(lines)} command lines, exit codes {dict(codes)}, {len(bad)} with complaints")
    return bad


def _run_one(
    line: Line, scratch: Path, template: Path, limit_s: float
) -> tuple[Outcome, list[str]]:
    scratch.mkdir()
    folder = scratch / "here"
    furnish(folder, template)
    outcome = execute(line, folder, limit_s)
    found = complaints_about(line, outcome, folder)
    shutil.rmtree(scratch)
    return outcome, found


def _described(number: int, line: Line, outcome: Outcome, found: list[str]) -> dict[str, object]:
    """Print a complaint, and return all that is known of it."""
    command = shlex.join(("holdfast", *line.words)).encode("unicode_escape").decode()
    print(
        f"{number}: {line.environment or ''} {command[:300]} > {line.stdout}", *found, sep="\n    "
    )
    return {
        "line": number,
        "command": command[:500],
        "env": line.environment,
        "complaints": found,
        "stderr": outcome.stderr[-3000:],
    }


def main() -> None:
    """Run the command lines of a seed; exit code 1 if there is a complaint about any."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--light", action="store_true", help="no real work, and no row")
    parser.add_argument("--only", type=int, help="run the command line of this number alone")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for each")
    parser.add_argument("--json", type=Path, help="also write the complaints to this file")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    lines = [draw(rng, light=args.light) for _ in range(args.count)]
    if args.only is not None:
        lines = [lines[args.only]]
    began_s = time.monotonic()
    bad = run_lines(lines, args.limit)
    if args.json is not None:
        args.json.write_text(json.dumps(bad, indent=2) + "\n")
    if not args.light and args.only is None:
        verbs = dict(sorted(Counter(line.verb or "none" for line in lines).items()))
        took_s = round(time.monotonic() - began_s, 1)
        row = {"count": args.count, "seed": args.seed, "verbs": verbs, "seconds": took_s}
        record("command_lines", row | {"complaints": len(bad)})
    sys.stdout.flush()
    raise SystemExit(1 if bad else 0)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
