"""The stage with what ATTNChecker and V-ABFT measured on GPUs, beside the papers' values."""

import statistics
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from bench.gpu.costs import sample_s
from bench.gpu.models import BERT_BASE, BERT_LARGE, TOY_BERT, Shape, Training
from bench.gpu.stage import Machine, Row, demand, unchecked, unverified
from bench.gpu.timing import copy_bytes_s, normal, seconds_of
from holdfast.abft.gemm.cpu import configured_core, encode
from holdfast.abft.thresholds.protocol import Product
from holdfast_lab.distributions import RANDOM
from holdfast_lab.study.attnchecker.encoding import WIDTH, position_weights
from holdfast_lab.study.attnchecker.overhead import ATTENTION, STEP, forgetting
from holdfast_lab.study.attnchecker.paper import (
    ENCODER_BANDWIDTH,
    GEMM_BANDWIDTH,
    OVERHEADS,
    TIMES_GEMM,
    TIMES_OPTIMISED,
)
from holdfast_lab.study.attnchecker.unfused import Unfused
from holdfast_lab.study.published import Published
from holdfast_lab.study.vabft.emax import RelativeErrors, positive_operands, relative_errors
from holdfast_lab.study.vabft.paper import E_MAX_OVER_U, SIZES, tightness
from holdfast_lab.study.vabft.residuals import DTYPES, Margins, residuals
from holdfast_lab.study.vabft.tightness import PAPER_MEMBERS

GPU = "GPU H100"  # of V-ABFT's tables
TRAINED = (BERT_BASE, 8), (BERT_BASE, 16), (BERT_LARGE, 16)  # with the sequences of a batch
TOY_TRAINED, TOY_SIZES = ((TOY_BERT, 2),), (32,)
PAIRS = 5
ENCODED = (16 * 128, 128 * 128, 1024 * 128)  # rows of BERT's activations
TRIALS, TRUE_ROWS = 20, 128


def papers(machine: Machine, done: Collection[str]) -> Iterator[Row]:
    """Measure the papers' figures and tables of GPUs on this device."""
    settings = torch.backends.cuda.matmul
    settings.allow_bf16_reduced_precision_reduction = False
    settings.allow_fp16_reduced_precision_reduction = False
    for case, measured in _cases(machine):
        if case not in done:
            yield {"case": case, **measured()}


def _cases(machine: Machine) -> Iterator[tuple[str, Callable[[], Row]]]:
    toy = machine.rehearsed
    for shape, sequences in TOY_TRAINED if toy else TRAINED:
        for what in (ATTENTION, STEP):
            case = f"ATTNChecker {shape.name} batch {sequences}: {what}"
            yield case, partial(overhead, machine, shape, sequences, what)
    for rows in TOY_SIZES if toy else ENCODED:
        yield f"ATTNChecker encoder of {rows} x {WIDTH}", partial(encoder, machine, rows)
    for size in TOY_SIZES if toy else SIZES:
        for name in DTYPES:
            yield f"V-ABFT e_max {name} {size}", partial(relative_error, machine, name, size)
        yield f"V-ABFT thresholds bf16 {size}", partial(thresholds, machine, size)


def beside(name: str, published: Published) -> Row:
    """Return the columns of a paper's value: its text, and the range that reproduces it."""
    return {f"{name} in the paper": published.text, f"{name} source": published.source}


def overhead(machine: Machine, shape: Shape, sequences: int, what: str) -> Row:
    """Time attention or steps in bf16 with checks, and with checks of separate operators.

    Each is divided by the time without checks before it (ATTNChecker, figures 7 and 8).
    """
    training, times = Training(machine, shape, sequences, "eager"), []
    run = _attention(training, sequences) if what == ATTENTION else training.step
    anew = forgetting(training.model, run)  # as weights change with every step
    with machine.protected(training.model) as protection:
        training.step()
        missing = unverified(protection)
        demand(not missing, f"products are not verified: {missing}")
        for _ in range(2 if machine.rehearsed else PAIRS):
            with unchecked(protection):
                bare_s = sample_s(machine, anew)
                with Unfused() as unfused:
                    by_operators_s = sample_s(machine, anew)
            times.append((bare_s, sample_s(machine, anew), by_operators_s))
        protection.check()
    demand(unfused.checked > 0, "no product was checked by operators")
    ours, theirs = (
        statistics.median(100 * (each[side] / each[0] - 1) for each in times) for side in (1, 2)
    )
    return {
        "baseline_s": statistics.median(bare_s for bare_s, *_ in times),
        "pairs": len(times),
        "overhead_percent": round(ours, 2),
        **beside("overhead_percent", OVERHEADS[what]),
        "by_operators_percent": round(theirs, 2),
        "times_cheaper": round(theirs / ours, 2) if ours > 0 else None,
        **beside("times_cheaper", TIMES_OPTIMISED[what]),
    }


