"""Latency and throughput, protected and not, and what the answers are worth under faults."""

import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

import holdfast
from examples.dlrm.faults import damaged
from examples.dlrm.model import Dlrm
from examples.dlrm.requests import Request
from examples.dlrm.serving import Load, Served, answering, serve
from holdfast import events
from holdfast.nn import Int8EmbeddingBag, Int8Linear

PERCENTILES = {"p50": 0.5, "p99": 0.99}
WARM = 4  # requests before a window, as a server answers some before it takes traffic
WRONG = 1e-6  # a probability that is further off than this: more than fp32's rounding

Say = Callable[[str], None]


@dataclass(frozen=True)
class Scenario:
    """Everything a run needs: the model, the requests and their right answers."""

    model: Dlrm
    requests: Sequence[Request]
    right: Sequence[torch.Tensor]
    threads: int
    seed: int

    def serve(self, mode: str, due_s: Sequence[float] = (), warm: int = 0) -> Served:
        """Answer every request once in one of ``MODES``; ``warm`` of them before, uncounted."""
        with MODES[mode](self.model):
            answer = answering(self.model)
            for request in self.requests[:warm]:
                answer(request)
            return serve(answer, Load(self.requests, due_s), self.threads)


@contextmanager
def protected(model: Dlrm) -> Iterator[None]:
    """The quantised parts check themselves, ``protect`` covers the interaction's product."""
    with holdfast.protect(model):
        yield


@contextmanager
def unprotected(model: Dlrm) -> Iterator[None]:
    """The same kernels with their checks off."""
    parts = [each for each in model.modules() if isinstance(each, Int8Linear | Int8EmbeddingBag)]
    for part in parts:
        part.verify = False
    try:
        yield
    finally:
        for part in parts:
            part.verify = True


MODES = {"unprotected": unprotected, "protected": protected}


def throughput(scenario: Scenario, rounds: int, say: Say) -> dict[str, Any]:
    """Requests a second of both modes with the queue never empty, in turns."""
    rates: dict[str, list[float]] = {mode: [] for mode in MODES}
    for number in range(rounds):
        for mode, found in rates.items():
            say(f"throughput, round {number + 1} of {rounds}, {mode}")
            served = scenario.serve(mode, warm=WARM)
            check_healthy([served], scenario.right)
            found.append(len(scenario.requests) / served.seconds)
    ratios = [a / b for a, b in zip(rates["protected"], rates["unprotected"], strict=True)]
    medians = {f"{mode}_per_s": round(statistics.median(rates[mode]), 1) for mode in MODES}
    return medians | _spread("throughput_ratio", ratios)


def latency(scenario: Scenario, rounds: int, per_s: float, say: Say) -> dict[str, Any]:
    """Percentiles of both modes while ``per_s`` requests a second come, window by window."""
    windows: dict[str, list[Served]] = {mode: [] for mode in MODES}
    for number in range(rounds):
        due_s = arrivals(len(scenario.requests), per_s, scenario.seed + number)
        for mode, served in windows.items():
            say(f"latency, round {number + 1} of {rounds}, {mode}")
            served.append(scenario.serve(mode, due_s, WARM))
    check_healthy([window for served in windows.values() for window in served], scenario.right)
    found: dict[str, Any] = {"offered_per_s": round(per_s, 1), "windows": rounds}
    for name, share in PERCENTILES.items():
        by_mode = {m: [each.percentile_ms(share) for each in windows[m]] for m in MODES}
        found |= {f"{m}_{name}_ms": round(statistics.median(by_mode[m]), 3) for m in MODES}
        pairs = zip(by_mode["protected"], by_mode["unprotected"], strict=True)
        found |= _spread(f"{name}_ratio", [a / b for a, b in pairs])
    return found


def check_healthy(windows: Sequence[Served], right: Sequence[torch.Tensor]) -> None:
    """Raise if, without any fault, a request has no answer or one that is off."""
    errors = [error for window in windows for error in window.errors if error is not None]
    if errors:
        raise RuntimeError(f"{len(errors)} requests fail without any fault") from errors[0]
    off = [each for window in windows for each in window.off_by(right)]
    if off:
        raise RuntimeError(f"{len(off)} answers are off by up to {max(off):g} without any fault")


def under_faults(
    scenario: Scenario, mode: str, rounds: int, share: float, every_s: float, say: Say
) -> dict[str, Any]:
    """What the answers are worth while bits flip: ``share`` of the results, memory ``every_s``."""
    events.clear()
    with damaged(
        scenario.model, scenario.requests, share=share, every_s=every_s, seed=scenario.seed
    ) as injected:
        served = []
        for number in range(rounds):
            say(f"under faults, round {number + 1} of {rounds}, {mode}")
            served.append(scenario.serve(mode))
    off = [each for window in served for each in window.off_by(scenario.right)]
    return {
        "answers": sum(len(window.answers) for window in served),
        "faults": dict(sorted(injected.items())),
        "refused": sum(window.refused for window in served),
        "failed": sum(window.failed for window in served),
        "off_by_rounding": sum(each <= WRONG for each in off),
        "wrong": sum(each > WRONG for each in off),
        "events": len(events.recent()),
    }


def arrivals(count: int, per_s: float, seed: int) -> list[float]:
    """A Poisson process: when each request is due, in seconds from the start."""
    chosen, now_s, due_s = random.Random(seed), 0.0, []
    for _ in range(count):
        now_s += chosen.expovariate(per_s)
        due_s.append(now_s)
    return due_s


def _spread(name: str, ratios: Sequence[float]) -> dict[str, Any]:
    quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return {
        name: round(statistics.median(ratios), 4),
        f"{name}_quartiles": [round(quartiles[0], 4), round(quartiles[-1], 4)],
    }
