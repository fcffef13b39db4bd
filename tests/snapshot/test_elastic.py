"""A run that goes on with other ranks, from the memory of those before, bit for bit."""

from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from dtensor_trainer import change
from elastic_nodes import live, read
from gloo_ranks import Ranks
from replica_trainer import train

from bench.elastic import Moving
from bench.elastic import changes as changes_of
from bench.nodes_rank import Work
from holdfast.snapshot.node import launch

pytestmark = pytest.mark.processes


def changes(folder: Path, run_dir: Path, *stages: tuple[str, int], **options: Any) -> list[Any]:
    """What all ranks of each stage said, which began where the one before ended."""
    found = []
    try:
        for number, (layout, ranks) in enumerate(stages):
            job = Ranks(folder / str(number), ranks, change, run_dir, layout, 2, *options.values())
            found.append(job.finished())
    finally:
        launch.stop_smp(run_dir)
    return found


def check(stages: list[Any], *passed_over: str) -> None:
    """Every stage began with the very tensors with which the one before had ended.

    ``passed_over`` are the events of steps that were not taken.
    """
    for number, (before, after) in enumerate(pairwise(stages)):
        for said in after:
            assert said[0]["start"] == 2 * (number + 1)
            for word in ("wholes", "optimizer"):
                assert said[0][word] == before[0][1][word] != before[0][0][word]
                assert said[1][word] != said[0][word]
        changed = [kind for kind, _ in after[0][0]["events"]]
        assert changed == [*passed_over, "world_changed", "restored"]
        kept = min(len(before), len(after))
        assert [said[0]["rng"] for said in after[:kept]] == [s[1]["rng"] for s in before[:kept]]
        assert len({said[0]["rng"] for said in after}) in (len(after), 1)


@pytest.mark.parametrize(
    "stages",
    [
        pytest.param((("fsdp", 4), ("fsdp", 2), ("fsdp", 3)), marks=pytest.mark.representative),
        (("tensor_parallel", 2), ("tensor_parallel", 1), ("tensor_parallel", 2)),
        (("hsdp", 4), ("whole", 2), ("both", 4), ("fsdp", 4)),
    ],
)
def test_other_ranks_or_another_mesh_go_on_from_memory(
    tmp_path: Path, run_dir: Path, stages: tuple[tuple[str, int], ...]
) -> None:
    check(changes(tmp_path / "ranks", run_dir, *stages))


@pytest.mark.parametrize("several", [True, False])
def test_replicas_killed_at_a_random_moment_go_on_with_fewer_or_more(
    tmp_path: Path, several: bool
) -> None:
    for made in changes_of(tmp_path, "ddp", several=several, count=2, seed=1):
        assert (made["exact"], made["older"]) == (True, False)


def test_shards_of_a_lost_node_are_decoded_for_the_ranks_that_are_left(tmp_path: Path) -> None:
    run, stages = Moving(Work(tmp_path / "run", steps=2), 3), []
    try:
        for lost, added in ((1, 0), (0, 1), (0, 0)):
            run.start(partial(live, "fsdp"))
            run.finish()
            stages.append([run.said(rank) for rank in range(run.world)])
            run.change(lost, added)
    finally:
        run.close()
    check(stages)


@pytest.mark.parametrize(
    ("layout", "parities", "nodes", "kept"),
    [
        ("fsdp", 1, 1, True),
        ("replicas", 1, 1, False),
        ("fsdp", 0, 1, False),
        ("fsdp", 0, 2, True),
        ("replicas", 0, 2, True),
        ("replicas", 0, 2, False),
    ],
)
def test_fewer_nodes_go_on_from_disk_with_the_same_bits(
    tmp_path: Path, layout: str, parities: int, nodes: int, kept: bool
) -> None:
    """Of three nodes one or two are left, with their SMPs if ``kept``."""
    work = Work(tmp_path / "run", steps=2, parities=parities, persist_dir=tmp_path / "disk")
    run, stages = Moving(work, 3), []
    try:
        for local in (1, 2 // nodes):
            if stages:
                run.change(3 - nodes if kept else 3, 0 if kept else nodes, local)
            run.start(partial(live, layout))
            run.finish()
            stages.append([run.said(rank) for rank in range(run.world)])
    finally:
        run.close()
    check(stages)
    from_memory = kept and (layout, parities) == ("replicas", 0)
    (source,) = {said[0]["events"][-1][1]["source"] for said in stages[1]}
    assert source == ("memory" if from_memory else "disk")


def test_loaders_with_a_state_read_each_row_once_with_other_ranks(
    tmp_path: Path, run_dir: Path
) -> None:
    kinds, found = ["plain", "stateful"], []
    # 24 of 60 rows, then 12 in batches of the same size of all ranks together, then all others.
    try:
        for number, (ranks, *given) in enumerate([(2, 6, 2), (3, 4, 1), (1, 10, 9)]):
            job = Ranks(tmp_path / str(number), ranks, read, run_dir, kinds, 60, *given)
            found.append(job.finished())
    finally:
        for kind in kinds:
            launch.stop_smp(run_dir / kind)
    for number in range(len(kinds)):
        stages = [[said[number] for said in stage] for stage in found]
        first, second, third = ([row for said in each for row in said["rows"]] for each in stages)
        assert len({*first, *second}) == len(first) + len(second) == 36
        assert sorted({*first, *second, *third}) == list(range(60))
        assert len(third) == 60 - 36 + 6
        kept, other = ("after 24 samples, of which 0", "after 36 samples, of which 6")
        told = [said["position"] for stage in stages for said in stage]
        assert told == [[], [], *3 * [[f"{kept} come again"]], [f"{other} come again"]]


def test_another_model_is_refused_with_other_ranks_too(tmp_path: Path, run_dir: Path) -> None:
    try:
        Ranks(tmp_path / "first", 2, train, run_dir, 2, -1, {}, None, False).finished()
        kind = {"width": 30}
        other = Ranks(tmp_path / "other", 3, train, run_dir, 2, -1, {}, None, False, kind)
        for said in other.finished():
            assert said[0]["error"].startswith(
                "model entry '0.weight': the snapshot has float32[31, 24], this run has "
                "float32[30, 24]"
            )
            assert said[0]["before"] == said[0]["digest"]
    finally:
        launch.stop_smp(run_dir)


def test_other_ranks_go_on_from_disk_with_the_same_bits(tmp_path: Path, run_dir: Path) -> None:
    stages, places = [], []
    for number, ranks in enumerate((4, 2, 3)):
        places.append(run_dir / str(number))  # of its own, so that no memory is found
        job = Ranks(tmp_path / str(number), ranks, change, places[-1], "fsdp", 2, tmp_path / "disk")
        stages.append(job.finished())
        launch.stop_smp(places[-1])
    check(stages)
