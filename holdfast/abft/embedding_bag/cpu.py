"""Pooling of bags, by the native core or plain torch on CPU and by Triton on CUDA."""

from collections.abc import Callable
from typing import Any

import torch

from holdfast import native
from holdfast.abft.embedding_bag.batch import Batch
from holdfast.abft.embedding_bag.reference import embedding_bag_reference
from holdfast.abft.embedding_bag.table import Table
from holdfast.abft.policy import count_false_alarms
from holdfast.abft.registry import Implementation, native_or_reference, needs_triton
from holdfast.errors import ConfigError

KERNELS = ("best", "portable", "ours", "fbgemm")
native.agree("bag_kernels", KERNELS)
BEST, PORTABLE, OURS, FBGEMM = range(len(KERNELS))


def _pool_native(
    table: Table,
    batch: Batch,
    *,
    portable: bool = False,
    slot: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, list[int]]:
    _refuse(slot)
    return run_kernel(table, batch, PORTABLE if portable else BEST, **options)


def _pool_reference(
    table: Table,
    batch: Batch,
    *,
    portable: bool = False,
    site: object = None,
    check: bool = True,
    slot: torch.Tensor | None = None,
) -> tuple[torch.Tensor, list[int]]:
    """Pool bags; return the output and the numbers of the bags that failed their check.

    ``portable`` selects the scalar kernel, whose results have the same bits. ``site`` is called
    with the pooled rows before they are checked. A ``slot`` is for CUDA only.
    """
    _refuse(slot)
    return embedding_bag_reference(table, batch, site, check=check)


def _triton() -> Callable[..., tuple[torch.Tensor, list[int]]]:
    from holdfast.abft.embedding_bag.cuda import pool_triton

    return pool_triton


compute = native_or_reference(
    "embedding_bag",
    _pool_native,
    _pool_reference,
    Implementation("triton", _triton, ("cuda",), missing=needs_triton),
    lambda table: table.data.device,
)


def _refuse(slot: torch.Tensor | None) -> None:
    if slot is not None:
        raise ConfigError("a slot is for tables on a CUDA device: leave it out")


def run_kernel(
    table: Table, batch: Batch, kernel: int, *, check: bool = True, site: object = None
) -> tuple[torch.Tensor, list[int]]:
    """Pool by one of the native core's ``KERNELS``, given by its number."""
    output, suspects, cleared = native.required().embedding_bag(
        operands(table, batch), check, kernel, site
    )
    count_false_alarms(table.module, cleared)
    return output, suspects


def operands(table: Table, batch: Batch) -> tuple[Any, ...]:
    """Return table and batch in the form that the native core takes."""
    return (
        table.data,
        table.dim,
        table.kind.number,
        batch.indices,
        batch.offsets,
        batch.weights,
        batch.include_last,
        batch.padding,
        batch.mode == "mean",
        batch.dtype == torch.float16,
        batch.prefetch,
    )
