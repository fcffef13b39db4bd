"""Programs that multiply matrices, and what becomes of them when one product is struck."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from site_reports import covered
from struck import Strike, armed
from torch import nn

import holdfast
from holdfast import events
from holdfast.digest.tensors import tensors_digest
from holdfast.events import Event
from holdfast.protection import CoverageReport

Results = Sequence[torch.Tensor | None]


@dataclass(frozen=True)
class Program:
    """A deterministic computation over a model: its outputs and gradients.

    ``names`` are the products it must be seen to run, by site, with how many times.
    """

    build: Callable[[], nn.Module]
    run: Callable[[nn.Module], Results]
    names: dict[str, int]


def strike(nth: int = -1) -> Strike:
    """Note every product, and overwrite an element of the n-th with what no product here has."""
    return Strike((-1, -1, 0), 3e4, nth=nth)


@dataclass(frozen=True)
class Outcome:
    """What a run computed, and what holdfast said of it."""

    digest: str
    products: list[str]  # by site, in the order of computation
    events: list[Event]
    report: CoverageReport


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


def protected(program: Program, nth: int = -1, *, verify: bool = True) -> Outcome:
    """The same run under protection, with at most one product struck."""
    events.clear()
    with seeded_thread():
        model, hook = program.build(), strike(nth)
        with holdfast.protect(model, verify=verify) as protection:
            with armed(hook):
                digest = tensors_digest(program.run(model))
            return Outcome(digest, hook.seen, events.recent(), protection.report())


def products(program: Program) -> list[str]:
    """The site of every product of a program."""
    return protected(program, verify=False).products


def check_clean(program: Program) -> None:
    """Protected, the program computes the same bits, in silence, and every product is counted."""
    outcome = protected(program)
    assert outcome.digest == bare(program)
    assert outcome.events == []
    assert [site.site for site in outcome.report.sites if site.suspects] == []
    seen = Counter(products(program))
    assert covered(outcome.report) == seen
    assert {name: seen[name] for name in program.names} == program.names


def check_repaired(program: Program) -> None:
    """A fault in any product is found under that product's name, and repaired bit for bit."""
    clean, names = bare(program), products(program)
    for nth, name in enumerate(names):
        outcome = protected(program, nth)
        assert outcome.digest == clean, (nth, name)
        assert [(event.kind, event.op) for event in outcome.events] == [("gemm_fault", name)], nth
        assert [site.site for site in outcome.report.sites if site.suspects] == [name], nth


def check_reaches(program: Program) -> None:
    """Unverified, the same fault reaches a result, whichever product it strikes."""
    clean, names = bare(program), products(program)
    assert names
    for nth, name in enumerate(names):
        outcome = protected(program, nth, verify=False)
        assert outcome.digest != clean, (nth, name)
        assert outcome.events == []


CHECKS: dict[str, Callable[[Program], None]] = {
    "clean": check_clean,
    "repaired": check_repaired,
    "reaches": check_reaches,
}
