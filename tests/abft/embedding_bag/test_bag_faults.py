"""The detector's triple, and repairs: what is seen, named, and put right bit for bit."""

import pytest
import torch
from bag_cases import QUANTISED, batch_of, changed, flip, pooled, table_of
from case_loops import for_each
from struck import kinds

from holdfast import UncorrectableFault, events, native
from holdfast.abft.embedding_bag import KINDS, Table, embedding_bag, scrub
from holdfast.abft.embedding_bag.batch import Batch
from holdfast.abft.embedding_bag.cpu import BEST, OURS, PORTABLE, run_kernel
from holdfast.abft.policy import collecting

needs_core = pytest.mark.skipif(native.core is None, reason="there is no native core")


@for_each("dtype", [torch.float32, torch.float16])
@for_each("mode", ["sum", "mean"])
@for_each("kind", list(KINDS))
def test_a_wrong_sum_is_seen_and_pooled_again(kind: str, mode: str, dtype: torch.dtype) -> None:
    table, batch = table_of(kind, 64), batch_of(mode=mode, dtype=dtype)
    clean = pooled(table, batch)
    assert kinds() == []
    with changed(2, 10, 0.1):
        repaired = pooled(table, batch)
    assert torch.equal(repaired, clean)
    (event,) = events.recent()
    assert event.kind == "embedding_bag_fault"
    assert event.op == "embedding_bag/embedding_bag/forward"
    assert event.detail["index"] == [2, 10]
    assert abs(event.detail["corrupted"] - event.detail["repaired"] - 0.1) < 0.02
    for change in (torch.nan, torch.inf, -torch.inf, 3e38):
        events.clear()
        with changed(3, 0, change):
            assert torch.equal(pooled(table, batch), clean)
        assert kinds() == ["embedding_bag_fault"]


@needs_core
def test_without_the_check_the_same_faults_reach_the_output() -> None:
    table, batch = table_of("uint8", 64), batch_of()
    clean = pooled(table, batch)
    row = int(batch.indices[50])
    flip(table, row, 8 * 5 + 6)
    unchecked, suspects = run_kernel(table, batch, BEST, check=False)
    assert suspects == []
    assert not torch.equal(unchecked, clean)
    checked, suspects = run_kernel(table, batch, BEST)
    assert 2 in suspects
    assert torch.equal(checked, unchecked)


@for_each("bit", range(8))
@for_each("kind", QUANTISED)
def test_a_rotten_code_is_named_and_corrected(kind: str, bit: int) -> None:
    table, batch = table_of(kind, 64), batch_of()
    clean, stored = pooled(table, batch), table.data.clone()
    row = int(batch.indices[50])
    flip(table, row, 8 * 5 + bit)
    assert not torch.equal(table.data, stored)
    assert torch.equal(pooled(table, batch), clean)
    assert torch.equal(table.data, stored)
    first, second = events.recent()
    assert (first.kind, second.kind) == ("row_fault", "embedding_bag_fault")
    element = 5 if kind == "uint8" else 10 + bit // 4
    expected = {"row": row, "bit": bit, "element": element, "method": "bit", "part": "element"}
    assert expected.items() <= first.detail.items()


@for_each("kind", list(KINDS))
def test_every_bit_that_the_guard_covers_is_watched_online(kind: str) -> None:
    table, batch = table_of(kind, 32), batch_of()
    clean, stored = pooled(table, batch), table.data.clone()
    row = int(batch.indices[50])
    first = 8 * table.layout.elements
    exponent = [] if kind in QUANTISED else [first - 2]  # of the last element
    for bit in [*exponent, *range(first, 8 * (table.layout.used - 4))]:
        events.clear()
        flip(table, row, bit)
        assert torch.equal(pooled(table, batch), clean), bit
        assert torch.equal(table.data, stored), bit
        assert kinds()[0] == "row_fault"


def test_a_rotten_peak_does_not_widen_the_bound_for_a_rotten_element() -> None:
    table, batch = table_of("float32", 32), batch_of()
    row = int(batch.indices[50])
    flip(table, row, 8 * (table.layout.payload + 8) + 29)  # an exponent bit of the peak
    flip(table, row, 22)  # the first element's top mantissa bit
    with pytest.raises(UncorrectableFault, match=f"row {row} "):
        pooled(table, batch)


def test_bags_that_share_a_rotten_row_are_all_pooled_again() -> None:
    table = table_of("uint8", 64)
    batch = Batch(torch.tensor([9, 1, 9, 2, 3, 4]), torch.tensor([0, 2, 4]))
    clean = pooled(table, batch)
    flip(table, 9, 7)
    assert torch.equal(pooled(table, batch), clean)
    assert events.recent()[-1].detail["bags"] == 2


