"""A rank of a training run: ``python -m holdfast_lab.trainer.worker RUN_DIR`` under torchrun."""

import ctypes
import gc
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from holdfast import config, events
from holdfast.digest.tensors import state_digest
from holdfast.errors import ConfigError
from holdfast.guard import Guard
from holdfast.inject.injector import Injector, fired_faults
from holdfast.inject.schedule import load_schedule
from holdfast.launch import rank
from holdfast.protection import Protection, protect
from holdfast.replay.rerun import MicroStep
from holdfast.report.run_files import FATAL_NAME, METRICS_NAME, SCHEDULE_NAME
from holdfast.snapshot.client.snapshots import Snapshots
from holdfast.step.buckets import Buckets
from holdfast_lab.emulation.stand_in import cpu_as_device
from holdfast_lab.trainer.data import ByteLoader, read_corpus
from holdfast_lab.trainer.gpt import GPT, loss, make_optimizer, make_schedule
from holdfast_lab.trainer.settings import Settings

MODEL_NAME = "model.safetensors"
CHECKPOINTS_NAME = "checkpoints"
LAUNCHER_VARIABLE = "HOLDFAST_LAUNCHER_PID"

Batch = tuple[torch.Tensor, torch.Tensor]


class Worker:
    """The model, its data, its optimizer and its fault injector on one rank."""

    def __init__(self, run_dir: Path, node_dir: Path, settings: Settings) -> None:
        self.run_dir, self.node_dir, self.settings = run_dir, node_dir, settings
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(settings.seed)
        self.model = GPT(settings.model)
        self.optimizer = make_optimizer(self.model, settings.lr, settings.weight_decay)
        self.scheduler = make_schedule(self.optimizer, settings.warmup_steps, settings.steps)
        self.loader = ByteLoader(
            read_corpus(Path(settings.data) if settings.data else None),
            context=settings.model.context,
            batch_size=settings.batch_size,
            seed=settings.seed,
            rank=self.rank,
            world_size=self.ranks,
        )
        self.ddp = DistributedDataParallel(self.model)
        torch.manual_seed(settings.seed * self.ranks + self.rank + 1)
        self.injector = self._make_injector()

    def _make_injector(self) -> Injector:
        path = self.run_dir / SCHEDULE_NAME
        faults = load_schedule(path) if path.exists() else []
        # A rank may have injected faults on another host, which may be lost by now.
        ledgers = [self.run_dir / events.LEDGER_NAME, *host_ledgers(self.run_dir)]
        fired = set().union(*(fired_faults(ledger, self.rank) for ledger in ledgers))
        return Injector(self.model, faults, rank=self.rank, fired=fired, optimizer=self.optimizer)

    def _pass(self, batch: Batch) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.settings.dtype == "bf16"):
            value = loss(self.ddp, *batch)
        torch.autograd.backward(value)
        return value.detach()

    def injected_pass(self, batch: Batch) -> torch.Tensor:
        """Run forward and backward, with the faults that are due at this step."""
        with self.injector.step(events.current_step()):
            return self._pass(batch)

    def train_bare(self) -> None:
        """Train in a plain loop without holdfast; faults of the schedule are injected."""
        # As a Guard does, so that the sums of a guarded run can be compared bit for bit.
        Buckets(self.ddp).settle(MicroStep(self.ddp, self._pass, self.loader.batch(0)))
        for step, batch in enumerate(self.loader):
            if step == self.settings.steps:
                return
            started_s = time.perf_counter()
            events.set_step(step)
            self.optimizer.zero_grad(set_to_none=True)
            value = self.injected_pass(batch)
            norm = clip_grad_norm_(self.model.parameters(), self.settings.clip_grad_norm)
            self.optimizer.step()
            self.scheduler.step()
            self.report(step + 1, float(value), float(norm), time.perf_counter() - started_s)

    def train_guarded(self, protection: Protection) -> dict[str, object]:
        """Train under protection; return the coverage report and the cost of the snapshots."""
        snapshots = Snapshots(
            self.model,
            self.optimizer,
            scheduler=self.scheduler,
            loader=self.loader,
            run_dir=self.node_dir,
            **self._persistence(),
        )
        self.injector.settle = snapshots.finish
        guard = Guard(
            self.ddp,
            self.optimizer,
            snapshots=snapshots,
            clip_grad_norm=self.settings.clip_grad_norm,
            audit=self.settings.audit,
            at_rest=self.settings.at_rest,
            collectives=True,
            seed=self.settings.seed,
        )
        with guard:
            for batch in guard.batches(self.loader, steps=self.settings.steps):
                started_s = time.perf_counter()
                value = guard.step(self.injected_pass, batch)
                taken_s = time.perf_counter() - started_s
                self.report(guard.steps_done, float(value), guard.grad_norm, taken_s)
        return {
            "coverage": protection.report().as_dict(),
            "snapshot_stall_s": snapshots.stall_s,
            "snapshot_bytes": snapshots.copied_bytes,
        }

    def _persistence(self) -> dict[str, Any]:
        every = self.settings.persist_every
        if not every:
            return {}
        # The run's directory is used, because a host's own directory is lost with the host.
        return {"persist_dir": self.run_dir / CHECKPOINTS_NAME, "persist_every": every}

    def report(self, steps_done: int, value: float, norm: float, taken_s: float) -> None:
        """Write a line of metrics on rank 0."""
        if self.rank == 0:
            line = {"step": steps_done, "loss": value, "grad_norm": norm, "seconds": taken_s}
            line["time_s"] = time.time()
            with (self.run_dir / METRICS_NAME).open("a") as file:
                file.write(json.dumps(line) + "\n")

    def save_result(self, extra: dict[str, object]) -> None:
        """Save the digests of the final state on every rank, and the weights on rank 0."""
        if self.rank == 0:
            weights = {name: p.detach().contiguous() for name, p in self.model.named_parameters()}
            save_file(weights, self.run_dir / (MODEL_NAME + ".part"))
            os.replace(self.run_dir / (MODEL_NAME + ".part"), self.run_dir / MODEL_NAME)
        result = {
            "model": state_digest(self.model.state_dict()),
            "optimizer": state_digest(self.optimizer.state_dict()),
            "scheduler": state_digest(self.scheduler.state_dict()),
            "finite": all(bool(p.isfinite().all()) for p in self.model.parameters()),
            **extra,
        }
        part = self.run_dir / f"result-{self.rank}.part"
        part.write_text(json.dumps(result))
        os.replace(part, result_path(self.run_dir, self.rank))


