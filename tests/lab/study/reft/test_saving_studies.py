"""REFT's studies of saving: OPT's shapes, a node's work, and that their checks can fail."""

from dataclasses import replace

import pytest
import torch
from case_loops import for_each
from study_runs import TINY, rows_of

from holdfast.snapshot.layout import flat_buffer
from holdfast.snapshot.parity.stripes import Span
from holdfast_lab.study import Row, Unwatched
from holdfast_lab.study.reft import opt, saving, scaling
from holdfast_lab.study.reft.opt import Opt, training_state

pytestmark = pytest.mark.study

SMALL = [(33, 7), (5,), (129,)]


def state(shapes: list[opt.Shape]) -> flat_buffer.Flat:
    return training_state(shapes, torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def weak() -> list[Row]:
    return rows_of(scaling.WEAK.name)


@for_each("model", [opt.OPT_125M, opt.OPT_350M])
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


@for_each("count", [2, 4, 6])
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


@for_each("nodes", [2, 3, 6])
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
