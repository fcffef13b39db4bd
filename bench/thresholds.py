"""What each threshold of the row checks costs and how far it is above the errors that occur.

    python -m bench.thresholds [--pairs N]

Cost: a linear layer, forward and backward, verified over unverified, in turn. Tightness: the median
threshold of a product's rows over their largest residual, the range over six distributions of
independent elements. Suspects: the share of healthy rows over the threshold, and the coherent
distributions that have some; none may become an event. V-ABFT has a quick calibration's e_max.
"""

import argparse
import os

import torch
from rich.console import Console
from rich.table import Table
from torch.nn import Identity

from bench.gemm import DTYPES, Layer, unverified
from bench.paired import paired
from bench.rows import record
from holdfast import events
from holdfast.abft.gemm.cpu import encode, verify
from holdfast.abft.gemm.reference import over_threshold
from holdfast.protection import protect
from holdfast.thresholds import REGISTRY, Threshold, apply_profile, calibrate
from holdfast_lab.distributions import COHERENT, RANDOM, Distribution


def rows_of(make: Distribution, dtype: torch.dtype) -> tuple[float, float]:
    """Median threshold over largest residual, and the share of suspects, of a product's rows."""
    a, b = make(256, 512, 512, dtype, torch.Generator().manual_seed(0))
    rows = verify(a @ b, a, *encode(b), b=b)
    tightness = rows[1].median() / rows[0].abs().max()
    return float(tightness), float(over_threshold(rows).double().mean())


def measure(threshold: Threshold, dtype: torch.dtype, pairs: int) -> dict[str, object]:
    """The row of one threshold and dtype."""
    layer = Layer(2048, 512, 512, dtype, updated=True)
    events.clear()
    with protect(Identity(), threshold=threshold):
        random = [rows_of(make, dtype) for make in RANDOM.values()]
        coherent = [name for name, make in COHERENT.items() if rows_of(make, dtype)[1]]

        def bare() -> None:
            with unverified():
                layer.run(1)

        cost = paired(bare, lambda: layer.run(1), pairs=pairs)
    if faults := [event for event in events.recent() if not event.kind.endswith("_input")]:
        raise SystemExit(f"{len(faults)} events on clean data: {faults[0]}")
    return {
        "threshold": threshold.name,
        "dtype": next(name for name, each in DTYPES.items() if each == dtype),
        "tightness": [round(end(ratio for ratio, _ in random), 1) for end in (min, max)],
        "suspects": sum(share for _, share in random) / len(random),
        "coherent_flagged": coherent,
        **cost,
        "load": round(os.getloadavg()[0], 2),
    }


def main() -> None:
    """Every threshold in both dtypes; the table last."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=12)
    pairs, profile = parser.parse_args().pairs, calibrate(effort="quick", dtypes=tuple(DTYPES))
    table = Table(*(keys := ("threshold", "dtype", "tightness", "ratio", "coherent_flagged")))
    for threshold in (REGISTRY | {"vabft": apply_profile(profile)}).values():
        for dtype in DTYPES.values():
            row = measure(threshold, dtype, pairs)
            record("thresholds", row)
            table.add_row(*(str(row[key]) for key in keys))
    Console().print(table)


if __name__ == "__main__":
    main()
