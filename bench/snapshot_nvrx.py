"""The state that NVRx's local checkpoints hold, for tensors on CPU; its own takes CUDA's only.

A module of its own, because NVRx pickles the class by its name. Only its environment imports this.
"""

from typing import Any

from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict


class HostState(BasicTensorAwareStateDict):
    """A state dict whose tensors are saved where they are."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state_dict, self._is_hollow = state, False

    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        """Leave the tensors on CPU."""
