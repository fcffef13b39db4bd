"""The cache of keys and values for decoding."""

import torch

from holdfast.abft.attention.section_cache import Growing


class Cache:
    """Keys and values that one attention layer has seen of one batch of sequences; starts empty.

    Pass it to every call of ``Attention``: it grows by the new positions. Keys are stored as they
    enter the scores, rotated. Nothing in it has a gradient.

    Guarantees: its checksums grow with it, so that a call encodes only the new positions, and finds
    what changed in memory since it was stored (``operand_fault``) where that moves a row of the
    scores or of the context by more than twice its threshold; a damaged checksum heals
    (``checksum_fault``). Not covered: positions that entered while their section was not due and
    changed before it was.
    """

    def __init__(self) -> None:
        self._past: tuple[torch.Tensor, torch.Tensor] | None = None
        self._checksums = Growing()

    @property
    def past(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Keys [batch · kv_heads, d, positions] and values [batch · kv_heads, positions, d]."""
        return self._past

    def __len__(self) -> int:
        """Return the number of positions."""
        return 0 if self._past is None else self._past[1].shape[1]

    def growing(self) -> Growing:
        """Return the checksums for one call, to be given back by ``replace``."""
        return self._checksums.next()

    def replace(self, keys: torch.Tensor, values: torch.Tensor, checksums: Growing) -> None:
        """Hold these from now on."""
        self._past = keys.detach(), values.detach()
        self._checksums = checksums
