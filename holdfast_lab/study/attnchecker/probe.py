"""Copies of an attention block's matrices in a forward pass with one fault, as in the paper."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf, nan

import torch

from holdfast import sites
from holdfast.abft.thresholds.extreme import EXTREME
from holdfast.inject.faults import flip_bit, write_element
from holdfast.inject.models import fault_model
from holdfast.protection import protect
from holdfast.sites import Gemm
from holdfast_lab.study.attnchecker.attack import TOP_BIT
from holdfast_lab.study.attnchecker.subjects import Matrix, Subject

MATRICES = ("Q", "K", "V", "AS", "AP", "CL", "O")
STRUCK = ("Q", "K", "V", "AS", "CL")  # by the paper's tables 1 and 3
TYPES = ("inf", "nan", "near_inf")
NAMES = {"inf": "INF", "nan": "NaN", "near_inf": "near-INF"}


@dataclass(frozen=True)
class Strike:
    """A fault that overwrites an element of a matrix, as in section 5.1.

    Attributes:
        matrix: One of ``MATRICES``.
        kind: ``inf`` and ``nan`` are assigned. ``near_inf`` flips the top bit of the exponent of an
            element that becomes near-INF by it. Any other kind is a flip of
            ``holdfast.inject.models``, such as ``flip-27-down``.
        generator: Draws the element.
    """

    matrix: str
    kind: str
    generator: torch.Generator

    def effect(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return which fp32 values can have this fault, and the wrong value of each."""
        if self.kind == "near_inf":
            new = flip_bit(values, TOP_BIT)
            return new.isfinite() & (new.abs() > EXTREME), new
        if self.kind in ("inf", "nan"):
            new = torch.full_like(values, inf if self.kind == "inf" else nan)
            return torch.ones_like(values, dtype=torch.bool), new
        fault = fault_model(self.kind, values.dtype)
        return fault.eligible(values), fault.corrupt(values, self.generator)

    def into(self, values: torch.Tensor) -> bool:
        """Overwrite one element of an fp32 tensor; return False if no element can be hit."""
        eligible, new = self.effect(values)
        places = eligible.nonzero()
        if not len(places):
            return False
        place = places[int(torch.randint(len(places), (), generator=self.generator))]
        index = tuple(place.tolist())
        write_element(values, index, new[index])
        return True


class Probe:
    """A site hook that injects at most one fault and keeps copies of all attention matrices.

    Attributes:
        matrices: Matrices by name, as first computed: [sequences · length, columns], and for AS, AP
            and CL [sequences · heads, rows, columns].
    """

    def __init__(
        self, subject: Subject, strike: Strike | None = None, *, keep: bool = True
    ) -> None:
        self._by_site: dict[str, list[tuple[str, Matrix]]] = {}
        for name, matrix in subject.matrices.items():
            self._by_site.setdefault(matrix.forward, []).append((name, matrix))
        self._strike, self._keep = strike, keep
        self.struck = False
        self.matrices: dict[str, torch.Tensor] = {}

    def __call__(self, stage: str, site: str, gemm: Gemm, output: torch.Tensor | None) -> None:
        """Copy the matrix and inject the fault if due, as a hook given to ``sites.arm``."""
        if output is None or site not in self._by_site:
            return
        for name, matrix in self._by_site[site]:
            values = matrix.of(output.data)
            if self._strike is not None and self._strike.matrix == name and not self.struck:
                self.struck = self._strike.into(values)
            if self._keep and name not in self.matrices:
                self.matrices[name] = values.clone()
                if name == "CL":
                    self.matrices["AP"] = gemm.a.detach().clone()


@contextmanager
def named(subject: Subject) -> Iterator[Callable[[Strike | None], Probe]]:
    """Name an unprotected model's products; yield a function that runs it under a probe."""

    def forward(strike: Strike | None = None) -> Probe:
        with sites.injecting(Probe(subject, strike)) as probe, torch.no_grad():
            subject.loss()
        return probe

    with protect(subject.model, verify=False):
        yield forward
