"""Names of a package that are imported when they are first used, and what is done after an import.

So ``import holdfast``, ``holdfast events`` and ``holdfast --help`` do not wait for torch, and
``protect`` does not wait for Inductor.
"""

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType


def on_first_use(package: str, homes: Mapping[str, str]) -> Callable[[str], object]:
    """Make the ``__getattr__`` of a package that imports some of its names on first use.

    Args:
        package: Name of the package.
        homes: The module of each name; that of a module is the module itself.
    """

    def load(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(homes[name])
        value = module if homes[name] == f"{package}.{name}" else getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    return load


class AfterImport(MetaPathFinder):
    """Calls a function after each import of a module, whoever imports it, once ``wait`` was called.

    Attributes:
        name: The full name of the module.
        then: The function. It may be called again at any time, and must not raise, as an error
            would end the import.
    """

    def __init__(self, name: str, then: Callable[[], object]) -> None:
        self.name, self.then = name, then
        self._asking = threading.local()

    def wait(self) -> None:
        """Call the function when the module is imported; at once if it has been."""
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        if self.name in sys.modules:
            import_module(self.name)  # which waits for another thread that is importing it
            self.then()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Have the function called after the module's code has run; other modules are not found."""
        if name != self.name or getattr(self._asking, "others", False):
            return None
        self._asking.others = True
        try:
            spec = find_spec(name)
        finally:
            self._asking.others = False
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                self.then()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
