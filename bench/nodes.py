"""A data-parallel run on several nodes of this machine: processes to be killed and replaced.

A node is its ranks and its SMP, with a run directory of its own; all share the loopback address.
Ranks are forked from a process that has imported torch already: starting one costs little.
"""

import json
import multiprocessing
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import psutil

from bench import nodes_rank
from bench.nodes_rank import Work
from holdfast import config
from holdfast.snapshot.node import launch

PATIENCE_S = 60.0
_POLL_S = 0.01
_SMP = "holdfast.snapshot.node.smp"


@dataclass
class Cluster:
    """``nodes`` nodes of ``local`` ranks each, which do ``work``."""

    work: Work
    nodes: int
    local: int = 1
    attempt: int = -1
    ranks: list[ForkServerProcess] = field(default_factory=list)
    replaced: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.replaced = [0] * self.nodes
        self.directory.mkdir(parents=True, exist_ok=True)

    @property
    def directory(self) -> Path:
        """Where the run keeps everything."""
        return self.work.directory

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.nodes * self.local

    def run_dir(self, node: int) -> Path:
        """Where the node's SMP is; another one for each replacement."""
        return self.directory / f"node-{node}.{self.replaced[node]}"

    def start(self, target: Callable[..., None] = nodes_rank.run) -> None:
        """Start every rank."""
        self.attempt += 1
        context = multiprocessing.get_context("forkserver")
        # torch.optim imports torch._dynamo at its first use: most of what starting a rank costs.
        preload = [nodes_rank.__name__, "torch.distributed.fsdp", "torch._dynamo"]
        context.set_forkserver_preload(preload)
        for rank in range(self.world):
            log = self.directory / f"rank-{rank}-{self.attempt}.log"
            given = (self.work, self.attempt, self._place(rank), log)
            self.ranks.append(context.Process(target=target, args=given, daemon=True))
        for process in self.ranks:
            process.start()

    def _place(self, rank: int) -> dict[str, str]:
        node, local = divmod(rank, self.local)
        return {
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "RANK": str(rank),
            "WORLD_SIZE": str(self.world),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(self.local),
            config.RUN_DIR_VARIABLE: str(self.run_dir(node)),
            config.TIMEOUT_VARIABLE: str(config.timeout_s()),
        }

    def said(self, rank: int, attempt: int | None = None) -> list[dict[str, Any]]:
        """What a rank has said so far."""
        which = self.attempt if attempt is None else attempt
        path = self.directory / f"rank-{rank}-{which}.jsonl"
        text = path.read_text() if path.exists() else ""
        complete = text.rpartition("\n")[0]
        return [json.loads(line) for line in complete.splitlines()]

    def log(self, rank: int) -> str:
        """The last words of a rank."""
        path = self.directory / f"rank-{rank}-{self.attempt}.log"
        return f"rank {rank}: {path.read_text()[-3000:] if path.exists() else 'no log'}"

    def logs(self) -> str:
        """The last words of every rank."""
        return "\n".join(map(self.log, range(self.world)))

    def committed(self) -> int:
        """The newest step that any rank knew to be committed."""
        found = [line.get("committed") for rank in range(self.world) for line in self.said(rank)]
        return max((step for step in found if step is not None), default=-1)

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Wait until something holds.

        Raises:
            AssertionError: a rank failed, or it took too long.
        """
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            failed = [rank for rank in self.ranks if rank.exitcode not in (None, 0)]
            assert not failed, f"{what}: {self.logs()}"
            assert time.monotonic() < deadline, f"{what}: not within {PATIENCE_S} s"
            time.sleep(_POLL_S)

    def until_committed(self, step: int) -> None:
        """Wait until some rank knows that ``step`` is committed."""
        self.until(lambda: self.committed() >= step, f"step {step} was not committed")

    def smp(self, node: int) -> psutil.Process:
        """A node's SMP."""
        status = launch.smp_status(self.run_dir(node))
        assert status is not None, f"node {node} has no SMP"
        return psutil.Process(int(status["pid"]))

    def kill_trainers(self) -> None:
        """SIGKILL every rank, as torchrun does with what is left of a broken run."""
        for rank in self.ranks:
            rank.kill()
        for rank in self.ranks:
            rank.join(PATIENCE_S)
        self.ranks.clear()

    def lose(self, nodes: Iterable[int]) -> None:
        """Kill nodes whole, ranks and SMP, then all other ranks; empty nodes take their place."""
        for node in nodes:
            smp = self.smp(node)
            for rank in self.ranks[node * self.local : (node + 1) * self.local]:
                rank.kill()
            smp.kill()
            self.replaced[node] += 1
        self.kill_trainers()

    def finish(self) -> list[dict[str, Any]]:
        """Wait for the end; what every rank said last.

        Raises:
            AssertionError: a rank failed, or it took too long.
        """
        for rank in self.ranks:
            rank.join(2 * PATIENCE_S)
        codes = [rank.exitcode for rank in self.ranks]
        assert codes == [0] * self.world, self.logs()
        self.ranks.clear()
        return [self.said(rank)[-1] for rank in range(self.world)]

    def digests(self, rank: int) -> dict[int, str]:
        """The digest of a rank's state after every step.

        Raises:
            AssertionError: two attempts came to different ones.
        """
        found: dict[int, str] = {}
        for attempt in range(self.attempt + 1):
            for line in self.said(rank, attempt):
                if "step" in line:
                    assert found.setdefault(line["step"], line["digest"]) == line["digest"], line
        return found

    def close(self) -> None:
        """Leave nothing behind."""
        self.kill_trainers()
        for path in self.directory.glob("node-*"):
            launch.stop_smp(path)
        # A rank may have been killed while it started an SMP, which does not answer yet and may be
        # about to fork its daemon: look again until there is none.
        deadline = time.monotonic() + PATIENCE_S
        while (left := self._smps()) and time.monotonic() < deadline:
            for process in left:
                process.kill()
            psutil.wait_procs(left, PATIENCE_S)

    def _smps(self) -> list[psutil.Process]:
        """The processes that are, or start, an SMP of this run."""
        return [
            process
            for process in psutil.process_iter(["cmdline"])
            if _SMP in (words := process.info["cmdline"] or ())
            and any(str(self.directory) in word for word in words)
        ]
