"""``vabft.real-weights``: clean products of a trained model (V-ABFT, section 6.7)."""

from collections import defaultdict
from collections.abc import Iterator

import torch

from holdfast.abft.thresholds import Product
from holdfast_lab.study.registry import Case, Progress, Row, Settings, Study
from holdfast_lab.study.vabft.alarms import OVER, alarm_row, few_suspected, total_row
from holdfast_lab.study.vabft.minilm import MiniLM, model_directory, passages
from holdfast_lab.study.vabft.paper import NO_FALSE_POSITIVE_REAL
from holdfast_lab.study.vabft.residuals import DTYPES, Margins, residuals

PRECISIONS = ("bf16", "fp16", "fp32")


def _run(settings: Settings, progress: Progress) -> Iterator[Row]:
    directory = model_directory()
    batches, count = settings.choose(1, 2, 20), settings.choose(1, 4, 8)
    length = settings.choose(8, 128, 128)
    progress.begin(float(len(PRECISIONS) * batches))
    total = Margins()
    for precision in PRECISIONS:
        model = MiniLM.load(directory, DTYPES[precision])
        tally = Tally()
        for batch in range(batches):
            generator = settings.generator("real-weights", batch)
            model.forward(passages(model, count, length, generator), tally)
            progress.advance(1)
        for name, margins in tally.margins.items():
            case: Case = {
                "precision": precision,
                "product": name,
                "products": tally.products[name],
            }
            yield alarm_row(OVER, case, margins, NO_FALSE_POSITIVE_REAL)
            total.include(margins)
    yield total_row(total)


class Tally:
    """Computes matrix products and compares the residual of every row with each threshold."""

    def __init__(self) -> None:
        self.margins: dict[str, Margins] = defaultdict(Margins)
        self.products: dict[str, int] = defaultdict(int)

    def __call__(self, name: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Compute ``A B``; each matrix of a batch counts as a product."""
        c = a @ b
        self.margins[name].add(Product(a, b, c, c.dtype), residuals(a, b, c))
        self.products[name] += c[..., 0, 0].numel()
        return c


STUDY = Study(
    name="vabft.real-weights",
    paper="V-ABFT, section 6.7",
    reproduces="no false positive in the products of a trained model (here MiniLM-L6 on English "
    "text; the paper's LLaMA-7B, GPT-2 and ViT are not used)",
    run=_run,
    verdict=few_suspected,
)
