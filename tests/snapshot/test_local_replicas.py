"""Replicas on one node divide their state: each rank keeps a part, and all of it comes back."""

from pathlib import Path
from typing import Any

import pytest
from gloo_ranks import Ranks
from replica_trainer import train

from holdfast.snapshot.disk import persist_format

pytestmark = pytest.mark.processes

STEPS, HANGS_AT = 6, 4


def digests(said: list[dict[str, Any]]) -> dict[int, str]:
    return {line["step"]: line["digest"] for line in said if "step" in line}


@pytest.mark.representative
def test_ranks_killed_in_the_middle_of_a_copy_go_on_from_the_parts_of_all(
    tmp_path: Path, run_dir: Path
) -> None:
    calm = Ranks(tmp_path / "calm", 3, train, tmp_path / "quiet", STEPS).finished()
    first = Ranks(tmp_path / "first", 3, train, run_dir, STEPS, HANGS_AT)
    first.until(lambda: all(HANGS_AT in digests(said) for said in first.heard()), "no step")
    first.kill_trainers()
    resumed = Ranks(tmp_path / "second", 3, train, run_dir, STEPS).finished()
    (start,) = {said[0]["start"] for said in resumed}
    assert start in (HANGS_AT - 1, HANGS_AT)
    for before, after in zip(calm, resumed, strict=True):
        wanted = digests(before)
        assert after[0]["before"] != after[0]["digest"] == wanted[start]
        assert digests(after) == {step: each for step, each in wanted.items() if step > start}
        assert (after[-1]["shared"], after[-1]["committed"]) == (True, STEPS)


def trained(folder: Path, run_dir: Path, ranks: int, *arguments: Any) -> list[dict[str, Any]]:
    """What each rank of a job said at its end."""
    return [
        said[-1] for said in Ranks(folder, ranks, train, run_dir, STEPS, -1, *arguments).finished()
    ]


def test_a_node_keeps_one_state_whatever_the_number_of_its_replicas(
    tmp_path: Path, run_dir: Path
) -> None:
    one = trained(tmp_path / "one", run_dir / "one", 1)[0]
    four = trained(tmp_path / "four", run_dir / "four", 4)
    rounding = 3 * 4 * 4 * 64
    assert not one["shared"]
    assert one["bytes"] / 2 < four[0]["bytes"] < one["bytes"] + rounding
    assert all(0 < said["copied"] < one["copied"] / 3 for said in four)


@pytest.mark.parametrize(("owner", "noticed"), [(0, 4), (1, 5)])
def test_replicas_that_differ_are_noticed_and_the_step_is_given_up(
    tmp_path: Path, run_dir: Path, owner: int, noticed: int
) -> None:
    # The weight is in the part of rank 0. With it there, rank 1 compares its own at step 5.
    ends = trained(tmp_path / "ranks", run_dir, 3, {}, (owner, 4))
    assert all(said["diverged"][0] == noticed for said in ends)
    found = [detail for kind, detail in ends[0]["events"] if kind == "replica_diverged"]
    assert found[0]["step"] == noticed
    assert [0, 1] in found[0]["ranks"] or owner == 0


@pytest.mark.parametrize("kind", ["alike at the start", "never alike"])
def test_trainings_of_their_own_are_kept_whole(tmp_path: Path, run_dir: Path, kind: str) -> None:
    own = {"averaged": False} if kind == "alike at the start" else {"averaged": False, "seed": None}
    ends = trained(tmp_path / "ranks", run_dir, 2, {}, None, True, own)
    for said in ends:
        assert (said["shared"], said["committed"], said["diverged"]) == (False, STEPS, [])
        assert said["events"] == []


def test_checkpoints_hold_what_replicas_have_in_common_once(tmp_path: Path, run_dir: Path) -> None:
    options = {"persist_dir": tmp_path / "disk", "persist_every": 100}
    ends = trained(tmp_path / "first", run_dir / "first", 3, options)
    folder = tmp_path / "disk" / f"step-{STEPS}"
    sizes = [(folder / f"rank-{rank}.safetensors").stat().st_size for rank in range(3)]
    assert sizes[1] == sizes[2] < sizes[0] / 2
    assert persist_format.damage_of(folder) == ""
    assert ends[0]["committed"] == STEPS
    job = Ranks(tmp_path / "again", 3, train, run_dir / "other", STEPS + 1, -1, options)
    again = job.finished()
    straight = Ranks(tmp_path / "straight", 3, train, run_dir / "third", STEPS + 1).finished()
    for rank in range(3):
        assert again[rank][0]["start"] == STEPS
        assert digests(again[rank])[STEPS + 1] == digests(straight[rank])[STEPS + 1]
