"""No two files import each other, directly or by way of others, when they are loaded."""

import ast
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

import holdfast

ROOT = Path(holdfast.__file__).parents[1]
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in ("holdfast", "holdfast_lab")
    for path in (ROOT / package).rglob("*.py")
}


def loaded(body: list[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield the imports that loading a module carries out, also within ``if`` and ``try``."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from loaded(node.orelse)
        elif isinstance(node, ast.If | ast.Try):
            handlers = node.handlers if isinstance(node, ast.Try) else []
            for part in (node.body, node.orelse, *(handler.body for handler in handlers)):
                yield from loaded(part)


def imports_of(source: str, files: set[str]) -> set[str]:
    """The modules among ``files`` that a module imports when it is loaded."""
    found = set()
    for node in loaded(ast.parse(source).body):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in files else node.module for name in names}
    return found & files


def cycle_in(graph: dict[str, set[str]]) -> str:
    """A cycle, as a chain of modules that import each the next; empty if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return " imports ".join(reversed(error.args[1]))
    return ""


def test_no_module_imports_itself_by_way_of_others() -> None:
    sources = {name: path.read_text() for name, path in FILES.items()}
    graph = {name: imports_of(source, set(FILES)) for name, source in sources.items()}
    print(f"{sum(map(len, graph.values()))} imports between {len(graph)} files", file=sys.stderr)
    assert cycle_in({name: imported - {name} for name, imported in graph.items()}) == ""


def test_a_cycle_is_found_and_named_and_imports_for_types_only_are_none() -> None:
    sources = {
        "holdfast.a": "from holdfast import b",
        "holdfast.b": "try:\n    import holdfast.c\nexcept ImportError:\n    pass",
        "holdfast.c": "from holdfast.a import name",
    }
    graph = {name: imports_of(source, set(sources)) for name, source in sources.items()}
    found = cycle_in(graph).split(" imports ")
    assert len(found) == 4
    assert all(later in graph[earlier] for earlier, later in pairwise(found))
    sources["holdfast.c"] = "if TYPE_CHECKING:\n    from holdfast.a import name"
    graph = {name: imports_of(source, set(sources)) for name, source in sources.items()}
    assert cycle_in(graph) == ""
