"""The worker process of a unit, which computes the workloads and reports the results' digests."""

import os
import signal
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection

import torch

from holdfast import events, native
from holdfast.abft.gemm.interception import interception
from holdfast.abft.policy import collecting, set_correction
from holdfast.digest.tensors import tensors_digest
from holdfast.screen.collectives import take_part
from holdfast.screen.difference import Difference, Parts, differences
from holdfast.screen.emulation import FaultyUnit
from holdfast.screen.job import SCALES, VARIANTS, Job
from holdfast.screen.messages import (
    Done,
    Meet,
    Message,
    Observation,
    Order,
    Ready,
    Result,
    Round,
    Trouble,
)
from holdfast.screen.references import unit_settings
from holdfast.screen.units import PinRefused, pin
from holdfast.screen.workloads import make_jobs

# The time of a workload's turn, by its unit of work. With equal turns all workloads are computed
# often, although their executions take different times.
TURN_S = {"flop": 0.1, "B": 0.03, "test": 0.0}
LEAST_ROUNDS = 2
_DETAIL = ("reason", "index", "row", "table")


def serve(order: Order, pipe: Connection) -> None:
    """Run a worker: make inputs, wait for the start, work, answer requests for results, end.

    It ends when the runner closes the pipe or dies. Ctrl-C is left to the runner.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        _serve(order, pipe)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    except PinRefused as refusal:
        pipe.send(Trouble(order.unit.name, str(refusal)))
    except MemoryError:
        reason = "there is not enough memory for its patterns: give a smaller --memory"
        pipe.send(Trouble(order.unit.name, reason))
    except Exception:
        reason = f"its worker raised: {traceback.format_exc().strip()}"
        pipe.send(Trouble(order.unit.name, reason, suspicious=True))


def _serve(order: Order, pipe: Connection) -> None:
    if order.unit.core is not None:
        pin(order.unit.core)
    else:
        _be_deterministic()
    torch.set_num_threads(1)
    # Not protect(), which also prepares for compiled graphs: this process compiles none.
    set_correction("detect")
    if native.core is not None:  # without it only repetition finds what is wrong
        interception().change_process_depth(1)
    jobs = make_jobs(SCALES[order.scale], torch.device(order.unit.device), order.memory_bytes)
    jobs[0].run(0)  # torch loads modules in its first backward pass, which must not be timed
    worker = Worker(order, jobs)
    pipe.send(Ready(unit_settings(order.unit, order.scale)))
    for message in worker.work(*pipe.recv()):
        pipe.send(message)
        if pipe.poll():  # the runner stops the work early
            pipe.recv()
            break
    pipe.send(worker.tally())
    pipe.send(Done())
    while (question := pipe.recv()) is not None:
        if isinstance(question, Meet):
            pipe.send(take_part(question, worker.faulty))
            continue
        op, variant = question
        pipe.send(Result(op, variant, worker.firsts[op, variant]))


def _be_deterministic() -> None:
    """Make torch choose deterministic CUDA kernels; this must happen before CUDA is initialised."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)


class Worker:
    """Computes the jobs of a unit in turn and keeps the first result of each."""

    def __init__(self, order: Order, jobs: list[Job]) -> None:
        self._order, self._jobs = order, jobs
        faults = [fault for fault in order.faults if fault.unit == order.unit.name]
        self.faulty = FaultyUnit(faults)
        self.firsts: dict[tuple[str, int], Parts] = {}
        self._digests: dict[tuple[str, int], str] = {}
        self._rounds, self._started_s, self._started_cpu_s = 0, 0.0, 0.0

    def work(self, deadline_s: float, latest_s: float) -> Iterator[Message]:
        """Compute rounds of all jobs until the deadline, and yield the messages to report.

        Both times are of ``time.monotonic()``. No round begins after ``deadline_s`` except for the
        first two, because without them nothing is repeated; all work ends at ``latest_s``.
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
        """Return the number of completed rounds and the time since work began."""
        wall_s = time.monotonic() - self._started_s
        return Round(self._rounds, wall_s, time.process_time() - self._started_cpu_s)

    def _turn(self, job: Job) -> Iterator[Observation]:
        """Compute each input of a job once, or for ``TURN_S`` if the rounds are not limited."""
        turn_s = TURN_S[job.unit] if self._order.rounds is None else 0.0
        ends_s = time.monotonic() + turn_s
        held: dict[int, Observation] = {}
        while True:
            for variant in range(VARIANTS):
                made = self._execute(job, variant)
                if made.checks or made.differences:
                    yield made
                else:
                    held[variant] = _added(held[variant], made) if variant in held else made
            if time.monotonic() >= ends_s:
                break
        yield from held.values()

    def _execute(self, job: Job, variant: int) -> Observation:
        events.clear()
        started_s = time.perf_counter()
        with collecting(), self.faulty.computing(job.name):
            parts = job.run(variant)
        digest = tensors_digest(parts.values())
        seconds = time.perf_counter() - started_s
        checks = [_summary(event) for event in events.recent()]
        found = self._compared(job, variant, digest, parts)
        if job.expected is not None and found:
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
        """Return the differences from the expected result, or from this unit's first result."""
        key = job.name, variant
        if key not in self._digests:
            self._digests[key], self.firsts[key] = digest, parts
        if job.expected is not None:
            return differences(job.expected, parts)
        if digest == self._digests[key]:
            return ()
        return differences(self.firsts[key], parts)


def _added(held: Observation, made: Observation) -> Observation:
    """Combine an observation with a further execution that had the same result."""
    seconds, work = held.seconds + made.seconds, held.work + made.work
    return replace(made, count=held.count + 1, seconds=seconds, work=work)


def _summary(event: events.Event) -> str:
    """Describe an event of an op's own check in one line."""
    details = (f"{name} {event.detail[name]}" for name in _DETAIL if name in event.detail)
    return f"{event.kind} in {event.op}: {', '.join(details)}".removesuffix(": ")
