"""How often to snapshot: measured, chosen by the planner, and the same on all ranks."""

import random
from pathlib import Path
from typing import Any

import pytest
from dtensor_trainer import paced
from gloo_ranks import Ranks
from hypothesis import example, given
from hypothesis import strategies as st
from snapshot_trainer import Tiny
from snapshot_waits import together
from torch import distributed as dist

from holdfast.errors import ConfigError, SmpUnavailable
from holdfast.planner import every
from holdfast.snapshot.client import pacing
from holdfast.snapshot.client.pacing import Board, Pacing, Sample, choose

FIRST_CHOICE = pacing.SETTLING_CALLS + pacing.WINDOW_CALLS + 1


class Training:
    """A rank whose steps and snapshots take times that are set; no time passes."""

    def __init__(self, board: Any = None, decides: bool = True, mttf_s: float = 1e4) -> None:
        self.now_s = self.stalled_s = 0.0
        self.step_s, self.stall_s, self.slowdown_s, self.noise_s = 1.0, 0.1, 0.05, 0.0
        self.pacing = Pacing(mttf_s, board, decides, lambda: self.now_s)
        self.chance = random.Random(decides)

    def run(self, steps: range) -> list[int]:
        """Train; the steps after which there was a snapshot."""
        taken = []
        for step in steps:
            saves = step % self.pacing.every(step, self.stalled_s) == 0
            self.now_s += self.step_s + self.chance.random() * self.noise_s
            if saves:
                taken.append(step)
                self.now_s += self.stall_s + self.slowdown_s
                self.stalled_s += self.stall_s
        return taken


def test_the_interval_is_the_planners_for_what_was_measured() -> None:
    run = Training()
    taken = run.run(range(1, 400))
    best = every(0.15, 1.0, 1e4)
    assert best == 55
    assert run.pacing.choice.every == best
    assert run.pacing.choice.save_s == pytest.approx(0.15)
    measured = [step for step in taken if step <= FIRST_CHOICE]
    assert measured == list(range(2, FIRST_CHOICE + 1, 2))
    assert [step for step in taken if FIRST_CHOICE < step <= 121] == [55, 110]


@given(st.floats(0, 1), st.floats(0, 1), st.floats(1e-3, 10), st.floats(1, 1e7))
@example(0.0, 0.0, 1.0, 1e4)
def test_stall_and_slowdown_both_count(
    stall_s: float, slowdown_s: float, step_s: float, mttf_s: float
) -> None:
    samples = [Sample(step_s, 0.0, False), Sample(step_s + stall_s + slowdown_s, stall_s, True)]
    choice = choose(samples * 4, mttf_s)
    assert choice.save_s == pytest.approx(stall_s + slowdown_s, abs=1e-12)
    assert choice.every == every(choice.save_s, step_s, mttf_s)
    for sample in samples:
        assert choose([sample] * 8, mttf_s) is None
    hidden_by_noise = choose([samples[0], Sample(0.9 * step_s, 0.2, True)], mttf_s)
    assert hidden_by_noise.save_s == 0.2


def test_it_is_measured_again_and_follows_what_changed() -> None:
    run = Training()
    run.run(range(1, 60))
    before = run.pacing.choice.every
    run.stall_s = 1.5
    taken = run.run(range(60, 3000))
    assert (before, run.pacing.choice.every) == (55, every(1.55, 1.0, 1e4))
    assert len(taken) < 200


def test_ranks_that_measure_differently_take_the_same_steps() -> None:
    board = Board(dist.HashStore(), "ranks")
    first, other, alone = Training(board), Training(board, decides=False), Training()
    first.noise_s, other.noise_s = 0.2, 0.7
    for differently in (other, alone):
        differently.step_s, differently.stall_s = 3.0, 0.0
    taken: list[list[int]] = [[], [], []]
    for step in range(1, 2000):
        for each, run in zip(taken, (first, other, alone), strict=True):
            each += run.run(range(step, step + 1))
    assert taken[0] == taken[1] != taken[2]  # who does not agree takes others
    assert first.pacing.choice == other.pacing.choice
    assert first.pacing.status()["rounds"] == other.pacing.status()["rounds"] > 2


def test_a_roll_back_does_not_count_as_a_step_and_keeps_ranks_alike() -> None:
    board = Board(dist.HashStore(), "ranks")
    ranks = [Training(board, decides=rank == 0) for rank in range(2)]
    for steps in (range(1, 15), range(9, 300)):
        for step in steps:
            assert len({tuple(rank.run(range(step, step + 1))) for rank in ranks}) == 1
        for rank in ranks:
            rank.now_s += 1000.0
    assert ranks[1].pacing.choice.step_s == pytest.approx(1.0)


