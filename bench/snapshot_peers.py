"""A snapshot every step, by holdfast and by its peers: stall, slowdown, memory, time until safe.

    python -m bench.snapshot_peers [--gb 0.5 2 4] [--candidates …] [--peers-venv DIR] [--json]

States are a GPT's parameters and Adam moments in fp32; a step is its forward and backward over
``--tokens`` bytes and a fused AdamW. Each candidate works in a process of its own, with a deadline,
and is killed before the machine runs out of memory; one that is not installed, does not fit or
fails is a row with the reason. Correctness first: what is restored must be bit-equal, in the same
process and after SIGKILL of the trainer; nothing of a candidate is timed before.

- *stall*: what a step waits for its save, the last one's end included; *idle*: nothing else runs.
- *slowdown*: the loop with a save a step against the loop without, A B A B. A sample's last save
  may end after it, untimed, which favours those that write slowly.
- *copy*: a save alone until training may go on, as % of ``np.copyto`` of equal bytes into touched
  memory by one thread.
- *held*: memory besides training's, at most; the page cache does not count.
- *safe*: a save alone until it is as safe as it gets; *disk*: bytes a second until it is synced.

The peers' packages go into a virtual environment of their own, which sees this one's torch.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from itertools import takewhile
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench.rows import record
from bench.snapshot_candidates import CANDIDATES, Candidate, clean_up
from bench.snapshot_worker import RESULT_NAME, SAVED_NAME
from holdfast.memory import available_bytes

PACKAGES = {
    "lm-resiliency": ["0.2.0"],
    "torchsnapshot": ["0.1.0"],
    "nvidia-resiliency-ext": ["0.7.0", "0.4.1"],  # the newest that pip can install is taken
    "dlrover": ["0.6.1"],
}
NOT_COMPARABLE = {
    "torchft": "torchft 0.2.0 saves nothing in a step: Manager calls send_checkpoint only while "
    "another replica group recovers, and on CPU that copies no tensor (http_transport._to_cpu)"
}
EVERY = [*CANDIDATES, *NOT_COMPARABLE]
ROOT = Path(__file__).parents[1]
GIGABYTE = 10**9
POLL_S = 0.2
INSTALL_LIMIT_S = 300
TABLE_WIDTH = 130
# Of a process with torch; and what must stay free for the rest of the machine.
OVERHEAD_BYTES, RESERVE_BYTES = 10**9, 5 * 10**8
GRADIENTS = 1 / 3
PAPER_TORCHSNAPSHOT, PAPER_CHECKFREQ = 14.11, 106.02
Row = dict[str, Any]


class Failed(Exception):
    """A candidate gave no figures; the message says why."""


def needed_bytes(kind: type[Candidate], nbytes: int) -> int:
    """The most memory that a candidate will need for a state of ``nbytes``.

    While it restores the state is there once more; before, gradients and a copy to time memcpy.
    """
    return round(nbytes * max(2 + kind.copies, 2 + GRADIENTS)) + OVERHEAD_BYTES


@dataclass(frozen=True)
class Peers:
    """A virtual environment with the peers' packages.

    ``missing`` says why one is not there, ``older`` why it is not there in its newest version.
    """

    python: str
    missing: dict[str, str]
    older: dict[str, str] = field(default_factory=dict)


def prepare_peers(folder: Path) -> Peers:
    """Make the environment if it is not there, and install what it lacks."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=False, symlinks=True)
    site = next(folder.glob("lib/python*/site-packages"))
    parents = [path for path in sys.path if path.endswith("site-packages")]
    lines = [f"import site; site.addsitedir({path!r})" for path in parents if path != str(site)]
    (site / "peers-parent.pth").write_text("\n".join(lines) + "\n")
    missing, older = dict[str, str](), dict[str, str]()
    for name, versions in PACKAGES.items():
        tries = (_installed(python, f"{name}=={number}") for number in versions)
        reasons = list(takewhile(bool, tries))
        if len(reasons) == len(versions):
            missing[name] = reasons[-1]
        elif reasons:
            older[name] = reasons[0]
    return Peers(str(python), missing, older)


def _installed(python: Path, requirement: str) -> str:
    command = [str(python), "-m", "pip", "install", "--quiet", requirement]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_LIMIT_S)
    except subprocess.TimeoutExpired:
        return f"{requirement} was not installed within {INSTALL_LIMIT_S} s"
    said = done.stderr.strip().splitlines() or ["pip said nothing"]
    return f"{requirement} cannot be installed: {said[-1]}" if done.returncode else ""


