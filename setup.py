"""Builds the native core; everything else is in pyproject.toml."""

import os
from pathlib import Path

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

SOURCES = sorted(str(path) for path in Path("csrc").glob("*.cpp"))
# -fopenmp to compile only: at::parallel_for is serial without it, and the runtime it calls is the
# one that torch has loaded. Linked as well, it would bring a second one with threads of its own.
FLAGS = ["-O3", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-Wall", "-Wno-psabi"]

if os.environ.get("HOLDFAST_PURE_PYTHON") == "1":  # for machines without a C++ compiler
    setup()
else:
    setup(
        ext_modules=[
            CppExtension("holdfast._C", SOURCES, extra_compile_args=FLAGS, py_limited_api=False)
        ],
        cmdclass={"build_ext": BuildExtension},
    )
