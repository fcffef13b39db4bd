"""Times, sizes and speeds as people write them, and back."""

import re
from collections.abc import Callable

import pytest
from case_loops import for_each

from holdfast.cli.quantities import (
    duration_s,
    shown_duration,
    size_bytes,
    speed_bytes_s,
)
from holdfast.errors import ConfigError
from holdfast.report.quantities import size


@for_each(
    ("read", "text", "value"),
    [
        (duration_s, "30d", 2_592_000.0),
        (duration_s, "1w", 604_800.0),
        (duration_s, "2y", 63_115_200.0),
        (duration_s, "0.7s", 0.7),
        (duration_s, ".5 s", 0.5),
        (duration_s, " 5 min ", 300.0),
        (duration_s, "5m", 300.0),
        (duration_s, "12h", 43_200.0),
        (duration_s, "20ms", 0.02),
        (duration_s, "3us", 3e-6),
        (duration_s, "1e3s", 1000.0),
        (duration_s, "1.s", 1.0),
        (duration_s, "0", 0.0),
        (size_bytes, "4GiB", 4 * 2**30),
        (size_bytes, "350 MB", 3.5e8),
        (size_bytes, "1.5TB", 1.5e12),
        (size_bytes, "7B", 7),
        (size_bytes, "2kB", 2e3),
        (size_bytes, "2KiB", 2048),
        (speed_bytes_s, "250MB/s", 2.5e8),
        (speed_bytes_s, "1 GiB / s", 2**30),
    ],
)
def test_quantities_are_read(read: Callable[[str, str], float], text: str, value: float) -> None:
    assert read(text, "--option") == pytest.approx(value)


@for_each(
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


@for_each(
    ("shown", "text"),
    [
        (shown_duration(0.0), "0 s"),
        (shown_duration(2e-6), "2 us"),
        (shown_duration(0.0204), "20.4 ms"),
        (shown_duration(59.0), "59 s"),
        (shown_duration(90.0), "1.5 min"),
        (shown_duration(7200.0), "2 h"),
        (shown_duration(216_000.0), "2.5 d"),
        (shown_duration(31_557_600.0), "1 y"),
        (shown_duration(float("inf")), "never"),
        (size(12.0), "12 B"),
        (size(4e9), "4 GB"),
        (size(2.5e12), "2.5 TB"),
    ],
)
def test_quantities_are_shown_in_the_unit_that_fits(shown: str, text: str) -> None:
    assert shown == text
