"""What the benches of a CUDA device share: timing of graphs by events, and the command line."""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bench.rows import record

SAMPLE_S = 2e-3  # a sample repeats its call for about this long, so that events resolve it
DRY_PAIRS = 2

Run = Callable[[], Any]
Rows = list[dict[str, Any]]


def captured(run: Run) -> Run:
    """A call as a CUDA graph; elsewhere the call."""
    if not torch.cuda.is_available():
        return run
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def seconds(run: Run, repeats: int) -> float:
    """Mean seconds of a call, on the device where there is one."""
    if not torch.cuda.is_available():
        started_s = time.perf_counter()
        for _ in range(repeats):
            run()
        return (time.perf_counter() - started_s) / repeats
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / repeats


def paired(baseline: Run, candidate: Run, pairs: int) -> dict[str, Any]:
    """Both in turn: median and quartiles of candidate / baseline, and the median of each."""
    sides = [captured(baseline), captured(candidate)]
    repeats = [max(1, int(SAMPLE_S / seconds(side, 1))) for side in sides]
    times = [
        [seconds(side, count) for side, count in zip(sides, repeats, strict=True)]
        for _ in range(pairs)
    ]
    ratios = [b / a for a, b in times]
    low, _, high = statistics.quantiles(ratios, n=4)
    return {
        "ratio": round(statistics.median(ratios), 4),
        "ratio_quartiles": [round(low, 4), round(high, 4)],
        "pairs": pairs,
        "baseline_s": statistics.median(a for a, _ in times),
        "candidate_s": statistics.median(b for _, b in times),
    }


def command(
    claim: str,
    description: str | None,
    measure: Callable[[bool, str, int], Rows],
    table: Callable[[Rows, bool], str],
    *,
    pairs: int,
    arguments: Sequence[str] | None = None,
) -> None:
    """Run a bench: measure, record a row each, and print the table last.

    Args:
        claim: the bench's module, and the name of its results.
        description: its docstring, of which ``--help`` shows the first line.
        measure: gives the rows, from whether it is a dry run, the device and the number of pairs.
        table: the rows as text, from them and whether they were measured.
        pairs: by default.

    Raises:
        SystemExit: there is no CUDA device and no ``--dry-run``.
    """
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=pairs)
    parser.add_argument("--dry-run", action="store_true", help="tiny, no figures, no rows")
    args = parser.parse_args(arguments)
    dry: bool = args.dry_run
    if not dry and not torch.cuda.is_available():
        raise SystemExit(f"bench.{claim} measures a CUDA device and there is none: use --dry-run")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = measure(dry, device, DRY_PAIRS if dry else args.pairs)
    if not dry:
        for row in rows:
            record(claim, {**row, "device": torch.cuda.get_device_name()})
    print(table(rows, not dry))
