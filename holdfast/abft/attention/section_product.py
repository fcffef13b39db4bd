"""One GEMM of a protection section of attention, checked at the end of the section."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch

from holdfast import sites
from holdfast.abft.attention import section_counters
from holdfast.abft.attention.section_cache import Operand
from holdfast.abft.attention.section_repair import repair_by_checksums
from holdfast.abft.gemm.interception import interception
from holdfast.abft.gemm.passes import count_suspects, encode, encoding_of_weight, verify_gemm
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
        """Whether the products need checksums, for verification or for a fault injector."""
        return self.due or sites.armed()


@dataclass(slots=True)
class Product:
    """``C = addend + A B`` of a section.

    Attributes:
        gemm: None where nothing watches it.
        kept: B's checksums are those of a weight under protection, from before this product.
        cached: B is what a cache holds, and has checksums of its own.
        of_a: checksums of A as the right operand of a product to come, if ``settle`` made them.
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

        Args:
            encode_a: make ``of_a`` in the pass that reads A anyway.

        Raises:
            UncorrectableFault: it is wrong, stays wrong, and nobody collects faults.
        """
        if self.gemm is None or not self.section.due:
            return False
        started_s = time.perf_counter()
        suspects, self.of_a = count_suspects(self.gemm, self.output, encode_a=encode_a)
        rows = self.output.numel() // self.output.shape[-1]
        seconds = time.perf_counter() - started_s
        if section_counters.verified(self.site, rows, suspects, seconds):
            section_counters.note_line(self.site, self.gemm, self.output)
        return suspects > 0 and self._decide(self.gemm)

    def renewed(self, a: torch.Tensor, b: torch.Tensor) -> "Product":
        """Multiply again operands that were wrong when the product was computed.

        By ``checksum`` the output is left for ``settle`` to correct: the fault has spread along
        one row or column. Else it is computed again, with the kernel it came from.
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
    """Compute a section's product; B is encoded before it is read, the check comes later.

    Args:
        section: to which the product belongs.
        matrix: that the product yields, or whose gradient.
        a: [M, K] or [batch, M, K].
        b: [K, N] or [batch, K, N].
        addend: [N], 2-D products only.
        role: FORWARD, GRAD_A or GRAD_B.
        encoding: B's row checksums if they are known from before.
        weight: B is one: under ``protect`` its checksums are kept until it changes.
        cached: the checksums of a B that a cache holds, grown from call to call.
        kernel: computes the product if not ``addmm``, ``mm`` or ``bmm`` of a and b as they are.
    """
    site = section.site(matrix, role)
    run = kernel or _kernel(addend, a, b)
    if not section.due:
        section_counters.skipped(site)
    if not section.watched or not (a.numel() and b.numel()):
        return Product(section, site, None, run(), run)
    started_s = time.perf_counter()
    kept = False
    if weight:
        encoding, kept = _of_weight(b, site)
    elif cached:
        encoding = cached.encode(b, site)
    gemm = _gemm(addend, a, b, encoding)
    if sites.armed():
        sites.visit("checksum", site, gemm, None)
        sites.visit("operand", site, gemm, None)
    encoded_s = time.perf_counter()
    output = run()
    section_counters.computed(site, encoded_s - started_s, time.perf_counter() - encoded_s)
    if sites.armed():
        sites.visit("output", site, gemm, output)
    return Product(section, site, gemm, output, run, kept, cached)


def _of_weight(b: torch.Tensor, site: SiteTuple) -> tuple[Encoding, bool]:
    """Look up a weight's checksums; the flag says that they were made before."""
    encoding, kept, damaged = encoding_of_weight(b)
    if damaged:
        report_damaged_encoding(site)
    return encoding, kept


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
