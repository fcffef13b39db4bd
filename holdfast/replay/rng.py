"""The random state of a process: Python, NumPy, torch on CPU and, if in use, CUDA."""

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class RngState:
    """A saved random state; ``restore()`` puts it back as often as wanted."""

    python: Any
    numpy: Any
    torch_cpu: torch.Tensor
    cuda: tuple[torch.Tensor, ...]

    @classmethod
    def capture(cls) -> "RngState":
        """Save the present random state of all generators."""
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        return cls(
            random.getstate(), np.random.get_state(), torch.random.get_rng_state(), tuple(cuda)
        )

    def restore(self) -> None:
        """Set all generators to the saved state."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.random.set_rng_state(self.torch_cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(list(self.cuda))
