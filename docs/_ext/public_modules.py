"""Which modules of holdfast are public, and their public names; read, not imported."""

import ast
from pathlib import Path

LIBRARY = Path(__file__).parents[2] / "holdfast"
# The package of the thresholds, whose public names holdfast.thresholds repeats.
REPEATED = {"holdfast.abft.thresholds"}


def public_modules() -> list[str]:
    """List the modules that have public names."""
    packages = [_module(file) for file in LIBRARY.rglob("__init__.py") if _all_of(file)]
    adapters = [file for file in (LIBRARY / "integrations").glob("*.py") if _all_of(file)]
    packages += [f"holdfast.integrations.{file.stem}" for file in adapters]
    submodules = [f"holdfast.{name}" for name in _all_of(LIBRARY / "__init__.py") if _file(name)]
    return sorted({*packages, *submodules} - REPEATED)


def public_names(module: str) -> list[str]:
    """List the public names of a module that are not modules themselves."""
    file = _file(module.removeprefix("holdfast").removeprefix(".").replace(".", "/"))
    names = _all_of(file) if file else []
    # Only the package itself names modules: below, `replay.rerun` is the function of that module.
    return [name for name in names if module != "holdfast" or not _file(name)]


def _file(path: str) -> Path | None:
    """Return the file of a module whose path below the library is given, if there is one."""
    found = (LIBRARY / path / "__init__.py", LIBRARY / f"{path}.py")
    return next((file for file in found if file.is_file()), None)


def _module(file: Path) -> str:
    return ".".join(file.parent.relative_to(LIBRARY.parent).parts)


def _all_of(file: Path) -> list[str]:
    for node in ast.parse(file.read_text()).body:
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        if [getattr(target, "id", "") for target in targets] == ["__all__"]:
            return list(ast.literal_eval(node.value))  # type: ignore[attr-defined]
    return []
