"""Whether a framework is installed, in a version with which its adapter was tested."""

import re
from importlib import import_module
from importlib.metadata import version

from holdfast.errors import ConfigError


def require(package: str, tested: str) -> None:
    """Check that a framework can be imported, and that its version is one of those tested.

    Args:
        package: Name under which it is imported and installed.
        tested: First numbers of the version, such as ``"5.23"``. An adapter uses private names of
            its framework, which the next version may change.

    Raises:
        ImportError: It is not installed, or cannot be imported.
        ConfigError: It has another version.
    """
    try:
        import_module(package)
    except ImportError as error:
        raise ImportError(
            f"holdfast.integrations.{package} needs {package} {tested} ({error}): "
            f"pip install '{package}=={tested}.*'"
        ) from error
    found = version(package)
    if not re.match(rf"{re.escape(tested)}(\.|$)", found):
        raise ConfigError(
            f"{package} {found} is installed, and holdfast's adapter was tested with {tested}: "
            f"pip install '{package}=={tested}.*', or use a Guard in a loop of your own "
            "(docs/guard.md)"
        )
