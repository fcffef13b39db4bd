"""Builds the native core; everything else is in pyproject.toml."""

import os
from pathlib import Path

from setuptools import Extension, setup
from torch.utils.cpp_extension import BuildExtension, CppExtension, include_paths

CSRC = Path(__file__).resolve().parent / "csrc"
# Reading torch's headers takes most of the time of a small file. So each folder is compiled as one
# unit, a generated file that includes all of the folder's; the largest first, while both cores have
# more to do. Files for one instruction set (simd/) read no such headers, and stand alone.
UNITS = ("python", "attention", "gemm", "core", "embedding_bag", "int8_gemm")
# -fopenmp to compile only: at::parallel_for is serial without it, and the runtime it calls is the
# one that torch has loaded. Linked as well, it would bring a second one with threads of its own.
FLAGS = ["-O3", "-g0", "-fopenmp", "-fno-math-errno", "-fno-trapping-math"]
FLAGS += ["-fvisibility=hidden", "-Wall", "-Wno-psabi"]
FLAGS += os.environ.get("HOLDFAST_CXXFLAGS", "").split()  # make test-sanitize


def unit(folder: str) -> str:
    """The path of a source that includes every ``.cpp`` file of one folder of ``csrc``."""
    path = Path("build/units") / f"{folder}.cpp"
    text = "".join(f'#include "{file}"\n' for file in sorted((CSRC / folder).glob("*.cpp")))
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
    return str(path)


def sources(pattern: str) -> list[str]:
    """Paths of the files below ``csrc`` that match, relative as setuptools wants them."""
    return sorted(str(path.relative_to(CSRC.parent)) for path in CSRC.glob(pattern))


if os.environ.get("HOLDFAST_PURE_PYTHON") == "1":  # for machines without a C++ compiler
    setup()
else:
    setup(
        ext_modules=[
            CppExtension(
                "holdfast._C",
                [*map(unit, UNITS), *sources("*/simd/*.cpp")],
                include_dirs=[str(CSRC)],
                extra_compile_args=FLAGS,
                py_limited_api=False,
            ),
            # Apart, and without torch, which processes that only keep bytes never load.
            Extension(
                "holdfast._digest",
                sources("digest/*.cpp"),
                include_dirs=[str(CSRC), *include_paths()],
                extra_compile_args=[*FLAGS, "-std=c++17"],
                language="c++",
            ),
        ],
        cmdclass={"build_ext": BuildExtension},
    )
