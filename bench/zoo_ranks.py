"""The loops of several ranks, healthy and struck: how many runs end with the calm run's bits?

    python -m bench.zoo_ranks [--seeds 1-3]

Runs ``holdfast_lab.zoo.ranks``: every loop with every seed, calm and with each kind of fault on one
rank; a row for each loop, and one for all of them. The exit code is 0 if all runs ended equal.
"""

import argparse
import time
from collections import Counter

from bench.rows import record
from holdfast_lab.zoo.ranks.campaign import outcomes, seeds_of
from holdfast_lab.zoo.ranks.loops import LOOPS


def main() -> None:
    """All loops; exit code 1 if one run ended otherwise than the calm run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=seeds_of, default="1-3")
    seeds = parser.parse_args().seeds
    every: Counter[str] = Counter()
    for name, loop in LOOPS.items():
        began_s = time.monotonic()
        found = [one for seed in seeds for one in outcomes(name, seed)]
        by_kind = {
            one.kind: Counter(o.outcome for o in found if o.kind == one.kind) for one in found
        }
        every.update(one.outcome for one in found)
        took_s = round(time.monotonic() - began_s, 1)
        place = {"ranks": loop.ranks, "nodes": loop.nodes, "seeds": f"{seeds[0]}-{seeds[-1]}"}
        record("zoo_ranks", {"loop": name, **place, "outcomes": by_kind, "all_s": took_s})
    record("zoo_ranks", {"loop": "all", "runs": every.total(), "outcomes": every})
    print(f"{every['equal']} of {every.total()} runs ended equal")
    raise SystemExit(every["equal"] + every["refused"] != every.total())


if __name__ == "__main__":
    main()
