"""A pool of worker processes that get one job at a time and for which no wait is unlimited.

The standard library's pools are not used, because their workers remain when the parent process is
killed: each of them holds the writing end of the queue that it reads.
"""

import multiprocessing
import signal
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Generic, TypeVar

import torch

from holdfast import config
from holdfast.errors import HoldfastError

Job = TypeVar("Job")
Result = TypeVar("Result")

POLL_S = 0.5
PATIENCE_TIMEOUTS = 10  # a job has to end within this many times HOLDFAST_TIMEOUT_S


class WorkerFailed(HoldfastError):
    """A worker process raised, died or hung; results that were returned before are kept."""


@dataclass
class _Worker:
    process: BaseProcess
    pipe: Connection
    busy: bool = False


class WorkerPool(Generic[Job, Result]):
    """Runs a module-level function of one job in ``workers`` processes with one torch thread each.

    With one worker the jobs run in this process.
    """

    def __init__(self, workers: int, work: Callable[[Job], Result]) -> None:
        self._count, self._work = workers, work

    def run(self, jobs: Sequence[Job]) -> Iterator[Result]:
        """Yield the results as they arrive, in any order; no process outlives the iteration.

        Raises:
            WorkerFailed: A worker raised or died, or no job ended within ten times
                ``HOLDFAST_TIMEOUT_S``.
        """
        if self._count == 1:
            yield from self._run_here(jobs)
            return
        workers = [self._start() for _ in range(min(self._count, len(jobs)))]
        try:
            yield from _distribute(deque(jobs), workers)
        finally:
            for worker in workers:
                _end(worker)

    def _run_here(self, jobs: Sequence[Job]) -> Iterator[Result]:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            for job in jobs:
                yield self._work(job)
        finally:
            torch.set_num_threads(threads)

    def _start(self) -> _Worker:
        # A forked child of a process with OpenMP threads may hang in its first product.
        context = multiprocessing.get_context("spawn")
        pipe, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(self._work, theirs), daemon=True)
        process.start()
        theirs.close()
        return _Worker(process, pipe)


def _distribute(jobs: deque[Job], workers: list[_Worker]) -> Iterator[Any]:
    deadline_s = _deadline_s()
    while jobs or any(worker.busy for worker in workers):
        for worker in workers:
            if jobs and not worker.busy:
                _send(worker, jobs.popleft())
        ready = wait([worker.pipe for worker in workers if worker.busy], POLL_S)
        for worker in workers:
            if worker.pipe in ready:
                result = _receive(worker)
                deadline_s = _deadline_s()
                yield result
        if time.monotonic() > deadline_s:
            raise WorkerFailed(
                f"no job ended within {PATIENCE_TIMEOUTS} × {config.timeout_s():g} s: raise "
                f"{config.TIMEOUT_VARIABLE}, or ask for smaller shapes or fewer trials"
            )


def _send(worker: _Worker, job: object) -> None:
    try:
        worker.pipe.send(job)
    except OSError as error:
        raise _death(worker) from error
    worker.busy = True


def _receive(worker: _Worker) -> object:
    try:
        failure, result = worker.pipe.recv()
    except (EOFError, OSError) as error:
        raise _death(worker) from error
    if failure:
        raise WorkerFailed(f"a worker raised:\n{failure}")
    worker.busy = False
    return result


def _death(worker: _Worker) -> WorkerFailed:
    worker.process.join(config.timeout_s())
    return WorkerFailed(
        f"worker {worker.process.pid} died (exit code {worker.process.exitcode}); run the same "
        "command again to continue, with fewer --workers if memory ran out"
    )


def _end(worker: _Worker) -> None:
    worker.pipe.close()
    worker.process.terminate()
    worker.process.join(config.timeout_s())
    if worker.process.is_alive():
        worker.process.kill()
        worker.process.join(config.timeout_s())


def _deadline_s() -> float:
    return time.monotonic() + PATIENCE_TIMEOUTS * config.timeout_s()


def _serve(work: Callable[[object], object], pipe: Connection) -> None:
    """Run jobs in a worker until the pipe closes; Ctrl-C is left to the parent process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        failure, result = "", None
        try:
            result = work(job)
        except Exception:
            failure = traceback.format_exc()
        try:
            pipe.send((failure, result))
        except OSError:
            return
