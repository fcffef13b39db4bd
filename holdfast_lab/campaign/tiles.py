"""Fault-injection trials of fused attention: one element of a tile changes while the kernel runs.

The kernel detects and repairs faults while it runs, so that every trial is end to end. It runs once
unverified, which shows the effect of the fault, and once verified, which shows whether the fault is
detected and leaves no trace.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.nn import functional

from holdfast.abft.attention import reference
from holdfast.errors import ConfigError
from holdfast.inject.faults import write_element
from holdfast.inject.models import FaultModel, fault_model
from holdfast.sites import Gemm
from holdfast_lab.campaign.counts import PATIENCE, Counts, settled
from holdfast_lab.campaign.effects import HARMFUL, scale_against
from holdfast_lab.campaign.end_to_end import clean_run, observed
from holdfast_lab.campaign.plan import DISTRIBUTIONS, DTYPES, Cell, Plan, injected_dtype


class TileStrike:
    """A site hook that corrupts one element of the n-th tile of a stage of the attention kernel.

    Args:
        stage: One of ``sites.TILE_STAGES``.
        strike: Corrupts an element of a tile, and returns False if no element can have the fault.
            With None the tiles of the stage are counted.
        n: Number of the tile, from 0.

    Attributes:
        seen: Number of tiles of the stage so far.
        struck: True if an element was corrupted.
    """

    def __init__(
        self, stage: str, strike: Callable[[torch.Tensor], bool] | None = None, n: int = 0
    ) -> None:
        self._stage, self._strike, self._n = stage, strike, n
        self.seen, self.struck = 0, False

    def __call__(self, stage: str, site: str, gemm: Gemm, output: torch.Tensor | None) -> None:
        """Corrupt the chosen tile when it is reached, as a hook given to ``sites.arm``."""
        if stage != self._stage or output is None:
            return
        if self._strike is not None and self.seen == self._n:
            self.struck = self._strike(output)
        self.seen += 1


def _overwrite(model: FaultModel, seed: int, tile: torch.Tensor) -> bool:
    """Corrupt an element of a tile that the seed draws; return False if none can have the fault."""
    generator = torch.Generator().manual_seed(seed)
    places = model.eligible(tile).nonzero()
    if not len(places):
        return False
    row, column = places[int(torch.randint(len(places), (), generator=generator))].tolist()
    new = model.corrupt(tile[row : row + 1, column : column + 1], generator)
    write_element(tile, (row, column), new)
    return True


@dataclass(frozen=True)
class Work:
    """The inputs of one head of attention and the gradient of its output, [1, 1, positions, d]."""

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
    """The inputs of attention with their clean results, run repeatedly with different faults."""

    def __init__(self, work: Work, stage: str) -> None:
        self._work, count = work, TileStrike(stage)
        self.clean, _ = observed(nn.Module(), work.run, count, verify=False)
        self.tiles = count.seen
        if not self.tiles:
            raise ConfigError(
                "attention: torch's own kernel computes it here, which has no tiles to strike; the "
                "fused kernel needs the native core and a GEMM kernel of this processor"
            )
        self._scales = list(map(scale_against, self.clean, work.exact()))

    def effect(self, results: list[torch.Tensor]) -> int:
        """Return the worst effect class of all rows of all results."""
        each = zip(results, self.clean, self._scales, strict=True)
        return max((scale.worst(new[0, 0], clean[0, 0]) for new, clean, scale in each), default=0)

    def trial(self, stage: str, model: FaultModel, n: int, seed: int) -> Counts:
        """Inject one fault; nothing is counted if no element of the tile can have it."""
        fault, run = partial(_overwrite, model, seed), self._work.run
        hook = TileStrike(stage, fault, n)
        unverified, _ = observed(nn.Module(), run, hook, verify=False)
        if not hook.struck:
            return Counts()
        effect = self.effect(unverified)
        results, reported = observed(nn.Module(), run, TileStrike(stage, fault, n))
        right = bool(results) and all(map(torch.equal, results, self.clean))
        harmful = Counts(would_harm=int(effect == HARMFUL))
        return harmful + settled(reported > 0, right, lambda: effect)


def run_tiles(plan: Plan, cell: Cell) -> Counts:
    """Run all trials of a cell of attention; each is end to end, whatever ``plan.end_to_end`` says.

    Raises:
        ConfigError: Torch's own kernel computes attention here.
    """
    started_s = time.perf_counter()
    generator = torch.Generator().manual_seed(plan.seed_of("cell", cell.key))
    bench = Bench(make_work(cell, generator), cell.site)
    counts = clean_run(nn.Module(), make_work(cell, generator).run)
    model = fault_model(cell.fault, injected_dtype(DTYPES[cell.dtype], cell.site))
    for _ in range(PATIENCE * plan.trials):
        if counts.trials == plan.trials:
            break
        n = int(torch.randint(bench.tiles, (), generator=generator))
        seed = int(torch.randint(2**62, (), generator=generator))
        counts += bench.trial(cell.site, model, n, seed)
    return counts + Counts(seconds=time.perf_counter() - started_s)
