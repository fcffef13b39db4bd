"""Keys and values of the positions that attention has seen, for decoding."""

import torch


class Cache:
    """What one attention layer has seen of one batch of sequences; starts empty.

    Pass it to every call of ``Attention``: it grows by the new positions. Keys are stored as they
    enter the scores, rotated. Nothing in it has a gradient.
    """

    def __init__(self) -> None:
        self._past: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def past(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Keys [batch · kv_heads, d, positions] and values [batch · kv_heads, positions, d]."""
        return self._past

    def __len__(self) -> int:
        """The number of positions."""
        return 0 if self._past is None else self._past[1].shape[1]

    def replace(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Hold these from now on."""
        self._past = keys.detach(), values.detach()
