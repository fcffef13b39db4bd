"""Measure the structure of the source: sizes, imports between files, cycles, paths through files.

``python -m bench.structure [--root DIR] [--record]`` reads the checkout in DIR (default: this one).
``--paths`` also runs one faulty product and one snapshot of one tensor, and counts the files that
they pass through; run it with ``PYTHONPATH=DIR`` to measure another checkout.
"""

import argparse
import ast
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

PACKAGES = ("holdfast", "holdfast_lab")
SOURCES = {"holdfast": ".py", "holdfast_lab": ".py", "tests": ".py", "bench": ".py", "csrc": ""}


def lines_of(root: Path) -> dict[str, dict[str, int]]:
    """Count the files and lines of each part of the checkout."""
    counts = {}
    for part, suffix in SOURCES.items():
        endings = {suffix} if suffix else {".cpp", ".h"}
        files = [path for path in (root / part).rglob("*") if path.suffix in endings]
        counts[part] = {
            "files": len(files),
            "lines": sum(path.read_text().count("\n") for path in files),
            "any": sum(len(re.findall(r"\bAny\b", path.read_text())) for path in files),
        }
    return counts


def import_graph(root: Path) -> dict[str, set[str]]:
    """Map each module of the packages to those that it imports, at the top or in a function."""
    modules = {}
    for package in PACKAGES:
        for path in (root / package).rglob("*.py"):
            name = ".".join(path.relative_to(root).with_suffix("").parts)
            modules[name.removesuffix(".__init__")] = path
    return {
        name: {target for target in _imported(path, modules) if target != name}
        for name, path in modules.items()
    }


def _imported(path: Path, modules: dict[str, Path]) -> Iterator[str]:
    for node in _executed(ast.parse(path.read_text()).body):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                if full in modules:
                    yield full
                elif node.module in modules:
                    yield node.module


def _executed(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """Yield the statements of a module and its functions, without those for type checkers only."""
    for statement in body:
        guarded = isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test)
        if guarded:
            yield from _executed(statement.orelse)
        else:
            yield from ast.walk(statement)


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Find the groups of modules that import each other (strongly connected components)."""
    order: list[str] = []
    seen: set[str] = set()

    def visit(start: str, edges: dict[str, set[str]], out: list[str]) -> None:
        stack = [(start, iter(sorted(edges[start])))]
        seen.add(start)
        while stack:
            node, rest = stack[-1]
            following = next((target for target in rest if target not in seen), None)
            if following is None:
                out.append(node)
                stack.pop()
            else:
                seen.add(following)
                stack.append((following, iter(sorted(edges[following]))))

    for name in sorted(graph):
        if name not in seen:
            visit(name, graph, order)
    reverse: dict[str, set[str]] = {name: set() for name in graph}
    for name, targets in graph.items():
        for target in targets:
            reverse[target].add(name)
    seen.clear()
    found = []
    for name in reversed(order):
        if name not in seen:
            members: list[str] = []
            visit(name, reverse, members)
            if len(members) > 1:
                found.append(sorted(members))
    return sorted(found)


class FilePath:
    """The files of the package that run while the block runs, in order, over all threads.

    A re-entry is a step into a file that the path had been in before and had left.
    """

    def __init__(self, root: Path) -> None:
        self._prefix = f"{root.resolve() / 'holdfast'}{os.sep}"
        self.path: list[str] = []

    def _profile(self, frame: FrameType, event: str, _: object) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(self._prefix):
            short = name.removeprefix(self._prefix)
            if not self.path or self.path[-1] != short:
                self.path.append(short)

    def __enter__(self) -> "FilePath":
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def counts(self) -> dict[str, Any]:
        """Summarise the path."""
        files = len(set(self.path))
        return {"files": files, "steps": len(self.path), "re_entries": len(self.path) - files}


def faulty_product(root: Path, kind: str) -> dict[str, Any]:
    """Follow one product in which a fault is injected: a flip in its ``output`` or ``operand``."""
    import torch
    from torch import nn

    import holdfast
    from holdfast import events
    from holdfast.inject import Fault, Injector

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 48))
    batch = torch.randn(32, 64)
    protection = holdfast.protect(model)
    try:
        model(batch).sum().backward()
        fault = Fault(step=1, rank=0, kind="bitflip", bit=30, op="0/addmm/forward", site=kind)
        injecting = Injector(model, [fault], rank=0).step(1)
        with suppress(holdfast.UncorrectableFault), injecting, FilePath(root) as path:
            model(batch)
        seen = {event.kind for event in events.recent() if event.kind != "injected"}
        if not seen:
            raise RuntimeError(f"the {kind} fault was not seen: no path to measure")
    finally:
        protection.remove()
    return path.counts()


def one_tensor(root: Path) -> dict[str, Any]:
    """Follow the snapshot of a model of one tensor, from the trainer's side, and its restore."""
    import torch
    from torch import nn

    import holdfast

    model = nn.Linear(64, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tempfile.TemporaryDirectory() as folder:
        snapshots = holdfast.Snapshots(model, optimizer, run_dir=Path(folder) / "run")
        try:
            snapshots.restore()
            snapshots.begin(1)
            snapshots.finish()
            with FilePath(root) as saved:
                snapshots.begin(2)
                snapshots.finish()
            with FilePath(root) as restored:
                snapshots.restore()
        finally:
            snapshots.close(finished=True)
    return {"save": saved.counts(), "restore": restored.counts()}


def main() -> None:
    """Measure, print, and append a row if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("--paths", action="store_true", help="also follow a product and a tensor")
    parser.add_argument("--record", action="store_true", help="append a row to bench/results")
    args = parser.parse_args()
    graph = import_graph(args.root)
    commit = subprocess.run(
        ["git", "-C", str(args.root), "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    row: dict[str, Any] = {
        "measured_commit": commit,
        **lines_of(args.root),
        "modules": len(graph),
        "imports": sum(map(len, graph.values())),
        "cycles": cycles(graph),
    }
    if args.paths:
        followers: dict[str, Callable[[], dict[str, Any]]] = {
            "suspect_output": lambda: faulty_product(args.root, "output"),
            "suspect_operand": lambda: faulty_product(args.root, "operand"),
            "tensor": lambda: one_tensor(args.root),
        }
        row |= {name: follow() for name, follow in followers.items()}
    if args.record:
        from bench.rows import record

        record("structure", row)
    else:
        import json

        print(json.dumps(row, indent=1))


if __name__ == "__main__":
    main()
