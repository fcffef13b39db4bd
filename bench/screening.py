"""Does a screening find faulty cores, how soon, and is it silent on healthy ones?

    python -m bench.screening [--trials N] [--limit 300] [--minutes M] [--only NAME]

Emulated faulty cores of each kind are screened until the first wrong result; the references are
this machine's own, stored by a clean screening just before. Then the machine is screened clean, for
so many core-minutes: with no alarm in n comparisons the rule of three bounds the rate of false
alarms by 3/n at 95 % confidence. Times are wall time; `core_s` is what the faulty core's worker
computed until then, which another load on the machine does not stretch.
"""

import argparse
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from rich.progress import Progress

from bench.rows import record
from holdfast.screen.emulation import Emulated
from holdfast.screen.runner import Request, screen
from holdfast.screen.units import Unit, machine_units
from holdfast.screen.verdict import Verdict

# By name: op, bit, one in so many operations of that op (1: every one, always alike).
KINDS = {
    "persistent, lowest bits of a product": ("gemm.bf16", 0, 1),
    "persistent, outside matmuls": ("elementwise", 3, 1),
    "persistent, digest": ("digest", 7, 1),
    "stuck bit of memory": ("memory.random", 33, 1),
    "1 in 1,000 operations of any kind, low bit": ("*", 2, 1000),
    "1 in 1,000 operations of any kind, high bit": ("*", 14, 1000),
    "1 in 1,000 fp32 products, low bit": ("gemm.fp32", 2, 1000),
    "1 in 1,000 outside matmuls": ("elementwise", 12, 1000),
}


def trial(kind: str, seed: int, units: list[Unit], reference: Path, limit_s: float) -> Verdict:
    """Screen with one emulated faulty core until it is found."""
    op, bit, every = KINDS[kind]
    fault = Emulated(units[seed % len(units)].name, op, bit, every, seed)
    return screen(
        Request(units, seconds=limit_s, reference=reference, stop_at_first=True, faults=[fault])
    )


def faulty(kind: str, trials: int, units: list[Unit], reference: Path, limit_s: float) -> None:
    """A row of one kind of fault."""
    verdicts = [trial(kind, seed, units, reference, limit_s) for seed in range(trials)]
    found = [verdict for verdict in verdicts if verdict.findings]
    named = [
        verdict
        for seed, verdict in enumerate(verdicts)
        if verdict.suspects() == [units[seed % len(units)].name]
    ]
    record("screening", _row(kind, verdicts, found, len(named)) | {"limit_s": limit_s})


def _row(kind: str, verdicts: list[Verdict], found: list[Verdict], named: int) -> dict[str, Any]:
    seconds = [verdict.first_s for verdict in found if verdict.first_s is not None]
    core_s = [
        work.cpu_s
        for verdict in found
        for work in verdict.work
        if work.unit.name in verdict.suspects()
    ]
    finders = {finder for v in found for finding in v.findings for finder in finding.finders}
    return {
        "what": kind,
        "trials": len(verdicts),
        "found": len(found),
        "named": named,
        "first_s_median": median(seconds) if seconds else None,
        "first_s_worst": max(seconds, default=None),
        "core_s_median": median(core_s) if core_s else None,
        "finders": sorted(finders),
        "exit_codes": sorted({verdict.exit_code for verdict in verdicts}),
    }


def clean(minutes: float, units: list[Unit], reference: Path) -> bool:
    """A row of healthy core-minutes; whether it was silent."""
    verdict = screen(Request(units, seconds=60 * minutes / len(units), reference=reference))
    record(
        "screening",
        {
            "what": "clean",
            "core_minutes": sum(work.wall_s for work in verdict.work) / 60,
            "core_minutes_computed": sum(work.cpu_s for work in verdict.work) / 60,
            "verdict": verdict.state,
            "alarms": len(verdict.findings),
            "comparisons": dict(verdict.comparisons),
            "false_alarm_bound_95": verdict.false_alarm_bound,
            "rounds": [work.rounds for work in verdict.work],
            "gflop_s": [round(work.speed("flop") / 1e9, 2) for work in verdict.work],
            "utilisation": [round(work.utilisation, 3) for work in verdict.work],
            "memory_bytes": verdict.memory_bytes,
        },
    )
    return not verdict.findings


def main() -> None:
    """References, every kind of fault, and clean minutes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=10, help="of each kind of fault")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds a trial")
    parser.add_argument("--minutes", type=float, default=100.0, help="clean core-minutes")
    parser.add_argument("--only", default="", help="kinds whose name holds this")
    args = parser.parse_args()
    units = machine_units(gpus=False)
    with tempfile.TemporaryDirectory() as folder:
        reference = Path(folder) / "reference.json"
        stored = screen(
            Request(units, rounds=2, store=reference, finders=("repetition", "comparison"))
        )
        if stored.state != "healthy":
            raise SystemExit(f"no reference: {stored.findings or stored.troubles}")
        kinds = [kind for kind in KINDS if args.only in kind] if args.trials else []
        with Progress() as progress:
            for kind in progress.track(kinds, description="faulty cores"):
                faulty(kind, args.trials, units, reference, args.limit)
        silent = clean(args.minutes, units, reference) if args.minutes else True
    if not silent:
        raise SystemExit("alarms on clean hardware")


if __name__ == "__main__":
    main()
