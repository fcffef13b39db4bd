"""What divided runs saved is exported as one checkpoint that DCP loads anywhere."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dtensor_trainer import Bag, Net, reload_, restore
from gloo_ranks import Ranks
from safetensors import safe_open
from torch.distributed.checkpoint import FileSystemReader, load

from holdfast.cli.main import main
from holdfast.digest.tensors import state_digest
from holdfast.errors import ConfigError
from holdfast.snapshot.disk.checkpoints import Checkpoints
from holdfast.snapshot.disk.export import ALL_RANKS, export, states_of
from holdfast.snapshot.restore.full_state import full_state
from holdfast.snapshot.restore.reader import Reader

pytestmark = pytest.mark.processes


def exported(run_dir: Path, goal: Path, form: str = "dcp") -> list[Path]:
    with Reader(run_dir) as reader:
        leased = full_state(next(reader.clean_steps()), reader)
        return export(states_of(leased, 0), leased.step, goal, form)


@pytest.mark.parametrize(
    ("saved_as", "ranks", "loaded_as", "others"),
    [
        pytest.param("whole", 2, "whole", 3, marks=pytest.mark.representative),
        ("hsdp", 4, "fsdp", 1),
        ("both", 4, "tensor_parallel", 2),
    ],
)
def test_dcp_loads_what_was_exported_into_any_number_of_ranks(
    tmp_path: Path, run_dir: Path, held: Any, saved_as: str, ranks: int, loaded_as: str, others: int
) -> None:
    said = held(ranks, saved_as, 3)
    folder = exported(run_dir, tmp_path / "out")[0]
    loaded = Ranks(tmp_path / "loaded", others, reload_, folder, loaded_as).finished()
    for rank in loaded:
        # The buffers of the BatchNorm are each rank's own; those of rank 0 are loaded.
        assert rank[0]["before"] != rank[0]["wholes"] == said[0][0]["wholes"]
        assert rank[0]["optimizer"] == said[0][0]["optimizer"]
    holders = {"hsdp": [[0, 2], [1, 3]]}.get(saved_as, [[rank] for rank in range(ranks)])
    assert [rank[0]["holders"] for rank in said] == [holders] * ranks


def test_every_placement_comes_back_and_is_exported_whole(
    tmp_path: Path, run_dir: Path, held: Any
) -> None:
    said = held(4, "both", 1, True)
    folder = exported(run_dir, tmp_path / "out")[0]
    wholes = {name: full for name, full, _ in Bag.contents(1)}
    wholes["half"] = torch.full((5,), 0.5)
    loaded = {"extra": {name: torch.full_like(full, 9.0) for name, full in wholes.items()}}
    load(loaded, storage_reader=FileSystemReader(folder), no_dist=True)
    assert state_digest(loaded["extra"]) == state_digest(wholes)
    resumed = Ranks(tmp_path / "resumed", 4, restore, run_dir, "both", True).finished()
    for before, after in zip(said, resumed, strict=True):
        assert after[0]["before"] != after[0]["after"] == before[0]["local"]


def test_ranks_that_are_missing_are_named_and_nothing_is_left(
    tmp_path: Path, run_dir: Path, held: Any
) -> None:
    held(2, "whole", 1)
    with Reader(run_dir) as reader:
        leased = full_state(next(reader.clean_steps()), reader)
        one = [next(iter(states_of(leased, 0)))]
        with pytest.raises(ConfigError, match=r"model\.scale lacks 1 of its 3 .*ranks \[1\] hold"):
            export(one, 1, tmp_path / "out", "dcp")
    assert [path.name for path in tmp_path.iterdir() if "out" in path.name] == []


def test_the_folders_of_several_nodes_make_one_checkpoint(
    tmp_path: Path, run_dir: Path, held: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    held(2, "whole", 1)
    with Reader(run_dir) as reader:
        leased = full_state(next(reader.clean_steps()), reader)
        for node, part in enumerate(leased.parts):
            folder = tmp_path / "disk" / f"node-{node}"
            folder.mkdir(parents=True)
            part = replace(part, rank=0)
            Checkpoints(folder).write(1, [part], world_size=2, first_rank=node, keep=1)
    words = ["snapshots", "export", "--run-dir", run_dir, "--persist-dir", tmp_path / "disk"]
    assert main([str(word) for word in [*words, "--to", tmp_path / "out", "--format", "dcp"]]) == 0
    assert f"{tmp_path / 'out' / ALL_RANKS}" in capsys.readouterr().out
    whole = {"model": {"embed.weight": torch.zeros(7, 6)}}
    load(whole, storage_reader=FileSystemReader(tmp_path / "out" / ALL_RANKS), no_dist=True)
    torch.manual_seed(3)
    untrained = Net().embed.weight
    assert 0 < (whole["model"]["embed.weight"] - untrained).abs().max() < 0.02


def test_other_formats_hold_the_shards_and_say_where_they_lie(
    tmp_path: Path, run_dir: Path, held: Any
) -> None:
    held(2, "whole", 1)
    files = exported(run_dir, tmp_path / "torch", "torch")
    shards = [torch.load(file, weights_only=True) for file in files]
    wheres = [shard["shardings"]["model.up.weight"] for shard in shards]
    assert [where["offsets"] for where in wheres] == [(0, 0), (5, 0)]
    assert [shard["model"]["up.weight"].shape for shard in shards] == [(5, 7), (5, 7)]
    for file, where in zip(
        exported(run_dir, tmp_path / "plain", "safetensors"), wheres, strict=True
    ):
        with safe_open(file, "pt") as opened:
            told = json.loads(opened.metadata()["shardings"])["model.up.weight"]
            assert told == json.loads(json.dumps(where))
            assert opened.get_tensor("model.up.weight").shape == (5, 7)
