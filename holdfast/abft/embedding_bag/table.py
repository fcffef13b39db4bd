"""An embedding table in which every row is stored with its own checksums."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

import torch

from holdfast import native
from holdfast.abft.embedding_bag import rows_reference
from holdfast.abft.embedding_bag.layout import KINDS, Kind, Layout, allocate, kind_named
from holdfast.abft.registry import Implementation, native_or_reference
from holdfast.abft.source import Source, row_from
from holdfast.errors import ConfigError

__all__ = ["KINDS", "Table"]

_CHUNK_ROWS = 65536
P = ParamSpec("P")
T = TypeVar("T")


@dataclass
class Table:
    """Rows of an embedding table with their checksums.

    Args:
        data: Rows, uint8 [rows, stride], contiguous, laid out as in ``Layout``, on the CPU or on a
            CUDA device.
        dim: Number of elements of a row.
        kind: Type of the elements; quantised rows have the values scale · code + bias.
        name: Name of the table in events.
        source: Function that returns a row by its number, as float [dim] or as stored, uint8
            [payload]. It is called for rows that checksums cannot repair.
        module: Number of the module whose protection decides about faults; 0 for no module.

    Threads: any number may read (pool, scrub) at once. Repairs are serialised by ``lock``; a reader
    sees the row before or after the repair, or a mixture that fails the reader's own check. Nothing
    else may write rows while there are readers.
    """

    data: torch.Tensor
    dim: int
    kind: Kind
    name: str = "embedding_bag"
    source: Source | None = None
    module: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def __post_init__(self) -> None:
        self.layout = Layout.of(self.kind, self.dim)
        check_data(self.data, self.layout, self.dim)

    @classmethod
    def of(cls, data: torch.Tensor, dim: int, kind: str, name: str = "embedding_bag") -> "Table":
        """Make a table of stored rows that include their checksums.

        Raises:
            ConfigError: The rows have a wrong size.
        """
        return cls(data, dim, kind_named(kind), name)

    @classmethod
    def zeros(
        cls, rows: int, dim: int, kind: str = "uint8", name: str = "embedding_bag"
    ) -> "Table":
        """Make a table of zeros; without values if torch's default device is ``meta``.

        Raises:
            ConfigError: A size is unusable, or the table does not fit into memory.
        """
        table = _empty(rows, dim, kind, name, torch.get_default_device())
        table.seal()
        return table

    @classmethod
    def from_float(
        cls, weight: torch.Tensor, kind: str = "uint8", name: str = "embedding_bag"
    ) -> "Table":
        """Make a table of the rows of a floating-point matrix.

        For ``uint8`` and ``uint4`` they are quantised as by torch's ``embedding_bag_byte_prepack``
        and ``embedding_bag_4bit_prepack``; for other kinds they are converted to the dtype.

        Args:
            weight: Finite floating-point matrix [rows, dim]; of one on ``meta`` the table has no
                values either.
            kind: One of ``KINDS``; ``uint4`` needs an even dim.
            name: Name of the table in events.

        Raises:
            ConfigError: The weight is not such a matrix, a row overflows as this kind (as fp16
                elements, or in the fp16 scale and bias of ``uint4``), or the table does not fit
                into memory.
        """
        if weight.dim() != 2 or not weight.is_floating_point():
            raise ConfigError(
                f"a weight is a floating-point matrix [rows, dim], got {weight.dtype} "
                f"{list(weight.shape)}"
            )
        table = _empty(weight.shape[0], weight.shape[1], kind, name, weight.device)
        for first in range(0, 0 if weight.is_meta else len(table), _CHUNK_ROWS):
            chunk = weight.detach()[first : first + _CHUNK_ROWS].cpu()
            if not chunk.isfinite().all():
                row = first + int((~chunk.isfinite()).any(-1).nonzero()[0])
                raise ConfigError(f"row {row} of the weight is not finite: it cannot be checked")
            payload = _packed(chunk, table.kind)
            lost = ~_finite(payload, table.kind, table.layout)
            if lost.any():
                row = int(lost.nonzero()[0])
                raise ConfigError(
                    f"row {first + row} of the weight, up to {float(chunk[row].abs().max()):g}, "
                    f"overflows as {kind}: take a kind of larger range, or scale the weight down"
                )
            table.data[first : first + len(chunk), : table.layout.payload] = payload
        table.seal()
        return table

    @classmethod
    def from_packed(
        cls, packed: torch.Tensor, kind: str = "uint8", name: str = "embedding_bag"
    ) -> "Table":
        """Make a table of FBGEMM's rows, as torch's ``embedding_bag_*_prepack`` make them.

        Args:
            packed: uint8 [rows, dim + 8] (uint8: then fp32 scale and bias) or [rows, dim / 2 + 4]
                (uint4: then fp16 scale and bias).
            kind: ``uint8`` or ``uint4``.
            name: Name of the table in events.

        Raises:
            ConfigError: The rows have another format, or a scale or bias is not finite.
        """
        wanted = kind_named(kind)
        if wanted.parameter is None or packed.dim() != 2 or packed.dtype != torch.uint8:
            raise ConfigError(
                f"packed rows are uint8 [rows, bytes] of kind uint8 or uint4, got {packed.dtype} "
                f"{list(packed.shape)} of kind {kind}"
            )
        dim = (packed.shape[1] - 2 * wanted.parameter.itemsize) * 8 // wanted.bits
        table = _empty(len(packed), dim, kind, name)
        table.data[:, : packed.shape[1]] = packed
        bad = ~table.parameters().isfinite().all(-1)
        if bad.any():
            row = int(bad.nonzero()[0])
            values = table.parameters([row])[0].tolist()
            raise ConfigError(f"scale and bias of row {row} are {values}: they must be finite")
        table.seal()
        return table

    def __len__(self) -> int:
        return len(self.data)

    def parameters(self, rows: Sequence[int] | slice = slice(None)) -> torch.Tensor:
        """Return scale and bias of rows of a quantised table, [count, 2]."""
        assert self.kind.parameter is not None
        part = self.data[rows, self.layout.elements : self.layout.payload]
        return _copied(part).view(self.kind.parameter)

    def values(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the exact values of rows, fp64 [count, dim]."""
        elements = self.data[rows, : self.layout.elements]
        if self.kind.dtype is not None:
            return _copied(elements).view(self.kind.dtype).double()
        scale, bias = self.parameters(rows).double().unbind(-1)  # type: ignore[arg-type]
        return rows_reference.codes(elements, self.dim, self.kind) * scale[:, None] + bias[:, None]

    def seal(self, first: int = 0, count: int | None = None) -> None:
        """Recompute the checksums of rows from their present content."""
        count = len(self) - first if count is None else count
        if self.data.is_meta:
            return
        with torch.inference_mode():  # tensors created in this mode can be written only in it
            _encode(self.data, self.dim, self.kind, first, count)

    def rotten(self, first: int = 0, count: int | None = None) -> list[int]:
        """Return the numbers of the rows whose bytes do not match their checksums.

        Guarantees: rows in which up to 3 bits changed (5 if a row has at most 650 bytes) are always
        found, and others with a probability of about 1 − 2⁻³².
        """
        count = len(self) - first if count is None else count
        return _rotten(self.data, self.dim, self.kind, first, count)

    def correct(self, row: int) -> list[int]:
        """Flip back the wrong bits of a row's one damaged byte; return their numbers in the row.

        Damage in several bytes is taken for damage in one only if a change of one byte explains the
        CRC-32C, the sum and the guard of the row.
        """
        with torch.inference_mode():
            return _correct(self.data, self.dim, self.kind, row)

    def restore(self, row: int) -> bool:
        """Overwrite a row with the values from the table's source; return whether it has one.

        Raises:
            ConfigError: The source returned no such row, or one that overflows as this kind.
        """
        if self.source is None:
            return False
        payload = row_from(
            self.source,
            row,
            of=self.name,
            stored=(torch.uint8, self.layout.payload),
            count=self.dim,
            pack=lambda floats: _packed(floats[None], self.kind)[0],
        )
        if not _finite(payload[None], self.kind, self.layout).all():
            raise ConfigError(
                f"the source of {self.name} gave a row {row} that is not finite as {self.kind.name}"
            )
        with torch.inference_mode():  # tensors created in this mode can be written only in it
            self.data[row, : self.layout.payload] = payload
        self.seal(row, 1)
        return True

    @property
    def overhead(self) -> float:
        """Memory of the checksums, as a share of the rows without them."""
        return self.layout.stride / self.layout.payload - 1


