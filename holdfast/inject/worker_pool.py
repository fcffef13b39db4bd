"""Jobs in worker processes that may die or hang.

The standard library's pools break when a worker dies, and their workers outlive a killed parent.
"""

import multiprocessing
import signal
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import torch

from holdfast.errors import HoldfastError
from holdfast.snapshot.node.supervisor import end_with_parent

Job = TypeVar("Job")
Result = TypeVar("Result")

POLL_S = 0.5
Worker = tuple[Connection, BaseProcess]


class WorkerFailed(HoldfastError):
    """A worker process raised, died or hung; results that were returned before are kept."""


def run_jobs(
    work: Callable[[Job], Result],
    jobs: Sequence[Job],
    *,
    workers: int,
    timeout_s: float,
    lost: Callable[[Job, int | None], Result],
) -> Generator[Result, None, None]:
    """Yield ``work(job)`` of every job, in any order, from forks of this process with one thread.

    With one worker the jobs run in this process and are not watched. No fork outlives the
    iteration. ``lost(job, exit_code)`` gives the result of a job whose worker died, or took longer
    than ``timeout_s`` (exit code None).

    Raises:
        WorkerFailed: A worker raised; a HoldfastError is raised as it is.
    """
    if workers == 1:
        yield from map(work, jobs)
        return
    waiting, idle, started = deque(jobs), list[Worker](), list[Worker]()
    busy: dict[Connection, tuple[Worker, Job, float]] = {}
    try:
        while waiting or busy:
            while waiting and len(busy) < workers:
                if not idle:
                    idle.append(_started(work))
                    started.append(idle[-1])
                worker, job = idle.pop(), waiting.popleft()
                busy[worker[0]] = worker, job, time.monotonic() + timeout_s
                with suppress(OSError):  # it died meanwhile, which the next lines notice
                    worker[0].send(job)
            ready, now_s = wait(list(busy), POLL_S), time.monotonic()
            for pipe in [p for p, (_, _, end_s) in busy.items() if p in ready or now_s > end_s]:
                worker, job, _ = busy.pop(pipe)
                yield _result(worker, job, lost, idle)
    finally:
        for worker in started:
            _end(worker)


def _result(worker: Worker, job: Any, lost: Callable[..., Any], idle: list[Worker]) -> Any:
    pipe, process = worker
    try:
        reply = pipe.recv() if pipe.poll() else None
    except (EOFError, OSError):
        process.join()
        return lost(job, process.exitcode)
    if reply is None:
        _end(worker)
        return lost(job, None)
    idle.append(worker)
    error, result = reply
    if error is not None:
        raise error
    return result


def _started(work: Callable[[Any], object]) -> Worker:
    context = multiprocessing.get_context("fork")  # no model is pickled, torch not loaded again
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(work, theirs), daemon=True)
    process.start()
    theirs.close()
    return ours, process


def _end(worker: Worker) -> None:
    worker[0].close()
    worker[1].kill()
    worker[1].join()


def _serve(work: Callable[[object], object], pipe: Connection) -> None:
    """Run jobs until this process is ended; Ctrl-C is left to the parent process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with_parent()  # a closed pipe would not tell: later forks hold its other end too
    torch.set_num_threads(1)  # a fork has none of the OpenMP threads
    while True:
        job = pipe.recv()
        error, result = None, None
        try:
            result = work(job)
        except HoldfastError as raised:
            error = raised
        except Exception:
            error = WorkerFailed(f"a worker raised:\n{traceback.format_exc()}")
        pipe.send((error, result))
