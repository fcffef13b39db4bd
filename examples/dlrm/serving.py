"""Threads that answer requests, and what came of each."""

import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from examples.dlrm.model import Dlrm
from examples.dlrm.requests import Request
from holdfast import UncorrectableFault

PATIENCE_S = 60.0  # for one answer
Answer = Callable[[Request], torch.Tensor]


@dataclass
class Served:
    """What a window of serving gave.

    Args:
        latencies_s: from a request's due time to its answer, in the order of the requests.
        answers: of each request; None where there is none.
        errors: of each request, why it has no answer; None where it has one.
        seconds: from the first due time to the last answer.
    """

    latencies_s: list[float]
    answers: list[torch.Tensor | None]
    errors: list[Exception | None]
    seconds: float

    @property
    def refused(self) -> int:
        """Requests that were refused because of a fault beyond repair."""
        return sum(isinstance(error, UncorrectableFault) for error in self.errors)

    @property
    def failed(self) -> int:
        """Requests that ended in another error, such as NaN in front of a quantised layer."""
        return sum(error is not None for error in self.errors) - self.refused

    def off_by(self, right: Sequence[torch.Tensor]) -> list[float]:
        """How far each answer that is not bit for bit the right one is from it; NaN is INF."""
        pairs = zip(self.answers, right, strict=True)
        given = [(a, b) for a, b in pairs if a is not None and not torch.equal(a, b)]
        return [float((a - b).abs().nan_to_num(math.inf).max()) for a, b in given]

    def percentile_ms(self, share: float) -> float:
        """The latency that this share of the requests stays below, in milliseconds."""
        ordered = sorted(self.latencies_s)
        return 1e3 * ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]


@dataclass
class Load:
    """When requests come: ``due_s`` seconds after the start, all at once if it is empty."""

    requests: Sequence[Request]
    due_s: Sequence[float] = field(default_factory=tuple)


def answering(model: Dlrm) -> Answer:
    """How a model answers a request: probabilities [batch]."""

    def answer(request: Request) -> torch.Tensor:
        with torch.inference_mode():
            return model(request.dense, request.bags)

    return answer


def serve(answer: Answer, load: Load, threads: int) -> Served:
    """Answer every request of the load from ``threads`` threads.

    Raises:
        TimeoutError: no answer came for ``PATIENCE_S``.
        Exception: whatever a thread died of, other than an error about the one request.
    """
    return _Window(answer, load, threads).run()


class _Window:
    def __init__(self, answer: Answer, load: Load, threads: int) -> None:
        self._answer, self._load, self._threads = answer, load, threads
        self._waiting: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        count = len(load.requests)
        self._latencies_s = [math.nan] * count
        self._answers: list[torch.Tensor | None] = [None] * count
        self._errors: list[Exception | None] = [None] * count
        self._due_s = list(load.due_s) or [0.0] * count

    def run(self) -> Served:
        workers = [threading.Thread(target=self._work, daemon=True) for _ in range(self._threads)]
        for worker in workers:
            worker.start()
        self._started_s = time.perf_counter()
        try:
            self._submit()
            self._await_answers()
        finally:
            for _ in workers:
                self._waiting.put(None)
        seconds = time.perf_counter() - self._started_s
        for worker in workers:
            worker.join(PATIENCE_S)
        return Served(self._latencies_s, self._answers, self._errors, seconds)

    def _submit(self) -> None:
        for index, due_s in enumerate(self._due_s):
            wait_s = self._started_s + due_s - time.perf_counter()
            if wait_s > 0:
                time.sleep(wait_s)
            self._waiting.put(index)

    def _await_answers(self) -> None:
        for answered in range(len(self._load.requests)):
            try:
                error = self._done.get(timeout=PATIENCE_S)
            except queue.Empty:
                raise TimeoutError(
                    f"no answer for {PATIENCE_S:g} s after {answered} of {len(self._answers)}"
                ) from None
            if error is not None:
                raise error

    def _work(self) -> None:
        while (index := self._waiting.get()) is not None:
            try:
                self._answers[index] = self._answer(self._load.requests[index])
            except (UncorrectableFault, ValueError) as error:
                self._errors[index] = error
            except BaseException as error:
                self._done.put(error)
                return
            now_s = time.perf_counter() - self._started_s
            self._latencies_s[index] = now_s - self._due_s[index]
            self._done.put(None)
