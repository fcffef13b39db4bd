"""The verification kernel compiled for GPUs that need not be there: registers, spills and loads."""

import functools
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from holdfast import native

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
    pytest.mark.skipif(native.core is None, reason="the native core is not built"),
    pytest.mark.skipif(
        not sys.platform.startswith("linux") or os.uname().machine != "x86_64",
        reason="Triton carries an assembler for x86-64 Linux",
    ),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is compiled"),
]

ARCHITECTURES = (80, 90, 100)
MOST_REGISTERS = 128
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# What the launches of a linear layer ask for: sizes of A and B, layouts of C and A, and flags.
LARGE = {
    "forward": (8192, 4096, 1024, "rows", {"encode": True, "addend": "row"}),
    "grad_a": (8192, 1024, 4096, "rows", {"across": True}),
    "grad_b": (4096, 1024, 8192, "columns", {"a_bytes": 0}),
    "alone": (8192, 4096, 1024, "rows", {}),
    "alone_transposed": (1024, 1024, 16384, "columns", {}),
    "weight": (1024, 0, 4096, "columns", {"encode": True, "c_bytes": 0}),
    "weight_both": (4096, 0, 1024, "rows", {"encode": True, "across": True, "c_bytes": 0}),
    "weight_both_small": (1024, 0, 1024, "rows", {"encode": True, "across": True, "c_bytes": 0}),
    "small": (64, 64, 64, "rows", {}),
}
# Of a linear layer in fp8 and of a layer of experts: what has scales, and what groups divide.
SCALED = {"scaled": True}
FP8 = {
    "fp8 forward": (8192, 4096, 1024, "rows", {"addend": "row"} | SCALED),
    "fp8 weight": (1024, 0, 4096, "columns", {"encode": True, "c_bytes": 0} | SCALED),
}
EXPERTS = {
    "experts forward": (8192, 4096, 1024, "rows", {"groups": 1}),
    "experts grad_b": (1024, 4096, 8192, "columns", {"groups": 2}),
}
WITHOUT_BIAS = {"grad_b first": (4096, 1024, 8192, "columns", {"across": True})}
EVERY = LARGE | FP8 | EXPERTS | WITHOUT_BIAS


WIDE_COPY = r"cp\.async\.cg\.\S+ \[.+?\], \[.+?\], 0x10\b"  # of 16 bytes


class Code(NamedTuple):
    """What an assembler says of a kernel."""

    registers: int
    stack_bytes: int
    local_bytes: int
    ptx: str
    cubin: bytes

    @property
    def wide_copies(self) -> int:
        """The number of copies of 16 bytes to shared memory."""
        return len(re.findall(WIDE_COPY, self.ptx))


def request(name: str, dtype: torch.dtype, aligned: bool = True) -> Any:
    """The variant that the native core would ask for."""
    from holdfast.abft.gemm.ahead_of_time import Request
    from holdfast.abft.gemm.kernels_verify import Variant

    rows, columns, inner, a_layout, flags = EVERY[name]
    stored = torch.bfloat16 if dtype.itemsize == 1 else dtype
    flags = {"c_bytes": stored.itemsize, "a_bytes": dtype.itemsize} | flags
    scaled, groups = flags.pop("scaled", False), flags.pop("groups", 0)
    sizes = 1, rows, columns, inner, flags.pop("c_bytes"), flags.pop("a_bytes")
    shown = native.core.kernel_plan(*sizes, "rows", a_layout, **flags)
    c_rows, c_columns, a_rows, a_columns = shown["tiles"]
    turned = a_layout == "columns" and flags.get("across", False)
    variant = Variant(
        a_layout=int(a_layout == "columns" and a_rows > 0 and not turned),
        c_rows=c_rows,
        c_columns=c_columns,
        a_rows=a_rows,
        a_columns=a_columns,
        addend="addend" in flags,
        predict=c_rows > 0 and a_rows > 0,
        encode=flags.get("encode", False),
        across=flags.get("across", False),
        turned=turned,
        scaled=scaled,
        groups=groups,
    )
    sums = torch.float64 if dtype.itemsize >= 4 else torch.float32
    return Request(variant, stored, stored, dtype, sums, (aligned,) * 3)


