"""``attnchecker.coverage``: inject faults into every product of an attention block (section 5.2).

The paper protects the six products of the forward pass. Here faults are also injected into the
twelve products of the backward pass, in ten architectures.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product as every

from holdfast.inject.statistics import Rate
from holdfast.protection import CoverageReport, protect
from holdfast.sites import ROLES
from holdfast_lab.study.attnchecker.attack import KINDS, attack, calm, gradients, products, reaching
from holdfast_lab.study.attnchecker.models import BASE, FAMILIES, SMALL, TINY, subject
from holdfast_lab.study.attnchecker.paper import ALL_CORRECTED, ALL_DETECTED
from holdfast_lab.study.attnchecker.subjects import GEMMS, Subject
from holdfast_lab.study.registry import Case, Progress, Row, Settings, Study, watched

STRUCK, FUSED, LISTED = "unfused attention", "fused attention", "not covered, and listed"
CAUGHT, REPAIRED, REACHED = (
    "caught, %",
    "repaired bit for bit, %",
    "reach a gradient unprotected, %",
)


def named(case: Subject) -> dict[str, str]:
    """Return the attention's products by what they compute, e.g. ``{"Q, K, V": …, "AS": …}``."""
    matrices: dict[str, list[str]] = {}
    for matrix in GEMMS:
        if matrix in case.matrices:
            matrices.setdefault(case.matrices[matrix].gemm, []).append(matrix)
    return {", ".join(names): gemm for gemm, names in matrices.items()}


def coverage(case: Subject) -> CoverageReport:
    """Return the coverage report after one protected step."""
    with protect(case.model) as protection:
        gradients(case)
        return protection.report()


def struck(case: Subject, label: str, gemm: str, kinds: tuple[str, ...]) -> Row:
    """Inject each kind of fault into a product of attention and both operands' gradients."""
    clean, shapes = calm(case), products(case)
    length = shapes[case.matrices["AS"].forward][-1]
    counts = dict.fromkeys((CAUGHT, REPAIRED, REACHED), 0)
    trials = list(every([f"{gemm}/{role}" for role in ROLES], kinds))
    for site, kind in trials:
        index = reaching(shapes[site], length)
        outcome = attack(case, site, kind, index, verify=True)
        counts[CAUGHT] += outcome.caught == (site,) and not outcome.unrepaired
        counts[REPAIRED] += outcome.digest == clean
        counts[REACHED] += attack(case, site, kind, index, verify=False).digest != clean
    return Row.of_rates(
        STRUCK,
        {"model": case.name, "product": label, "site": gemm, "faults": len(trials)},
        {name: Rate(count, len(trials)) for name, count in counts.items()},
        {CAUGHT: ALL_DETECTED, REPAIRED: ALL_CORRECTED},
    )


def is_fused(site: str) -> bool:
    """Return whether a site belongs to torch's fused attention."""
    operator = site.partition("/")[2]
    return operator.startswith(("sdpa", "_scaled_dot_product"))


def fused(case: Subject) -> Row:
    """Return the coverage of a model's fused attention; each site is covered or has a reason."""
    found = [site for site in coverage(case).sites if is_fused(site.site)]
    reasons = sorted({site.reason for site in found if not site.covered})
    covered = sum(site.covered for site in found)
    measured = {"sites": float(len(found)), "covered": float(covered)}
    return Row(FUSED, {"model": case.name}, measured, note="; ".join(reasons))


def listed(case: Subject) -> Iterator[Row]:
    """List the sites of an unfused model that are not covered."""
    for site in coverage(case).sites:
        if not site.covered:
            place: Case = {"model": case.name, "site": site.site}
            yield Row(LISTED, place, {"calls": float(site.calls)}, note=site.reason)


def _run(settings: Settings, progress: Progress) -> Iterator[Row]:
    size = settings.choose(TINY, SMALL, replace(BASE, layers=2, batch=2))  # faults go into layer 1
    kinds = settings.choose(KINDS[1:2], KINDS, KINDS)
    later: list[Row] = []
    for name in watched(list(FAMILIES), progress):
        case = subject(name, size, seed=settings.seed)
        for label, gemm in named(case).items():
            yield struck(case, label, gemm, kinds)
        later += listed(case)
        if "sdpa" in FAMILIES[name].attentions:
            later.append(fused(subject(name, size, attention="sdpa", seed=settings.seed)))
    yield from sorted(later, key=lambda row: row.table)


def _verdict(rows: list[Row]) -> str:
    """Check that every fault is reported at its own product and repaired bit for bit."""
    for row in rows:
        if row.table == STRUCK and min(row.measured[CAUGHT], row.measured[REPAIRED]) < 100:
            return f"a fault in {row.case['site']} of {row.case['model']} is missed or not repaired"
    return ""


STUDY = Study(
    name="attnchecker.coverage",
    paper="ATTNChecker, section 5.2",
    reproduces="all faults in the products of an attention block are detected and corrected; here "
    "also those of the backward pass, in ten architectures",
    run=_run,
    verdict=_verdict,
)
