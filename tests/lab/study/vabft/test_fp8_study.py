"""e_max of emulated fp8 products: their outputs' rounding decides, not that of the operands."""

import torch
from case_loops import for_each

from holdfast_lab.study.vabft.emax import positive_operands
from holdfast_lab.study.vabft.fp8 import FORMATS, relative_error


@for_each("dtype", FORMATS.values())
def test_the_error_is_that_of_the_outputs(dtype: torch.dtype) -> None:
    drawn = positive_operands(128, torch.float32, torch.Generator().manual_seed(0))
    a, b = (each.to(dtype).float() for each in drawn)
    assert not torch.equal(a, drawn[0])
    narrow, wide = (relative_error(a, b, each) for each in (torch.float16, torch.float32))
    assert 0.5 < narrow < 3
    assert wide < narrow / 100
    coarser = relative_error(a, b, torch.bfloat16)  # eight times fp16's roundoff
    assert 4 < coarser / narrow < 16
