"""What is shown and measured on a CUDA device, one stage after the other.

    python -m bench.gpu [--only 3,4] [--again] [--list] [--rehearse] [--state FILE] [--json FILE]

Each stage runs in a process of its own under a limit of time, and its rows are kept as they come:
in ``bench/results/gpu.jsonl``, and in the state file, by which a later call skips what has passed
with the same commit, code and kind of device. The sequence stops at the first wrong result, not at
a goal that was missed, and ends in a table of the goals.

``--rehearse`` goes through the stages at toy sizes with CPU in the place of the device, which finds
mistakes in the stages themselves; it measures nothing.

Exit codes: 0 if all is right and every goal is met, 1 if a result was wrong, 2 for bad input, 3
without a CUDA device, 4 if a goal was missed or not measured, 70 if a stage ended in an error that
is no verdict, 130 if interrupted.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.gpu import process
from bench.gpu.process import FAILED, LATE, RIGHT, WRONG, Outcome
from bench.gpu.stage import Stage
from bench.gpu.stages import BUILD_S, STAGES
from bench.gpu.state import State
from bench.rows import record
from holdfast.cli.tables import check_writable, print_table, say, write_json
from holdfast.errors import ConfigError

MET, WRONG_RESULT, BAD_INPUT, NO_DEVICE, MISSED, DEFECT = 0, 1, 2, 3, 4, 70
INTERRUPTED = 130
TOTAL_S = 2400 - BUILD_S
UNREHEARSED = "not rehearsed"
CODES = {WRONG: WRONG_RESULT, FAILED: DEFECT}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the stages that are asked for; return the exit code."""
    args = _parser().parse_args(arguments)
    if args.stage:
        return process.serve(_stage(args.stage), args.rows, rehearsed=args.rehearse)
    try:
        check_writable(args.json)
        wanted = [_stage(int(n)) for n in args.only.split(",")] if args.only else list(STAGES)
    except (ConfigError, ValueError) as error:
        say(f"bench.gpu: {error}", file=sys.stderr)
        return BAD_INPUT
    if args.list:
        print_table(("stage", "name", "limit, s"), [(s.number, s.name, s.limit_s) for s in STAGES])
        return MET
    if not (args.rehearse or torch.cuda.is_available()):
        say("bench.gpu measures a CUDA device and there is none here: use --rehearse")
        return NO_DEVICE
    try:
        return _run(args, wanted)
    except ConfigError as error:
        say(f"bench.gpu: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        say("bench.gpu: interrupted; a later call goes on with the stage that was running")
        return INTERRUPTED


def _run(args: argparse.Namespace, wanted: Sequence[Stage]) -> int:
    name = "gpu-rehearsal.json" if args.rehearse else "gpu.json"
    device = "cpu" if args.rehearse else torch.cuda.get_device_name()
    state = State(args.state or Path("build") / name, device)
    if args.again:
        state.forget(stage.number for stage in wanted)
    ends_s = time.monotonic() + TOTAL_S
    for stage in wanted:
        outcome = state.of(stage.number)
        if outcome.status == RIGHT:
            say(f"stage {stage.number}, {stage.name}: passed before", flush=True)
            continue
        if args.rehearse and stage.unrehearsed:
            state.keep(stage.number, Outcome(UNREHEARSED, stage.unrehearsed))
            continue
        say(f"stage {stage.number}, {stage.name}: at most {stage.limit_s:g} s", flush=True)
        outcome = _advance(stage, outcome, state, ends_s, args)
        if outcome.status in CODES:
            break
    code = _code(state, wanted, rehearsed=args.rehearse)
    _show(state, rehearsed=args.rehearse)
    write_json(args.json, {"exit_code": code, "device": device, **_as_dict(state, args.rehearse)})
    return code


def _advance(
    stage: Stage, before: Outcome, state: State, ends_s: float, args: argparse.Namespace
) -> Outcome:
    """Run a stage, from the cases that it had recorded when its time ran out, and keep its rows."""
    known = before.rows if before.status == LATE else []
    limit_s = min(stage.limit_s, ends_s - time.monotonic())
    outcome = process.launched(stage, known, limit_s, rehearsed=args.rehearse)
    state.keep(stage.number, outcome)
    if not args.rehearse:
        for row in outcome.rows[len(known) :]:
            record("gpu", {"stage": stage.number, **row, "device": state.device})
    return outcome


def _code(state: State, wanted: Sequence[Stage], *, rehearsed: bool) -> int:
    found = {state.of(stage.number).status for stage in wanted}
    for status, code in CODES.items():
        if status in found:
            return code
    goals = [] if rehearsed else [(stage, goal) for stage in wanted for goal in stage.goals]
    met = all(goal.met(state.of(stage.number).rows) for stage, goal in goals)
    return MET if met and LATE not in found else MISSED


def _goals(state: State, *, rehearsed: bool) -> list[dict[str, Any]]:
    """Return every goal with what was found; after a rehearsal nothing was."""
    listed = []
    for stage in STAGES:
        rows = [] if rehearsed else state.of(stage.number).rows
        for goal in stage.goals:
            found = goal.found(rows)
            verdict = "met" if goal.met(rows) else "MISSED"
            sign = "at least" if goal.at_least else "at most"
            shown = "" if found is None else goal.shown.format(found)
            listed.append(
                {
                    "stage": stage.number,
                    "goal": goal.name,
                    "limit": f"{sign} {goal.limit:g}",
                    "found": shown,
                    "verdict": "not measured" if found is None else verdict,
                }
            )
    return listed


def _as_dict(state: State, rehearsed: bool) -> dict[str, Any]:
    stages = {stage.number: state.of(stage.number).as_dict() for stage in STAGES}
    return {"stages": stages, "goals": _goals(state, rehearsed=rehearsed)}


def _show(state: State, *, rehearsed: bool) -> None:
    outcomes = [(stage, state.of(stage.number)) for stage in STAGES]
    rows = [(s.number, s.name, o.status, f"{o.seconds:.0f}", o.message) for s, o in outcomes]
    print_table(("stage", "name", "result", "s", ""), rows, title="stages", right=("stage", "s"))
    goals = [list(goal.values()) for goal in _goals(state, rehearsed=rehearsed)]
    print_table(("stage", "goal", "limit", "found", ""), goals, title="goals", right=("stage",))


def _stage(number: int) -> Stage:
    for stage in STAGES:
        if stage.number == number:
            return stage
    raise ConfigError(f"there is no stage {number}: give numbers of 1 to {len(STAGES)}")


def _parser() -> argparse.ArgumentParser:
    description = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser("python -m bench.gpu", description=description)
    add = parser.add_argument
    add("--only", metavar="LIST", default="", help="numbers of stages, e.g. 3,4")
    add("--again", action="store_true", help="also run what has passed")
    add("--list", action="store_true", help="list the stages")
    add("--rehearse", action="store_true", help="toy sizes on CPU; nothing is measured")
    add("--state", metavar="FILE", type=Path, help="default: build/gpu.json")
    add("--json", metavar="FILE", type=Path, help="also write everything to FILE")
    add("--stage", type=int, help=argparse.SUPPRESS)
    add("--rows", type=Path, help=argparse.SUPPRESS)
    return parser
