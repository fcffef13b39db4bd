"""``holdfast demo``: train without and with injected faults, and compare the final weights."""

import argparse
import time
from dataclasses import replace
from pathlib import Path
from statistics import median_high

from rich.console import Console

from holdfast.cli.progress import TrainingProgress, sparkline, training_progress
from holdfast.cli.tables import check_writable, print_table, write_json
from holdfast.errors import ConfigError
from holdfast.inject.schedule import NO_RANK, Fault
from holdfast.torchrun import interruptible
from holdfast_lab.cli import say
from holdfast_lab.cli.train import described
from holdfast_lab.trainer.agent import source
from holdfast_lab.trainer.gpt import GPTConfig
from holdfast_lab.trainer.launch import RunResult, train
from holdfast_lab.trainer.random_storms import random_storm
from holdfast_lab.trainer.settings import Settings
from holdfast_lab.trainer.storm import (
    Anatomy,
    Outcome,
    anatomy,
    check,
    detection_line,
    outcomes,
    shipped_storm,
)

MODEL = GPTConfig(layers=4, heads=4, width=256, context=128)
STEPS, RANKS = 60, 3
COLUMNS = ("fault", "step", "rank", "what", "where", "true → corrupted", "seen by", "rung", "ms")


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the verb ``demo`` to the command line."""
    parser = subparsers.add_parser(
        "demo",
        description="Train a byte-level GPT on the standard library's source with 3 ranks, each on "
        "a host of its own, once calm and once through a storm of bit flips, INF, NaN, damaged "
        "state, killed processes and the loss of a whole host, and compare the final weights and "
        "optimizer state bit for bit. Exit code 0 only if they are equal. The hosts are made on "
        "this machine: network namespaces where root and iproute2 allow, else process groups.",
    )
    storm = parser.add_argument_group("the storm")
    storm.add_argument(
        "--random-storm", metavar="SEED", type=int, help="draw the faults instead of the shipped"
    )
    storm.add_argument(
        "--low-flips",
        metavar="N",
        type=int,
        default=0,
        help="add N flips of the lowest mantissa bits (needs --random-storm), which only "
        "--audit 1.0 repairs",
    )
    storm.add_argument(
        "--no-protect", action="store_true", help="run the storm with nothing to catch it"
    )
    storm.add_argument(
        "--audit", metavar="SHARE", type=float, default=0.0, help="share of steps computed twice"
    )
    storm.add_argument(
        "--at-rest",
        metavar="SHARE",
        type=float,
        default=1.0,
        help="share of the state at rest that is checked in each step (default 1; 0: none, so that "
        "a changed weight is trained on)",
    )
    parser.add_argument(
        "--queued-checks",
        action="store_true",
        help="verify products as those of a GPU are: by checks queued behind them, whose verdicts "
        "are read once a step, which is repeated if one was wrong",
    )
    parser.add_argument(
        "--nodes",
        metavar="N",
        type=int,
        choices=(1, RANKS),
        default=RANKS,
        help=f"{RANKS} hosts (default), or 1: then none is lost",
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights and data (default 0)")
    parser.add_argument(
        "--run-dir", metavar="DIR", type=Path, help="default: runs/demo-<date>-<time>"
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write everything to FILE")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run both trainings and print the results; return 0 only if the weights are equal."""
    interruptible()
    check_writable(args.json)
    console = Console()
    sizes = {"steps": STEPS, "ranks": RANKS, "nodes": args.nodes}
    shares = {"audit": args.audit, "at_rest": args.at_rest, "queued_checks": args.queued_checks}
    settings = Settings(mode="bare", **sizes, seed=args.seed, **shares, model=MODEL)
    faults = _storm(args, settings)
    base = args.run_dir or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
    stormy = replace(settings, mode="unprotected" if args.no_protect else "guarded")
    say(
        console,
        f"A {MODEL.layers}-layer GPT, {_hosts(settings)}, {settings.steps} steps, "
        f"{len(faults)} faults; everything is kept in {base}",
    )
    with source() as agents, training_progress(console) as progress:
        watch = TrainingProgress(progress, "calm", STEPS)
        calm = train(base / "calm", settings, watch=watch, source=agents)
        watch = TrainingProgress(progress, "storm", STEPS)
        storm = train(base / "storm", stormy, faults, watch=watch, source=agents)
    return _report(args, console, calm, storm)


def _hosts(settings: Settings) -> str:
    return described(settings) if settings.nodes > 1 else f"{settings.ranks} ranks on one host"


