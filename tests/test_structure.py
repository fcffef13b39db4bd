"""The code, read: who imports whom, what is public, what is documented."""

import ast
import functools
import importlib
from collections.abc import Iterator
from pathlib import Path

from case_loops import for_each

import holdfast

ROOT = Path(holdfast.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
parsed = functools.cache(ast.parse)
LEAVES = frozenset(
    {
        *("errors", "events", "config", "digest", "sites", "site_names", "native", "rng"),
        *("version", "json_store", "lazy", "logs", "memory", "optimizers", "text_files"),
        *("torchrun", "spare_process", "_built_for"),
    }
)

# Every layer, and the layers below it: cli → {report, screen, launch} → inject → guard →
# {protection, replay, snapshot} → nn → abft → leaves. The laboratory imports the library, never
# the reverse.
_LADDER = (
    LEAVES
    | {"abft", "nn", "protection", "replay", "snapshot", "planner", "liveness"}
    | {"collectives"}
)
_DRIVERS = _LADDER | {"inject", "guard", "step"}
BELOW = {
    **dict.fromkeys(LEAVES, LEAVES),
    "abft": LEAVES,
    "thresholds": LEAVES | {"abft"},
    "nn": LEAVES | {"abft"},
    "protection": LEAVES | {"abft", "nn"},
    "replay": LEAVES,
    "collectives": LEAVES,
    "liveness": LEAVES,
    "snapshot": LEAVES | {"planner"},
    "planner": LEAVES,
    "inject": _LADDER,
    "step": _LADDER,
    "guard": _LADDER | {"step", "attached"},
    "attached": _LADDER | {"step", "guard"},
    "screen": LEAVES | {"abft", "nn", "inject"},
    "report": _DRIVERS,
    "integrations": _LADDER | {"guard", "step"},
    "launch": LEAVES,
    "cli": _DRIVERS | {"report", "screen", "thresholds", "launch"},
    "__main__": {"cli"},
}


def layer_of(path: Path) -> str:
    """The first part of a module's path below the package."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports_of(tree: ast.Module, package: str) -> Iterator[str]:
    """Yield every module that a file imports, wherever in the file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            yield from (f"{module}.{alias.name}" for alias in node.names)


def target_of(name: str) -> str:
    """The layer that an imported name belongs to; a public name belongs to its home."""
    return holdfast._HOME.get(name.split(".")[1], name).split(".")[1]


def violations(layer: str, source: str, package: str) -> list[str]:
    """The imports of a file that its layer forbids."""
    allowed = BELOW[layer] | {layer, "_C", "_digest", "__version__"}
    used = list(imports_of(parsed(source), package))
    return [
        name
        for name in used
        if name.startswith("holdfast_lab")
        or (name.startswith("holdfast.") and target_of(name) not in allowed)
    ]


@for_each("path", FILES)
def test_a_module_imports_only_from_its_own_layer_and_those_below(path: Path) -> None:
    if path == ROOT / "__init__.py":
        return
    package = ".".join(("holdfast", *path.relative_to(ROOT).parts[:-1]))
    assert violations(layer_of(path), path.read_text(), package) == []


DECIDING = [
    path for path in FILES if layer_of(path) in ("snapshot", "guard", "attached", "step", "replay")
]


@for_each("path", DECIDING)
def test_nothing_is_decided_by_a_clock_that_may_jump(path: Path) -> None:
    clocks = {"time", "time_ns", "localtime", "gmtime", "now", "utcnow", "today"}
    read = [
        node.attr
        for node in ast.walk(parsed(path.read_text()))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in ("time", "datetime", "date")
        and node.attr in clocks
    ]
    assert read == []


@for_each(
    ("layer", "source"),
    [
        ("abft", "from holdfast import inject"),
        ("abft", "import holdfast.snapshot.client.snapshots"),
        ("snapshot", "def f():\n    from holdfast.abft.gemm import op"),
        ("events", "if TYPE_CHECKING:\n    from holdfast.abft import gemm"),
        ("abft", "from ..protection import protect"),
        ("events", "from holdfast.protection import protect"),
        ("snapshot", "from holdfast import protect"),
        ("guard", "from holdfast_lab.trainer import data"),
        ("cli", "import holdfast_lab.study"),
        ("screen", "from holdfast.snapshot import client"),
        ("abft", "from holdfast.screen import judge"),
    ],
)
def test_a_wrong_import_is_seen(layer: str, source: str) -> None:
    assert len(violations(layer, source, f"holdfast.{layer}")) == 1


def test_only_native_loads_the_extension() -> None:
    loading = [
        path.name
        for path in FILES
        if "holdfast._C" in set(imports_of(parsed(path.read_text()), "holdfast"))
    ]
    assert loading == ["native.py"]


def test_all_is_what_is_visible_and_every_exported_name_of_a_package_exists() -> None:
    assert dir(holdfast) == sorted(set(holdfast.__all__))
    for path in ROOT.rglob("__init__.py"):
        module = importlib.import_module(".".join(("holdfast", *path.relative_to(ROOT).parts[:-1])))
        names = list(getattr(module, "__all__", []))
        assert len(set(names)) == len(names)
        assert [name for name in names if not hasattr(module, name)] == [], path


def test_no_file_is_a_collection_of_leftovers() -> None:
    assert [path for path in FILES if path.stem in {"utils", "helpers", "common", "misc"}] == []


@for_each("path", FILES)
def test_every_public_name_has_a_docstring(path: Path) -> None:
    tree = parsed(path.read_text())
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    public = [
        node for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")
    ]
    assert [node.name for node in public if not ast.get_docstring(node)] == []
