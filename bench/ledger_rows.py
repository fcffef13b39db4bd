"""False alarms of the device's kernel on clean rows, in Triton's interpreter or on a CUDA device.

    TRITON_INTERPRET=1 python -m bench.ledger_rows [--rows N]

Products of every distribution that healthy programs multiply, in fp32 and in bf16; the number
in the ledger after each is the largest ratio of a residual to its threshold. With no ratio above 1
in n rows, the rule of three bounds the rate of false alarms by 3/n at 95 % confidence.
"""

import argparse
import sys
from contextlib import nullcontext
from itertools import cycle, product
from pathlib import Path

import torch

from bench.rows import record
from holdfast.abft.gemm.cpu import configured_core
from holdfast.abft.triton.tolerance import Tolerance

TESTS = Path(__file__).parent.parent / "tests" / "abft" / "gemm"
SIZES = 20480, 64, 64  # M, K and N: many rows for the time that the interpreter takes


def ratio(dtype: torch.dtype, distribution: str, seed: int, device: str) -> float:
    """The largest ratio in one product."""
    from gemm_distributions import DISTRIBUTIONS

    generator = torch.Generator().manual_seed(seed)
    made = DISTRIBUTIONS[distribution](SIZES[0], SIZES[1], SIZES[2], dtype, generator)
    a, b = (each.to(device) for each in made)
    core, c = configured_core(), a @ b
    slot = torch.zeros(1, dtype=torch.int32, device=device)
    tolerance = Tolerance.of(dtype, dtype, SIZES[1], SIZES[2])
    core.kernel_judge(c, slot, a, core.kernel_encode(b), None, 1.0, 1.0, tolerance)
    return float(slot.view(torch.float32))


def measure(rows: int) -> None:
    """Judge products until there are enough rows."""
    sys.path.insert(0, str(TESTS))
    from gemm_distributions import DISTRIBUTIONS

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        from holdfast.abft.gemm.ahead_of_time import prepare

        prepare(torch.device("cuda", torch.cuda.current_device()))
        launching = nullcontext()
    else:
        from interpreted_driver import interpreting

        launching = interpreting()
    worst: dict[str, float] = {}
    alarms = judged = 0
    with launching:
        kinds = product(DISTRIBUTIONS, (torch.float32, torch.bfloat16))
        for seed, (name, dtype) in enumerate(cycle(kinds)):
            if judged >= rows:
                break
            found = ratio(dtype, name, seed, device)
            judged += SIZES[0]
            alarms += found > 1
            worst[name] = max(worst.get(name, 0.0), round(found, 3))
    bound = None if alarms else 3 / judged
    record(
        "ledger_rows",
        {
            "device": device,
            "rows": judged,
            "alarms": alarms,
            "false_alarm_bound_95": bound,
            "worst_ratio": worst,
        },
    )
    if alarms:
        raise SystemExit(f"{alarms} products with alarms on clean data")


def main() -> None:
    """Judge a million rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    measure(parser.parse_args().rows)


if __name__ == "__main__":
    main()
