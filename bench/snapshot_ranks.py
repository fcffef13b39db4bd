"""How much longer a training step takes with a snapshot in every step: one rank, DDP and FSDP2.

    python -m bench.snapshot_ranks [--modes one ddp fsdp2] [--mb 300] [--tokens 96] [--nodes 1]

Each rank is a process with one thread, which trains a GPT of ``--mb`` of parameters and Adam
moments; ``ddp`` and ``fsdp2`` are two ranks that talk over gloo. Correctness first: the ranks of a
first life save, note their digests and kill themselves; those of a second restore, bit for bit,
what differed before, and are the ones that are timed. Samples of ``--steps`` steps without and with
a snapshot in every step take turns (A B A B) in the same processes, and all ranks begin and end
each sample together. With ``--nodes 2`` every rank is a node of its own, with an SMP of its own,
and the two protect each other by a parity.

- *stall*: what a step waits in ``begin`` and ``finish``; of all ranks, the longest.
- *rank_cpu_s*, *smp_cpu_s*: CPU time that a snapshot takes in the ranks' processes, beyond that of
  the bare steps, and in the SMPs; sums over all of them.
- *state_bytes*: of one rank; with ``ddp`` each rank holds all of the state.
- *others_cpu*: cores that other processes of this machine used meanwhile; the row is worth less the
  higher it is.
"""

import argparse
import gc
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from bench.paired import paired
from bench.rows import record
from bench.snapshot_memory import smp_of
from bench.snapshot_peers import last_line
from bench.snapshot_worker import Training, nbytes_of
from bench.stacks import show_on_demand, whereabouts
from holdfast import config
from holdfast.snapshot.client.snapshots import Snapshots
from holdfast.snapshot.node.launch import LOG_NAME, stop_smp
from holdfast.snapshot.node.supervisor import end_with_parent

RANKS = {"one": 1, "ddp": 2, "fsdp2": 2}
GOALS = {"one": 1.10, "ddp": 1.05, "fsdp2": 1.10}
SAVED_STEPS = 3
WARM_UP = 2  # pairs that are not timed: the first snapshot into each slot maps its pages
LIMIT_S, POLL_S = 600.0, 0.05  # of one life
PATIENCE = timedelta(seconds=60)
Row = dict[str, Any]


class DdpTraining(Training):
    """The same model on all ranks."""

    def laid_out(self, model: Any) -> nn.Module:
        return DistributedDataParallel(model, forward_sync_buffers=False)


class FsdpTraining(Training):
    """A model that all ranks divide, block by block."""

    def laid_out(self, model: Any) -> nn.Module:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        whole: nn.Module = model
        return whole

    def tensors(self) -> list[torch.Tensor]:
        return [getattr(tensor, "_local_tensor", tensor) for tensor in super().tensors()]


TRAININGS = {"one": Training, "ddp": DdpTraining, "fsdp2": FsdpTraining}


