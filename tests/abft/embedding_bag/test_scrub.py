"""Scrubbing: every rotten row is named, at the rate asked for, and the thread ends when told."""

import sys
import threading
import time

import pytest
import torch
from bag_cases import flip, table_of
from case_loops import for_each
from struck import kinds

from holdfast import ConfigError, events
from holdfast.abft.embedding_bag import Scrubber, embedding_bag, scrub


def test_a_clean_table_has_nothing_to_tell() -> None:
    report = scrub(table_of("uint8", 32))
    assert (report.rows, report.rotten, report.healthy) == (200, [], True)
    assert events.recent() == []


def test_rotten_rows_are_named_and_repaired() -> None:
    table = table_of("uint8", 32)
    stored = table.data.clone()
    for row, bit in ((0, 3), (77, 8 * 33), (199, 8 * 47 + 7)):
        flip(table, row, bit)
    report = scrub(table)
    assert report.rotten == [0, 77, 199]
    assert report.healthy
    assert torch.equal(table.data, stored)
    assert [event.detail["row"] for event in events.recent()] == [0, 77, 199]


def test_what_cannot_be_repaired_is_said() -> None:
    table = table_of("uint8", 32)
    table.data[5, :9] ^= 0xFF
    report = scrub(table)
    assert (report.rotten, report.unrepaired, report.healthy) == ([5], [5], False)


def test_without_repair_rows_are_only_named() -> None:
    table = table_of("uint8", 32)
    flip(table, 5, 3)
    before = table.data.clone()
    assert scrub(table, repair=False).unrepaired == [5]
    assert torch.equal(table.data, before)
    assert [event.detail["row"] for event in events.recent()] == [5]


def test_the_rate_is_a_bound() -> None:
    table, seen = table_of("uint8", 32), []
    report = scrub(table, 1000, progress=seen.append)
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


def test_passes_are_counted_and_faults_between_them_found() -> None:
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
    reports = Scrubber(table, 1e6, passes=4, repair=repair).start().join(10)
    assert [report.unrepaired for report in reports] == [[5]] * 4
    assert kinds() == ["row_fault"]


def test_a_row_that_rots_anew_is_an_event_anew() -> None:
    table = table_of("uint8", 32)
    stored, known = table.data[5].clone(), dict[int, bytes]()
    for _ in range(2):
        table.data[5, :9] ^= 0xFF
        assert scrub(table, known=known).unrepaired == [5]
        table.data[5] = stored
        assert scrub(table, known=known).healthy
    assert len(events.recent()) == 2


def test_a_source_registered_later_repairs_what_is_known() -> None:
    table, known = table_of("uint8", 32), dict[int, bytes]()
    stored = table.data[5, : table.layout.payload].clone()
    table.data[5, :9] ^= 0xFF
    assert scrub(table, known=known).unrepaired == [5]
    table.source = lambda row: stored
    assert scrub(table, known=known).healthy
    assert scrub(table).rotten == []


def test_serving_goes_on_while_rows_rot_and_heal() -> None:
    table = table_of("uint8", 64)
    indices = torch.arange(200).view(4, 50)
    clean, stored = embedding_bag(table, indices), table.data.clone()
    wrong: list[int] = []
    done = threading.Event()

    def serve() -> None:
        while not done.is_set():
            wrong.append(int(not torch.equal(embedding_bag(table, indices), clean)))

    threads = [threading.Thread(target=serve) for _ in range(2)]
    for thread in threads:
        thread.start()
    with Scrubber(table, 1e5):
        for trial in range(40):
            flip(table, trial * 5, 8 * (trial % 64) + trial % 8)
            time.sleep(0.005)
    done.set()
    for thread in threads:
        thread.join(30)
    assert len(wrong) > 3
    assert sum(wrong) == 0
    scrub(table)
    assert torch.equal(table.data, stored)
