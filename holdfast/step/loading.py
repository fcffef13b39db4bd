"""The batches of the steps that remain after a restore, each once and in order."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, islice
from types import GeneratorType
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
)

from holdfast.errors import ConfigError
from holdfast.replay.made_batches import MadeBatch, opened
from holdfast.rng import rng_state, set_rng_state
from holdfast.snapshot.client.snapshots import Snapshots

_SAMPLERS = (SequentialSampler, RandomSampler, DistributedSampler)  # begin anew, and draw alike


class Batches:
    """A loader that continues at the step that was restored.

    Opening a loader draws random numbers: torch's ``DataLoader`` draws the seed of its workers. The
    run that is continued drew them when it began the pass, so that they are taken back after a
    resumed loader was opened. What a batch itself draws (random transforms) is not.

    Args:
        loader: The loader.
        snapshots: The snapshots of the run, if there are any.
        steps_done: Returns the number of steps done so far.
        restored: True if the position of the loader was just restored with the snapshots.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        snapshots: Snapshots | None,
        steps_done: Callable[[], int],
        *,
        restored: bool,
    ) -> None:
        self._loader, self._steps_done = loader, steps_done
        self._training, self._saved = None, False  # counts batches for the snapshots
        if snapshots is not None:
            self._saved = loader is snapshots.loader and "loader" in snapshots.parts
            self._training = None if self._saved else snapshots.training
        self._resumes = restored if self._saved else steps_done() > 0
        self._drawn = 0  # batches of the present pass
        self._began: Any = None  # the random state with which it began, if this is known
        if self._training is not None:
            self._training.note_loader(loader)

    def until(self, steps: int) -> Iterator[Any]:
        """Yield batches until so many steps are done.

        Raises:
            ConfigError: The loader yields no batch.
            UncorrectableFault: A batch with digests has changed, and is not made again.
        """
        while self._steps_done() < steps:
            # A pass that is resumed at its end has no batch left.
            empty = not self._resumes
            for batch in self._pass():
                empty = False
                self._count()
                if isinstance(batch, MadeBatch):
                    batch = opened(batch, partial(self._again, self._drawn - 1, self._began))
                yield batch
                if self._steps_done() >= steps:
                    return
            if empty:
                raise ConfigError(
                    f"the loader {type(self._loader).__name__} yields no batch at step "
                    f"{self._steps_done()} of {steps}: give one with data that can be iterated "
                    "again"
                )

    def _pass(self) -> Iterator[Any]:
        resumes, self._resumes = self._resumes, False
        if resumes:
            return self._reopened() if self._saved else self._skipped()
        self._drawn, self._began = 0, rng_state()
        if self._training is not None:
            self._training.epoch = (0, self._began)
        return iter(self._loader)

    def _again(self, number: int, began: Any) -> MadeBatch | None:
        """Make a batch of a pass that began with this random state anew, in a pass beside it."""
        loader: Any = self._loader
        plain = type(loader) is DataLoader and type(loader.batch_sampler) is BatchSampler
        if began is None or not plain or type(loader.sampler) not in _SAMPLERS:
            return None
        if loader.generator or getattr(loader.sampler, "generator", 0) or loader.persistent_workers:
            return None
        now = rng_state()
        set_rng_state(began)
        try:
            return next(islice(iter(loader), number, None), None)
        finally:
            set_rng_state(now)

    def _count(self) -> None:
        """Count a batch, so that a snapshot knows how many a restart has to skip."""
        self._drawn += 1
        if self._training is not None and self._training.epoch is not None:
            self._training.epoch = (self._drawn, self._training.epoch[1])

    def _reopened(self) -> Iterator[Any]:
        """Open a loader that knows its position itself."""
        now = rng_state()
        batches = iter(self._loader)
        if isinstance(batches, GeneratorType):
            # Its first batch opens it.
            batches = chain(list(islice(batches, 1)), batches)
        set_rng_state(now)
        return batches

    def _skipped(self) -> Iterator[Any]:
        """Begin the present pass again, so that it shuffles alike, and skip what was drawn."""
        now = rng_state()
        epoch = self._training.epoch if self._training is not None else None
        left, before = epoch or (self._steps_done(), None)
        if self._training is not None:
            left = self._training.batches_drawn(left)
        if before is not None:
            set_rng_state(before)
        self._began = before
        self._drawn, skipped, batches = left, -1, iter(self._loader)
        while left and skipped:
            skipped = sum(1 for _ in islice(batches, left))
            left -= skipped
            if left:
                batches = iter(self._loader)
        set_rng_state(now)
        return batches
