"""``attnchecker.loss``: the training loss without faults, with faults, and repaired (figure 6).

Each of the paper's four models is fine-tuned on the docstring task, with dropout. Two runs have no
faults; the second has other weights, data order and dropout. In three runs an INF, NaN or near-INF
is injected into a matrix of the attention every few steps after the first third: unprotected,
repaired by recomputation, and corrected by checksums, which restores an element up to its rounding.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from itertools import product as every
from math import inf, isfinite, nan

import torch

from holdfast import events, sites
from holdfast.digest.tensors import tensors_digest
from holdfast.events import EventKind
from holdfast.protection import protect
from holdfast_lab.study.attnchecker.docstrings import Task
from holdfast_lab.study.attnchecker.finetune import Trainer, task_for
from holdfast_lab.study.attnchecker.models import PAPER_MODELS, SMALL, TINY
from holdfast_lab.study.attnchecker.paper import NO_TRACE, WITHIN_NOISE, all_repaired
from holdfast_lab.study.attnchecker.probe import STRUCK, TYPES, Probe, Strike
from holdfast_lab.study.attnchecker.subjects import Size
from holdfast_lab.study.plots import line
from holdfast_lab.study.registry import Case, Figure, Progress, Row, Settings, Study

CURVES, SUMMARY = "training loss", "after all steps"
DROPOUT = 0.1
LEARNING_RATE = 1e-3  # of small models from random weights
PATIENCE = 5  # steps without a finite loss after which a run is given up
CALM, STRUCK_BARE, STRUCK_PROTECTED = "without faults", "with faults", "repaired"
CORRECTED, ANOTHER = "corrected by checksums", "another seed"
OFF_NOISE = "corrected / another seed"
FAULTS = tuple(every(TYPES, STRUCK))


@dataclass(frozen=True)
class Run:
    """The outcome of a run; ``repairs`` is the number of faults that were reported as repaired."""

    losses: list[float]
    digest: str
    repairs: int


def fine_tune(
    name: str,
    size: Size,
    task: Task,
    steps: int,
    *,
    seed: int,
    every_steps: int = 0,
    correction: str = "",
) -> Run:
    """Fine-tune a new model and inject faults after a third of the steps.

    The events of this process are cleared. The seed determines weights, data order, dropout and the
    places of faults. ``every_steps`` is the number of steps between faults, or 0 for none.
    ``correction`` is that of ``protect``, or empty to leave the model unprotected.
    """
    trainer = Trainer(name, size, task, dropout=DROPOUT, learning_rate=LEARNING_RATE, seed=seed)
    strikes = _strikes(steps, every_steps, torch.Generator().manual_seed(seed))
    losses: list[float] = []
    events.clear()
    with protect(trainer.model, verify=bool(correction), correction=correction or "recompute"):
        for step, batch in enumerate(trainer.batches(steps)):
            if len(losses) >= PATIENCE and not any(map(isfinite, losses[-PATIENCE:])):
                break
            with sites.injecting(Probe(trainer.subject, strikes.get(step), keep=False)):
                loss = trainer.loss(batch, step)
            trainer.update(loss)
            losses.append(loss.item())
    repairs = sum(
        event.kind == EventKind.GEMM_FAULT and event.rung != "" for event in events.recent()
    )
    events.clear()
    return Run(losses, tensors_digest(trainer.model.parameters()), repairs)


def _strikes(steps: int, every_steps: int, places: torch.Generator) -> dict[int, Strike]:
    """Choose the fault of each step: every type in every matrix in turn."""
    chosen = range(steps // 3, steps, every_steps) if every_steps else range(0)
    turns = zip(chosen, cycle(FAULTS), strict=False)
    return {step: Strike(matrix, kind, places) for step, (kind, matrix) in turns}


def _run(settings: Settings, progress: Progress) -> Iterator[Row]:
    size = settings.choose(TINY, SMALL, SMALL)
    steps, every_steps = settings.choose(6, 90, 900), settings.choose(2, 3, 4)
    task = task_for(size, settings.choose(40, 50, 4000), settings.seed)
    progress.begin(float(5 * len(PAPER_MODELS)))
    summaries = []
    for name in PAPER_MODELS:
        runs = {}
        for label, period, correction in (
            (CALM, 0, ""),
            (ANOTHER, 0, ""),
            (STRUCK_BARE, every_steps, ""),
            (STRUCK_PROTECTED, every_steps, "recompute"),
            (CORRECTED, every_steps, "checksum"),
        ):
            seed = settings.seed + (label == ANOTHER)
            runs[label] = fine_tune(
                name, size, task, steps, seed=seed, every_steps=period, correction=correction
            )
            progress.advance(1)
        yield from _curves(name, runs, settings.choose(1, 6, 30))
        summaries.append(_summary(name, runs, len(range(steps // 3, steps, every_steps))))
    yield from summaries


def _curves(name: str, runs: dict[str, Run], window: int) -> Iterator[Row]:
    """Average the losses over windows of steps; windows with a NaN have no value."""
    steps = len(runs[CALM].losses)
    for end in range(window, steps + 1, window):
        case: Case = {"model": name, "steps": end}
        means = {
            label: _mean(run.losses[end - window : end], window) for label, run in runs.items()
        }
        finite = {label: mean for label, mean in means.items() if isfinite(mean)}
        lost = [label for label in means if label not in finite]
        yield Row(CURVES, case, finite, note="".join(f"NaN {label}" for label in lost))


def _mean(losses: list[float], count: int) -> float:
    """Return the mean loss, or NaN if the run stopped before ``count`` steps."""
    return sum(losses) / count if len(losses) == count else nan


def _summary(name: str, runs: dict[str, Run], faults: int) -> Row:
    calm, bare, protected = (runs[label] for label in (CALM, STRUCK_BARE, STRUCK_PROTECTED))
    off = {label: _largest_difference(calm, run) for label, run in runs.items() if run != bare}
    first = next((step for step, loss in enumerate(bare.losses) if not isfinite(loss)), None)
    measured = {
        "faults": float(faults),
        "repaired": float(protected.repairs),
        "largest difference of a loss, repaired": off[STRUCK_PROTECTED],
        "corrected": float(runs[CORRECTED].repairs),
        "largest difference of a loss, corrected": off[CORRECTED],
        "largest difference of a loss, another seed": off[ANOTHER],
        OFF_NOISE: off[CORRECTED] / off[ANOTHER],
        "weights bit-equal, repaired": float(protected.digest == calm.digest),
        "weights bit-equal, with faults": float(bare.digest == calm.digest),
    }
    if first is not None:
        measured["first NaN, with faults, at step"] = float(first)
    published = {
        "repaired": all_repaired(faults),
        "corrected": all_repaired(faults),
        "largest difference of a loss, repaired": NO_TRACE,
        OFF_NOISE: WITHIN_NOISE,
    }
    return Row(SUMMARY, {"model": name, "steps": len(calm.losses)}, measured, published)


def _largest_difference(calm: Run, run: Run) -> float:
    """Return the largest difference of a loss; INF if one is not finite or the run was given up."""
    if len(run.losses) != len(calm.losses) or not all(map(isfinite, run.losses)):
        return inf
    return max(abs(a - b) for a, b in zip(calm.losses, run.losses, strict=True))


def _verdict(rows: list[Row]) -> str:
    """Check that recomputation gives bit-equal training, and correction a loss within noise.

    The noise is the difference between the losses of two seeds.
    """
    for row in rows:
        if row.table != SUMMARY:
            continue
        off = "largest difference of a loss, "
        if not row.measured["weights bit-equal, repaired"]:
            return f"{row.case['model']}, repaired, differs from its run without faults"
        if not row.measured[off + "corrected"] < row.measured[off + "another seed"]:
            return f"{row.case['model']}, corrected, is further off than another seed"
    return ""


def _plot(rows: list[Row], figure: Figure) -> None:
    """Draw a panel for each model; a curve ends where it becomes NaN."""
    curves = [row for row in rows if row.table == CURVES]
    styles = {CALM: "k-", STRUCK_PROTECTED: "C2o", CORRECTED: "C0x", STRUCK_BARE: "C3s--"}
    grid = figure.subplots(2, 2, sharex=True, sharey=True)
    for axes, name in zip(grid.flat, PAPER_MODELS, strict=True):
        chosen = [row for row in curves if row.case["model"] == name]
        for label, style in styles.items():
            line(axes, chosen, "steps", label, style, markersize=4)
        axes.set(title=name, xlabel="step", ylabel="loss")
        axes.label_outer()
    figure.legend(*grid.flat[0].get_legend_handles_labels(), loc="outside upper center", ncols=4)


STUDY = Study(
    name="attnchecker.loss",
    paper="ATTNChecker, section 5.2, figure 6",
    reproduces="after a repair the loss goes on as if nothing had happened, where the same faults "
    "unprotected end in NaN",
    run=_run,
    plot=_plot,
    verdict=_verdict,
)
