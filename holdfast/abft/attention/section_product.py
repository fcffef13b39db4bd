"""One GEMM of a protection section of attention, checked at the end of the section."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch

from holdfast import sites
from holdfast.abft import counters
from holdfast.abft.attention.section_cache import Operand
from holdfast.abft.attention.section_repair import repair_by_checksums
from holdfast.abft.gemm.cpu import count_suspects, encode, encoding_of_weight, verify_gemm
from holdfast.abft.gemm.interception import interception
from holdfast.abft.gemm.reference import suspect_rows
from holdfast.abft.gemm.suspects import (
    SuspectProduct,
    differing_rows,
    report_damaged_encoding,
    resolve,
)
from holdfast.sites import Gemm, SiteTuple

FORWARD, GRAD_A, GRAD_B = range(3)

Encoding = tuple[torch.Tensor, torch.Tensor]


class Section(NamedTuple):
    """One of the sections S_AS, S_CL and S_O in one call, with its protection settings."""

    name: str
    module: int
    due: bool
    correction: str  # one of ``policy.CORRECTIONS``

    def site(self, matrix: str, role: int = FORWARD) -> SiteTuple:
        """Return the site, such as ``…/S_AS.Q/forward``, of the product with this result."""
        return self.module, f"{self.name}.{matrix}", 0, role

    @property
    def watched(self) -> bool:
        """True if the products need checksums, for verification or for a fault injector."""
        return self.due or sites.armed()


@dataclass(slots=True)
class Product:
    """A product ``C = addend + A B`` of a section.

    Attributes:
        gemm: Operands and checksums of B; None if the product is neither checked nor injected.
        kept: True if the checksums of B are cached ones of a protected weight.
        cached: Incremental checksums of B, if B is stored in a cache of keys or values.
        of_a: Checksums of A for a later product with A on the right, if ``settle`` computed them.
    """

    section: Section
    site: SiteTuple
    gemm: Gemm | None
    output: torch.Tensor
    rerun: Callable[[], torch.Tensor]
    kept: bool = False
    cached: Operand | None = None
    of_a: Encoding | None = None

    def settle(self, *, encode_a: bool = False) -> bool:
        """Check the product and correct it in place; return whether any of its bits changed.

        With ``encode_a`` the same pass over A computes ``of_a``.

        Raises:
            UncorrectableFault: A fault was not repaired, and no caller is collecting faults.
        """
        if self.gemm is None or not self.section.due:
            return False
        started_s = time.perf_counter()
        suspects, self.of_a = count_suspects(self.gemm, self.output, encode_a=encode_a)
        rows = self.output.numel() // self.output.shape[-1]
        seconds = time.perf_counter() - started_s
        if counters.verified(self.site, rows, suspects, seconds):
            counters.note_line(self.site, self.gemm, self.output)
        return suspects > 0 and self._decide(self.gemm)

    def renewed(self, a: torch.Tensor, b: torch.Tensor) -> "Product":
        """Return the product for operands that were repaired after it was computed.

        With correction ``checksum`` the output is kept and ``settle`` corrects it, as the fault has
        spread along one row or column only. Otherwise the same kernel computes it again.
        """
        run = _kernel(None, a, b)
        output = self.output if self.section.correction == "checksum" else run()
        encoding = self.cached.encode(b, self.site) if self.cached else None
        gemm = _gemm(None, a, b, encoding)
        return Product(self.section, self.site, gemm, output, run, cached=self.cached)

    def _decide(self, gemm: Gemm) -> bool:
        before = self.output.clone()
        rows = verify_gemm(gemm, self.output)
        correction = self.section.correction
        if correction == "checksum":
            if repair_by_checksums(self.site, gemm, self.output, suspect_rows(rows)):
                rows = verify_gemm(gemm, self.output)
            correction = "recompute"
        if suspect_rows(rows).any():
            suspect = SuspectProduct(
                self.site, gemm, self.output, rows, self.kept, self.rerun, correction=correction
            )
            if self.kept:
                suspect = replace(suspect, forget=partial(interception().forget, gemm.b))
            if self.cached:
                suspect = replace(suspect, encode=self.cached.encode_anew)
            resolve(suspect)
        return bool(differing_rows(self.output, before).any())


def multiply(
    section: Section,
    matrix: str,
    a: torch.Tensor,
    b: torch.Tensor,
    addend: torch.Tensor | None = None,
    *,
    role: int = FORWARD,
    encoding: Encoding | None = None,
    weight: bool = False,
    cached: Operand | None = None,
    kernel: Callable[[], torch.Tensor] | None = None,
) -> Product:
    """Compute a product of a section; B is encoded before, and ``Product.settle`` checks it later.

    Args:
        section: The section to which the product belongs.
        matrix: Name of the matrix that the product yields, or whose gradient it yields.
        a: [M, K] or [batch, M, K].
        b: [K, N] or [batch, K, N].
        addend: [N], for products of matrices only.
        role: FORWARD, GRAD_A or GRAD_B.
        encoding: Checksums of B, if they are known.
        weight: True if B is a weight, whose checksums are cached while it is protected.
        cached: Incremental checksums of B, if B is stored in a cache of keys or values.
        kernel: Computes the product, if not ``addmm``, ``mm`` or ``bmm`` of a and b.
    """
    site = section.site(matrix, role)
    run = kernel or _kernel(addend, a, b)
    if not section.due:
        counters.skipped(site)
    if not section.watched or not (a.numel() and b.numel()):
        return Product(section, site, None, run(), run)
    started_s = time.perf_counter()
    kept = False
    if weight:
        encoding, kept, damaged = encoding_of_weight(b)
        if damaged:
            report_damaged_encoding(site)
    elif cached:
        encoding = cached.encode(b, site)
    gemm = _gemm(addend, a, b, encoding)
    if sites.armed():
        sites.visit("checksum", site, gemm, None)
        sites.visit("operand", site, gemm, None)
    encoded_s = time.perf_counter()
    output = run()
    counters.computed(site, encoded_s - started_s, time.perf_counter() - encoded_s)
    if sites.armed():
        sites.visit("output", site, gemm, output)
    return Product(section, site, gemm, output, run, kept, cached)


def _kernel(
    addend: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor
) -> Callable[[], torch.Tensor]:
    if addend is not None:
        return lambda: torch.addmm(addend, a, b)
    return lambda: torch.mm(a, b) if a.dim() == 2 else torch.bmm(a, b)


def _gemm(
    addend: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor, encoding: Encoding | None
) -> Gemm:
    row_sum, statistics = encoding or encode(b)
    return Gemm(addend, a, b, 1.0, 1.0, row_sum, statistics)
