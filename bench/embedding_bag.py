"""What the checks cost an embedding bag: DLRM-ABFT's table I and figure 6.

    python -m bench.embedding_bag [--pairs N] [--dims 32 64 …] [--bits 8] [--all]

4,000,000 rows, ten bags of 100, drawn anew for every pair; before every run the cache is flushed
and the code fetched again by a call on a small table. ``ratio`` is our checked bags over FBGEMM's
own unchecked kernel on its own rows. ``--all`` also times our rows unchecked, our own kernel, and
the op against torch's. Correctness first: the same bits on every path, nothing suspected.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from bench.paired import paired
from bench.rows import record
from holdfast.ops.embedding_bag import embedding_bag
from holdfast.ops.embedding_bag.op import OURS
from holdfast.study.dlrm.embedding_subject import (
    BATCH,
    DIMS,
    KINDS,
    POOLING,
    ROWS,
    Subject,
    subject,
)

Run = Callable[[], torch.Tensor]


def op(case: Subject) -> torch.Tensor:
    """The whole of our call."""
    batch = case.batch
    return embedding_bag(
        case.checked,
        batch.indices,
        batch.offsets,
        per_sample_weights=batch.weights,
        prefetch=batch.prefetch,
    )


def torch_op(case: Subject) -> torch.Tensor:
    """What serves quantised tables in torch."""
    name = "byte" if case.checked.kind.bits == 8 else "4bit"
    call = getattr(torch.ops.quantized, f"embedding_bag_{name}_rowwise_offsets")
    batch = case.batch
    output: torch.Tensor = call(
        case.bare, batch.indices, batch.offsets, False, 0, False, batch.weights, None, False
    )
    return output


def gate(case: Subject) -> None:
    """The same bits on every path, or nothing is timed."""
    expected = case.unchecked()
    given = (case.protected(), case.protected(OURS), op(case), torch_op(case))
    if not all(torch.equal(each, expected) for each in given):
        raise SystemExit("the kernels disagree; nothing was timed")


def comparisons(case: Subject, everything: bool) -> dict[str, tuple[Run, Run]]:
    """Baseline and candidate by name."""
    main = {"checked over FBGEMM": (case.unchecked, case.protected)}
    if not everything:
        return main
    unchecked = partial(case.protected, check=False)
    ops = {"our op over torch's op": (partial(torch_op, case), partial(op, case))}
    kernels = {
        "our rows unchecked over FBGEMM": (case.unchecked, unchecked),
        "our own kernel over FBGEMM": (case.unchecked, partial(case.protected, OURS)),
    }
    return main | kernels | (ops if case.prefetch else {})  # torch's op always prefetches


def measure(case: Subject, pairs: int, everything: bool) -> None:
    """Gate, then time; one row for each comparison."""
    gate(case)
    for name, (baseline, candidate) in comparisons(case, everything).items():
        case.fresh = True
        timed = paired(
            partial(_run, baseline), partial(_run, candidate), pairs=pairs, before=case.cool
        )
        record("embedding_bag", {"comparison": name, **described(case), **timed})


def _run(call: Run) -> None:
    call()


def described(case: Subject) -> dict[str, object]:
    """The case."""
    table = case.checked
    return {
        "rows": len(table),
        "dim": table.dim,
        "bits": table.kind.bits,
        "batch": BATCH,
        "pooling": POOLING,
        "weighted": case.weighted,
        "prefetch": case.prefetch,
        "memory_overhead": round(table.overhead, 4),
    }


def main() -> None:
    """Every dimension, plain and weighted, prefetch on and off, one thread and all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--dims", type=int, nargs="+", default=DIMS)
    parser.add_argument("--bits", type=int, choices=KINDS, default=8)
    parser.add_argument("--threads", type=int, nargs="+", default=(1, torch.get_num_threads()))
    parser.add_argument("--all", action="store_true", help="the other comparisons as well")
    args = parser.parse_args()
    for dim in args.dims:
        whole = subject(ROWS, dim, args.bits)
        for threads in dict.fromkeys(args.threads):
            torch.set_num_threads(threads)
            for weighted in (False, True):
                for prefetch in (True, False):
                    case = replace(whole, weighted=weighted, prefetch=prefetch)
                    measure(case, args.pairs, args.all)


if __name__ == "__main__":
    main()
