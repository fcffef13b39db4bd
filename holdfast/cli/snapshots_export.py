"""``holdfast snapshots recover`` and ``export``: write a snapshot into files."""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

from holdfast.cli.tables import say, write_json
from holdfast.errors import ConfigError, SmpUnavailable, SnapshotError, SnapshotLost
from holdfast.snapshot.disk import export, persist_format
from holdfast.snapshot.disk.checkpoints import Checkpoints
from holdfast.snapshot.disk.remote_checkpoints import checkpoints_at
from holdfast.snapshot.node import launch
from holdfast.snapshot.restore.full_state import full_state
from holdfast.snapshot.restore.reader import Leased, Reader, damage_of

_NEVER_PRUNE = 10**9


def run_recover(args: argparse.Namespace) -> int:
    """Save the newest intact snapshot in the SMP's memory as a checkpoint."""
    place = args.to if args.to is not None else args.persist_dir
    settings = args.settings
    with _newest(args.run_dir, None) as leased:
        if leased is None:
            raise SnapshotLost(f"the SMP of {args.run_dir} holds no intact snapshot")
        try:
            goal = checkpoints_at(place)
            goal.folder.mkdir(parents=True, exist_ok=True)
            nbytes = goal.write(
                leased.step,
                leased.parts,
                world_size=settings.world_size if settings else leased.world_size,
                first_rank=settings.first_rank if settings else leased.first_rank,
                keep=settings.keep if settings and args.to is None else _NEVER_PRUNE,
                needed=leased.needed,
            )
        except OSError as error:
            raise ConfigError(f"cannot write into {place}: {error}; give --to") from error
    path = f"{goal.address}/step-{leased.step}"
    write_json(args.json, {"step": leased.step, "path": path, "bytes": nbytes})
    say(f"step {leased.step} {'was already in' if not nbytes else 'saved as'} {path}")
    return 0


def run_export(args: argparse.Namespace) -> int:
    """Write a step as files of the chosen format, from memory if it is there, else from disk."""
    # The snapshots in memory are those of one node.
    several = len(export.checkpoints_of(args.persist_dir)) > 1
    exported = None if several else _export_from_memory(args)
    files, step, source = exported or _export_from_disk(args)
    write_json(args.json, {"step": step, "source": source, "files": list(map(str, files))})
    say(f"step {step}, from {source}:")
    for path in files:
        say(f"  {path}")
    return 0


Exported = tuple[list[Path], int, str]


def _export_from_memory(args: argparse.Namespace) -> Exported | None:
    if launch.smp_status(args.run_dir) is None:
        return None
    with _newest(args.run_dir, args.step) as leased:
        if leased is None:
            return None
        first_rank = args.settings.first_rank if args.settings else leased.first_rank
        states = export.states_of(leased, first_rank)
        return export.export(states, leased.step, args.to, args.format), leased.step, "memory"


def _export_from_disk(args: argparse.Namespace) -> Exported:
    checkpoints = export.checkpoints_of(args.persist_dir)
    steps = sorted(set.intersection(*(set(folder.steps()) for folder in checkpoints)))
    wanted = [step for step in reversed(steps) if args.step in (None, step)]
    intact = next((step for step in wanted if _all_intact(checkpoints, step)), None)
    if intact is None:
        raise SnapshotLost(
            f"{'no step' if args.step is None else f'not step {args.step}'} is intact in memory or "
            f"in {args.persist_dir} (which has {', '.join(map(str, steps)) or 'none'}): see "
            "`holdfast snapshots verify`"
        )
    folders = [folder.fetch(intact) for folder in checkpoints]
    states = chain.from_iterable(map(export.states_in, folders))
    files = export.export(states, intact, args.to, args.format)
    return files, intact, ", ".join(f"{folder.address}/step-{intact}" for folder in checkpoints)


def _all_intact(checkpoints: list[Checkpoints], step: int) -> bool:
    return all(_is_intact(folder, step) for folder in checkpoints)


def _is_intact(checkpoints: Checkpoints, step: int) -> bool:
    try:
        damage = persist_format.damage_of(checkpoints.fetch(step))
    except OSError as error:
        damage = str(error)
    if damage:
        say(f"{checkpoints.address}/step-{step} is damaged: {damage}", file=sys.stderr)
    return not damage


@contextmanager
def _newest(run_dir: Path, step: int | None) -> Iterator[Leased | None]:
    """Lease the newest intact clean step, or ``step``, so that it is kept while it is read."""
    try:
        with Reader(run_dir) as reader:
            found = (
                _intact(held, reader) for held in reader.clean_steps() if step in (None, held.step)
            )
            yield next(filter(None, found), None)
    except ConnectionError as error:
        raise SmpUnavailable(f"the SMP of {run_dir} ended meanwhile: {error}") from error


def _intact(held: Leased, reader: Reader) -> Leased | None:
    """Return a step with its ranks' full states; if it is damaged, print that and return None."""
    try:
        found = full_state(held, reader)
    except SnapshotError as error:
        say(f"step {held.step} in memory is damaged: {error}", file=sys.stderr)
        return None
    damage = [what for part in found.parts if (what := damage_of(part))]
    for what in damage:
        say(f"step {held.step} in memory is damaged: {what}", file=sys.stderr)
    return None if damage else found