class Rank:
    """The training of one rank, its snapshots, and what they cost."""

    def __init__(self, args: argparse.Namespace, seed: int) -> None:
        self.training = TRAININGS[args.mode](round(args.mb * 1e6), args.tokens, seed)
        self.training.optimizer.zero_grad(set_to_none=True)
        self.run_dir = config.run_dir()
        parities: Any = {"parities": 1} if args.nodes > 1 and config.world_size() > 1 else {}
        model, optimizer = self.training.model, self.training.optimizer
        self.snapshots = Snapshots(model, optimizer, run_id="bench", **parities)
        self.saves, self.steps = SAVED_STEPS, args.steps
        self.stalls_s: list[float] = []
        self.cpu_s = {"bare": 0.0, "saving": 0.0}

    def save(self) -> None:
        """A training step and a snapshot of the state before it."""
        self.saves += 1
        at_s = [time.perf_counter()]
        self.snapshots.begin(self.saves)
        at_s.append(time.perf_counter())
        self.training.forward_backward()
        at_s.append(time.perf_counter())
        self.snapshots.finish()
        self.stalls_s.append(at_s[1] - at_s[0] + time.perf_counter() - at_s[2])
        self.training.optimizer.step()

    def sample(self, saving: bool) -> None:
        """Steps that all ranks end together."""
        started_s = time.process_time()
        for _ in range(self.steps):
            self.save() if saving else self.training.step()
        together()
        self.cpu_s["saving" if saving else "bare"] += time.process_time() - started_s

    def settle(self) -> None:
        """No snapshot of one sample is left to be done in the other's time."""
        self.snapshots.wait_committed()
        together()

    def measure(self, pairs: int) -> Row:
        """Time both loops; figures of this rank, and sums and maxima over all."""
        smp = psutil.Process(smp_of(self.run_dir))
        for saving in (False, True) * WARM_UP:
            self.settle()
            self.sample(saving)
        self.settle()
        self.stalls_s.clear()
        self.cpu_s = dict.fromkeys(self.cpu_s, 0.0)
        started_s, machine_s, smp_s = time.perf_counter(), busy_s(), cpu_s(smp)
        own_s, load = time.process_time(), os.getloadavg()[0]
        without, with_one = partial(self.sample, False), partial(self.sample, True)
        timed = paired(without, with_one, pairs=pairs, warmup=0, before=self.settle)
        self.settle()
        wall_s, machine_s = time.perf_counter() - started_s, busy_s() - machine_s
        smp_s, own_s = cpu_s(smp) - smp_s, time.process_time() - own_s
        extra_s = self.cpu_s["saving"] - self.cpu_s["bare"]
        count, stalls = len(self.stalls_s), self.stalls_s
        smps_s = smp_s if config.local_rank() == 0 else 0.0
        all_own_s, all_smp_s, all_extra_s = (sum(every(x)) for x in (own_s, smps_s, extra_s))
        return timed | {
            "step_s": timed["baseline_s"] / self.steps,
            "stall_s": max(every(statistics.median(stalls))),
            "stall_max_s": max(every(max(stalls))),
            "rank_cpu_s": all_extra_s / count,
            "smp_cpu_s": all_smp_s / count,
            "commits": self.snapshots.commits,
            "saves": self.saves - SAVED_STEPS,
            "others_cpu": (machine_s - all_own_s - all_smp_s) / wall_s,
            "load_average": [load, os.getloadavg()[0]],
        }


def together() -> None:
    """Wait for the other ranks."""
    if distributed.is_initialized():
        distributed.barrier()


def every(value: float) -> list[float]:
    """Return this value of all ranks."""
    if not distributed.is_initialized():
        return [value]
    found: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, value)
    return found


def busy_s() -> float:
    """Return the CPU time of all processes of this machine."""
    times = psutil.cpu_times()
    return sum(times) - times.idle - times.iowait - times.guest - times.guest_nice


def cpu_s(process: psutil.Process) -> float:
    """Return the CPU time of a process."""
    times = process.cpu_times()
    return float(times.user + times.system)


def save(rank: Rank, folder: Path) -> None:
    """Take snapshots, note the digest of the newest state, and die by SIGKILL."""
    for step in range(1, SAVED_STEPS + 1):
        rank.training.step()
        rank.snapshots.begin(step)
        if rank.snapshots.wait_committed() != step:
            raise SystemExit(f"the snapshot of step {step} was not committed")
    (folder / f"digest-{config.rank()}").write_text(rank.training.digest())
    deadline = time.monotonic() + PATIENCE.total_seconds()
    while len(list(folder.glob("digest-*"))) < config.world_size() and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def check(rank: Rank, folder: Path) -> None:
    """The gate: what is restored must be what the first life saved, and differ from what is here.

    Raises:
        SystemExit: it is not; nothing is timed.
    """
    saved, before = (folder / f"digest-{config.rank()}").read_text(), rank.training.digest()
    restored = rank.snapshots.restore()
    if before == saved or restored != SAVED_STEPS or rank.training.digest() != saved:
        raise SystemExit(f"step {restored} was restored, and not bit for bit what was saved")


def be_rank(args: argparse.Namespace) -> None:
    """Live one life of one rank."""
    end_with_parent()
    show_on_demand()
    torch.set_num_threads(1)
    if config.world_size() > 1:
        meeting = f"file://{args.folder}/meeting-{args.life}"
        place = {"rank": config.rank(), "world_size": config.world_size()}
        distributed.init_process_group("gloo", init_method=meeting, timeout=PATIENCE, **place)
    live(args)
    # Only without the model: if DDP's reducer is the last to let go of the group, it joins gloo's
    # threads while it has Python's lock, for which one of them waits if it frees a tensor.
    gc.collect()
    if distributed.is_initialized():
        distributed.destroy_process_group()


def live(args: argparse.Namespace) -> None:
    """Save and die in the first life; restore and be timed in the second."""
    rank = Rank(args, seed=args.life)
    if args.life == 0:
        save(rank, args.folder)
    check(rank, args.folder)
    row = rank.measure(args.pairs) | {"state_bytes": nbytes_of(rank.training.tensors())}
    if config.rank() == 0:
        (args.folder / "row.json").write_text(json.dumps(row))
    rank.snapshots.close(finished=True)


