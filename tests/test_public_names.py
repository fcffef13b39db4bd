"""The public names: importable in every order, and the only ones that documents use."""

import ast
import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
EXAMPLES = sorted(ROOT.glob("examples/**/*.py"))
MODULES = {"events", "inject", "nn", "planner", "replay", "thresholds"}

# Each order runs in a fork of one process that has imported torch, so that each starts without
# holdfast at a small cost.
ORDERS = """
import os, sys, types
import torch
# The first order compiles the modules for all others.
sys.dont_write_bytecode, sys.pycache_prefix = False, {compiled!r}
names = {names!r}
modules = {modules!r}
# Names of one module begin with the same import: one order for each module.
homes = {homes!r}
firsts = {{homes.get(name, "errors"): k for k, name in enumerate(names)}}
orders = [names[k:] + names[:k] for k in firsts.values()]
for order in orders:
    pid = os.fork()
    if pid == 0:
        for name in order:
            exec(f"from holdfast import {{name}}")
            if name in modules:
                exec(f"import holdfast.{{name}}")
        import holdfast
        wrong = [n for n in names
                 if isinstance(getattr(holdfast, n), types.ModuleType) != (n in modules)]
        from holdfast.abft.thresholds.chains import longest_chain
        wrong += ["an import measures kernels"] * longest_chain.cache_info().currsize
        print(order[0], wrong, flush=True) if wrong else None
        os._exit(bool(wrong))
    if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
        sys.exit(f"wrong or failed when {{order}} are imported in this order")
"""


@pytest.mark.processes
def test_every_import_order_of_the_public_names_works(tmp_path: Path) -> None:
    homes = holdfast._HOME | {name: name for name in MODULES}
    assert {"Guard", "Snapshots", "matmul"} | MODULES <= homes.keys()
    code = ORDERS.format(
        names=holdfast.__all__, modules=MODULES, homes=homes, compiled=str(tmp_path)
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def public(module: str, name: str) -> bool:
    """Whether ``__all__`` of a package, or of a public module, names what is imported from it."""
    source = importlib.import_module(module)
    adapter = module.startswith("holdfast.integrations.")
    is_public = (
        hasattr(source, "__path__") or module.removeprefix("holdfast.") in MODULES or adapter
    )
    return is_public and name in getattr(source, "__all__", ())


def private_imports(source: str) -> list[str]:
    """The imports of a program from the packages that are not public."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("holdfast"):
            found += [
                f"from {node.module} import {alias.name}"
                for alias in node.names
                if not public(str(node.module), alias.name)
            ]
    return found


def python_blocks(text: str) -> list[str]:
    """The Python programs in a document."""
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def test_a_private_import_is_seen() -> None:
    assert private_imports("from holdfast.snapshot import smp") == [
        "from holdfast.snapshot import smp"
    ]
    assert private_imports("from holdfast.inject import Fault\nfrom holdfast import protect") == []
    assert python_blocks("a\n```python\nx = 1\n```\n") == ["x = 1\n"]


def test_documents_and_examples_import_public_names_only() -> None:
    wrong = {
        str(path.relative_to(ROOT)): found
        for path in (*DOCUMENTS, *EXAMPLES)
        for source in (
            [path.read_text()] if path.suffix == ".py" else python_blocks(path.read_text())
        )
        if (found := private_imports(source))
    }
    assert wrong == {}


def test_public_names_in_the_text_of_documents_exist() -> None:
    """Names such as ``holdfast.replay.check_determinism`` in code spans resolve."""
    missing = []
    for path in DOCUMENTS:
        spans = re.findall(r"`([^`\n]+)`", path.read_text())
        for dotted in {d for s in spans for d in re.findall(r"\bholdfast(?:\.[A-Za-z_]\w*)+", s)}:
            try:
                pkgutil.resolve_name(dotted)
            except (ImportError, AttributeError):
                missing.append(f"{path.name}: {dotted}")
    assert missing == []
