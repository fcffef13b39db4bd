"""The code of a stripe: parities from data, and lost data from parities, on raw bytes in place.

With data blocks d_0 … d_{k-1}, byte by byte in GF(2⁸), where + is XOR::

    P = Σ d_j          first parity: XOR
    Q = Σ 2^j · d_j    second parity: Reed–Solomon (the P + Q code of RAID 6)

ISA-L computes both in one pass over the data. Where it is not installed NumPy computes P at three
quarters of the speed, and Q is not available. Any two of the k + 2 fragments may be lost. Shorter
blocks count as padded with zeros. Any range of columns can be coded separately.

**Not covered**: a damaged source gives a wrong result without an error. After decoding, the caller
must compare the result with its digests.
"""

from collections.abc import Mapping, Sequence
from functools import cache, reduce
from operator import xor

import numpy as np

from holdfast.snapshot.parity import isal
from holdfast.snapshot.parity.isal import Bytes, Rows
from holdfast.snapshot.parity.stripes import MAX_DATA_BLOCKS, MAX_PARITIES

# A chunk of the result stays in a core's second-level cache until all blocks were added.
_XOR_CHUNK_BYTES = 256 * 2**10


def encode(parity: int, target: Bytes, blocks: Sequence[Bytes]) -> None:
    """Fill ``target`` with parity 0 or 1 of a stripe, from its data blocks in order of their roles.

    It raises the errors of ``combine``, and ValueError if the lengths do not fit.
    """
    lengths = [len(block) for block in blocks]
    if not blocks or len(target) != max(lengths):
        raise ValueError(
            f"a parity of {len(target)} bytes for blocks of {lengths}: it must be as long as the "
            "longest block"
        )
    combine([target], blocks, (encoding_row(parity, len(blocks)),))


def decode(targets: Mapping[int, Bytes], sources: Mapping[int, Bytes], data_blocks: int) -> None:
    """Fill ``targets`` with the lost data of a stripe, bit-equal if the sources are intact.

    Both are by role: one or two lost data blocks, and as many surviving fragments as the stripe has
    ``data_blocks``; parities have roles from that number on. It raises as ``combine``, and
    ValueError if roles or lengths do not fit.
    """
    if targets:
        rows = decoding_rows(tuple(targets), tuple(sources), data_blocks)
        combine(list(targets.values()), list(sources.values()), rows)


@cache
def encoding_row(parity: int, data_blocks: int) -> tuple[int, ...]:
    """Return the coefficients of the data blocks in parity 0 or 1."""
    if not 0 <= parity < MAX_PARITIES or (parity and data_blocks > MAX_DATA_BLOCKS):
        raise ValueError(
            f"parity {parity} of {data_blocks} data blocks: there are parities 0 and 1, "
            f"1 of at most {MAX_DATA_BLOCKS} blocks"
        )
    row = [1]
    while len(row) < data_blocks:
        row.append(isal.product(row[-1], 2) if parity else 1)
    return tuple(row)


def decoding_rows(lost: Sequence[int], available: Sequence[int], data_blocks: int) -> Rows:
    """Return the coefficients of ``available`` fragments in each ``lost`` data block, by role."""
    data = range(data_blocks)
    known = set(available) <= set(range(data_blocks + MAX_PARITIES))
    fit = known and len(available) == len(set(available)) == data_blocks
    if not fit or not set(lost) <= set(data) - set(available):
        raise ValueError(
            f"data {list(lost)} cannot be decoded from fragments {list(available)} of a stripe "
            f"with {data_blocks} data blocks: {data_blocks} different others are needed"
        )
    if len(lost) == 1 and set(available) == {*data, data_blocks} - set(lost):
        return ((1,) * data_blocks,)
    return _solved(lost, available, data_blocks)


def _solved(lost: Sequence[int], available: Sequence[int], data_blocks: int) -> Rows:
    # The missing blocks, times their coefficients, equal the parities minus the known blocks.
    parities = [role - data_blocks for role in available if role >= data_blocks]
    missing = [role for role in range(data_blocks) if role not in available]
    rows = {parity: encoding_row(parity, data_blocks) for parity in parities}
    inverse = isal.inverse(tuple(tuple(rows[p][role] for role in missing) for p in parities))

    def coefficient(factors: tuple[int, ...], role: int) -> int:
        if role >= data_blocks:
            return factors[parities.index(role - data_blocks)]
        terms = [isal.product(f, rows[p][role]) for f, p in zip(factors, parities, strict=True)]
        return reduce(xor, terms)

    by_role = dict(zip(missing, inverse, strict=True))
    return tuple(tuple(coefficient(by_role[target], role) for role in available) for target in lost)


def combine(targets: Sequence[Bytes], sources: Sequence[Bytes], rows: Rows) -> None:
    """Set targets[t] = Σ_s rows[t][s] · sources[s], in place, each to the length of its target.

    Raises:
        ValueError: a buffer is not contiguous uint8 of one dimension, or a target is not writable
            or shares memory with another buffer.
        ConfigError: ISA-L is missing and is needed.
    """
    _check(targets, sources)
    ones = all(coefficient == 1 for row in rows for coefficient in row)
    plain = ones and not (isal.available() and len(sources) <= MAX_DATA_BLOCKS)
    for start, stop in _sections([*targets, *sources]):
        wanted = [t for t, target in enumerate(targets) if len(target) >= stop]
        given = [s for s, source in enumerate(sources) if len(source) >= stop]
        outs = [targets[t][start:stop] for t in wanted]
        parts = [sources[s][start:stop] for s in given]
        if not parts or plain:
            for out in outs:
                _xor(out, parts)
        elif outs:
            isal.combine(outs, parts, tuple(tuple(rows[t][s] for s in given) for t in wanted))


def accumulate(target: Bytes, source: Bytes, coefficient: int) -> None:
    """Add coefficient · source to target; a target that starts as zeros sums up many sources."""
    _check([target], [source])
    if len(source) > len(target):
        raise ValueError(f"{len(source)} bytes cannot be added to {len(target)}")
    head = target[: len(source)]
    if coefficient == 1:
        np.bitwise_xor(head, source, out=head)
    else:
        isal.accumulate(head, source, coefficient)


def _sections(buffers: Sequence[Bytes]) -> list[tuple[int, int]]:
    # Between two of these ends the same buffers have data.
    stops = sorted({len(buffer) for buffer in buffers} - {0})
    return list(zip([0, *stops], stops, strict=False))


def _xor(target: Bytes, sources: Sequence[Bytes]) -> None:
    if len(sources) < 2:
        target[:] = sources[0] if sources else 0
        return
    for start in range(0, len(target), _XOR_CHUNK_BYTES):
        chunk = slice(start, start + _XOR_CHUNK_BYTES)
        out = target[chunk]
        np.bitwise_xor(sources[0][chunk], sources[1][chunk], out=out)
        for source in sources[2:]:
            np.bitwise_xor(out, source[chunk], out=out)


def _check(targets: Sequence[Bytes], sources: Sequence[Bytes]) -> None:
    for buffer in (*targets, *sources):
        if buffer.dtype != np.uint8 or buffer.ndim != 1 or not buffer.flags.c_contiguous:
            raise ValueError(
                f"a buffer of {buffer.dtype} with shape {buffer.shape} and strides "
                f"{buffer.strides}: contiguous uint8 of one dimension is needed"
            )
    for number, target in enumerate(targets):
        if not target.flags.writeable:
            raise ValueError("a target is read-only: map its memory writable")
        if any(np.may_share_memory(target, other) for other in (*targets[:number], *sources)):
            raise ValueError("a target shares memory with another buffer: give it its own")
