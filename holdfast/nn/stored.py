"""The base of modules whose data are stored with checksums, and may be restored from a source."""

import copy
from typing import Any, Self

from holdfast.abft.source import Source
from holdfast.nn.eager import EagerModule


class StoredModule(EagerModule):
    """Module whose data are kept by an object that verifies and repairs them."""

    _source: Source | None = None

    def register_source(self, source: Source | None) -> None:
        """Set the function that returns a row of the data by its number, as floats or as stored.

        It restores what checksums cannot repair. It is not part of the state dict or of a pickle.
        """
        self._source = source
        self._connect()

    def _connect(self) -> None:
        """Give the source to the object that keeps the data."""
        raise NotImplementedError

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy the data; the copy shares the source."""
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        twin.register_source(self._source)
        return twin

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the source, which is to be registered after unpickling."""
        return {name: value for name, value in self.__dict__.items() if name != "_source"}


def unsupported(method: str, wanted: str, given: object, remedy: str) -> TypeError:
    """Return the error for a module that cannot be converted, with what to give instead."""
    kind = type(given)
    return TypeError(f"{method} takes {wanted}, not {kind.__module__}.{kind.__name__}: {remedy}")
