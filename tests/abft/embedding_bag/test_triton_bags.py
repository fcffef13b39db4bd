"""Bags that one kernel on the device pools and verifies: values, faults, silence, no waiting."""

import pytest
import torch
import triton.language as tl
from bag_cases import QUANTISED, changed, flip, pooled, table_of
from case_loops import for_each
from no_host_sync import NoHostSync
from struck import kinds
from torch import nn
from triton_device import DEVICE, MARKS

from holdfast import events, native
from holdfast.abft import policy, registry
from holdfast.abft.embedding_bag import KINDS, Table, cuda, embedding_bag, kernels
from holdfast.abft.embedding_bag.batch import Batch
from holdfast.abft.embedding_bag.reference import exact_bags
from holdfast.abft.registry import Implementation
from holdfast.abft.triton.launch import FAILED
from holdfast.nn import Int8EmbeddingBag, pool_bags

pytestmark = [*MARKS, pytest.mark.usefixtures("_on_device")]


@pytest.fixture
def _on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a device the CPU stands in for one."""
    if DEVICE == "cpu":
        chosen = Implementation("triton", lambda: cuda.pool_triton)
        monkeypatch.setattr(registry._operators["embedding_bag"], "implementations", (chosen,))


def device_table(kind: str, dim: int, **options: int) -> Table:
    table = table_of(kind, dim, **options)
    table.data = table.data.to(DEVICE)
    return table


def small_batch(*, weighted: bool = False, **options: object) -> Batch:
    """Bags of 0, 3, 9, 7, 1 and 4 rows, the interpreter being slow; row 60 is in two of them."""
    generator = torch.Generator().manual_seed(1)
    indices = torch.randint(0, 200, (24,), generator=generator)
    indices[4], indices[15] = 60, 60
    weights = torch.randn(24, generator=generator) if weighted else None
    return Batch(indices, torch.tensor([0, 0, 3, 12, 19, 20]), weights, **options)  # type: ignore[arg-type]


def device_batch(**options: object) -> Batch:
    return small_batch(**options).on(DEVICE)  # type: ignore[arg-type]


def slot_of() -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int32, device=DEVICE)


def deferred(table: Table, batch: Batch) -> tuple[torch.Tensor, int]:
    """The output, and the content of a slot that was 0."""
    slot = slot_of()
    cuda._rows_of(table)  # puts the constants on the device
    with NoHostSync():
        output, suspects = cuda.pool_triton(table, batch, slot=slot)
    assert suspects == []
    return output, int(slot)


CASES: list[dict[str, object]] = [
    {},
    {"weighted": True, "dtype": torch.float16},
    {"mode": "mean"},
    {"padding": 60, "dtype": torch.float16},
]


@for_each("case", CASES)
@for_each(("kind", "dim"), [(kind, 30 if kind == "uint4" else 33) for kind in KINDS])
def test_errors_are_no_more_than_twice_plain_torchs(
    kind: str, dim: int, case: dict[str, object]
) -> None:
    table, batch = table_of(kind, dim), small_batch(**case)
    exact = exact_bags(table, batch)
    rows = table.values(torch.arange(len(table))).float()
    plain = nn.functional.embedding_bag(
        batch.indices, rows, batch.offsets, mode=batch.mode, per_sample_weights=batch.weights,
        padding_idx=batch.padding if batch.padding >= 0 else None,
    )  # fmt: skip
    table.data = table.data.to(DEVICE)
    output, slot = deferred(table, batch.on(DEVICE))
    assert slot == 0
    error = (output.cpu().double() - exact).abs()
    # 2⁻²⁴ of the largest partial sum that a bag of 9 rows may have, and the rounding to fp16.
    slack = 2.0**-24 * 9 * rows.abs().max() * (1 if batch.weights is None else 3)
    half = exact.abs() * 2.0**-10 + 2.0**-24 if batch.dtype is torch.float16 else 0
    assert (error <= 2 * (plain - exact).abs().max() + slack + half).all()


@for_each("index_type", [torch.int32, torch.int64])
def test_every_form_of_a_batch_is_pooled_alike(index_type: torch.dtype) -> None:
    table, batch = device_table("uint8", 32), device_batch()
    assert batch.offsets is not None
    ends = torch.cat((batch.offsets, torch.tensor([24], device=DEVICE)))
    expected, _ = deferred(table, batch)
    same = batch._replace(offsets=ends.to(index_type), include_last=True)
    given, slot = deferred(table, same._replace(indices=batch.indices.to(index_type)))
    assert slot == 0
    assert torch.equal(given, expected)
    square = Batch(batch.indices[:20].view(4, 5))
    apart = Batch(batch.indices[:20], torch.arange(0, 20, 5, device=DEVICE))
    assert torch.equal(deferred(table, square)[0], deferred(table, apart)[0])
    empty = Batch(batch.indices[:0], batch.offsets[:2] * 0)
    assert torch.equal(deferred(table, empty)[0], torch.zeros(2, 32, device=DEVICE))
    assert deferred(table, Batch(batch.indices[:0].view(0, 5)))[0].shape == (0, 32)


@for_each(
    ("kind", "mode", "dtype"),
    [
        ("uint8", "sum", torch.float16),
        ("uint4", "mean", torch.float32),
        ("float32", "mean", torch.float16),
        ("bfloat16", "sum", torch.float32),
    ],
)
def test_a_wrong_sum_is_found_and_pooled_again(kind: str, mode: str, dtype: torch.dtype) -> None:
    table, batch = device_table(kind, 64), device_batch(mode=mode, dtype=dtype)
    clean = pooled(table, batch)
    assert kinds() == []
    for change in (0.1, torch.nan) if kind == "uint8" else (0.1,):
        events.clear()
        with changed(2, 10, change):
            assert torch.equal(pooled(table, batch), clean)
            slot = slot_of()
            embedding_bag(table, batch.indices, batch.offsets, mode=mode, dtype=dtype, slot=slot)
        assert int(slot) == FAILED
        assert kinds() == ["embedding_bag_fault"]


@for_each("kind", list(KINDS))
def test_every_bit_that_the_guard_covers_and_the_upper_ones_of_elements_are_found(
    kind: str,
) -> None:
    table = device_table(kind, 32)
    clean = table.data.clone()
    first, last = 8 * table.layout.elements, 8 * (table.layout.used - 4)
    bits = [first - 2, *range(first, last)]  # the last element's: of a float of its exponent
    for row, bit in enumerate(bits):
        flip(table, row, bit)
    # A bag for each damaged row, which has two others as well.
    rows = torch.arange(len(bits))
    batch = Batch(torch.stack((rows, 150 + rows % 40, 190 + rows % 10), 1)).on(DEVICE)
    assert cuda.pool_triton(table, batch)[1] == rows.tolist()
    output, none = cuda.pool_triton(table, batch, check=False)
    table.data = clean
    expected, slot = deferred(table, batch)
    assert (none, slot) == ([], 0)
    assert not torch.equal(output, expected)


@for_each("part", ["element", "scale", "bias", "checksum"])
@for_each("kind", QUANTISED)
def test_a_rotten_row_is_named_and_repaired(kind: str, part: str) -> None:
    table, batch = device_table(kind, 64), device_batch()
    clean, stored = pooled(table, batch), table.data.clone()
    layout, row = table.layout, 60
    first = {"element": 5, "scale": layout.elements, "checksum": layout.payload}
    first["bias"] = layout.elements + layout.parameters // 2
    flip(table, row, 8 * first[part] + 7)
    assert not torch.equal(table.data, stored)
    assert torch.equal(pooled(table, batch), clean)
    assert torch.equal(table.data, stored)
    assert kinds()[0] == "row_fault"
    assert events.recent()[0].detail["row"] == row
    assert events.recent()[0].detail["part"] == part


@pytest.mark.interpreter
def test_bags_of_rows_that_are_all_alike_are_pooled_again_and_found_right() -> None:
    # One row many times, of equal elements, of which the roundings all have one sign.
    values = torch.rand(40, 1, generator=torch.Generator().manual_seed(0))
    table = Table.from_float(values.expand(40, 64))
    table.data = table.data.to(DEVICE)
    batch = Batch(torch.arange(20)[:, None].expand(20, 300)).on(DEVICE)
    expected, slot = deferred(table, batch)
    assert slot == FAILED
    before = policy.process.false_alarms
    assert torch.equal(pooled(table, batch), expected)
    assert kinds() == []
    assert policy.process.false_alarms > before


def test_values_that_name_no_row_or_bag_are_not_read() -> None:
    table, batch = device_table("uint8", 32), device_batch()
    assert batch.offsets is not None
    for index in (-1, 200, 1 << 40):
        wrong = batch._replace(indices=batch.indices.clone())
        wrong.indices[5] = index
        assert deferred(table, wrong)[1] == FAILED
        with pytest.raises(IndexError, match=f"index {index} at position 5"):
            pooled(table, wrong)
    for offsets in ([1, 5], [0, 25], [0, 5, 3]):
        given = torch.tensor(offsets, device=DEVICE)
        wrong = batch._replace(offsets=given)
        assert deferred(table, wrong)[1] == FAILED
        with pytest.raises(ValueError, match="offsets"):
            pooled(table, wrong)


def test_a_slot_that_cannot_serve_is_refused() -> None:
    table, batch = device_table("uint8", 32), device_batch()
    for slot in (slot_of().repeat(2), slot_of().float()):
        with pytest.raises(ValueError, match=r"give int32 \[1\]"):
            embedding_bag(table, batch.indices, batch.offsets, slot=slot)


@pytest.mark.interpreter
def test_a_hundred_thousand_clean_bags_are_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "INTERPRETED_BAGS", 8192)
    if DEVICE == "cpu":  # a bag has four rows
        monkeypatch.setattr(kernels, "SAMPLES", tl.constexpr(4))
    generator, bags = torch.Generator().manual_seed(3), 0
    for kind, weighted in (("uint8", False), ("uint8", True), ("uint4", False), ("uint4", True)):
        table = device_table(kind, 16)
        indices = torch.randint(0, 200, (25_000, 4), generator=generator)
        weights = torch.randn(25_000, 4, generator=generator) if weighted else None
        output, slot = deferred(table, Batch(indices, weights=weights).on(DEVICE))
        assert slot == 0
        bags += len(output)
    assert bags == 100_000


def test_modules_serve_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "core", None)  # which would pool many bags at once
    torch.manual_seed(0)
    floats = nn.EmbeddingBag(50, 32, mode="sum")
    bag = Int8EmbeddingBag.from_float(floats).to(DEVICE)
    indices, slot = torch.arange(20, device=DEVICE).view(4, 5), slot_of()
    expected = bag(indices)
    with torch.no_grad():
        assert (expected.cpu() - floats(indices.cpu())).abs().max() < 0.1
    with NoHostSync():
        assert bag(indices, slot=slot).shape == (4, 32)
    assert int(slot) == 0
    bag.rows[7, 3] ^= 64
    assert bag.scrub(repair=False).rotten == [7]
    assert torch.equal(pool_bags([bag], [(indices,)])[0], expected)
    assert bag.scrub().healthy
    bag.rows[7, :9] ^= 255
    bag.register_source(lambda row: floats.weight[row])
    assert bag.scrub().rotten == [7]
    assert torch.equal(bag(indices), expected)
