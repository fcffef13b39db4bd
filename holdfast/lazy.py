"""Names of a package that are imported when they are first used.

So ``import holdfast``, ``holdfast events`` and ``holdfast --help`` do not wait for torch.
"""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module


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
