"""``protect(attention=…)`` where nothing runs: its errors, and CUDA tensors without values."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from case_loops import for_each
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

import holdfast
from holdfast import native
from holdfast.abft.gemm.graph_sites import Naming, label
from holdfast.errors import ConfigError

TRITON = pytest.mark.skipif(
    native.core is None or not sys.platform.startswith("linux"), reason="needs the core and Triton"
)


def _fake(device: str, heads: int = 2) -> torch.Tensor:
    size = 1, heads, 8, 16
    return torch.empty(size, dtype=torch.bfloat16, device=device, requires_grad=device == "cpu")


def _traced(device: str, dropout: float = 0.0) -> Any:
    """The graph of an attention and, on CPU, of its gradients.

    Torch without CUDA can trace no gradients of CUDA tensors.
    """

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = functional.scaled_dot_product_attention(
            q, k, v, dropout_p=dropout, is_causal=True, enable_gqa=True
        )
        return out, *(torch.autograd.grad(out.sum(), (q, k, v)) if device == "cpu" else ())

    with FakeTensorMode(), torch.set_grad_enabled(device == "cpu"):
        return make_fx(step)(_fake(device), _fake(device, 1), _fake(device, 1)).graph


def _ours(graph: Any) -> list[Any]:
    return [node for node in graph.nodes if str(node.target).startswith("holdfast.")]


def test_unknown_kernels_are_refused_and_nothing_is_changed() -> None:
    with pytest.raises(ConfigError, match="attention is 'flash': give 'fused' for holdfast's"):
        holdfast.protect(nn.Linear(2, 2), attention="flash")
    assert not _ours(_traced("cpu"))


@TRITON
def test_without_triton_the_error_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import holdfast, torch\n"
        "try: holdfast.protect(torch.nn.Linear(2, 2), attention='fused')\n"
        "except holdfast.errors.ConfigError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "attention='fused' cannot be used" in done.stdout, done.stderr
    assert "pip install" in done.stdout


@TRITON
@for_each("device", ["cuda", "cpu"])
def test_a_traced_step_holds_our_kernels(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.abft.attention import interception

    monkeypatch.setattr(interception, "KEY", device.upper())
    with holdfast.protect(nn.Identity(), attention="fused"):
        forward, *backward = _ours(_traced(device))
        assert not _ours(_traced(device, dropout=0.1))
    assert not _ours(_traced(device))  # removed with the protection
    out, lse = forward.meta["val"]
    assert (out.shape, out.dtype, out.device.type) == ((1, 2, 8, 16), torch.bfloat16, device)
    assert (lse.shape, lse.dtype) == ((1, 2, 8), torch.float32)
    shapes = [each.shape for node in backward for each in node.meta["val"]]
    gradients = [(1, 2, 8, 16), (1, 1, 8, 16), (1, 1, 8, 16)]
    assert shapes == (gradients if device == "cpu" else [])


@TRITON
def test_the_pass_over_a_graph_names_our_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.abft.attention import interception

    monkeypatch.setattr(interception, "KEY", "CPU")
    with holdfast.protect(nn.Identity(), attention="fused"):
        graph = _traced("cpu")
    forward, backward = _ours(graph)
    assert backward.args[-4:] == (0, "sdpa_backward", 0, 3)
    backward.meta["partitioner_tag"] = "is_backward"
    backward.meta["seq_nr"] = forward.meta["seq_nr"] = 7
    labels = label(graph, Naming(lambda address: 0, root=9))
    assert forward.args[-4:] == (9, "sdpa", 0, 0)
    assert backward.args[-4:] == (9, "sdpa_backward", 0, 3)
    assert not labels.unverified
