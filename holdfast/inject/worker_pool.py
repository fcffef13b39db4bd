"""Jobs in worker processes that may die or hang.

The standard library's pools break when a worker dies, and their workers outlive a killed parent.
"""

import multiprocessing
import signal
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import torch

from holdfast.errors import HoldfastError
from holdfast.snapshot.node.supervisor import end_with_parent

Job = TypeVar("Job")
Result = TypeVar("Result")

POLL_S = 0.5


class WorkerFailed(HoldfastError):
    """A worker process raised, died or hung; results that were returned before are kept."""


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute with one thread, as in every worker: more would sum in another order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


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
    waiting = deque(jobs)
    pool: dict[Connection, BaseProcess] = {}
    busy: dict[Connection, tuple[Job, float]] = {}
    try:
        while waiting or busy:
            while waiting and len(busy) < workers:
                pipe = next((pipe for pipe in pool if pipe not in busy), None) or _start(work, pool)
                busy[pipe] = waiting[0], time.monotonic() + timeout_s
                with suppress(OSError):  # it died meanwhile, which the next lines notice
                    pipe.send(waiting.popleft())
            ready, now_s = wait(list(busy), POLL_S), time.monotonic()
            for pipe in [p for p, (_, end_s) in busy.items() if p in ready or end_s < now_s]:
                job, _ = busy.pop(pipe)
                try:
                    if pipe not in ready:
                        raise TimeoutError
                    error, result = pipe.recv()
                except (EOFError, OSError) as broken:
                    code = _end(pipe, pool.pop(pipe))
                    error, result = None, lost(job, None if type(broken) is TimeoutError else code)
                if error is not None:
                    raise error
                yield result
    finally:
        for pipe, process in pool.items():
            _end(pipe, process)


def _start(work: Callable[[Any], object], pool: dict[Connection, BaseProcess]) -> Connection:
    context = multiprocessing.get_context("fork")  # no model is pickled, torch not loaded again
    ours, theirs = context.Pipe()
    pool[ours] = context.Process(target=_serve, args=(work, theirs), daemon=True)
    pool[ours].start()
    theirs.close()
    return ours


def _end(pipe: Connection, process: BaseProcess) -> int | None:
    pipe.close()
    process.kill()
    process.join()
    return process.exitcode


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
