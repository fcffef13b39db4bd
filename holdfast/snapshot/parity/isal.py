"""Sums of products over GF(2⁸) by ISA-L, on raw buffers.

The library is loaded from the wheel of pyeclib, which bundles it, or from the system. pyeclib's own
interface is not used: it copies every fragment and adds a header, which would break the layout of
the stripes.
"""

import ctypes
from collections.abc import Sequence
from functools import cache, lru_cache
from importlib import metadata
from itertools import chain

import numpy as np
import numpy.typing as npt

from holdfast.errors import ConfigError

Bytes = npt.NDArray[np.uint8]
Rows = tuple[tuple[int, ...], ...]

_SYSTEM_NAME = "libisal.so.2"
# ISA-L takes lengths as C ints.
_MOST_BYTES = 2**30
_TABLE_BYTES = 32


@cache
def library() -> ctypes.CDLL:
    """Load ISA-L."""
    for name in (*_bundled(), _SYSTEM_NAME):
        try:
            found = ctypes.CDLL(name)
        except OSError:
            continue
        number, address, byte = ctypes.c_int, ctypes.c_void_p, ctypes.c_ubyte
        found.gf_mul.argtypes, found.gf_mul.restype = (byte, byte), byte
        found.gf_invert_matrix.argtypes = (address, address, number)
        found.ec_init_tables.argtypes = (number, number, address, address)
        found.ec_encode_data.argtypes = (number, number, number, address, address, address)
        found.ec_encode_data_update.argtypes = (number,) * 4 + (address,) * 3
        return found
    raise ConfigError(
        "a second parity needs ISA-L, and neither pyeclib's nor the system's was found: "
        "pip install 'torch-holdfast[parity]', or use one parity"
    )


@cache
def available() -> bool:
    """Return true if ISA-L is installed."""
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
    return int(library().gf_mul(left, right))


def inverse(matrix: Rows) -> Rows:
    """Return the inverse of a square matrix over GF(2⁸)."""
    size = len(matrix)
    given = (ctypes.c_ubyte * size**2)(*chain.from_iterable(matrix))
    found = (ctypes.c_ubyte * size**2)()
    if library().gf_invert_matrix(given, found, size):
        raise ValueError(f"a singular matrix of {size} rows over GF(256)")
    return tuple(tuple(found[row * size : (row + 1) * size]) for row in range(size))


def combine(targets: Sequence[Bytes], sources: Sequence[Bytes], rows: Rows) -> None:
    """Set targets[t] = Σ rows[t][s] · sources[s]; all of one length, contiguous, disjoint."""
    tables = _tables(rows)
    for start in range(0, len(targets[0]), _MOST_BYTES):
        nbytes = min(_MOST_BYTES, len(targets[0]) - start)
        given, out = _pointers(sources, start), _pointers(targets, start)
        library().ec_encode_data(nbytes, len(sources), len(targets), tables, given, out)


def accumulate(target: Bytes, source: Bytes, coefficient: int) -> None:
    """Add coefficient · source to target, of the same kind."""
    tables = _tables(((coefficient,),))
    for start in range(0, len(target), _MOST_BYTES):
        nbytes = min(_MOST_BYTES, len(target) - start)
        given, out = _address(source) + start, _pointers([target], start)
        library().ec_encode_data_update(nbytes, 1, 1, 0, tables, given, out)


@lru_cache(maxsize=256)
def _tables(rows: Rows) -> "ctypes.Array[ctypes.c_ubyte]":
    count, width = len(rows), len(rows[0])
    matrix = (ctypes.c_ubyte * (count * width))(*chain.from_iterable(rows))
    tables = (ctypes.c_ubyte * (_TABLE_BYTES * count * width))()
    library().ec_init_tables(width, count, matrix, tables)
    return tables


def _pointers(blocks: Sequence[Bytes], start: int) -> "ctypes.Array[ctypes.c_void_p]":
    return (ctypes.c_void_p * len(blocks))(*[_address(block) + start for block in blocks])


def _address(block: Bytes) -> int:
    # Quicker than ``ctypes.data``, which makes an object.
    return int(block.__array_interface__["data"][0])
