"""Blocks of `{public-names}`: each documents the public names of one module, and none else.

A name is public if a public module has it in `__all__`. The build fails if one has no entry.
"""

import ast
import importlib
import importlib.util
import inspect
import re
import types
from typing import Any

from docutils import nodes
from public_modules import public_modules, public_names
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.ext.autodoc.mock import mock
from sphinx.util import logging

BLOCK = re.compile(r"^```\{public-names\} (\S+)\n```$", re.MULTILINE)
FRAMEWORKS = ("transformers", "lightning", "accelerate", "torchtitan")
DOCUMENT = re.compile(r"(?:``)?docs/(?!bug_tests)(\w+)\.md(?:``)?")
log = logging.getLogger(__name__)


def loaded_module(name: str) -> types.ModuleType:
    """Import a module, with stand-ins for the frameworks that are not installed."""
    with mock(missing_frameworks()):
        return importlib.import_module(name)


def missing_frameworks() -> list[str]:
    """Name the training frameworks with an adapter that are not installed."""
    return [name for name in FRAMEWORKS if importlib.util.find_spec(name) is None]


def _kind(value: object) -> str:
    if inspect.isclass(value):
        return "autoexception" if issubclass(value, BaseException) else "autoclass"
    return "autofunction" if callable(value) else "autodata"


def _entries(block: re.Match[str]) -> str:
    """Ask autodoc for each public name, in reStructuredText."""
    module = block[1]
    loaded = loaded_module(module)
    lines = ["```{eval-rst}", f".. py:currentmodule:: {module}", ""]
    for name in sorted(
        public_names(module), key=lambda n: _kind(getattr(loaded, n)) == "autoexception"
    ):  # errors last
        lines += [f".. {_kind(getattr(loaded, name))}:: {module}.{name}", ""]
    return "\n".join([*lines, "```"])


def _homes() -> dict[str, str]:
    """Map where each public object is defined to the name that the site documents."""
    homes = {}
    for module in public_modules():
        loaded = loaded_module(module)
        for name in public_names(module):
            value = getattr(loaded, name)
            if hasattr(value, "__qualname__"):
                homes[f"{value.__module__}.{value.__qualname__}"] = f"{module}.{name}"
    return homes


def _expand(app: Sphinx, docname: str, source: list[str]) -> None:
    source[0] = BLOCK.sub(_entries, source[0])


def _resolve(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, content: nodes.TextElement
) -> nodes.reference | None:
    """Resolve a reference to where an object is defined by its public name."""
    target = str(node.get("reftarget", ""))
    objects = env.domains.python_domain.objects
    homes = env.holdfast_homes = getattr(env, "holdfast_homes", None) or _homes()  # type: ignore[attr-defined]
    short = [name for name in objects if name.rpartition(".")[2] == target]
    for name in (homes.get(target), *(short if len(short) == 1 else ())):
        if name in objects:
            entry = objects[name]
            uri = app.builder.get_relative_uri(node["refdoc"], entry.docname)
            return nodes.reference(
                "", "", content, internal=True, refuri=f"{uri}#{entry.node_id}", reftitle=name
            )
    return None


def _comment(module: str, name: str) -> str:
    """Read the comment above the assignment of a name, where the name is imported from."""
    source = inspect.getsource(loaded_module(module))
    lines = source.splitlines()
    for node in ast.parse(source).body:
        if isinstance(node, ast.ImportFrom) and name in [alias.name for alias in node.names]:
            return _comment(str(node.module), name)
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        if [getattr(target, "id", "") for target in targets] == [name]:
            first = node.lineno - 1
            while lines[first - 1].startswith("# "):
                first -= 1
            return " ".join(line.removeprefix("# ") for line in lines[first : node.lineno - 1])
    return ""


def _docstring(
    app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """Take a constant's comment for its docstring, and bars for what they are: |D| is no markup."""
    if what == "data":
        comment = _comment(*name.rpartition(".")[::2])
        lines[:] = [comment]
        if not comment:
            log.warning("the constant %s has no comment above it that says what it is", name)
    for number, line in enumerate(lines):
        line = DOCUMENT.sub(r":doc:`/\1`", line)
        parts = line.split("``")
        parts[::2] = [part.replace("|", r"\|") for part in parts[::2]]
        lines[number] = "``".join(parts)


def _missing(app: Sphinx, env: BuildEnvironment) -> None:
    """Warn of each public name that no page documents: `make docs` takes warnings for errors."""
    documented = env.domains.python_domain.objects
    for module in public_modules():
        for name in public_names(module):
            if f"{module}.{name}" not in documented:
                log.warning("the public name %s.%s has no entry in docs/api", module, name)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the expansion of the blocks and the check that no name is left out."""
    app.connect("source-read", _expand)
    app.connect("autodoc-process-docstring", _docstring)
    app.connect("missing-reference", _resolve)
    app.connect("env-check-consistency", _missing)
    return {"parallel_read_safe": True}
