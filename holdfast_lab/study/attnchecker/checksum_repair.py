"""``attnchecker.checksum-repair``: extreme values rebuilt from checksums (sections 4.2 and 5.2).

Elements of the matrices that an attention block's products compute are overwritten, each in another
row. The rows that the verification suspects are repaired by the paper's EEC-ABFT alone: nothing is
computed again. A row counts as repaired if every element is within the row's threshold and one
rounding of the clean one, which is what the method promises.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch

from holdfast.abft.gemm.correction import correct_rows
from holdfast.abft.gemm.cpu import verify
from holdfast.abft.gemm.reference import as_batch
from holdfast.inject.statistics import Rate
from holdfast_lab.campaign.workload import Computed
from holdfast_lab.study.attnchecker.injected_products import computed, struck_rows
from holdfast_lab.study.attnchecker.models import BASE, PAPER_MODELS, SMALL, TINY, subject
from holdfast_lab.study.attnchecker.paper import FAULTS, REBUILT
from holdfast_lab.study.attnchecker.probe import NAMES, TYPES, Strike
from holdfast_lab.study.attnchecker.subjects import Matrix
from holdfast_lab.study.registry import Case, Progress, Row, Settings, Study, watched

TABLE = "one extreme element, rebuilt from the checksums of its row"


@torch.no_grad()
def rebuilt(product: Computed, matrix: Matrix, strike: Strike, wanted: int) -> Rate:
    """Overwrite elements, repair the suspected rows by checksums, and count the right rows."""
    done = trials = 0
    gemm, given = product.gemm, (*product.encoding, product.gemm.addend)
    while trials < wanted:
        c, rows = struck_rows(product, matrix, strike, wanted - trials)
        if not len(rows):
            break
        repaired = as_batch(correct_rows(gemm, c, product.suspects(c)))
        threshold = verify(product.c, product.a, *given, gemm.beta, gemm.alpha, product.b)[1]
        rounding = torch.finfo(c.dtype).eps / 2 * product.c.abs().double()
        allowed = threshold.reshape(c.shape[:2]).unsqueeze(-1) + rounding
        right = ((repaired.double() - product.c.double()).abs() <= allowed).all(-1)
        done, trials = done + int(right.flatten()[rows].sum()), trials + len(rows)
    return Rate(done, trials)


def _run(settings: Settings, progress: Progress) -> Iterator[Row]:
    size = settings.choose(TINY, SMALL, replace(BASE, vocabulary=SMALL.vocabulary, batch=2))
    faults = settings.choose(20, FAULTS, FAULTS)
    for name in watched(PAPER_MODELS, progress):
        case = subject(name, replace(size, layers=1), seed=settings.seed)
        products = computed(case, {matrix.forward for matrix in case.matrices.values()})
        for label, matrix in case.matrices.items():
            generator = settings.generator("checksum-repair", name, label)
            strikes = {kind: Strike(label, kind, generator) for kind in TYPES}
            rates = {
                f"{NAMES[kind]} repaired, %": rebuilt(
                    products[matrix.forward], matrix, strike, faults
                )
                for kind, strike in strikes.items()
            }
            place: Case = {"model": name, "struck": label}
            published = {key: REBUILT for key, rate in rates.items() if rate.trials}
            yield Row.of_rates(TABLE, place, rates, published)


def _verdict(rows: list[Row]) -> str:
    """Check that the checksums alone repair every extreme value."""
    for row in rows:
        for name, share in row.measured.items():
            if share < 100:
                return f"{name} of {row.case['struck']} in {row.case['model']}: {share:g}"
    return ""


STUDY = Study(
    name="attnchecker.checksum-repair",
    paper="ATTNChecker, sections 4.2 and 5.2",
    reproduces="all extreme values in a block's matrices are corrected from checksums alone",
    run=_run,
    verdict=_verdict,
)
