"""``holdfast snapshots``: a run's snapshots in memory and on disk, while it runs and after."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from holdfast import config
from holdfast.cli import snapshots_export, snapshots_verify
from holdfast.cli.quantities import shown_duration, shown_size
from holdfast.cli.tables import check_writable, print_table, write_json
from holdfast.errors import ConfigError
from holdfast.snapshot.disk.checkpoints import Checkpoints
from holdfast.snapshot.node import launch, supervisor

FALLBACK_FOLDER = "checkpoints"

Action = Callable[[argparse.Namespace], int]
Actions: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def register(subparsers: Actions) -> None:
    """Add the verb ``snapshots`` to the command line."""
    parser = subparsers.add_parser(
        "snapshots",
        help="look at, verify, save and export a run's snapshots",
        description="Look at, verify, save and export the snapshots that a run holds in this "
        "node's memory and on disk. Nothing disturbs a run that is going on.",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    status = _add(actions, "status", "what is held, how old it is, and what it survives")
    status.set_defaults(run=_with_places(run_status))
    verify = _add(actions, "verify", "check every digest; exit code 1 names what is damaged")
    verify.set_defaults(run=_with_places(snapshots_verify.run))
    stop = _add(actions, "stop", "end the SMP and free its memory; exit code 1 if none runs")
    stop.set_defaults(run=_with_places(run_stop))
    recover = _add(actions, "recover", "save the newest snapshot in memory as a checkpoint")
    recover.add_argument("--to", metavar="DIR", type=Path, help="default: the persist directory")
    recover.set_defaults(run=_with_places(snapshots_export.run_recover))
    export = _add(actions, "export", "write a step for stock tools: one file a rank")
    snapshots_export.add_arguments(export)
    export.set_defaults(run=_with_places(snapshots_export.run_export))


def _add(actions: Actions, name: str, what: str) -> argparse.ArgumentParser:
    parser = actions.add_parser(name, help=what, description=what[0].upper() + what[1:] + ".")
    parser.add_argument(
        "--run-dir",
        metavar="DIR",
        type=Path,
        help=f"directory of the run (default: ${config.RUN_DIR_VARIABLE}, or "
        f"{config.DEFAULT_RUN_DIR})",
    )
    parser.add_argument(
        "--persist-dir",
        metavar="DIR",
        type=Path,
        help="folder with step-<n> folders (default: as the run was told)",
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the result to FILE")
    return parser


def _with_places(action: Action) -> Action:
    def run(args: argparse.Namespace) -> int:
        check_writable(args.json)
        args.run_dir = config.run_dir(args.run_dir)
        if not args.run_dir.is_dir():
            raise ConfigError(f"there is no run directory {args.run_dir}: give --run-dir")
        args.settings = supervisor.read_settings(args.run_dir)
        told = Path(args.settings.directory) if args.settings is not None else None
        args.persist_dir = args.persist_dir or told or args.run_dir / FALLBACK_FOLDER
        return action(args)

    return run


def run_status(args: argparse.Namespace) -> int:
    """Print the snapshots in memory and on disk; exit code 1 if no SMP runs."""
    smp = launch.smp_status(args.run_dir)
    persisted = Checkpoints(args.persist_dir).steps()
    if args.json is not None:
        places = {"run_dir": str(args.run_dir), "persist_dir": str(args.persist_dir)}
        write_json(args.json, {**places, "smp": smp, "persisted": persisted})
    rows = _smp_rows(smp) if smp is not None else [("SMP", f"none runs in {args.run_dir}")]
    where = f"{', '.join(map(str, persisted)) or 'none'} in {args.persist_dir}"
    rows += [("steps on disk", where), *_survived(smp, persisted)]
    print_table(("", "value"), rows)
    return 0 if smp is not None else 1


def run_stop(args: argparse.Namespace) -> int:
    """End the SMP, which discards the snapshots in its memory; exit code 1 if none runs."""
    stopped = launch.stop_smp(args.run_dir)
    if args.json is not None:
        write_json(args.json, {"run_dir": str(args.run_dir), "stopped": stopped})
    what = "the SMP ends and frees its memory" if stopped else "no SMP runs"
    print(f"{args.run_dir}: {what}")
    return 0 if stopped else 1


def _smp_rows(smp: launch.Status) -> list[tuple[str, str]]:
    begun = max((step for steps in smp["steps"] for step in steps), default=-1)
    newest = "none yet"
    if smp["newest"] is not None:
        behind = f"{begun - smp['newest']} steps begun since"
        newest = f"step {smp['newest']}, {shown_duration(smp['age_s'])} old, {behind}"
    speed = smp["copy_bytes_s"]
    rows = [
        ("SMP", f"process {smp['pid']}, up {shown_duration(smp['uptime_s'])}"),
        ("state", smp["state"]),
        ("newest clean snapshot", newest),
        ("clean steps", ", ".join(map(str, smp["clean"][0])) or "none"),
        ("ranks connected", f"{sum(smp['connected'])} of {len(smp['connected'])}"),
        ("committed, aborted", f"{smp['commits']}, {smp['aborts']}"),
        ("memory", shown_size(smp["bytes"])),
        ("last copy", f"{shown_size(speed)}/s" if speed else "unknown"),
        ("training waited", shown_duration(smp["stall_s"]) + " in all"),
    ]
    return rows + _cluster_rows(smp) + _persister_rows(smp)


def _cluster_rows(smp: launch.Status) -> list[tuple[str, str]]:
    cluster = smp["cluster"]
    if cluster is None:
        return [("other nodes", "none: this one is on its own")]
    states = (f"{node}: {state}" for node, state in sorted(smp["peers"].items()))
    return [
        ("nodes", f"this is {cluster['node']} of {cluster['nodes']}, epoch {cluster['epoch']}"),
        ("other nodes", ", ".join(states) or "not heard of yet"),
        ("manifests of other nodes", shown_size(cluster["mirror_bytes"])),
        ("strangers refused", str(smp["refused"])),
    ]


def _persister_rows(smp: launch.Status) -> list[tuple[str, str]]:
    persister = smp["persister"]
    if persister is None:
        return [("persister", "none: the run has no persist_dir")]
    text = f"every {persister['every']} steps, {persister['restarts']} restarts"
    rows = [("persister", f"process {persister['pid']}, {text}")]
    if smp["leased"]:
        rows.append(("being read", f"step {', '.join(map(str, smp['leased']))}"))
    failed = smp["persist_failed"]
    if failed is not None:
        rows.append(("last failure", f"step {failed['step']}: {failed['error']}"))
    return rows


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
