"""What is damaged while the model serves: one bit at a time, in arithmetic and in memory."""

import random
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from examples.dlrm.model import Dlrm
from examples.dlrm.requests import Request
from holdfast.inject import Gemm, arm, disarm
from holdfast.nn import Int8Linear

ARITHMETIC = {
    "int8_gemm": "accumulators of a linear layer",
    "embedding_bag": "a pooled bag",
    "bmm": "the interaction's product",
}
MEMORY = ("packed weights", "table rows")


class Strikes:
    """Flips a bit of a result now and then; any bit of any element, any of the products.

    Args:
        share: of the results that are struck.
        seed: of what is struck.
    """

    def __init__(self, share: float, seed: int) -> None:
        self.share, self.done = share, Counter[str]()
        self._random, self._lock = random.Random(seed), threading.Lock()

    def __call__(self, stage: str, site: str, gemm: Gemm, output: torch.Tensor | None) -> None:
        """See ``holdfast.inject.arm``."""
        name = next((what for op, what in ARITHMETIC.items() if f"/{op}" in site), None)
        if stage != "output" or output is None or name is None:
            return
        with self._lock:
            if self._random.random() >= self.share:
                return
            flip_random_bit(output, self._random)
            self.done[name] += 1


def flip_random_bit(tensor: torch.Tensor, chosen: random.Random) -> None:
    """Flip one bit of one element, in place, whatever its dtype."""
    raw = tensor.detach().view(torch.uint8)
    place = tuple(chosen.randrange(size) for size in raw.shape)
    raw[place] ^= 1 << chosen.randrange(8)


class Rot(threading.Thread):
    """Flips bits of packed weights and of table rows that are asked for, until it is stopped.

    Args:
        model: what is damaged; requests: whose rows.
        every_s: seconds between two flips; seed: of what is flipped.
    """

    def __init__(self, model: Dlrm, requests: Sequence[Request], every_s: float, seed: int) -> None:
        super().__init__(daemon=True)
        self.done = Counter[str]()
        self._model, self._requests, self._every_s = model, requests, every_s
        self._random, self._ended = random.Random(seed), threading.Event()
        self._layers = [module for module in model.modules() if isinstance(module, Int8Linear)]

    def run(self) -> None:
        """Damage until stopped."""
        while not self._ended.wait(self._every_s):
            name = self._random.choice(MEMORY)
            getattr(self, "_" + name.split()[1])()
            self.done[name] += 1

    def stop(self) -> None:
        """End, within the time between two flips and a little."""
        self._ended.set()
        self.join(self._every_s + 10)

    def _weights(self) -> None:
        flip_random_bit(self._random.choice(self._layers).weights.gemm.buffer, self._random)

    def _rows(self) -> None:
        number = self._random.randrange(len(self._model.tables))
        indices = self._random.choice(self._requests).bags[number][0]
        row = int(indices[self._random.randrange(len(indices))])
        flip_random_bit(self._model.tables[number].rows[row], self._random)


@contextmanager
def damaged(
    model: Dlrm, requests: Sequence[Request], *, share: float, every_s: float, seed: int
) -> Iterator[Counter[str]]:
    """Strike arithmetic and let memory rot meanwhile; yields what was done, by kind, at the end."""
    strikes, rot = Strikes(share, seed), Rot(model, requests, every_s, seed)
    total = Counter[str]()
    arm(strikes)
    rot.start()
    try:
        yield total
    finally:
        rot.stop()
        disarm()
        total.update(strikes.done + rot.done)
