"""Compiles Triton kernels for GPUs that are not there, and tells what they take of one."""

import contextlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ARCHITECTURES = (80, 90, 100)
MOST_REGISTERS = 128


@dataclass(frozen=True)
class Resources:
    """What one kernel takes, by its assembler."""

    kernel: str
    constants: dict[str, object]
    architecture: int
    registers: int  # of a thread
    spilled_bytes: int
    loads: dict[int, int]  # number of loads from global memory by their width in bits
    ptx: str


class _Device:
    """A GPU that is not there."""

    def __init__(self, architecture: int) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", architecture, 32)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return int(self._target.arch)  # as compiled kernels are kept by the number of the device

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def skip_without_compiler() -> None:
    """Skip a test where Triton cannot compile, or interprets."""
    triton = pytest.importorskip("triton", reason="needs Triton")
    if not sys.platform.startswith("linux") or os.uname().machine != "x86_64":
        pytest.skip("Triton carries an assembler for x86-64 Linux")
    if triton.knobs.runtime.interpret:
        pytest.skip("Triton interprets in this process")


def resources(
    launch: Callable[[], object], architecture: int, *modules: ModuleType
) -> list[Resources]:
    """Compile the kernels that a call launches, without running them.

    Args:
        launch: Calls host code with tensors on the CPU, whose kernels are compiled as for tensors
            of this kind on a GPU.
        architecture: 80, 90 or 100.
        modules: The modules of the host code that choose the device by ``on``.
    """
    found: list[Resources] = []
    with tempfile.TemporaryDirectory() as cache, _compiling(architecture, cache, found, modules):
        launch()
    return found


@contextlib.contextmanager
def _compiling(
    architecture: int, cache: str, found: list[Resources], modules: tuple[ModuleType, ...]
) -> Iterator[None]:
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    run = JITFunction.run

    def compile_only(self: Any, *args: Any, **options: Any) -> Any:
        kernel = run(self, *args, **options | {"warmup": True})
        found.append(_resources_of(self, kernel, architecture, Path(cache)))
        return kernel

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", cache)
        patch.setattr(JITFunction, "run", compile_only)
        for module in modules:
            patch.setattr(module, "on", lambda tensor: contextlib.nullcontext())
        patch.setattr(driver, "_active", _Device(architecture))
        yield


def _resources_of(function: Any, kernel: Any, architecture: int, folder: Path) -> Resources:
    from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability

    ptx = kernel.asm["ptx"]
    source = folder / "kernel.ptx"
    source.write_text(ptx)
    name = f"--gpu-name={sm_arch_from_capability(architecture)}"
    fused = [] if kernel.metadata.enable_fp_fusion else ["--fmad=false"]
    assembler = [get_ptxas(architecture).path, "-v", name, *fused, str(source), "-o", os.devnull]
    said = subprocess.run(assembler, capture_output=True, text=True, check=True).stderr
    (registers,) = re.findall(r"Used (\d+) registers", said)
    spilled = re.findall(r"(\d+) bytes spill", said)
    widths = re.findall(r"ld\.global\.(?:[a-z_0-9:]+\.)*?(?:v(\d)\.)?[bfus](\d+)\b", ptx)
    sizes = [int(count or 1) * int(bits) for count, bits in widths]
    names = [function.arg_names[position[0]] for position in kernel.src.constants]
    return Resources(
        function.__name__,
        dict(zip(names, kernel.src.constants.values(), strict=True)),
        architecture,
        int(registers),
        sum(map(int, spilled)),
        {size: sizes.count(size) for size in sorted(set(sizes))},
        ptx,
    )
