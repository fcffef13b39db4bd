"""``vabft.trained-models``: clean products of models while they train (V-ABFT, section 6.7).

LLaMA, GPT-2 and ViT as the ``transformers`` package builds them, smaller than the paper's and with
random weights at first, are trained for some steps. Every matrix product of the forward and the
backward pass of each step is compared with the thresholds.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch

from holdfast import sites
from holdfast.abft.gemm.reference import as_batch
from holdfast.abft.thresholds import Product
from holdfast.protection import protect
from holdfast.sites import Gemm
from holdfast_lab.study.attnchecker.models import SMALL, TINY, subject
from holdfast_lab.study.attnchecker.subjects import Subject
from holdfast_lab.study.registry import Case, Progress, Row, Settings, Study
from holdfast_lab.study.vabft.alarms import OVER, alarm_row, few_suspected, total_row
from holdfast_lab.study.vabft.paper import NO_FALSE_POSITIVE_REAL
from holdfast_lab.study.vabft.residuals import DTYPES, Margins, residuals

MODELS = ("llama", "gpt2", "vit")
PRECISIONS = ("bf16", "fp32")
LEARNING_RATE = 1e-3
_NARROW = (
    "here all products of a training count: the rows found are of GPT-2's classifier, which has "
    "two columns, and of gradients of a weight of ViT"
)
NO_FALSE_POSITIVE = {
    name: replace(published, source="section 6.7, models", otherwise=_NARROW)
    for name, published in NO_FALSE_POSITIVE_REAL.items()
}

Operands = tuple[torch.Tensor, torch.Tensor]


def operands_of_a_step(case: Subject, dtype: torch.dtype) -> list[Operands]:
    """Train for a step, in which every parameter moves; return the operands of its products."""
    found: list[Operands] = []

    def note(stage: str, site: str, gemm: Gemm, output: torch.Tensor | None) -> None:
        if output is not None and gemm.a.dim() <= 3:  # no convolution
            found.append((as_batch(gemm.a).detach().clone(), as_batch(gemm.b).detach().clone()))

    batch = {
        name: values.to(dtype) if values.is_floating_point() else values
        for name, values in case.batch.items()
    }
    with protect(case.model), sites.injecting(note):
        case.compute(case.model, batch).backward()
    with torch.no_grad():
        for parameter in case.model.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad.sign(), alpha=LEARNING_RATE)
                parameter.grad = None
    return found


def compared(name: str, precision: str, settings: Settings) -> tuple[Case, Margins]:
    """Compare the products of some steps with every threshold."""
    case = subject(name, settings.choose(TINY, SMALL, SMALL), seed=settings.seed)
    case.model.to(DTYPES[precision])
    margins, products = Margins(), 0
    for _ in range(settings.choose(1, 20, 100)):
        for a, b in operands_of_a_step(case, DTYPES[precision]):
            c = a @ b
            margins.add(Product(a, b, c, c.dtype), residuals(a, b, c))
            products += len(c)
    return {"model": name, "precision": precision, "products": products}, margins


def _run(settings: Settings, progress: Progress) -> Iterator[Row]:
    progress.begin(float(len(MODELS) * len(PRECISIONS)))
    total = Margins()
    for name in MODELS:
        for precision in PRECISIONS:
            case, margins = compared(name, precision, settings)
            yield alarm_row(OVER, case, margins, NO_FALSE_POSITIVE)
            total.include(margins)
            progress.advance(1)
    yield total_row(total)


STUDY = Study(
    name="vabft.trained-models",
    paper="V-ABFT, section 6.7",
    reproduces="no false positive in the products of LLaMA, GPT-2 and ViT (here small ones)",
    run=_run,
    verdict=few_suspected,
)
