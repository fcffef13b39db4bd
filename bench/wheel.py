"""A built wheel on a machine without a compiler: it is installed, repairs a fault, and restores.

    python -m bench.wheel WHEEL

Makes a virtual environment of its own, installs the wheel and what it requires from the package
index, with the versions of constraints.txt, and runs ``bench/wheel_smoke.py`` there in an empty
folder with no compiler on the PATH. Exit code 1 unless the native core is loaded, a fault in a
product is repaired bit for bit and a snapshot is restored bit for bit. A row keeps the size of the
wheel and the seconds from the start of the program to the end of its first protected pass.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

from bench.rows import record

ROOT = Path(__file__).parents[1]
WITHOUT_COMPILER = {"PATH": "/nonexistent", "CC": "/bin/false", "CXX": "/bin/false"}


def main() -> int:
    """Install, run, judge and record."""
    wheel = Path(sys.argv[1]).absolute()
    with tempfile.TemporaryDirectory(prefix="holdfast-wheel-") as folder:
        python = Path(folder, "venv", "bin", "python")
        venv.create(python.parents[1], with_pip=True)
        # A checkout on PYTHONPATH would count as installed.
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        began = time.monotonic()
        constraints = ["--constraint", str(ROOT / "constraints.txt")]
        install = [str(python), "-m", "pip", "install", "--quiet", "--only-binary", ":all:"]
        subprocess.run([*install, *constraints, str(wheel)], check=True, env=environment)
        install_s = time.monotonic() - began
        program = shutil.copy(ROOT / "bench" / "wheel_smoke.py", folder)
        done = subprocess.run(
            [str(python), program],
            env=environment | WITHOUT_COMPILER,
            cwd=folder,
            stdout=subprocess.PIPE,
            text=True,
            timeout=300,
            check=True,
        )
    found = json.loads(done.stdout.strip().splitlines()[-1])
    size = wheel.stat().st_size
    record("wheel", {"wheel": wheel.name, "bytes": size, "install_s": round(install_s, 1), **found})
    good = found["native"] and found["repaired"] and found["restored"]
    return 0 if good and found["events"] == ["gemm_fault"] else 1


if __name__ == "__main__":
    sys.exit(main())
