"""Faults in everything that a step of eight small models computes, and what became of them.

    python -m bench.step_faults [--models gpt2 bert …] [--modes default strict] [--trials N]
        [--collectives N] [--jobs N] [--seed N] [--resume FILE]
    python -m bench.step_faults --table

``holdfast_lab/step_faults/trials.py`` says what a trial is and defines the outcomes. ``--trials``
counts for each model and mode; ``--collectives`` is the number of faults in the all-reduces of two
ranks. With ``--resume`` trials are kept in a file, and a later call with more of them continues.
"""

import argparse
import gc
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from bench.coverage import Size, models
from bench.rows import RESULTS, record
from holdfast.inject.journal import Journal
from holdfast.torchrun import interruptible
from holdfast_lab.step_faults import collectives
from holdfast_lab.step_faults.summary import summaries, table
from holdfast_lab.step_faults.training import Subject
from holdfast_lab.step_faults.trials import MODES, Trials

CLAIM, BATCHES = "step_faults", 4
# Without dropout of attention, which would hide some of the faults.
SMALL = Size(32, 2, 2, 64, 16, 2, 16, 4, 4, 8, 3, 8, (1, 1, 1, 1), 0.0)


def subject(name: str) -> Subject:
    """Make a model with its batches and its optimizer, always the same one."""
    torch.manual_seed(0)
    model, draw, loss = models(SMALL)[name]()
    model.train()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if name in ("resnet50", "unet", "dlrm"):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    return Subject(name, model, optimizer, [draw() for _ in range(BATCHES)], loss)


def rows(args: argparse.Namespace, done: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Run the trials that are not done; yield their rows."""
    for name in args.models:
        for mode in args.modes:
            left = [n for n in range(args.trials) if f"{name}/{mode}/{n}" not in done]
            if left:
                trials = Trials(subject(name), mode, seed=args.seed)
                gc.collect()
                gc.freeze()  # forks would copy what their garbage collector looks at
                with closing(trials), ThreadPoolExecutor(args.jobs) as pool:
                    yield from pool.map(trials, left)  # each in a process of its own
    kinds, every = list(collectives.MODES), range(args.collectives)
    left = [n for n in every if f"ranks/{kinds[n % len(kinds)]}/{n}" not in done]
    if left:
        yield from collectives.rows(left, partial(subject, "gpt2"), args.seed)


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the campaign with a bar; return the rows of all its trials."""
    total = len(args.models) * len(args.modes) * args.trials + args.collectives
    journal, bar = Journal(args.resume, {"seed": args.seed}), Progress(console=Console(stderr=True))
    with closing(journal), bar:
        task = bar.add_task("trials", total=total, completed=len(journal.done))
        for row in rows(args, journal.done):
            journal.append({f"{row['model']}/{row['mode']}/{row['trial']}": row})
            bar.update(task, advance=1, description=f"{row['model']} {row['mode']}")
    return list(journal.done.values())


def main() -> None:
    """Run the campaign and record its counts, or print the table of those recorded."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--models", nargs="*", choices=[*models()], default=[*models()])
    add("--modes", nargs="+", choices=[*MODES], default=["default", "strict"])
    add("--trials", type=int, default=1500)
    add("--collectives", type=int, default=600)
    add("--jobs", type=int, default=2)
    add("--seed", type=int, default=0)
    add("--resume", type=Path)
    add("--table", action="store_true")
    args = parser.parse_args()
    if args.table:
        recorded = (RESULTS / f"{CLAIM}.jsonl").read_text().splitlines()
        sys.stdout.write(table(map(json.loads, recorded)))
        return
    interruptible()
    torch.set_num_threads(1)
    for each in summaries(run(args)):
        record(CLAIM, each)


if __name__ == "__main__":
    main()
