"""Random storms, end to end: does every one of them end with the calm run's weights?

    python -m bench.storms [--seeds 10] [--first 1]
    python -m bench.storms --shipped

Runs ``holdfast demo --random-storm SEED`` for each seed, and one more with flips of the lowest
mantissa bits added and every step audited; each is a row. ``--shipped``: the storm that the demo
ships with instead, once caught and once with nothing to catch it, which must not end equal.
"""

import argparse
import json
import tempfile
import time
from collections import Counter
from pathlib import Path

from bench.rows import record
from holdfast.cli.main import main as holdfast

LOW_FLIPS = 8


def run(arguments: list[str], claim: str = "storms") -> bool:
    """One demo; True if it ended equal."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        began_s = time.monotonic()
        code = holdfast(
            ["demo", "--run-dir", str(Path(folder, "run")), "--json", str(result), *arguments]
        )
        took_s = time.monotonic() - began_s
        data = json.loads(result.read_text())
    faults = data["faults"]
    record(
        claim,
        {
            "arguments": arguments,
            "exit_code": code,
            "equal": data["equal"],
            "faults": len(faults),
            "by_rung": Counter(fault["rung"] or fault["seen_by"] for fault in faults),
            "below_line": sum(fault["below_line"] for fault in faults),
            "calm_s": round(data["runs"]["calm"]["seconds"], 1),
            "storm_s": round(data["runs"]["storm"]["seconds"], 1),
            "all_s": round(took_s, 1),
        },
    )
    if code != (0 if data["equal"] else 1):
        raise SystemExit(f"demo {arguments}: equal is {data['equal']}, but the exit code {code}")
    return bool(data["equal"])


def main() -> None:
    """All seeds; exit code 1 if one storm ended otherwise than the calm run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--shipped", action="store_true", help="the shipped storm instead")
    args = parser.parse_args()
    if args.shipped:
        caught, let_through = run([], "demo"), run(["--no-protect"], "demo")
        raise SystemExit(not caught or let_through)
    seeds = range(args.first, args.first + args.seeds)
    ended = [run(["--random-storm", str(seed)]) for seed in seeds]
    low = ["--random-storm", str(args.first), "--low-flips", str(LOW_FLIPS), "--audit", "1.0"]
    ended.append(run(low))
    print(f"{sum(ended)} of {len(ended)} storms ended equal")
    raise SystemExit(not all(ended))


if __name__ == "__main__":
    main()
