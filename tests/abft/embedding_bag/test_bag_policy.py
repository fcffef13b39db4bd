"""What may be changed, and who decides: correction="detect", and faults left to a Guard."""

from collections.abc import Iterator

import pytest
import torch
from bag_cases import batch_of, flip, struck, table_of

from holdfast import UncorrectableFault, events
from holdfast.abft.embedding_bag import embedding_bag, scrub
from holdfast.abft.policy import collecting, set_correction

INDICES = torch.arange(20).view(4, 5)


@pytest.fixture
def _detect() -> Iterator[None]:
    set_correction("detect")
    yield
    set_correction("recompute")


@pytest.mark.usefixtures("_detect")
def test_detecting_changes_no_row() -> None:
    table = table_of("uint8", 32)
    embedding_bag(table, INDICES)
    flip(table, 7, 7)
    rotten = table.data.clone()
    with pytest.raises(UncorrectableFault, match="row 7 of embedding_bag"):
        embedding_bag(table, INDICES)
    assert torch.equal(table.data, rotten)
    (event,) = events.recent()
    assert (event.kind, event.rung, event.detail["row"]) == ("row_fault", "", 7)


@pytest.mark.usefixtures("_detect")
def test_detecting_changes_no_output() -> None:
    table, batch = table_of("uint8", 32), batch_of()
    with struck(2, 10, 0.1), pytest.raises(UncorrectableFault, match="bag 2, column 10"):
        embedding_bag(table, batch.indices, batch.offsets)
    (event,) = events.recent()
    assert (event.kind, event.rung) == ("embedding_bag_fault", "")


@pytest.mark.usefixtures("_detect")
def test_who_defers_faults_gets_them_with_the_wrong_output() -> None:
    table, batch = table_of("uint8", 32), batch_of()
    clean = embedding_bag(table, batch.indices, batch.offsets)
    with struck(2, 10, 0.1), collecting() as found:
        pooled = embedding_bag(table, batch.indices, batch.offsets)
    assert [event.kind for event in found.unrepaired] == ["embedding_bag_fault"]
    assert (pooled != clean).nonzero().tolist() == [[2, 10]]


def test_a_row_beyond_repair_is_left_to_who_defers() -> None:
    table = table_of("uint8", 32)
    table.data[7, :20] ^= 0xFF
    with collecting() as found:
        embedding_bag(table, INDICES)
    assert [event.detail["row"] for event in found.unrepaired] == [7]


def test_a_scrub_leaves_nothing_to_a_step_that_happens_to_run() -> None:
    table = table_of("uint8", 32)
    table.data[7, :20] ^= 0xFF
    with collecting() as found:
        assert scrub(table).unrepaired == [7]
    assert found.unrepaired == []
