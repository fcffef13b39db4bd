"""A unit's worker: pinned to its core, it computes the workloads and tells what it got."""

import os
import signal
import time
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection

import torch

from holdfast import events
from holdfast.abft.gemm import recovery
from holdfast.abft.gemm.backend import backend
from holdfast.abft.gemm.recovery import deferring
from holdfast.digest.tensors import tensors_digest
from holdfast.screen.difference import Difference, Parts, differences
from holdfast.screen.emulation import FaultyUnit
from holdfast.screen.job import SCALES, VARIANTS, Job
from holdfast.screen.observation import (
    Done,
    Failed,
    Message,
    Observation,
    Order,
    Ready,
    Result,
    Round,
)
from holdfast.screen.references import unit_settings
from holdfast.screen.units import PinRefused, pin
from holdfast.screen.workloads import make_jobs

# Each workload in its turn, so that slow ones do not crowd out the others; products for longer.
TURN_S = {"flop": 0.1, "B": 0.03}
LEAST_ROUNDS = 2
_DETAIL = ("reason", "index", "row", "table")


def serve(order: Order, pipe: Connection) -> None:
    """A worker's life: make inputs, wait for the go-ahead, work, answer questions, end.

    It ends when the runner closes the pipe or dies. Ctrl-C is the runner's to handle.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        _serve(order, pipe)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    except PinRefused as refusal:
        pipe.send(Failed(str(refusal)))
    except MemoryError:
        pipe.send(Failed("there is not enough memory for its patterns: give a smaller --memory"))
    except Exception:
        pipe.send(Failed(f"its worker raised: {traceback.format_exc().strip()}", odd=True))


def _serve(order: Order, pipe: Connection) -> None:
    if order.unit.core is not None:
        pin(order.unit.core)
    else:
        _be_deterministic()
    torch.set_num_threads(1)
    # Not protect(), which also prepares for compiled graphs: this process compiles none.
    recovery.set_correction("detect")
    backend().start(verify=True)
    jobs = make_jobs(SCALES[order.scale], torch.device(order.unit.device), order.memory_bytes)
    jobs[0].run(0)  # what torch loads with its first backward pass is no unit's work
    worker = Worker(order, jobs)
    pipe.send(Ready(unit_settings(order.unit, order.scale)))
    for message in worker.work(*pipe.recv()):
        pipe.send(message)
        if pipe.poll():  # told to stop
            pipe.recv()
            break
    pipe.send(worker.tally())
    pipe.send(Done())
    while (question := pipe.recv()) is not None:
        op, variant = question
        pipe.send(Result(op, variant, worker.firsts[op, variant]))


def _be_deterministic() -> None:
    """Let torch choose CUDA kernels that repeat their bits, before it starts CUDA."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)


class Worker:
    """Computes the jobs of a unit in turn; keeps the first result of each."""

    def __init__(self, order: Order, jobs: list[Job]) -> None:
        self._order, self._jobs = order, jobs
        faults = [fault for fault in order.faults if fault.unit == order.unit.name]
        self._faulty = FaultyUnit(faults)
        self.firsts: dict[tuple[str, int], Parts] = {}
        self._digests: dict[tuple[str, int], str] = {}
        self._rounds, self._started_s, self._started_cpu_s = 0, 0.0, 0.0

    def work(self, deadline_s: float, latest_s: float) -> Iterator[Message]:
        """Rounds of all jobs until ``time.monotonic()`` passes the deadline, or all are done.

        Two rounds are done in any case, as without them nothing is repeated; but for ``latest_s``.
        """
        self._started_s, self._started_cpu_s = time.monotonic(), time.process_time()
        while self._rounds != self._order.rounds:
            for job in self._jobs:
                if time.monotonic() >= (deadline_s if self._rounds >= LEAST_ROUNDS else latest_s):
                    return
                yield from self._turn(job)
            self._rounds += 1
            yield self.tally()

    def tally(self) -> Round:
        """The rounds done, and the time since work began."""
        wall_s = time.monotonic() - self._started_s
        return Round(self._rounds, wall_s, time.process_time() - self._started_cpu_s)

    def _turn(self, job: Job) -> Iterator[Observation]:
        """Each input once; again, unless rounds are counted, until the turn's time is over."""
        turn_s = TURN_S[job.unit] if self._order.rounds is None else 0.0
        ends_s = time.monotonic() + turn_s
        held: dict[int, Observation] = {}
        while True:
            for variant in range(VARIANTS):
                made = self._execute(job, variant)
                if made.checks or made.differences:
                    yield made
                else:
                    held[variant] = _added(held.get(variant), made)
            if time.monotonic() >= ends_s:
                break
        yield from held.values()

    def _execute(self, job: Job, variant: int) -> Observation:
        events.clear()
        started_s = time.perf_counter()
        with deferring(), self._faulty.computing(job.name):
            parts = job.run(variant)
        digest = tensors_digest(parts.values())
        seconds = time.perf_counter() - started_s
        checks = [_told(event) for event in events.recent()]
        found = self._compared(job, variant, digest, parts)
        if job.expected is not None and differences(job.expected, parts):
            checks.append("what was read back is not what was written")
        return Observation(
            unit=self._order.unit.name,
            op=job.name,
            variant=variant,
            digest=digest,
            seconds=seconds,
            work=job.work,
            work_unit=job.unit,
            checks=tuple(checks),
            differences=found,
        )

    def _compared(
        self, job: Job, variant: int, digest: str, parts: Parts
    ) -> tuple[Difference, ...]:
        """The bits in which a result differs from what is right, or from the first one."""
        key = job.name, variant
        if key not in self._digests:
            self._digests[key], self.firsts[key] = digest, parts
        if job.expected is not None:
            return differences(job.expected, parts)
        if digest == self._digests[key]:
            return ()
        return differences(self.firsts[key], parts)


def _added(held: Observation | None, made: Observation) -> Observation:
    if held is None:
        return made
    return Observation(
        made.unit,
        made.op,
        made.variant,
        made.digest,
        held.count + 1,
        held.seconds + made.seconds,
        held.work + made.work,
        made.work_unit,
    )


def _told(event: events.Event) -> str:
    """What an op's own check said, in a line."""
    details = (f"{name} {event.detail[name]}" for name in _DETAIL if name in event.detail)
    return f"{event.kind} in {event.op}: {', '.join(details)}".removesuffix(": ")
