"""Bad input: a clear error, never a crash and never a wrong answer."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from bag_cases import table_of
from case_loops import for_each

from holdfast import ConfigError
from holdfast.abft.embedding_bag import Table, embedding_bag
from holdfast.abft.embedding_bag import layout as layouts

NO_NUMBERS = (torch.nan, torch.inf)
INDICES, OFFSETS = torch.arange(10), torch.tensor([0, 4])
REFUSED: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "index too large": (IndexError, "200 .*200 rows", {"indices": INDICES + 191}),
    "index negative": (IndexError, "-1", {"indices": INDICES - 1}),
    "int32 index": (IndexError, "200", {"indices": (INDICES + 191).int()}),
    "float indices": (TypeError, "int32 or int64", {"indices": INDICES.float()}),
    "list of indices": (TypeError, "indices must be a tensor, got list", {"indices": [1, 2]}),
    "list of offsets": (TypeError, "offsets must be a tensor, got list", {"offsets": [0, 4]}),
    "bool indices": (TypeError, "int32 or int64", {"indices": INDICES.bool()}),
    "2-D with offsets": (ValueError, "with offsets", {"indices": INDICES.view(2, 5)}),
    "1-D without offsets": (ValueError, "with offsets", {"offsets": None}),
    "offsets begin late": (ValueError, "must be 0", {"offsets": torch.tensor([1, 4])}),
    "offsets fall": (ValueError, "must rise", {"offsets": torch.tensor([0, 5, 3])}),
    "offsets beyond": (ValueError, "must rise", {"offsets": torch.tensor([0, 11])}),
    "offsets negative": (ValueError, "must rise", {"offsets": torch.tensor([0, -4])}),
    "float offsets": (TypeError, "offsets", {"offsets": OFFSETS.float()}),
    "2-D offsets": (ValueError, "vector", {"offsets": OFFSETS[None]}),
    "no last offset": (
        ValueError,
        "empty",
        {"offsets": OFFSETS[:0], "include_last_offset": True},
    ),
    "last offset beyond": (
        ValueError,
        "must rise",
        {"offsets": torch.tensor([0, 4, 11]), "include_last_offset": True},
    ),
    "few weights": (ValueError, "one an index", {"per_sample_weights": torch.ones(9)}),
    "double weights": (TypeError, "float32", {"per_sample_weights": torch.ones(10).double()}),
    "weighted mean": (ConfigError, "sum", {"per_sample_weights": torch.ones(10), "mode": "mean"}),
    "max": (ConfigError, "no checksum", {"mode": "max"}),
    "bf16 output": (ConfigError, "float16", {"dtype": torch.bfloat16}),
    "padding": (ConfigError, "outside", {"padding_idx": 200}),
    **{
        f"padding of {index!r}": (TypeError, "integer", {"padding_idx": index})
        for index in (0.5, "0", torch.ones(2))
    },
    "negative padding": (ConfigError, "outside", {"padding_idx": -201}),
}


@for_each("kind", ["uint8", "float32"])
@for_each("case", REFUSED)
def test_it_is_refused(case: str, kind: str) -> None:
    error, message, changes = REFUSED[case]
    arguments = {"indices": INDICES, "offsets": OFFSETS} | changes
    with pytest.raises(error, match=message):
        embedding_bag(table_of(kind, 32), **arguments)


def packed(place: int, value: float) -> torch.Tensor:
    """Rows as torch packs them, one with this value for its scale (0) or its bias (1)."""
    rows = torch.ops.quantized.embedding_bag_byte_prepack(torch.randn(5, 16))
    rows[3, 16 + 4 * place : 20 + 4 * place] = torch.tensor([value]).view(torch.uint8)
    return rows


BYTES = torch.zeros(4, 96, dtype=torch.uint8)
NO_TABLES: list[tuple[Callable[[], Table], str]] = [
    (lambda: Table.zeros(0, 8), "at least 1"),
    (lambda: Table.zeros(4, 0), "between 1"),
    (lambda: Table.zeros(4, 40000), "between 1"),
    (lambda: Table.zeros(4, 7, "uint4"), "even"),
    (lambda: Table.zeros(4, 8, "int3"), "int3"),
    *(
        (lambda p=p, v=v: Table.from_packed(packed(p, v)), "row 3")
        for p in (0, 1)
        for v in NO_NUMBERS
    ),
    (lambda: Table.from_float(torch.tensor([[1.0] * 8, [torch.nan] * 8])), "row 1"),
    *(
        (lambda data=data: Table.of(data, 32, "uint8"), ".")
        for data in (
            BYTES[:, :47],
            BYTES[:, :48].char(),
            BYTES[0, :48],
            BYTES[:, ::2],
            BYTES[:0, :48],
        )
    ),
]


@for_each(("make", "message"), NO_TABLES)
def test_what_is_no_table_is_refused(make: Callable[[], Table], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_table_larger_than_memory_is_refused_before_it_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ConfigError, match="GB of memory are available"):
        Table.zeros(1 << 40, 128)
    monkeypatch.setattr(layouts, "available_bytes", lambda: 47)
    with pytest.raises(ConfigError, match="available"):
        Table.zeros(1, 32)
    monkeypatch.setattr(layouts, "available_bytes", lambda: 48)
    assert len(Table.zeros(1, 32)) == 1


def test_a_source_that_gives_nonsense_is_refused() -> None:
    table = table_of("uint8", 32)
    table.data[7, :20] ^= 0xFF
    for wrong in (torch.zeros(31), torch.full((32,), torch.nan), torch.zeros(32).int()):
        table.source = lambda row, wrong=wrong: wrong  # type: ignore[misc]
        with pytest.raises(ConfigError, match="source"):
            embedding_bag(table, INDICES, OFFSETS)


WITHOUT_MEMORY = torch._efficientzerotensor(10, dtype=torch.int64)
LAZY: dict[str, tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]] = {
    "zeros without memory": ({"indices": WITHOUT_MEMORY}, {"indices": torch.zeros_like(INDICES)}),
    "strided indices": ({"indices": torch.arange(20)[::2]}, {"indices": torch.arange(0, 20, 2)}),
    "negated indices": ({"indices": torch._neg_view(-INDICES)}, {"indices": INDICES}),
    "negated weights": (
        {"per_sample_weights": torch._neg_view(-torch.arange(10.0))},
        {"per_sample_weights": torch.arange(10.0)},
    ),
}


@pytest.mark.usefixtures("_core")
@for_each("case", LAZY)
def test_values_that_torch_has_not_written_yet_are_taken_as_they_read(case: str) -> None:
    table, (lazy, written) = table_of("uint8", 32), LAZY[case]
    arguments = {"indices": INDICES, "offsets": OFFSETS}
    expected = embedding_bag(table, **arguments | written)
    assert torch.equal(embedding_bag(table, **arguments | lazy), expected)


@pytest.mark.usefixtures("_core")
@for_each(
    "arguments",
    [
        {"indices": torch.zeros(1, dtype=torch.int64).expand(1 << 42)},
        {"offsets": torch.zeros(1, dtype=torch.int64).expand(1 << 42)},
        {"per_sample_weights": torch.ones(1).expand(1 << 42)},
        {"indices": torch.zeros(1 << 42, 0, dtype=torch.int64), "offsets": None},
    ],
)
def test_what_would_take_more_memory_than_there_is_is_refused_before_it_is_taken(
    arguments: dict[str, Any],
) -> None:
    with pytest.raises(ValueError, match="GB of memory"):
        embedding_bag(table_of("uint8", 32), **{"indices": INDICES, "offsets": OFFSETS} | arguments)