def _storm(args: argparse.Namespace, settings: Settings) -> list[Fault]:
    names = anatomy(settings.model)
    if args.low_flips < 0:
        raise ConfigError(f"--low-flips {args.low_flips} must be at least 0")
    if args.random_storm is None:
        if args.low_flips:
            raise ConfigError(f"--low-flips {args.low_flips} needs --random-storm SEED")
        faults = shipped_storm(nodes=settings.nodes)
    else:
        faults = _random_storm(args, settings, names)
    sizes = {"steps": settings.steps, "ranks": settings.ranks, "nodes": settings.nodes}
    check(faults, names, **sizes)
    return faults


def _random_storm(args: argparse.Namespace, settings: Settings, names: Anatomy) -> list[Fault]:
    try:
        return random_storm(
            args.random_storm,
            ops=names.ops,
            modules=names.norms,
            state=names.weights_and_moments,
            steps=settings.steps,
            ranks=settings.ranks,
            nodes=settings.nodes,
            low_flips=args.low_flips,
        )
    except ValueError as error:
        raise ConfigError(f"--low-flips {args.low_flips}: {error}; ask for fewer") from error


def _report(args: argparse.Namespace, console: Console, calm: RunResult, storm: RunResult) -> int:
    found = outcomes(storm.events)
    print_table(COLUMNS, [_row(o) for o in found], title="The storm", right=("step", "rank", "ms"))
    equal = calm.digests == storm.digests
    for name, result in (("calm", calm), ("storm", storm)):
        last = result.losses[max(result.losses)]
        console.print(f"loss {name:6}{sparkline(result.losses)} {last:.4f}", highlight=False)
    if not args.no_protect:
        _print_line(console, storm)
    _print_costs(console, calm, storm)
    protected = "unprotected" if args.no_protect else "protected"
    if equal:
        verdict = "EQUAL: weights and optimizer state are those of the calm run, bit for bit"
    else:
        verdict = f"NOT EQUAL: {_ending(storm)}"
    say(console, f"\nverdict ({protected}): {verdict}", style="bold")
    if args.json is not None:
        write_json(args.json, _as_json(args, calm, storm, found, equal))
    return 0 if equal else 1


def _row(outcome: Outcome) -> tuple[str, ...]:
    what = outcome.kind + (f" {outcome.bit}" if outcome.bit is not None else "")
    values = "" if outcome.true is None else f"{outcome.true:.3g} → {outcome.corrupted:.3g}"
    where = f"{outcome.op or 'process'} ({outcome.site})"
    return (
        str(outcome.fault + 1),
        str(outcome.step),
        str(outcome.rank) if outcome.rank != NO_RANK else "",
        what,
        where,
        values,
        outcome.seen_by,
        outcome.rung or ("below the line" if outcome.below_line else ""),
        f"{outcome.after_s * 1000:.1f}",
    )


def _print_line(console: Console, storm: RunResult) -> None:
    line = detection_line(storm.ranks[0]["coverage"])
    if line is None:
        return
    say(
        console,
        f"the line: a change of less than {line.median:.1e} × the row's rms (median over all "
        f"matmuls, {line.worst:.1e} at worst) is less than rounding errors; in fp32 that is a flip "
        f"below mantissa bit {line.mantissa_bit} of a typical element. No checksum detects it, but "
        "`--audit 1.0` does, which computes every step twice.",
    )


def _print_costs(console: Console, calm: RunResult, storm: RunResult) -> None:
    calm_s, storm_s = (median_high(result.step_seconds.values()) for result in (calm, storm))
    say(
        console,
        f"time: calm {calm.seconds:.1f} s, storm {storm.seconds:.1f} s with restarts; median step "
        f"{calm_s * 1e3:.0f} ms calm, {storm_s * 1e3:.0f} ms in the storm",
    )


def _ending(storm: RunResult) -> str:
    worst = max(storm.losses.values(), key=lambda v: (v != v, v))
    if not all(rank["finite"] for rank in storm.ranks):
        return "the weights hold NaN or INF"
    return f"other weights; highest loss on the way {worst:.4g}"


def _as_json(
    args: argparse.Namespace,
    calm: RunResult,
    storm: RunResult,
    found: list[Outcome],
    equal: bool,
) -> dict[str, object]:
    return {
        "equal": equal,
        "protected": not args.no_protect,
        "random_storm": args.random_storm,
        "audit": args.audit,
        "at_rest": args.at_rest,
        "faults": [outcome.as_dict() for outcome in found],
        "runs": {
            name: {
                "run_dir": str(result.run_dir),
                "seconds": result.seconds,
                "digests": result.digests,
                "losses": result.losses,
                "step_seconds": result.step_seconds,
            }
            for name, result in (("calm", calm), ("storm", storm))
        },
    }