def result_path(run_dir: Path, rank: int) -> Path:
    """Return the file into which a rank writes its result."""
    return run_dir / f"result-{rank}.json"


def host_ledgers(run_dir: Path) -> list[Path]:
    """List the ledgers of all emulated hosts of a run, including those of lost hosts."""
    return sorted(run_dir.glob(f"host-*/{events.LEDGER_NAME}"))


def prepare_ledger(node_dir: Path) -> None:
    """Create a host's ledger (its file of events), complete before other processes can see it."""
    draft = node_dir / f"{events.LEDGER_NAME}.part"
    events.Ledger(draft).close()
    os.replace(draft, node_dir / events.LEDGER_NAME)


def run(run_dir: Path) -> None:
    """Train with the settings of the run directory, from the latest snapshot if there is one.

    Each of several hosts has a directory of its own, ``HOLDFAST_RUN_DIR``, for its ledger and its
    snapshot process. ``run_dir`` has the settings, the metrics and the results.
    """
    _end_with_launcher()
    settings = Settings.load(run_dir)
    node_dir = config.run_dir() if settings.nodes > 1 else run_dir
    events.open_ledger(node_dir)
    with _process_group(settings.ranks):
        _train(Worker(run_dir, node_dir, settings))


def _train(worker: Worker) -> None:
    settings = worker.settings
    with ExitStack() as stack:
        extra: dict[str, object] = {}
        if settings.queued_checks:
            stack.enter_context(cpu_as_device())
        if settings.mode == "guarded":
            extra = worker.train_guarded(stack.enter_context(protect(worker.model)))
        else:
            stack.enter_context(_named_only(worker.model, settings.mode))
            worker.train_bare()
        worker.save_result(extra)


def end_with_parent() -> None:
    """Let the kernel kill this process when its parent ends, in whatever way."""
    pr_set_pdeathsig = 1
    if ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")


def _end_with_launcher() -> None:
    """End this rank with its launcher, so that it does not write into a resumed run."""
    end_with_parent()
    launcher = os.environ.get(LAUNCHER_VARIABLE)
    # The parent of a forked rank is the standby process, which the launcher has started.
    if launcher is not None and int(launcher) not in (os.getppid(), rank.starter):
        sys.exit(f"the launcher, process {launcher}, is gone: nothing to train for")


@contextmanager
def _named_only(model: nn.Module, mode: str) -> Iterator[None]:
    """Name the matmuls of an unprotected model for the injector, which a bare run lacks."""
    if mode == "bare":
        yield
    else:
        with protect(model, verify=False):
            yield


@contextmanager
def _process_group(ranks: int) -> Iterator[None]:
    # All emulated hosts share this machine's cores. The number of threads affects rounding.
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))
    dist.init_process_group("gloo", timeout=timedelta(seconds=config.timeout_s()))
    try:
        yield
    finally:
        # A DDP wrapper is part of a reference cycle with the group. Unless it is collected, gloo's
        # threads are not joined, and one that frees a tensor at the interpreter's end aborts it.
        gc.collect()
        dist.destroy_process_group()


def main(run_dir: Path) -> None:
    """Run the rank; leave an error that no restart can correct in a file for the launcher."""
    fatal = run_dir / FATAL_NAME
    if fatal.exists():
        sys.exit(2)
    try:
        run(run_dir)
    except ConfigError as error:
        part = fatal.with_suffix(f".{os.environ['RANK']}.part")
        part.write_text(str(error))
        os.replace(part, fatal)
        raise


if __name__ == "__main__":
    main(Path(sys.argv[1]))
