"""Fault-injection trials of fused attention: changes one element of a tile while the kernel runs.

The kernel decides as it goes and repairs by itself, so that every trial goes the whole way: once
unverified, for what the fault does, and once verified, for whether it is found and leaves no trace.
"""

import time
from contextlib import suppress
from dataclasses import dataclass
from math import sqrt

import torch
from torch import nn
from torch.nn import functional

from holdfast import events, sites
from holdfast.abft.attention import reference
from holdfast.errors import ConfigError, UncorrectableFault
from holdfast.inject.faults import write_element
from holdfast.protection import protect
from holdfast.sites import Gemm
from holdfast_lab.campaign.counts import PATIENCE, Counts
from holdfast_lab.campaign.effects import EFFECTS, HARMFUL, Scale, change
from holdfast_lab.campaign.models import FaultModel, fault_model
from holdfast_lab.campaign.plan import DISTRIBUTIONS, DTYPES, Cell, Plan, injected_dtype


class TileStrike:
    """A site hook that corrupts one element of the n-th tile of a stage of the attention kernel.

    Args:
        model: the fault, or None to count tiles; n: from 0; seed: draws the element.

    Attributes:
        seen: tiles of the stage so far; struck: whether some element there could have the fault.
    """

    def __init__(self, stage: str, model: FaultModel | None = None, n: int = 0, seed: int = 0):
        self._stage, self._model, self._n, self._seed = stage, model, n, seed
        self.seen, self.struck = 0, False

    def __call__(self, stage: str, site: str, gemm: Gemm, output: torch.Tensor | None) -> None:
        """Change the element if this is the chosen tile, as a hook given to ``sites.arm``."""
        if stage != self._stage or output is None:
            return
        if self._model is not None and self.seen == self._n:
            self._strike(self._model, output)
        self.seen += 1

    def _strike(self, model: FaultModel, tile: torch.Tensor) -> None:
        generator = torch.Generator().manual_seed(self._seed)
        places = model.eligible(tile).nonzero()
        if not len(places):
            return
        row, column = places[int(torch.randint(len(places), (), generator=generator))].tolist()
        new = model.corrupt(tile[row : row + 1, column : column + 1], generator)
        write_element(tile, (row, column), new)
        self.struck = True


@dataclass(frozen=True)
class Work:
    """A head of attention, forward and backward.

    Args:
        q, k, v, grad: [1, 1, positions, d].
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    grad: torch.Tensor

    def run(self) -> list[torch.Tensor]:
        """Compute the output and the gradients of q, k and v."""
        q, k, v = (x.detach().requires_grad_() for x in (self.q, self.k, self.v))
        output = functional.scaled_dot_product_attention(q, k, v)
        return [output.detach(), *torch.autograd.grad(output, (q, k, v), self.grad)]

    def exact(self) -> list[torch.Tensor]:
        """Compute the output and the gradients in fp64."""
        q, k, v, grad = (x.double() for x in (self.q, self.k, self.v, self.grad))
        gradients = reference.attention_gradients(grad, q, k, v)
        return [reference.attention(q, k, v)[0], *gradients]


def make_work(cell: Cell, generator: torch.Generator) -> Work:
    """Draw queries, keys, values and the gradient of the output from a cell's distribution."""
    draw, dtype = DISTRIBUTIONS[cell.distribution], DTYPES[cell.dtype]
    (q, k), (grad, v) = (draw(*cell.shape, dtype, generator) for _ in range(2))
    return Work(*(x.contiguous()[None, None] for x in (q, k.T, v.T, grad)))


