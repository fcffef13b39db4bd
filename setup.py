"""Builds the native core; everything else is in pyproject.toml."""

import os
import shlex
import subprocess
import sys
from itertools import chain
from pathlib import Path

import torch
from setuptools import Extension, setup
from torch.utils.cpp_extension import BuildExtension, CppExtension, include_paths

CSRC = Path(__file__).resolve().parent / "csrc"
# Reading torch's headers takes most of the time of a small file. So each folder is compiled as one
# unit, a generated file that includes all of the folder's; the largest first, while both cores have
# more to do: setuptools sorts sources by their names, which begin with the place in this list.
UNITS = ("python", "device", "attention", "gemm", "core", "embedding_bag", "int8_gemm", "conv")
# The kernels of an operator (simd/kernels.h) read no such headers, and are compiled once for each
# instruction set, of which these are the bytes of a register and GCC's name.
AVX2 = "avx2,fma,f16c,sse4.2"
AVX512 = f"{AVX2},avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512"
SETS = {
    "default": (16, ""),
    "avx2": (32, AVX2),
    "avx512": (64, AVX512),
    "avx512bf16": (64, f"{AVX512},avx512bf16"),
    "avx512vnni": (64, f"{AVX512},avx512vnni"),
}
KERNELS = {
    "attention": ("default", "avx2", "avx512"),
    "core": ("default", "avx2", "avx512", "avx512bf16"),
    "embedding_bag": ("default", "avx2", "avx512"),
    "gemm": ("default", "avx2", "avx512"),
    "int8_gemm": ("default", "avx2", "avx512", "avx512vnni"),
    "digest": ("avx2", "avx512"),
}
# -fopenmp to compile only: at::parallel_for is serial without it, and the runtime it calls is the
# one that torch has loaded. Linked as well, it would bring a second one with threads of its own.
FLAGS = ["-O3", "-g0", "-fopenmp", "-fno-math-errno", "-fno-trapping-math"]
FLAGS += ["-fvisibility=hidden", "-Wall", "-Wno-psabi"]
FLAGS += os.environ.get("HOLDFAST_CXXFLAGS", "").split()  # make test-sanitize


def generated(name: str, text: str) -> str:
    """Write a source below ``build/units``, if it changed, and return its path."""
    path = Path("build/units") / f"{name}.cpp"
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
    return str(path)


def unit(folder: str) -> str:
    """Generate the source that includes every ``.cpp`` file of one folder of ``csrc``."""
    files = sorted((CSRC / folder).glob("*.cpp"))
    text = "".join(f'#include "{file}"\n' for file in files)
    place = UNITS.index(folder) if folder in UNITS else 0
    return generated(f"{place}_{folder}", text)


def kernels(folder: str) -> list[str]:
    """Generate the sources that include a folder's kernels, one for each instruction set."""
    paths = []
    for name in KERNELS.get(folder, ()):
        width, target = SETS[name]
        text = f'#define HOLDFAST_BYTES {width}\n#define HOLDFAST_NAME "{name}"\n'
        text += f"#define HOLDFAST_OF_SET(kernels) kernels##_{name}\n"
        # GCC does not define __AVX512BF16__ and the like in C++ after this pragma.
        text += f"#define HOLDFAST_{name.upper()}\n"
        text += f'#include "{CSRC / folder / "simd/kernels.h"}"\n'
        if target:
            text = f'#if defined(__x86_64__)\n#pragma GCC target("{target}")\n{text}#endif\n'
        paths.append(generated(f"{folder}_{name}", text))
    return paths


def has_compilers() -> bool:
    """Whether the C++ compiler runs, and the C compiler where one is named."""
    wanted = [os.environ.get("CXX", "c++"), *filter(None, [os.environ.get("CC")])]
    for command in wanted:
        try:
            words = [*shlex.split(command), "--version"]
            subprocess.run(words, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        except (OSError, subprocess.CalledProcessError):
            return False
    return True


class Build(BuildExtension):
    """Builds the extensions, and records beside them the torch that they need."""

    def run(self) -> None:
        super().run()
        in_place = self.inplace or getattr(self, "editable_mode", False)
        folder = Path("holdfast") if in_place else Path(self.build_lib, "holdfast")
        folder.mkdir(parents=True, exist_ok=True)
        text = f'"""By setup.py, with the native core."""\n\nTORCH = "{torch.__version__}"\n'
        Path(folder, "_built_for.py").write_text(text)


PURE = os.environ.get("HOLDFAST_PURE_PYTHON") == "1"
if not PURE and "build_ext" not in sys.argv and not has_compilers():
    PURE = True
    print(
        "holdfast: no C++ compiler runs, so that the native core is left out: holdfast.protect "
        "cannot verify torch's own products, and holdfast.matmul and holdfast.nn run plain-torch "
        "references, many times slower. With a compiler (CXX, CC), install again.",
        file=sys.stderr,
    )

if PURE:
    setup()
else:
    setup(
        ext_modules=[
            # Apart, and without torch, which processes that only keep bytes never load.
            Extension(
                "holdfast._digest",
                [unit("digest"), *kernels("digest")],
                include_dirs=[str(CSRC), *include_paths()],
                extra_compile_args=[*FLAGS, "-std=c++17"],
                language="c++",
            ),
            CppExtension(
                "holdfast._C",
                [*map(unit, UNITS), *chain.from_iterable(map(kernels, UNITS))],
                include_dirs=[str(CSRC)],
                extra_compile_args=FLAGS,
                py_limited_api=False,
            ),
        ],
        cmdclass={"build_ext": Build},
    )
