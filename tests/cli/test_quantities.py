"""Times, sizes and speeds as people write them, and back."""

import re
from collections.abc import Callable

import pytest

from holdfast.cli.quantities import (
    duration_s,
    shown_duration,
    shown_size,
    size_bytes,
    speed_bytes_s,
)
from holdfast.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30d", 2_592_000.0),
        ("1w", 604_800.0),
        ("2y", 63_115_200.0),
        ("0.7s", 0.7),
        (".5 s", 0.5),
        (" 5 min ", 300.0),
        ("5m", 300.0),
        ("12h", 43_200.0),
        ("20ms", 0.02),
        ("3us", 3e-6),
        ("1e3s", 1000.0),
        ("1.s", 1.0),
        ("0", 0.0),
    ],
)
def test_times(text: str, seconds: float) -> None:
    assert duration_s(text, "--mttf") == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("4GB", 4e9),
        ("4GiB", 4 * 2**30),
        ("350 MB", 3.5e8),
        ("1.5TB", 1.5e12),
        ("7B", 7),
        ("2kB", 2e3),
        ("2KiB", 2048),
    ],
)
def test_sizes(text: str, count: float) -> None:
    assert size_bytes(text, "--state") == count


def test_speeds() -> None:
    assert speed_bytes_s("250MB/s", "--disk-rate") == 2.5e8
    assert speed_bytes_s("1 GiB / s", "--disk-rate") == 2**30


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: duration_s("30", "--mttf"), "--mttf 30: give a time like"),
        (lambda: duration_s("30 days", "--mttf"), "--mttf 30 days: give a time like"),
        (lambda: duration_s("-3s", "--step"), "--step -3s: give a time like"),
        (lambda: duration_s("nans", "--step"), "--step nans: give a time like"),
        (lambda: duration_s("", "--step"), "--step : give a time like"),
        (lambda: duration_s("1M", "--step"), "--step 1M: give a time like"),
        (lambda: duration_s("1e999d", "--step"), "--step 1e999d is too large"),
        (lambda: size_bytes("4gb", "--state"), "--state 4gb: give a size like 350MB"),
        (lambda: size_bytes("4GB/s", "--state"), "--state 4GB/s: give a size like"),
        (lambda: speed_bytes_s("4GB", "--copy-rate"), "--copy-rate 4GB: give a speed like"),
        (lambda: speed_bytes_s("4GB/h", "--copy-rate"), "--copy-rate 4GB/h: give a speed like"),
        (lambda: speed_bytes_s("x/s", "--copy-rate"), "--copy-rate x/s: give a speed like"),
    ],
)
def test_what_cannot_be_read_is_refused_with_an_example(
    call: Callable[[], float], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        call()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (2e-6, "2 us"),
        (0.0204, "20.4 ms"),
        (59.0, "59 s"),
        (90.0, "1.5 min"),
        (7200.0, "2 h"),
        (216_000.0, "2.5 d"),
        (31_557_600.0, "1 y"),
        (float("inf"), "never"),
    ],
)
def test_times_are_shown_in_the_unit_that_fits(seconds: float, text: str) -> None:
    assert shown_duration(seconds) == text


@pytest.mark.parametrize(("count", "text"), [(12.0, "12 B"), (4e9, "4 GB"), (2.5e12, "2.5 TB")])
def test_sizes_are_shown_in_powers_of_a_thousand(count: float, text: str) -> None:
    assert shown_size(count) == text
