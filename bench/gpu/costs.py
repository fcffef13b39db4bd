"""The stage that measures what protection costs a training step."""

import math
import statistics
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

from bench.gpu.models import (
    GPT2_MEDIUM,
    HALF,
    LLAMA_8B,
    SIXTH,
    TOY_GPT2,
    TOY_LLAMA,
    Shape,
    Training,
)
from bench.gpu.stage import Machine, Row, demand, unchecked, unverified

# Shape, sequences, mode of compilation, and pairs. What takes longest to compile comes last.
COSTS = (
    (GPT2_MEDIUM, 8, "eager", 7),
    (HALF, 32, "eager", 5),
    (LLAMA_8B, 4, "eager", 7),
    (LLAMA_8B, 4, "compiled", 7),
    (GPT2_MEDIUM, 8, "compiled", 7),
    (HALF, 32, "compiled", 5),
    (SIXTH, 8, "max-autotune", 7),
)
TOY_COSTS = ((TOY_GPT2, 2, "eager", 2), (TOY_LLAMA, 2, "eager", 2), (TOY_GPT2, 2, "compiled", 2))
STEPS = 4  # of a sample


def costs(machine: Machine, done: Collection[str]) -> Iterator[Row]:
    """Time steps without and with protection in turn; a gate comes first."""
    settings = torch.backends.cuda.matmul
    settings.allow_bf16_reduced_precision_reduction = False  # the same kernels on both sides
    for shape, sequences, mode, pairs in TOY_COSTS if machine.rehearsed else COSTS:
        case = f"{shape.name} {sequences * shape.context} tokens {mode}"
        if case not in done:
            yield {"case": case, **cost(machine, shape, sequences, mode, pairs)}


def cost(machine: Machine, shape: Shape, sequences: int, mode: str, pairs: int) -> Row:
    """Measure one model; the bare side, too, passes the wrapper of each product, and no more."""
    from torch._dynamo.utils import counters  # takes a second to import, also for other stages

    torch.compiler.reset()
    checked, bare = (Training(machine, shape, sequences, mode) for _ in range(2))
    with machine.protected(checked.model) as protection:
        loss = checked.step()
        protection.check()
        missing = unverified(protection)
        demand(not missing, f"{mode}: products are not verified: {missing}")
        with unchecked(protection), ThreadPoolExecutor(1) as other:
            wanted = other.submit(bare.step).result()  # compiles there without holdfast's passes
        # Kernels that are chosen by their times may differ between two compilations, and on CPU
        # protection replaces the kernel of attention.
        other_kernels = mode == "max-autotune" or machine.rehearsed
        same = math.isclose(loss, wanted, rel_tol=1e-3) if other_kernels else loss == wanted
        demand(same, f"{mode}: the loss is {loss}, not {wanted}")
        graphs, times = counters["stats"]["unique_graphs"], []
        for _ in range(pairs):
            with unchecked(protection):
                bare_s = sample_s(machine, bare.step)
            times.append((bare_s, sample_s(machine, checked.step)))
        new = counters["stats"]["unique_graphs"] - graphs
        demand(new == 0, f"{mode}: {new} graphs were compiled while steps were timed")
    ratios = [protected_s / bare_s for bare_s, protected_s in times]
    low, _, high = statistics.quantiles(ratios, n=4)
    return {
        "layers": shape.layers,
        "width": shape.width,
        "mode": mode,
        "pairs": pairs,
        "ratio": round(statistics.median(ratios), 4),
        "ratio_quartiles": [round(low, 4), round(high, 4)],
        "baseline_s": statistics.median(bare_s for bare_s, _ in times),
        "candidate_s": statistics.median(protected_s for _, protected_s in times),
    }


def sample_s(machine: Machine, run: Callable[[], object]) -> float:
    """Return the seconds of a step, after one that is not timed."""
    run()
    machine.synchronize()
    started_s = time.perf_counter()
    for _ in range(STEPS):
        run()
    machine.synchronize()
    return (time.perf_counter() - started_s) / STEPS
