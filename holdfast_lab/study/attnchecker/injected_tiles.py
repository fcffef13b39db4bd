"""Injection of faults into tiles of the fused attention kernel while it runs."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.nn import functional

from holdfast import events, sites
from holdfast.abft.attention import reference
from holdfast.protection import protect
from holdfast_lab.campaign.counts import PATIENCE, Counts, settled
from holdfast_lab.campaign.effects import Scale, scale_against
from holdfast_lab.campaign.tiles import TileStrike
from holdfast_lab.study.attnchecker.injected_sections import CAUSAL
from holdfast_lab.study.attnchecker.probe import Strike, named
from holdfast_lab.study.attnchecker.subjects import Subject

STAGES = {"AS": "scores", "AP": "probabilities", "CL": "accumulator", "m, l": "state"}


@dataclass(frozen=True)
class Head:
    """One head of attention of one sequence.

    Attributes:
        q, k, v: Operands, [1, 1, length, d].
        mask: False for keys that may not be attended to, bool; None for no mask.
        clean: Result of the kernel without faults.
        scale: Scale by which changes of the result are classified.
        tiles: Number of tiles of each matrix of ``STAGES`` in one call.
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
    """Return all heads of the first attention block of one of the paper's models."""
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
        count = TileStrike(STAGES[matrix])
        with sites.injecting(count):
            clean = attend(q, k, v, mask)
        tiles[matrix] = count.seen
    exact, _ = reference.attention(q.double(), k.double(), v.double(), mask)
    return Head(q, k, v, mask, clean, scale_against(clean, exact), tiles)


def injected_tiles(heads: list[Head], strike: Strike, wanted: int) -> Counts:
    """Corrupt one tile element in each call of the kernel, which must repair what it detects.

    The events of this process are cleared.
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
                effect = partial(head.scale.worst, output[0, 0], head.clean[0, 0])
                counts += settled(found, right, effect)
    events.clear()
    return counts


def tile_shot(head: Head, strike: Strike, calls: int = 1) -> TileStrike:
    """Draw the tile that gets the fault, among those of ``calls`` calls of the kernel."""
    tiles = calls * head.tiles[strike.matrix]
    n = int(torch.randint(tiles, (), generator=strike.generator))
    return TileStrike(STAGES[strike.matrix], strike.into, n)