def python_for(kind: type[Candidate], peers: Peers | None) -> str:
    """The interpreter that has the candidate's package.

    Raises:
        Failed: there is none; says why.
    """
    if kind.package in PACKAGES and peers is not None:
        if kind.package in peers.missing:
            raise Failed(peers.missing[kind.package])
        return peers.python
    try:
        version(kind.package)
    except PackageNotFoundError:
        raise Failed(f"{kind.package} is not installed: give --peers-venv") from None
    return sys.executable


def run_worker(command: Sequence[str], log: Path, limit_s: float, expected: int) -> None:
    """Run one phase of a worker to its end; nothing that it started outlives this.

    Raises:
        Failed: it took too long, the machine ran short of memory, or it ended otherwise.
    """
    with open(log, "ab") as output:
        worker = subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=output, start_new_session=True
        )
    deadline = time.monotonic() + limit_s
    try:
        while worker.poll() is None:
            if time.monotonic() > deadline:
                raise Failed(f"not done within {limit_s:g} s")
            if available_bytes() < RESERVE_BYTES:
                raise Failed(f"the machine had less than {RESERVE_BYTES} bytes of memory left")
            time.sleep(POLL_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()
    if worker.returncode != expected:
        raise Failed(f"exit code {worker.returncode}: {last_line(log)}")


def last_line(log: Path) -> str:
    """What a worker said last."""
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else "no output"


def measured(name: str, nbytes: int, args: argparse.Namespace, peers: Peers | None) -> Row:
    """The figures of one candidate.

    Raises:
        Failed: it gave none; says why.
    """
    kind = CANDIDATES[name]
    python, needed, room = python_for(kind, peers), needed_bytes(kind, nbytes), available_bytes()
    if needed > room - RESERVE_BYTES:
        raise Failed(f"does not fit: {needed} bytes are needed and {room} are available")
    folder = Path(tempfile.mkdtemp(prefix="snapshot-peers-", dir=args.dir))
    options = {"folder": folder, "bytes": nbytes}
    options |= {option: getattr(args, option) for option in ("tokens", "steps", "pairs")}
    words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    module = [python, "-W", "ignore", "-m", "bench.snapshot_worker"]
    log = folder / "worker.log"
    try:
        run_worker([*module, "save", name, *words], log, args.limit_s, -signal.SIGKILL)
        if not (folder / SAVED_NAME).exists():
            raise Failed(f"it was killed before it had saved: {last_line(log)}")
        run_worker([*module, "measure", name, *words], log, args.limit_s, 0)
        figures: Row = json.loads((folder / RESULT_NAME).read_text())
        return figures
    finally:
        clean_up(folder)


def derived(figures: Row) -> Row:
    """Speeds and shares, from times and bytes."""
    nbytes = figures["state_bytes"]
    speeds = {
        "memcpy_gb_s": nbytes / figures["memcpy_s"] / 1e9,
        "copy_gb_s": nbytes / figures["copy_s"] / 1e9,
        "save_gb_s": nbytes / figures["safe_s"] / 1e9,
        "of_memcpy": figures["memcpy_s"] / figures["copy_s"],
        "slowdown": figures["ratio"] - 1,
        "held_copies": figures["held_bytes"] / nbytes,
    }
    if figures["on_disk"]:
        speeds["disk_gb_s"] = nbytes / figures["durable_s"] / 1e9
    return {name: round(value, 4) for name, value in speeds.items()}


def filesystem_of(folder: Path) -> str:
    """The type of the file system that it lies on."""
    mounts = {part.mountpoint: part.fstype for part in psutil.disk_partitions(all=True)}
    found = next((p for p in (folder, *folder.parents) if str(p) in mounts), None)
    return mounts[str(found)] if found else "unknown"


def candidates_by_size(
    args: argparse.Namespace, peers: Peers | None, console: Console
) -> Iterator[Row]:
    """Measure all; every one is recorded as soon as it is there."""
    cases = [(gb, name) for gb in args.gb for name in args.candidates]
    with Progress(console=console, disable=args.json) as progress:
        task = progress.add_task("", total=len(cases))
        for gb, name in cases:
            progress.update(task, description=f"{gb:g} GB {name}")
            row: Row = {"gb": gb, "candidate": name, "steps": args.steps, "tokens": args.tokens}
            row["filesystem"] = filesystem_of(Path(args.dir))
            row |= told(name, round(gb * GIGABYTE), args, peers)
            record("snapshot_peers", row)
            yield row
            progress.advance(task)


def told(name: str, nbytes: int, args: argparse.Namespace, peers: Peers | None) -> Row:
    """Return a candidate's figures, or why there are none."""
    if name in NOT_COMPARABLE:
        return {"not_comparable": NOT_COMPARABLE[name]}
    older = {} if peers is None else peers.older
    noted = {"newer": older[p]} if (p := CANDIDATES[name].package) in older else {}
    try:
        figures = measured(name, nbytes, args, peers)
    except Failed as reason:
        return {"not_measured": str(reason)} | noted
    return figures | derived(figures) | noted


COLUMNS = {
    "stall, ms": lambda row: f"{1e3 * row['stall_s']:.1f}",
    "idle, ms": lambda row: f"{1e3 * row['copy_s']:.1f}",
    "slowdown": lambda row: f"{row['slowdown']:+.1%}",
    "copy / memcpy": lambda row: f"{row['of_memcpy']:.0%}",
    "held, × state": lambda row: f"{row['held_copies']:.2f}",
    "safe, s": lambda row: f"{row['safe_s']:.3f}",
    "disk, GB/s": lambda row: f"{row['disk_gb_s']:.2f}" if row["on_disk"] else "–",
    "SIGKILL": lambda row: "bit-equal" if row["survives_sigkill"] else "lost",
}


def table(rows: Sequence[Row]) -> Table:
    """All rows that have figures, by size."""
    drawn = Table("GB", "candidate", *COLUMNS, title="a snapshot every step")
    for row in (row for row in rows if "stall_s" in row):
        cells = [cell(row) for cell in COLUMNS.values()]
        drawn.add_row(f"{row['gb']:g}", row["candidate"], *cells)
    return drawn


def failures(rows: Sequence[Row]) -> list[str]:
    """What was not measured, or only in an older version, and why."""
    kinds = ("not_measured", "not_comparable", "newer")
    reasons = [(row, row[kind]) for row in rows for kind in kinds if kind in row]
    return [f"{row['gb']:g} GB, {row['candidate']}: {reason}" for row, reason in reasons]


def comparisons(rows: Sequence[Row]) -> list[str]:
    """Holdfast against each peer of the same size: stalls, and saving speeds as the paper has them.

    The paper's are of 24 data-parallel paths whose storage is shared; these of one.
    """
    lines = []
    for ours in (row for row in rows if row["candidate"] == "holdfast" and "stall_s" in row):
        peers = [r for r in rows if r["gb"] == ours["gb"] and "stall_s" in r and r is not ours]
        lines += [_compared(ours, peer) for peer in peers if peer["candidate"] != "holdfast-disk"]
    return lines


def _compared(ours: Row, peer: Row) -> str:
    paper = {"torchsnapshot": PAPER_TORCHSNAPSHOT, "checkfreq": PAPER_CHECKFREQ}
    published = paper.get(peer["candidate"])
    text = (
        f"{ours['gb']:g} GB, holdfast / {peer['candidate']}: stall "
        f"{ours['stall_s'] / peer['stall_s']:.3f}×, idle {ours['copy_s'] / peer['copy_s']:.2f}×, "
        f"saving speed {ours['save_gb_s'] / peer['save_gb_s']:.2f}×"
    )
    if peer["on_disk"]:
        text += f" ({ours['save_gb_s'] / peer['disk_gb_s']:.2f}× until synced)"
    return text + (f"; the paper has {published:g}×" if published else "")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gb", type=float, nargs="+", default=[0.5, 2, 4], help="of state, 10⁹ B")
    parser.add_argument("--candidates", nargs="+", choices=EVERY, default=EVERY)
    parser.add_argument("--peers-venv", type=Path, help="made, and filled, if it is not there")
    parser.add_argument("--dir", default=tempfile.gettempdir(), help="on a disk, for what is saved")
    parser.add_argument("--tokens", type=int, default=128, help="a step")
    parser.add_argument("--steps", type=int, default=3, help="a sample")
    parser.add_argument("--pairs", type=int, default=5, help="of samples")
    parser.add_argument("--limit-s", type=float, default=300.0, help="of a candidate's phase")
    parser.add_argument("--json", action="store_true", help="rows only, one JSON object a line")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, record, compare; 1 if a candidate failed."""
    args = parse(argv)
    if filesystem_of(Path(args.dir)) in ("tmpfs", "ramfs"):
        raise SystemExit(f"{args.dir} is in memory: name a folder on a disk with --dir")
    # Whoever ends this bench ends its workers, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    console = Console(stderr=True, width=None if sys.stderr.isatty() else TABLE_WIDTH)
    peers = prepare_peers(args.peers_venv.absolute()) if args.peers_venv else None
    rows = list(candidates_by_size(args, peers, console))
    if not args.json:
        console.print(table(rows))
        for line in (*comparisons(rows), *failures(rows)):
            console.print(line, highlight=False, markup=False)
    return int(any("not_measured" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