def _encode_native(data: torch.Tensor, dim: int, kind: Kind, first: int, count: int) -> None:
    native.required().embedding_rows_encode(data, dim, kind.number, first, count)


def _rotten_native(data: torch.Tensor, dim: int, kind: Kind, first: int, count: int) -> list[int]:
    found: list[int] = native.required().embedding_rows_rotten(data, dim, kind.number, first, count)
    return found


def _correct_native(data: torch.Tensor, dim: int, kind: Kind, row: int) -> list[int]:
    bits: list[int] = native.required().embedding_row_correct(data, dim, kind.number, row)
    return bits


def _of_rows(name: str, native_one: Callable[..., T], reference: Callable[P, T]) -> Callable[P, T]:
    # Rows on a device are read and repaired through the host, as that happens only after a fault.
    on_cuda = Implementation("reference", lambda: reference, ("cuda",))
    whole = f"embedding_rows.{name}"
    return native_or_reference(whole, native_one, reference, on_cuda, lambda data: data.device)


_encode = _of_rows("encode", _encode_native, rows_reference.encode)
_rotten = _of_rows("rotten", _rotten_native, rows_reference.rotten)
_correct = _of_rows("correct", _correct_native, rows_reference.correct)


def check_data(data: torch.Tensor, layout: Layout, dim: int) -> None:
    """Raise ConfigError if a tensor is not contiguous uint8 [rows, stride]."""
    shape = data.dim() == 2 and data.shape[1] == layout.stride and len(data) > 0
    if not shape or data.dtype != torch.uint8:
        raise ConfigError(
            f"a table of dim {dim} is uint8 [rows, {layout.stride}], got {data.dtype} "
            f"{list(data.shape)}"
        )
    if not data.is_contiguous():
        raise ConfigError("a table must be contiguous: call .contiguous() first")


