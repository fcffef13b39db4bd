"""The checksums of rows in plain torch: the oracle of ``csrc/embedding_bag/rows.cpp``."""

from functools import cache

import torch

from holdfast.abft.embedding_bag.layout import MAX_DIM, Kind, Layout

_CASTAGNOLI = 0x82F63B78
_MASK = (1 << 64) - 1


def _split_mix(state: int) -> int:
    z = state
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
    return z ^ (z >> 31)


@cache
def _pattern() -> torch.Tensor:
    """Draw the signs of all columns, from SplitMix64 of their numbers; int64."""
    gamma = 0x9E3779B97F4A7C15
    states = [_split_mix((column + 1) * gamma & _MASK) & 1 for column in range(MAX_DIM)]
    return torch.tensor(states) * 2 - 1


@cache
def signs(dim: int) -> torch.Tensor:
    """Return the columns' weights, ±1, fp64 [dim]: random, but never of sum 0."""
    weights = _pattern()[:dim].double().clone()
    if weights.sum() == 0:
        weights[0] = -weights[0]
    return weights


@cache
def _crc_table() -> torch.Tensor:
    crcs = torch.arange(256)
    for _ in range(8):
        crcs = (crcs >> 1) ^ (crcs & 1) * _CASTAGNOLI
    return crcs


def crc32c(start: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """Compute the CRC-32C, not inverted, of rows uint8 [rows, bytes] after ``start`` [rows]."""
    crc, table = start.clone(), _crc_table()
    for column in data.long().unbind(-1):
        crc = (crc >> 8) ^ table[(crc ^ column) & 255]
    return crc


def codes(elements: torch.Tensor, dim: int, kind: Kind) -> torch.Tensor:
    """Unpack the codes in uint8 [rows, bytes] to fp64 [rows, dim]."""
    if kind.bits == 4:
        elements = torch.stack((elements & 15, elements >> 4), -1).flatten(-2)[:, :dim]
    return elements.double()


def _bytes_of(values: torch.Tensor, count: int) -> torch.Tensor:
    """Return the low bytes of int64 values [rows], little-endian, as uint8 [rows, count]."""
    return torch.stack([(values >> 8 * i & 255).to(torch.uint8) for i in range(count)], -1)


def _exact(bits: torch.Tensor) -> torch.Tensor:
    """Convert fp32 bits, int32, to fp64, whether or not denormals are flushed."""
    magnitudes = bits & 0x7FFFFFFF
    normal = magnitudes.view(torch.float32).double()
    size = torch.where(magnitudes < 1 << 23, magnitudes.double() * 2.0**-149, normal)
    return torch.where(bits < 0, -size, size)


def _guard(guarded: torch.Tensor) -> torch.Tensor:
    """Return one byte of the CRC of uint8 [rows, 12], int64 [rows]."""
    return crc32c(torch.zeros(len(guarded), dtype=torch.int64), guarded) & 255


def checksums(data: torch.Tensor, dim: int, kind: Kind, numbers: torch.Tensor) -> torch.Tensor:
    """Compute the checksums that rows should carry, uint8 [rows, checksums].

    Args:
        data: uint8 [rows, stride].
        dim: elements of a row.
        kind: of the elements.
        numbers: int64 [rows], their numbers in the table, which the CRC begins with.
    """
    layout = Layout.of(kind, dim)
    payload, elements = data[:, : layout.payload], data[:, : layout.elements]
    if kind.dtype is not None:
        bits = elements.contiguous().view(kind.dtype).float().view(torch.int32)
        magnitudes = bits & 0x7FFFFFFF
        # In the order of the columns, as the native core adds them.
        sums = torch.zeros(len(data), dtype=torch.float64)
        for column in (_exact(bits) * signs(dim)).unbind(-1):
            sums = sums + column
        peak = magnitudes.amax(-1).long()
        peak = (peak.clamp(max=0x7F7FFF00) + 255) & ~255  # rounded up, but not to infinity
        sum_bytes = sums[:, None].contiguous().view(torch.uint8)
        guarded = torch.cat((sum_bytes, _bytes_of(peak >> 8, 4)), -1)
        parts = [sum_bytes, _bytes_of(peak | _guard(guarded), 4)]
    else:
        total = (codes(elements, dim, kind) @ signs(dim)).long() & 0xFFFFFF
        parameters = torch.zeros(len(data), 8, dtype=torch.uint8)
        parameters[:, : layout.parameters] = payload[:, layout.elements :]
        guarded = torch.cat((parameters, _bytes_of(total, 4)), -1)
        parts = [_bytes_of(total | _guard(guarded) << 24, 4)]
    covered = torch.cat((payload, *parts), -1)
    return torch.cat((*parts, _bytes_of(crc32c(numbers & 0xFFFFFFFF, covered), 4)), -1)


def _part(
    data: torch.Tensor, dim: int, kind: Kind, first: int, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return rows, the checksums they carry (a view) and those they should carry."""
    layout = Layout.of(kind, dim)
    rows = data[first : first + count]
    stored = rows[:, layout.payload : layout.used]
    return rows, stored, checksums(rows, dim, kind, torch.arange(first, first + count))


def encode(data: torch.Tensor, dim: int, kind: Kind, first: int, count: int) -> None:
    """Recompute the checksums of rows."""
    _, stored, right = _part(data, dim, kind, first, count)
    stored.copy_(right)


def rotten(data: torch.Tensor, dim: int, kind: Kind, first: int, count: int) -> list[int]:
    """List the rows whose bytes and checksums contradict each other."""
    _, stored, right = _part(data, dim, kind, first, count)
    found = (stored != right).any(-1).nonzero().flatten() + first
    return [int(row) for row in found]


def correct(data: torch.Tensor, dim: int, kind: Kind, row: int) -> int:
    """Flip the one wrong bit of a row back, by trying each; its number, −1 if there is none."""
    bits = 8 * Layout.of(kind, dim).used
    flipped = data[row].repeat(bits, 1)
    bit = torch.arange(bits)
    flipped[bit, bit // 8] ^= (1 << bit % 8).to(torch.uint8)
    layout = Layout.of(kind, dim)
    right = checksums(flipped, dim, kind, torch.full((bits,), row))
    fits = (flipped[:, layout.payload : layout.used] == right).all(-1).nonzero().flatten()
    if len(fits) != 1:
        return -1
    data[row] = flipped[fits[0]]
    return int(fits[0])
