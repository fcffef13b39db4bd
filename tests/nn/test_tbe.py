"""Tables of FBGEMM's TBE and of torchrec become bags that are checked, with the same values."""

from enum import Enum, IntEnum
from typing import Any

import pytest
import torch
from case_loops import for_each
from struck import kinds
from torch import nn

from holdfast import ConfigError
from holdfast.nn import FrozenEmbeddingBag, from_tbe
from holdfast.nn.tbe import bag_of_rows

ROWS, DIM = 40, 24
INDICES = torch.arange(20).view(4, 5)
BITS = {"int8": 8, "int4": 4}


class PoolingMode(IntEnum):
    """As in fbgemm_gpu."""

    SUM = 0
    MEAN = 1
    NONE = 2


class SparseType(Enum):
    """As in fbgemm_gpu."""

    FP32 = "fp32"
    FP16 = "fp16"
    INT8 = "int8"
    INT4 = "int4"
    INT2 = "int2"
    BF16 = "bf16"


def stored(
    kind: str, *, alignment: int = 16, first: bool = True, parameter_bytes: int = 4
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows as TBE's documentation lays them out, and their values in fp64."""
    generator = torch.Generator().manual_seed(len(kind))
    if kind not in BITS:
        dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[kind]
        floats = torch.randn(ROWS, DIM, generator=generator).to(dtype)
        return padded(floats.view(torch.uint8), alignment), floats.double()
    codes = torch.randint(0, 1 << BITS[kind], (ROWS, DIM), dtype=torch.uint8, generator=generator)
    dtype = torch.float16 if parameter_bytes == 4 else torch.float32
    parameters = torch.randn(ROWS, 2, generator=generator).to(dtype)
    scale, bias = parameters.double().unbind(1)
    packed = codes if kind == "int8" else codes[:, ::2] | codes[:, 1::2] << 4
    parts = [parameters.view(torch.uint8), packed]
    rows = torch.cat(parts if first else parts[::-1], 1)
    return padded(rows, alignment), codes.double() * scale[:, None] + bias[:, None]


def padded(rows: torch.Tensor, alignment: int) -> torch.Tensor:
    return nn.functional.pad(rows, (0, -rows.shape[1] % alignment), value=77)


class Tbe(nn.Module):
    """Has what ``from_tbe`` reads of fbgemm_gpu's module."""

    def __init__(self, *tables: tuple[str, str], mode: PoolingMode = PoolingMode.SUM) -> None:
        super().__init__()
        self.pooling_mode, self.scale_bias_size_in_bytes = mode, 4
        self.reverse_qparam = False
        self.index_remappings_array = torch.empty(0)
        self.index_remapping_hash_table_cpu = None
        self.embedding_specs = [
            (name, ROWS, DIM, SparseType(kind), "HOST") for name, kind in tables
        ]

    def split_embedding_weights_with_scale_bias(self, mode: int) -> list[tuple[Any, ...]]:
        assert mode == 0
        return [(stored(kind.value)[0], None, None) for _, _, _, kind, _ in self.embedding_specs]


class Collection(nn.Module):
    """Holds its TBEs as torchrec's quantised collection does."""

    def __init__(self, *tbes: Tbe) -> None:
        super().__init__()
        self._emb_modules = list(tbes)


@for_each(
    "options",
    [{}, {"alignment": 1}, {"first": False}, {"parameter_bytes": 8}, {"alignment": 128}],
)
@for_each("kind", ["int8", "int4", "fp16", "fp32", "bf16"])
def test_rows_keep_their_values(kind: str, options: dict[str, Any]) -> None:
    if kind == "int4" and "parameter_bytes" in options:
        return
    rows, values = stored(kind, **options)
    size = options.get("parameter_bytes", 4)
    first = options.get("first", True)
    bag = bag_of_rows(rows, DIM, kind, parameters_first=first, parameter_bytes=size)
    assert torch.equal(bag.table.values(torch.arange(ROWS)), values)
    assert torch.allclose(bag(INDICES).double(), values[INDICES].sum(1), rtol=1e-5, atol=1e-3)
    assert kinds() == []
    clean = bag(INDICES)
    bag.rows[3, 1] ^= 64
    assert torch.equal(bag(INDICES), clean)
    assert kinds()[0] == "row_fault"


def test_modules_of_either_package_become_bags_by_name() -> None:
    tables = [("users", "int8"), ("items", "int4"), ("tags", "fp16")]
    one = from_tbe(Tbe(*tables))
    assert list(one) == ["users", "items", "tags"]
    assert all(bag.mode == "sum" and bag.table.name == name for name, bag in one.items())
    two = from_tbe(Collection(Tbe(*tables[:2]), Tbe(tables[2], mode=PoolingMode.MEAN)))
    assert [bag.mode for bag in two.values()] == ["sum", "sum", "mean"]
    for name, bag in two.items():
        assert isinstance(bag, FrozenEmbeddingBag)
        assert torch.equal(bag.rows, one[name].rows)


def test_what_cannot_be_adopted_is_refused_with_a_reason() -> None:
    with pytest.raises(TypeError, match=r"torchrec.* not torch.nn.*Linear"):
        from_tbe(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="pooled"):
        from_tbe(Tbe(("a", "int8"), mode=PoolingMode.NONE))
    pruned = Tbe(("a", "int8"))
    pruned.index_remappings_array = torch.zeros(3)
    with pytest.raises(ConfigError, match="pruned"):
        from_tbe(pruned)
    rows, _ = stored("int8")
    for wrong in (rows[:, :20], rows.float(), padded(rows, 512)):
        with pytest.raises(ConfigError, match=r"uint8 \[rows, 28\]"):
            bag_of_rows(wrong, DIM, "int8")
    with pytest.raises(ConfigError, match="fp16"):
        bag_of_rows(stored("int4", parameter_bytes=8)[0], DIM, "int4", parameter_bytes=8)
    with pytest.raises(ConfigError, match="int2 have no checksums"):
        bag_of_rows(rows, DIM, "int2")
    rows.view(torch.float16)[5, 0] = torch.inf
    with pytest.raises(ConfigError, match="row 5"):
        bag_of_rows(rows, DIM, "int8")
