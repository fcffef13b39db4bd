"""``attnchecker.gemm-share``: the share of attention's flops in matrix products (table 2).

Operators are counted as torch calls them, in a forward pass of each model at its published width
and longest sequence. A softmax counts three operations for each element, as in Hoffmann et al.,
whose rules the paper cites. Operators that only move data count as zero.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from holdfast_lab.study.attnchecker.models import BASE, PAPER_MODELS, TINY, subject
from holdfast_lab.study.attnchecker.paper import GEMM_SHARE
from holdfast_lab.study.registry import Case, Progress, Row, Settings, Study

LONGEST = {"bert": 512, "gpt2": 1024, "gpt-neo": 2048, "roberta": 512}
SOFTMAX_OPERATIONS = 3
ELEMENTWISE = {"add", "add_", "sub", "mul", "mul_", "div", "div_"}
BY_THE_PAPER, ALL = "products and softmax, %", "all arithmetic, %"
BLOCKS = {
    "bert": ("bert.encoder.layer.0.attention.self", "bert.encoder.layer.0.attention.output.dense"),
    "gpt2": ("transformer.h.0.attn",),
    "gpt-neo": ("transformer.h.0.attn.attention",),
    "roberta": (
        "roberta.encoder.layer.0.attention.self",
        "roberta.encoder.layer.0.attention.output.dense",
    ),
}


class Arithmetic(TorchDispatchMode):
    """Counts operations by operator while chosen modules run."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()
        self._depth = 0

    def within(self, module: nn.Module) -> tuple[torch.utils.hooks.RemovableHandle, ...]:
        """Count in this module's forward pass."""
        return module.register_forward_pre_hook(self._enter), module.register_forward_hook(
            self._leave
        )

    def _enter(self, *_: object) -> None:
        self._depth += 1

    def _leave(self, *_: object) -> None:
        self._depth -= 1

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Run an operator of the forward pass and count its operations."""
        output = func(*args, **kwargs or {})
        if self._depth:
            self.operations[func.overloadpacket.__name__] += _operations(func, args, kwargs, output)
        return output

    def of(self, *names: str) -> int:
        """Return the number of operations of these operators."""
        return sum(self.operations[name] for name in names)


def _operations(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, object] | None, output: Any
) -> int:
    packet = func.overloadpacket
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs or {}, out_val=output))
    if packet.__name__ == "_softmax":
        return SOFTMAX_OPERATIONS * int(output.numel())
    return int(output.numel()) if packet.__name__ in ELEMENTWISE else 0


def count(name: str, length: int, width: int, heads: int) -> Arithmetic:
    """Count the flops of one attention block over one sequence."""
    size = replace(TINY, layers=1, width=width, heads=heads, length=length, batch=1)
    case = subject(name, size)
    with ExitStack() as stack:
        counted = Arithmetic()
        for path in BLOCKS[name]:
            for hook in counted.within(case.model.get_submodule(path)):
                stack.callback(hook.remove)
        stack.enter_context(torch.no_grad())
        stack.enter_context(counted)
        case.loss()
    return counted


def _run(settings: Settings, progress: Progress) -> Iterator[Row]:
    progress.begin(float(sum(LONGEST.values())))
    for name in PAPER_MODELS:
        counted = count(name, LONGEST[name], BASE.width, BASE.heads)
        products, softmax = counted.of("mm", "addmm", "bmm"), counted.of("_softmax")
        everything = sum(counted.operations.values())
        measured = {
            BY_THE_PAPER: 100 * products / (products + softmax),
            ALL: 100 * products / everything,
            "GFLOP": everything / 1e9,
        }
        case: Case = {"model": name, "length": LONGEST[name], "width": BASE.width}
        yield Row(
            "share of matrix products in an attention block's arithmetic",
            case,
            measured,
            {BY_THE_PAPER: GEMM_SHARE[name]},
        )
        progress.advance(LONGEST[name])


STUDY = Study(
    name="attnchecker.gemm-share",
    paper="ATTNChecker, table 2",
    reproduces="matrix products are 99.3 to 99.7 % of attention's arithmetic, so that protecting "
    "them protects nearly all of it",
    run=_run,
)
