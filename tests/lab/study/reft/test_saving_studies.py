"""REFT's studies of saving: OPT's shapes, a node's work, and that their checks can fail."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from holdfast.snapshot import layout
from holdfast.snapshot.stripes import Span
from holdfast_lab.study import Row, Settings, Unwatched
from holdfast_lab.study.reft import micro, opt, saving, scaling
from holdfast_lab.study.reft.opt import Opt, training_state

TINY = Settings("tiny")
SMALL = [(33, 7), (5,), (129,)]


def state(shapes: list[opt.Shape]) -> layout.Flat:
    return training_state(shapes, torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def weak() -> list[Row]:
    return list(scaling.WEAK.run(TINY, Unwatched()))


@pytest.mark.parametrize("model", [opt.OPT_125M, opt.OPT_350M], ids=lambda model: model.name)
def test_the_shapes_are_those_of_the_published_configurations(model: Opt) -> None:
    transformers = pytest.importorskip("transformers", "5.23")
    config = transformers.OPTConfig(
        hidden_size=model.width,
        num_hidden_layers=model.layers,
        ffn_dim=4 * model.width,
        num_attention_heads=model.width // 64,
        word_embed_proj_dim=model.embedding,
        vocab_size=opt.VOCABULARY,
        max_position_embeddings=opt.POSITIONS - 2,
        do_layer_norm_before=model.embedding == model.width,
    )
    with torch.device("meta"):
        theirs = transformers.OPTForCausalLM(config)
    expected = sorted(tuple(parameter.shape) for parameter in theirs.parameters())
    assert sorted(model.stages(1)[0]) == expected
    assert model.state_bytes == 12 * sum(p.numel() for p in theirs.parameters())


@pytest.mark.parametrize("count", [2, 4, 6])
def test_stages_divide_the_parameters(count: int) -> None:
    stages = opt.OPT_350M.stages(count)
    assert len(stages) == count
    assert sorted(s for stage in stages for s in stage) == sorted(opt.OPT_350M.stages(1)[0])


def test_a_state_is_cut_where_its_bytes_are() -> None:
    flat = state(SMALL)
    whole = torch.cat([tensor.reshape(-1) for tensor in flat.tensors])
    for span in (Span(0, 64), Span(64, 4 * len(whole)), Span(1024, 1024)):
        cut = opt.cut(flat, span).tensors
        found = torch.cat([tensor.reshape(-1) for tensor in cut]) if cut else whole[:0]
        assert torch.equal(found, whole[span.start // 4 : span.stop // 4])


@pytest.mark.parametrize("nodes", [2, 3, 6])
def test_what_the_others_hold_gives_a_lost_share_and_damage_is_seen(nodes: int) -> None:
    group = saving.Group(state(SMALL), nodes)
    group.slowest_s()
    for lost in range(nodes):
        group.check(lost)
    group.buffers[1] ^= 1
    with pytest.raises(RuntimeError, match="came back wrong"):
        group.check(0)


def test_a_node_reads_its_shard_and_as_much_again(weak: list[Row]) -> None:
    found = {row.case["paths"]: row for row in weak if row.table == scaling.ALONE}
    assert set(found) == set(scaling.PATHS)
    for paths, row in found.items():
        expected = 2 / int(paths) if paths != 1 else 1.0
        assert row.measured[scaling.COPIED] == pytest.approx(expected, rel=0.01)
    assert scaling.WEAK.verdict(weak) == ""
    greedy = [replace(r, measured={**r.measured, scaling.COPIED: 1.5}) for r in found.values()]
    assert "more than its share" in scaling.WEAK.verdict(greedy)


def test_simulated_parallelism_and_shared_memory_are_said(weak: list[Row]) -> None:
    notes = {row.table: row.note for row in weak}
    assert "simulated" in notes[scaling.ALONE]
    assert "share one machine" in notes[scaling.AT_ONCE]


def test_a_state_that_does_not_fit_is_a_row_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(saving, "available_bytes", lambda: 0)
    (row,) = scaling.WEAK.run(TINY, Unwatched())
    assert not row.measured
    assert "0 available" in row.note


def test_a_process_that_fails_is_an_error_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_TIMEOUT_S", "20")
    with pytest.raises(RuntimeError, match="a process that saves a share failed"):
        saving.at_once_s(opt.TINY, nodes=1)
    monkeypatch.delenv("HOLDFAST_TIMEOUT_S")


def test_disk_is_written_and_nothing_is_left(tmp_path: Path) -> None:
    assert saving.raw_write_s(tmp_path, 10_000, bucket=4096) > 0
    assert saving.torch_save_s(tmp_path, 10_000) > 0
    assert not list(tmp_path.iterdir())


def test_every_step_of_a_save_is_measured_by_bucket() -> None:
    rows = list(micro.STUDY.run(TINY, Unwatched()))
    bucketed = [row for row in rows if row.table == micro.BUCKETS]
    assert [row.case["bucket, KiB"] for row in bucketed] == [64, 1024]
    for row in bucketed:
        assert set(row.measured) >= {micro.SHARED, micro.DIGESTED, micro.PARITY, micro.DISK}
