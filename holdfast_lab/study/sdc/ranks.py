"""Three data-parallel ranks, one of them on an unhealthy node, that train under each defence."""

import gc
import os
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from holdfast import config, events
from holdfast.digest.tensors import state_digest
from holdfast.errors import HoldfastError
from holdfast.events import EventKind
from holdfast.guard import Guard
from holdfast.protection import protect
from holdfast_lab.emulation.device import UnhealthyDevice
from holdfast_lab.emulation.profile import (
    BURST_EVERY_STEPS,
    BURST_STEPS,
    Rhythm,
    node_profile,
)
from holdfast_lab.study.sdc.subjects import LARGEST_NORM, Size, Trainee, device_for, distance, text
from holdfast_lab.trainer.data import ByteLoader
from holdfast_lab.trainer.gpt import loss

RANKS, UNHEALTHY = 3, 1
UNPROTECTED, CHECKSUMS, SPIKES = "unprotected", "checksums", "spike statistics"
RERUN, SHADOW, LADDER = "rerun every step", "shadow every step", "full ladder"
DEFENCES = (UNPROTECTED, CHECKSUMS, SPIKES, RERUN, SHADOW, LADDER)
# The shares of steps that are repeated, and that are shadowed.
GUARDED = {SPIKES: (0.0, 0.0), RERUN: (1.0, 0.0), SHADOW: (0.0, 1.0), LADDER: (0.0, 1.0)}
PROTECTED = (CHECKSUMS, LADDER)
WRONG_PER_STEP = 2.0

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Job:
    """A training: its defence and the node of rank 1 (0 for a healthy one)."""

    defence: str
    node: int = 0
    persistent: bool = False


@dataclass
class Outcome:
    """The outcome of a training.

    Attributes:
        stopped: Reason why the training stopped early; empty if it did not.
        losses: Losses of rank 0.
        equal: True if weights and optimizer are those of the healthy training, bit for bit.
        distance: ‖θ' − θ‖₂ to the healthy training.
        struck: Number of wrong values.
        events: Number of events of each kind, over all ranks.
    """

    steps: int
    stopped: str
    losses: list[float]
    equal: bool
    distance: float
    struck: int
    events: Counter[str] = field(default_factory=Counter)
    evicted: list[int] = field(default_factory=list)


class Training:
    """The training on one rank, from the same weights as on all others."""

    def __init__(self, size: Size, seed: int) -> None:
        self.trainee = Trainee(size, seed=seed)
        self._loader = ByteLoader(
            text(),
            context=size.model.context,
            batch_size=size.batch,
            seed=seed,
            rank=dist.get_rank(),
            world_size=RANKS,
        )
        self.ddp = DistributedDataParallel(self.trainee.model)
        for _ in range(2):  # DDP lays its buckets out anew after the first pass
            self.forward_backward(self._loader.batch(0))

    def forward_backward(self, batch: Batch) -> torch.Tensor:
        """Compute the loss of a batch and reduce its gradients."""
        value = loss(self.ddp, *batch)
        torch.autograd.backward(value)
        return value.detach()

    def steps(self, defence: str, steps: int) -> Iterator[float]:
        """Yield the loss of each step under a defence.

        Raises:
            UncorrectableFault: A step could not be confirmed.
        """
        optimizer = self.trainee.optimizer
        if defence not in GUARDED:
            for step in range(steps):
                events.set_step(step)
                optimizer.zero_grad()
                value = self.forward_backward(self._loader.batch(step))
                clip_grad_norm_(self.ddp.parameters(), LARGEST_NORM)
                optimizer.step()
                yield float(value)
            return
        audit, shadow = GUARDED[defence]
        guard = Guard(self.ddp, optimizer, clip_grad_norm=LARGEST_NORM, audit=audit, shadow=shadow)
        for step in range(steps):
            yield float(guard.step(self.forward_backward, self._loader.batch(step)))

    def digest(self) -> str:
        """Return the digest of weights and optimizer."""
        parts = (self.trainee.model, self.trainee.optimizer)
        return state_digest([part.state_dict() for part in parts])