@for_each("stored", [False, True])
def test_a_row_rotten_in_many_bits_comes_from_its_source(stored: bool) -> None:
    weight = torch.randn(50, 32, generator=torch.Generator().manual_seed(1))
    table, truth = (Table.from_float(weight, "uint8") for _ in range(2))
    indices = torch.arange(20).view(2, 10)
    clean = embedding_bag(table, indices)
    table.source = lambda row: truth.data[row, : truth.layout.payload] if stored else weight[row]
    table.data[7, :20] ^= 0xFF
    assert torch.equal(embedding_bag(table, indices), clean)
    assert torch.equal(table.data, truth.data)
    assert events.recent()[0].detail["method"] == "source"


def test_a_row_in_anothers_place_is_seen_by_its_crc() -> None:
    table = table_of("uint8", 32)
    table.data[11] = table.data[12]
    assert table.rotten() == [11]


@for_each("kind", list(KINDS))
@for_each("bits", [2, 3])
def test_damage_in_several_bytes_is_never_taken_for_damage_in_one(kind: str, bits: int) -> None:
    table = table_of(kind, 32)
    stored = table.data.clone()
    generator = torch.Generator().manual_seed(bits)
    for trial in range(200):
        row = trial % len(table)
        for byte in torch.randperm(table.layout.used, generator=generator)[:bits].tolist():
            table.data[row, byte] ^= int(torch.randint(1, 256, (1,), generator=generator))
        assert table.rotten(row, 1) == [row]
        assert table.correct(row) == []
        table.data[row] = stored[row]


@for_each("kind", QUANTISED)
def test_two_bits_of_one_code_are_healed_through_sum_and_crc(kind: str) -> None:
    table, batch = table_of(kind, 64), batch_of()
    clean, stored = pooled(table, batch), table.data.clone()
    row = int(batch.indices[50])
    flip(table, row, 8 * 5 + 3)
    flip(table, row, 8 * 5 + 2)
    assert not torch.equal(table.data, stored)
    assert torch.equal(pooled(table, batch), clean)
    assert torch.equal(table.data, stored)
    assert kinds() == ["row_fault", "embedding_bag_fault"]
    found = {"row": row, "method": "byte", "bits": [2, 3], "part": "element"}
    assert found.items() <= events.recent()[0].detail.items()


def coherent_cases() -> dict[str, tuple[Table, Batch]]:
    """Data whose rounding errors do not cancel, and whose partial sums outgrow their end."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(300, 64, generator=generator)
    indices = torch.randint(0, 300, (4000,), generator=generator)
    offsets = torch.tensor([0, 1, 3, 1000, 2000])
    alternating = torch.ones(4000)
    alternating[1::2] = -1
    plain = Batch(indices, offsets)
    span = torch.logspace(-12, 12, 300)[:, None]
    repeated = Batch(indices // 2 * 2, offsets)
    cancelling = Batch(indices.sort().values, offsets, 1e4 * alternating)
    half_and_half = Batch(indices, offsets, torch.where(torch.arange(4000) % 1000 < 500, 1.0, -1.0))
    return {
        "constant rows": (Table.from_float(torch.full((300, 64), 0.1)), plain),
        "one value a row": (Table.from_float(weight[:, :1].expand(300, 64)), plain),
        "huge range": (Table.from_float(weight * span), plain),
        "positive": (Table.from_float(weight.abs() + 5), plain),
        "repeated": (Table.from_float(weight), repeated),
        "cancelling weights": (Table.from_float(weight + 3), cancelling),
        "there and back": (Table.from_float(weight.abs() + 1), half_and_half),
        "one column": (Table.from_float(weight[:, :1]), plain),
        "tiny": (Table.from_float(weight * 1e-37, "float32"), plain),
        "fp32, constant": (Table.from_float(torch.full((300, 64), 0.1), "float32"), plain),
    }


@needs_core
@for_each("case", coherent_cases())
def test_coherent_data_raises_no_false_alarm_and_a_fault_in_it_is_seen(case: str) -> None:
    table, batch = coherent_cases()[case]
    for kernel in (BEST, OURS, PORTABLE):
        assert run_kernel(table, batch, kernel)[1] == []
    assert kinds() == []
    if case == "constant rows":
        clean = pooled(table, batch)
        with changed(3, 5, 0.1):
            assert torch.equal(pooled(table, batch), clean)
        assert kinds() == ["embedding_bag_fault"]


INDICES = torch.arange(20).view(4, 5)


@pytest.mark.usefixtures("detecting")
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


@pytest.mark.usefixtures("detecting")
def test_detecting_changes_no_output() -> None:
    table, batch = table_of("uint8", 32), batch_of()
    with changed(2, 10, 0.1), pytest.raises(UncorrectableFault, match="bag 2, column 10"):
        pooled(table, batch)
    (event,) = events.recent()
    assert (event.kind, event.rung) == ("embedding_bag_fault", "")


@pytest.mark.usefixtures("detecting")
def test_who_defers_faults_gets_them_with_the_wrong_output() -> None:
    table, batch = table_of("uint8", 32), batch_of()
    clean = pooled(table, batch)
    with changed(2, 10, 0.1), collecting() as found:
        wrong = pooled(table, batch)
    assert [event.kind for event in found.unrepaired] == ["embedding_bag_fault"]
    assert (wrong != clean).nonzero().tolist() == [[2, 10]]


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
