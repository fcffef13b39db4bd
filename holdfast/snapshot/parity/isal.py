"""Sums of products over GF(2⁸) by ISA-L, on raw buffers.

The library is loaded from pyeclib's wheel, which bundles it, or from the system; pyeclib's own
interface copies every fragment and puts a header before it, which would break the stripes' layout.
"""

import ctypes
from collections.abc import Sequence
from functools import cache
from importlib import metadata
from itertools import chain

import numpy as np
import numpy.typing as npt

from holdfast.errors import ConfigError

Bytes = npt.NDArray[np.uint8]
Rows = tuple[tuple[int, ...], ...]

_SYSTEM_NAME = "libisal.so.2"
# Lengths are C ints.
_MOST_BYTES = 2**30
_TABLE_BYTES = 32


@cache
def library() -> ctypes.CDLL:
    """ISA-L.

    Raises:
        ConfigError: it is not installed.
    """
    for name in (*_bundled(), _SYSTEM_NAME):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise ConfigError(
        "a second parity needs ISA-L, and neither pyeclib's nor the system's was found: "
        "pip install 'torch-holdfast[parity]', or use one parity"
    )


@cache
def available() -> bool:
    """Whether ISA-L is installed."""
    try:
        library()
    except ConfigError:
        return False
    return True


def _bundled() -> list[str]:
    try:
        files = metadata.files("pyeclib") or []
    except metadata.PackageNotFoundError:
        return []
    return [str(file.locate()) for file in files if file.name.startswith("libisal")]


def product(left: int, right: int) -> int:
    """Multiply in GF(2⁸)."""
    return int(library().gf_mul(ctypes.c_ubyte(left), ctypes.c_ubyte(right))) & 0xFF


def inverse(matrix: Rows) -> Rows:
    """Return the inverse of a square matrix over GF(2⁸).

    Raises:
        ValueError: it is singular.
    """
    size = len(matrix)
    given = (ctypes.c_ubyte * size**2)(*chain.from_iterable(matrix))
    found = (ctypes.c_ubyte * size**2)()
    if library().gf_invert_matrix(given, found, ctypes.c_int(size)):
        raise ValueError(f"a singular matrix of {size} rows over GF(256)")
    return tuple(tuple(found[row * size : (row + 1) * size]) for row in range(size))


def combine(targets: Sequence[Bytes], sources: Sequence[Bytes], rows: Rows) -> None:
    """Set targets[t] = Σ rows[t][s] · sources[s]; of one length, contiguous, not overlapping."""
    tables = _tables(rows)
    for start in range(0, len(targets[0]), _MOST_BYTES):
        nbytes = min(_MOST_BYTES, len(targets[0]) - start)
        library().ec_encode_data(
            ctypes.c_int(nbytes),
            ctypes.c_int(len(sources)),
            ctypes.c_int(len(targets)),
            tables,
            _pointers(sources, start),
            _pointers(targets, start),
        )


def accumulate(target: Bytes, source: Bytes, coefficient: int) -> None:
    """Add coefficient · source to target; both of one length, contiguous, not overlapping."""
    tables = _tables(((coefficient,),))
    for start in range(0, len(target), _MOST_BYTES):
        nbytes = min(_MOST_BYTES, len(target) - start)
        library().ec_encode_data_update(
            ctypes.c_int(nbytes),
            ctypes.c_int(1),
            ctypes.c_int(1),
            ctypes.c_int(0),
            tables,
            ctypes.c_void_p(source.ctypes.data + start),
            _pointers([target], start),
        )


def _tables(rows: Rows) -> "ctypes.Array[ctypes.c_ubyte]":
    count, width = len(rows), len(rows[0])
    matrix = (ctypes.c_ubyte * (count * width))(*chain.from_iterable(rows))
    tables = (ctypes.c_ubyte * (_TABLE_BYTES * count * width))()
    library().ec_init_tables(ctypes.c_int(width), ctypes.c_int(count), matrix, tables)
    return tables


def _pointers(blocks: Sequence[Bytes], start: int) -> "ctypes.Array[ctypes.c_void_p]":
    return (ctypes.c_void_p * len(blocks))(*[block.ctypes.data + start for block in blocks])
