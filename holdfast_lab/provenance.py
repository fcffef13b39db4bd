"""Fingerprints of the source files that a recorded result depends on.

A result is kept together with the name of the module that produced it and a hash of every source
file which that module can execute: its imports within this repository, their imports, and so on.
When the code of one of these files changes, the hash changes, and the result is reported as stale.
Comments, docstrings and empty lines are no code, and other files, such as tables, count whole.

The files are only parsed, never executed. An edge from one file to another is

- an import statement, wherever it stands; a name imported from a package is followed to the module
  that the package's ``__init__`` takes it from, and the rest of the package is left alone;
- an attribute of an imported package, such as ``holdfast.protect`` after ``import holdfast``;
- a string that is the name of a module, such as the argument of ``python -m``;
- a string that is the name of a file in the same folder, such as a TOML table or a script;
- an import of a native extension, which adds the C++ sources that it is built from.

Not covered: names of modules that are put together at run time, and third-party packages, whose
versions are recorded beside the hash.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Literal

PACKAGES = ("holdfast", "holdfast_lab", "bench")
# Sources of each native extension; setup.py holds the instruction sets that they are compiled for.
EXTENSIONS = {
    "holdfast._C": ("setup.py", "csrc"),
    "holdfast._digest": ("setup.py", "csrc/digest", "csrc/core"),
}
HASH_BYTES = 8

State = Literal["current", "stale", "no hash"]
# Words with dots between them, as in the name of a module or of a file in the same folder.
_CPP_COMMENT = re.compile(rb"//[^\n]*|/\*.*?\*/", re.DOTALL)
_DOTTED = re.compile(r"[\w-]+(\.\w+)+")
NO_HASH = "no hash: recorded before hashes were kept"


@dataclass(frozen=True)
class _Parsed:
    """The imports of one source file as written, before they are resolved to other files."""

    names: tuple[str, ...]
    strings: tuple[str, ...]
    exports: dict[str, str]


class SourceTree:
    """The source files below one folder and the imports between them.

    ``root`` is the folder of the packages ``holdfast``, ``holdfast_lab`` and ``bench``, and of
    ``csrc`` if it is a checkout.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._parsed: dict[str, _Parsed] = {}
        self._edges: dict[str, frozenset[str | Path]] = {}
        self._contents: dict[Path, bytes] = {}

    @cached_property
    def modules(self) -> dict[str, Path]:
        """The file of every module, by the module's dotted name."""
        found = {}
        for package in PACKAGES:
            for path in (self.root / package).rglob("*.py"):
                parts = path.relative_to(self.root).with_suffix("").parts
                found[".".join(parts).removesuffix(".__init__")] = path
        return found

    def files_of(self, module: str) -> list[Path]:
        """Return the files that a module, such as ``"bench.gemm"``, can execute, sorted."""
        files: set[Path] = set()
        pending, known = [module], {module}
        while pending:
            name = pending.pop()
            files.add(self.modules[name])
            if name not in self._edges:
                self._edges[name] = frozenset(self._targets(name))
            for target in self._edges[name]:
                if isinstance(target, Path):
                    files.add(target)
                elif target not in known:
                    known.add(target)
                    pending.append(target)
        return sorted(files)

    def hash_of(self, module: str) -> str:
        """Return a hash of the paths and the code of all files of ``files_of(module)``."""
        digest = blake2b(digest_size=HASH_BYTES)
        for path in self.files_of(module):
            name = path.relative_to(self.root).as_posix().encode()
            if path not in self._contents:
                self._contents[path] = blake2b(_code_of(path)).digest()
            digest.update(len(name).to_bytes(4, "little") + name + self._contents[path])
        return digest.hexdigest()

    def state_of(self, module: str, recorded: str | None) -> State:
        """Compare the hash recorded with a result with the hash of the files as they are now."""
        if recorded is None:
            return "no hash"
        known = module in self.modules
        return "current" if known and recorded == self.hash_of(module) else "stale"

    def _targets(self, name: str) -> Iterator[str | Path]:
        """Yield the modules and the other files that one module names."""
        yield from (self.modules[package] for package in _packages_above(name))
        parsed, path = self._parse(name), self.modules[name]
        for dotted in parsed.names:
            yield from self._resolved(dotted)
        for text in parsed.strings:
            if text in self.modules:
                yield text
            elif (beside := path.parent / text).is_file():
                module = ".".join(beside.relative_to(self.root).with_suffix("").parts)
                yield module if self.modules.get(module) == beside else beside

    def _resolved(self, dotted: str) -> Iterator[str | Path]:
        """Yield the modules and files that an import of a dotted name makes a file depend on."""
        for extension, sources in EXTENSIONS.items():
            if f"{dotted}.".startswith(f"{extension}."):
                for source in (self.root / each for each in sources):
                    if source.is_file():
                        yield source
                    yield from (path for path in source.rglob("*") if path.suffix in (".cpp", ".h"))
                return
        module = dotted
        while module and module not in self.modules:
            module = module.rpartition(".")[0]
        if not module:
            return
        rest = dotted[len(module) + 1 :].partition(".")[0]
        exports = self._parse(module).exports
        if rest in exports:  # the package exports this name, and nothing else of it is used
            yield self.modules[module]
            yield from (self.modules[package] for package in _packages_above(module))
            yield from self._resolved(exports[rest])
        else:
            yield module

    def _parse(self, name: str) -> _Parsed:
        if name not in self._parsed:
            path = self.modules[name]
            package = name if path.stem == "__init__" else name.rpartition(".")[0]
            self._parsed[name] = _parse(path, package)
        return self._parsed[name]


