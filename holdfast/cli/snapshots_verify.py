"""``holdfast snapshots verify``: check every digest of snapshots in memory and on disk."""

import argparse
from collections.abc import Iterator

from holdfast.cli.tables import print_table, write_json
from holdfast.errors import ConfigError, SmpUnavailable
from holdfast.snapshot.disk import persist_format
from holdfast.snapshot.disk.remote_checkpoints import checkpoints_at
from holdfast.snapshot.node import launch
from holdfast.snapshot.restore.reader import Reader, damage_of

_COLUMNS = ("where", "step", "verdict")


def run(args: argparse.Namespace) -> int:
    """Print a verdict for every clean step and checkpoint; return 1 if any is damaged, else 0."""
    checked = [*_in_memory(args), *_on_disk(args)]
    if not checked:
        raise ConfigError(
            f"no snapshot is held for {args.run_dir} and none is in {args.persist_dir}: "
            "give --run-dir or --persist-dir"
        )
    damaged = [row for row in checked if row["damage"]]
    write_json(args.json, {"checked": checked, "damaged": len(damaged)})
    rows = [(row["where"], row["step"], row["damage"] or "intact") for row in checked]
    print_table(_COLUMNS, rows, right=("step",))
    print(f"{len(checked)} steps, {len(damaged)} damaged")
    return 1 if damaged else 0


def _in_memory(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    if launch.smp_status(args.run_dir) is None:
        return
    try:
        with Reader(args.run_dir) as reader:
            for leased in reader.clean_steps():
                found = ((part.rank, damage_of(part)) for part in leased.parts)
                damage = [f"local rank {rank}: {what}" for rank, what in found if what]
                yield {"where": "memory", "step": leased.step, "damage": "; ".join(damage)}
    except ConnectionError as error:
        raise SmpUnavailable(f"the SMP of {args.run_dir} ended meanwhile: {error}") from error


def _on_disk(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    checkpoints = checkpoints_at(args.persist_dir)
    for step in reversed(checkpoints.steps()):
        try:
            damage = persist_format.damage_of(checkpoints.fetch(step))
        except OSError as error:
            if step not in checkpoints.steps():
                continue  # removed by the run meanwhile
            damage = str(error)
        yield {"where": f"{checkpoints.address}/step-{step}", "step": step, "damage": damage}
