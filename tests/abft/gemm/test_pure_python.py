"""Without the native core the same tests hold: loudly announced, slower, equally right."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast import native

TESTS = Path(__file__).parents[2]


@pytest.mark.skipif(native.core is None, reason="this process already runs without the core")
def test_the_detector_holds_without_the_native_core() -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not bmm"),
            str(TESTS / "ops" / "gemm" / "test_detector.py"),
            str(TESTS / "ops" / "gemm" / "test_coverage.py"),
            str(TESTS / "test_protection.py"),
        ],
        env=os.environ | {native.DISABLE_VARIABLE: "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout
    assert done.stdout.count("NativeCoreMissing: holdfast: the native core is not loaded") == 1
