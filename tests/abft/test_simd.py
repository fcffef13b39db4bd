"""Every narrower instruction set computes what the widest one does: the passes, masks, and int8."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from case_loops import fuzz_after

from holdfast import native

TESTS = Path(__file__).parents[1]
FILES = (
    TESTS / "test_native.py",
    TESTS / "abft" / "int8_gemm" / "test_values.py",
    TESTS / "abft" / "gemm" / "test_masked.py",
)
AGREEMENTS = (
    "agree or fast_pass or bit_pattern or finite or oracle or extremes or 16_bits or saturation "
    "or mask"
)
ORDER = ["default", "avx2", "avx512", "avx512bf16"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("simd", fuzz_after(["avx2", "default", "avx512"]))
def test_a_narrower_instruction_set_agrees_with_the_reference(simd: str) -> None:
    if native.core is None or ORDER.index(simd) >= ORDER.index(native.core.simd_name()):
        pytest.skip(f"{simd} is this processor's own, or it has not got it")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *map(str, FILES), "-k", AGREEMENTS],
        # FBGEMM's products saturate with its AVX2 kernels, which is to be noticed.
        env=os.environ | {"HOLDFAST_SIMD": simd, "FBGEMM_ENABLE_INSTRUCTIONS": "AVX2"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:]
    assert " passed" in done.stdout


@pytest.mark.skipif(
    shutil.which("objdump") is None or platform.machine() != "x86_64",
    reason="needs objdump, and a core that was built for x86-64",
)
@pytest.mark.skipif(native.core is None, reason="there is no native core to read")
def test_kernels_use_the_instructions_that_their_set_adds() -> None:
    # A macro that is not defined where it is asked for would silently leave them out.
    assert native.core is not None
    listing = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", native.core.__file__],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    ).stdout
    assert {name for name in ("vdpbf16ps", "vpdpbusd") if f"\t{name} " in listing} == {
        "vdpbf16ps",
        "vpdpbusd",
    }
