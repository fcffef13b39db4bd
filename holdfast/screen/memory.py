"""Workloads on memory: patterns that are written and read back, and the digest."""

from collections.abc import Iterable, Iterator
from itertools import count, repeat

import numpy as np
import torch

from holdfast.digest.tensors import tensor_digest
from holdfast.screen.difference import Parts
from holdfast.screen.emulation import pass_site
from holdfast.screen.job import Job, Scale, drawn

WORD_BITS = 64
SHIFTS = 4  # walking patterns written in one run; the next run continues with the following ones
_MULTIPLIER = 0x5851F42D4C957F2D


def memory_jobs(scale: Scale, device: torch.device, memory_bytes: int) -> list[Job]:
    """Make the digest workload and those of walking ones and random patterns."""
    blocks = max(1, memory_bytes // scale.block_bytes)
    words = torch.zeros((blocks, scale.block_bytes // 8), dtype=torch.int64, device=device)
    return [_digest_job(scale, device), _walking_job(words), _random_job(words)]


def _random_words(op: str, device: torch.device, count: int) -> list[list[torch.Tensor]]:
    words = torch.empty(count, dtype=torch.int64)
    return drawn(op, device, lambda source: [words.random_(generator=source).clone()])


def _digest_job(scale: Scale, device: torch.device) -> Job:
    """Make the workload that digests random bytes (``holdfast.digest``)."""

    def compute(words: torch.Tensor) -> Parts:
        value = _digest_of(words)
        pass_site("digest", value)
        return {"digest": value}

    inputs = _random_words("digest", device, scale.block_bytes // 8)
    return Job("digest", compute, inputs, float(scale.block_bytes), "B")


def _digest_of(tensor: torch.Tensor) -> torch.Tensor:
    raw = bytearray.fromhex(tensor_digest(tensor))
    return torch.from_numpy(np.frombuffer(raw, dtype=np.uint8))


def _walking_job(words: torch.Tensor) -> Job:
    """Make the workload of walking ones: one bit set in each word, and the complements."""
    ones = torch.tensor([_signed(1 << bit) for bit in range(WORD_BITS)], device=words.device)
    lane = ones.repeat(words.shape[1] // WORD_BITS)
    turns = count()

    def compute(mask: torch.Tensor) -> Parts:
        wrong = torch.zeros_like(lane)
        for _ in range(SHIFTS):
            pattern = lane.roll(next(turns) % WORD_BITS) ^ mask
            words.copy_(pattern.expand_as(words))
            pass_site("memory.walking", words)
            _compare(words, repeat(pattern, len(words)), wrong)
        return {"readback": wrong}

    masks = [[torch.tensor(mask, device=words.device)] for mask in (-1, 0)]
    work, expected = 2.0 * SHIFTS * words.numel() * 8, {"readback": torch.zeros_like(lane)}
    return Job("memory.walking", compute, masks, work, "B", expected)


def _random_job(words: torch.Tensor) -> Job:
    """Make the workload of random words, different in every block, compared and digested."""

    def compute(seed: torch.Tensor) -> Parts:
        wrong = torch.zeros_like(words[0])
        for row, pattern in zip(words, _blocks(seed, len(words)), strict=True):
            row.copy_(pattern)
        pass_site("memory.random", words)
        _compare(words, _blocks(seed, len(words)), wrong)
        return {"readback": wrong, "digest": _digest_of(words)}

    seeds = _random_words("memory.random", words.device, words.shape[1])
    expected = {"readback": torch.zeros_like(words[0])}
    return Job("memory.random", compute, seeds, 3.0 * words.numel() * 8, "B", expected)


def _blocks(seed: torch.Tensor, count: int) -> Iterator[torch.Tensor]:
    for block in range(count):
        yield seed ^ _signed((block + 1) * _MULTIPLIER % (1 << WORD_BITS))


def _compare(words: torch.Tensor, patterns: Iterable[torch.Tensor], wrong: torch.Tensor) -> None:
    """Collect in ``wrong`` the bits in which any block was not read as it was written."""
    for row, pattern in zip(words, patterns, strict=True):
        wrong |= row ^ pattern


def _signed(word: int) -> int:
    return word - (1 << WORD_BITS) if word >> (WORD_BITS - 1) else word