def _packages_above(module: str) -> Iterator[str]:
    """Yield the packages that contain a module, whose ``__init__`` runs before it does."""
    parts = module.split(".")
    yield from (".".join(parts[:count]) for count in range(1, len(parts)))


def _parse(path: Path, package: str) -> _Parsed:
    """Read the names that a file imports and the strings that may name other files."""
    tree = ast.parse(path.read_bytes())
    imported: dict[str, str] = {}  # full names, by their names in this file
    strings: set[str] = set()
    names: set[str] = set()
    used: set[str] = set()
    attributes: set[tuple[str, str]] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if not _is_ours(alias.name):
                    continue
                if alias.asname is None and "." not in alias.name:
                    used.add(alias.name)  # only the attributes that the file uses count
                else:
                    names.add(alias.name)
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            if _is_ours(module):
                found = {alias.asname or alias.name: alias.name for alias in node.names}
                imported |= {here: f"{module}.{there}" for here, there in found.items()}
                names |= {f"{module}.{there}" for there in found.values()}
        elif isinstance(node, ast.Constant) and _DOTTED.fullmatch(str(node.value)):
            strings.add(str(node.value))
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            attributes.add((node.value.id, node.attr))
    names |= {f"{package}.{name}" for package, name in attributes if package in used}
    if path.stem != "__init__":
        return _Parsed(tuple(sorted(names)), tuple(sorted(strings)), {})
    if any(isinstance(node, ast.FunctionDef) and node.name == "__getattr__" for node in tree.body):
        strings = set()  # names of modules that __getattr__ imports on demand
    return _Parsed(tuple(sorted(names)), tuple(sorted(strings)), imported)


def _code_of(path: Path) -> bytes:
    """Return what a file executes: of Python and C++ sources, no comments and no empty lines."""
    source = path.read_bytes()
    if path.suffix in (".cpp", ".h"):
        source = _CPP_COMMENT.sub(b"", source)
    elif path.suffix == ".py":
        source = _without_comments(source.decode()).encode()
    else:
        return source
    return b"\n".join(line.rstrip() for line in source.splitlines() if line.strip())


def _without_comments(source: str) -> str:
    """Cut the comments and docstrings out of Python source."""
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            last = node.end_lineno or node.lineno
            lines[node.lineno - 1 : last] = [""] * (last + 1 - node.lineno)
    return "\n".join(lines)


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in PACKAGES


@cache
def source_tree() -> SourceTree:
    """Return the tree that this module itself belongs to."""
    return SourceTree(Path(__file__).parents[1])


def provenance(module: str) -> dict[str, str]:
    """Return a module's name and the hash of its files, which are recorded with a result of it.

    A module outside of ``PACKAGES`` has no hash.
    """
    tree = source_tree()
    code = {"code": tree.hash_of(module)} if module in tree.modules else {}
    return {"module": module, **code}