def _device(training: Training, job: Job, steps: int, seed: int) -> UnhealthyDevice | None:
    if not job.node or dist.get_rank() != UNHEALTHY:
        return None
    profile = node_profile(job.node)
    every = min(steps, BURST_EVERY_STEPS)  # a short training has one burst
    return device_for(
        training.trainee.model,
        training.trainee.size,
        job.node,
        seed,
        WRONG_PER_STEP,
        persistent=job.persistent,
        start_step=0,
        rhythm=None if profile.steady else Rhythm(every, min(BURST_STEPS, every)),
    )


class _Rank:
    """Runs the jobs on one rank; the first job has to be the healthy training."""

    def __init__(self, size: Size, steps: int, seed: int) -> None:
        self._size, self._steps, self._seed = size, steps, seed
        self._healthy: tuple[str, list[torch.Tensor]] | None = None

    def outcome(self, job: Job) -> Outcome:
        """Run one training."""
        training = Training(self._size, self._seed)
        device, losses, stopped = _device(training, job, self._steps, self._seed), [], ""
        events.clear()
        with ExitStack() as stack:
            if job.defence in PROTECTED:
                stack.enter_context(protect(training.trainee.model))
            if device is not None:
                stack.enter_context(device)
            try:
                for value in training.steps(job.defence, self._steps):
                    losses.append(value)
            except HoldfastError as error:
                stopped = str(error)
        events.set_step(-1)
        ended = training.digest(), training.trainee.parameters()
        self._healthy = self._healthy or ended
        return self._gathered(job, ended, losses, stopped, device.struck if device else 0)

    def _gathered(
        self,
        job: Job,
        ended: tuple[str, list[torch.Tensor]],
        losses: list[float],
        stopped: str,
        struck: int,
    ) -> Outcome:
        """Gather the outcome of a training from all ranks."""
        assert self._healthy is not None
        kinds = Counter(event.kind for event in events.recent())
        evicted = [event.rank for event in events.recent() if event.kind == EventKind.EVICT]
        mine = (kinds, evicted, struck, ended[0] == self._healthy[0])
        every = [mine] * RANKS
        dist.all_gather_object(every, mine)
        events.clear()
        return Outcome(
            steps=len(losses),
            stopped=stopped,
            losses=losses,
            equal=all(one[3] for one in every),
            distance=distance(ended[1], self._healthy[1]),
            struck=sum(one[2] for one in every),
            events=sum((one[0] for one in every), Counter()),
            evicted=sorted(rank for one in every for rank in one[1]),
        )


def _work(
    rank: int, store: str, said: Connection, work: tuple[Size, int, int], jobs: Sequence[Job]
) -> None:
    os.environ.update(GLOO_SOCKET_IFNAME="lo", RANK=str(rank), WORLD_SIZE=str(RANKS))
    torch.set_num_threads(1)
    limit = timedelta(seconds=config.timeout_s())
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=limit
    )
    worker = _Rank(*work)
    for job in jobs:
        outcome = worker.outcome(job)
        if rank == 0:
            said.send(outcome)
    dist.barrier()
    del worker
    gc.collect()  # or gloo's threads can hang this process
    dist.destroy_process_group()


@contextmanager
def outcomes(size: Size, steps: int, seed: int, jobs: Sequence[Job]) -> Iterator[Iterator[Outcome]]:
    """Start the ranks and yield an iterator over the jobs' outcomes; the first job must be healthy.

    The iterator raises RuntimeError if the ranks ended before they had done all jobs, or did not
    answer in time.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload(["holdfast.guard", "torch.distributed"])
    listening, said = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        given = (str(Path(folder, "store")), said, (size, steps, seed), list(jobs))
        ranks = [
            context.Process(target=_work, args=(rank, *given), daemon=True) for rank in range(RANKS)
        ]
        try:
            for process in ranks:
                process.start()
            said.close()
            yield (_heard(listening) for _ in jobs)
            for process in ranks:
                process.join(config.timeout_s())
        finally:
            for process in ranks:
                process.kill()
                process.join(config.timeout_s())
            listening.close()


def _heard(listening: Connection) -> Outcome:
    # A rank that waits for a lost one ends after the timeout, and rank 0 ends with it.
    if not listening.poll(3 * config.timeout_s()):
        raise RuntimeError(f"the ranks said nothing within {3 * config.timeout_s():g} s")
    try:
        outcome: Outcome = listening.recv()
    except EOFError as error:
        raise RuntimeError("the ranks ended before they had done all trainings") from error
    return outcome
