"""False alarms on healthy hardware: fine-tuning the paper's four models, protected, without faults.

    python -m bench.attention_clean [--model NAME] [--steps N] [--slice SECONDS] [--state FOLDER]

Each model is trained on the docstring task (width 64, 2 layers, 4 heads, sequences of 32, batches
of 8, dropout 0.1) while every product is verified; counted are the rows verified, those that were
suspected and cleared, and the events, of which there must be none. With no event in n rows, the
rule of three bounds the rate of false alarms by 3/n at 95 % confidence.

With ``--slice`` a run stops after so many seconds, keeps its state in the folder, and goes on from
there when it is started again; the row is recorded when all steps are done.
"""

import argparse
import time
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from tempfile import gettempdir

import torch

from bench.rows import record
from holdfast import events
from holdfast.inject.statistics import rule_of_three
from holdfast.protection import protect
from holdfast_lab.study.attnchecker.docstrings import Task
from holdfast_lab.study.attnchecker.finetune import Trainer, task_for
from holdfast_lab.study.attnchecker.models import PAPER_MODELS, SMALL

SIZE = replace(SMALL, width=64, inner=256, length=32, batch=8)
PAIRS, DROPOUT, LEARNING_RATE = 400, 0.1, 1e-3
LAST = 50  # steps whose losses are averaged


@dataclass
class Progress:
    """What was counted so far; kept between slices."""

    steps: int = 0
    rows: int = 0
    suspects: int = 0
    dismissed: int = 0
    alarms: int = 0
    first_loss: float = 0.0
    losses: tuple[float, ...] = ()


def train(name: str, task: Task, steps: int, until_s: float, kept: Path) -> Progress:
    """Train on to ``steps``, or until the clock shows ``until_s``, from what is kept in a file."""
    trainer = Trainer(name, SIZE, task, dropout=DROPOUT, learning_rate=LEARNING_RATE)
    done = Progress()
    if kept.exists():
        parts = torch.load(kept, weights_only=True)
        trainer.restore(parts["state"])
        done = Progress(**parts["progress"])
    events.clear()
    with protect(trainer.model) as protection:
        protection.reset_counters()
        batches = islice(trainer.batches(steps), done.steps, None)
        for batch in batches:
            loss = trainer.loss(batch, done.steps)
            trainer.update(loss)
            done.steps += 1
            done.first_loss = done.first_loss or loss.item()
            done.losses = (*done.losses, loss.item())[-LAST:]
            if time.monotonic() > until_s:
                break
        report = protection.report()
    done.rows += sum(site.rows for site in report.sites)
    done.suspects += sum(site.suspects for site in report.sites)
    done.dismissed += report.false_alarms
    done.alarms += len(events.recent())
    torch.save({"state": trainer.state(), "progress": asdict(done)}, kept)
    return done


def row(name: str, done: Progress) -> dict[str, object]:
    """What is recorded of a finished run."""
    return {
        "model": name,
        **{key: getattr(SIZE, key) for key in ("width", "layers", "heads", "length", "batch")},
        "steps": done.steps,
        "rows": done.rows,
        "events": done.alarms,
        "suspects": done.suspects,
        "dismissed": done.dismissed,
        "false_alarm_bound_95": rule_of_three(done.rows) if not done.alarms else None,
        "loss_first": round(done.first_loss, 4),
        "loss_last": round(sum(done.losses) / len(done.losses), 4),
    }


def main() -> None:
    """Every model that was asked for, or as far as the time goes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=PAPER_MODELS, action="append")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--slice", type=float, default=float("inf"), help="seconds to run at most")
    parser.add_argument("--state", type=Path, default=Path(gettempdir()) / "attention_clean")
    args = parser.parse_args()
    args.state.mkdir(parents=True, exist_ok=True)
    until_s = time.monotonic() + args.slice
    task = task_for(SIZE, PAIRS, 0)
    for name in args.model or PAPER_MODELS:
        kept, finished = (args.state / f"{name}.{end}" for end in ("pt", "done"))
        if finished.exists():
            continue
        done = train(name, task, args.steps, until_s, kept)
        if done.alarms:
            raise SystemExit(f"{done.alarms} events on clean data: {events.recent()[0]}")
        if done.steps < args.steps:
            raise SystemExit(f"{name}: {done.steps} of {args.steps} steps; start again to go on")
        record("attention_clean", row(name, done))
        kept.unlink()
        finished.touch()
    for name in args.model or PAPER_MODELS:
        (args.state / f"{name}.done").unlink()


if __name__ == "__main__":
    main()
