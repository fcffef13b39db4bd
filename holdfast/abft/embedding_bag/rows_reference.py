"""The checksums of rows in plain torch, with which ``csrc/embedding_bag/rows.cpp`` is compared."""

from functools import cache

import numpy as np
import torch

from holdfast.abft.checksums.weights import splitmix64
from holdfast.abft.embedding_bag.layout import MAX_DIM, Kind, Layout

CHUNK_ROWS = 65536  # rows that are copied and widened at once
_CASTAGNOLI = 0x82F63B78


@cache
def _pattern() -> torch.Tensor:
    """Draw the signs of all columns from SplitMix64 of their numbers, int64 [MAX_DIM]."""
    bits = splitmix64(np.arange(MAX_DIM, dtype=np.uint64)) & np.uint64(1)
    return torch.from_numpy(bits.astype(np.int64)) * 2 - 1


@cache
def signs(dim: int) -> torch.Tensor:
    """Return the random weights ±1 of the columns, fp64 [dim], whose sum is never 0."""
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
    """Compute the CRC-32C, not inverted, of rows uint8 [rows, bytes] from initial values [rows]."""
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
    """Convert the bits of fp32 values, int32, to fp64, exactly even if denormals are flushed."""
    magnitudes = bits & 0x7FFFFFFF
    normal = magnitudes.view(torch.float32).double()
    size = torch.where(magnitudes < 1 << 23, magnitudes.double() * 2.0**-149, normal)
    return torch.where(bits < 0, -size, size)


def _guard(guarded: torch.Tensor) -> torch.Tensor:
    """Return one byte of the CRC of uint8 [rows, 12], int64 [rows]."""
    return crc32c(torch.zeros(len(guarded), dtype=torch.int64), guarded) & 255


@cache
def guard_tables() -> torch.Tensor:
    """Return the guard of 12 bytes that are 0 but for one, uint8 [position, value of the byte].

    A guard is linear: the exclusive or of those of its bytes.
    """
    alone = torch.eye(12, dtype=torch.int64)[:, None] * torch.arange(256)[None, :, None]
    return _guard(alone.view(-1, 12)).view(12, 256).to(torch.uint8)


def checksums(data: torch.Tensor, dim: int, kind: Kind, numbers: torch.Tensor) -> torch.Tensor:
    """Compute the checksums of rows uint8 [rows, stride], uint8 [rows, checksums].

    ``numbers``, int64 [rows], are the rows' numbers in the table, with which their CRCs begin.
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
    """Return rows, their stored checksums (a view) and, on CPU, those of their content."""
    layout = Layout.of(kind, dim)
    rows = data[first : first + count]
    stored = rows[:, layout.payload : layout.used]
    return rows, stored, checksums(rows.cpu(), dim, kind, torch.arange(first, first + count))


def encode(data: torch.Tensor, dim: int, kind: Kind, first: int, count: int) -> None:
    """Recompute the checksums of rows."""
    _, stored, right = _part(data, dim, kind, first, count)
    stored.copy_(right)


def rotten(data: torch.Tensor, dim: int, kind: Kind, first: int, count: int) -> list[int]:
    """List the rows whose bytes and checksums contradict each other."""
    found: list[int] = []
    for start in range(first, first + count, CHUNK_ROWS):
        part = min(CHUNK_ROWS, first + count - start)
        _, stored, right = _part(data, dim, kind, start, part)
        found += ((stored.cpu() != right).any(-1).nonzero().flatten() + start).tolist()
    return found


def correct(data: torch.Tensor, dim: int, kind: Kind, row: int) -> list[int]:
    """Flip back the bits of a row's one damaged byte; return their numbers, none if it has none."""
    used = Layout.of(kind, dim).used
    stored = data[row : row + 1].cpu()
    covered, crc = stored[:, : used - 4], stored[0, used - 4 : used]
    right = int(crc32c(torch.tensor([row & 0xFFFFFFFF]), covered))
    change = right ^ int.from_bytes(crc.numpy().tobytes(), "little")
    for byte, bits in _flips_behind(change, used - 4):
        data[row, byte] ^= bits
        if not rotten(data, dim, kind, row, 1):
            return [8 * byte + bit for bit in range(8) if bits >> bit & 1]
        data[row, byte] ^= bits
    return []


def _flips_behind(change: int, count: int) -> list[tuple[int, int]]:
    """List flips (byte, bits) in ``count`` bytes or their CRC that change the CRC by ``change``."""
    found: list[tuple[int, int]] = []
    effect = _crc_table()
    for byte in reversed(range(count)):
        found += [(byte, bits) for bits in (effect == change).nonzero().flatten().tolist()]
        effect = (effect >> 8) ^ _crc_table()[effect & 255]
    of_crc = change.to_bytes(4, "little")
    if sum(map(bool, of_crc)) == 1:
        found += [(count + i, bits) for i, bits in enumerate(of_crc) if bits]
    return sorted((each for each in found if each[1]), key=lambda each: each[1].bit_count())
