"""``attnchecker.recovery``: the time of a correction, and of a checkpoint (section 5.5, fig. 11).

A correction's time is what its event says: from the suspicion to the repaired product. The other
way, as in the paper: the state is saved at every step, and loaded and the step done again after a
fault. It is saved without waiting for the disk, which makes it look cheaper than it is.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product as every
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import torch

from holdfast import events, sites
from holdfast.events import EventKind
from holdfast.protection import protect
from holdfast_lab.study.attnchecker.finetune import Trainer, task_for
from holdfast_lab.study.attnchecker.models import BASE, PAPER_MODELS, SMALL, TINY
from holdfast_lab.study.attnchecker.paper import CORRECTIONS, RESTORE, TIMES_CHEAPER
from holdfast_lab.study.attnchecker.probe import NAMES, TYPES, Probe, Strike
from holdfast_lab.study.attnchecker.subjects import GEMMS, Batch
from holdfast_lab.study.registry import Case, Progress, Row, Settings, Study

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CORRECTION, CHECKPOINT = "one correction", "a checkpoint at every step, and one restored"
SHARE, SLOWEST, WHOLE = "of a step, %", "ours, slowest: of a step, %", "saved and restored: %"
MODES = ("recompute", "checksum")


def correction_s(
    trainer: Trainer, batch: Batch, strike: Strike, correction: str, trials: int
) -> list[float]:
    """Seconds of each of so many corrections of a fault in the forward pass.

    Events of this process are forgotten.

    Raises:
        AssertionError: a fault was not repaired.
    """
    events.clear()
    with protect(trainer.model, correction=correction), torch.no_grad():
        for _ in range(trials):
            with sites.injecting(Probe(trainer.subject, strike, keep=False)) as probe:
                trainer.loss(batch)
            assert probe.struck, strike.matrix
    found = [
        event for event in events.recent() if event.kind == EventKind.GEMM_FAULT and event.rung
    ]
    events.clear()
    assert len(found) == trials, f"{trials - len(found)} faults in {strike.matrix} were missed"
    return [event.duration_s for event in found]


def checkpoint_s(trainer: Trainer, directory: Path, trials: int) -> tuple[float, float]:
    """Median seconds of saving the state to a file, and of loading it into the model."""
    path = directory / "state.pt"

    def save() -> None:
        parts = trainer.model.state_dict(), trainer.optimizer.state_dict()
        torch.save(parts, path)

    def load() -> None:
        model, optimizer = torch.load(path, weights_only=True)
        trainer.model.load_state_dict(model)
        trainer.optimizer.load_state_dict(optimizer)

    return _median_s(save, trials), _median_s(load, trials)


def _median_s(run: Callable[[], object], trials: int) -> float:
    times = []
    for _ in range(trials):
        started_s = time.perf_counter()
        run()
        times.append(time.perf_counter() - started_s)
    return median(times)


def _run(settings: Settings, progress: Progress) -> Iterator[Row]:
    middle = replace(SMALL, width=256, inner=1024, length=128, batch=4)
    size = settings.choose(TINY, middle, BASE)
    trials = settings.choose(3, 5, 10)
    task = task_for(size, settings.choose(40, 200, 2000), settings.seed)
    progress.begin(float(len(PAPER_MODELS)))
    later = []
    for name in PAPER_MODELS:
        trainer = Trainer(name, size, task, seed=settings.seed)
        batch = next(trainer.batches(1))
        with protect(trainer.model):
            trainer.train(2)
            step_s = _median_s(lambda: trainer.update(trainer.loss(batch)), trials)  # noqa: B023
        slowest = 0.0
        for correction, matrix in every(MODES, GEMMS):
            generator = settings.generator("recovery", name, correction, matrix)
            times = {
                kind: median(
                    correction_s(
                        trainer, batch, Strike(matrix, kind, generator), correction, trials
                    )
                )
                for kind in TYPES
            }
            slowest = max(slowest, *times.values())
            yield _correction_row(name, correction, matrix, times, step_s)
        with TemporaryDirectory() as directory:
            save_s, load_s = checkpoint_s(trainer, Path(directory), trials)
        later.append(_checkpoint_row(name, step_s, save_s, load_s, slowest))
        progress.advance(1)
    yield from later


def _correction_row(
    name: str, correction: str, matrix: str, times: dict[str, float], step_s: float
) -> Row:
    case: Case = {"model": name, "correction": correction, "struck": matrix}
    measured = {f"{NAMES[kind]}, ms": 1e3 * seconds for kind, seconds in times.items()}
    measured[SHARE] = 100 * max(times.values()) / step_s
    return Row(CORRECTION, case, measured, {SHARE: CORRECTIONS[matrix]})


def _checkpoint_row(
    name: str, step_s: float, save_s: float, load_s: float, slowest_s: float
) -> Row:
    restored_s = save_s + load_s + step_s  # the step is done again
    measured = {
        "step, ms": 1e3 * step_s,
        "saved, %": 100 * save_s / step_s,
        "loaded, %": 100 * load_s / step_s,
        WHOLE: 100 * restored_s / step_s,
        SLOWEST: 100 * slowest_s / step_s,
        "times cheaper": restored_s / slowest_s,
    }
    published = {WHOLE: RESTORE, "times cheaper": TIMES_CHEAPER}
    return Row(CHECKPOINT, {"model": name}, measured, published)


def _verdict(rows: list[Row]) -> str:
    """Check that a correction is cheaper than restoring a checkpoint."""
    for row in rows:
        if row.table == CHECKPOINT and row.measured["times cheaper"] <= 1:
            return f"{row.case['model']}: a correction took longer than a checkpoint restored"
    return ""


def _plot(rows: list[Row], figure: "Figure") -> None:
    """Plot the cost of correction and of checkpointing in percent of a training step."""
    axes = figure.subplots()
    chosen = [row for row in rows if row.table == CHECKPOINT]
    names = [str(row.case["model"]) for row in chosen]
    for name, marker in ((WHOLE, "s"), (SLOWEST, "o")):
        axes.plot(names, [row.measured[name] for row in chosen], f"{marker}--", label=name)
    axes.set(yscale="log", xlabel="model", ylabel="time of a recovery, % of a step")
    figure.legend(loc="outside upper center", ncols=2)


STUDY = Study(
    name="attnchecker.recovery",
    paper="ATTNChecker, section 5.5, figure 11",
    reproduces="correcting an error costs a small part of a training step, a checkpoint saved and "
    "restored more than two of them",
    run=_run,
    plot=_plot,
    verdict=_verdict,
)
