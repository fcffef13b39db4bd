"""``holdfast snapshots``: the snapshots of a run in memory and on disk."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from holdfast import config
from holdfast.cli.parser import deferred
from holdfast.cli.tables import print_table, say, write_json
from holdfast.errors import ConfigError
from holdfast.report.smp_status import smp_rows
from holdfast.snapshot.node import launch, supervisor

FALLBACK_FOLDER = "checkpoints"
FORMATS = ("dcp", "safetensors", "torch")  # of holdfast.snapshot.disk.export, sorted

Action = Callable[[argparse.Namespace], int]
Actions: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def register(subparsers: Actions) -> None:
    """Add the verb ``snapshots`` to the command line."""
    parser = subparsers.add_parser(
        "snapshots",
        description="Look at, verify, save and export the snapshots that a run holds in this "
        "node's memory and on disk. Nothing disturbs a run that is going on.",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    what = "print the snapshots that are held, their age, and the losses that they survive"
    _add(actions, "status", run_status, what)
    what = "check every digest; exit code 1 if a snapshot is damaged"
    _add(actions, "verify", deferred("snapshots_verify"), what)
    what = "verify all nodes' checkpoints and repair them; exit code 1 if something stays damaged"
    _add_scrub(_add(actions, "scrub", deferred("snapshots_scrub"), what))
    what = "end the SMP and free its memory; exit code 1 if none runs"
    _add(actions, "stop", run_stop, what)
    what = "save the newest snapshot in memory as a checkpoint"
    recover = _add(actions, "recover", deferred("snapshots_export", "run_recover"), what)
    text = "folder or s3:// URL to write into (default: the persist directory)"
    recover.add_argument("--to", metavar="DIR", help=text)
    what = "write a step as files of other tools' formats, one for each rank"
    _add_export(_add(actions, "export", deferred("snapshots_export", "run_export"), what))


def _add(actions: Actions, name: str, act: Action, what: str) -> argparse.ArgumentParser:
    parser = actions.add_parser(name, help=what, description=what[0].upper() + what[1:] + ".")
    add = parser.add_argument
    default = f"${config.RUN_DIR_VARIABLE}, or {config.DEFAULT_RUN_DIR}"
    text = f"directory of the run (default: {default})"
    add("--run-dir", metavar="DIR", type=Path, help=text)
    text = "folder or s3:// URL of the checkpoints (default: the one that the run was given)"
    add("--persist-dir", metavar="DIR", help=text)
    add("--json", metavar="FILE", type=Path, help="also write the result to FILE")
    parser.set_defaults(run=run, act=act)
    return parser


def _add_export(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--to", metavar="DIR", type=Path, required=True, help="folder to make and write into")
    text = "safetensors (tensors only), torch (torch.save), dcp (torch.distributed.checkpoint)"
    add("--format", choices=FORMATS, default="safetensors", help=text)
    add("--step", metavar="N", type=int, help="step to write (default: the newest intact one)")


def _add_scrub(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    repair = argparse.BooleanOptionalAction
    add("--repair", action=repair, default=True, help="write, or only say what could be repaired")
    text = "folder or s3:// URL with copies of the same checkpoints (may be given again)"
    add("--copy", metavar="DIR", action="append", default=[], help=text)
    text = "the most megabytes to read in a second (default: no limit)"
    add("--max-mb-s", metavar="N", type=int, default=0, help=text)


def run(args: argparse.Namespace) -> int:
    """Find the directories of the run, then do the action and return its exit code."""
    args.run_dir = config.run_dir(args.run_dir)
    alone = args.action == "scrub" and args.persist_dir is not None  # far from the run
    if not args.run_dir.is_dir() and not alone:
        raise ConfigError(f"there is no run directory {args.run_dir}: give --run-dir")
    args.settings = supervisor.read_settings(args.run_dir)
    # Without the run's staging folder it is the object store itself that is looked at.
    told = args.settings.directory.partition("?")[0] if args.settings is not None else None
    args.persist_dir = args.persist_dir or told or str(args.run_dir / FALLBACK_FOLDER)
    code: int = args.act(args)
    return code


def run_status(args: argparse.Namespace) -> int:
    """Print the snapshots in memory and on disk; exit code 1 if no SMP runs."""
    smp = launch.smp_status(args.run_dir)
    from holdfast.snapshot.disk.remote_checkpoints import checkpoints_at  # it imports torch

    persisted = checkpoints_at(args.persist_dir).steps()
    places = {"run_dir": str(args.run_dir), "persist_dir": str(args.persist_dir)}
    write_json(args.json, {**places, "smp": smp, "persisted": persisted})
    rows = smp_rows(smp) if smp is not None else [("SMP", f"none runs in {args.run_dir}")]
    where = f"{', '.join(map(str, persisted)) or 'none'} in {args.persist_dir}"
    rows += [("steps on disk", where), *_survived(smp, persisted)]
    print_table(("", "value"), rows)
    return 0 if smp is not None else 1


def run_stop(args: argparse.Namespace) -> int:
    """End the SMP, which discards the snapshots in its memory; exit code 1 if none runs."""
    stopped = launch.stop_smp(args.run_dir)
    write_json(args.json, {"run_dir": str(args.run_dir), "stopped": stopped})
    what = "the SMP ends and frees its memory" if stopped else "no SMP runs"
    say(f"{args.run_dir}: {what}")
    return 0 if stopped else 1


def _survived(smp: launch.Status | None, persisted: list[int]) -> list[tuple[str, str]]:
    held = smp["newest"] if smp is not None else None
    disk = f"yes: step {persisted[-1]} on disk" if persisted else "no"
    trainer = f"yes: step {held} in memory" if held is not None else disk
    node = f"only if that disk outlives it: step {persisted[-1]}" if persisted else "no"
    cluster = smp["cluster"] if smp is not None else None
    if cluster is not None and cluster["survivable"]:
        disk = node = f"yes, of {cluster['survivable']} at once: step {held} in the others' memory"
    return [
        ("survives loss of the trainer", trainer),
        ("survives loss of the SMP", disk),
        ("survives loss of the node", node),
    ]