def _attention(training: Training, sequences: int) -> Callable[[], object]:
    """Return the passes of the first block's attention."""
    machine, shape = training.machine, training.model.shape
    block: nn.Module = training.model.blocks[0].attention
    x = normal((sequences * shape.context, shape.width), torch.float32, machine, 1)
    x = x.unflatten(0, (sequences, shape.context)).requires_grad_()

    def run() -> None:
        with torch.autocast(machine.device.type, torch.bfloat16):
            out = block(x)
        torch.autograd.grad(out, [x, *block.parameters()], torch.ones_like(out))

    return run


def encoder(machine: Machine, rows: int) -> Row:
    """Compare the speed of encoding activations with a product of two columns (figure 9)."""
    x = normal((rows, WIDTH), torch.bfloat16, machine, rows)
    weights = position_weights(WIDTH, torch.bfloat16).to(machine.device)
    ours: Callable[[torch.Tensor], Any] = encode
    if not machine.rehearsed:
        ours = configured_core().kernel_encode
        with machine.protected(nn.Identity()):
            sums, exact = ours(x)[0].double(), x.double()
            signs = configured_core().kernel_encode(torch.eye(WIDTH, device=x.device))[0].double()
            error = (sums.flatten() - exact @ signs.flatten()).abs() / exact.abs().sum(-1)
            demand(float(error.max()) < 1e-5, f"checksums are wrong by {float(error.max()):.3g}")
    ours_s, gemm_s = seconds_of(partial(ours, x)), seconds_of(partial(torch.mm, x, weights))
    share = 100 * x.nbytes / copy_bytes_s(machine)
    return {
        "bytes_s": x.nbytes / ours_s,
        "times_gemm": round(gemm_s / ours_s, 2),
        **beside("times_gemm", TIMES_GEMM),
        "percent_of_copy": round(share / ours_s, 2),
        **beside("percent_of_copy", ENCODER_BANDWIDTH),
        "gemm_percent_of_copy": round(share / gemm_s, 2),
        **beside("gemm_percent_of_copy", GEMM_BANDWIDTH),
    }


def relative_error(machine: Machine, name: str, size: int) -> Row:
    """Measure V-ABFT's e_max / u, the largest relative error of a row's checksum (table 2)."""
    generator, worst = torch.Generator().manual_seed(size), RelativeErrors()
    for _ in range(1 if machine.rehearsed else TRIALS):
        a, b = positive_operands(size, DTYPES[name], generator)
        found = relative_errors(a.to(machine.device), b.to(machine.device))
        worst = worst.joined(found)
    row = {key: round(value, 3) for key, value in vars(worst).items()}
    return {**row, **beside("apart", E_MAX_OVER_U[GPU, name])}


def thresholds(machine: Machine, size: int) -> Row:
    """Compare thresholds with true errors of bf16 products of U(0, 1) (V-ABFT, table 6)."""
    paper, ours = Margins(), Margins()
    generator = torch.Generator().manual_seed(size)
    for _ in range(1 if machine.rehearsed else TRIALS):
        a, b = RANDOM["u01"](min(size, TRUE_ROWS), size, size, torch.bfloat16, generator)
        c = (a.to(machine.device) @ b.to(machine.device)).cpu()
        product, exact = Product(a, b, c, c.dtype), residuals(a, b, c)
        paper.add(product, exact, PAPER_MEMBERS["bf16"])
        ours.add(product, exact)
    least = {name: round(each.tightness, 2) for name, each in ours.items()}
    row = {
        "rows": ours["rounding"].rows,
        "threshold / largest error": least,
        "rms error": paper["vabft"].typical,
        "V-ABFT / error": round(paper["vabft"].threshold / paper["vabft"].typical, 2),
        "A-ABFT / error": round(paper["aabft"].threshold / paper["aabft"].typical, 2),
    }
    for name, published in tightness("bf16", size).items():
        row |= beside(name, published)
    over = least["rounding"]
    demand(over >= 1, f"a right row of {size} exceeds our threshold: threshold / error is {over}")
    return row
