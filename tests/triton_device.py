"""Where the Triton kernels are tested: on a CUDA device, or interpreted on a CPU.

Triton decides when it is first imported whether it interprets, and other tests import it: on a CPU
the files that use this module skip, and ``abft/test_interpreted.py`` runs them interpreted.
"""

import os
from inspect import ismodule
from typing import Any

import pytest
import torch

CUDA = torch.cuda.is_available()
if not CUDA and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a CUDA device or TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton", reason="needs Triton")
interpreter = pytest.importorskip("triton.runtime.interpreter")

MARKS = [
    *([pytest.mark.gpu] if CUDA else []),
    # The interpreter casts INF and overwritten values with NumPy, which warns.
    pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide):RuntimeWarning"),
]
DEVICE = "cuda" if CUDA else "cpu"


class _Patched:
    """The parts of Triton's language that are replaced until the kernel under way has ended.

    The interpreter itself replaces all of them again at each call in a kernel, which takes it half
    of its time.
    """

    def __init__(self) -> None:
        self._patch = interpreter._patch_lang
        self._names: set[str] = set()
        self._scopes: list[Any] = []

    def __call__(self, function: Any) -> "_Patched":
        modules = {each.__name__ for each in function.__globals__.values() if ismodule(each)}
        if new := modules & {"triton.language", "triton.language.core"} - self._names:
            self._scopes.append(self._patch(function))
            self._names |= new
        return self

    def restore(self) -> None:
        """Put everything back; the interpreter calls it for whole kernels only."""
        self._names.clear()
        while self._scopes:
            self._scopes.pop().restore()


if not CUDA:
    interpreter._patch_lang = _Patched()
