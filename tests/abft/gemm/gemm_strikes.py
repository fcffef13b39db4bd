"""Programs that multiply matrices, and what becomes of them when one product is struck."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from site_reports import covered
from torch import nn

import holdfast
from holdfast import events, sites
from holdfast.digest.tensors import tensors_digest
from holdfast.events import Event
from holdfast.inject.faults import write_element
from holdfast.protection import CoverageReport, SiteCoverage
from holdfast.sites import Gemm

STRUCK = 3e4  # far outside every product here, and finite in every dtype

Results = Sequence[torch.Tensor | None]


@dataclass(frozen=True)
class Program:
    """A deterministic computation over a model: its outputs and gradients.

    ``names`` are the products it must be seen to run, by site, with how many times.
    """

    build: Callable[[], nn.Module]
    run: Callable[[nn.Module], Results]
    names: dict[str, int]


@dataclass
class Strike:
    """A site hook that notes every product, and overwrites an element of the n-th (from 0)."""

    nth: int = -1
    seen: list[str] = field(default_factory=list)

    def __call__(self, stage: str, site: str, gemm: Gemm, output: torch.Tensor | None) -> None:
        """See ``sites.arm``."""
        if output is None:
            return
        self.seen.append(site)
        if len(self.seen) == self.nth + 1:
            write_element(output, (*(size // 2 for size in output.shape[:-1]), 0), STRUCK)


@dataclass(frozen=True)
class Outcome:
    """What a run computed, and what holdfast said of it."""

    digest: str
    events: list[Event]
    report: CoverageReport

    @property
    def kinds(self) -> list[str]:
        """The kinds of the events."""
        return [event.kind for event in self.events]

    def covered(self) -> dict[str, int]:
        """Calls of each covered site."""
        return covered(self.report)

    def site(self, name: str) -> SiteCoverage:
        """The counters of one site."""
        (found,) = (site for site in self.report.sites if site.site == name)
        return found


@contextmanager
def seeded_thread() -> Iterator[None]:
    """One thread, as products this small want no more, and the same random numbers."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def bare(program: Program) -> str:
    """The digest of a run without holdfast."""
    with seeded_thread():
        return tensors_digest(program.run(program.build()))


def protected(program: Program, *, verify: bool = True, strike: Strike | None = None) -> Outcome:
    """The same run under protection, with at most one product struck."""
    events.clear()
    with seeded_thread():
        model = program.build()
        with holdfast.protect(model, verify=verify) as protection:
            if strike is not None:
                sites.arm(strike)
            try:
                digest = tensors_digest(program.run(model))
            finally:
                sites.disarm()
            return Outcome(digest, events.recent(), protection.report())


def products(program: Program) -> list[str]:
    """The site of every product of a program, in the order of computation."""
    strike = Strike()
    protected(program, verify=False, strike=strike)
    return strike.seen


def check_clean(program: Program) -> None:
    """Protected, the program computes the same bits, in silence, and every product is counted."""
    outcome = protected(program)
    assert outcome.digest == bare(program)
    assert outcome.kinds == []
    assert [site.site for site in outcome.report.sites if site.suspects] == []
    seen = Counter(products(program))
    assert outcome.covered() == seen
    assert {name: seen[name] for name in program.names} == program.names


def check_repaired(program: Program) -> None:
    """A fault in any product is found under that product's name, and repaired bit for bit."""
    clean, names = bare(program), products(program)
    for nth, name in enumerate(names):
        outcome = protected(program, strike=Strike(nth))
        assert outcome.digest == clean, (nth, name)
        assert [(event.kind, event.op) for event in outcome.events] == [("gemm_fault", name)], nth
        assert outcome.site(name).suspects >= 1, name


def check_reaches(program: Program) -> None:
    """Unverified, the same fault reaches a result, whichever product it strikes."""
    clean, names = bare(program), products(program)
    assert names
    for nth, name in enumerate(names):
        outcome = protected(program, verify=False, strike=Strike(nth))
        assert outcome.digest != clean, (nth, name)
        assert outcome.kinds == []


Check = Callable[[Program], None]
CHECKS: dict[str, Check] = {
    "clean": check_clean,
    "repaired": check_repaired,
    "reaches": check_reaches,
}
