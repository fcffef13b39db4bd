"""Parameters and batches changed in every legitimate way: no false alarm, no fault missed."""

import pytest
from gemm_strikes import Check, Defects, Program, triples
from programs_parameters import PARAMETERS

from holdfast import native

SILENT = ("clean", "repaired")
DEFECTS: Defects = {}
if native.core is None:
    FOREACH = "under a dispatch mode foreach ops do not move the version counter"
    DEFECTS |= {("foreach", check): FOREACH for check in SILENT}


@pytest.mark.parametrize(("check", "program"), triples(PARAMETERS, DEFECTS))
def test_every_product(check: Check, program: Program) -> None:
    check(program)
