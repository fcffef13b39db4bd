"""Messages between shadow replicas: what was changed on its way is not read."""

import pytest
import torch

from holdfast.replay.units import Channel


def test_a_message_that_was_changed_on_its_way_is_not_unpickled() -> None:
    channel = Channel.__new__(Channel)  # without a process group
    channel.device = torch.device("cpu")
    value = {"batch": (torch.arange(5), "text"), "step": 3}
    packed = channel._packed(value)
    assert torch.equal(channel._unpacked(packed)["batch"][0], value["batch"][0])  # type: ignore[index]
    for place in (0, 20, -1):
        changed = packed.clone()
        changed[place] ^= 1
        with pytest.raises(RuntimeError, match="changed between two ranks"):
            channel._unpacked(changed)
