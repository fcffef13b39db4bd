"""What ranks tell each other, and what a rank is seen to do, without a run."""

from datetime import timedelta
from pathlib import Path
from threading import Thread

import pytest
import torch.distributed as dist

from holdfast.liveness.answers import Answer, Exchange
from holdfast.liveness.watchdog import BUSY_BYTES_S, LONGEST_LOOK_S, Use

RANKS, SILENT = 6, 3
MOVED = round(BUSY_BYTES_S * LONGEST_LOOK_S)


def answer(rank: int) -> Answer:
    known = {"rank": rank, "host": f"host-{rank}", "pid": 1, "started": 1, "state": "running"}
    return known | {"step": 1, "at_s": 1.0, "own_s": 1.0, "groups": {}, "named": []}  # type: ignore[return-value]


def test_a_rank_that_never_answered_hides_no_answers_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=5))
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: Cloned(store))
    exchanges = []
    for rank in range(RANKS):
        (folder := tmp_path / str(rank)).mkdir()  # hosts share no folder
        exchanges.append(Exchange(folder, rank, RANKS))
        if rank != SILENT:
            exchanges[-1].publish(answer(rank))
    assert sorted(exchanges[0].others()) == [n for n in range(1, RANKS) if n != SILENT]
    exchanges[SILENT].publish(answer(SILENT))
    assert sorted(exchanges[0].others()) == [*range(1, RANKS)]


class Cloned:
    """A store whose clone is itself."""

    def __init__(self, store: dist.Store) -> None:
        self.clone = lambda: store


def test_what_the_watching_thread_reads_does_not_count_as_work(tmp_path: Path) -> None:
    path = tmp_path / "read"
    path.write_bytes(bytes(4 * MOVED))
    before = Use.now(late=True)
    path.read_bytes()
    assert Use.now(late=True).moved_bytes - before.moved_bytes < MOVED
    other = Thread(target=path.read_bytes)
    other.start()
    other.join()
    assert Use.now(late=True).moved_bytes - before.moved_bytes >= 4 * MOVED