class Bench:
    """One attention input with its fault-free results, run repeatedly with different faults."""

    def __init__(self, work: Work, stage: str) -> None:
        self._work, count = work, TileStrike(stage)
        self.clean, _ = self.struck(count, verify=False)
        self.tiles = count.seen
        if not self.tiles:
            raise ConfigError(
                "attention: torch's own kernel computes it here, which has no tiles to strike; the "
                "fused kernel needs the native core and a GEMM kernel of this processor"
            )
        self._scales = [
            _scale(mine, true) for mine, true in zip(self.clean, work.exact(), strict=True)
        ]

    def struck(self, hook: TileStrike, *, verify: bool) -> tuple[list[torch.Tensor], bool]:
        """Run with a fault hook; return the results and whether an event reported the fault.

        There are no results if an error stopped the run. The events of this process are cleared.
        """
        events.clear()
        results: list[torch.Tensor] = []
        protected = protect(nn.Module(), verify=verify)
        with protected, sites.injecting(hook), suppress(UncorrectableFault):
            results = self._work.run()
        reported = bool(events.recent())
        events.clear()
        return results, reported

    def effect(self, results: list[torch.Tensor]) -> int:
        """Return the worst effect class of all rows of all results."""
        worst = 0
        for new, clean, scale in zip(results, self.clean, self._scales, strict=True):
            moved = change(new[0, 0], clean[0, 0])
            rows = (torch.arange(len(moved)),)
            classes = scale.classify(moved.amax(-1), moved.norm(dim=-1), rows)
            worst = max(worst, int(classes.amax()))
        return worst

    def trial(self, stage: str, model: FaultModel, n: int, seed: int) -> Counts:
        """Inject one fault; nothing is counted if no element can have it."""
        free = TileStrike(stage, model, n, seed)
        unverified, _ = self.struck(free, verify=False)
        if not free.struck:
            return Counts()
        effect = self.effect(unverified)
        results, found = self.struck(TileStrike(stage, model, n, seed), verify=True)
        right = bool(results) and all(map(torch.equal, results, self.clean))
        missed = {} if found else {tuple(EFFECTS)[effect]: 1}
        return Counts(
            trials=1,
            detected=int(found),
            would_harm=int(effect == HARMFUL),
            replayed=1,
            replayed_detected=int(found),
            replayed_corrected=int(found and right),
            **missed,
        )


def run_tiles(plan: Plan, cell: Cell) -> Counts:
    """All trials of a cell of attention; ``plan.end_to_end`` plays no part.

    Raises:
        ConfigError: torch's own kernel computes attention here.
    """
    started_s = time.perf_counter()
    generator = torch.Generator().manual_seed(plan.seed_of("cell", cell.key))
    bench = Bench(make_work(cell, generator), cell.site)
    counts = _clean(make_work(cell, generator))
    model = fault_model(cell.fault, injected_dtype(DTYPES[cell.dtype], cell.site))
    for _ in range(PATIENCE * plan.trials):
        if counts.trials == plan.trials:
            break
        n = int(torch.randint(bench.tiles, (), generator=generator))
        seed = int(torch.randint(2**62, (), generator=generator))
        counts += bench.trial(cell.site, model, n, seed)
    return counts + Counts(seconds=time.perf_counter() - started_s)


def _clean(work: Work) -> Counts:
    """Run protected attention without a fault on newly drawn operands."""
    events.clear()
    with protect(nn.Module()) as protection:
        protection.reset_counters()
        with suppress(UncorrectableFault):
            work.run()
        seen = protection.report().sites
    alarms = len(events.recent())
    events.clear()
    rows, suspects = sum(site.rows for site in seen), sum(site.suspects for site in seen)
    return Counts(clean_rows=rows, clean_suspects=suspects, false_alarms=alarms)


def _scale(mine: torch.Tensor, true: torch.Tensor) -> Scale:
    info = torch.finfo(mine.dtype)
    floor = sqrt(mine.shape[-1]) * info.smallest_normal
    error = (mine.double() - true).abs().nan_to_num(0.0, 0.0, 0.0).amax(-1)
    norm = mine.double().norm(dim=-1).clamp_min(floor)
    return Scale(error.flatten(), norm.flatten(), sqrt(info.eps / 2))
