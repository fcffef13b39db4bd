"""What the Triton passes refuse, and how they say it."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from no_host_sync import NoHostSync
from triton_cases import FP8, random
from triton_device import CUDA, DEVICE, MARKS

from holdfast.abft.gemm import cuda as passes
from holdfast.abft.gemm.cuda_layout import product_plan, readable

pytestmark = MARKS

F16 = torch.float16


def test_encode_refuses() -> None:
    with pytest.raises(TypeError, match=r"b is torch\.float64; verified are float32, float16"):
        passes.encode(random(4, 4, dtype=torch.float64), block=64)
    with pytest.raises(ValueError, match=r"shape \(4,\): give \[K, N\]"):
        passes.encode(random(4, dtype=F16), block=64)
    for block in (8, 48):
        with pytest.raises(ValueError, match=f"block is {block}: use a power of two from 16"):
            passes.encode(random(4, 4, dtype=F16), block=block)


def test_matmul_online_refuses() -> None:
    a, b = random(3, 5, dtype=F16), random(5, 7, dtype=F16)
    with pytest.raises(ValueError, match=r"a \(3, 5\) and b \(4, 7\) do not multiply"):
        passes.matmul_online(a, b[:4])
    with pytest.raises(ValueError, match="convert one"):
        passes.matmul_online(a, b.float())
    with pytest.raises(TypeError, match=r"C cannot be torch\.float8_e4m3fn"):
        passes.matmul(a, b, out_dtype=FP8)
    with pytest.raises(ValueError, match="mode is 'checksum': use 'recompute' or 'detect'"):
        passes.matmul_online(a, b, mode="checksum")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"of a B \(5, 7\) in blocks of 7 do not fit b \(5, 7\)"):
        passes.matmul_online(a, b, replace(passes.encode(b, block=16), block=7))
    with pytest.raises(ValueError, match=r"faults is torch.float16 \(3, 5\)"):
        passes.matmul_online(a, b, faults=a)
    with pytest.raises(ValueError, match="requires grad and this is not differentiated"):
        passes.matmul_online(a.requires_grad_(), b)
    with torch.no_grad():
        passes.matmul_online(a, b)


def _python(code: str, **settings: str) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | settings
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    return done.stderr


def test_without_triton_the_import_says_what_to_do() -> None:
    said = _python("import sys; sys.modules['triton'] = None; import holdfast.abft.gemm.cuda")
    assert "ImportError: holdfast's CUDA kernels need Triton 3.6 or newer" in said
    assert "pip install 'torch-holdfast[triton]'" in said


@pytest.mark.skipif(CUDA, reason="the device runs what the interpreter would")
def test_cpu_tensors_need_the_interpreter() -> None:
    said = _python(
        "import torch\nfrom holdfast.abft.gemm import cuda\ncuda.encode(torch.ones(4, 4), block=16)"
    )
    assert "ValueError: a tensor is on cpu: Triton needs a CUDA device, or TRITON_INTERPRET" in said


def test_tiles_follow_the_work() -> None:
    half, single = torch.bfloat16, torch.float32
    assert product_plan(8192, 8192, half, "ieee")[:3] == (128, 256, 64)
    assert product_plan(512, 512, half, "ieee")[:2] == (64, 64)
    assert product_plan(8192, 8192, half, "ieee", block=64)[:2] == (128, 64)
    assert product_plan(8192, 8192, single, "ieee").block_k == 16
    assert product_plan(8192, 8192, single, "tf32").block_k == 32
    assert product_plan(8192, 8192, FP8, "ieee").block_k == 128
    assert passes.online_block(8192, 8192, half) == 256


def test_only_what_the_copy_engine_cannot_read_is_copied() -> None:
    rows = random(16, 24, dtype=F16)
    for matrix, transposed in [(rows, False), (rows.mT, True), (rows[:, :17], False)]:
        given, flipped = readable(matrix)
        assert (given.data_ptr(), flipped) == (matrix.data_ptr(), transposed)
    for matrix in (rows[:, 1:9], random(5, 7, dtype=F16), rows[:1].expand(4, 24), rows[:, ::2]):
        copy, flipped = readable(matrix)
        assert copy.data_ptr() != matrix.data_ptr()
        assert not flipped
        assert torch.equal(copy, matrix)
        assert copy.stride(0) * copy.element_size() % 16 == 0


def test_no_value_is_read_on_the_host() -> None:
    a, b = random(20, 40, dtype=F16), random(40, 30, dtype=F16)
    faults = torch.tensor([[3.0, 4.0, 1e4, 1.0]], device=DEVICE)
    with NoHostSync():
        product, verdict = passes.matmul_online(a, b, faults=faults)
        with pytest.raises(AssertionError, match="makes the host wait"):
            int(verdict.counts.sum())
    assert verdict.counts.tolist() == [1, 1]
    assert product.isfinite().all()
