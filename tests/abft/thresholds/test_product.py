"""A product as thresholds see it: shapes, dtypes, and what it refuses."""

import pytest
import torch
from case_loops import for_each

from holdfast.abft.thresholds import Product


def test_it_knows_its_dimensions() -> None:
    product = Product(torch.ones(2, 1, 5, 7), torch.ones(3, 7, 4), None, torch.float32)
    assert (product.inner, product.columns, tuple(product.rows)) == (7, 4, (2, 3, 5))
    assert product.zeros().shape == (2, 3, 5)
    assert not product.is_empty


@for_each(
    ("operand", "output", "online", "verified"),
    [
        (torch.bfloat16, torch.bfloat16, False, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16, True, torch.float32),
        (torch.bfloat16, torch.float32, False, torch.float32),
        (torch.float8_e4m3fn, torch.float16, False, torch.float16),
        (torch.float8_e4m3fn, torch.float16, True, torch.float32),
        (torch.float64, torch.float64, True, torch.float64),
    ],
)
def test_the_dtype_whose_rounding_shows(
    operand: torch.dtype, output: torch.dtype, online: bool, verified: torch.dtype
) -> None:
    a, b = torch.ones(2, 3).to(operand), torch.ones(3, 2).to(operand)
    product = Product(a, b, None, output, online)
    assert product.verified is verified
    assert product.unit_roundoff == torch.finfo(verified).eps / 2


def test_an_accumulator_may_be_named() -> None:
    a, b = torch.ones(2, 3).half(), torch.ones(3, 2).half()
    product = Product(a, b, None, torch.float16, online=True, accumulation=torch.float16)
    assert product.verified is torch.float16


@for_each("side", ["a", "b"])
def test_integer_operands_are_refused(side: str) -> None:
    operands = {"a": torch.ones(2, 3), "b": torch.ones(3, 2)}
    operands[side] = operands[side].to(torch.int8)
    with pytest.raises(ValueError, match=rf"^{side} has dtype torch\.int8"):
        Product(**operands, c=None, output=torch.float32)


@for_each(("a", "b"), [((2, 3), (2, 3)), ((3,), (3, 2)), ((2, 3), (3,))])
def test_shapes_that_do_not_multiply_are_refused(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="do not multiply"):
        Product(torch.ones(a), torch.ones(b), None, torch.float32)
