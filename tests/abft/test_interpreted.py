"""The Triton kernels on a machine without a GPU: interpreted, in a process of their own.

Triton decides when it is imported whether it interprets, and ``torch.compile`` imports it too.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
FILES = [
    *sorted(HERE.glob("*/test_triton_*.py")),
    *sorted((HERE.parent / "digest").glob("test_triton_*.py")),
]
# One test of each operator's kernels.
REPRESENTATIVES = (
    "test_addends_alpha_and_beta or test_several_faults_in_one_tile_and_one_row "
    "or test_autograd_gives_these_gradients or test_without_the_check_the_flip_gets_out "
    "or test_values_that_name_no_row_or_bag_are_not_read "
    "or test_elements_count_in_c_order or test_a_fault_in_a_packed_sequence "
    "or test_our_kernels_run_while_protected or test_a_fault_that_stays_reaches_the_slot "
    "or test_scaled_products"
)

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the files run on the device themselves"),
]


def interpret(files: list[Path], *options: str) -> None:
    """Run tests of Triton kernels in the interpreter; all that are chosen must pass."""
    assert files
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "", "--timeout", "500"]
    done = subprocess.run(
        [sys.executable, *words, *options, *map(str, files)],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    counted = done.stdout.splitlines()[-1]
    assert " passed" in counted, counted
    assert "skipped" not in counted, counted


def test_a_kernel_of_each_operator_holds_in_the_interpreter() -> None:
    interpret(FILES, "-k", REPRESENTATIVES)


@pytest.mark.interpreter
@pytest.mark.timeout(600)
@pytest.mark.parametrize("attention", [True, False], ids=["attention", "others"])
def test_every_kernel_holds_in_the_interpreter(attention: bool) -> None:
    """Every test but the representatives, which every run of ``make test`` has."""
    assert len(FILES) >= 8
    files = [path for path in FILES if (path.parent.name == "attention") == attention]
    interpret(files, "-k", f"not ({REPRESENTATIVES})")
