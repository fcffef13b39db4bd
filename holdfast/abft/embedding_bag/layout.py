"""Memory layout of a table's rows: elements, scale and bias, checksums.

A row begins at a multiple of 16 bytes, and its checksums lie beside scale and bias, so that reading
them takes no further cache line.
"""

import contextlib
import mmap
from dataclasses import dataclass

import torch

from holdfast import native
from holdfast.errors import ConfigError
from holdfast.memory import available_bytes

MAX_DIM = 32768  # largest dimension for which the signed sum of codes fits 24 bits
_ALIGNMENT = 16
_HUGE_BYTES = 8 << 20  # smallest allocation for which huge pages are worth their memory


@dataclass(frozen=True)
class Kind:
    """A format of a table's elements.

    ``number`` is its value in ``RowKind`` of ``csrc/embedding_bag/rows.h``, ``bits`` the size of an
    element, ``dtype`` that of floating-point elements, and ``parameter`` the dtype of scale and
    bias of quantised rows.
    """

    name: str
    number: int
    bits: int
    dtype: torch.dtype | None = None
    parameter: torch.dtype | None = None

    @property
    def top(self) -> int:
        """The largest stored value of a quantised element."""
        return (1 << self.bits) - 1


# The kinds of rows that a table may have, by name: their bits and the dtype of scale and bias.
KINDS = {
    kind.name: kind
    for kind in (
        Kind("uint8", 0, 8, parameter=torch.float32),
        Kind("uint4", 1, 4, parameter=torch.float16),
        Kind("float32", 2, 32, torch.float32),
        Kind("float16", 3, 16, torch.float16),
        Kind("bfloat16", 4, 16, torch.bfloat16),
    )
}


native.agree("row_kinds", tuple(sorted(KINDS, key=lambda name: KINDS[name].number)))
native.agree("bag_most_columns", MAX_DIM)


def kind_named(name: str) -> Kind:
    """Return the kind with a name; raise ConfigError if there is none."""
    if name not in KINDS:
        raise ConfigError(f"no table of {name!r} elements: use one of {', '.join(KINDS)}")
    return KINDS[name]


@dataclass(frozen=True)
class Layout:
    """Byte sizes of the parts of a stored row, in their order in memory."""

    elements: int
    parameters: int
    checksums: int

    @classmethod
    def of(cls, kind: Kind, dim: int) -> "Layout":
        """Lay out rows of ``dim`` elements; raise ConfigError if there are too many or none."""
        if not 1 <= dim <= MAX_DIM:
            raise ConfigError(f"dim = {dim} must be between 1 and {MAX_DIM}")
        parameters = 2 * kind.parameter.itemsize if kind.parameter else 0
        return cls((dim * kind.bits + 7) // 8, parameters, 8 if parameters else 16)

    @property
    def payload(self) -> int:
        """Bytes of elements, scale and bias, which are laid out as FBGEMM's rows are."""
        return self.elements + self.parameters

    @property
    def used(self) -> int:
        """Bytes of a row with its checksums."""
        return self.payload + self.checksums

    @property
    def stride(self) -> int:
        """Bytes from one row to the next."""
        return -(-self.used // _ALIGNMENT) * _ALIGNMENT


def allocate(rows: int, layout: Layout, *, meta: bool = False) -> torch.Tensor:
    """Allocate zeroed rows, uint8 [rows, stride]; raise ConfigError if memory does not suffice."""
    if rows < 1:
        raise ConfigError(f"num_embeddings = {rows} must be at least 1")
    if meta:
        return torch.empty((rows, layout.stride), dtype=torch.uint8, device="meta")
    wanted, available = rows * layout.stride, available_bytes()
    if wanted > available:
        raise ConfigError(
            f"{rows} rows of {layout.stride} bytes are {wanted / 1e9:.1f} GB, and "
            f"{available / 1e9:.1f} GB of memory are available: split the table over more machines "
            "or store fewer bits"
        )
    with torch.inference_mode(False):  # else no repair could write them outside of that mode
        return zeroed(wanted).view(rows, layout.stride)


def zeroed(nbytes: int) -> torch.Tensor:
    """Allocate zeroed bytes, uint8 [nbytes], in huge pages if they are many and Linux has them.

    Rows are read at random, and with small pages nearly every read would miss the TLB.
    """
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None or nbytes < _HUGE_BYTES:
        return torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # the Linux kernel has no huge pages
        memory.madvise(advice)
    return torch.frombuffer(memory, dtype=torch.uint8)
