"""The history of devices over several runs: equal devices stay unsuspected, a bad one is named."""

import random
from pathlib import Path

import pytest
from report_runs import corrected, event, struck

from holdfast.errors import ConfigError
from holdfast.events import LEDGER_NAME, Event, EventKind, Ledger
from holdfast.report.devices import histories


def _run(run_dir: Path, events: list[Event], run_id: str = "") -> Path:
    run_dir.mkdir(exist_ok=True)
    ledger = Ledger(run_dir / LEDGER_NAME, run_id=run_id)
    ledger.append(*events)
    ledger.close()
    return run_dir


def _faults(ranks: list[int]) -> list[Event]:
    return [corrected(n, step=n, rank=rank) for n, rank in enumerate(ranks)]


def test_a_device_that_is_slightly_bad_in_each_run_stands_out_over_all_of_them(tmp_path):
    runs = [_run(tmp_path / str(n), _faults([2, 2, 0, 2, 1, 3])) for n in range(6)]
    alone = histories(runs[:1])
    assert not any(device.stands_out for device in alone)
    worst, *others = histories(runs)
    assert (worst.host, worst.place, worst.faults, worst.of, worst.runs) == ("node-a", 2, 18, 36, 6)
    assert worst.stands_out
    assert not any(device.stands_out for device in others)


def test_equal_devices_are_accused_in_few_of_many_histories(tmp_path):
    generator, accused = random.Random(1), 0
    for trial in range(60):
        (folder := tmp_path / str(trial)).mkdir()
        ranks = [[generator.randrange(4) for _ in range(10)] for _ in range(2)]
        runs = [_run(folder / str(n), _faults([*each, 3])) for n, each in enumerate(ranks)]
        accused += any(device.stands_out for device in histories(runs))
    assert accused <= 8  # P(X > 8) < 0.01 with X ~ Binomial(60, 0.05)


def test_injected_faults_accuse_nobody_and_a_named_device_is_listed_first(tmp_path):
    injected = [e for n in range(9) for e in (struck(n, step=n, rank=1), corrected(n, n, 1))]
    named = [event(EventKind.EVICT, 50.0, step=9, rank=0)]
    first, second = histories([_run(tmp_path / "run", [*injected, *named])])
    assert (first.place, first.evicted, first.stands_out) == (0, 1, True)
    assert (second.faults, second.stands_out) == (0, False)


def test_ledgers_of_earlier_runs_in_the_same_directory_count_too(tmp_path):
    run_dir = _run(tmp_path / "run", _faults([1, 0]), run_id="first")
    _run(run_dir, _faults([1, 1, 0]), run_id="second")
    assert [(each.place, each.runs, each.faults) for each in histories([run_dir])] == [
        (1, 2, 3),
        (0, 2, 2),
    ]


def test_a_directory_without_a_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="holds no run: give the directory of one"):
        histories([tmp_path])
