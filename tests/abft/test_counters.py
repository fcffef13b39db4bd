"""Counters of operators whose checks run in Python."""

from collections.abc import Iterator
from typing import Any

import pytest

from holdfast.abft import counters

SITE = (0, "mm", 0, 0)


@pytest.fixture(autouse=True)
def _zero() -> Iterator[None]:
    counters.reset()
    yield
    counters.reset()


def test_threads_that_use_a_site_first_at_the_same_time_count_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[dict[str, Any]] = []

    def interrupted(**fields: Any) -> dict[str, Any]:
        made.append(fields)
        if len(made) == 1:  # another thread counts while this one makes the counter
            counters.skipped(SITE)
        return fields

    monkeypatch.setattr(counters, "Counters", interrupted)
    counters.skipped(SITE)
    assert len(made) == 2
    assert [row["unverified"] for row in counters.counters()] == [2]
