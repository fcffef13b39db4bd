"""The share of a training step's time in each class of operators, of eight models in small.

    python -m bench.step_shares [--models gpt2 bert …] [--steps N]
    python -m bench.step_shares --table

The models are those of ``bench.coverage``, trained by AdamW on one thread of a CPU. A dispatch mode
takes the processor time of every call of an operator in forward, backward and update; what Python
and autograd take between the calls does not count. The classes are those of ``bench.step_faults``.
One row a model; ``--table`` prints the newest row of each as Markdown.
"""

import argparse
import json
import time
from collections import Counter
from typing import Any

import torch

from bench.coverage import models
from bench.rows import RESULTS, record
from holdfast_lab.step_faults.calls import PASS, Numbered
from holdfast_lab.step_faults.operators import CLASSES, OPTIMIZER, class_of

CLAIM, WARMUP = "step_shares", 2


class Timed(Numbered):
    """Adds up the processor time of the calls of each class."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = Counter[str]()

    def called(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a call, and take its time."""
        kind = OPTIMIZER if self.part == OPTIMIZER else class_of(func)
        begun_s = time.thread_time()
        result = func(*args, **kwargs)
        self.seconds[kind] += time.thread_time() - begun_s
        return result


def measured(name: str, steps: int) -> dict[str, Any]:
    """Train a model for some steps, and return its row."""
    torch.manual_seed(0)
    model, draw, loss = models()[name]()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    timed = Timed()
    for step in range(WARMUP + steps):
        if step == WARMUP:
            timed.seconds.clear()
        batch = draw()
        optimizer.zero_grad()
        with timed.within(PASS):
            loss(model, batch).backward()
        with timed.within(OPTIMIZER):
            optimizer.step()
    total = timed.seconds.total()
    shares = {
        kind: round(timed.seconds[kind] / total, 5) for kind in CLASSES if kind in timed.seconds
    }
    return {"model": name, "steps": steps, "step_s": round(total / steps, 4), "shares": shares}


def table(rows: list[dict[str, Any]]) -> str:
    """Return percent of the time of the newest row of each model, as a table in Markdown."""
    newest = {row["model"]: row["shares"] for row in rows}
    lines = [f"| class | {' | '.join(newest)} |", "|" + " --- |" * (1 + len(newest))]
    for kind in CLASSES:
        if any(kind in shares for shares in newest.values()):
            cells = [f"{100 * shares.get(kind, 0):.1f}" for shares in newest.values()]
            lines.append(f"| {kind} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure the chosen models and record a row for each, or print the table of the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=[*models()], default=[*models()])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--table", action="store_true", help="print the table of the rows")
    args = parser.parse_args()
    if args.table:
        lines = (RESULTS / f"{CLAIM}.jsonl").read_text().splitlines()
        print(table([json.loads(line) for line in lines]))
        return
    torch.set_num_threads(1)
    for name in args.models:
        record(CLAIM, measured(name, args.steps))


if __name__ == "__main__":
    main()
