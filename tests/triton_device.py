"""Where the Triton kernels are tested: on a CUDA device, or interpreted on a CPU.

Triton decides when it is first imported whether it interprets, and other tests import it: on a CPU
the files that use this module skip, and ``abft/test_triton.py`` runs them interpreted.
"""

import os

import pytest
import torch

CUDA = torch.cuda.is_available()
if not CUDA and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a CUDA device or TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton", reason="needs Triton")

MARKS = [
    *([pytest.mark.gpu] if CUDA else []),
    # The interpreter casts INF and overwritten values with NumPy, which warns.
    pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide):RuntimeWarning"),
]
DEVICE = "cuda" if CUDA else "cpu"
