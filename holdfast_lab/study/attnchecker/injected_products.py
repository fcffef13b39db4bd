"""Injection of thousands of faults into attention's products, one in each row, per verification.

The model runs once. Faults are injected into copies of its products, which are then verified. A
sample of the faults also runs through the whole model, where detected faults must be repaired.
"""

from collections.abc import Iterable
from functools import partial
from typing import Protocol

import torch

from holdfast import sites
from holdfast.abft.gemm.reference import as_batch
from holdfast.digest.tensors import tensors_digest
from holdfast.protection import protect
from holdfast.sites import Gemm, Hook
from holdfast_lab.campaign.counts import PATIENCE, Counts, by_effect
from holdfast_lab.campaign.effects import change
from holdfast_lab.campaign.end_to_end import observed
from holdfast_lab.campaign.workload import Computed
from holdfast_lab.study.attnchecker.attack import gradients
from holdfast_lab.study.attnchecker.probe import Probe, Strike
from holdfast_lab.study.attnchecker.subjects import Matrix, Subject


class Shot(Protocol):
    """A site hook that injects at most one fault."""

    struck: bool

    def __call__(self, stage: str, site: str, gemm: Gemm, output: torch.Tensor | None) -> None:
        """Inject the fault when its site is reached, as a hook given to ``sites.arm``."""


def computed(case: Subject, wanted: Iterable[str]) -> dict[str, Computed]:
    """Record the products at these sites in one protected forward pass, before any repair."""
    names, found = set(wanted), {}

    def note(stage: str, site: str, gemm: Gemm, output: torch.Tensor | None) -> None:
        if output is not None and site in names and site not in found:
            found[site] = Computed(gemm, as_batch(output.detach()).clone())

    with protect(case.model), sites.injecting(note), torch.no_grad():
        case.loss()
    return found


def injected_rows(product: Computed, matrix: Matrix, strike: Strike, wanted: int) -> Counts:
    """Corrupt elements of a matrix, each in a different row, and run the verification of rows."""
    counts, tries = Counts(), 0
    while counts.trials < wanted and tries < PATIENCE * wanted:
        once = _one_pass(product, matrix, strike, wanted - counts.trials)
        counts, tries = counts + once, tries + product.c.shape[0] * product.c.shape[1]
    return counts


def struck_rows(
    product: Computed, matrix: Matrix, strike: Strike, wanted: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Overwrite one element in each of up to ``wanted`` rows of a copy of the product.

    Returns:
        The copy [batch, M, N], and the indices of the rows in [batch · M].
    """
    c = product.c.clone()
    values = matrix.of(c.view(-1, c.shape[-1]))
    eligible, new = strike.effect(values)
    lots = torch.rand(values.shape, generator=strike.generator).masked_fill_(~eligible, -1.0)
    place = lots.argmax(1, keepdim=True)
    rows = eligible.any(1).nonzero().flatten()[:wanted]
    values[rows] = values[rows].scatter(1, place[rows], new[rows].gather(1, place[rows]))
    return c, rows


def _one_pass(product: Computed, matrix: Matrix, strike: Strike, wanted: int) -> Counts:
    c, rows = struck_rows(product, matrix, strike, wanted)
    detected = product.suspects(c).flatten()[rows]
    missed = rows[~detected]
    batch_and_row = missed // c.shape[1], missed % c.shape[1]
    moved = change(c[batch_and_row], product.c[batch_and_row])
    effects = product.scale.classify(moved.amax(-1), moved.norm(dim=-1), batch_and_row)
    return Counts(trials=len(rows), detected=int(detected.sum()), **by_effect(effects))


class Replays:
    """A protected training step of a model, into which faults are injected one at a time."""

    def __init__(self, case: Subject) -> None:
        self._case = case
        self._clean, alarms = self._step(lambda *_: None)
        assert not alarms, f"{case.name}: events without faults"

    def _step(self, hook: Hook) -> tuple[str, int]:
        """Return the digest of loss and gradients (empty after an error) and the event count."""
        results, alarms = observed(self._case.model, partial(gradients, self._case), hook)
        return tensors_digest(results) if results else "", alarms

    def shot(self, shot: Shot) -> Counts:
        """Inject one fault and count its outcome; nothing is counted if no element was changed."""
        digest, alarms = self._step(shot)
        if not shot.struck:
            return Counts()
        return Counts(
            replayed=1,
            replayed_detected=int(alarms > 0),
            replayed_corrected=int(alarms > 0 and digest == self._clean),
        )

    def strikes(self, strike: Strike, count: int) -> Counts:
        """Inject ``count`` faults into products."""
        shots = (Probe(self._case, strike, keep=False) for _ in range(count))
        return sum((self.shot(shot) for shot in shots), Counts())
