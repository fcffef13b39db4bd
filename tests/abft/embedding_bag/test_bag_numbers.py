"""Numbers at the edge: NaN, INF, overflow and denormals are no faults, and are pooled alike."""

from collections.abc import Iterator

import pytest
import torch
from bag_cases import changed, flip
from case_loops import for_each
from struck import kinds

from holdfast import ConfigError, events
from holdfast.abft.embedding_bag import KINDS, Table, embedding_bag

OUTPUTS = [torch.float32, torch.float16]
INDICES = torch.randint(0, 100, (5, 10), generator=torch.Generator().manual_seed(1))


def rows(scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(100, 64, generator=torch.Generator().manual_seed(0))


def strange_weights() -> dict[str, torch.Tensor]:
    some = torch.rand(5, 10, generator=torch.Generator().manual_seed(2))
    nan, infinite, payloads, huge = some.clone(), some.clone(), some.clone(), some * 3e38
    nan[0, 0] = torch.nan
    infinite[1, 1], infinite[2, 2], infinite[2, 3] = torch.inf, torch.inf, -torch.inf
    payloads.view(torch.int32)[0, :3] = torch.tensor([0x7FC00001, -0x3FFFFE, 0x7F800001])
    huge[2, ::2] *= -1
    return {"NaN": nan, "INF": infinite, "NaN payloads": payloads, "overflow": huge}


@pytest.mark.usefixtures("_core")
@for_each("dtype", OUTPUTS)
@for_each("kind", list(KINDS))
@for_each("case", strange_weights())
def test_weights_that_are_no_numbers_are_no_faults(
    case: str, kind: str, dtype: torch.dtype
) -> None:
    weights = strange_weights()[case]
    pooled = embedding_bag(
        Table.from_float(rows(), kind), INDICES, per_sample_weights=weights, dtype=dtype
    )
    assert events.recent() == []
    assert not pooled.isfinite().all()
    assert (
        pooled.isfinite().all(-1) | (weights.abs() > 1e30).any(-1) | weights.isnan().any(-1)
    ).all()


@pytest.mark.usefixtures("_core")
@for_each("value", [torch.nan, torch.inf, 1.0])
@for_each("dtype", OUTPUTS)
def test_beside_them_a_wrong_sum_is_still_seen(value: float, dtype: torch.dtype) -> None:
    table, weights = Table.from_float(rows(), "uint8"), strange_weights()["NaN"]
    arguments = {"per_sample_weights": weights, "dtype": dtype}
    clean = embedding_bag(table, INDICES, **arguments)  # type: ignore[arg-type]
    with changed(3, 7, value):
        repaired = embedding_bag(table, INDICES, **arguments)  # type: ignore[arg-type]
    assert torch.equal(repaired[1:], clean[1:])
    assert kinds() == ["embedding_bag_fault"]


@pytest.fixture
def _flushed() -> Iterator[None]:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor flushes no denormals")
    torch.set_flush_denormal(False)
    yield
    torch.set_flush_denormal(False)


@pytest.mark.usefixtures("_core", "_flushed")
@for_each("dtype", OUTPUTS)
@for_each("kind", list(KINDS))
@for_each("scale", [1e-4, 1e-6, 1e-38, 1e-42])
def test_flushed_denormals_change_no_bag_by_more_than_they_are(
    scale: float, kind: str, dtype: torch.dtype
) -> None:
    table = Table.from_float(rows(scale), kind)
    plain = embedding_bag(table, INDICES, dtype=dtype)
    torch.set_flush_denormal(True)
    flushed, rotten = embedding_bag(table, INDICES, dtype=dtype), table.rotten()
    torch.set_flush_denormal(False)
    assert events.recent() == []
    assert rotten == []
    # Three flushed values a row at the most, each below the least normal number.
    assert ((flushed.double() - plain.double()).abs() <= 3 * 10 * 2.0**-126).all()


@pytest.mark.usefixtures("_core", "_flushed")
@for_each("kind", ["float32", "bfloat16"])
def test_checksums_of_denormals_do_not_depend_on_their_being_flushed(kind: str) -> None:
    table = Table.from_float(rows(1e-39), kind)
    stored = table.data.clone()
    assert table.values(torch.arange(100)).abs().max() > 0
    torch.set_flush_denormal(True)
    table.seal()
    torch.set_flush_denormal(False)
    assert torch.equal(table.data, stored)


@for_each(("kind", "scale"), [("uint4", 1e6), ("float16", 1e6), ("uint8", 1e38)])
def test_rows_beyond_what_a_kind_can_hold_are_refused(kind: str, scale: float) -> None:
    weight = rows()
    weight[7, :2] = torch.tensor([3.0, -3.0]) * scale
    assert weight.isfinite().all()
    with pytest.raises(ConfigError, match=r"row 7 .*overflows as " + kind):
        Table.from_float(weight, kind)


def test_a_source_beyond_what_the_kind_can_hold_is_refused() -> None:
    table = Table.from_float(rows(), "float16")
    table.source = lambda row: torch.full((64,), 1e6)
    flip(table, int(INDICES[0, 0]), 14)
    flip(table, int(INDICES[0, 0]), 30)
    with pytest.raises(ConfigError, match="not finite as float16"):
        embedding_bag(table, INDICES)


@pytest.mark.usefixtures("_core")
@for_each("kind", list(KINDS))
def test_a_table_of_inference_mode_is_repaired_outside_of_it(kind: str) -> None:
    with torch.inference_mode():
        table = Table.from_float(rows(), kind)
        of_that_mode = Table.of(table.data.clone(), 64, kind)
    table.data[0] = table.data[0]  # what the mode made could not be written
    clean, row = embedding_bag(table, INDICES), int(INDICES[0, 0])
    for each in (table, of_that_mode):
        each.source = lambda row: rows()[row]
        with torch.inference_mode():
            each.data[row, :3] ^= 0x41
        assert torch.equal(embedding_bag(each, INDICES), clean)
        with torch.inference_mode():
            flip(each, row, 9)
        each.correct(row)
        each.seal(row, 1)
        assert each.rotten() == []
