"""What ranks tell each other when a step does not end: through files of the run and torch's store.

Files reach the ranks of a host, or all that share the run directory, and work while the store's
process is stopped. Every wait is bounded.
"""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypedDict

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

FOLDER = "ranks"
STORE_S = 5.0  # the longest wait for the store
ANSWER_S = 2 * STORE_S  # until a rank has read what others say and published its own answer


class Answer(TypedDict):
    """What a rank says about itself.

    ``state`` is ``stalled``, ``busy`` (it computes, reads or writes), ``paused``, ``running`` or
    ``ended``; ``step`` is the last one that has ended, and ``groups`` maps the names of process
    groups to the fields of ``verdict.Entered``. ``own_s`` is the time that it computes in a
    step, and ``started`` tells its process from a later one with the same id. ``named`` are the
    ranks that it has recorded as behind at the present step.
    """

    rank: int
    host: str
    pid: int
    started: int
    state: str
    step: int
    at_s: float
    own_s: float
    groups: Mapping[str, tuple[int, str, str, bool]]
    named: list[int]


class Exchange:
    """Publishes this rank's answer and reads those of the others, in a folder and in the store.

    Attributes:
        unreachable: Why the store did not answer last time; empty if it did.
    """

    def __init__(self, folder: Path, rank: int, world_size: int) -> None:
        self.unreachable = ""
        self._folder, self._rank, self._world_size = folder, rank, world_size
        self._store: Store | None = None
        if world_size > 1:
            try:
                # A connection of its own: a wait of the trainer's must not delay this thread.
                store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
                store.set_timeout(timedelta(seconds=STORE_S))
                self._store = PrefixStore("holdfast-ranks", store)
            except (RuntimeError, AttributeError) as error:
                self.unreachable = str(error)

    def publish(self, answer: Answer) -> None:
        """Replace what the others can read of this rank."""
        text = json.dumps(answer)
        with suppress(OSError):
            draft = self._folder / f".{self._rank}.{os.getpid()}.tmp"
            draft.write_text(text)
            draft.replace(self._folder / f"{self._rank}.json")
        if self._store is not None:
            self._asked(lambda store: store.set(str(self._rank), text))

    def others(self) -> dict[int, Answer]:
        """Return the newest answers of the other ranks, by rank."""
        texts: dict[str, str | bytes] = {}
        ranks = [str(rank) for rank in range(self._world_size) if rank != self._rank]
        for rank in ranks:
            with suppress(OSError):
                texts[rank] = (self._folder / f"{rank}.json").read_bytes()
        away = [rank for rank in ranks if rank not in texts]
        if self._store is not None and (there := self._published(away)):
            found_there = self._asked(lambda store: store.multi_get(there))
            texts |= zip(there, found_there or (), strict=False)
        found: dict[int, Answer] = {}
        for rank, text in texts.items():
            with suppress(ValueError):
                found[int(rank)] = json.loads(text)
        return found

    def _published(self, ranks: list[str]) -> list[str]:
        """Return those of which the store has an answer; reading another would wait for it."""
        if not ranks or self._asked(lambda store: store.check(ranks)):
            return ranks
        if len(ranks) == 1 or self.unreachable:
            return []
        half = len(ranks) // 2
        return self._published(ranks[:half]) + self._published(ranks[half:])

    def _asked(self, ask: Any) -> Any:
        try:
            found, self.unreachable = ask(self._store), ""
        except RuntimeError as error:
            self.unreachable = str(error).splitlines()[0]
            return None
        return found
