"""Serve a quantised DLRM from several threads while its arithmetic and its memory are damaged.

First throughput and latency of the same requests, protected and not, in turns; then the requests
again under faults. Exit code 0: no wrong answer left the protected server, and no request of it
failed; 1: one did.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from examples.dlrm.measure import MODES, Scenario, latency, throughput, under_faults
from examples.dlrm.model import Dlrm, Sizes, quantised
from examples.dlrm.requests import Traffic
from examples.dlrm.serving import answering


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m examples.dlrm", description=__doc__)
    made.add_argument("--requests", type=_positive(int), default=400, help="of each window")
    made.add_argument("--batch", type=_positive(int), default=32, help="candidates a request")
    made.add_argument("--pooling", type=_positive(int), default=20, help="indices a bag, at most")
    made.add_argument("--most-rows", type=_positive(int), default=200_000, help="of any table")
    made.add_argument("--threads", type=_positive(int), default=2, help="that answer")
    made.add_argument("--rounds", type=_positive(int), default=10, help="windows of each mode")
    made.add_argument("--load", type=_positive(float), default=0.5, help="share of the capacity")
    made.add_argument("--struck", type=float, default=0.01, help="share of results struck")
    made.add_argument("--rot-every", type=_positive(float), default=0.02, help="seconds a flip")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    return made


def _positive(kind: type[Any]) -> Any:
    def parse(text: str) -> Any:
        value = kind(text)
        if not value > 0:
            raise argparse.ArgumentTypeError(f"{text} must be positive")
        return value

    parse.__name__ = kind.__name__
    return parse


def build(arguments: argparse.Namespace) -> Scenario:
    """The model, quantised, and the requests with their right answers."""
    sizes = Sizes.criteo(arguments.most_rows)
    torch.manual_seed(arguments.seed)
    model = quantised(Dlrm(sizes))
    traffic = Traffic(sizes, arguments.batch, arguments.pooling)
    seeds = range(arguments.seed, arguments.seed + arguments.requests)
    requests = [traffic.request(seed) for seed in seeds]
    right = [answering(model)(request) for request in requests]
    return Scenario(model, requests, right, arguments.threads, arguments.seed)


def main(argv: Sequence[str] | None = None) -> int:
    """Build, measure, damage, report."""
    arguments = parser().parse_args(argv)
    torch.set_num_threads(1)  # each request is answered by one thread
    with Console(stderr=True).status("building the model and the requests") as status:
        scenario = build(arguments)
        speed = throughput(scenario, arguments.rounds, status.update)
        per_s = arguments.load * speed["unprotected_per_s"]
        speed |= latency(scenario, arguments.rounds, per_s, status.update)
        worth = {
            mode: under_faults(
                scenario, mode, 2, arguments.struck, arguments.rot_every, status.update
            )
            for mode in reversed(MODES)  # what rots unprotected stays so
        }
    show(speed, worth)
    if arguments.json:
        arguments.json.write_text(json.dumps({"speed": speed, "faults": worth}, indent=2) + "\n")
    return int(worth["protected"]["wrong"] + worth["protected"]["failed"] > 0)


def show(speed: dict[str, Any], worth: dict[str, dict[str, Any]]) -> None:
    """Both tables."""
    table = Table("", *MODES, "ratio", title="speed, without faults")
    for name, unit in (("per_s", "requests/s"), ("p50_ms", "p50, ms"), ("p99_ms", "p99, ms")):
        ratio = speed[{"per_s": "throughput_ratio"}.get(name, name.replace("_ms", "_ratio"))]
        table.add_row(unit, *(f"{speed[f'{mode}_{name}']:g}" for mode in MODES), f"{ratio:.3f}")
    outcome = Table("", *MODES, title="under faults")
    for name in ("answers", "refused", "off_by_rounding", "failed", "wrong", "events"):
        outcome.add_row(name.replace("_", " "), *(f"{worth[mode][name]:,}" for mode in MODES))
    for name in sorted({kind for each in worth.values() for kind in each["faults"]}):
        counts = (f"{worth[mode]['faults'].get(name, 0):,}" for mode in MODES)
        outcome.add_row(f"struck: {name}", *counts)
    console = Console()
    console.print(table)
    console.print(outcome)


if __name__ == "__main__":
    sys.exit(main())
