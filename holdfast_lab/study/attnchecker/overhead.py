"""``attnchecker.overhead``: the time that checks add to attention and training (figures 7 and 8).

Each of the paper's models runs unprotected, protected, and with the same products checked by
separate torch operators. Weights change with every step, so that their checksums are computed anew.
All variants are timed in turn, and each time is divided by that of the unprotected run before it.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import nn

from holdfast.abft.gemm.interception import interception
from holdfast.protection import protect
from holdfast_lab.study.attnchecker.finetune import Trainer, task_for
from holdfast_lab.study.attnchecker.injected_sections import as_sections
from holdfast_lab.study.attnchecker.models import BASE, PAPER_MODELS, SMALL, TINY
from holdfast_lab.study.attnchecker.paper import OVERHEADS, TIMES_OPTIMISED
from holdfast_lab.study.attnchecker.subjects import Subject
from holdfast_lab.study.attnchecker.unfused import Unfused
from holdfast_lab.study.plots import line
from holdfast_lab.study.registry import Case, Figure, Progress, Row, Settings, Study
from holdfast_lab.study.timing import seconds

ATTENTION, STEP = "attention, forward and backward", "training step"
OURS, SECTIONS, UNFUSED = "protected, %", "as sections, %", "checked by torch operators, %"
TIMES, BARE = "times cheaper than by operators", "unprotected, ms"
BLOCKS = {
    "bert": "bert.encoder.layer.0.attention",
    "gpt2": "transformer.h.0.attn",
    "gpt-neo": "transformer.h.0.attn.attention",
    "roberta": "roberta.encoder.layer.0.attention",
}
_WARMUP = 2

Run = Callable[[], object]


@contextmanager
def paused() -> Iterator[None]:
    """Suspend the protection of this process while the context is open."""
    interception().change_process_depth(-1)
    try:
        yield
    finally:
        interception().change_process_depth(1)


def forgetting(model: nn.Module, run: Run) -> Run:
    """Make ``run`` encode the checksums of all weights again, as after an optimizer step."""

    def anew() -> None:
        for parameter in model.parameters():
            interception().forget(parameter)
        run()

    return anew


def without_checks(run: Run) -> Run:
    """Return a function that calls ``run`` with all protection suspended."""

    def bare() -> None:
        with paused():
            run()

    return bare


def by_operators(run: Run) -> Run:
    """Return a function that calls ``run`` with its products checked by ``Unfused``."""

    def checked() -> None:
        with paused(), Unfused():
            run()

    return checked


def overheads(bare: Run, variants: Mapping[str, Run], pairs: int) -> tuple[float, dict[str, float]]:
    """Return the median seconds of ``bare`` and by how many percent each variant takes longer."""
    for _ in range(_WARMUP):
        for run in (bare, *variants.values()):
            run()
    times, ratios = [], {name: [] for name in variants}  # type: ignore[var-annotated]
    for _ in range(pairs):
        for name, run in variants.items():
            times.append(seconds(bare))
            ratios[name].append(seconds(run) / times[-1])
    return median(times), {name: 100 * (median(found) - 1) for name, found in ratios.items()}


def attention_call(case: Subject) -> tuple[list[torch.Tensor], Callable[[], torch.Tensor]]:
    """Return a forward pass of the first attention block with its real inputs, and its leaves."""
    block = case.model.get_submodule(BLOCKS[case.name])
    config: Any = case.model.config
    config.use_cache = False  # the cache of keys and values would grow with every run
    given: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    hook = block.register_forward_pre_hook(
        lambda _, args, kwargs: given.append((args, kwargs)), with_kwargs=True
    )
    with torch.no_grad():
        case.loss()
    hook.remove()
    (first, *args), kwargs = given[0]
    hidden = first.detach().clone().requires_grad_()

    def forward() -> torch.Tensor:
        output = block(hidden, *args, **kwargs)
        result: torch.Tensor = output[0] if isinstance(output, tuple) else output
        return result

    return [hidden, *block.parameters()], forward


def attention_of(case: Subject) -> Run:
    """Return a forward and backward pass of the first attention block, with its real inputs."""
    leaves, forward = attention_call(case)

    def run() -> None:
        output = forward()
        torch.autograd.grad(output, leaves, torch.ones_like(output), allow_unused=True)

    return run


def sections_of(case: Subject, heads: int) -> tuple[nn.Module, Run]:
    """Convert a block to ``holdfast.nn.Attention``; return it and a function that runs it."""
    block = as_sections(case, heads)
    wanted = [block.batch["x"], *block.model.parameters()]

    def run() -> None:
        output = block.model(block.batch["x"], key_padding_mask=block.batch["padding"])
        torch.autograd.grad(output, wanted, torch.ones_like(output))

    return block.model, run


def _run(settings: Settings, progress: Progress) -> Iterator[Row]:
    middle = replace(SMALL, width=256, inner=1024, length=128, batch=4)
    size = settings.choose(TINY, middle, BASE)
    pairs = settings.choose(2, 15, 7)  # a step of full size takes seconds
    task = task_for(size, settings.choose(40, 200, 2000), settings.seed)
    progress.begin(float(2 * len(PAPER_MODELS)))
    later = []
    for name in PAPER_MODELS:
        trainer = Trainer(name, size, task, seed=settings.seed)
        case = replace(trainer.subject, batch=next(trainer.batches(1)))
        model, sections = sections_of(case, size.heads)
        with protect(nn.ModuleList([case.model, model])):  # `paused` suspends only one
            run = attention_of(case)
            variants = {
                OURS: forgetting(case.model, run),
                SECTIONS: forgetting(model, sections),
                UNFUSED: by_operators(run),
            }
            yield _row(ATTENTION, name, *overheads(without_checks(run), variants, pairs))
            progress.advance(1)
            step = _step(trainer, case)
            variants = {OURS: step, UNFUSED: by_operators(step)}
            later.append(_row(STEP, name, *overheads(without_checks(step), variants, pairs)))
            progress.advance(1)
    yield from later


def _step(trainer: Trainer, case: Subject) -> Run:
    return lambda: trainer.update(trainer.loss(case.batch))


def _row(table: str, name: str, bare_s: float, found: Mapping[str, float]) -> Row:
    case: Case = {"model": name}
    measured = {BARE: 1e3 * bare_s, **found}
    published = {OURS: OVERHEADS[table]}
    if found[OURS] > 0:
        measured[TIMES] = found[UNFUSED] / found[OURS]
        published[TIMES] = TIMES_OPTIMISED[table]
    return Row(table, case, measured, published)


def _verdict(rows: list[Row]) -> str:
    """Check that fused checks cost less than the same checks by separate operators."""
    for row in rows:
        if row.measured[OURS] >= row.measured[UNFUSED]:
            return f"{row.table} of {row.case['model']}: fused checks cost as much as unfused ones"
    return ""


def _plot(rows: list[Row], figure: Figure) -> None:
    """Plot the overhead of attention on the left and of the training step on the right."""
    for axes, table in zip(figure.subplots(1, 2), (ATTENTION, STEP), strict=True):
        chosen = [row for row in rows if row.table == table]
        for quantity, style in ((OURS, "o--"), (UNFUSED, "s--")):
            line(axes, chosen, "model", quantity, style)
        axes.set(title=table, xlabel="model", ylabel="overhead, %")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=2)


STUDY = Study(
    name="attnchecker.overhead",
    paper="ATTNChecker, section 5.3, figures 7 and 8",
    reproduces="checks cost a training step a few percent, several times less than if every "
    "checksum were an operator of its own",
    run=_run,
    plot=_plot,
    verdict=_verdict,
)
