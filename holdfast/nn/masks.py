"""Attention masks, which are combined into one bool mask and one additive mask."""

from typing import NamedTuple

import torch


class Positions(NamedTuple):
    """Positions in a sequence: ``queries`` of them from ``first`` on, ``keys`` from 0 on."""

    first: int
    queries: int
    keys: int

    def distance(self) -> torch.Tensor:
        """Return the distance of each key behind each query, int64 [queries, keys]."""
        query = torch.arange(self.first, self.first + self.queries)
        return query[:, None] - torch.arange(self.keys)


def structural(at: Positions, causal: bool, window: int | None) -> torch.Tensor | None:
    """Return the causal and window mask, bool [queries, keys]; True blocks a key."""
    last = at.first + at.queries - 1
    ahead = causal and at.keys - 1 > at.first
    beyond = window is not None and (last >= window or (not causal and at.keys > window + at.first))
    if not (ahead or beyond):
        return None
    distance = at.distance()
    blocked = distance < 0 if causal else torch.zeros_like(distance, dtype=torch.bool)
    return blocked if window is None else blocked | (distance.abs() >= window)


def alibi_slopes(heads: int) -> torch.Tensor:
    """Return ALiBi slopes 2^(−8 i / n), fp64 [n]; interpolated if n is not a power of two.

    Source: Press, Smith and Lewis, Train Short, Test Long, section 3.
    """
    whole = 1 << (heads.bit_length() - 1)
    # Python's powers are the same on every processor; torch's vectors differ by instruction set.
    slopes = [2.0 ** (-8.0 / whole * i) for i in range(1, whole + 1)]
    between = [2.0 ** (-4.0 / whole * i) for i in range(1, 2 * (heads - whole), 2)]
    return torch.tensor(slopes + between, dtype=torch.float64)


def alibi(at: Positions, slopes: torch.Tensor | int, dtype: torch.dtype) -> torch.Tensor:
    """Return minus slope times distance, [.., heads, queries, keys]; a number: that many heads."""
    slopes = alibi_slopes(slopes) if isinstance(slopes, int) else slopes
    return (-slopes[..., None, None] * at.distance().abs().to(slopes.device)).to(dtype)


def scores_mask(
    mask: torch.Tensor | None, batch: int, heads: int, at: Positions, dtype: torch.dtype
) -> torch.Tensor | None:
    """Check the caller's mask; make it broadcastable to [batch, heads, queries, keys].

    Raises:
        TypeError: The mask is neither bool nor of ``dtype``. ValueError: Its shape is wrong.
    """
    if mask is None:
        return None
    _check_dtype("mask", mask, dtype)
    own = (at.queries, at.keys)
    shape = mask.shape
    if mask.dim() == 3 and shape == (batch * heads, *own):
        mask = mask.view(batch, heads, *own)
    fits = mask.dim() == 4 and all(
        size in (1, full) for size, full in zip(mask.shape, (batch, heads, *own), strict=True)
    )
    if not (fits or (mask.dim() == 2 and shape == own)):
        raise ValueError(
            f"mask has shape {tuple(shape)}: give {own} (queries, keys), "
            f"{(batch * heads, *own)}, or four dimensions that broadcast to "
            f"{(batch, heads, *own)}"
        )
    return mask


def padding_mask(
    mask: torch.Tensor | None, batch: int, keys: int, dtype: torch.dtype
) -> torch.Tensor | None:
    """Check the caller's key_padding_mask; return it as [batch, 1, 1, keys].

    Raises:
        TypeError: The mask is neither bool nor of ``dtype``. ValueError: Its shape is wrong.
    """
    if mask is None:
        return None
    _check_dtype("key_padding_mask", mask, dtype)
    if mask.shape != (batch, keys):
        raise ValueError(
            f"key_padding_mask has shape {tuple(mask.shape)}: give {(batch, keys)} (batch, keys, "
            "those in the cache included)"
        )
    return mask[:, None, None]


def combine(
    masks: list[torch.Tensor | None],
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Combine masks into a bool mask (True if any blocks) and the sum of additive ones, or None."""
    blocked: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    for mask in masks:
        if mask is None:
            continue
        if mask.dtype is not torch.bool:
            bias = mask if bias is None else bias + mask
            infinite = mask.detach().isneginf()
            if not infinite.any():
                continue
            mask = infinite
        blocked = mask if blocked is None else blocked | mask
    return bias, blocked


def _check_dtype(name: str, mask: torch.Tensor, dtype: torch.dtype) -> None:
    if mask.dtype not in (torch.bool, dtype):
        raise TypeError(
            f"{name} is {mask.dtype}: give bool, True where a key is to be ignored, or {dtype}, "
            "which is added to the scores"
        )
