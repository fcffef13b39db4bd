"""The campaign of the zoo of training loops, with its counts kept as a row.

    python -m bench.zoo [--loops NAME …] [--seeds A-B]

As ``python -m holdfast_lab.zoo``, which says what runs; exit code 1 if a loop ends with other bits.
"""

import time

import torch

from bench.rows import record
from holdfast.torchrun import interruptible
from holdfast_lab.zoo import campaign
from holdfast_lab.zoo.__main__ import parsed, run
from holdfast_lab.zoo.catalogue import chosen


def main() -> None:
    """Run the campaign and record its counts."""
    args = parsed(None)
    interruptible()
    torch.set_num_threads(1)
    loops = chosen(args.loops)
    began_s = time.monotonic()
    outcomes = run(campaign.cases(loops, args.seeds))
    seconds = time.monotonic() - began_s
    names = [loop.name for loop in loops]
    found = {"loops": names, "seeds": list(args.seeds), **campaign.summary(outcomes)}
    record("zoo", found | {"seconds": round(seconds, 1)})
    raise SystemExit(not all(outcome.good for outcome in outcomes))


if __name__ == "__main__":
    main()
