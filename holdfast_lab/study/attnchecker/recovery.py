"""``attnchecker.recovery``: the time of a correction, and of a checkpoint (section 5.5, figure 11).

The time of a correction is in its event, from the suspicion to the repaired product. The
alternative is the paper's: the state is saved at every step, and after a fault it is loaded and the
step repeated. Saving does not wait for the disk, so that it seems cheaper than it is.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product as every
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch

from holdfast import events, sites
from holdfast.events import EventKind
from holdfast.protection import protect
from holdfast_lab.study.attnchecker.finetune import Trainer, task_for
from holdfast_lab.study.attnchecker.models import BASE, PAPER_MODELS, SMALL, TINY
from holdfast_lab.study.attnchecker.overhead import attention_call
from holdfast_lab.study.attnchecker.paper import CORRECTIONS, RESTORE, TIMES_CHEAPER
from holdfast_lab.study.attnchecker.probe import NAMES, TYPES, Probe, Strike
from holdfast_lab.study.attnchecker.subjects import GEMMS, Subject
from holdfast_lab.study.plots import line
from holdfast_lab.study.registry import Case, Figure, Progress, Row, Settings, Study, watched
from holdfast_lab.study.timing import median_s

CORRECTION, CHECKPOINT = "one correction", "a checkpoint at every step, and one restored"
SHARE, SLOWEST, WHOLE = "of a step, %", "ours, slowest: of a step, %", "saved and restored: %"
MODES = ("recompute", "checksum")


def correction_s(
    case: Subject,
    forward: Callable[[], object],
    strike: Strike,
    correction: str,
    trials: int,
) -> list[float]:
    """Return the seconds of each of ``trials`` corrections of a fault in an attention block.

    ``forward`` computes the block alone (``attention_call``): the first passes of a whole model
    under ``protect`` also look for operators of other packages. All faults must be repaired. The
    events of this process are cleared.
    """
    events.clear()
    with protect(case.model, correction=correction), torch.no_grad():
        for _ in range(trials):
            with sites.injecting(Probe(case, strike, keep=False)) as probe:
                forward()
            assert probe.struck, strike.matrix
    found = [
        event for event in events.recent() if event.kind == EventKind.GEMM_FAULT and event.rung
    ]
    events.clear()
    assert len(found) == trials, f"{trials - len(found)} faults in {strike.matrix} were missed"
    return [event.duration_s for event in found]


def checkpoint_s(trainer: Trainer, directory: Path, trials: int) -> tuple[float, float]:
    """Return the median seconds of saving the state to a file, and of loading it into the model."""
    path = directory / "state.pt"

    def save() -> None:
        parts = trainer.model.state_dict(), trainer.optimizer.state_dict()
        torch.save(parts, path)

    def load() -> None:
        model, optimizer = torch.load(path, weights_only=True)
        trainer.model.load_state_dict(model)
        trainer.optimizer.load_state_dict(optimizer)

    return median_s(save, trials), median_s(load, trials)


def _run(settings: Settings, progress: Progress) -> Iterator[Row]:
    middle = replace(SMALL, width=256, inner=1024, length=128, batch=4)
    size = settings.choose(TINY, middle, BASE)
    trials = settings.choose(3, 5, 10)
    task = task_for(size, settings.choose(40, 200, 2000), settings.seed)
    later = []
    for name in watched(PAPER_MODELS, progress):
        trainer = Trainer(name, size, task, seed=settings.seed)
        batch = next(trainer.batches(1))
        case = replace(trainer.subject, batch=batch)
        _, forward = attention_call(case)
        with protect(trainer.model):
            trainer.train(2)
            step_s = median_s(lambda: trainer.update(trainer.loss(batch)), trials)  # noqa: B023
        slowest = 0.0
        for correction, matrix in every(MODES, GEMMS):
            generator = settings.generator("recovery", name, correction, matrix)
            times = {
                kind: median(
                    correction_s(case, forward, Strike(matrix, kind, generator), correction, trials)
                )
                for kind in TYPES
            }
            slowest = max(slowest, *times.values())
            yield _correction_row(name, correction, matrix, times, step_s)
        with TemporaryDirectory() as directory:
            save_s, load_s = checkpoint_s(trainer, Path(directory), trials)
        later.append(_checkpoint_row(name, step_s, save_s, load_s, slowest))
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
    restored_s = save_s + load_s + step_s  # the step is repeated
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


def _plot(rows: list[Row], figure: Figure) -> None:
    """Plot the cost of correction and of checkpointing in percent of a training step."""
    axes = figure.subplots()
    chosen = [row for row in rows if row.table == CHECKPOINT]
    line(axes, chosen, "model", WHOLE, "s--")
    line(axes, chosen, "model", SLOWEST, "o--")
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