@functools.cache
def code(wanted: Any, architecture: int) -> Code:
    """Compile a variant and take it apart."""
    from triton.backends.compiler import GPUTarget

    from holdfast.abft.gemm.ahead_of_time import compiled

    kernel = compiled(wanted, GPUTarget("cuda", architecture, 32))
    assert kernel.metadata.global_scratch_size == kernel.metadata.profile_scratch_size == 0
    assert kernel.metadata.shared <= 48 * 1024  # what a program has without asking for more
    used = dumped(kernel.asm["cubin"], "--dump-resource-usage")
    found = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", used)
    assert found is not None
    return Code(*map(int, found.groups()), kernel.asm["ptx"], kernel.asm["cubin"])


def dumped(cubin: bytes, what: str) -> str:
    """What NVIDIA's tool shows of a kernel's code."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, what, file.name]
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=60
        ).stdout


def check(name: str, dtype: torch.dtype, architecture: int) -> Code:
    """No spills, two programs a multiprocessor, and copies of 16 bytes."""
    got = code(request(name, dtype), architecture)
    where = f"{name} {dtype} sm_{architecture}"
    assert got.registers <= MOST_REGISTERS, where
    assert got.stack_bytes == got.local_bytes == 0, where
    variant = request(name, dtype).variant
    matrices = (variant.c_rows > 0) + (variant.a_rows > 0) + variant.addend
    assert got.wide_copies >= variant.stages * matrices, where
    return got


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is taken from an earlier compilation."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.compile
@pytest.mark.representative
def test_a_launch_of_each_kind_compiles_without_spills() -> None:
    for name, architecture in zip(("forward", "grad_a", "grad_b"), ARCHITECTURES, strict=True):
        got = check(name, torch.bfloat16, architecture)
        if architecture == 90:  # its instructions are those that PTX and the resources tell of
            sass = dumped(got.cubin, "--dump-sass")
            assert len(re.findall(r"LDGSTS\.E\.\S*128", sass)) == got.wide_copies
            assert not re.search(r"\b(LDL|STL)\b", sass)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "every",
    [
        pytest.param(False, marks=pytest.mark.compile),
        pytest.param(True, marks=pytest.mark.campaign),
    ],
    ids=["a dtype each", "all"],
)
def test_every_launch_compiles_without_spills(every: bool) -> None:
    for number, name in enumerate(LARGE):
        dtypes = (torch.bfloat16, torch.float32)
        for dtype in dtypes if every else dtypes[number % 2 :][:1]:
            check(name, dtype, 90)
    check("grad_b first", torch.bfloat16, 90)
    # No launch takes more registers in fp64 than in fp32; this one takes the most in fp64.
    check("grad_a", torch.float64, 90)
    for name in ("forward", "grad_a"):
        for architecture in (80, 100):
            check(name, torch.float32, architecture)


@pytest.mark.compile
def test_scaled_and_grouped_launches_compile_without_spills() -> None:
    check("fp8 forward", torch.float8_e4m3fn, 90)
    check("fp8 forward", torch.float8_e5m2, 100)
    check("fp8 weight", torch.float8_e4m3fn, 90)
    check("experts forward", torch.bfloat16, 90)
    check("experts grad_b", torch.float32, 100)


@pytest.mark.compile
def test_parameters_have_the_types_that_the_core_packs() -> None:
    from holdfast.abft.gemm.ahead_of_time import signature

    def flat(kind: Any) -> list[str]:
        if isinstance(kind, tuple):
            return [each for kinds in kind for each in flat(kinds)]
        return [] if kind == "constexpr" else [kind]

    wanted = request("alone", torch.bfloat16)
    types = {"i32": "u32", "fp64": "f64"}  # all others are addresses or 64 bits
    expected = [types.get(kind, "u64") for kind in flat(tuple(signature(wanted).values()))]
    entry = code(wanted, 90).ptx.split(".entry")[1].split(")")[0]
    assert re.findall(r"\.param \.(\w+)", entry) == [*expected, "u64", "u64"]


@pytest.mark.compile
def test_sums_are_complete_before_a_program_is_counted_and_are_read_past_the_cache() -> None:
    ptx = code(request("alone", torch.bfloat16), 90).ptx
    before, after = ptx.split("atom.global.gpu.acq_rel.add", 1)
    assert re.findall(r"bar\.sync|st\.global", before)[-1] == "bar.sync"
    assert re.search(r"ld\.global\.cg", after)
    assert not re.search(r"ld\.global\.(?!cg)", after)


@pytest.mark.compile
def test_what_is_not_aligned_is_not_copied_in_vectors() -> None:
    got = code(request("alone", torch.bfloat16, aligned=False), 90)
    assert got.wide_copies == 0
    assert (got.stack_bytes, got.registers <= MOST_REGISTERS) == (0, True)
