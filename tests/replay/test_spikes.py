"""The spike detector: silent on what is stationary, loud on a jump, and not blinded by one."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.replay import SpikeDetector

FINITE = st.floats(1e-30, 1e30)
# factor · floor = 0.4 is the narrowest band, in logarithms.
WOBBLE = st.floats(math.exp(-0.19), math.exp(0.19))


def _fed(values: list[float], **options: float) -> SpikeDetector:
    detector = SpikeDetector(**options)
    for value in values:
        detector.accept(value)
    return detector


@given(FINITE, st.lists(WOBBLE, min_size=1, max_size=200))
def test_a_series_within_its_band_is_never_flagged(level: float, wobbles: list[float]) -> None:
    detector = SpikeDetector()
    for wobble in wobbles:
        assert not detector.is_spike(level * wobble)
        detector.accept(level * wobble)


@given(FINITE, st.lists(st.floats(0.95, 1.05), min_size=8, max_size=100))
def test_a_tenfold_jump_after_warm_up_is_flagged(level: float, wobbles: list[float]) -> None:
    detector = _fed([level * wobble for wobble in wobbles])
    assert not detector.is_spike(level)
    assert detector.is_spike(level * 10)


@given(st.integers(8, 64), st.integers(0, 7))
def test_accepted_outliers_do_not_hide_the_next_one(ordinary: int, place: int) -> None:
    values = [1.0] * ordinary
    for outlier in range(3):
        values.insert(place + outlier, 1e6)
    assert _fed(values).is_spike(10.0)


@given(st.lists(FINITE, max_size=7), FINITE)
def test_nothing_is_flagged_before_warm_up(values: list[float], value: float) -> None:
    assert not _fed(values).is_spike(value)


def test_drops_zero_and_negative_values_are_no_spikes() -> None:
    detector = _fed([1.0] * 20)
    assert [detector.is_spike(value) for value in (1e-9, 0.0, -5.0)] == [False] * 3
    assert detector.is_spike(math.inf)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.0, -1.0])
def test_what_has_no_logarithm_does_not_enter(value: float) -> None:
    detector = _fed([1.0] * 8)
    before = detector.state_dict()
    detector.accept(value)
    assert detector.state_dict() == before


def test_only_the_window_counts() -> None:
    detector = _fed([1.0] * 8 + [1000.0] * 8, window=8, warmup=8)
    assert not detector.is_spike(1100.0)
    assert detector.is_spike(2000.0)


@given(st.lists(FINITE, max_size=100), FINITE)
def test_a_restored_detector_judges_as_the_saved_one(values: list[float], value: float) -> None:
    saved, restored = _fed(values), _fed([3.0] * 9)
    restored.load_state_dict(saved.state_dict())
    assert restored.is_spike(value) == saved.is_spike(value)
    assert restored.state_dict() == saved.state_dict()


@pytest.mark.parametrize(("warmup", "window"), [(1, 8), (9, 8), (0, 0)])
def test_a_warm_up_outside_the_window_is_refused(warmup: int, window: int) -> None:
    with pytest.raises(ValueError, match=f"warmup = {warmup} .*window = {window}"):
        SpikeDetector(warmup=warmup, window=window)
