"""Builds the native core; everything else is in pyproject.toml."""

import os
from pathlib import Path

from setuptools import Extension, setup
from torch.utils.cpp_extension import BuildExtension, CppExtension, include_paths

SOURCES = sorted(str(path) for path in Path("csrc").glob("*.cpp"))
# Apart, and without torch, which processes that only keep bytes never load.
DIGEST_SOURCES = sorted(str(path) for path in Path("csrc/digest").glob("*.cpp"))
# -fopenmp to compile only: at::parallel_for is serial without it, and the runtime it calls is the
# one that torch has loaded. Linked as well, it would bring a second one with threads of its own.
FLAGS = ["-O3", "-fopenmp", "-fno-math-errno", "-fno-trapping-math"]
FLAGS += ["-fvisibility=hidden", "-Wall", "-Wno-psabi"]
FLAGS += os.environ.get("HOLDFAST_CXXFLAGS", "").split()  # make test-sanitize

if os.environ.get("HOLDFAST_PURE_PYTHON") == "1":  # for machines without a C++ compiler
    setup()
else:
    setup(
        ext_modules=[
            CppExtension("holdfast._C", SOURCES, extra_compile_args=FLAGS, py_limited_api=False),
            Extension(
                "holdfast._digest",
                DIGEST_SOURCES,
                include_dirs=include_paths(),
                extra_compile_args=[*FLAGS, "-std=c++17"],
                language="c++",
            ),
        ],
        cmdclass={"build_ext": BuildExtension},
    )