def test_where_begin_is_not_called_at_every_step_nothing_is_chosen() -> None:
    run = Training()
    for step in range(0, 1000, 10):
        run.run(range(step, step + 1))
    assert run.pacing.choice.every == pacing.MEASURING


def stores(kind: str, folder: Path) -> list[Any]:
    """The same store as two ranks have it."""
    if kind == "tcp":
        first = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return [first, dist.TCPStore("127.0.0.1", first.port, is_master=False)]
    if kind == "hash":
        return [dist.HashStore()] * 2
    return [dist.FileStore(str(folder / "store"), 2) for _ in range(2)]


@pytest.mark.parametrize("kind", ["file", "hash", "tcp"])
def test_what_was_posted_first_is_what_every_rank_reads(kind: str, tmp_path: Path) -> None:
    ranks = stores(kind, tmp_path)
    first, other = (Board(store, "a") for store in ranks)
    read, _ = together(lambda: other.read("0"), lambda: first.post("0", "one"))
    first.post("0", "two")
    Board(ranks[0], "b").post("0", "three")
    assert (read, first.read("0"), other.read("0")) == ("one", "one", "one")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"interval": 5}, "interval=5, .* a number of steps is every="),
        ({"interval": "often"}, "must be 'auto'"),
        ({"mttf_s": 60.0}, "be left out together with mttf_s"),
        ({"interval": "auto", "every": 3}, "every=3 with interval='auto': give one of them"),
        ({"interval": "auto", "mttf_s": 0.0}, "mttf_s=0.0: must be a finite number"),
        ({"interval": "auto", "mttf_s": float("nan")}, "mttf_s=nan"),
        ({"interval": "auto", "mttf_s": float("inf")}, "mttf_s=inf"),
    ],
)
def test_bad_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pacing.of(**{"interval": None, "every": 1, "mttf_s": None, **options})


def test_several_ranks_need_a_process_group_and_that_rank_0_leaves_an_interval_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"with 2 ranks: .* call init_process_group first"):
        pacing.of("auto", 1, None)
    monkeypatch.setenv("HOLDFAST_TIMEOUT_S", "0.2")
    with pytest.raises(SmpUnavailable, match=r"rank 0 left no snapshot interval .* within 0.2 s"):
        Board(dist.HashStore(), "x").read("0")


@pytest.mark.parametrize(
    ("ranks", "hours"), [(1, 24.0), (2000, 24.0), (16_384, 54 * 24 / 419), (10**6, 0.0507)]
)
def test_the_assumed_mean_time_to_a_failure(ranks: int, hours: float) -> None:
    assert pacing.assumed_mttf_s(ranks) / 3600 == pytest.approx(hours, rel=1e-3)


def test_snapshots_pace_themselves_and_say_so(run_dir: Path) -> None:
    run = Tiny()
    with run.snapshots(run_dir, interval="auto", mttf_s=1e9) as snapshots:
        run.train(range(1, FIRST_CHOICE), snapshots)
        assert snapshots.every == pacing.MEASURING
        run.train(range(FIRST_CHOICE, FIRST_CHOICE + 30), snapshots)
        told = snapshots.status()["interval"]
        assert told["auto"]
        assert told["every"] == snapshots.every > 30
        assert told["every"] == every(told["save_s"], told["step_s"], 1e9)
        assert snapshots.wait_committed() == FIRST_CHOICE - 1
    with run.snapshots(run_dir, every=7) as snapshots:
        assert snapshots.status()["interval"] == {"auto": False, "every": 7}


@pytest.mark.processes
@pytest.mark.representative
def test_real_ranks_agree_on_the_interval_without_a_collective(
    tmp_path: Path, run_dir: Path
) -> None:
    first, other = Ranks(tmp_path / "ranks", 2, paced, run_dir, FIRST_CHOICE + 5).finished()
    assert first == other
    held = [line["every"] for line in first[:-1]]
    assert set(held[:FIRST_CHOICE]) == {pacing.MEASURING}
    assert set(held[FIRST_CHOICE:]) == {first[-1]["interval"]["every"]}
    assert held[-1] > 1000
    assert first[-1]["committed"] == FIRST_CHOICE - 1
