"""A pool of worker processes that get one job at a time and for which no wait is unlimited.

The standard library's pools are not used: a worker that dies breaks them, and their workers remain
when the parent process is killed.
"""

import multiprocessing
import signal
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, TypeVar

import torch

from holdfast import config
from holdfast.errors import HoldfastError
from holdfast.snapshot.node.supervisor import end_with_parent

Job = TypeVar("Job")
Result = TypeVar("Result")

POLL_S = 0.5
PATIENCE_TIMEOUTS = 10  # a job has to end within this many times HOLDFAST_TIMEOUT_S


class WorkerFailed(HoldfastError):
    """A worker process raised, died or hung; results that were returned before are kept."""


class WorkerPool(Generic[Job, Result]):
    """Runs a function of one job in ``workers`` forks of this process with one torch thread each.

    With one worker the jobs run in this process, for which nothing is watched.

    Args:
        workers: Number of processes.
        work: The function; forks need not be able to import it. Its results are pickled.
        timeout_s: Longest time of a job; by default ten times ``HOLDFAST_TIMEOUT_S``.
        lost: Function of a job whose worker died, and its exit code, None if it took too long, that
            returns the result of this job. Without it, ``run`` raises.
    """

    def __init__(
        self,
        workers: int,
        work: Callable[[Job], Result],
        *,
        timeout_s: float | None = None,
        lost: Callable[[Job, int | None], Result] | None = None,
    ) -> None:
        self._count, self._work, self._lost = workers, work, lost
        self._timeout_s = timeout_s or PATIENCE_TIMEOUTS * config.timeout_s()

    def run(self, jobs: Sequence[Job]) -> Iterator[Result]:
        """Yield the results as they arrive, in any order; no process outlives the iteration.

        Raises:
            WorkerFailed: A worker raised, or without ``lost`` died or took too long.
        """
        if self._count == 1:
            yield from self._run_here(jobs)
            return
        waiting, workers = deque(jobs), list[_Worker]()
        try:
            while waiting or workers:
                while waiting and len(workers) < self._count:
                    workers.append(_Worker(self._work, self._timeout_s))
                    workers[-1].give(waiting.popleft())
                ready = wait([worker.pipe for worker in workers], POLL_S)
                for worker in [w for w in workers if w.pipe in ready or w.late]:
                    yield self._result(worker)
                    if worker.over or not waiting:
                        workers.remove(worker)
                        worker.end()
                    else:
                        worker.give(waiting.popleft())
        finally:
            for worker in workers:
                worker.end()

    def _run_here(self, jobs: Sequence[Job]) -> Iterator[Result]:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            for job in jobs:
                yield self._work(job)
        finally:
            torch.set_num_threads(threads)

    def _result(self, worker: "_Worker") -> Any:
        failure, result = worker.receive()
        if failure:
            raise WorkerFailed(f"a worker raised:\n{failure}")
        if worker.over and self._lost is None:
            raise WorkerFailed(
                f"a worker {worker.over}: run the same command again to continue, with fewer "
                f"--workers if memory ran out; {config.TIMEOUT_VARIABLE} sets the time of a job"
            )
        return self._lost(worker.job, worker.exit_code) if self._lost and worker.over else result


class _Worker:
    """One process, its job, and, once it is dead or too late, ``over``: what happened to it."""

    def __init__(self, work: Callable[[Any], object], timeout_s: float) -> None:
        # A fork: no model has to be pickled, and torch is not loaded again. With one thread it
        # needs none of the OpenMP threads that it lacks.
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(work, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self._timeout_s, self._deadline_s = timeout_s, 0.0
        self.job: Any = None
        self.over = ""
        self.exit_code: int | None = None

    @property
    def late(self) -> bool:
        return time.monotonic() > self._deadline_s

    def give(self, job: object) -> None:
        self.job, self._deadline_s = job, time.monotonic() + self._timeout_s
        self.pipe.send(job)

    def receive(self) -> tuple[str, object]:
        if not self.pipe.poll():
            self.over = f"did not end a job within {self._timeout_s:g} s"
            return "", None
        try:
            failure, result = self.pipe.recv()
        except (EOFError, OSError):
            self._process.join(config.timeout_s())
            self.exit_code = self._process.exitcode
            self.over = f"died (exit code {self.exit_code})"
            return "", None
        return failure, result

    def end(self) -> None:
        self.pipe.close()
        self._process.kill()
        self._process.join(config.timeout_s())


def _serve(work: Callable[[object], object], pipe: Connection) -> None:
    """Run jobs in a worker until it is ended; Ctrl-C is left to the parent process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with_parent()  # a closed pipe would not tell: later forks hold its other end too
    torch.set_num_threads(1)
    while True:
        job = pipe.recv()
        failure, result = "", None
        try:
            result = work(job)
        except Exception:
            failure = traceback.format_exc()
        pipe.send((failure, result))
