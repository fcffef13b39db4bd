"""Errors for tracers, which cannot take modules that check and repair themselves in Python."""

from typing import NoReturn

import torch
from torch import nn

from holdfast.errors import ConfigError


class EagerModule(nn.Module):
    """A module that ``torch.export`` and TorchScript refuse with an error that says what to do."""

    def check_eager(self) -> None:
        """Raise ConfigError under ``torch.export`` and ``torch.jit.trace``.

        A traced graph would keep the results of the native core's calls as constants.
        """
        if torch.compiler.is_exporting():
            self._refuse("torch.export")
        if torch.jit.is_tracing():  # type: ignore[attr-defined]
            self._refuse("torch.jit.trace")

    def __prepare_scriptable__(self) -> NoReturn:
        self._refuse("torch.jit.script")

    def _refuse(self, tracer: str) -> NoReturn:
        raise ConfigError(
            f"{tracer} cannot take {type(self).__name__} of holdfast.nn, which checks and repairs "
            "itself in Python: leave it outside of what is exported, or export the torch module "
            "that it was made from (holdfast.nn.Linear and holdfast.matmul can be exported, and "
            "stay verified)"
        )
