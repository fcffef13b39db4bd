"""Draws command lines from the parsers of every verb."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from random import Random

from bench import command_line_values as values
from bench.command_line_values import Value
from holdfast.cli import run
from holdfast.cli.main import make_parser

Path_ = tuple[str, ...]
# What each verb needs at least, and how to keep its work small.
BASES: Mapping[Path_, str] = {
    ("plan", "snapshots"): "--nodes 16 --group 8 --mttf 30d --state 80GB --step 0.7s",
    ("snapshots", "export"): "--run-dir run --to new",
    ("snapshots", "recover"): "--run-dir run",
    ("snapshots", "status"): "--run-dir run",
    ("snapshots", "verify"): "--run-dir run",
    ("snapshots", "stop"): "--run-dir run",
    ("calibrate",): "--quick --dtype bf16 --threads 1 --profile kept.json",
    ("screen",): "--scale small --rounds 1 --no-gpu --cores 0 --memory 1MB",
    ("demo",): "--run-dir new",
    ("train",): "--data text --layers 1 --heads 2 --width 16 --context 16 --steps 2 --batch-size 2 "
    "--ranks 1 --run-dir new",
    ("campaign",): "--operator mm --dtype bf16 --site output --fault inf --shape 8x16x8 --trials 2 "
    "--workers 1 --out new",
    ("watch",): "--once",
    ("run",): "--nproc-per-node 1 --run-dir new",
}
WEIGHTS: Mapping[str, int] = {"events": 12, "plan": 10, "report": 14, "train": 14, "run": 10}
OTHER_WEIGHT = 6
HEAVY = ("calibrate", "screen", "demo", "train", "study", "campaign", "run")
FULL, CLOSED = "a full device", "a closed pipe"
WORKING_SHARE = 0.15  # of the command lines of heavy verbs: they need not be refused
PROMISES = ("json", "plot", "write", "out", "store", "export", "to")
TYPES: Mapping[str, Sequence[Value]] = {
    "TIME": values.TIMES,
    "SIZE": values.SIZES,
    "SPEED": values.SPEEDS,
    "D": values.DEVICES,
    "LIST": values.CORES,
    "FAULT": values.EMULATED,
    "A": tuple(replace(value, refused=False) for value in values.ADDRESSES),
}
ANY_RUN = tuple(replace(value, refused=False) for value in values.RUNS)
ANY_FILE = tuple(replace(value, refused=False) for value in values.OLD_FILES)
JSON_FILE = tuple(Value(f"{value.text}.json") for value in values.OLD_FILES)
DATA = (
    *(Value("text"), Value("run")),
    *(Value(name, True) for name in ("empty", "none", "garbage.toml", "fifo", "/dev/zero", "")),
)
# Values by destination, or by verb and destination.
PLACES: Mapping[str, Sequence[Value]] = {
    **dict.fromkeys(("json", "write", "out", "store", "export"), values.NEW_FILES),
    "campaign out": values.NEW_FOLDERS,
    "plot": values.NEW_PLOTS,
    "to": tuple(replace(value, refused=False) for value in values.NEW_FOLDERS),
    **dict.fromkeys(("run_dir", "run_dirs", "source", "baseline"), values.RUNS),
    **{f"{verb} run_dir": values.NEW_FOLDERS for verb in ("screen", "run", "train", "demo")},
    **dict.fromkeys(("persist_dir", "kept"), ANY_RUN),
    "page": tuple(replace(value, refused=False) for value in values.NEW_FILES),
    **dict.fromkeys(("costs", "phi", "reference", "config", "schedule"), values.OLD_FILES),
    "fleet": (*(Value("fleet.toml") for _ in range(8)), *values.OLD_FILES),
    "spare script": tuple(
        Value(name, True) for name in ("script.py", "text", "none.py", "", values.LONG_NAME)
    ),
    "study resume": (*ANY_FILE, *(replace(value, refused=False) for value in values.NEW_FILES)),
    "profile": (Value("kept.json"), *ANY_FILE, *JSON_FILE),
    "data": DATA,
    "serve": (Value("0"), *(Value(text, True) for text in ("-1", "65536", "", "http", "1e3"))),
    "limit": (*(Value(text) for text in ("1", "7", values.HUGE)), *values.NOT_NUMBERS),
    "name": tuple(
        Value(name) for name in ("list", "list", "reft.survival", "x", "", values.ESCAPES)
    ),
    "fault": values.FAULTS,
    "shape": values.SHAPES,
    "training_script": (
        *(Value("script.py"), Value("script.py"), Value("failing.py")),
        *(Value(name, True) for name in ("none.py", "text", "", values.LONG_NAME)),
    ),
    "script": tuple(
        Value(name, True) for name in ("script.py", "failing.py", "none.py", "", values.LONG_NAME)
    ),
    "nnodes": (Value("1"), Value("1:1"), *(Value(t, True) for t in ("0", "-1", "3:2", "x", ""))),
    "nproc_per_node": (Value("1"), *(Value(t, True) for t in ("0", "-1", "x", "gpu", values.HUGE))),
    "max_restarts": (Value("0"), *(Value(text, True) for text in ("-1", "x", "nan", ""))),
    "monitor_interval": (Value("0.1"), *(Value(text, True) for text in ("x", "nan", "-1", "inf"))),
}
# Options of torchrun beyond these are torchrun's own matter.
OF_RUN = ("nnodes", "nproc_per_node", "max_restarts", "monitor_interval", "training_script")
OF_RUN += ("run_dir", "config", "json")


@dataclass(frozen=True)
class Line:
    """A command line: its words, environment variables, and what is expected of it.

    ``stdout`` is where standard output goes: a file, a full device or a pipe that nobody reads.
    ``refused`` is a value that must be refused, ``promised`` are the files that it must have
    written if it ends with exit code 0, by option.
    """

    words: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    refused: str = ""
    promised: dict[str, str] = field(default_factory=dict)
    stdout: str = "a file"

    @property
    def verb(self) -> str:
        """The verb, empty if the command line has none that exists."""
        return self.words[0] if self.words and (self.words[0],) in {p[:1] for p in leaves()} else ""


@cache
def leaves() -> dict[Path_, argparse.ArgumentParser]:
    """Return the parser of every verb without sub-verbs, and of every sub-verb."""
    found = dict(_leaves(make_parser(), ()))
    found["run",] = run.make_parser()
    return found


def _leaves(
    parser: argparse.ArgumentParser, path: Path_
) -> list[tuple[Path_, argparse.ArgumentParser]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return [
                leaf for name, sub in action.choices.items() for leaf in _leaves(sub, (*path, name))
            ]
    return [(path, parser)]


def draw(rng: Random, *, light: bool = False) -> Line:
    """Draw a command line; one of a ``light`` run does no real work."""
    if rng.random() < 0.04:
        return _draw_odd(rng)
    paths = list(leaves())
    weights = [WEIGHTS.get(path[0], OTHER_WEIGHT) for path in paths]
    shares = {verb: sum(path[0] == verb for path in paths) for verb in {path[0] for path in paths}}
    weights = [weight / shares[path[0]] for weight, path in zip(weights, paths, strict=True)]
    (path,) = rng.choices(paths, weights)
    works = path[0] not in HEAVY or (
        not light and path[0] != "demo" and _chance(rng, WORKING_SHARE)
    )
    while True:
        line = _draw(rng, path)
        if line.refused or (works and "--full" not in line.words):  # that may take an hour
            return line


def _chance(rng: Random, share: float) -> bool:
    return rng.random() < share


def _draw_odd(rng: Random) -> Line:
    """Draw a command line without a verb that exists, or one that asks for help."""
    if rng.random() < 0.5:
        path = rng.choice(list(leaves()))
        return Line((*path, "--help"))
    words = rng.choice(((), ("",), ("no-such-verb",), (values.ESCAPES,), ("--no-such",), ("plan",)))
    return Line(words, refused="a command line without a verb")


def _draw(rng: Random, path: Path_) -> Line:
    words, refused = [*path, *BASES.get(path, "").split()], ""
    base = dict(zip(words[len(path) :: 1], words[len(path) + 1 :: 1], strict=False))
    promised = {name: base[f"--{name}"] for name in PROMISES if f"--{name}" in base}
    last: list[str] = []
    actions = [action for action in leaves()[path]._actions if _is_drawn(path[0], action)]
    positional = [action for action in actions if not action.option_strings]
    options = [action for action in actions if action.option_strings]
    chosen = rng.sample(options, min(len(options), rng.choice((0, 1, 1, 1, 2, 2, 3))))
    for action in (*chosen, *positional):
        if not action.option_strings and action.nargs == "?" and _chance(rng, 0.5):
            continue
        value = _choice(rng, values_of(path[0], action))
        if action.nargs == 0:
            words.append(action.option_strings[0])
            continue
        if not action.option_strings:
            last.append(value.text)
        else:
            words += _spelled(rng, action, value.text)
        if value.refused:
            refused = refused or f"{action.dest} {value.text[:40]!r}"
        if action.dest in PROMISES:
            promised[action.dest] = value.text
    if rng.random() < 0.04:
        words, refused = [*words, rng.choice(("--no-such-option", values.ESCAPES))], "an option"
    environment = dict([rng.choice(values.ENVIRONMENTS)] if rng.random() < 0.15 else [])
    if last and last[0].startswith("-") and path[0] != "run":
        last.insert(0, "--")
    stdout = rng.choice((FULL, CLOSED)) if _chance(rng, 0.06) else "a file"
    return Line((*words, *last), environment, refused, promised, stdout)


def _choice(rng: Random, choices: Sequence[Value]) -> Value:
    """Draw a value, as often one that may be taken as one that must be refused."""
    open_to = [value for value in choices if not value.refused]
    return rng.choice(open_to if open_to and _chance(rng, 0.5) else choices)


def _is_drawn(verb: str, action: argparse.Action) -> bool:
    if action.dest == "help" or action.nargs == argparse.REMAINDER:
        return False
    return verb != "run" or action.dest in OF_RUN


def _spelled(rng: Random, action: argparse.Action, text: str) -> list[str]:
    name = action.option_strings[0]
    apart = action.nargs is None and not text.startswith("-") and rng.random() < 0.3
    return [name, text] if apart else [f"{name}={text}"]


def values_of(verb: str, action: argparse.Action) -> Sequence[Value]:
    """Return the values to draw from for an option, by its place, choices, type and unit."""
    for place in (f"{verb} {action.dest}", action.dest):
        if place in PLACES:
            return PLACES[place]
    if action.choices is not None:
        known = [Value(str(choice)) for choice in action.choices]
        return (*known, *(Value(text, True) for text in ("", "no-such", values.ESCAPES)))
    if action.type is int:
        return values.SMALL_INTEGERS if verb in HEAVY else values.INTEGERS
    if action.type is float:
        return values.FLOATS
    unit = action.metavar if isinstance(action.metavar, str) else ""
    assert action.type is not Path, f"no values for the path {action.dest} of {verb}"
    return TYPES.get(unit, values.TEXTS)
