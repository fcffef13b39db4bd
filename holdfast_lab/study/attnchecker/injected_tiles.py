"""Injects faults into tiles of the fused attention kernel while it runs."""

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.nn import functional

from holdfast import events, sites
from holdfast.abft.attention import reference
from holdfast.protection import protect
from holdfast.sites import Gemm
from holdfast_lab.campaign.counts import Counts
from holdfast_lab.campaign.effects import Scale, change
from holdfast_lab.study.attnchecker.injected_products import PATIENCE, settled
from holdfast_lab.study.attnchecker.injected_sections import CAUSAL
from holdfast_lab.study.attnchecker.probe import Strike, named
from holdfast_lab.study.attnchecker.subjects import Subject

STAGES = {"AS": "scores", "AP": "probabilities", "CL": "accumulator", "m, l": "state"}


class TileShot:
    """A site hook that corrupts one element of the n-th tile of a stage, once.

    Attributes:
        seen: tiles of the stage so far.
    """

    def __init__(self, matrix: str, strike: Strike | None, n: int = 0) -> None:
        self._stage, self._strike, self._n = STAGES[matrix], strike, n
        self.struck, self.seen = False, 0

    def __call__(self, stage: str, site: str, gemm: Gemm, output: torch.Tensor | None) -> None:
        """Corrupt the chosen tile when it is reached, as a hook given to ``sites.arm``."""
        if stage != self._stage or output is None:
            return
        if self._strike is not None and self.seen == self._n:
            self.struck = self._strike.into(output)
        self.seen += 1


@dataclass(frozen=True)
class Head:
    """A head of one sequence.

    Args:
        q, k, v: [1, 1, length, d]; mask: bool, False where a key may not be attended to; or none.
        clean: what the kernel gives; scale: what changes of it are measured by.
        tiles: of each matrix of ``STAGES``, in one call.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None
    clean: torch.Tensor
    scale: Scale
    tiles: dict[str, int]


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Call torch's fused attention, replaced by holdfast's kernel while a model is protected."""
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def heads_of(case: Subject, heads: int) -> list[Head]:
    """All heads of the first attention block of one of the paper's models."""
    with named(case) as forward:
        found = forward(None).matrices
    padding = case.batch["attention_mask"] == 0
    batch, length = padding.shape
    split = [
        found[name].view(batch, length, heads, -1).transpose(1, 2).flatten(0, 1)[:, None, None]
        for name in "QKV"
    ]
    allowed = torch.ones(length, length, dtype=torch.bool)
    if case.name in CAUSAL:
        allowed = allowed.tril()
    masks = [allowed & ~row for row in padding]
    with protect(nn.Module()):
        return [
            _head(q, k, v, None if masks[n // heads].all() else masks[n // heads])
            for n, (q, k, v) in enumerate(zip(*split, strict=True))
        ]


def _head(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> Head:
    tiles = {}
    for matrix in STAGES:
        count = TileShot(matrix, None)
        with sites.injecting(count):
            clean = attend(q, k, v, mask)
        tiles[matrix] = count.seen
    exact, _ = reference.attention(q.double(), k.double(), v.double(), mask)
    norm = clean.double().norm(dim=-1)
    bar = math.sqrt(torch.finfo(clean.dtype).eps / 2)
    scale = Scale((clean.double() - exact).abs().amax(-1).flatten(), norm.flatten(), bar)
    return Head(q, k, v, mask, clean, scale, tiles)


def injected_tiles(heads: list[Head], strike: Strike, wanted: int) -> Counts:
    """Corrupt one tile element in each call of the kernel, which must repair what it detects.

    Events of this process are forgotten.
    """
    counts = Counts()
    with protect(nn.Module()):
        for _ in range(PATIENCE * wanted):
            if counts.trials == wanted:
                break
            head = heads[int(torch.randint(len(heads), (), generator=strike.generator))]
            shot = tile_shot(head, strike)
            events.clear()
            with sites.injecting(shot):
                output = attend(head.q, head.k, head.v, head.mask)
            if shot.struck:
                right = torch.equal(output, head.clean)
                found = len(events.recent()) > 0
                counts += settled(found, right, partial(_effect, output, head))
    events.clear()
    return counts


def tile_shot(head: Head, strike: Strike, calls: int = 1) -> TileShot:
    """Choose which tile of one head gets the fault, among those of ``calls`` kernel calls."""
    tiles = calls * head.tiles[strike.matrix]
    n = int(torch.randint(tiles, (), generator=strike.generator))
    return TileShot(strike.matrix, strike, n)


def _effect(output: torch.Tensor, head: Head) -> int:
    """Return the worst effect class of all rows of the output."""
    moved = change(output[0, 0], head.clean[0, 0])
    rows = (torch.arange(len(moved)),)
    return int(head.scale.classify(moved.amax(-1), moved.norm(dim=-1), rows).amax())
