"""Scrubbing: every rotten row is named, at the rate asked for, and the thread ends when told."""

import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from bag_cases import flip, table_of
from case_loops import for_each
from struck import kinds

from holdfast import ConfigError, events
from holdfast.abft.embedding_bag import Scrubber, embedding_bag, scrub


def test_rotten_rows_are_named_and_repaired() -> None:
    table = table_of("uint8", 32)
    assert scrub(table).healthy
    assert events.recent() == []
    stored = table.data.clone()
    for row, bit in ((0, 3), (77, 8 * 33), (199, 8 * 47 + 7)):
        flip(table, row, bit)
    report = scrub(table)
    assert (report.rows, report.rotten, report.healthy) == (200, [0, 77, 199], True)
    assert torch.equal(table.data, stored)
    assert [event.detail["row"] for event in events.recent()] == [0, 77, 199]


def test_the_rate_is_a_bound() -> None:
    seen: list[int] = []
    report = scrub(table_of("uint8", 32), 1000, progress=seen.append)
    assert 0.19 <= report.duration_s < 2
    assert seen == [50, 100, 150, 200]


@for_each("rate", [0, -1, float("nan"), float("inf")])
def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    with pytest.raises(ConfigError, match="rows_per_second"):
        scrub(table_of("uint8", 32), rate)
    with pytest.raises(ConfigError, match="rows_per_second"):
        Scrubber(table_of("uint8", 32), rate)


def test_the_background_thread_stops_when_told() -> None:
    with Scrubber(table_of("uint8", 32), 100) as scrubber:
        time.sleep(0.15)
        assert scrubber.running
        assert 0 < scrubber.progress < 1
        started_s = time.monotonic()
    assert time.monotonic() - started_s < 1
    assert not scrubber.running
    assert 0 < scrubber.reports[-1].rows < 200


def test_a_fault_between_passes_is_found() -> None:
    table = table_of("uint8", 32)
    flip(table, 9, 3)
    reports = Scrubber(table, 1e6, passes=3).start().join(10)
    assert [report.rotten for report in reports] == [[9], [], []]


def test_a_small_table_is_scrubbed_with_pauses() -> None:
    with Scrubber(table_of("uint8", 32, rows=8), 1e6) as scrubber:
        time.sleep(0.5)
    assert 1 <= len(scrubber.reports) <= 6


def test_reports_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[Scrubber.__module__], "_LEAST_PASS_S", 0.0)
    passes = 120
    scrubber = Scrubber(table_of("uint8", 32, rows=8), 1e6, passes=passes).start()
    assert len(scrubber.join(10)) == 100


@for_each("repair", [True, False])
def test_a_row_that_stays_rotten_is_one_event(repair: bool) -> None:
    table = table_of("uint8", 32)
    table.data[5, :9] ^= 0xFF
    before = table.data.clone()
    reports = Scrubber(table, 1e6, passes=4, repair=repair).start().join(10)
    assert torch.equal(table.data, before)
    assert [report.unrepaired for report in reports] == [[5]] * 4
    assert not any(report.healthy for report in reports)
    assert kinds() == ["row_fault"]


def test_a_row_that_rots_anew_is_an_event_anew_and_its_source_may_come_later() -> None:
    table, known = table_of("uint8", 32), dict[int, bytes]()
    stored = table.data[5].clone()
    for source in (None, lambda row: stored[: table.layout.payload]):
        table.data[5, :9] ^= 0xFF
        assert scrub(table, known=known).unrepaired == [5]
        if source is None:
            table.data[5] = stored
        else:
            table.source = source
        assert scrub(table, known=known).healthy
    assert kinds().count("row_fault") >= 2
    assert torch.equal(table.data[5], stored)


def test_a_source_that_raises_leaves_its_row_and_the_other_rows_are_repaired() -> None:
    table = table_of("uint8", 32)
    stored, payload = table.data.clone(), table.layout.payload

    def source(row: int) -> torch.Tensor:
        if row == 5:
            raise OSError("the store is away")
        return stored[row, :payload]

    table.source = source
    table.data[5, :9] ^= 0xFF
    table.data[8, :9] ^= 0xFF
    reports = Scrubber(table, 1e6, passes=3).start().join(10)
    assert [report.unrepaired for report in reports] == [[5]] * 3
    assert torch.equal(table.data[8], stored[8])
    assert kinds() == ["scrub_failed", "row_fault"]  # of row 5 and of row 8, in the first pass
    assert events.recent()[0].detail == {"reason": "OSError: the store is away", "row": 5}
    table.source = lambda row: stored[row, :payload]
    assert scrub(table).healthy
    assert torch.equal(table.data, stored)


def test_a_pass_that_fails_is_an_event_and_the_next_one_is_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = table_of("uint8", 32)
    stored = table.data.clone()
    flip(table, 3, 0)

    def failing(first: int = 0, count: int | None = None) -> list[int]:
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(table, "rotten", failing)
        scrubber = Scrubber(table, 1e6).start()
        assert _soon(lambda: scrubber.error is not None)
        time.sleep(0.25)
        assert (scrubber.running, scrubber.reports) == (True, [])
        assert kinds() == ["scrub_failed"]  # one for all passes
        assert events.recent()[0].detail == {"reason": "MemoryError: no room", "pass": 0}
    assert _soon(lambda: bool(scrubber.reports))
    assert scrubber.stop()[0].rotten == [3]
    assert kinds() == ["scrub_failed", "row_fault"]
    assert torch.equal(table.data, stored)
    monkeypatch.setattr(table, "rotten", failing)
    with pytest.raises(MemoryError, match="no room"):
        Scrubber(table, 1e6, passes=2).start().join(10)


def _soon(condition: Callable[[], bool]) -> bool:
    deadline_s = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return condition()


def test_serving_goes_on_while_rows_rot_and_heal() -> None:
    table = table_of("uint8", 64)
    indices = torch.arange(200).view(4, 50)
    clean, stored = embedding_bag(table, indices), table.data.clone()
    done = threading.Event()

    def serve(_: int) -> int:
        served = 0
        while not done.is_set():
            assert torch.equal(embedding_bag(table, indices), clean)
            served += 1
        return served

    with ThreadPoolExecutor(2) as pool:
        served = pool.map(serve, range(2))
        with Scrubber(table, 1e5):
            for trial in range(40):
                flip(table, trial * 5, 8 * (trial % 64) + trial % 8)
                time.sleep(0.005)
        done.set()
        assert sum(served) > 3
    scrub(table)
    assert torch.equal(table.data, stored)
