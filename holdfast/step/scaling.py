"""The scale of losses in mixed precision, and how long its overflows are left to the scaler."""

import torch
from torch.amp import GradScaler

MAX_SKIPS = 20  # steps in a row that a scaler may skip: it has divided its scale by a million


class LossScale:
    """The scale of a ``GradScaler``, or 1 without one.

    A gradient that is not finite although its pass was repeated is part of the method: the scaler
    skips the step and lowers its scale. After ``MAX_SKIPS`` such steps in a row it is judged as it
    is without a scaler.

    Attributes:
        scaler: The scaler; None if there is none, or if it is disabled.
    """

    def __init__(self, scaler: GradScaler | None) -> None:
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._skips = 0

    @property
    def skips_overflows(self) -> bool:
        """True if a gradient that is not finite is left to the scaler."""
        return self.scaler is not None and self._skips < MAX_SKIPS

    @property
    def skipped(self) -> bool:
        """True if the latest step was skipped."""
        return self.scaler is not None and self._skips > 0

    def value(self) -> torch.Tensor:
        """Return the scale that is in the gradients of the present step, where the scaler has it.

        To read it apart from loss and norm would make the host wait for the device once more.
        """
        if self.scaler is None:
            return torch.tensor(1.0)
        scale = self.scaler._scale  # None if nothing was scaled yet
        return torch.tensor(self.scaler.get_scale()) if scale is None else scale

    def rolled_back(self) -> None:
        """Count from the snapshot that was restored: there is none of a step that was skipped."""
        self._skips = 0

    def accept(self, *, overflowed: bool) -> None:
        """Count a step that ended, and whether a gradient of any rank was not finite."""
        self._skips = self._skips + 1 if overflowed else 0
