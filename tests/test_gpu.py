"""What holds on a CUDA device today: snapshots, the Guard, and the Triton kernels in graphs.

The files ``abft/*/test_triton_*.py`` run on the device too; ``protect`` reports its matmuls as
uncovered, and verifies its attention if asked to.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from torch import nn

import holdfast
from holdfast.digest.tensors import state_digest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

T = TypeVar("T")


def _trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 64))
    model = model.cuda()
    return model, torch.optim.AdamW(model.parameters())


def _batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(32, 64, generator=generator).cuda() for _ in range(6)]


def _pass(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss = (model(batch) - batch).square().mean()
    loss.backward()
    return loss


def _digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    return state_digest([model.state_dict(), optimizer.state_dict()])


def _captured(run: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
    """A graph of what runs, which never waits for the device, and the results in its memory."""
    run()  # compiles, and puts the signs on the device
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        return graph, run()


def test_the_guard_with_snapshots_leaves_the_bare_loops_bits(tmp_path: Path):
    model, optimizer = _trained()
    for batch in _batches():
        optimizer.zero_grad()
        _pass(model, batch)
        optimizer.step()
    bare = _digest(model, optimizer)
    model, optimizer = _trained()
    snapshots = holdfast.Snapshots(model, optimizer, run_dir=tmp_path)
    with holdfast.Guard(model, optimizer, snapshots=snapshots, audit=1.0) as guard:
        for batch in guard.batches(_batches(), steps=6):
            guard.step(lambda b: _pass(model, b), batch)
    assert _digest(model, optimizer) == bare


def test_a_cuda_state_is_restored_bit_for_bit(tmp_path: Path):
    model, optimizer = _trained()
    with holdfast.Snapshots(model, optimizer, run_dir=tmp_path) as snapshots:
        _pass(model, _batches()[0])
        optimizer.step()
        before = _digest(model, optimizer)
        snapshots.begin(1)
        assert snapshots.wait_committed() == 1
        optimizer.step()
        assert _digest(model, optimizer) != before
        assert snapshots.rollback() == 1
        assert _digest(model, optimizer) == before


def test_cuda_matmuls_are_verified():
    model, _ = _trained()
    with holdfast.protect(model) as protection:
        _pass(model, _batches()[0])
        report = protection.report()
        protection.check()
    products = [site for site in report.sites if site.site.split("/")[1:2] in (["mm"], ["addmm"])]
    assert products
    assert all(site.covered for site in products)


def test_the_triton_passes_run_in_a_cuda_graph_and_never_wait():
    pytest.importorskip("triton")
    from holdfast.abft.gemm import cuda as passes

    generator = torch.Generator("cuda").manual_seed(2)
    a, b, fresh = (
        torch.randn(512, 512, generator=generator, device="cuda").bfloat16() for _ in range(3)
    )
    counts = torch.zeros(2, dtype=torch.int32, device="cuda")
    fault = torch.tensor([[511, 1, 3e4, 1]], device="cuda")
    run = lambda: passes.matmul_online(a, b, counts=counts, faults=fault)[0]  # noqa: E731
    graph, product = _captured(run)
    for source in (a, fresh):
        a.copy_(source)
        counts.zero_()
        graph.replay()
        assert counts.tolist() == [1, 1]
        torch.testing.assert_close(product, torch.mm(a, b), rtol=2e-2, atol=0.2)


def test_finished_products_are_judged_in_a_cuda_graph_and_nothing_waits():
    pytest.importorskip("triton")
    from holdfast.abft.gemm.ahead_of_time import prepare
    from holdfast.abft.gemm.cpu import configured_core
    from holdfast.abft.triton.tolerance import Tolerance

    prepare(torch.device("cuda", torch.cuda.current_device()))
    core, tolerance = configured_core(), Tolerance.of(torch.bfloat16, torch.bfloat16, 512, 512)
    generator = torch.Generator("cuda").manual_seed(2)
    a, b, fresh = (
        torch.randn(512, 512, generator=generator, device="cuda").bfloat16() for _ in range(3)
    )
    slots = torch.zeros(2, 1, dtype=torch.int32, device="cuda")

    def judge() -> None:
        encoding, product = core.kernel_encode(b), torch.mm(a, b)
        core.kernel_judge(product, slots[0], a, encoding, None, 1.0, 1.0, tolerance)
        product[17, 3] += 1000.0
        core.kernel_judge(product, slots[1], a, encoding, None, 1.0, 1.0, tolerance)

    graph, _ = _captured(judge)
    for source in (a, fresh):
        a.copy_(source)
        slots.zero_()
        graph.replay()
        clean, damaged = slots.view(torch.float32).flatten().tolist()
        assert 0 < clean < 1 < damaged


def test_int8_layers_and_bags_run_in_a_cuda_graph_and_never_wait():
    pytest.importorskip("triton")
    torch.manual_seed(4)
    layer = holdfast.nn.Int8Linear(250, 130).cuda()
    bag = holdfast.nn.Int8EmbeddingBag.from_float(nn.EmbeddingBag(1000, 64, mode="sum")).cuda()
    x, fresh = torch.randn(100, 250, device="cuda"), torch.randn(100, 250, device="cuda")
    indices = torch.randint(0, 1000, (300, 20), device="cuda")
    slot = torch.zeros(1, dtype=torch.int32, device="cuda")
    graph, (output, pooled) = _captured(lambda: (layer(x, slot), bag(indices, slot=slot)))
    for source in (x, fresh):
        x.copy_(source)
        graph.replay()
        assert torch.equal(output, layer(x))
        assert torch.equal(pooled, bag(indices))
    on_cpu = copy.deepcopy(bag).cpu()
    assert torch.equal(pooled.cpu(), on_cpu(indices.cpu()))
    assert int(slot) == 0
    bag.rows[int(indices[7, 0]), 3] ^= 128
    graph.replay()
    assert int(slot) == 0x40000000
    assert torch.equal(bag(indices).cpu(), on_cpu(indices.cpu()))


def test_verified_attention_runs_in_a_cuda_graph_and_never_waits():
    pytest.importorskip("triton")
    from holdfast.abft.attention import cuda as fused

    generator = torch.Generator("cuda").manual_seed(3)
    q, k, v, grad, fresh = (
        torch.randn(2, 4, 300, 64, generator=generator, device="cuda").bfloat16() for _ in range(5)
    )
    counts = torch.zeros(2, dtype=torch.int32, device="cuda")
    fault = torch.tensor([[fused.Place.ACCUMULATOR, 5, 1, 70, 3, 3e4, 1]], device="cuda")

    def step() -> list[torch.Tensor]:
        out, lse, _ = fused.attention_forward(q, k, v, causal=True, counts=counts, faults=fault)
        gradients, _ = fused.attention_backward(
            grad, q, k, v, out, lse, causal=True, counts=counts, query_faults=fault,
            key_faults=fault,
        )  # fmt: skip
        return [out, *gradients]

    graph, found = _captured(step)
    for source in (q, fresh):
        q.copy_(source)
        counts.zero_()
        graph.replay()
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            out = nn.functional.scaled_dot_product_attention(*leaves, is_causal=True)
        expected = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
        assert counts.tolist() == [3, 3]
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-2)


class _Attends(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def test_attention_of_a_protected_model_is_verified_eager_and_compiled():
    pytest.importorskip("triton")
    generator = torch.Generator("cuda").manual_seed(5)
    leaves = [
        torch.randn(2, heads, 333, 96, generator=generator, device="cuda").bfloat16()
        for heads in (8, 2, 2)
    ]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    model = _Attends()
    torchs = model(*leaves)
    grad = torch.randn(torchs.shape, generator=generator, device="cuda").bfloat16()
    expected = [torchs, *torch.autograd.grad(torchs, leaves, grad)]
    with holdfast.protect(model) as protection:
        model(*leaves)
        (row,) = protection.report().sites
    assert not row.covered
    assert "a row checksum cannot invert a softmax" in row.reason
    with holdfast.protect(model, attention="fused") as protection:
        for run in (model, torch.compile(model, fullgraph=True)):
            out = run(*leaves)
            found = [out, *torch.autograd.grad(out, leaves, grad)]
            for mine, theirs in zip(found, expected, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-2)
        rows = {site.site: site for site in protection.report().sites}
    assert rows.keys() == {"_Attends/sdpa/forward", "_Attends/sdpa_backward/grad_qkv"}
    for row in rows.values():
        assert (row.covered, row.calls, row.rows, row.suspects) == (True, 2, 2 * 16 * 333, 0)


def test_packed_sequences_and_block_masks_run_on_the_device():
    pytest.importorskip("triton")
    from holdfast.abft.attention import cuda as fused

    generator = torch.Generator("cuda").manual_seed(6)
    q, k, v = (
        torch.randn(400, heads, 64, generator=generator, device="cuda").bfloat16()
        for heads in (4, 2, 2)
    )
    starts = torch.tensor([0, 150, 150, 400], dtype=torch.int32, device="cuda")
    counts = torch.zeros(2, dtype=torch.int32, device="cuda")
    out, _ = fused.fused_attention_varlen(
        q, k, v, starts, starts, 250, 250, causal=True, counts=counts
    )
    sequence = torch.arange(400, device="cuda") >= 150
    mask = (sequence[:, None] == sequence[None, :]).tril()
    heads = [each.transpose(0, 1)[None] for each in (q, k, v)]
    by_mask, _ = fused.fused_attention(*heads, mask=mask, counts=counts)
    expected = nn.functional.scaled_dot_product_attention(*heads, attn_mask=mask, enable_gqa=True)
    for mine in (out.transpose(0, 1)[None], by_mask):
        torch.testing.assert_close(mine, expected, rtol=2e-2, atol=2e-2)
    assert counts.tolist() == [0, 0]


def test_verified_attention_trains_as_torchs_does():
    pytest.importorskip("triton")
    from holdfast.abft.attention import cuda as fused

    generator = torch.Generator("cuda").manual_seed(4)
    leaves = [
        torch.randn(2, heads, 777, 80, generator=generator, device="cuda").half().requires_grad_()
        for heads in (8, 2, 2)
    ]
    counts = torch.zeros(2, dtype=torch.int32, device="cuda")
    out, _ = fused.fused_attention(*leaves, counts=counts)
    torchs = nn.functional.scaled_dot_product_attention(*leaves, enable_gqa=True)
    grad = torch.randn(out.shape, generator=generator, device="cuda").half()
    mine = [out, *torch.autograd.grad(out, leaves, grad)]
    theirs = [torchs, *torch.autograd.grad(torchs, leaves, grad)]
    for ours, expected in zip(mine, theirs, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-2, atol=1e-2)
    assert counts.tolist() == [0, 0]
