"""Adoption of the quantised tables of FBGEMM's TBE, which torchrec's collections are made of."""

from typing import Any

import torch
from torch import nn

from holdfast.abft.embedding_bag.layout import kind_named
from holdfast.abft.embedding_bag.table import Table
from holdfast.errors import ConfigError
from holdfast.nn.int8_embedding_bag import FrozenEmbeddingBag
from holdfast.nn.stored import unsupported

KINDS = {"int8": "uint8", "int4": "uint4", "fp16": "float16", "fp32": "float32", "bf16": "bfloat16"}
LARGEST_ALIGNMENT = 128  # bytes to which FBGEMM rounds the size of a row
_TBE = "fbgemm_gpu's IntNBitTableBatchedEmbeddingBagsCodegen"


def from_tbe(module: nn.Module) -> dict[str, FrozenEmbeddingBag]:
    """Make a frozen bag of each table of a TBE for inference; neither package needs to be there.

    Args:
        module: ``IntNBitTableBatchedEmbeddingBagsCodegen`` of fbgemm_gpu with int8, int4, fp16,
            fp32 or bf16 rows, or a quantised ``EmbeddingBagCollection`` of torchrec.

    Returns:
        The bags by the names of their tables, with copies of the rows, on the tables' device. Those
        of int8 rows store scale and bias as fp32 instead of fp16, of the same values.

    Guarantees, Not covered and errors in use are those of ``FrozenEmbeddingBag``. A bag is called
    with the indices and offsets of one feature; what a collection does besides (keyed jagged
    tensors, features that share a table, the order of its outputs) is left to the caller.

    Raises:
        TypeError: The module is neither of the two.
        ConfigError: A table is pruned, not pooled, or of rows that have no checksums.
    """
    parts = getattr(module, "_emb_modules", [module])  # of a collection of torchrec's
    return {name: bag for part in parts for name, bag in _of_one(part).items()}


def _of_one(tbe: Any) -> dict[str, FrozenEmbeddingBag]:
    if not hasattr(tbe, "split_embedding_weights_with_scale_bias"):
        wanted = f"{_TBE} or torchrec's quantised EmbeddingBagCollection"
        raise unsupported("from_tbe", wanted, tbe, "from_float takes nn.EmbeddingBag")
    pooling = str(getattr(tbe.pooling_mode, "name", tbe.pooling_mode)).lower()
    if pooling not in ("sum", "mean"):
        raise ConfigError(f"pooling_mode = {pooling}: only tables that are pooled are checked")
    if _pruned(tbe):
        raise ConfigError("the tables are pruned, with remapped indices: give unpruned ones")
    stored = tbe.split_embedding_weights_with_scale_bias(0)
    layout = {
        "parameters_first": not getattr(tbe, "reverse_qparam", False),
        "parameter_bytes": tbe.scale_bias_size_in_bytes,
    }
    return {
        name: bag_of_rows(rows, dim, str(kind.value), mode=pooling, name=name, **layout)
        for (name, _, dim, kind, _), (rows, *_) in zip(tbe.embedding_specs, stored, strict=True)
    }


def _pruned(tbe: Any) -> bool:
    maps = [getattr(tbe, f"index_remapping{name}", None) for name in ("s_array", "_hash_table")]
    return getattr(tbe, "index_remapping_hash_table_cpu", None) is not None or any(
        each is not None and each.numel() > 0 for each in maps
    )


def bag_of_rows(
    rows: torch.Tensor,
    dim: int,
    kind: str,
    *,
    mode: str = "sum",
    name: str = "embedding_bag",
    parameters_first: bool = True,
    parameter_bytes: int = 4,
) -> FrozenEmbeddingBag:
    """Make a frozen bag of rows as FBGEMM's TBE for inference stores them.

    Args:
        rows: uint8 [rows, bytes]: for ``int8`` and ``int4`` scale and bias, then the codes, of two
            codes in a byte the first one in its lower half; for floats the elements; then padding.
        dim: Number of elements of a row.
        kind: ``int8``, ``int4``, ``fp16``, ``fp32`` or ``bf16``.
        mode: ``"sum"`` or ``"mean"``.
        name: Name of the table in events.
        parameters_first: False if scale and bias follow the codes (``reverse_qparam``).
        parameter_bytes: Size of scale and bias together: 4 (fp16), for ``int8`` also 8 (fp32).

    Raises:
        ConfigError: The rows do not have this layout, or hold NaN or INF in scale, bias or
            elements.
    """
    if kind not in KINDS:
        raise ConfigError(f"rows of {kind} have no checksums: only of {', '.join(KINDS)}")
    stored = kind_named(KINDS[kind])
    quantised = stored.parameter is not None
    elements = dim * stored.bits // 8
    used = elements + (parameter_bytes if quantised else 0)
    fits = rows.dim() == 2 and used <= rows.shape[1] < used + LARGEST_ALIGNMENT
    if not fits or rows.dtype != torch.uint8 or parameter_bytes not in (4, 8):
        raise ConfigError(
            f"{kind} rows of dim {dim} are uint8 [rows, {used}] and padding, with 4 or 8 bytes of "
            f"scale and bias, got {rows.dtype} {list(rows.shape)} with {parameter_bytes}"
        )
    if quantised and parameter_bytes > 2 * stored.parameter.itemsize:  # type: ignore[union-attr]
        raise ConfigError(f"scale and bias of {kind} rows are fp16: 4 bytes, not {parameter_bytes}")
    at, codes = (0, used - elements) if parameters_first else (elements, 0)
    payload = rows.detach()[:, codes : codes + elements].contiguous()
    if stored.dtype is not None:
        table = Table.from_float(payload.view(stored.dtype), stored.name, name)
    else:
        given = rows.detach()[:, at : at + parameter_bytes].contiguous()
        given = given.view(torch.float16 if parameter_bytes == 4 else torch.float32)
        given = given.to(stored.parameter).view(torch.uint8)
        table = Table.from_packed(torch.cat((payload, given), 1), stored.name, name)
    bag = FrozenEmbeddingBag.__new__(FrozenEmbeddingBag)
    nn.Module.__init__(bag)
    bag._adopt(table, mode, False, None, torch.float32, True)
    return bag.to(rows.device)
