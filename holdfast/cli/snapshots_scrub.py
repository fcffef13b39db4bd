"""``holdfast snapshots scrub``: verify checkpoints at rest, and repair what is damaged."""

import argparse
import re
import time
from pathlib import Path

from holdfast.cli.progress import share_progress
from holdfast.cli.tables import print_table, write_json
from holdfast.errors import ConfigError
from holdfast.snapshot.disk.object_store import is_url, local_folder
from holdfast.snapshot.disk.scrub import BEYOND, REPAIRABLE, UNPROTECTED, Finding, Scrub

_UNPROTECTED = """\
Only one node's checkpoints are here. If those of other nodes belong here, they are lost. Without
them there is no parity, and damage is repaired from a --copy or not at all. What protects such a
run: snapshots in memory with parities, an object store (persist_dir="s3://..."), or a folder that
all nodes share, with one scrub of all of it."""


def run(args: argparse.Namespace) -> int:
    """Scrub all checkpoints; return 0 if all are intact or repaired, else 1."""
    if args.max_mb_s < 0:
        raise ConfigError(f"--max-mb-s {args.max_mb_s} must be positive, or 0 for no limit")
    place, copies = args.persist_dir, list(args.copy)
    if is_url(place) and args.settings is not None and args.settings.directory.startswith(place):
        # What is staged is scrubbed; the object store has copies of it.
        place, copies = str(local_folder(args.settings.directory)), [*copies, place]
    if is_url(place):
        raise ConfigError(f"{place}: a scrub reads folders; `snapshots verify` reads a store")
    folder = Path(place).absolute()
    folder = folder.parent if re.fullmatch(r"node-\d+", folder.name) else folder
    with share_progress("scrubbing") as progress:
        scrub = Scrub(
            folder,
            now_s=time.time(),
            copies=copies,
            repair=args.repair,
            bytes_s=args.max_mb_s * 10**6,
            progress=lambda done: progress(min(1.0, done / total), f"{done / 1e6:.0f} MB"),
        )
        total = scrub.total_bytes()
        found = list(scrub.run())
    left = [each for each in found if each.verdict in (BEYOND, REPAIRABLE)]
    read = {"steps": scrub.steps, "bytes": scrub.nbytes}
    rows = [each._asdict() for each in found]
    write_json(args.json, {"persist_dir": str(folder), **read, "found": rows, "left": len(left)})
    if found:
        print_table(Finding._fields, found, right=("step",))
    if any(each.verdict == UNPROTECTED for each in found):
        print(_UNPROTECTED)
    print(f"{len(scrub.steps)} steps, {scrub.nbytes / 1e6:.1f} MB read, {len(left)} damages left")
    return 1 if left else 0