def _empty(rows: int, dim: int, kind: str, name: str, like: torch.device | None = None) -> Table:
    wanted = kind_named(kind)
    if kind == "uint4" and dim % 2:
        raise ConfigError(f"dim = {dim} must be even for 4 bits: two codes share a byte")
    meta = like is not None and like.type == "meta"
    return Table(allocate(rows, Layout.of(wanted, dim), meta=meta), dim, wanted, name)


def _finite(payload: torch.Tensor, kind: Kind, layout: Layout) -> torch.Tensor:
    """Mark the packed rows, uint8 [rows, payload], without NaN or INF, bool [rows]."""
    dtype, first = (kind.dtype, 0) if kind.dtype is not None else (kind.parameter, layout.elements)
    assert dtype is not None
    return _copied(payload[:, first:]).view(dtype).isfinite().all(-1)


def _copied(part: torch.Tensor) -> torch.Tensor:
    """Copy bytes to memory of their own, which begins at a multiple of every element's size."""
    return part.clone(memory_format=torch.contiguous_format)


def _packed(weight: torch.Tensor, kind: Kind) -> torch.Tensor:
    """Pack rows as bytes without checksums, uint8 [rows, payload]."""
    if kind.dtype is not None:
        return weight.to(kind.dtype).contiguous().view(torch.uint8)
    prepack = "embedding_bag_byte_prepack" if kind.bits == 8 else "embedding_bag_4bit_prepack"
    packed: torch.Tensor = getattr(torch.ops.quantized, prepack)(weight.float().contiguous())
    return packed
