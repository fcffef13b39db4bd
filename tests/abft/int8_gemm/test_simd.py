"""The same bits from every instruction set, on products, faults and their repair."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from int8_cases import has_native

from holdfast import native

if not has_native():
    pytest.skip("FBGEMM is not in this build", allow_module_level=True)


@pytest.mark.parametrize("simd", ["default", "avx2", "avx512"])
def test_narrower_instruction_sets_agree(simd: str) -> None:
    assert native.core is not None
    widest = native.core.simd_name()
    order = ["default", "avx2", "avx512", "avx512bf16"]
    if order.index(simd) > order.index(widest):
        pytest.skip(f"this processor runs {widest} at most")
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", str(here / "test_values.py")],
        env=os.environ | {"HOLDFAST_SIMD": simd},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:]
    assert " passed" in done.stdout
