"""Embedding bags for inference with quantised or floating-point rows and checked outputs."""

from collections.abc import Iterable, Sequence
from typing import Any, Self

import torch
from torch import nn

from holdfast.abft.embedding_bag import (
    Batch,
    Scrubber,
    ScrubReport,
    Table,
    embedding_bags,
    scrub,
)
from holdfast.abft.embedding_bag.batch import MODES
from holdfast.abft.embedding_bag.op import pool, row_of
from holdfast.abft.embedding_bag.suspects import repair_row
from holdfast.abft.gemm.modules import identifier
from holdfast.errors import ConfigError, UncorrectableFault
from holdfast.nn.stored import StoredModule, unsupported

_KINDS = {8: "uint8", 4: "uint4"}


class FrozenEmbeddingBag(StoredModule):
    """``nn.EmbeddingBag`` for inference, whose rows hold checksums with which bags are checked.

    The rows are a buffer, ``rows`` (uint8 [num_embeddings, stride]), so that ``state_dict`` carries
    the checksums too and loading verifies them. It may be shared between processes
    (``share_memory_``). Bags are looked up where the rows are, on CPU or on CUDA. There are no
    gradients, neither of the rows nor of the weights.

    Args:
        num_embeddings, embedding_dim: Rows of the table, and elements of a row.
        mode: ``"sum"`` or ``"mean"``.
        include_last_offset, padding_idx: As for ``torch.nn.EmbeddingBag``.
        kind: Type of the stored elements, one of ``holdfast.abft.embedding_bag.KINDS``.
        dtype: Type of the output, fp32 or fp16.
        prefetch: Prefetches rows into the CPU cache.
        name: Name of the table in events.

    ``verify = False`` pools without any check.

    Guarantees, Not covered and errors are those of ``holdfast.abft.embedding_bag.embedding_bag``.

    Raises:
        ConfigError: An argument is unusable, or the table does not fit into memory.
    """

    rows: torch.Tensor
    verify = True

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        mode: str = "mean",
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        kind: str = "float32",
        dtype: torch.dtype = torch.float32,
        prefetch: bool = True,
        name: str = "embedding_bag",
    ) -> None:
        super().__init__()
        table = Table.zeros(num_embeddings, embedding_dim, kind, name)
        self._adopt(table, mode, include_last_offset, padding_idx, dtype, prefetch)

    def _adopt(
        self,
        table: Table,
        mode: str,
        include_last_offset: bool,
        padding_idx: int | None,
        dtype: torch.dtype,
        prefetch: bool,
    ) -> None:
        if mode not in MODES:
            raise ConfigError(f"mode = {mode!r} has no checksum: use one of {', '.join(MODES)}")
        if padding_idx is not None and not -len(table) <= padding_idx < len(table):
            raise ConfigError(f"padding_idx = {padding_idx} is outside the {len(table)} rows")
        self._table = table
        self._connect()
        self.register_buffer("rows", table.data)
        self.num_embeddings, self.embedding_dim = len(table), table.dim
        self.mode, self.include_last_offset = mode, include_last_offset
        self.padding_idx, self.dtype, self.prefetch = padding_idx, dtype, prefetch

    def _connect(self) -> None:
        """Set the source, and this module as the one whose protection handles faults."""
        self._table.module, self._table.source = identifier(self), self._source

    @classmethod
    def _of(cls, like: nn.Module, kind: str, name: str, dtype: torch.dtype, prefetch: bool) -> Self:
        if not isinstance(like, nn.EmbeddingBag):
            remedy = "give the bag in floats that it was made of"
            if isinstance(like, nn.Embedding):
                remedy = "give nn.EmbeddingBag.from_pretrained(embedding.weight)"
            raise unsupported("from_float", "torch.nn.EmbeddingBag", like, remedy)
        if like.max_norm is not None:
            raise ConfigError(
                f"max_norm = {like.max_norm} changes rows as they are read: apply it to the weight "
                "first, and set it to None"
            )
        bag = cls.__new__(cls)
        nn.Module.__init__(bag)
        table = Table.from_float(like.weight, kind, name)
        bag._adopt(table, like.mode, like.include_last_offset, like.padding_idx, dtype, prefetch)
        return bag.train(like.training)

    @classmethod
    def from_float(
        cls,
        bag: nn.EmbeddingBag,
        *,
        kind: str = "float32",
        dtype: torch.dtype = torch.float32,
        prefetch: bool = True,
        name: str = "embedding_bag",
    ) -> Self:
        """Make a frozen bag with a copy of the rows of a trained ``nn.EmbeddingBag``.

        Raises:
            TypeError: It is not an ``nn.EmbeddingBag``.
            ConfigError: The bag has a max_norm, a mode without a checksum, or rows that are not
                finite.
        """
        return cls._of(bag, kind, name, dtype, prefetch)

    @property
    def table(self) -> Table:
        """The rows as a :class:`Table`, which looks up, checks and repairs them."""
        self._table.data = self.rows  # load_state_dict(assign=True) and to() replace the buffer
        return self._table

    def forward(
        self,
        input: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
        slot: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Sum or average the rows of each bag; inputs are those of ``nn.EmbeddingBag.forward``.

        Indices are [count] with ``offsets``, or [bags, size]; output is [bags, embedding_dim]. On
        CUDA with a ``slot`` (see ``embedding_bag``) the host does not wait for the device.
        """
        self.check_eager()
        batch = self._batch(input, offsets, per_sample_weights)
        return pool(self._ready(), batch, self.verify, slot)

    def _ready(self) -> Table:
        table = self.table
        if table.data.device.type not in ("cpu", "cuda"):
            raise ConfigError(
                f"the rows are on {table.data.device}: bags are checked on CPU and on CUDA only"
            )
        return table

    def _batch(
        self,
        input: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> Batch:
        padding = -1 if self.padding_idx is None else row_of(self.padding_idx, self.num_embeddings)
        return Batch(
            input,
            offsets,
            per_sample_weights,
            self.include_last_offset,
            self.mode,
            padding,
            self.dtype,
            self.prefetch,
        )

    def scrub(self, rows_per_second: float | None = None, *, repair: bool = True) -> ScrubReport:
        """Check all rows of the table now, at most ``rows_per_second`` of them per second."""
        return scrub(self.table, rows_per_second, repair=repair)

    def scrubber(
        self, rows_per_second: float, *, repair: bool = True, passes: int | None = None
    ) -> Scrubber:
        """Return a thread that checks the table in the background; use it with ``with``."""
        return Scrubber(self.table, rows_per_second, repair=repair, passes=passes)

    def extra_repr(self) -> str:
        """List the settings, as torch prints them."""
        return (
            f"{self.num_embeddings}, {self.embedding_dim}, kind={self._table.kind.name}, "
            f"mode={self.mode!r}"
        )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *rest)
        errors: list[str] = rest[-1]
        if f"{prefix}rows" not in state_dict or errors or self.rows.is_meta:
            return
        for row in self.table.rotten():
            try:
                repair_row(self.table, row)
            except UncorrectableFault as fault:
                errors.append(f"{prefix}rows: {fault}")
                return

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without source and lock; register the source again after unpickling."""
        state = super().__getstate__()
        table = state.pop("_table")
        return state | {"_kind": table.kind.name, "_name": table.name}

    def __setstate__(self, state: dict[str, Any]) -> None:
        kind, name = state.pop("_kind"), state.pop("_name")
        super().__setstate__(state)
        self._table = Table.of(self.rows, self.embedding_dim, kind, name)
        self._connect()


class Int8EmbeddingBag(FrozenEmbeddingBag):
    """:class:`FrozenEmbeddingBag` of 8- or 4-bit rows, each with a scale and a bias of its own.

    Args:
        bits: 8 (fp32 scale and bias) or 4 (fp16 ones, even ``embedding_dim``).

    The other arguments are those of ``FrozenEmbeddingBag``.
    """

    def __init__(
        self, num_embeddings: int, embedding_dim: int, bits: int = 8, **options: Any
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, kind=_kind_of(bits), **options)

    @classmethod
    def from_float(  # type: ignore[override]
        cls,
        bag: nn.EmbeddingBag,
        bits: int = 8,
        *,
        dtype: torch.dtype = torch.float32,
        prefetch: bool = True,
        name: str = "embedding_bag",
    ) -> Self:
        """Quantise a trained bag, row by row, as torch's own quantised bags do.

        Raises:
            TypeError: It is not an ``nn.EmbeddingBag``.
            ConfigError: The bag has a max_norm, a mode without a checksum, or rows that are not
                finite.
        """
        return cls._of(bag, _kind_of(bits), name, dtype, prefetch)


def pool_bags(
    bags: Iterable[FrozenEmbeddingBag], inputs: Iterable[Sequence[torch.Tensor]]
) -> list[torch.Tensor]:
    """Pool the inputs of many bags as their ``forward`` does, in one call of the native core.

    For models with many tables, where call overhead exceeds pooling time. Module hooks do not run.

    Args:
        bags: The modules.
        inputs: For each bag the arguments of its ``forward``, (indices, offsets, weights).

    Guarantees, Not covered and errors are those of the bags; ``verify`` is each bag's own.
    """
    pairs = list(zip(bags, inputs, strict=True))
    outputs: dict[int, torch.Tensor] = {}
    for verify in {bool(bag.verify) for bag, _ in pairs}:
        chosen = [i for i, (bag, _) in enumerate(pairs) if bool(bag.verify) is verify]
        asked = [(bag._ready(), bag._batch(*given)) for bag, given in (pairs[i] for i in chosen)]
        outputs |= zip(chosen, embedding_bags(asked, verify=verify), strict=True)
    return [outputs[i] for i in range(len(pairs))]


def _kind_of(bits: int) -> str:
    if bits not in _KINDS:
        raise ConfigError(f"bits = {bits} must be 8 or 4")
    return _KINDS[bits]


__all__ = ["FrozenEmbeddingBag", "Int8EmbeddingBag", "pool_bags"]
