"""Fitted models of e_max: they cover what was measured, and find the shape that is there."""

import math

import pytest
from case_loops import for_each
from hypothesis import given
from hypothesis import strategies as st

from holdfast.abft.thresholds.fits import MARGIN, MODELS, best_fit, fit

INNERS = tuple(2**power for power in range(15))
POSITIVE = st.floats(min_value=1e-18, max_value=1.0)


@given(st.dictionaries(st.integers(1, 1 << 20), POSITIVE, min_size=1), st.sampled_from(MODELS))
def test_a_model_is_a_fifth_above_every_measurement_and_no_more_at_one(
    measured: dict[int, float], model: str
) -> None:
    fitted = fit(measured, model)
    ratios = [fitted.e_max(inner) / value for inner, value in measured.items()]
    assert min(ratios) == pytest.approx(MARGIN, rel=1e-9)
    assert fitted.margin == pytest.approx(min(ratios))
    assert fitted.excess == pytest.approx(math.exp(sum(map(math.log, ratios)) / len(ratios)))


@given(st.floats(0, 1e3), st.floats(1e-3, 1e3))
def test_a_square_root_is_recovered(slope: float, offset: float) -> None:
    measured = {inner: slope * math.sqrt(inner) + offset for inner in INNERS}
    fitted = fit(measured, "sqrt")
    for inner, value in measured.items():
        assert fitted.e_max(inner) == pytest.approx(MARGIN * value, rel=0.02)


def test_the_constant_is_preferred_until_the_square_root_is_clearly_tighter() -> None:
    wavy = {inner: 1e-7 * (1 + 0.1 * math.sin(inner)) for inner in INNERS}
    assert best_fit(wavy).model == "constant"
    assert best_fit(wavy).e_max.growth == 0
    rising = {inner: 5e-9 * math.sqrt(inner) + 1.2e-7 for inner in INNERS}
    assert best_fit(rising).model == "sqrt"
    assert best_fit(rising).excess < fit(rising, "constant").excess


def test_falling_errors_give_no_falling_bound() -> None:
    falling = {inner: 1e-3 / math.sqrt(inner) for inner in INNERS}
    for model in MODELS:
        assert fit(falling, model).e_max(1) == pytest.approx(MARGIN * 1e-3)
        assert fit(falling, model).e_max.growth >= 0


def test_a_k_where_nothing_differed_has_no_say() -> None:
    assert fit({1: 1e-3, 64: 0.0, 256: 1e-3}, "sqrt") == fit({1: 1e-3, 256: 1e-3}, "sqrt")


@for_each("value", [math.nan, math.inf, -1e-3, 0.0])
def test_what_is_no_error_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="positive at some K"):
        fit({16: value}, "constant")
    with pytest.raises(ValueError, match=r"not \{\}"):
        fit({}, "constant")
