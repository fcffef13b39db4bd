"""The Triton kernels on a machine without a GPU: compiled for one, in a process of their own.

Triton decides when it is imported whether it interprets, and ``torch.compile`` imports it too.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
SHARED_BYTES = 232448  # what a block may have on sm_90
ATTENTION = {"attention_forward_kernel", "grad_query_kernel", "grad_key_value_kernel"}
GEMM = {"encode_kernel", "predict_kernel", "gemm_kernel"}

Kernels = list[dict[str, Any]]

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")


def compiled(cache: Path, *capabilities: int) -> Kernels:
    """Kernels as ``triton_compilation.py`` compiles them in a process of its own."""
    if not sys.platform.startswith("linux") or os.uname().machine != "x86_64":
        pytest.skip("Triton carries an assembler for x86-64 Linux")
    settings = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    settings["TRITON_CACHE_DIR"] = str(cache)
    done = subprocess.run(
        [sys.executable, str(HERE / "triton_compilation.py"), *map(str, capabilities)],
        env=settings | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    """All kernels, compiled for a Hopper GPU, and those of attention for a Blackwell GPU."""
    return compiled(tmp_path_factory.mktemp("triton"))


def compiling(test: Any) -> Any:
    """The marks of a test of compiled kernels: the first of them waits for the compiler."""
    return pytest.mark.compile(pytest.mark.timeout(300)(test))


def of(kernels: Kernels, *names: str, capability: int = 90) -> Kernels:
    """The variants of some kernels that were compiled for a compute capability."""
    of_device = [kernel for kernel in kernels if kernel["capability"] == capability]
    return [kernel for kernel in of_device if kernel["kernel"] in names]


@compiling
def test_every_kernel_compiles_and_fits_a_multiprocessor(kernels: Kernels) -> None:
    names = {kernel["kernel"] for kernel in kernels}
    assert names == GEMM | ATTENTION | {"attention_encode_kernel", "digest_kernel"}
    assert all(kernel["bytes"] > 0 for kernel in kernels)
    assert len(of(kernels, "gemm_kernel")) == 4
    for kernel in of(kernels, *ATTENTION, "attention_encode_kernel"):
        assert kernel["shared_bytes"] <= SHARED_BYTES


@compiling
def test_digests_load_16_bytes_at_a_time(kernels: Kernels) -> None:
    (kernel,) = of(kernels, "digest_kernel")
    assert "ld.global.v2.b64" in kernel["ptx"]


@compiling
def test_the_hook_for_faults_leaves_no_trace(kernels: Kernels) -> None:
    for kernel in of(kernels, "gemm_kernel", "attention_encode_kernel", *ATTENTION):
        assert "fault" not in kernel["ir"], kernel["kernel"]


@compiling
def test_no_operand_is_overwritten_while_it_is_read(kernels: Kernels) -> None:
    # With one product pending, two stages ahead, a block needs a third buffer (triton issue 6691).
    ir = of(kernels, "gemm_kernel")[0]["ir"]
    assert "isAsync = true" in ir
    assert "pendings = 1" in ir
    buffers = re.findall(r"ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d+x\d+x\d+)xbf16", ir)
    assert sorted(buffers) == ["3x128x64", "3x64x256"]


@compiling
def test_without_verification_no_check_is_left_in_attention(kernels: Kernels) -> None:
    bare = [kernel for kernel in of(kernels, *ATTENTION) if not kernel["verified"]]
    verified = [kernel for kernel in of(kernels, *ATTENTION) if kernel["verified"]]
    assert {kernel["kernel"] for kernel in bare} == ATTENTION
    for trace in ("checks", "pieces", "atomic"):
        assert all(trace not in kernel["ir"] for kernel in bare)
        assert all(trace in kernel["ir"] for kernel in verified)


@compiling
def test_the_checks_leave_the_memory_and_the_pipeline_of_attention_as_they_are(
    kernels: Kernels,
) -> None:
    for name in ATTENTION:
        of_kind = {k["verified"]: k for k in of(kernels, name) if k["dtype"] == "torch.bfloat16"}
        buffers = [
            sorted(re.findall(r"local_alloc : \(\) -> !ttg\.memdesc<(\d+x\d+x\d+)xbf16", ir))
            for ir in (of_kind[True]["ir"], of_kind[False]["ir"])
        ]
        assert buffers[0] == buffers[1] != []
        assert "async_copy_global_to_local" in of_kind[True]["ir"]
        assert "warp_group_dot" in of_kind[True]["ir"]
        assert of_kind[True]["shared_bytes"] <= of_kind[False]["shared_bytes"] + 4096


# What holds the operands of each capability's matrix units.
MATRIX_UNITS = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}
# Kernels of which all of a thread's values fit its registers, in bf16 with heads of 64.
WITHOUT_SPILLS = {
    80: {"grad_query_kernel"},
    90: {"attention_forward_kernel", "grad_query_kernel"},
    100: {"attention_forward_kernel", "grad_query_kernel"},
}
MOST_STACK = 256  # bytes of a thread that the others spill to


def check_units(kernels: Kernels, capability: int) -> None:
    """Attention runs on the matrix units of a device, and what spills is known."""
    chosen = of(kernels, *ATTENTION, capability=capability)
    verified = [k for k in chosen if k["verified"] and k["dtype"] == "torch.bfloat16"]
    assert {kernel["kernel"] for kernel in verified} == ATTENTION
    for kernel in verified:
        assert MATRIX_UNITS[capability] in kernel["ptx"]
        assert "cp.async" in kernel["ptx"]
        assert re.search(r"ld\.global\S*\.v4|cp\.async\S* \S+, \S+, 0x10", kernel["ptx"])
        assert kernel["stack"] <= MOST_STACK, (capability, kernel["kernel"], kernel["stack"])
    clean = {kernel["kernel"] for kernel in verified if kernel["stack"] == 0}
    assert clean >= WITHOUT_SPILLS[capability], capability


@compiling
def test_attention_runs_on_matrix_units_and_what_spills_is_known(kernels: Kernels) -> None:
    for capability in (90, 100):
        check_units(kernels, capability)
    bare = [kernel for kernel in of(kernels, *ATTENTION) if not kernel["verified"]]
    assert [kernel["stack"] for kernel in bare] == [0] * len(ATTENTION)


@pytest.mark.compile
@pytest.mark.timeout(300)
def test_attention_runs_on_the_matrix_units_of_an_ampere_gpu_too(tmp_path: Path) -> None:
    check_units(compiled(tmp_path, 80), 80)