def run_life(args: argparse.Namespace, mode: str, folder: Path, life: int) -> None:
    """Start all ranks and wait for their end; none outlives this.

    Raises:
        SystemExit: a rank ended otherwise than it should, or not in time; says where all are.
    """
    count, expected = RANKS[mode], -signal.SIGKILL if life == 0 else 0
    words = [sys.executable, "-W", "ignore", "-m", "bench.snapshot_ranks", "--mode", mode]
    words += ["--folder", str(folder), "--life", str(life)]
    for name in ("mb", "tokens", "steps", "pairs", "nodes"):
        words += [f"--{name}", str(getattr(args, name))]
    logs = [folder / f"rank-{rank}.log" for rank in range(count)]
    ranks = [
        subprocess.Popen(words, env=place(args, rank, count, folder), stdout=log, stderr=log)
        for rank, log in enumerate(path.open("ab") for path in logs)
    ]
    try:
        if trouble := awaited(ranks, expected):
            smps = [last_line(log) for log in folder.glob(f"node-*/{LOG_NAME}")]
            said = f"{mode}, life {life}: {trouble}; the SMPs said last: {smps}"
            raise SystemExit(f"{said}\n{whereabouts(ranks, logs)}")
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def awaited(ranks: Sequence["subprocess.Popen[bytes]"], expected: int) -> str:
    """Wait until all have ended with the expected code; return what went wrong, or ``""``.

    All are watched at once: gloo waits five times its limit for a rank that ended before it had
    connected, and nobody would learn from that rank why.
    """
    deadline = time.monotonic() + LIMIT_S
    while (codes := [process.poll() for process in ranks]) != [expected] * len(ranks):
        if failed := [rank for rank, code in enumerate(codes) if code not in (None, expected)]:
            return f"rank {failed[0]} ended with exit code {codes[failed[0]]}"
        if time.monotonic() > deadline:
            return f"not done within {LIMIT_S:g} s"
        time.sleep(POLL_S)
    return ""


def place(args: argparse.Namespace, rank: int, count: int, folder: Path) -> dict[str, str]:
    """Return the environment of a rank, as torchrun would set it."""
    local = count if args.nodes == 1 else 1
    given = {"RANK": rank, "WORLD_SIZE": count, "LOCAL_RANK": rank % local}
    given |= {"LOCAL_WORLD_SIZE": local, "OMP_NUM_THREADS": 1, "GLOO_SOCKET_IFNAME": "lo"}
    given |= {config.RUN_DIR_VARIABLE: folder / f"node-{rank // local}"}
    return os.environ | {name: str(value) for name, value in given.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and record every mode; 1 if a goal was missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--modes", nargs="+", choices=RANKS, default=list(RANKS))
    parser.add_argument("--mb", type=float, default=300, help="of state in all, 10⁶ bytes")
    parser.add_argument("--tokens", type=int, default=96, help="of a rank's step")
    parser.add_argument("--steps", type=int, default=10, help="of a sample")
    parser.add_argument("--pairs", type=int, default=12, help="of samples")
    parser.add_argument("--nodes", type=int, choices=(1, 2), default=1, help="of ddp and fsdp2")
    for name, kind in {"mode": str, "folder": Path, "life": int}.items():
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.mode:
        be_rank(args)
        return 0
    # Whoever ends this bench ends its ranks and SMPs, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    met = [measured(args, mode) for mode in args.modes]
    return int(not all(met))


def measured(args: argparse.Namespace, mode: str) -> bool:
    """Record the row of a mode; return whether its goal was met."""
    with tempfile.TemporaryDirectory(prefix="snapshot-ranks-") as name:
        folder = Path(name)
        try:
            for life in (0, 1):
                run_life(args, mode, folder, life)
            found: Row = json.loads((folder / "row.json").read_text())
        finally:
            for run_dir in folder.glob("node-*"):
                stop_smp(run_dir)
    row = {"mode": mode, "ranks": RANKS[mode], "nodes": args.nodes, "tokens": args.tokens}
    row |= {"steps": args.steps, "goal": GOALS[mode], "met": found["ratio"] <= GOALS[mode]}
    record("snapshot_ranks", row | {k: rounded(value) for k, value in found.items()})
    return bool(row["met"])


def rounded(value: Any) -> Any:
    """Return a float with five digits after the point, anything else as it is."""
    return round(value, 5) if isinstance(value, float) else value


if __name__ == "__main__":
    sys.exit(main())
