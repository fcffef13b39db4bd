"""What the checks cost an embedding bag: DLRM-ABFT's table I and figure 6.

    python -m bench.embedding_bag [--pairs N] [--dims 32 64 …] [--bits 8] [--small-pages] [--all]

4,000,000 rows, ten bags of 100, drawn anew for every pair; before every run the cache is flushed
and the code fetched again by a call on a small table. "Checked over FBGEMM" is our checked bags,
on the huge pages that tables ask for, over FBGEMM's own unchecked kernel on its own rows, where
torch allocates them: what a user sees. "… on the same pages": what the checks cost.
``--small-pages`` refuses huge ones to both, as a kernel without them would. ``--all`` also times
our rows unchecked, our own kernel, and the op against torch's. Correctness first: the same bits on
every path, nothing suspected.
"""

import argparse
import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.progress import track

from bench.paired import paired
from bench.rows import record
from holdfast.abft.embedding_bag import embedding_bag
from holdfast.abft.embedding_bag.cpu import OURS
from holdfast_lab.study.dlrm.embedding_subject import (
    BATCH,
    DIMS,
    KINDS,
    POOLING,
    ROWS,
    Subject,
    subject,
)

THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")
MAIN = "checked over FBGEMM"
SAME_PAGES = "checked over FBGEMM on the same pages"
_PR_SET_THP_DISABLE = 41  # of prctl(2)


@dataclass
class Place:
    """The tables, and FBGEMM's rows once more where torch puts them."""

    case: Subject
    of_torch: torch.Tensor

    def unchecked(self) -> torch.Tensor:
        """FBGEMM's kernel on its rows, where torch puts them."""
        return self.case.unchecked(self.of_torch)

    def on_same_pages(self) -> torch.Tensor:
        """FBGEMM's kernel on its rows, on pages like ours."""
        return self.case.unchecked()

    def protected(self, **options: Any) -> torch.Tensor:
        """Our rows and their checks."""
        return self.case.protected(**options)


Run = Callable[[Place], torch.Tensor]


def op(place: Place) -> torch.Tensor:
    """The whole of our call."""
    case, batch = place.case, place.case.batch
    return embedding_bag(
        case.checked,
        batch.indices,
        batch.offsets,
        per_sample_weights=batch.weights,
        prefetch=batch.prefetch,
    )


def torch_op(place: Place) -> torch.Tensor:
    """What serves quantised tables in torch."""
    case = place.case
    name = "byte" if case.checked.kind.bits == 8 else "4bit"
    call = getattr(torch.ops.quantized, f"embedding_bag_{name}_rowwise_offsets")
    batch = case.batch
    output: torch.Tensor = call(
        case.bare, batch.indices, batch.offsets, False, 0, False, batch.weights, None, False
    )
    return output


def gate(place: Place) -> None:
    """The same bits on every path, or nothing is timed."""
    case = place.case
    expected = case.unchecked()
    paths = (place.unchecked(), case.protected(), case.protected(OURS))
    paths += (op(place), torch_op(place))
    if not all(torch.equal(each, expected) for each in paths):
        raise SystemExit("the kernels disagree; nothing was timed")


def comparisons(everything: bool, prefetch: bool) -> dict[str, tuple[Run, Run]]:
    """Baseline and candidate by name."""
    found: dict[str, tuple[Run, Run]] = {
        MAIN: (Place.unchecked, Place.protected),
        SAME_PAGES: (Place.on_same_pages, Place.protected),
    }
    if everything:
        unchecked, ours = (
            partial(Place.protected, check=False),
            partial(Place.protected, kernel=OURS),
        )
        found["our rows unchecked over FBGEMM"] = (Place.on_same_pages, unchecked)
        found["our own kernel over FBGEMM"] = (Place.on_same_pages, ours)
    if everything and prefetch:  # torch's op always prefetches
        found["our op over torch's op"] = (torch_op, op)
    return found


def measure(place: Place, pairs: int, everything: bool) -> list[dict[str, Any]]:
    """Gate, then time; one row for each comparison."""
    case = place.case
    gate(place)
    rows = []
    for name, runs in comparisons(everything, case.prefetch).items():
        case.fresh = True
        baseline, candidate = (partial(_run, run, place) for run in runs)
        timed = paired(baseline, candidate, pairs=pairs, before=case.cool)
        rows.append({"comparison": name, **described(case), **timed})
        record("embedding_bag", rows[-1])
    return rows


def _run(call: Run, place: Place) -> None:
    call(place)


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
        "huge_pages": huge_pages(),
        "memory_overhead": round(table.overhead, 4),
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Median and worst overhead, %: of what a user sees, and of what the checks cost."""
    found = {}
    for name in (MAIN, SAME_PAGES):
        overheads = [100 * (row["ratio"] - 1) for row in rows if row["comparison"] == name]
        found[name] = {
            "median": round(median(overheads), 2),
            "worst": round(max(overheads), 2),
        }
    return found


def huge_pages() -> bool:
    """Whether memory that asks for huge pages gets them here."""
    libc = ctypes.CDLL(None)
    refused = bool(libc.prctl(_PR_SET_THP_DISABLE + 1, 0, 0, 0, 0))  # PR_GET_THP_DISABLE
    return THP.exists() and not refused and "[never]" not in THP.read_text()


def refuse_huge_pages() -> None:
    """For the rest of this process."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def main() -> None:
    """Every dimension, plain and weighted, prefetch on and off, one thread and all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--dims", type=int, nargs="+", default=DIMS)
    parser.add_argument("--bits", type=int, choices=KINDS, default=8)
    parser.add_argument("--threads", type=int, nargs="+", default=(1, torch.get_num_threads()))
    parser.add_argument("--small-pages", action="store_true", help="no huge pages for anybody")
    parser.add_argument("--all", action="store_true", help="the other comparisons as well")
    args = parser.parse_args()
    if args.small_pages:
        refuse_huge_pages()
    found: dict[int, list[dict[str, Any]]] = {threads: [] for threads in args.threads}
    for dim in track(args.dims, description="dimensions"):
        table = subject(ROWS, dim, args.bits)
        of_torch = table.bare.clone()
        for threads, rows in found.items():
            torch.set_num_threads(threads)
            for weighted, prefetch in product((False, True), (True, False)):
                case = replace(table, weighted=weighted, prefetch=prefetch)
                rows += measure(Place(case, of_torch), args.pairs, args.all)
    for threads, rows in found.items():
        torch.set_num_threads(threads)
        total = {"comparison": "summary", "bits": args.bits, "dims": list(args.dims)}
        total |= {"huge_pages": huge_pages(), "overhead_percent": summary(rows)}
        record("embedding_bag", total)


if __name__ == "__main__":
    main()
