"""The cache of keys and values for decoding."""

import torch

from holdfast.abft.attention.section_cache import Growing


class Cache:
    """Keys and values that one attention layer has seen of one batch of sequences; starts empty.

    Pass it to every call of ``Attention``, which appends the new positions. Keys are stored after
    rotary embedding. Nothing in it has a gradient.

    Guarantees: checksums of the stored keys and values are extended by each call. A call detects a
    change in memory (event ``operand_fault``) that moves a row of the scores or the context by more
    than twice its threshold, and repairs a damaged checksum (``checksum_fault``). Not covered:
    positions stored while their section was not checked and changed before the next check.
    """

    def __init__(self) -> None:
        self._past: tuple[torch.Tensor, torch.Tensor] | None = None
        self._checksums = Growing()

    @property
    def past(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Keys [batch · kv_heads, d, positions] and values [batch · kv_heads, positions, d]."""
        return self._past

    def __len__(self) -> int:
        """Return the number of token positions that the cache stores."""
        return 0 if self._past is None else self._past[1].shape[1]

    def growing(self) -> Growing:
        """Return the checksums that the next call extends and then stores with ``replace``."""
        return self._checksums.next()

    def replace(self, keys: torch.Tensor, values: torch.Tensor, checksums: Growing) -> None:
        """Replace the stored keys, values and checksums."""
        self._past = keys.detach(), values.detach()
        self._checksums = checksums
